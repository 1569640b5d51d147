"""PCGrad: remove from each update the components that conflict with other updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.choices import reduced
from feddg_methods.shared.round_updates import combine_updates, gram_matrix, one_each, permutation

NO_DIRECTION = 1e-30
"""Squared norm below which an update counts as 0, and others are not projected off it."""


class PCGradSettings(MethodSettings):
    """Combination and order of the projected updates."""

    labels: ClassVar[tuple[str, ...]] = ("reduction",)

    reduction: Literal["mean", "sum"] = "mean"
    """Mean of the projected updates, or their sum as in the paper: K times as long."""
    order: Literal["random", "ascending"] = "random"
    """Order of an update's comparisons with the others: one permutation per round, or by name."""


class PCGrad(Method):
    """PCGrad (Yu et al., NeurIPS 2020, arXiv 2001.06782, Algorithm 1) on client updates.

    The paper combines the gradients of tasks; as a federated rule, it is a baseline in domain
    generalisation papers such as PPDG's. Clients train as in FedAvg. Each update h_i, initially
    Delta_i, is compared with the original Delta_j of the others in turn; where their inner product
    is negative, h_i <- h_i - <h_i, Delta_j> / ||Delta_j||^2 Delta_j. Clients have equal weight.
    Running statistics are averaged.
    """

    Settings = PCGradSettings
    settings: PCGradSettings
    singles = "compares the updates of every two clients"
    tasks = ("classification", "regression")
    title = "PCGrad"
    citation: ClassVar[str] = (
        "Yu, Kumar, Gupta, Levine, Hausman and Finn: Gradient Surgery for Multi-Task Learning, "
        "NeurIPS 2020, arXiv 2001.06782"
    )

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        s = self.settings

        def projected(gram: Tensor, p: Tensor) -> Tensor:
            stream = torch_generator(server.seed, "pcgrad", server.round)
            order = torch.randperm(len(gram), generator=stream) if s.order == "random" else None
            mean = p @ project_coefficients(gram, order=order)
            return mean if s.reduction == "mean" else len(gram) * mean

        return combine_updates(server, updates, self.trainable, projected, share=one_each)


def project_conflicts(
    deltas: Tensor,
    *,
    order: Sequence[int] | Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Return the mean of the updates after projecting off conflicts with others.

    Each update h_i is compared with all other original updates in order; where <h_i, Delta_j> < 0,
    h_i <- h_i - <h_i, Delta_j> / ||Delta_j||^2 Delta_j. The paper sums the h_i; a server step of
    the sum is K times too long, hence the mean.

    Args:
        deltas: Updates Delta_k, [K, P].
        order: Permutation of the clients, [K]; ascending if not given.
        reduction: Mean or sum of the projected updates.

    Returns:
        Update, [P].

    Raises:
        SettingsError: If ``reduction`` is unknown or ``order`` is not a permutation.
    """
    rows = project_coefficients(gram_matrix(deltas), order=order)
    return reduced(rows, reduction).to(deltas) @ deltas


def project_coefficients(gram: Tensor, *, order: Sequence[int] | Tensor | None = None) -> Tensor:
    """Return the projected updates as coefficients of the original ones.

    Args:
        gram: Inner products of the updates, [K, K].
        order: See `project_conflicts`.

    Returns:
        [K, K], float64, on the CPU; row i holds the projected update of client i.

    Raises:
        SettingsError: If ``order`` is not a permutation.
    """
    products = gram.detach().double().cpu().numpy()
    h = np.eye(len(products))
    for j in permutation(order, len(products)):
        if products[j, j] >= NO_DIRECTION:
            conflict = np.minimum(h @ products[:, j], 0)
            conflict[j] = 0  # no update is projected off itself
            h[:, j] -= conflict / products[j, j]
    return torch.from_numpy(h)


DEVIATIONS = (
    "Paper and code sum the projected gradients, which does no harm under Adam. As a server step "
    "the sum is K times too long, so we take the mean (`reduction`).",
)
"""Where published code differs from its paper, and what this module does."""
