"""FedNova: average normalised updates, so that clients with more steps do not count more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from feddg_bench.core.aggregation import server_step
from feddg_bench.core.client import Client
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.server import Server
from feddg_methods.shared.round_updates import mean_model
from feddg_methods.shared.step_lengths import MeasuredSGD


class FedNova(MeasuredSGD):
    """FedNova (Wang et al., NeurIPS 2020, arXiv 2007.07481, Equations 6 and 12).

    A client's update is Delta_i = -eta G_i a_i, with its gradients G_i and the weights a_i with
    which they entered the model: all 1 for plain SGD, so that ||a_i||_1 = tau_i, the number of its
    steps. The server takes x + tau_eff sum_i p_i Delta_i / ||a_i||_1 with
    tau_eff = sum_i p_i ||a_i||_1. FedAvg, in contrast, weights a client's mean gradient by
    p_i tau_i, and so minimises another mean of the losses if clients take unequally many steps. If
    all take equally many, FedNova is FedAvg.

    A learning rate that changes within a round is part of a_i. Clients send ||a_i||_1 with their
    weights. Buffers are averaged with shares p_i.
    """

    group = "local training"
    tasks = ("classification", "regression")
    title = "FedNova"
    measured = "fednova"
    citation = (
        "Wang, Liu, Liang, Joshi and Poor: Tackling the Objective Inconsistency Problem in "
        "Heterogeneous Federated Optimization, NeurIPS 2020, arXiv 2007.07481"
    )
    uplink: ClassVar = {"fit": {"weights": "model", "length": "float"}}
    singles = "gives each client a weight of its own"

    def fit(self, client: Client) -> LocalUpdate:
        update, length = self.fit_measured(client)
        return LocalUpdate(update.weights, {"length": length})

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        p_sum = p_length = p_inverse = 0.0

        def normalised(reply: Reply[LocalUpdate]) -> float:
            nonlocal p_sum, p_length, p_inverse
            p, length = server.share(reply), reply.value.extra["length"]
            inverse = p / (length or 1.0)  # a client without a step did not move: any share will do
            p_sum, p_length, p_inverse = p_sum + p, p_length + p * length, p_inverse + inverse
            return inverse

        # sum_i p_i Delta_i / l_i = (sum_i p_i / l_i) (mean - x), with shares p_i / l_i in the mean.
        mean = mean_model(server, updates, self.trainable, share=normalised)
        step = (p_length / p_sum) * (p_inverse / p_sum)
        return server_step(server.weights, mean, server.federation.server_lr * step, self.trainable)


DEVIATIONS = (
    "The authors' code also has a server momentum and a proximal term. We have neither; FedNova's "
    "own momentum of the clients is `train.momentum`, which a_i accounts for.",
    "The authors' code sets the momentum buffers to 0 after each round, as we do by default "
    "(`train.optimizer_state`). If they persist, a_i accounts for what they hold.",
    "In the authors' code tau_eff with a proximal term is the mean number of steps. Without the "
    "term it is the mean of ||a_i||_1, as here.",
    "The paper does not say how buffers of batch normalisation are averaged. We take FedAvg's "
    "shares for them.",
)
"""Where published code differs from its paper, and what this module does."""
