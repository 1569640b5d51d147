"""FedGMA: damp the average update where clients disagree on its sign."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.choices import choose
from feddg_methods.shared.round_updates import (
    Share,
    average_updates,
    check_share,
    image_count,
    one_each,
)
from feddg_methods.shared.sign_votes import SignVotes, sign_tally

TIE = 1e-6
"""Agreement this close to the threshold counts as equal: it is a ratio rounded in float32."""

VOTE_TIE = 1e-9
"""How far the product of a threshold and a number of votes may be from an integer and still count
as one."""


SHARES: dict[str | None, Share] = {"samples": image_count, "uniform": one_each}


class FedGMASettings(MethodSettings):
    """The mask; the step of the masked update is ``federation.server_lr``, 1 in the paper."""

    labels: ClassVar[tuple[str, ...]] = ("variant",)

    threshold: float = Field(0.4, ge=0, le=1)
    """tau: agreement from which a coordinate passes in full; FedDG_Benchmark used 0.1 to 0.4.

    Signs drawn at random reach 0.4 in 38 % of the coordinates for 5 clients, in 12 % for 20 and
    in 0.008 % for 100.
    """
    below: Literal["score", "zero"] = "score"
    """Factor of the other coordinates: their agreement, as in the paper, or 0."""
    compare: Literal["ge", "gt"] = "ge"
    """Whether agreement equal to the threshold passes (``ge``)."""
    agreement_weights: Literal["uniform", "samples"] = "uniform"
    """One vote on the sign for each client, as in the paper, or one for each of its images."""
    mean_weights: Literal["samples", "uniform"] | None = None
    """Shares in the mean update; as ``federation.weighting`` says unless given."""
    variant: Literal["paper", "reference"] = "paper"
    """``reference``: the factors of FedDG_Benchmark and PARDON, 1 + agreement and 0.

    PARDON: threshold 0.4, ``server_lr`` 1. FedDG_Benchmark: ``server_lr`` equal to the
    threshold. ``below`` has no effect on it.
    """


class FedGMA(Method):
    """Gradient masked averaging (Tenison et al., TMLR 2023, arXiv 2201.11986, Algorithm 1).

    Clients train as in FedAvg. With Delta_k the update of client k, the server takes the step
    w' = w + eta m * sum_k p_k Delta_k, coordinate by coordinate: agreement
    A = |mean_k sign(Delta_k)|, factor m = 1 where A >= tau, and A elsewhere. Buffers are averaged
    and never masked.
    """

    Settings = FedGMASettings
    settings: FedGMASettings
    tasks = ("classification", "regression")
    title = "FedGMA"
    citation: ClassVar[str] = (
        "Tenison, Sreeramadas, Mugunthan, Oyallon, Rish and Belilovsky: Gradient Masked Averaging "
        "for Federated Learning, TMLR 2023, arXiv 2201.11986"
    )

    singles = ""

    def tally(self, reply: Reply[LocalUpdate], received: Weights) -> Payload:
        voice = image_count if self.settings.agreement_weights == "samples" else one_each
        return sign_tally(reply, received, self.trainable, voice)

    def prepare(self, server: Server) -> None:
        check_share(server, SHARES.get(self.settings.mean_weights, server.share))

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        s, old = self.settings, server.weights
        all_pass = (s.variant, s.compare, s.threshold) == ("paper", "ge", 0)
        votes = SignVotes(old, [] if all_pass else self.trainable)
        voice = image_count if s.agreement_weights == "samples" else one_each
        share = SHARES.get(s.mean_weights, server.share)
        new = average_updates(server, votes.count(updates, voice), self.trainable, share=share)
        for name, signs in votes.sums.items():
            mask = agreement_mask(
                signs.abs(),
                s.threshold,
                total=votes.total,
                below=s.below,
                compare=s.compare,
                variant=s.variant,
            )
            # Not w + m * step: this gives the step's end bit for bit where the factor is 1.
            new[name] = torch.lerp(old[name], new[name], mask.to(old[name]))
        return new


def agreement_mask(
    agreement: Tensor,
    threshold: float,
    *,
    total: int = 1,
    below: Literal["score", "zero"] = "score",
    compare: Literal["ge", "gt"] = "ge",
    variant: Literal["paper", "reference"] = "paper",
) -> Tensor:
    """Return the factor m of every coordinate: 1 where A >= tau, and A elsewhere.

    Args:
        agreement: A, the absolute mean of the clients' signs, any shape, in [0, 1]; or the absolute
            sum of their votes, integers in [0, total], which are compared as such: 2 of 5 votes
            reach the threshold 0.4 whatever 2 / 5 is rounded to.
        threshold: tau, the agreement from which a coordinate passes in full, in [0, 1].
        total: Votes that were cast, where ``agreement`` is a sum of votes.
        below: Factor below the threshold: the agreement itself, or 0.
        compare: Whether a coordinate at the threshold passes.
        variant: ``reference`` is what FedDG_Benchmark and PARDON compute by mistake, 1 + A from
            the threshold on and 0 below; ``below`` has no effect on it.

    Returns:
        Factors of the shape of ``agreement``, float32 where it holds integers.

    Raises:
        SettingsError: For an unknown name.
    """
    if agreement.is_floating_point():
        limits = {"ge": threshold - TIE, "gt": threshold + TIE}
    else:  # the threshold as a whole number of votes, exact in spite of rounding
        needed = threshold * total
        limits = {"ge": math.ceil(needed - VOTE_TIE), "gt": math.floor(needed + VOTE_TIE)}
    limit = choose("comparison", compare, limits)
    passes = agreement >= limit if compare == "ge" else agreement > limit
    agreement = agreement / total
    nothing = torch.zeros_like(agreement)
    rest = choose("factor below the threshold", below, {"score": agreement, "zero": nothing})
    if choose("variant", variant, {"paper": False, "reference": True}):
        return torch.where(passes, 1 + agreement, nothing)
    return torch.where(passes, torch.ones_like(agreement), rest)


def masked_update(
    deltas: Tensor,
    shares: Tensor | Sequence[float],
    *,
    threshold: float,
    below: Literal["score", "zero"] = "score",
    compare: Literal["ge", "gt"] = "ge",
    variant: Literal["paper", "reference"] = "paper",
) -> Tensor:
    """Return the mean update, damped where clients disagree on the sign.

    m * sum_k p_k Delta_k with A = |1/K sum_k sign(Delta_k)| and m from `agreement_mask`.

    Args:
        deltas: Updates Delta_k, [K, P].
        shares: Weights p_k of the clients in the mean, [K], with sum 1.
        threshold: tau, in [0, 1].
        below: See `agreement_mask`.
        compare: See `agreement_mask`.
        variant: See `agreement_mask`.

    Returns:
        The update before the server's step size, [P].

    Raises:
        SettingsError: For an unknown name.
    """
    shares = torch.as_tensor(shares, dtype=deltas.dtype, device=deltas.device)
    agreement = deltas.sign().sum(dim=0).abs() / len(deltas)
    mask = agreement_mask(agreement, threshold, below=below, compare=compare, variant=variant)
    return mask * (shares @ deltas)


DEVIATIONS = (
    "FedDG_Benchmark and PARDON slip: they multiply by 1 + A from the threshold on and by 0 below"
    " it, where the paper has 1 and A. We follow the paper (`variant`).",
    "They also mask the running statistics and counters of batch normalisation, which can make a "
    "variance negative. We only ever mask trainable parameters.",
    "FedDG_Benchmark uses one number for the threshold and for the server's step, where the paper"
    " and PARDON have a step of 1. We have two settings (`threshold`, `federation.server_lr`).",
    "In declearn agreement equal to the threshold does not pass. Here it does (`compare`).",
    "In declearn a client has one vote for each of its training steps. Here all clients have one "
    "vote (`agreement_weights`).",
)
"""Where published code differs from its paper, and what this module does."""
