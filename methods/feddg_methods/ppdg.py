"""PPDG: move conflicting updates towards each other before they are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.choices import choose
from feddg_methods.shared.round_updates import (
    average_updates,
    combine_updates,
    gram_matrix,
    image_count,
    one_each,
    permutation,
)

Reading = Literal["running", "algorithm1", "eq5", "pcgrad_style"]


class PPDGSettings(MethodSettings):
    """Strength and variant of the alignment."""

    labels: ClassVar[tuple[str, ...]] = ("reading", "only_conflicts", "granularity")

    strength: float = Field(0.1, ge=0, lt=0.5)
    """lambda; the default is the paper's for Camelyon17 and PovertyMap. 0.5 would replace an update
    by the other, and the paper's theorem requires less. 0 is federated averaging with these
    ``weights``."""
    reading: Reading = "running"
    """``running``: both updates as modified so far, as in the proof (Eq. 9, 10). ``algorithm1``:
    line 6 as printed, each step starts from the original. ``eq5``: originals only, so only the last
    conflict counts. ``pcgrad_style``: the modified update against the others' originals."""
    only_conflicts: bool = True
    """False aligns all pairs (the ablation of Table 6)."""
    order: Literal["random", "ascending"] = "random"
    """Order in which clients are visited: one permutation per round (Algorithm 1), or by name."""
    granularity: Literal["model", "tensor"] = "model"
    """Conflicts of updates as whole vectors, or in each parameter tensor separately."""
    weights: Literal["uniform", "samples"] = "uniform"
    """Aligned updates count equally (Algorithm 1, line 10) or by image counts (Eq. 1)."""


class PPDG(Method):
    """PPDG (Tian et al., TKDE 2024, arXiv 2105.08511, Algorithm 1 and Equations 5 to 10).

    Clients train as in FedAvg. The server visits their updates Delta_i in random order; where
    the inner product of h_i, initially Delta_i, with another h_j is negative,
    h_i <- h_i - 2 lambda (h_i - h_j). The global parameters move by the mean of the h_i. Running
    statistics are averaged. The paper's lambda by data set:

    Camelyon17 0.1, PovertyMap 0.1, FMoW 0.05, RotatedMNIST 0.001, TerraIncognita 0.2.
    """

    Settings = PPDGSettings
    settings: PPDGSettings
    singles = "compares the updates of every two clients"
    tasks = ("classification", "regression")
    title = "PPDG"
    citation: ClassVar[str] = (
        "Tian, Li, Wang and Wang: Privacy-Preserving Constrained Domain Generalization via "
        "Gradient Alignment, TKDE 2024, arXiv 2105.08511"
    )

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        s = self.settings
        share = one_each if s.weights == "uniform" else image_count
        if s.strength == 0:
            return average_updates(server, updates, self.trainable, share=share)

        def aligned_mean(gram: Tensor, p: Tensor) -> Tensor:
            stream = torch_generator(server.seed, "ppdg", server.round)
            order = torch.randperm(len(gram), generator=stream) if s.order == "random" else None
            rows = align_coefficients(
                gram,
                strength=s.strength,
                reading=s.reading,
                order=order,
                only_conflicts=s.only_conflicts,
            )
            return p @ rows

        return combine_updates(
            server,
            updates,
            self.trainable,
            aligned_mean,
            share=share,
            by_tensor=s.granularity == "tensor",
        )


def align(
    deltas: Tensor,
    *,
    strength: float,
    reading: Reading = "running",
    order: Sequence[int] | Tensor | None = None,
    only_conflicts: bool = True,
) -> Tensor:
    """Return the mean of the updates after moving them towards those that they conflict with.

    Clients i are visited in order; each is compared with all others j in the same order, and where
    <h_i, h_j> < 0, h_i <- h_i - 2 lambda (h_i - h_j).

    The paper's Algorithm 1, Eq. 5 and its proof (Eq. 9, 10) give different rules. ``running`` works
    on the copies modified so far: the only reading that agrees with the proof for two clients and
    stays a convex combination of the inputs for more. ``algorithm1`` (line 6 as printed) starts
    each step from the original, ``eq5`` uses originals only, so that only the last conflict counts,
    and ``pcgrad_style`` compares with the others' originals.

    Args:
        deltas: Updates Delta_k, [K, P].
        strength: lambda, in [0, 0.5).
        reading: Formula to use.
        order: Permutation of the clients, [K]; ascending if not given.
        only_conflicts: False aligns all pairs (the paper's ablation).

    Returns:
        Update, [P].

    Raises:
        SettingsError: If the reading is unknown, the strength is out of range or ``order`` is not a
            permutation.
    """
    rows = align_coefficients(
        gram_matrix(deltas),
        strength=strength,
        reading=reading,
        order=order,
        only_conflicts=only_conflicts,
    )
    return rows.mean(dim=0).to(deltas) @ deltas


def align_coefficients(
    gram: Tensor,
    *,
    strength: float,
    reading: Reading = "running",
    order: Sequence[int] | Tensor | None = None,
    only_conflicts: bool = True,
) -> Tensor:
    """Return the aligned updates as coefficients of the original ones.

    Args:
        gram: Inner products of the updates, [K, K].
        strength: lambda, in [0, 0.5).
        reading: Formula to use.
        order: Permutation of the clients, [K]; ascending if not given.
        only_conflicts: False aligns all pairs.

    Returns:
        [K, K], float64, on the CPU; row i holds the aligned update of client i.

    Raises:
        SettingsError: As for `align`.
    """
    if not 0 <= strength < 0.5:
        raise SettingsError(
            f"alignment strength {strength} is not in [0, 0.5): "
            f"0.5 would replace an update by the one that it conflicts with"
        )
    products = gram.detach().double().cpu().numpy()
    delta = np.eye(len(products))
    h = delta.copy()
    # Start of a step, and the two updates that it compares.
    readings = {
        "running": (h, h, h),
        "algorithm1": (delta, h, h),
        "eq5": (delta, delta, delta),
        "pcgrad_style": (h, h, delta),
    }
    start, own, other = choose("reading", reading, readings)
    indices = permutation(order, len(products))
    for i in indices:
        for j in indices:
            if i != j and (not only_conflicts or own[i] @ products @ other[j] < 0):
                h[i] = start[i] - 2 * strength * (own[i] - other[j])
    return torch.from_numpy(h)


DEVIATIONS = (
    "There is no public code, and the paper's Algorithm 1, Equation 5 and proof (Equations 9 and "
    "10) give three different rules. We follow the proof: both updates as modified so far "
    "(`reading`).",
    "Equation 1 weights clients by their images, line 10 of Algorithm 1 weights them equally. We "
    "do the latter (`weights`).",
)
"""Where published code differs from its paper, and what this module does."""
