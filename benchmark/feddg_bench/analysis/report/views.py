"""Leaderboards: the generic tables under every selection rule and metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from feddg_bench.analysis.report.runs import REPORTED_SPLITS, Details, shown_metrics
from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.describe import (
    COSTS,
    HEADS,
    ColumnSpec,
    Description,
    GroupSpec,
    Summary,
)
from feddg_bench.analysis.tables.generic import Generic, shown_as
from feddg_bench.analysis.tables.grid import DASH, Entry, Grid, Line
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import RULES, Rule


def leaderboard_view(table: Generic, details: Details) -> dict[str, Any]:
    """Return a table with a view for each metric and selection rule; costs are over all rounds.

    Raises:
        DataError: If a record is damaged, or two runs would fall into one cell.
    """
    first = table.runs[0]
    places = {run.key: details.add(run) for run in table.runs}  # reads each record once
    views = []
    rows: list[dict[str, Any]] = []
    fills: list[tuple[int, int, str]] = []
    for metric, rule, description in _views(table):
        grid = build(
            table.name, description, table.runs, select=rule, any_paper=True, variants=True
        )
        ours = [line for line in grid.lines if line.kind == "ours"]
        if not rows:
            told = {
                row: [k for cell in cells.values() for k in cell]
                for row, cells in grid.runs.items()
            }
            rows = [
                {
                    "label": line.label,
                    "runs": [places[key.rpartition(":")[2]] for key in told[line.row]],
                }
                for line in ours
            ]
            fills = [
                (row, column, entry.fill)
                for row, line in enumerate(ours)
                for column, entry in enumerate(line.entries)
                if entry is not None and entry.fill
            ]
        views.append(
            {
                "metric": metric,
                "rule": None if metric == "cost" else rule,
                "unit": description.unit,
                "lower": description.lower_is_better,
                "caption": grid.definitions,
                "notes": grid.notes,
                "footnotes": grid.footnotes,
                "rows": [_places(grid, line) for line in ours],
                "splits": _splits(grid),
            }
        )
    measured = {first.metric.name} | {view["metric"] for view in views if view["splits"]}
    return {
        "name": table.name,
        "dataset": first.dataset,
        "protocol": first.protocol,
        "recipe": table.recipe,
        "frame": table.description.title.partition(": ")[2],
        "metric": first.metric.name,
        "rows": rows,
        "fills": fills,
        "views": [view for view in views if view["metric"] in measured],
    }


def _views(table: Generic) -> Iterator[tuple[str, Rule, Description]]:
    own = {"title": table.description.title, "where": table.description.where, "others": True}
    richest = max(table.runs, key=lambda run: run.imbalance or 0)  # the first, if all are balanced
    for metric in shown_metrics(richest):
        shown = shown_as(find_metric(metric, table.runs[0].task))
        against = table.description.against if metric == table.runs[0].metric.name else None
        described = Description(
            **own,
            **shown,
            groups=_groups(table, against),
            lower_is_better=metric == "loss",
            against=against,
        )
        for rule in RULES:
            yield metric, rule, described
    columns = [ColumnSpec(head=head, metric=metric) for metric, head in COSTS.items()]
    costs = [GroupSpec(head="cost", columns=columns)]
    more = {"unit": "", "lower_is_better": True, "decimals": 3}
    yield "cost", "last", Description(**own, groups=costs, **more)


def _groups(table: Generic, against: str | None) -> list[GroupSpec]:
    """Return the scenarios under each split, with their mean and the worst of them.

    The test split has more summaries if rows are compared ``against`` a method. Other splits do
    not, since a bootstrap for every view would take a minute.
    """
    held = {group.split: group.columns for group in table.description.groups}
    inside = [
        ColumnSpec(head=name, where={"scenario": name})
        for name in sorted({run.scenario for run in table.runs})
    ]
    groups = []
    for split in REPORTED_SPLITS:
        columns = held.get(split, [] if split == "val" else inside)
        kinds: list[Summary] = ["mean", "worst"] if len(columns) > 1 else []
        if split == "test" and against:
            kinds += ["iqm", "improvement"] if kinds else ["improvement"]
        if columns:
            summaries = {kind: HEADS[kind] for kind in kinds}
            groups.append(GroupSpec(head=split, split=split, columns=columns, summaries=summaries))
    return groups


def _splits(grid: Grid) -> list[dict[str, Any]]:
    """Return the columns and cells of each split that has any number."""
    lines = {kind: {x.row: x for x in grid.lines if x.kind == kind}
             for kind in ("ours", "published", "difference")}  # fmt: skip
    splits = []
    for name in dict.fromkeys(column.group for column in grid.columns):
        places = [n for n, column in enumerate(grid.columns) if column.group == name]
        cells = [
            [
                _cell(
                    grid,
                    [lines[kind][row].entries[n] if row in lines[kind] else None for kind in lines],
                )
                for n in places
            ]
            for row in lines["ours"]
        ]
        if any(cell["text"] != DASH for row in cells for cell in row):
            columns = [
                {
                    "head": grid.columns[n].head,
                    "kind": grid.columns[n].kind,
                    "scenario": grid.columns[n].facts()["scenario"],
                    "place": n,
                }
                for n in places
            ]
            splits.append({"split": name, "columns": columns, "cells": cells})
    return splits


def _places(grid: Grid, part: Line | Entry) -> list[int]:
    """Return the places of footnotes, counted from 0."""
    return [number - 1 for number in grid.numbers(part.footnotes)]


def _cell(grid: Grid, entries: Sequence[Entry | None]) -> dict[str, Any]:
    """Return text, mark and footnotes, and the published number, its source and the difference."""
    ours, published, gap = entries
    assert ours is not None  # noqa: S101 - rows without runs are those of papers' tables
    cell: dict[str, Any] = {"text": ours.text}
    if ours.mark:
        cell["mark"] = ours.mark
    if ours.footnotes:
        cell["footnotes"] = _places(grid, ours)
    if published:
        cell |= {"published": published.text, "source": published.source}
    if gap:
        cell["gap"] = gap.text
    return cell
