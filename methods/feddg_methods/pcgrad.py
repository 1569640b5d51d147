"""PCGrad: take off each update what conflicts with another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.round_updates import combine_updates, one_each
from feddg_methods.shared.updates import project_coefficients


class PCGradSettings(MethodSettings):
    """How projected updates are put together."""

    labels: ClassVar[tuple[str, ...]] = ("reduction",)

    reduction: Literal["mean", "sum"] = "mean"
    """Mean of the projected updates, or their sum as in the paper: K times as long."""
    order: Literal["random", "ascending"] = "random"
    """In which order an update meets the others: one permutation a round, or by name."""


class PCGrad(Method):
    """PCGrad (Yu et al., NeurIPS 2020, arXiv 2001.06782, Algorithm 1) on client updates.

    The paper is about the gradients of tasks; as a federated rule it is the baseline of domain
    generalisation papers such as PPDG's. Clients train as in FedAvg. Each update h_i, at first
    Delta_i, meets the original Delta_j of the others in turn; where their inner product is
    negative, h_i <- h_i - <h_i, Delta_j> / ||Delta_j||^2 Delta_j. Clients count equally.
    Running statistics are averaged.
    """

    Settings = PCGradSettings
    settings: PCGradSettings
    tasks = ("classification", "regression")
    citation: ClassVar[str] = (
        "Yu, Kumar, Gupta, Levine, Hausman and Finn: Gradient Surgery for Multi-Task Learning, "
        "NeurIPS 2020, arXiv 2001.06782"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "Paper and code sum the projected gradients, which Adam's scaling hides; a server step "
        "of the sum is K times too long, so we take the mean (reduction).",
    )

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        s = self.settings

        def projected(gram: Tensor, p: Tensor) -> Tensor:
            stream = torch_generator(server.seed, "pcgrad", server.round)
            order = torch.randperm(len(gram), generator=stream) if s.order == "random" else None
            mean = p @ project_coefficients(gram, order=order)
            return mean if s.reduction == "mean" else len(gram) * mean

        return combine_updates(server, updates, self.trainable, projected, share=one_each)
