"""Server rules on client updates: sign agreement, conflict removal, adjusted weights.

An update is a client's trained parameters minus those it started from, one row of ``deltas``.
Buffers, such as the running statistics of batch normalisation, do not belong in it.

Rules that only form linear combinations of the updates (PPDG, PCGrad) are functions of the K x K
Gram matrix alone and return coefficients: the updates themselves need not be kept together. Rules
on signs need running sums of updates and of their signs only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddg_bench.common.errors import SettingsError
from feddg_bench.core.aggregation import streaming_mean
from feddg_bench.core.messages import Weights
from feddg_methods.shared.choices import choose

Reduction = Literal["mean", "sum"]

REDUCTIONS = {"mean": torch.mean, "sum": torch.sum}

TIE = 1e-6
"""Agreement this close to the threshold is equal to it: it is a ratio rounded in float32."""

VOTE_TIE = 1e-9
"""What the product of a threshold and a number of votes may lack of an integer, or exceed it."""

NO_DIRECTION = 1e-30
"""Squared norm below which an update is taken as 0 and nothing is projected off it."""

NO_SPREAD = 1e-12
"""Largest gap between generalisation gaps at which clients count as equal."""

LAST_RESORT = 1e-300
"""Share of a client without weight: it vanishes beside any weight, and is all there is without."""


# ------------------------------------------------------------------------ sign agreement


def agreement_mask(
    agreement: Tensor,
    threshold: float,
    *,
    total: int = 1,
    below: Literal["score", "zero"] = "score",
    compare: Literal["ge", "gt"] = "ge",
    variant: Literal["paper", "reference"] = "paper",
) -> Tensor:
    """Return FedGMA's factor for every coordinate of the mean update.

    Args:
        agreement: Absolute mean of the clients' signs, any shape, in [0, 1]; or the absolute sum
            of their votes, integers in [0, total], which are compared as such: 2 of 5 votes
            reach the threshold 0.4 whatever 2 / 5 is rounded to.
        threshold: Agreement from which a coordinate passes whole, in [0, 1].
        total: Votes that were cast, where ``agreement`` is a sum of votes.
        below: Factor below the threshold: the agreement itself, or 0.
        compare: Whether a coordinate at the threshold passes.
        variant: ``reference`` is what FedDG_Benchmark and PARDON compute by mistake, one plus
            the agreement from the threshold on and 0 below; ``below`` has no say in it.

    Returns:
        Factors of the shape of ``agreement``, float32 where it holds integers.

    Raises:
        SettingsError: For an unknown name.
    """
    if agreement.is_floating_point():
        limits = {"ge": threshold - TIE, "gt": threshold + TIE}
    else:  # the sums of votes next to the threshold, on the side where they pass
        needed = threshold * total
        limits = {"ge": math.ceil(needed - VOTE_TIE), "gt": math.floor(needed + VOTE_TIE)}
    limit = choose("comparison", compare, limits)
    passes = agreement >= limit if compare == "ge" else agreement > limit
    agreement = agreement / total
    nothing = torch.zeros_like(agreement)
    rest = choose("factor below the threshold", below, {"score": agreement, "zero": nothing})
    whole, rest = choose(
        "variant",
        variant,
        {"paper": (torch.ones_like(agreement), rest), "reference": (1 + agreement, nothing)},
    )
    return torch.where(passes, whole, rest)


def masked_update(
    deltas: Tensor,
    shares: Tensor | Sequence[float],
    *,
    threshold: float,
    below: Literal["score", "zero"] = "score",
    compare: Literal["ge", "gt"] = "ge",
    variant: Literal["paper", "reference"] = "paper",
    agreement_weights: Literal["uniform", "samples"] = "uniform",
) -> Tensor:
    """Return the mean update, damped where clients disagree on the sign.

    Source: FedGMA (Tenison et al., TMLR 2023, arXiv 2201.11986); see `agreement_mask`.

    Args:
        deltas: Updates, (K, P).
        shares: Weights of the clients in the mean, (K,), with sum 1.
        threshold: Agreement from which a coordinate passes whole, in [0, 1].
        below: See `agreement_mask`; so for ``compare`` and ``variant``.
        compare: See `agreement_mask`.
        variant: See `agreement_mask`.
        agreement_weights: Whether clients vote on signs equally or by their shares.

    Returns:
        The update before the server's step size, (P,).

    Raises:
        SettingsError: For an unknown name.
    """
    shares = torch.as_tensor(shares, dtype=deltas.dtype, device=deltas.device)
    # Votes with mean 1, not sum 1: equal votes add up to integers, without rounding.
    votes = choose(
        "agreement weights",
        agreement_weights,
        {"uniform": torch.ones_like(shares), "samples": len(deltas) * shares},
    )
    agreement = (votes @ deltas.sign()).abs() / len(deltas)
    mask = agreement_mask(agreement, threshold, below=below, compare=compare, variant=variant)
    return mask * (shares @ deltas)


def keep_agreed(update: Tensor, sign_sum: Tensor, num_clients: int) -> Tensor:
    """Return ``update`` where all clients have one sign, 0 elsewhere.

    A client without change in a coordinate disagrees there.

    Args:
        update: Sum or mean of the updates, (P,).
        sign_sum: Sum of the signs of the updates, (P,).
        num_clients: K.

    Returns:
        Update, (P,).
    """
    return torch.where(sign_sum.abs() == num_clients, update, 0)


def noise_scale(updates: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return AgrRand's sigma: the mean absolute value of all agreed coordinates of a network.

    Args:
        updates: For each of its tensors, the mean update and a bool mask of the same shape that
            says where clients agree; read once.

    Returns:
        At least 0, and 0 if clients agree nowhere. Summed in float64 and in one order, whatever
        the device, the memory layout and the number of threads.
    """
    total, count = 0.0, 0
    for update, agreed in updates:
        kept = update[agreed].abs().double().cpu().numpy()
        total += float(kept.sum())
        count += kept.size
    return total / max(count, 1)


def normal_where(masks: Sequence[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
    """Yield standard normal numbers where a mask is set, and 0 elsewhere.

    All are drawn at once, on the CPU, in the order of the masks and of their coordinates: the
    numbers do not depend on the device, nor on how a vector is cut into tensors.

    Args:
        masks: Bool, any shapes.
        generator: Source of the numbers, on the CPU.

    Yields:
        float32, for each mask in its shape and on its device.
    """
    counts = [int(mask.sum()) for mask in masks]
    draws = torch.randn(sum(counts), dtype=torch.float32, generator=generator)
    for mask, part in zip(masks, draws.split(counts), strict=True):
        nothing = torch.zeros(mask.shape, device=mask.device)
        yield nothing.masked_scatter(mask, part.to(mask.device))


def fill_disagreed(
    agreed: Tensor, touched: Tensor, generator: torch.Generator, *, randomize_zeros: bool = False
) -> Tensor:
    """Put noise of the scale of the agreed coordinates into the disagreed ones.

    The noise is normal with mean 0 and the mean absolute value of the agreed coordinates for its
    standard deviation, 0 if there are none. One number is drawn for each disagreed coordinate, in
    order. Coordinates that no client changed keep 0: they may be frozen.

    Args:
        agreed: Update, 0 in the coordinates without agreement, (P,).
        touched: Whether any client changed the coordinate, bool (P,).
        generator: Source of the noise, on the CPU.
        randomize_zeros: Put noise into coordinates that no client changed too.

    Returns:
        Update, (P,).
    """
    kept = agreed != 0
    disagreed = ~kept if randomize_zeros else touched & ~kept
    (draws,) = normal_where([disagreed], generator)
    return agreed + noise_scale([(agreed, kept)]) * draws.to(agreed)


def agreement_sum(deltas: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Return the update with 0 in every coordinate where the clients' signs differ.

    Source: AgrSum (Mansilla et al., ICCV 2021), there for the gradients of domains, summed,
    under Adam, to which a constant factor means nothing. To a server step the sum is K times too
    long: hence the mean.

    Args:
        deltas: Updates, (K, P).
        reduction: Mean or sum of the agreeing updates.

    Returns:
        Update, (P,).

    Raises:
        SettingsError: If ``reduction`` is unknown.
    """
    update = choose("reduction", reduction, REDUCTIONS)(deltas, dim=0)
    return keep_agreed(update, deltas.sign().sum(dim=0), len(deltas))


def agreement_random(
    deltas: Tensor,
    *,
    reduction: Reduction = "mean",
    generator: torch.Generator,
    randomize_zeros: bool = False,
) -> Tensor:
    """Return `agreement_sum` with noise in the coordinates where the clients' signs differ.

    Source: AgrRand (Mansilla et al., ICCV 2021). Different from the authors' code, coordinates
    that no client changed stay 0 unless asked for, and without any agreement the noise is 0
    instead of NaN.

    Args:
        deltas: Updates, (K, P).
        reduction: Mean or sum of the agreeing updates; the noise scales along.
        generator: Source of the noise, on the CPU.
        randomize_zeros: Put noise into coordinates that no client changed too.

    Returns:
        Update, (P,).

    Raises:
        SettingsError: If ``reduction`` is unknown.
    """
    agreed = agreement_sum(deltas, reduction=reduction)
    touched = (deltas != 0).any(dim=0)
    return fill_disagreed(agreed, touched, generator, randomize_zeros=randomize_zeros)


# ---------------------------------------------------------------------- coefficient space


def gram_matrix(deltas: Tensor) -> Tensor:
    """Return the inner products of updates in float64, without a float64 copy of them all.

    Args:
        deltas: Updates, (K, P).

    Returns:
        (K, K), float64.
    """
    gram = torch.zeros(len(deltas), len(deltas), dtype=torch.float64, device=deltas.device)
    for columns in deltas.split(2**20, dim=1):
        wide = columns.double()
        gram += wide @ wide.T
    return gram


def _combined(coefficients: Tensor, deltas: Tensor, reduction: Reduction) -> Tensor:
    row = choose("reduction", reduction, REDUCTIONS)(coefficients, dim=0)
    return row.to(deltas) @ deltas


def _checked_order(order: Sequence[int] | Tensor | None, num_clients: int) -> list[int]:
    if order is None:
        return list(range(num_clients))
    indices = [int(i) for i in order]
    if sorted(indices) != list(range(num_clients)):
        raise SettingsError(
            f"order {indices} does not name each of {num_clients} clients once: "
            f"give a permutation of 0 to {num_clients - 1}"
        )
    return indices


def _array(gram: Tensor) -> npt.NDArray[np.float64]:
    return gram.detach().double().cpu().numpy()


class Copies(NamedTuple):
    """Where a reading of the alignment rule uses working copies; elsewhere the originals."""

    base: bool
    own: bool
    other: bool


READINGS = {
    "running": Copies(base=True, own=True, other=True),
    "algorithm1": Copies(base=False, own=True, other=True),
    "eq5": Copies(base=False, own=False, other=False),
    "pcgrad_style": Copies(base=True, own=True, other=False),
}


def align_coefficients(
    gram: Tensor,
    *,
    strength: float,
    reading: Literal["running", "algorithm1", "eq5", "pcgrad_style"] = "running",
    order: Sequence[int] | Tensor | None = None,
    only_conflicts: bool = True,
) -> Tensor:
    """Return the aligned updates as coefficients of the original ones; see `align`.

    Args:
        gram: Inner products of the updates, (K, K).
        strength: See `align`; so for all others.
        reading: See `align`.
        order: See `align`.
        only_conflicts: See `align`.

    Returns:
        (K, K), float64, on the CPU; row i holds the aligned update of client i.

    Raises:
        SettingsError: As `align`.
    """
    if not 0 <= strength < 0.5:
        raise SettingsError(
            f"alignment strength {strength} is not in [0, 0.5): "
            f"0.5 would replace an update by the one that it conflicts with"
        )
    copies = choose("reading", reading, READINGS)
    products = _array(gram)
    original = np.eye(len(products))
    working = original.copy()
    indices = _checked_order(order, len(products))
    for i in indices:
        for j in indices:
            own = (working if copies.own else original)[i]
            other = (working if copies.other else original)[j]
            if i != j and (not only_conflicts or own @ products @ other < 0):
                base = (working if copies.base else original)[i]
                working[i] = base - 2 * strength * (own - other)
    return torch.from_numpy(working)


def align(
    deltas: Tensor,
    *,
    strength: float,
    reading: Literal["running", "algorithm1", "eq5", "pcgrad_style"] = "running",
    order: Sequence[int] | Tensor | None = None,
    only_conflicts: bool = True,
) -> Tensor:
    """Return the mean of updates that were moved towards those they conflict with.

    Clients are visited in order; each meets all others in the same order. Where the inner product
    of two is negative, the first takes a step of ``2 * strength`` towards the second.

    Source: PPDG, gradient alignment. Its Algorithm 1, Eq. 5 and its proof (Eq. 9, 10) say
    different things. ``running`` works on the copies modified so far: the only reading that
    agrees with the proof for two clients and stays a convex combination of the inputs for more.
    ``algorithm1`` (line 6 as printed) starts each step from the original, ``eq5`` uses originals
    alone, so that the last conflict counts, ``pcgrad_style`` compares with originals of others.

    Args:
        deltas: Updates, (K, P).
        strength: Lambda of the paper, in [0, 0.5).
        reading: Which formula.
        order: Permutation of the clients, (K,); ascending if not given.
        only_conflicts: False aligns all pairs (the paper's ablation).

    Returns:
        Update, (P,).

    Raises:
        SettingsError: For an unknown reading, a strength out of range or no permutation.
    """
    rows = align_coefficients(
        gram_matrix(deltas),
        strength=strength,
        reading=reading,
        order=order,
        only_conflicts=only_conflicts,
    )
    return _combined(rows, deltas, "mean")


def project_coefficients(gram: Tensor, *, order: Sequence[int] | Tensor | None = None) -> Tensor:
    """Return the projected updates as coefficients of the original ones.

    Args:
        gram: Inner products of the updates, (K, K).
        order: See `project_conflicts`.

    Returns:
        (K, K), float64, on the CPU; row i holds the projected update of client i.

    Raises:
        SettingsError: If ``order`` is no permutation.
    """
    products = _array(gram)
    rows = np.eye(len(products))
    for j in _checked_order(order, len(products)):
        if products[j, j] >= NO_DIRECTION:
            conflict = np.minimum(rows @ products[:, j], 0)
            conflict[j] = 0  # nothing is projected off itself
            rows[:, j] -= conflict / products[j, j]
    return torch.from_numpy(rows)


def project_conflicts(
    deltas: Tensor,
    *,
    order: Sequence[int] | Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the mean of updates without their components against others.

    Each update meets all original others in order; where the inner product is negative, its
    component along the other is taken off.

    Source: PCGrad (Yu et al., NeurIPS 2020, Algorithm 1), which sums; a server step of the sum
    is K times too long, hence the mean.

    Args:
        deltas: Updates, (K, P).
        order: Permutation of the clients, (K,); ascending if not given.
        reduction: Mean or sum of the projected updates.

    Returns:
        Update, (P,).

    Raises:
        SettingsError: If ``reduction`` is unknown or ``order`` no permutation.
    """
    return _combined(project_coefficients(gram_matrix(deltas), order=order), deltas, reduction)


SOFT = 1e-4
"""What CAGrad adds under its roots and to a norm that divides."""


def conflict_averse_coefficients(
    gram: Tensor, *, kappa: float, steps: int = 20, lr: float = 25.0, momentum: float = 0.5
) -> Tensor:
    """Return the coefficients with which the worst-off of the updates gains most.

    The step is d = d_0 + c / ||d_u|| d_u, divided by 1 + kappa^2, where d_0 is the mean of the
    updates, c = kappa ||d_0||, and d_u = sum_k u_k d_k with the weights u in the simplex that
    make <d_u, d_0> + c ||d_u|| least. Weights are softmax values of K numbers, from 0 on, under
    gradient descent with momentum; the best of all visited ones counts.

    Source: CAGrad (Liu et al., NeurIPS 2021, arXiv 2110.14048) as the code of FedOMG (Nguyen et
    al., ICLR 2025, arXiv 2501.14653) has it: the updates are divided by their mean length, and
    1e-4 is added under the roots, so that updates of 0 need no care.

    Args:
        gram: Inner products of the updates, (K, K).
        kappa: At least 0; 0 gives the mean.
        steps: Of gradient descent.
        lr: Learning rate of gradient descent.
        momentum: Momentum of gradient descent.

    Returns:
        (K,), float64, on the CPU.
    """
    products = _array(gram)
    products = products / np.sqrt(products.diagonal() + SOFT).mean() ** 2
    along_mean = products.mean(axis=1)
    c = kappa * np.sqrt(along_mean.mean() + SOFT)
    logits, velocity = np.zeros(len(products)), np.zeros(len(products))
    least, best = math.inf, logits
    for step in range(steps + 1):
        u = np.exp(logits - logits.max())
        u /= u.sum()
        norm = np.sqrt(u @ products @ u + SOFT)
        objective = u @ along_mean + c * norm
        if objective < least:
            least, best = objective, u
        if step < steps:
            slope = along_mean + c * (products @ u) / norm
            velocity = momentum * velocity + u * (slope - u @ slope)
            logits = logits - lr * velocity
    norm = np.sqrt(best @ products @ best + SOFT)
    rows = (1 / len(products) + best * c / (norm + SOFT)) / (1 + kappa**2)
    return torch.from_numpy(rows)


# ------------------------------------------------------------------------ adjusted weights


class Adjustment(NamedTuple):
    """How a version of FedDG-GA turns gaps into weights."""

    centred: bool
    """Whether the mean gap is taken off."""
    absolute: bool
    """Whether gaps are divided by their largest absolute value, or by the largest value."""
    divisor: int | None
    """What the step is divided by; None for the number of clients."""
    lag: int
    """Rounds by which the decay comes late."""
    bounds: tuple[float, float]
    """Limits of a weight before rescaling."""
    keeps_absent: bool
    """Whether clients without a gap keep their weight."""


ADJUSTMENTS = {
    "default": Adjustment(True, True, None, 0, (0, 1), keeps_absent=True),
    "official": Adjustment(False, True, 3, 1, (0, 1), keeps_absent=False),
    "paper": Adjustment(True, False, 1, 0, (0, math.inf), keeps_absent=False),
    "pardon": Adjustment(False, True, 1, 0, (0, 1), keeps_absent=False),
    "fedccrl": Adjustment(True, False, 3, 0, (-math.inf, math.inf), keeps_absent=False),
}


def adjusted_weights(
    weights: Tensor,
    gaps: Mapping[int, float],
    *,
    round: int,
    rounds: int,
    step: float,
    variant: Literal["default", "official", "paper", "pardon", "fedccrl"] = "default",
) -> Tensor:
    """Raise the weights of clients that lost most when their model was replaced by the average.

    Clients without a gap, or whose gap is NaN or infinite, did not take part. By default they
    keep their weights, and the weights of the others keep their sum; in the other variants, made
    for full participation, they have a gap of 0 after centring, and all weights are divided by
    their sum. Equal gaps where the mean is taken off, and gaps of 0, change nothing.

    Source: FedDG-GA (Zhang et al., CVPR 2023). ``paper`` is its formula, ``official`` its code
    (no centring, largest absolute gap, a factor 1/3, decay one round late), ``pardon`` and
    ``fedccrl`` those codes. ``default`` is the paper's with the largest absolute gap, and with
    its step relative to the uniform weight 1/N, as in the official code, where N is 3.

    Args:
        weights: Weights of all clients, (N,), in the simplex.
        gaps: Generalisation gap of each participant by index: metric of the averaged model minus
            that of its own, positive where averaging made it worse.
        round: Round in the formula of the step, which falls with ``round / rounds``.
        rounds: Rounds in the formula of the step.
        step: Step size before the decay: 0.2 in the paper, 1/3 in PARDON, 0.001 in FedCCRL.
        variant: Whose rule.

    Returns:
        New weights, (N,).

    Raises:
        SettingsError: If ``variant`` is unknown.
    """
    rule = choose("variant", variant, ADJUSTMENTS)
    known = {i: gap for i, gap in gaps.items() if math.isfinite(gap)}
    if not known:
        return weights.clone()
    values = weights.new_tensor(list(known.values()))
    if rule.centred:
        values = values - values.mean()
    largest = (values.abs() if rule.absolute else values).max()
    if largest < NO_SPREAD:
        return weights.clone()

    present = list(known)
    scale = step * (1 - (round - rule.lag) / rounds) / (rule.divisor or len(weights))
    moved = weights.clone()
    moved[present] += scale * values / largest
    moved = moved.clamp(*rule.bounds)
    group = present if rule.keeps_absent else list(range(len(weights)))
    if moved[group].sum() == 0:
        return weights.clone()
    moved[group] *= weights[group].sum() / moved[group].sum()
    return moved


def signed_mean(
    states: Iterable[tuple[Mapping[str, Tensor], float]], names: Sequence[str]
) -> Weights:
    """Return the mean of model states by weights that may be 0 or negative.

    Clients of weight 0 count only where no client has a positive one, and then equally; integer
    tensors take the maximum over all. Without negative weights this is
    `feddg_bench.core.aggregation.streaming_mean`, bit for bit. Negative ones move trainable
    parameters alone, since a running variance must not be extrapolated, and nothing where the
    weights' sum is not positive. Streams: one of the given states is alive at a time.

    Args:
        states: K states with equal names and shapes, each with its weight; normalised here.
        names: Names of trainable parameters.

    Returns:
        A new state; no input is changed.

    Raises:
        ValueError: If there are no states.
    """
    gained = lost = 0.0
    taken: Weights = {}

    def convex(pair: tuple[Mapping[str, Tensor], float]) -> tuple[Mapping[str, Tensor], float]:
        nonlocal gained, lost
        state, weight = pair
        if weight < 0:
            lost -= weight
            for name in names:
                part = -weight * state[name]
                taken[name] = taken[name] + part if name in taken else part
        gained += max(weight, 0.0)
        return state, max(weight, LAST_RESORT)

    mean = streaming_mean(map(convex, states))
    if gained > lost:
        for name, sum_taken in taken.items():
            mean[name] = (gained * mean[name] - sum_taken) / (gained - lost)
    return mean
