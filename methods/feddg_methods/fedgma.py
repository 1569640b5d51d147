"""FedGMA: damp the average update where clients disagree on its sign."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
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


class FedGMASettings(MethodSettings):
    """The mask; the step size of the masked update is ``federation.server_lr``, 1 in the paper."""

    labels: ClassVar[tuple[str, ...]] = ("variant",)

    threshold: float = Field(0.4, ge=0, le=1)
    """tau: agreement from which a coordinate passes in full; FedDG_Benchmark used 0.1 to 0.4.

    Random signs reach 0.4 in 38 % of the coordinates for 5 clients, in 12 % for 20 and in 0.008 %
    for 100.
    """
    below: Literal["score", "zero"] = "score"
    """Factor of the other coordinates: their agreement, as in the paper, or 0."""
    compare: Literal["ge", "gt"] = "ge"
    """Whether agreement equal to the threshold passes (``ge``)."""
    agreement_weights: Literal["uniform", "samples"] = "uniform"
    """One vote on the sign for each client, as in the paper, or one for each of its images."""
    mean_weights: Literal["samples", "uniform"] | None = None
    """Shares in the mean update; by default those of ``federation.weighting``."""
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

    def prepare(self, server: Server) -> None:
        check_share(server, SHARES.get(self.settings.mean_weights, server.share))

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        s, old = self.settings, server.weights
        votes, readings = SignVotes(old, self.trainable), s.model_dump(include=READINGS)
        counted = votes.count(updates, SHARES[s.agreement_weights])
        share = SHARES.get(s.mean_weights, server.share)
        new = average_updates(server, counted, self.trainable, share=share)
        for name, signs in votes.sums.items():
            m = agreement_mask(signs.abs(), s.threshold, total=votes.total, **readings)
            # Not w + m * step: lerp gives the full step bit for bit where the factor is 1.
            new[name] = torch.lerp(old[name], new[name], m.to(old[name]))
        return new

    def tally(self, reply: Reply[LocalUpdate], received: Weights) -> Payload:
        voice = SHARES[self.settings.agreement_weights]
        return sign_tally(reply, received, self.trainable, voice)


def agreement_mask(
    agreement: Tensor,
    threshold: float,
    *,
    total: int = 1,
    below: Literal["score", "zero"] = "score",
    compare: Literal["ge", "gt"] = "ge",
    variant: Literal["paper", "reference"] = "paper",
) -> Tensor:
    """Return the factor m of every coordinate: 1 where A >= tau, and A elsewhere (``paper``).

    Args:
        agreement: A in [0, 1], any shape; or the absolute sum of votes, integers in [0, total],
            compared as integers: 2 of 5 votes reach 0.4 despite the rounding of 2 / 5.
        threshold: tau, from which a coordinate passes in full, in [0, 1].
        total: Number of votes cast, if ``agreement`` is a sum of votes.
        below: See `FedGMASettings`.
        compare: See `FedGMASettings`.
        variant: See `FedGMASettings`.

    Returns:
        Factors of the shape of ``agreement``, float32 if it holds integers.

    Raises:
        SettingsError: For an unknown name.
    """
    factors = choose("factor below the threshold", below, choose("variant", variant, FACTORS))
    passes = reaches(agreement, threshold * total, compare)
    return torch.where(passes, *factors(agreement / total))


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


# ------------------------------------------------------------------------------------ variants

READINGS = {"below", "compare", "variant"}
"""Settings of the mask other than its threshold."""

SHARES: dict[str | None, Share] = {"samples": image_count, "uniform": one_each}
"""Votes of a client on the sign, and its share in the mean."""

Factors = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Factors m at and below the threshold, from A in [0, 1]."""


def _paper(a: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(a), a


def _zero_below(a: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(a), torch.zeros_like(a)


def _reference(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors that FedDG_Benchmark and PARDON use by mistake."""
    return 1 + a, torch.zeros_like(a)


FACTORS: dict[str, dict[str, Factors]] = {
    "paper": {"score": _paper, "zero": _zero_below},
    "reference": {"score": _reference, "zero": _reference},
}
"""Factors by ``variant`` and ``below``."""

TIE = 1e-6
"""Agreement this close to the threshold counts as equal: it is a ratio rounded in float32."""

VOTE_TIE = 1e-9
"""Largest distance from an integer at which threshold times number of votes counts as one."""


def reaches(agreement: Tensor, needed: float, compare: Literal["ge", "gt"]) -> Tensor:
    """Return where agreement passes, despite rounding: A >= tau, or A > tau for ``gt``.

    Args:
        agreement: A in [0, 1], or votes as integers.
        needed: The threshold, or the number of votes that it corresponds to.
        compare: Whether agreement equal to it passes.
    """
    if agreement.is_floating_point():
        least, most = needed - TIE, needed + TIE
    else:
        least, most = math.ceil(needed - VOTE_TIE), math.floor(needed + VOTE_TIE)
    rules = {"ge": (operator.ge, least), "gt": (operator.gt, most)}
    passes, limit = choose("comparison", compare, rules)
    reached: Tensor = passes(agreement, limit)
    return reached


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
