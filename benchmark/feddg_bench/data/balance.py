"""Sentences on how many images a data set has: what makes its numbers hard to read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

FEW = 50
"""A test domain with fewer images gets a warning: one image moves its accuracy by over 2 points."""
RATIO = 100
"""Largest ratio of two classes' images without a warning."""
_SHOWN = 5


def cautions(
    counts: NDArray[np.int64],
    domains: Sequence[str],
    classes: Sequence[str],
    tested: Collection[str],
) -> Iterator[str]:
    """Yield a sentence each on tiny test domains, on missing classes and on imbalanced classes.

    Args:
        counts: Images of each class in each domain, [D, C].
        domains: Names of the domains.
        classes: Names of the classes; empty for a regression.
        tested: Names of the domains that are test domains.
    """
    totals = dict(zip(domains, counts.sum(axis=1).tolist(), strict=True))
    tiny = {name: total for name, total in totals.items() if name in tested and 0 < total < FEW}
    if tiny:
        named = _some([f"{name} ({total})" for name, total in tiny.items()])
        points = 100 / min(tiny.values())
        yield (
            f"test domains with fewer than {FEW} images: {named}; a single image changes "
            f"accuracy by up to {points:.1f} points"
        )
    if not classes:
        return
    lacking = {
        name: [kind for kind, count in zip(classes, row, strict=True) if not count]
        for name, row in zip(domains, counts.tolist(), strict=True)
    }
    missing = [
        f"{name} has no {', no '.join(kinds[:_SHOWN])}" for name, kinds in lacking.items() if kinds
    ]
    if missing:
        yield f"classes missing from a domain: {_some(missing, '; ')}"
    most, least, where = max(
        (
            _spread(row, place)
            for place, row in [("", counts.sum(axis=0)), *zip(domains, counts, strict=True)]
        ),
        key=lambda case: case[0][1] / case[1][1],
    )
    if most[1] > RATIO * least[1]:
        inside = f" in domain {where}" if where else ""
        yield (
            f"classes are imbalanced {most[1] / least[1]:,.0f}:1{inside} "
            f"({classes[most[0]]} {most[1]:,} images, {classes[least[0]]} {least[1]:,}): "
            f"accuracy favours the large ones, so compare macro F1"
        )


def _spread(row: NDArray[np.int64], where: str) -> tuple[tuple[int, int], tuple[int, int], str]:
    """Return the place and the number of the most and of the fewest images of a class."""
    present = np.flatnonzero(row)
    if not len(present):
        return (0, 1), (0, 1), where
    most, least = int(present[row[present].argmax()]), int(present[row[present].argmin()])
    return (most, int(row[most])), (least, int(row[least])), where


def _some(texts: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else ""
    return between.join(texts[:_SHOWN]) + more
