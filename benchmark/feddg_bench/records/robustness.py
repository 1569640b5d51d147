"""Effective robustness: accuracy on an unseen domain at equal accuracy on the training domains.

A method that trains slower than the reference is worse on both the training domains and the unseen
domain. A method that generalises better is more accurate on the unseen domain than the reference
when both are equally accurate on the training domains (Taori et al., NeurIPS 2020). Over the rounds
of the reference both accuracies lie close to a line on the logit scale (Miller et al., ICML 2021,
use probits). This line predicts the reference's accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from feddg_bench.records.statistics import FEWEST, Estimate, Sample, by_unit, t_interval

Accuracies = NDArray[np.float64]
"""Accuracies in percent; the last axis is `id_test` and `test`."""
EDGE = 0.1
"""Percentages are clipped to this distance from 0 and 100 before taking logits."""


def excess(method: Accuracies, reference: Accuracies, curve: Accuracies) -> Accuracies:
    """Return how far a method's mean on ``test`` lies above the reference's at equal ``id_test``.

    Scenarios are averaged first. The reference at equal ``id_test`` lies on a line through its own
    point on the logit scale, with the least-squares slope over its rounds. For a method with the
    reference's ``id_test`` the result is the plain difference.

    Args:
        method: [..., S, 2] for S units.
        reference: [..., S, 2].
        curve: The reference after each of T evaluated rounds, [..., S, T, 2].

    Returns:
        Percentage points, [...]; not finite if the curve has a single ``id_test``.
    """
    return _excess(method.mean(axis=-2), reference.mean(axis=-2), curve.mean(axis=-3))


def _excess(method: Accuracies, reference: Accuracies, curve: Accuracies) -> Accuracies:
    """Return `excess` of means over units: [..., 2], [..., 2] and [..., T, 2]."""
    at, start = logit(method), logit(reference)
    x, y = np.moveaxis(logit(curve), -1, 0)
    x = x - x.mean(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = (x * y).sum(axis=-1) / (x * x).sum(axis=-1)
    expected = start[..., 1] + slope * (at[..., 0] - start[..., 0])
    found: Accuracies = method[..., 1] - 100 / (1 + np.exp(-expected))
    return found


def pseudo_values(method: Accuracies, reference: Accuracies, curve: Accuracies) -> Accuracies:
    """Return the jackknife's pseudo-values of `excess` over units, [..., S].

    Their variance includes that of the units and that of the slope.
    """
    many = method.shape[-2]

    def without_one(values: Accuracies, axis: int) -> Accuracies:
        found: Accuracies = (values.sum(axis, keepdims=True) - values) / (many - 1)
        return found

    rest = _excess(without_one(method, -2), without_one(reference, -2), without_one(curve, -3))
    found: Accuracies = many * excess(method, reference, curve)[..., None] - (many - 1) * rest
    return found


def within_reach(method: Accuracies, reference: Accuracies, curve: Accuracies) -> bool:
    """Return whether the reference's rounds can predict it at the method's ``id_test``.

    They can if the logits of both ``id_test`` differ by no more than those of the rounds do; the
    slope does not hold beyond. Arguments are those of `excess`, without leading axes.
    """
    at, start = (logit(v.mean(axis=0))[0] for v in (method, reference))
    return bool(abs(at - start) <= np.ptp(logit(curve.mean(axis=0))[:, 0]))


def at_equal_id(
    row: tuple[Sample, Sample],
    reference: tuple[Sample, Sample],
    curve: Sequence[tuple[Sample, Sample]],
) -> Estimate | None:
    """Return the excess of a row over the reference, with Student's interval over units.

    Args:
        row: Its percentages on ``id_test`` and on ``test``.
        reference: The same of the reference row.
        curve: The same of the reference row after each evaluated round.

    Returns:
        Percentage points over the common units and seeds of all; ``None`` for fewer than
        `FEWEST` units, whose noise would determine the slope, or if not `within_reach`.
    """
    samples = [*row, *reference, *(sample for point in curve for sample in point)]
    shared = set(samples[0]).intersection(*samples[1:])
    if len({place[1] for place, _ in shared}) < FEWEST or len(curve) < 2:
        return None
    groups = [by_unit({pair: sample[pair] for pair in shared}) for sample in samples]
    means = np.array([[g[s].mean() for s in sorted(g)] for g in groups])  # [samples, S]
    points = np.stack([means[::2], means[1::2]], axis=-1)  # [2 + T, S, 2]
    method, other, rounds = points[0], points[1], points[2:].swapaxes(0, 1)
    if not within_reach(method, other, rounds):
        return None
    value = float(excess(method, other, rounds))
    around = t_interval(pseudo_values(method, other, rounds))
    shift = value - around.value
    return Estimate(value, around.low + shift, around.high + shift)


def logit(percent: Accuracies) -> Accuracies:
    """Return the log-odds of percentages, clipped to `EDGE` from 0 and 100."""
    share = percent.clip(EDGE, 100 - EDGE) / 100
    found: Accuracies = np.log(share / (1 - share))
    return found
