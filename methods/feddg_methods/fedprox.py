"""FedProx: keep local models near the global one."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.method import Method


class FedProxSettings(MethodSettings):
    """Strength and form of the proximal term."""

    mu: float = Field(0.01, ge=0)
    """Weight of the proximal term, mu in the paper; published values run from 0.001 to 1."""
    norm: Literal["squared", "l2"] = "squared"
    """``l2`` is FedDG_Benchmark's form: the norm of each tensor, not squared."""


class FedProx(Method):
    """FedProx (Li et al., MLSys 2020, arXiv 1812.06127, Algorithm 2 and Equation 2).

    Each client minimises its loss plus (mu / 2) ||theta - w||^2, with w the global parameters as
    received. The server is FedAvg's. The logged loss excludes the proximal term.
    """

    Settings = FedProxSettings
    settings: FedProxSettings
    group = "local training"
    tasks = ("classification", "regression")
    title = "FedProx"
    citation = (
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith: Federated Optimization in Heterogeneous "
        "Networks, MLSys 2020, arXiv 1812.06127"
    )

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.alone:
            return
        received = self.client.weights
        for name, theta in self.named_parameters():
            if theta.grad is not None and name in received:
                theta.grad += proximal_gradient(
                    theta.detach(), received[name], mu=self.settings.mu, norm=self.settings.norm
                )


def proximal_gradient(theta: Tensor, w: Tensor, *, mu: float, norm: str = "squared") -> Tensor:
    """Return the gradient of the proximal term of one tensor, in its shape.

    The term is (mu / 2) ||theta - w||^2; with ``norm="l2"``, (mu / 2) ||theta - w||.
    """
    if norm == "squared":
        return mu * (theta - w)
    distance = (theta - w).norm()
    return 0.5 * mu * (theta - w) / distance if distance > 0 else torch.zeros_like(theta)


DEVIATIONS = (
    "FedDG_Benchmark takes the norm of each tensor's distance without squaring it, so the pull is"
    " as strong near the global model as far from it. We square it (`norm`).",
    "FedDG-GA's code adds the proximal gradient to the momentum buffer, where it piles up. We add"
    " it to the gradient before momentum or Adam see it.",
)
"""Where published code differs from its paper, and what this module does."""
