"""The table at the end of a command: of one method by scenario, of several by method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feddg_bench.analysis.tables.caveats import classes
from feddg_bench.analysis.tables.describe import RECIPES
from feddg_bench.analysis.tables.setups import departures
from feddg_bench.analysis.tables.titles import dataset_title, method_title
from feddg_bench.data.protocols import TITLES
from feddg_bench.records.metrics import Metric, find_metric
from feddg_bench.records.published import Published, published_accuracy
from feddg_bench.records.record import RunRecord
from feddg_bench.records.rules import one_class_splits, split_metric
from feddg_bench.records.runs import flatten
from feddg_bench.records.statistics import (
    FEWEST,
    LEVEL,
    Comparison,
    Unit,
    compare,
    corrected,
    mean_and_std,
)

_SPLITS = ("id_val", "id_test", "val", "test")
_Columns = dict[str, tuple[str, Metric]]
"""Heading of a column -> the split and the metric in it."""


@dataclass(frozen=True)
class Cell:
    """A metric over seeds, in percent if it is a share."""

    mean: float  # mean over seeds
    std: float | None  # sample standard deviation; `None` for one seed
    published: float | None  # the paper's number, if there is one

    def text(self, decimals: int) -> str:
        """Return the mean and the deviation as text."""
        mean = f"{self.mean:.{decimals}f}"
        return mean if self.std is None else f"{mean} ± {self.std:.{decimals}f}"


@dataclass(frozen=True)
class Table:
    """Rows of cells by split, and a caption that says what was run."""

    title: str  # method, data set and protocol
    columns: tuple[str, ...]  # splits that at least one scenario has, and perhaps `macro F1`
    rows: tuple[tuple[str, dict[str, Cell | None]], ...]  # scenarios, then the mean
    caption: str  # recipe, backbone, choices of the method, seeds, keys, sources
    decimals: int = 2  # digits after the point that are worth reading

    def as_json(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "title": self.title,
            "caption": self.caption,
            "rows": [
                {"scenario": label, **{c: v and vars(v) for c, v in cells.items()}}
                for label, cells in self.rows
            ],
        }


@dataclass(frozen=True)
class MethodsTable:
    """A row for each method: means over scenarios, and the difference to the first method.

    P-values are corrected (Holm) for the number of methods.
    """

    title: str  # data set and protocol
    columns: tuple[str, ...]  # as of `Table`
    rows: tuple[tuple[str, dict[str, Cell | None], Comparison | None], ...]
    caption: str  # recipe, backbone, seeds, how the difference is computed
    decimals: int = 2

    def difference(self, comparison: Comparison | None) -> str:
        """Return a difference with its 95 % interval, where there is one, as text."""
        if comparison is None or not comparison.scenarios:
            return ""
        found, n = comparison.difference, self.decimals
        if math.isnan(found.low):
            return f"{found.value:+.{n}f}"
        mark = "*" * (comparison.p_value < LEVEL)
        return f"{found.value:+.{n}f} [{found.low:+.{n}f}, {found.high:+.{n}f}]{mark}"

    def as_json(self) -> dict[str, Any]:
        """Return the table as JSON values; ends of an interval that there is not are null."""
        rows = []
        for method, cells, comparison in self.rows:
            row: dict[str, Any] = {"method": method, **{c: v and vars(v) for c, v in cells.items()}}
            if comparison is not None and comparison.scenarios:
                found = vars(comparison.difference).items()
                row["difference"] = {k: None if math.isnan(v) else v for k, v in found}
                p_value = comparison.p_value
                row["p_value"] = None if math.isnan(p_value) else p_value
            rows.append(row)
        return {"title": self.title, "caption": self.caption, "rows": rows}


def compared(records: Sequence[RunRecord]) -> MethodsTable:
    """Return the table of several methods' runs: last round, differences to the first method.

    The runs must be finished, and of one data set and protocol.
    """
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(record.method, []).append(record)
    columns, first = _columns(records), records[0]
    samples = {name: _sample(runs) for name, runs in groups.items()}
    reference = samples.pop(first.method)
    several = corrected([compare(sample, reference) for sample in samples.values()])
    gaps = dict(zip(samples, several, strict=True))
    rows = [
        (name, dict(summary(runs, columns).rows[-1][1]), gaps.get(name))
        for name, runs in groups.items()
    ]
    shown = tuple(name for name in columns if any(cells[name] for _, cells, _ in rows))
    scenarios = len({record.scenario.name for record in records})
    over = f"mean over {scenarios} scenarios" if scenarios > 1 else first.scenario.name
    said = f"minus {method_title(first.method)}: difference over test"
    if scenarios >= FEWEST:
        said += ", 95 % interval of a t-test over the scenarios; * p < 0.05 after Holm's correction"
    by_one_run = [
        method_title(m)
        for m, runs in groups.items()
        if any(r.tuned and r.tuned.by_one_run for r in runs)
    ]
    if by_one_run:
        said += f"; settings chosen by one run: {', '.join(by_one_run)}"
    return MethodsTable(
        f"{_where(first)}, {over}: {_measure(first)}",
        shown,
        tuple(rows),
        f"{_caption(records, [], keys=False)} {said[0].upper()}{said[1:]}.",
        2 if first.metric.percent else 3,
    )


def _sample(records: Sequence[RunRecord]) -> dict[tuple[Unit, int], float]:
    """Return the key metric over test by scenario and seed."""
    metric = records[0].metric
    return {
        ((0, record.scenario.name), record.seed): metric.display(value)
        for record in records
        if (value := split_metric(record.evaluation(), "test", metric.name)) is not None
    }


def _where(record: RunRecord) -> str:
    protocol = TITLES.get(record.protocol, record.protocol)
    return f"{dataset_title(record.dataset)}, {protocol}"


def _measure(record: RunRecord) -> str:
    return record.metric.title + (" in %" if record.metric.percent else "")


def _columns(records: Sequence[RunRecord]) -> _Columns:
    """Return the columns: the splits, and macro F1 over test where classes are imbalanced."""
    columns = {split: (split, records[0].metric) for split in _SPLITS}
    if any(record.data.imbalance for record in records) and records[0].metric.name != "macro_f1":
        columns["macro F1"] = ("test", find_metric("macro_f1"))
    return columns


def summary(records: Sequence[RunRecord], columns: _Columns | None = None) -> Table:
    """Return the table of one method's runs: last round, mean over seeds.

    The runs must be finished, and of one data set and protocol.
    """
    first, columns = records[0], columns or _columns(records)
    by_scenario: dict[str, list[RunRecord]] = {}
    for record in records:
        by_scenario.setdefault(record.scenario.name, []).append(record)
    papers = {
        (name, column): _published(runs[0], column)
        for name, runs in by_scenario.items()
        for column in columns
    }
    rows: list[tuple[str, dict[str, Cell | None]]] = []
    for name, runs in by_scenario.items():
        held_out = [d for d in (runs[0].scenario.val, runs[0].scenario.test) if d is not None]
        cells = {c: _cell(runs, *columns[c], [papers[name, c]]) for c in columns}
        rows.append((f"{name} ({' → '.join(held_out)})", cells))
    shown = tuple(c for c in columns if any(cells[c] for _, cells in rows))
    if len(by_scenario) > 1:
        of_all = {c: [papers[name, c] for name in by_scenario] for c in columns}
        rows.append(("mean", {c: _cell(records, *columns[c], of_all[c]) for c in columns}))
    return Table(
        f"{method_title(first.method)} on {_where(first)}: {_measure(first)}",
        shown,
        tuple(rows),
        _caption(records, [paper.source for paper in papers.values() if paper]),
        2 if first.metric.percent else 3,
    )


def _published(run: RunRecord, split: str) -> Published | None:
    if split not in ("val", "test") or run.metric.name != "accuracy":
        return None
    found = published_accuracy(run.method, run.dataset, run.protocol, run.scenario, split)
    if found is None:
        return None
    recipe, settings = RECIPES[found.row["paper"]], flatten(run.settings)
    return None if departures(settings, recipe, run.dataset, run.method) else found


def _cell(
    records: Sequence[RunRecord], split: str, metric: Metric, papers: Sequence[Published | None]
) -> Cell | None:
    """Return the last round's mean over scenarios and seeds, and its deviation over seeds."""
    scenarios: dict[str, list[float]] = {}
    seeds: dict[int, list[float]] = {}
    for record in records:
        value = split_metric(record.evaluation(), split, metric.name)
        if value is not None:
            scenarios.setdefault(record.scenario.name, []).append(metric.display(value))
            seeds.setdefault(record.seed, []).append(metric.display(value))
    if not scenarios:
        return None
    mean, _ = mean_and_std([mean_and_std(values)[0] for values in scenarios.values()])
    _, std = mean_and_std([mean_and_std(values)[0] for values in seeds.values()])
    known = [paper.value for paper in papers if paper is not None]
    return Cell(mean, std, sum(known) / len(known) if len(known) == len(papers) else None)


def _collapsed(records: Sequence[RunRecord]) -> list[str]:
    """Return a sentence on the first run whose model predicts one class alone, if there is one."""
    found = [
        f"a single class predicted on {', '.join(splits)} ({r.scenario.name}, seed {r.seed})"
        for r in records
        if (splits := one_class_splits(r.evaluation(), classes(r.dataset)))
    ]
    more = f", as {len(found) - 1} more of {len(records)} runs have" if len(found) > 1 else ""
    return [found[0] + more] if found else []


def _caption(records: Sequence[RunRecord], sources: Sequence[str], *, keys: bool = True) -> str:
    first = records[0]
    backbone = first.settings["backbone"]
    seeds = sorted({record.seed for record in records})
    parts = [
        "last round",
        f"recipe {first.recipe}" + (f", tuned in {first.tuned.words}" if first.tuned else ""),
        f"backbone {backbone['name']} at {first.settings['data']['image_size']} px"
        + (", pretrained" if backbone["pretrained"] else ", from scratch"),
        *(f"{name} {value}" for name, value in first.labels.items() if keys),
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
        *dict.fromkeys(f"privacy: {r.privacy.words()}" for r in records if r.privacy),
        *_collapsed(records),
    ]
    if keys:
        parts.append(f"run keys {' '.join(record.key for record in records)}")
    if sources:
        parts.append(f"published: {'; '.join(dict.fromkeys(sources))}")
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."
