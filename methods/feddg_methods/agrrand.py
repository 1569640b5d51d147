"""AgrRand: move where all clients would move the same way, and at random elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.round_updates import average_updates, one_each
from feddg_methods.shared.sign_votes import SignVotes, warn_of_rare_agreement
from feddg_methods.shared.updates import noise_scale, normal_where


class AgrRandSettings(MethodSettings):
    """How agreeing updates are put together, and where the noise goes."""

    labels: ClassVar[tuple[str, ...]] = ("reduction",)

    reduction: Literal["mean", "sum"] = "mean"
    """Mean of the updates, or their sum as in the paper: K times as long, the noise too."""
    randomize_zeros: bool = False
    """Put noise also where no client changed anything, as the authors' code does."""


class AgrRand(Method):
    """AgrRand (Mansilla et al., ICCV 2021, arXiv 2108.01621) on client updates.

    The paper is about the gradients of domains in one place; as a federated rule it is the
    baseline of domain generalisation papers such as PPDG's. Clients train as in FedAvg. A
    coordinate takes the mean of the updates if all have the same sign in it, and otherwise a draw
    from N(0, sigma^2), with sigma the mean absolute value of the agreed coordinates of the whole
    network. Clients count equally. Buffers are averaged.
    """

    Settings = AgrRandSettings
    settings: AgrRandSettings
    tasks = ("classification", "regression")
    citation: ClassVar[str] = (
        "Mansilla, Echeveste, Milone and Ferrante: Domain Generalization via Gradient Surgery, "
        "ICCV 2021, arXiv 2108.01621"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "Paper and code sum the agreeing gradients, which Adam's scaling hides; a server step of "
        "the sum is K times too long and diverges, so we take the mean (reduction).",
        "The authors' code puts noise also where all gradients are exactly 0, as in frozen layers "
        "and dead filters; we leave these coordinates as they are (randomize_zeros).",
        "Where no coordinate agrees, the authors' code takes the mean of nothing and the model "
        "becomes NaN; here the noise is then 0.",
    )

    def prepare(self, server: Server) -> None:
        warn_of_rare_agreement(server, "nearly all of the model will move at random")

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        s, old = self.settings, server.weights
        votes = SignVotes(old, self.trainable, changed=not s.randomize_zeros)
        new = average_updates(server, votes.count(updates), self.trainable, share=one_each)
        if s.reduction == "sum":
            new = server_step(old, new, votes.total, self.trainable)
        # Of the step just taken, hence times the server's learning rate.
        sigma = noise_scale((new[n] - old[n], votes.unanimous(n)) for n in self.trainable)
        stream = torch_generator(server.seed, "agrrand", server.round)
        others = [~votes.unanimous(n) & votes.changed.get(n, True) for n in self.trainable]
        for name, draws in zip(self.trainable, normal_where(others, stream), strict=True):
            moved = (old[name] + sigma * draws).to(old[name])
            new[name] = torch.where(votes.unanimous(name), new[name], moved)
        return new
