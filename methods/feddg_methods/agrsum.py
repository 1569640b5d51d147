"""AgrSum: mean update where the signs of all clients agree, no change elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.choices import reduced
from feddg_methods.shared.round_updates import average_updates, check_share, one_each
from feddg_methods.shared.sign_votes import SignVotes, sign_tally, warn_of_rare_agreement


class AgrSumSettings(MethodSettings):
    """Combination of agreeing updates."""

    labels: ClassVar[tuple[str, ...]] = ("reduction",)

    reduction: Literal["mean", "sum"] = "mean"
    """Mean of the updates, or their sum as in the paper: K times as long."""


class AgrSum(Method):
    """AgrSum (Mansilla et al., ICCV 2021, arXiv 2108.01621) on client updates.

    The paper combines the gradients of domains in centralised training; as a federated rule, it is
    a baseline in domain generalisation papers such as PPDG's. Clients train as in FedAvg. A
    coordinate takes the mean of the updates if they all agree in sign and is unchanged otherwise;
    an update of 0 counts as disagreement. Clients have equal weight. Buffers are averaged.
    """

    Settings = AgrSumSettings
    settings: AgrSumSettings
    tasks = ("classification", "regression")
    title = "AgrSum"
    citation: ClassVar[str] = (
        "Mansilla, Echeveste, Milone and Ferrante: Domain Generalization via Gradient Surgery, "
        "ICCV 2021, arXiv 2108.01621"
    )

    singles = ""

    def tally(self, reply: Reply[LocalUpdate], received: Weights) -> Payload:
        return sign_tally(reply, received, self.trainable)

    def prepare(self, server: Server) -> None:
        check_share(server, one_each)
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


def agreement_sum(deltas: Tensor, *, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Return the mean update, with 0 in every coordinate where the clients' signs differ.

    1/K sum_k Delta_k where |sum_k sign(Delta_k)| = K, and 0 elsewhere. A client that does not
    change a coordinate disagrees there. The paper sums the gradients of domains under Adam, which
    a constant factor does not affect; as a server step the sum is K times too long.

    Args:
        deltas: Updates Delta_k, [K, P].
        reduction: Mean or sum of the agreeing updates.

    Returns:
        Update, [P].

    Raises:
        SettingsError: If ``reduction`` is unknown.
    """
    agreed = deltas.sign().sum(dim=0).abs() == len(deltas)
    return torch.where(agreed, reduced(deltas, reduction), 0)


DEVIATIONS = (
    "Paper and code sum the agreeing gradients, which does no harm under Adam. As a server step "
    "the sum is K times too long and diverges, so we take the mean (`reduction`).",
)
"""Where published code differs from its paper, and what this module does."""
