"""PPDG: move conflicting updates towards each other before they are averaged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.round_updates import (
    average_updates,
    combine_updates,
    image_count,
    one_each,
)
from feddg_methods.shared.updates import align_coefficients


class PPDGSettings(MethodSettings):
    """Strength and reading of the alignment."""

    labels: ClassVar[tuple[str, ...]] = ("reading", "only_conflicts", "granularity")

    strength: float = Field(0.1, ge=0, lt=0.5)
    """lambda, the paper's for Camelyon17 and PovertyMap; 0.5 would replace an update by the other,
    and the paper's theorem wants less. 0 is federated averaging with these ``weights``."""
    reading: Literal["running", "algorithm1", "eq5", "pcgrad_style"] = "running"
    """``running``: both updates as modified so far, as in the proof (Eq. 9, 10). ``algorithm1``:
    line 6 as printed, each step starts from the original. ``eq5``: originals alone, the last
    conflict counts. ``pcgrad_style``: the modified update against originals of others."""
    only_conflicts: bool = True
    """False aligns all pairs (the ablation of Table 6)."""
    order: Literal["random", "ascending"] = "random"
    """In which order clients are visited: one permutation a round (Algorithm 1), or by name."""
    granularity: Literal["model", "tensor"] = "model"
    """Whether two updates conflict as whole vectors, or in each parameter tensor by itself."""
    weights: Literal["uniform", "samples"] = "uniform"
    """Aligned updates count equally (Algorithm 1, line 10) or by image counts (Eq. 1)."""


class PPDG(Method):
    """PPDG (Tian et al., TKDE 2024, arXiv 2105.08511, Algorithm 1 and Equations 5 to 10).

    Clients train as in FedAvg. The server visits their updates Delta_i in random order; where
    the inner product of h_i, at first Delta_i, with another h_j is negative,
    h_i <- h_i - 2 lambda (h_i - h_j). The global parameters move by the mean of the h_i. Running
    statistics are averaged. The paper's lambda by data set:

    Camelyon17 0.1, PovertyMap 0.1, FMoW 0.05, RotatedMNIST 0.001, TerraIncognita 0.2.
    """

    Settings = PPDGSettings
    settings: PPDGSettings
    tasks = ("classification", "regression")
    citation: ClassVar[str] = (
        "Tian, Li, Wang and Wang: Privacy-Preserving Constrained Domain Generalization via "
        "Gradient Alignment, TKDE 2024, arXiv 2105.08511"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "There is no public code; the paper's Algorithm 1, Equation 5 and proof (Equations 9 and "
        "10) give three different rules, and ours is the proof's: both updates as modified so "
        "far (reading).",
        "Equation 1 weights clients by image counts and line 10 of Algorithm 1 equally; we do "
        "the latter (weights).",
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
