"""AgrSum: move only where all clients would move the same way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.round_updates import average_updates, one_each
from feddg_methods.shared.sign_votes import SignVotes, warn_of_rare_agreement


class AgrSumSettings(MethodSettings):
    """How agreeing updates are put together."""

    labels: ClassVar[tuple[str, ...]] = ("reduction",)

    reduction: Literal["mean", "sum"] = "mean"
    """Mean of the updates, or their sum as in the paper: K times as long."""


class AgrSum(Method):
    """AgrSum (Mansilla et al., ICCV 2021, arXiv 2108.01621) on client updates.

    The paper is about the gradients of domains in one place; as a federated rule it is the
    baseline of domain generalisation papers such as PPDG's. Clients train as in FedAvg. A
    coordinate takes the mean of the updates if all have the same sign in it, and stays as it is
    otherwise; no change is a disagreement. Clients count equally. Buffers are averaged.
    """

    Settings = AgrSumSettings
    settings: AgrSumSettings
    tasks = ("classification", "regression")
    citation: ClassVar[str] = (
        "Mansilla, Echeveste, Milone and Ferrante: Domain Generalization via Gradient Surgery, "
        "ICCV 2021, arXiv 2108.01621"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "Paper and code sum the agreeing gradients, which Adam's scaling hides; a server step of "
        "the sum is K times too long and diverges, so we take the mean (reduction).",
    )

    def prepare(self, server: Server) -> None:
        warn_of_rare_agreement(server, "the model will hardly move")

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        old = server.weights
        votes = SignVotes(old, self.trainable)
        new = average_updates(server, votes.count(updates), self.trainable, share=one_each)
        if self.settings.reduction == "sum":
            new = server_step(old, new, votes.total, self.trainable)
        for name in self.trainable:
            new[name] = torch.where(votes.unanimous(name), new[name], old[name])
        return new
