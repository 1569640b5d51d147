"""Statistics of tables: means over seeds, paired comparisons, ranks.

A *sample* maps (unit, seed) to a number; a unit is a scenario of one column. Two rows are compared
over the pairs (unit, seed) that both have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Unit = tuple[int, str]
"""Number of a column and name of a scenario in it."""
Sample = Mapping[tuple[Unit, int], float]

LEVEL = 0.05
"""Two-sided level of the paired t-test below which a difference counts."""
RESAMPLES = 2000
TIE = 0.005
"""Accuracies in percent that are closer print the same, and tie."""


@dataclass(frozen=True)
class Comparison:
    """A row against another over the pairs that both have.

    Attributes:
        difference: Mean of (row - other); NaN without a pair.
        low: Lower end of the 95 % bootstrap interval of that mean.
        high: Upper end.
        p_value: Two-sided, of the paired t-test; NaN where fewer than two seeds are common.
        wins: Pairs in which the row is better.
        ties: Pairs in which it is equal, within `TIE` if not said otherwise.
        losses: Pairs in which it is worse.
    """

    difference: float
    low: float
    high: float
    p_value: float
    wins: int
    ties: int
    losses: int

    @property
    def pairs(self) -> int:
        """Number of pairs compared."""
        return self.wins + self.ties + self.losses


def by_seed(sample: Sample, units: Collection[Unit], *, worst: bool = False) -> dict[int, float]:
    """Return each complete seed's mean over units, or its smallest value.

    Args:
        sample: Values in which a seed may lack units.
        units: Units a seed must have to count.
        worst: Take the smallest value instead of the mean.
    """
    found: dict[int, list[float]] = {}
    wanted = set(units)
    for (unit, seed), value in sample.items():
        if unit in wanted:
            found.setdefault(seed, []).append(value)
    pool = min if worst else _mean
    return {seed: pool(v) for seed, v in sorted(found.items()) if len(v) == len(wanted)}


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation; ``None`` for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def compare(
    row: Sample, other: Sample, *, lower_is_better: bool = False, tie: float = TIE
) -> Comparison:
    """Compare two rows over their common pairs of unit and seed; closer than ``tie`` is equal."""
    common = sorted(set(row) & set(other))
    nan = math.nan
    if not common:
        return Comparison(nan, nan, nan, nan, 0, 0, 0)
    differences = np.array([row[pair] - other[pair] for pair in common])
    better = -differences if lower_is_better else differences
    wins, losses = int((better >= tie).sum()), int((better <= -tie).sum())
    seeds = {seed for _, seed in common}
    return Comparison(
        float(differences.mean()),
        *_interval(differences),
        paired_p_value(differences) if len(seeds) > 1 else nan,
        wins,
        len(common) - wins - losses,
        losses,
    )


def paired_p_value(differences: NDArray[np.float64]) -> float:
    """Return the two-sided p-value of Student's paired t-test.

    Args:
        differences: Of the pairs, shape (n,); NaN is returned for n < 2.
    """
    n = len(differences)
    if n < 2:
        return math.nan
    mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
    if deviation <= 1e-12 * max(1.0, abs(mean)):  # all pairs differ alike
        return 1.0 if abs(mean) <= 1e-12 else 0.0
    from scipy.special import stdtr  # type: ignore[import-untyped]  # a tenth of a second, only where two rows are compared

    return float(2 * stdtr(n - 1, -abs(mean) / (deviation / math.sqrt(n))))


@cache
def _resamples(n: int) -> NDArray[np.float64]:
    """Return how often each of n pairs is in each of `RESAMPLES` samples, over n; always the same.

    Shape (`RESAMPLES`, n).
    """
    drawn = np.random.default_rng(n).integers(0, n, size=(RESAMPLES, n))
    counts = [np.bincount(sample, minlength=n) for sample in drawn]
    return np.array(counts, dtype=np.float64) / n


def _interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean; NaN for a single pair."""
    if len(differences) < 2:
        return math.nan, math.nan
    low, high = np.quantile(_resamples(len(differences)) @ differences, (0.025, 0.975))
    return float(low), float(high)


def best_rows(
    samples: Sequence[Sample], units: Collection[Unit], *, lower_is_better: bool = False
) -> tuple[int | None, int | None]:
    """Return which row is best and which second, where a paired test supports it.

    The best beats every other row, the second every row but the best: paired t-test over units and
    seeds, p < `LEVEL`, at least two common seeds. Nothing is best among fewer than two rows, and
    nothing is second unless the first is best.

    Args:
        samples: Values of each row.
        units: Units a seed must have to count for the order.
        lower_is_better: As for losses and seconds.
    """
    wanted = set(units)
    means = {}
    for number, sample in enumerate(samples):
        seeds = by_seed(sample, units)
        if seeds:
            mean = _mean(list(seeds.values()))
            means[number] = mean if lower_is_better else -mean
    order = sorted(means, key=lambda number: means[number])
    restricted = {
        n: {pair: v for pair, v in samples[n].items() if pair[0] in wanted} for n in order
    }

    def beats_all(number: int, others: Sequence[int]) -> bool:
        return bool(others) and all(
            _differs(restricted[number], restricted[other]) for other in others
        )

    if not order or not beats_all(order[0], order[1:]):
        return None, None
    return order[0], order[1] if beats_all(order[1], order[2:]) else None


def _differs(row: Sample, other: Sample) -> bool:
    common = sorted(set(row) & set(other))
    if len({seed for _, seed in common}) < 2:
        return False
    return paired_p_value(np.array([row[pair] - other[pair] for pair in common])) < LEVEL


def average_ranks(
    samples: Sequence[Sample],
    units: Collection[Unit],
    *,
    lower_is_better: bool = False,
    tie: float = TIE,
) -> list[float | None]:
    """Return each row's rank, averaged over units; 1 is best, equal rows share the mean rank.

    Rows that lack a unit have no rank and do not count for the others.
    """
    means = []
    for sample in samples:
        values: dict[Unit, list[float]] = {}
        for (unit, _), value in sample.items():
            values.setdefault(unit, []).append(value)
        means.append({unit: _mean(v) for unit, v in values.items()})
    whole = [n for n, found in enumerate(means) if units and set(units) <= set(found)]
    ranks: list[float | None] = [None] * len(samples)
    for number in whole:
        total = 0.0
        for unit in units:
            gaps = [means[other][unit] - means[number][unit] for other in whole if other != number]
            gaps = [-gap for gap in gaps] if lower_is_better else gaps
            total += 1 + sum(1.0 for g in gaps if g >= tie) + sum(0.5 for g in gaps if abs(g) < tie)
        ranks[number] = total / len(units)
    return ranks
