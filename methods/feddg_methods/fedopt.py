"""FedOpt: an adaptive optimiser at the server, with the mean update as its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step, streaming_mean
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server

Moment = Callable[[Tensor, Tensor, float], Tensor]
"""v_t from v_(t-1), Delta_t^2 and beta_2."""


def adagrad(v: Tensor, square: Tensor, beta2: float) -> Tensor:  # noqa: ARG001 - one form for all
    """v_t = v_(t-1) + Delta_t^2."""
    return v + square


def yogi(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    """v_t = v_(t-1) - (1 - beta_2) Delta_t^2 sign(v_(t-1) - Delta_t^2)."""
    return v - (1 - beta2) * square * (v - square).sign()


def adam(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    """v_t = beta_2 v_(t-1) + (1 - beta_2) Delta_t^2."""
    return beta2 * v + (1 - beta2) * square


MOMENTS: Mapping[str, Moment] = {"adagrad": adagrad, "yogi": yogi, "adam": adam}
"""Second moments by ``optimizer``."""


class FedOptSettings(MethodSettings):
    """The server's optimiser."""

    labels: ClassVar[tuple[str, ...]] = ("optimizer",)
    preset_of: ClassVar[str] = "optimizer"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "momentum": {"eta": 1.0},
        "adagrad": {"beta1": 0.0},
    }

    optimizer: Literal["adam", "yogi", "adagrad", "momentum"] = "adam"
    """FedAdam, FedYogi, FedAdagrad, or FedAvgM (Hsu et al., arXiv 1909.06335)."""
    eta: float = Field(0.01, gt=0)
    """Step size of the server, 1 for ``momentum``; ``federation.server_lr`` multiplies it."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment; 0 for ``adagrad``."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the second moment of ``adam`` and ``yogi``."""
    tau: float = Field(1e-3, gt=0)
    """Degree of adaptivity: small values adapt more. v_t begins at tau^2."""


class FedOpt(Method):
    """FedOpt (Reddi et al., ICLR 2021, arXiv 2003.00295, Algorithm 2).

    Clients train as in FedAvg. With Delta_t the mean of their updates, the server takes
    m_t = beta_1 m_(t-1) + (1 - beta_1) Delta_t, v_t by `MOMENTS`, and
    x_(t+1) = x_t + eta m_t / (sqrt(v_t) + tau). With ``momentum`` it takes
    m_t = beta_1 m_(t-1) + Delta_t and x_(t+1) = x_t + eta m_t (Hsu et al., Section 4.3).

    Buffers are averaged as in FedAvg.
    """

    Settings = FedOptSettings
    settings: FedOptSettings
    tasks = ("classification", "regression")
    title = "FedOpt"
    citation = (
        "Sashank Reddi, Zachary Charles, Manzil Zaheer, Zachary Garrett, Keith Rush, Jakub "
        "Konečný, Sanjiv Kumar, H. Brendan McMahan: Adaptive Federated Optimization, ICLR 2021, "
        "arXiv 2003.00295"
    )
    singles = ""

    def prepare(self, server: Server) -> None:
        start = {n: server.weights[n] for n in self.trainable}
        server.memory["m"] = {n: torch.zeros_like(x) for n, x in start.items()}
        if self.settings.optimizer in MOMENTS:
            server.memory["v"] = {
                n: torch.full_like(x, self.settings.tau**2) for n, x in start.items()
            }

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        s, x = self.settings, server.weights
        new = streaming_mean(server.with_shares(updates))
        delta = {n: new[n] - x[n] for n in self.trainable}
        fresh = 1.0 if s.optimizer == "momentum" else 1 - s.beta1
        m = {n: s.beta1 * server.memory["m"][n] + fresh * delta[n] for n in delta}
        server.memory["m"] = m
        if s.optimizer == "momentum":
            new |= {n: x[n] + s.eta * m[n] for n in m}
        else:
            moment, before = MOMENTS[s.optimizer], server.memory["v"]
            v = {n: moment(before[n], delta[n] ** 2, s.beta2) for n in delta}
            server.memory["v"] = v
            new |= {n: x[n] + s.eta * m[n] / (v[n].sqrt() + s.tau) for n in m}
        return server_step(x, new, server.federation.server_lr, self.trainable)


DEVIATIONS = (
    "Versions of the paper differ in whether v_t sees Delta_t or the first moment. We follow the "
    "last version and Flower: it sees Delta_t.",
    "Flower begins v_t at 0 and corrects FedAdam for its bias. We begin it at tau^2, as the paper "
    "does, which has no correction.",
    "Algorithm 2 averages updates equally. We weight them by `federation.weighting`.",
    "The paper tunes eta for each data set and optimiser. Our defaults are a start (`eta`).",
)
"""Where published code differs from its paper, and what this module does."""
