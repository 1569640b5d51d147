"""Cells that say more than a mean: comparisons, differences to papers, gaps."""

from __future__ import annotations

import math

from feddg_bench.analysis.tables.columns import Measured, Shown
from feddg_bench.analysis.tables.grid import Column, Entry
from feddg_bench.records.rules import CHOOSING
from feddg_bench.records.statistics import Comparison

DASH = "\N{EN DASH}"


def compared(found: Comparison, column: Column, keys: tuple[str, ...]) -> Entry:
    """Return a comparison as its column has it: wins/ties/losses, difference, or p-value."""
    if not found.pairs:
        return Entry(None, DASH)
    if column.kind == "wins":
        said = f"{found.wins}/{found.ties}/{found.losses}"
        return Entry(None, said, keys=keys)
    if column.kind == "p_value":
        known = not math.isnan(found.p_value)
        return Entry(found.p_value if known else None, _p(found.p_value), keys=keys)
    said = f"{found.difference:+.{column.decimals}f}"
    if not math.isnan(found.low):
        said += f" [{found.low:+.{column.decimals}f}, {found.high:+.{column.decimals}f}]"
        return Entry(found.difference, said, low=found.low, high=found.high, keys=keys)
    return Entry(found.difference, said, keys=keys)


def _p(value: float) -> str:
    if math.isnan(value):
        return DASH
    return "<0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.3f}"


def gap(ours: Entry | None, published: Entry | None, shown: Shown) -> Entry | None:
    """Return the difference to a published number, if both are there."""
    if ours is None or published is None or ours.value is None or published.value is None:
        return None
    if shown.kind == "p_value":
        return None
    found = ours.value - published.value
    return Entry(found, f"{found:+.{shown.column.decimals}f}")


def silence(column: Measured) -> str:
    """Return why runs that are there have no number for a column."""
    chooses = CHOOSING.get(column.rule)
    if chooses and chooses != column.split:
        return (
            f"rule {column.rule} needs the split {chooses}, which these runs lack, or they do not "
            f"measure {column.metric} on {column.split}"
        )
    return f"these runs do not measure {column.metric} on {column.split or 'a run'}"
