"""Differences between two sets of runs: two results folders, or two recipes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from feddg_bench.analysis.tables.columns import measured_columns
from feddg_bench.analysis.tables.generic import Frame, leaderboards
from feddg_bench.analysis.tables.grid import DASH, Entry, Grid, text_grid
from feddg_bench.analysis.tables.rows import Row, choose_rows
from feddg_bench.common.errors import SettingsError
from feddg_bench.common.titles import counted
from feddg_bench.records.rules import Rule, unseen_splits
from feddg_bench.records.runs import RecordedRun, key_metric
from feddg_bench.records.statistics import Measured, by_unit, compare

if TYPE_CHECKING:
    import pandas as pd


def differences_between(
    runs: pd.DataFrame,
    others: pd.DataFrame,
    named: tuple[str, str],
    rule: Rule = "last",
) -> Iterator[Grid]:
    """Yield a table for each leaderboard of the first runs that the other runs have, too.

    Leaderboards of one name are compared; without any, the largest of the same data set and
    protocol.

    Args:
        runs: Runs of the first set.
        others: Runs of the second.
        named: Names of both sets.
        rule: Selection rule.

    Raises:
        SettingsError: If they have no data set and protocol in common.
    """
    theirs = sorted(leaderboards(others), key=lambda frame: -len(frame.runs))
    pairs = []
    for mine in leaderboards(runs):
        same = [f for f in theirs if _place(f) == _place(mine)]
        pairs += [(mine, of) for of in same if of.name == mine.name] or [
            (mine, of) for of in same[:1]
        ]
    equal = [pair for pair in pairs if pair[0].name == pair[1].name]
    if not pairs:
        raise SettingsError(
            f"{named[0]} and {named[1]} have no data set and protocol in common; "
            f"`feddg-bench runs` lists runs"
        )
    yield from (_compared(mine, of, named, rule) for mine, of in equal or pairs)


def _place(frame: Frame) -> tuple[str, str | None, str]:
    first = frame.runs[0]
    return first.dataset, first.label, first.protocol


def _compared(mine: Frame, of: Frame, named: tuple[str, str], rule: Rule) -> Grid:
    """Return the table of two leaderboards, with a row for each method of both."""
    ours, theirs = _rows(mine), _rows(of)
    rows: list[Sequence[str | Entry]] = []
    for label in [label for label in ours if label in theirs]:
        one, other = ours[label].members, theirs[label].members
        keys = {run.key for run in one} & {run.key for run in other}
        samples = [_sample(some, rule) for some in (one, other)]
        found = compare(*samples)
        gap = found.difference.text(2, signed=True) if found.units else DASH
        counts = f"{len(one)}, {len(other)}", f"{len(keys)}"
        rows.append((label, *counts, *map(_mean, samples), gap))
    both = {run.key for run in mine.runs} & {run.key for run in of.runs}
    notes = [
        f"{counted(len(both), 'equal key')} among {len(mine.runs)} and {len(of.runs)} runs.",
        "Difference: first minus second over their common scenarios and seeds, with its 95 % "
        "interval over units.",
    ]
    for rest, (name, lacks) in zip((ours, theirs), (named, named[::-1]), strict=True):
        alone = ", ".join(label for label in rest if label not in ours or label not in theirs)
        notes += [f"In {name} and not in {lacks}: {alone}."] if alone else []
    title = f"{mine.title} in {named[0]}, {of.title} in {named[1]}"
    heads = ("runs", "equal keys", "mean", "other mean", "difference")
    return text_grid(title, heads, rows, notes)


def _rows(frame: Frame) -> dict[str, Row]:
    columns = measured_columns(frame.description, None)
    return {row.label: row for row in choose_rows(frame.description, columns, frame.runs)}


def _sample(runs: Sequence[RecordedRun], rule: Rule) -> dict[Measured, float]:
    """Return the key metric on the unseen domains by place and seed."""
    return {
        ((column, run.train, run.scenario), run.seed): value
        for run in runs
        for column, split in enumerate(unseen_splits(rule))
        if (value := key_metric(run, run.evaluation(rule), split)) is not None
    }


def _mean(sample: dict[Measured, float]) -> str:
    values = [float(found.mean()) for found in by_unit(sample).values()]
    return f"{fmean(values):.2f}" if values else DASH
