"""q-FedAvg: weight clients by a power of their loss, for an accuracy that varies less."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from pydantic import Field

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step
from feddg_bench.core.client import Client
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.round_updates import mean_model

LEAST_LOSS = 1e-10
"""Added to each loss, as in the authors' code: F^(q-1) is infinite at F = 0 if q < 1."""


class QFFLSettings(MethodSettings):
    """How unequal losses may be, and the step size."""

    labels: ClassVar[tuple[str, ...]] = ("q",)

    q: float = Field(1.0, ge=0)
    """Weight of large losses; 0 is FedAvg. The paper tries 0.001 to 15."""
    lipschitz: float | None = Field(None, gt=0)
    """L, the Lipschitz constant of the gradients at q = 0; by default 1 / ``train.lr``."""


class QFFL(Method):
    """q-FedAvg (Li et al., ICLR 2020, arXiv 1905.10497, Algorithm 2) for q-FFL, Equation 2.

    The objective is sum_k p_k F_k(w)^(q+1) / (q+1). Client k measures F_k(w), its mean loss under
    the received model w, and trains to w_k. With Delta w_k = L (w - w_k) in place of a gradient,
    Delta_k = F_k^q Delta w_k and h_k = q F_k^(q-1) ||Delta w_k||^2 + L F_k^q, an estimate of the
    local Lipschitz constant of the objective. The server takes w - sum_k Delta_k / sum_k h_k, both
    sums weighted by p_k: no step size has to be tuned for each q.

    F_k is measured in evaluation mode on the training images without augmentation, in a pass of its
    own before training. Buffers are averaged with shares p_k.
    """

    Settings = QFFLSettings
    settings: QFFLSettings
    tasks = ("classification", "regression")
    title = "q-FFL"
    citation = (
        "Tian Li, Maziar Sanjabi, Ahmad Beirami, Virginia Smith: Fair Resource Allocation in "
        "Federated Learning, ICLR 2020, arXiv 1905.10497"
    )
    uplink: ClassVar = {"fit": {"weights": "model", "loss": "float"}}
    singles = "gives each client a weight of its own"

    # ------------------------------------------------------------------------ client half

    def fit(self, client: Client) -> LocalUpdate:
        loss = self.mean_loss(client)
        return LocalUpdate(super().fit(client).weights, {"loss": loss})

    @torch.no_grad()
    def mean_loss(self, client: Client) -> float:
        """Return F_k(w), the mean loss over the client's training images."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        self.eval()
        for images, labels in client.batches(train=False):
            with client.fabric.autocast():
                outputs = self(images)
            total += self.task.loss(outputs.float(), labels, "none").double().sum()
            count += len(labels)
        self.train()
        return float(total) / max(count, 1)

    # ------------------------------------------------------------------------ server half

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        w, q = server.weights, self.settings.q
        lipschitz = self.settings.lipschitz or 1 / self.train_settings.lr
        weighted = h = 0.0

        def powered(reply: Reply[LocalUpdate]) -> float:
            nonlocal weighted, h
            p, loss = server.share(reply), reply.value.extra["loss"] + LEAST_LOSS
            w_k = reply.value.weights
            moves = [(w[n].double() - w_k[n].double()).square().sum() for n in self.trainable]
            squared_norm = lipschitz**2 * float(torch.stack(moves).sum())
            h += p * lipschitz_constant(loss, squared_norm, q=q, lipschitz=lipschitz)
            share = float(p * loss**q)
            weighted += share
            return share

        # -sum_k Delta_k = L (sum_k p_k F_k^q) (mean - w), with shares p_k F_k^q in the mean.
        mean = mean_model(server, updates, self.trainable, share=powered)
        step = lipschitz * weighted / h
        return server_step(w, mean, server.federation.server_lr * step, self.trainable)


def lipschitz_constant(loss: float, squared_norm: float, *, q: float, lipschitz: float) -> float:
    """Return h_k = q F_k^(q-1) ||Delta w_k||^2 + L F_k^q (Algorithm 2, line 6).

    Args:
        loss: F_k > 0.
        squared_norm: ||Delta w_k||^2.
        q: Exponent of the objective.
        lipschitz: L.
    """
    return float(q * loss ** (q - 1) * squared_norm + lipschitz * loss**q)


DEVIATIONS = (
    "The paper samples clients with probability p_k and sums without weights. Clients are sampled "
    "uniformly here, so p_k weights both sums (`federation.weighting`), and q = 0 is FedAvg.",
    "The authors' code measures the loss on the training images without dropping or augmenting "
    "any. So do we.",
    "L is 1 / learning rate, as in the paper and its code, which use plain SGD without momentum. "
    "With another optimiser this is a scale, not an estimate: set `lipschitz`.",
    "The paper has no batch normalisation. We average its buffers as FedAvg does.",
)
"""Where published code differs from its paper, and what this module does."""
