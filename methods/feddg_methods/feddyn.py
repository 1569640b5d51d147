"""FedDyn: a regulariser that changes each round aligns the clients' minima with the server's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch.optim import Optimizer

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step
from feddg_bench.core.client import Client
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.round_updates import check_share, mean_model, one_each


class FedDynSettings(MethodSettings):
    """Strength of the regulariser, and the evaluated model."""

    labels: ClassVar[tuple[str, ...]] = ("evaluation",)

    alpha: float = Field(0.01, gt=0)
    """Weight of the quadratic term; the paper tries 0.1, 0.01 and 0.001."""
    evaluation: Literal["server", "mean"] = "server"
    """Evaluated model: theta^t, which Algorithm 1 returns, or the mean of the round's clients,
    which the authors' code evaluates."""


class FedDyn(Method):
    """FedDyn (Acar et al., ICLR 2021, arXiv 2111.04263, Algorithm 1).

    Client k minimises L_k(theta) - <g_k, theta> + alpha_k / 2 ||theta - theta^(t-1)||^2 and then
    sets g_k <- g_k - alpha_k (theta_k - theta^(t-1)), which is the gradient of L_k at theta_k if
    theta_k is the minimum. The server adds up the moves, h <- h - alpha / m sum_k (theta_k -
    theta^(t-1)) over the round's clients, with m the number of all clients, and sends
    theta^t = mean_k theta_k - h / alpha. If all converge, the g_k cancel, so that theta minimises
    the mean of the losses.

    g_k stays with the client and h with the server: messages are FedAvg's. Both begin at 0. The
    term affects trainable parameters only; buffers are averaged as in FedAvg.

    The mean over clients is not weighted. With ``federation.weighting=samples`` alpha_k is alpha
    divided by n_k over the mean image count, as in the authors' code: then theta minimises the mean
    over images. With ``uniform``, alpha_k = alpha.
    """

    Settings = FedDynSettings
    settings: FedDynSettings
    group = "local training"
    tasks = ("classification", "regression")
    title = "FedDyn"
    citation = (
        "Acar, Zhao, Matas Navarro, Mattina, Whatmough and Saligrama: Federated Learning Based on "
        "Dynamic Regularization, ICLR 2021, arXiv 2111.04263"
    )
    uplink: ClassVar = {"fit": ("weights",), "count": ()}
    downlink = ("mean_count",)
    singles = ""

    def build(self) -> None:
        self.alpha = 0.0
        self.gradient: Weights = {}

    # ------------------------------------------------------------------------ client half

    def count(self, client: Client) -> Payload:
        """Return nothing: the reply itself holds the client's image count."""
        return {}

    def fit(self, client: Client) -> LocalUpdate:
        device = self.classifier.weight.device
        n_k = len(client.data)
        alpha = self.settings.alpha * client.broadcast.get("mean_count", n_k) / n_k
        kept, received = client.memory.get("gradient"), client.weights
        g = {
            n: kept[n].to(device) if kept else torch.zeros_like(received[n]) for n in self.trainable
        }
        with self.temporarily(alpha=alpha, gradient=g):
            update = super().fit(client)
        theta = update.weights
        client.memory["gradient"] = {n: g[n] - alpha * (theta[n] - received[n]) for n in g}
        return update

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.alone:
            return
        received = self.client.weights
        for name, theta in self.named_parameters():
            if theta.grad is not None and name in self.gradient:
                theta.grad += self.alpha * (theta.detach() - received[name]) - self.gradient[name]

    # ------------------------------------------------------------------------ server half

    def prepare(self, server: Server) -> None:
        check_share(server, one_each)
        server.memory["h"] = {n: torch.zeros_like(server.weights[n]) for n in self.trainable}
        if server.federation.weighting == "samples":
            asked = server.ask(self.count, everyone=True, weights=False)
            images = sum(reply.num_examples for reply in asked)
            server.broadcast["mean_count"] = images / len(server.clients)

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        alpha, m, asked = self.settings.alpha, len(server.clients), 0

        def equally(reply: Reply[LocalUpdate]) -> float:
            nonlocal asked
            asked += reply.clients
            return float(reply.clients)

        old = server.weights
        new = mean_model(server, updates, self.trainable, share=equally)
        if self.settings.evaluation == "mean":
            server.memory["mean"] = {n: new[n] for n in self.trainable}
        h = server.memory["h"]
        h = {n: h[n] - alpha * asked / m * (new[n] - old[n]) for n in self.trainable}
        server.memory["h"] = h
        new |= {n: new[n] - h[n] / alpha for n in self.trainable}
        return server_step(old, new, server.federation.server_lr, self.trainable)

    def global_model(self, server: Server) -> Weights:
        return {**server.weights, **server.memory.get("mean", {})}


DEVIATIONS = (
    "The authors' code evaluates the mean of the round's clients, and that of all clients, but "
    "never theta^t, which Algorithm 1 returns. Our default is theta^t (`evaluation`).",
    "The authors' code divides alpha by a client's image count over the mean count. The paper has "
    "one alpha, because its objective weights clients equally. `federation.weighting` chooses.",
    "Weight decay is that of the optimiser (`train.weight_decay`), on top of the regulariser. The "
    "authors' code adds both factors up in the optimiser, with the same gradient.",
    "The paper assumes that clients find the minimum of their objective. They take the recipe's "
    "local epochs here, as in the authors' code.",
    "The authors' networks have no batch normalisation. We average its buffers as FedAvg does.",
)
"""Where published code differs from its paper, and what this module does."""
