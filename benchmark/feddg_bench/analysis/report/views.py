"""Leaderboards and tables of variants, for every selection rule and metric."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from feddg_bench.analysis.report.run_details import REPORTED_SPLITS, Details, shown_metrics
from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.columns import Column, measured_columns
from feddg_bench.analysis.tables.describe import (
    COSTS,
    ColumnSpec,
    Description,
    GroupSpec,
    Summary,
)
from feddg_bench.analysis.tables.generic import Frame, shown_as
from feddg_bench.analysis.tables.grid import Entry, Grid, Line
from feddg_bench.analysis.tables.rows import choose_rows
from feddg_bench.plugins import method_title
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import RULES, UNSEEN, Rule

BESIDE = "macro_f1"
"""Metric shown next to the key metric if classes are imbalanced."""

_OF_RUNS: Collection[Summary] = ("id_test", "compute")
"""Summaries that are not over held-out domains."""
LONGEST = 12
"""Maximum length of a scenario's name in the head of its column; longer names are left out."""


def table_view(table: Frame, details: Details, shown: Collection[str] = ()) -> dict[str, Any]:
    """Return a table with a view for each metric and selection rule; costs are over all rounds.

    A table of variants has only the key metric and costs.

    Args:
        table: A leaderboard, or a table of variants.
        details: Gathers the runs.
        shown: Keys of the runs in the leaderboard, for a table of variants: rows that have only
            these runs are left out.

    Raises:
        DataError: If a record is damaged, or two runs would fall into one cell.
    """
    first = table.runs[0]
    places = {run.key: details.add(run) for run in table.runs}  # reads each record once
    whole = table.name != table.setup
    chosen = choose_rows(
        table.description, measured_columns(table.description, None), table.runs, whole
    )
    views = []
    rows: dict[str, list[str]] = {}  # label -> keys of its runs
    fills: list[tuple[int, str, str]] = []
    for metric, rule, description in _views(table):
        grid = build(
            table.name,
            description,
            (),
            select=rule,
            any_paper=True,
            variants=whole,
            rows=chosen,
            fills=not rows,
        )
        if not rows:
            told = {row: _keys(grid, row) for row in grid.runs}
            rows = {row: keys for row, keys in told.items() if not {*keys} <= {*shown}}
            fills = list(_fills(grid, list(rows)))
        ours = {line.row: line for line in grid.lines if line.kind == "ours"}
        views.append(
            {
                "metric": metric,
                "rule": None if metric == "cost" else rule,
                "unit": description.unit,
                "lower": description.lower_is_better,
                "caption": grid.caption,
                "notes": grid.notes,
                "footnotes": grid.footnotes,
                "rows": [_places(grid, ours[row]) for row in rows],
                "splits": _splits(grid, list(rows), description.against),
            }
        )
    measured = {first.metric.name} | {view["metric"] for view in views if view["splits"]}
    return {
        "name": table.name,
        "setup": table.setup,
        "title": table.description.title,
        "dataset": first.dataset,
        "protocol": first.protocol,
        "recipe": table.recipe,
        "metric": first.metric.name,
        "rows": [
            {"label": row, "runs": [places[key] for key in keys]} for row, keys in rows.items()
        ],
        "fills": fills,
        "views": [view for view in views if view["metric"] in measured],
    }


def _keys(grid: Grid, row: str) -> list[str]:
    return [k.rpartition(":")[2] for keys in grid.runs[row].values() for k in keys]


def _fills(grid: Grid, rows: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield position of the row, scenario and command for cells without a number."""
    for line in grid.lines:
        if line.kind == "ours" and line.row in rows:
            for column, entry in zip(grid.columns, line.entries, strict=True):
                if entry is not None and entry.fill:
                    yield rows.index(line.row), column.facts()["scenario"], entry.fill


def _views(table: Frame) -> Iterator[tuple[str, Rule, Description]]:
    """Yield metric, selection rule and description of each view."""
    metrics = [table.runs[0].metric.name]
    if table.name == table.setup:
        richest = sorted(table.runs, key=lambda run: -(run.imbalance or 0))
        metrics = list(dict.fromkeys(name for run in richest for name in shown_metrics(run)))
    for metric in metrics:
        own = metric == table.description.metric
        wanted = {
            **shown_as(find_metric(metric, table.runs[0].task)),
            "lower_is_better": find_metric(metric).lower,
            "against": table.description.against if own else None,
        }
        for rule in RULES:
            groups = list(_groups(table, table.described(rule).groups, own=own))
            yield metric, rule, table.description.model_copy(update=wanted | {"groups": groups})
    columns = [ColumnSpec(head=head, metric=metric) for metric, head in COSTS.items()]
    costs = [GroupSpec(head="cost", columns=columns)]
    more = {"unit": "", "lower_is_better": True, "decimals": 3, "against": None, "ranked": False}
    yield "cost", "last", table.description.model_copy(update={"groups": costs, **more})


def _groups(table: Frame, groups: Sequence[GroupSpec], *, own: bool) -> Iterator[GroupSpec]:
    """Yield the scenarios under each split with the summaries of the leaderboard, or their mean.

    Summaries over both held-out domains stand under `test`, before its own mean. If classes are
    imbalanced, the mean of `BESIDE` is shown next to the ``own`` metric.
    """
    held = {group.head: group for group in reversed(groups)}  # the first of a split
    beside = own and any(column.metric == BESIDE for group in groups for column in group.columns)
    inside = [
        ColumnSpec(head=name, where={"scenario": name})
        for name in sorted({run.scenario for run in table.runs})
    ]
    for split in REPORTED_SPLITS:
        of = held.get(split)
        columns = of.columns if of else [] if split == "val" else inside
        if not columns:
            continue
        several = len(columns) > 1
        summaries: dict[Summary, str] = {"mean": "mean"} if several else {}
        details: list[Summary] = []
        shown = {"head": split, "split": split}
        if of and split == "test" and own:
            both = held.get(UNSEEN)
            summaries, details = _summaries(both or of)
            if both:
                told = {
                    k: h if k in _OF_RUNS else f"{h}, val and test" for k, h in summaries.items()
                }
                yield GroupSpec(
                    **shown, columns=both.columns, summaries=told, details=details, hidden=True
                )
                summaries, details = ({"mean": "test"} if several else {}), []
        yield GroupSpec(**shown, columns=columns, summaries=summaries, details=details)
        if beside:
            other = [c.model_copy(update={"head": "macro F1", "metric": BESIDE}) for c in columns]
            mean: dict[Summary, str] = {"mean": "macro F1"} if several else {}
            yield GroupSpec(**shown, columns=other, summaries=mean, hidden=several)


def _summaries(group: GroupSpec) -> tuple[dict[Summary, str], list[Summary]]:
    """Return the summaries of a group for the page, and those among them that are details."""
    leading: Collection[Summary] = ("mean", "iqm")
    found = {kind: group.summaries[kind] for kind in leading if kind in group.summaries}
    found |= {k: h for k, h in group.summaries.items() if k not in group.details}
    return found, [kind for kind in group.details if kind in found]


def _splits(grid: Grid, rows: Sequence[str], against: str | None) -> list[dict[str, Any]]:
    """Return the columns and cells of each split that has any number, the mean first.

    Summaries without a number, such as a p-value of one scenario, are left out.
    """
    lines = {kind: {x.row: x for x in grid.lines if x.kind == kind}
             for kind in ("ours", "published", "difference")}  # fmt: skip
    ours = [lines["ours"][row] for row in rows]

    def told(n: int) -> bool:
        return any(entry is not None and entry.value is not None
                   for entry in (line.entries[n] for line in ours))  # fmt: skip

    splits = []
    for name in dict.fromkeys(column.group for column in grid.columns):
        places = [
            n
            for n, column in enumerate(grid.columns)
            if column.group == name and not column.detail
            if column.kind == "measured" or told(n)
        ]
        if any(map(told, places)):
            main = grid.columns[places[0]].sources[0].metric
            places.sort(key=lambda n: not _leads(grid.columns[n], main))
            cells = [
                [_cell(grid, [at[row].entries[n] if row in at else None for at in lines.values()])
                 for n in places]
                for row in rows
            ]  # fmt: skip
            columns = [_column(grid.columns[n], main, against) for n in places]
            splits.append({"split": name, "columns": columns, "cells": cells})
    return splits


def _leads(column: Column, main: str) -> bool:
    """Return whether a column orders the rows, and is thus the first one of a narrow window."""
    return column.kind in ("iqm", "mean") and column.sources[0].metric == main


def _column(column: Column, main: str, against: str | None) -> dict[str, Any]:
    """Return a column's head and its name, which is unique in its split."""
    source = column.sources[0]
    scenario = column.facts()["scenario"] if column.kind == "measured" else ""
    name = column.kind if column.kind != "measured" else scenario or column.head
    if column.head == source.split:  # its mean beside that of both held-out domains
        name = column.head
    if source.split is not None and source.metric != main:
        name = source.metric
    code = scenario if len(scenario) <= LONGEST else ""
    to = f"to {method_title(against or '')}"
    below = {"difference": to, "excess": to, "p_value": "Holm", "p_same": "Holm"}
    return {
        "name": name,
        "head": column.head,
        "below": below.get(column.kind, code),
        "scenario": scenario,
    }


def _places(grid: Grid, part: Line | Entry) -> list[int]:
    """Return the places of footnotes, counted from 0."""
    return [number - 1 for number in grid.numbers(part.footnotes)]


def _cell(grid: Grid, entries: Sequence[Entry | None]) -> dict[str, Any]:
    """Return text, mark and footnotes, and the published number, its source and the difference."""
    ours, published, gap = entries
    assert ours is not None  # noqa: S101 - rows without runs are those of papers' tables
    text = ours.text
    low, _, high = text.rpartition("[")[2].rstrip("]").partition(", ")
    if low == high:  # one run, or all are equal: no interval
        text = text.partition(" [")[0]
    cell: dict[str, Any] = {"text": text}
    if ours.mark:
        cell["mark"] = ours.mark
    if ours.footnotes:
        cell["footnotes"] = _places(grid, ours)
    if published:
        cell |= {"published": published.text, "source": published.source}
    if gap:
        cell["gap"] = gap.text
    return cell
