"""Leaderboards: the generic tables under every selection rule and metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from feddg_bench.analysis.report.pool import Pool
from feddg_bench.analysis.report.runs import SPLITS, Details, metrics_of
from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.columns import Column
from feddg_bench.analysis.tables.describe import ColumnSpec, Description, GroupSpec, Summary
from feddg_bench.analysis.tables.generic import Generic, shown_as
from feddg_bench.analysis.tables.grid import DASH, Entry, Grid, Line
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import RULES, Rule
from feddg_bench.records.runs import Run

COST_HEADS = {
    "megabytes_up": "MB up a round",
    "megabytes_down": "MB down a round",
    "local_training_time": "s training a client",
    "aggregation_time": "s aggregation a round",
    "one_time_cost": "s before round 1",
}
"""Cost -> head of its column."""

MARKS = {"best": 1, "second": 2}


@dataclass(frozen=True)
class View:
    """One way to look at a table.

    Attributes:
        metric: One of `feddg_bench.analysis.report.runs.METRICS`, or ``cost``.
        rule: Selection rule; costs are of all rounds.
        description: The table's columns for it.
    """

    metric: str
    rule: Rule
    description: Description


def leaderboard(table: Generic, details: Details, strings: Pool) -> dict[str, Any]:
    """Return a table with all its views.

    Args:
        table: A generic table.
        details: Where its runs go.
        strings: Where its sentences go.

    Raises:
        DataError: If a record is damaged, or two runs would fall into one cell.
    """
    first = table.runs[0]
    by_key = {run.key: run for run in table.runs}
    for run in table.runs:  # reads each record once, whatever the views ask for
        details.add(run)
    rows: list[dict[str, Any]] = []
    views = []
    fills: list[list[int]] = []
    for view in _views(table):
        grid = build(table.name, view.description, table.runs, select=view.rule, any_paper=True)
        if not rows:
            rows = [_row(line, grid, by_key, details) for line in grid.lines if line.kind == "ours"]
            fills = _fills(grid, strings)
        views.append(_view(view, grid, strings))
    measured = {first.metric.name} | {view["metric"] for view in views if view["splits"]}
    title, _, frame = table.description.title.partition(": ")
    return {
        "name": table.name,
        "title": title,
        "dataset": first.dataset,
        "protocol": first.protocol,
        "recipe": _recipe(table.runs),
        "frame": frame,
        "metric": first.metric.name,
        "rows": rows,
        "fills": fills,
        "views": [view for view in views if view["metric"] in measured],
    }


def _recipe(runs: Sequence[Run]) -> str:
    return min(run.recipe for run in runs)  # a generic table has one


def _views(table: Generic) -> Iterator[View]:
    groups = _groups(table)
    for metric in metrics_of(table.runs[0]):
        shown = shown_as(find_metric(metric, table.runs[0].task))
        described = _described(table, groups, **shown, lower_is_better=metric == "loss")
        for rule in RULES:
            yield View(metric, rule, described)
    costs = GroupSpec(
        head="cost",
        columns=[ColumnSpec(head=head, metric=metric) for metric, head in COST_HEADS.items()],
    )
    yield View(
        "cost", "last", _described(table, [costs], unit="", lower_is_better=True, decimals=3)
    )


def _described(table: Generic, groups: Sequence[GroupSpec], **more: Any) -> Description:
    own = table.description
    return Description(title=own.title, where=own.where, others=True, groups=list(groups), **more)


def _groups(table: Generic) -> list[GroupSpec]:
    """Return the scenarios under each split, with their mean and the worst of them."""
    held = {group.split: group.columns for group in table.description.groups}
    inside = [
        ColumnSpec(head=name, where={"scenario": name})
        for name in sorted({run.scenario for run in table.runs})
    ]
    groups = []
    for split in SPLITS:
        columns = held.get(split, [] if split == "val" else inside)
        if columns:
            kinds: dict[Summary, str] = {"mean": "mean", "worst": "worst"}
            summaries = kinds if len(columns) > 1 else {}
            groups.append(GroupSpec(head=split, split=split, columns=columns, summaries=summaries))
    return groups


# ----------------------------------------------------------------------------- encoding


def _row(line: Line, grid: Grid, runs: dict[str, Run], details: Details) -> dict[str, Any]:
    keys = [found.rpartition(":")[2] for cell in grid.runs[line.row].values() for found in cell]
    return {
        "label": line.label,
        "method": line.facts["method"],
        "runs": [details.add(runs[key]) for key in keys],
    }


def _fills(grid: Grid, strings: Pool) -> list[list[int]]:
    """Return [row, column, command] of cells that a run would fill."""
    ours = [line for line in grid.lines if line.kind == "ours"]
    return [
        [row, column, strings.add(entry.fill)]
        for row, line in enumerate(ours)
        for column, entry in enumerate(line.entries)
        if entry is not None and entry.fill
    ]


def _view(view: View, grid: Grid, strings: Pool) -> dict[str, Any]:
    lines = [line for line in grid.lines if line.kind == "ours"]
    beside: dict[tuple[str, str], Line] = {
        (line.kind, line.row): line for line in grid.lines if line.kind != "ours"
    }
    splits = []
    for name in dict.fromkeys(column.group for column in grid.columns):
        places = [n for n, column in enumerate(grid.columns) if column.group == name]
        cells = [
            [
                _cell(
                    line.entries[n],
                    _of(beside.get(("published", line.row)), n),
                    _of(beside.get(("difference", line.row)), n),
                    strings,
                )
                for n in places
            ]
            for line in lines
        ]
        if any(cell[0] != DASH for row in cells for cell in row):
            columns = [_column(grid.columns[n], n) for n in places]
            splits.append({"split": name, "columns": columns, "cells": cells})
    return {
        "metric": view.metric,
        "rule": None if view.metric == "cost" else view.rule,
        "unit": view.description.unit,
        "lower": view.description.lower_is_better,
        "caption": [strings.add(said) for said in grid.caption],
        "notes": [strings.add(said) for said in grid.notes],
        "footnotes": [strings.add(said) for said in grid.footnotes],
        "splits": splits,
    }


def _of(line: Line | None, place: int) -> Entry | None:
    return None if line is None else line.entries[place]


def _column(column: Column, place: int) -> list[Any]:
    """Return head, kind, scenario and position of a column."""
    return [column.head, column.kind, column.facts()["scenario"], place]


def _cell(
    ours: Entry | None, published: Entry | None, gap: Entry | None, strings: Pool
) -> list[Any]:
    """Return text, mark, footnotes, published number, its source, and the difference to it.

    What is empty at the end is left out.
    """
    assert ours is not None  # noqa: S101 - rows without runs are those of papers' tables
    cell: list[Any] = [ours.text, MARKS.get(ours.mark or "", 0), list(ours.footnotes)]
    cell += [published.text, strings.add(published.source)] if published else [None, None]
    cell.append(gap.text if gap else None)
    while cell[-1] in (None, 0, []):
        cell.pop()
    return cell
