"""The table at the end of a command: by scenario for one method, by method for several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from feddg_bench.analysis.tables.captions import UNTESTED
from feddg_bench.analysis.tables.caveats import classes, few_images
from feddg_bench.analysis.tables.columns import Column, Kind, MeasuredColumn
from feddg_bench.analysis.tables.describe import RECIPES, ColumnSpec
from feddg_bench.analysis.tables.grid import Entry, Grid, Line
from feddg_bench.analysis.tables.setups import departures
from feddg_bench.common.titles import network_title
from feddg_bench.config.recipes import INCONCLUSIVE, conclusive
from feddg_bench.data.protocols import TITLES
from feddg_bench.plugins import dataset_title, method_title
from feddg_bench.records.metrics import Metric, find_metric
from feddg_bench.records.published import Published, published_accuracy
from feddg_bench.records.record import RunRecord
from feddg_bench.records.rules import SPLITS, one_class_splits, split_metric
from feddg_bench.records.runs import flatten
from feddg_bench.records.statistics import (
    FEWEST,
    LEVEL,
    Comparison,
    Estimate,
    Place,
    compare,
    corrected,
    mean_and_std,
)

_Entries = dict[str, tuple[Entry, Entry | None] | None]
"""Head of a column -> our number, and the published one below it."""


def summary(records: Sequence[RunRecord]) -> Grid:
    """Return the table of one method's runs by scenario: last round, mean over seeds.

    The runs must be finished, and of one data set and protocol.
    """
    first, shown = records[0], _columns(records)
    rows = _by_scenario(records, shown)
    sources = [pair[1].source for _, of in rows for pair in of.values() if pair and pair[1]]
    title = f"{method_title(first.method)} on {_where(first)}: {_measure(first)}"
    return _grid(title, shown, rows, _caption(records, sources))


def compared(records: Sequence[RunRecord]) -> Grid:
    """Return the table of several methods' runs: last round, differences to the first method.

    Numbers are means over scenarios. P-values are corrected (Holm) for the number of methods,
    without centralised ones and those equal to the first. The runs must be finished, and of one
    data set and protocol.
    """
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(record.method, []).append(record)
    first, shown = records[0], _columns(records)
    samples = {name: _sample(runs) for name, runs in groups.items()}
    reference = samples.pop(first.method)
    family = [
        sample != reference and groups[name][0].settings["partition"]["kind"] != "pooled"
        for name, sample in samples.items()
    ]
    several = corrected([compare(sample, reference) for sample in samples.values()], family)
    gaps = dict(zip(samples, several, strict=True))
    rows = [(name, dict(_by_scenario(runs, shown)[-1][1])) for name, runs in groups.items()]
    for name, cells in rows:
        if name in gaps and gaps[name].units:
            cells["difference"] = _difference(gaps[name], _decimals(first)), None
            if not math.isnan(p := gaps[name].p_value):
                cells["p_value"] = Entry(p, f"{p:.3f}"), None
    scenarios = len({record.scenario.name for record in records})
    over = f"mean over {scenarios} scenarios" if scenarios > 1 else first.scenario.name
    held = " and ".join(
        split for split in ("val", "test") if any(cells.get(split) for _, cells in rows)
    )
    said = f"minus {method_title(first.method)}: difference over {held}"
    units = len({frozenset(record.scenario.train) for record in records})
    if units >= FEWEST:
        sets = "scenarios" if units == scenarios else f"{units} sets of training domains"
        said += f", 95 % interval over the {sets}"
        tested = any(not math.isnan(gap.p_value) for gap in gaps.values())
        said += "; * p < 0.05 after Holm's correction" if tested else f"; {UNTESTED}"
    by_one_run = [
        method_title(m)
        for m, runs in groups.items()
        if any(r.tuned and r.tuned.by_one_run for r in runs)
    ]
    if by_one_run:
        said += f"; settings chosen by one run: {', '.join(by_one_run)}"
    title = f"{_where(first)}, {over}: {_measure(first)}"
    words = f"{_caption(records, [], keys=False)} {said[0].upper()}{said[1:]}."
    return _grid(title, shown, rows, words, f"minus {method_title(first.method)}")


def _grid(
    title: str,
    shown: dict[str, tuple[str, Metric]],
    rows: Sequence[tuple[str, _Entries]],
    caption: str,
    gap: str = "",
) -> Grid:
    """Return rows as a table; empty columns are details, ``gap`` is the differences' head."""
    gaps: dict[str, Kind] = {"difference": "difference", "p_value": "p_value"} if gap else {}
    columns = []
    for number, name in enumerate((*shown, *gaps)):
        split, metric = shown.get(name, ("test", shown["test"][1]))
        spec, kind = ColumnSpec(head=name), gaps.get(name, "measured")
        source = MeasuredColumn(number, 0, spec, {}, {}, split, metric.name, "last")
        empty = kind == "measured" and not any(cells.get(name) for _, cells in rows)
        head, detail = gap if kind == "difference" else name, empty or kind == "p_value"
        columns.append(Column("", head, kind, (source,), {}, 2, detail))
    lines = []
    for row, cells in rows:
        label = method_title(row) if gap else row
        pairs = [cells.get(column.sources[0].spec.head) or (None, None) for column in columns]
        ours, published = zip(*pairs, strict=True)
        lines.append(Line("ours", row, label, ours))
        if any(published):
            lines.append(Line("published", row, label, published))
    return Grid("", title, caption, tuple(columns), tuple(lines), (), (), {})


def summary_json(grid: Grid, head: str) -> dict[str, Any]:
    """Return a table of this module as JSON values; ``head`` is the key of its rows' labels.

    Without an interval, its ends are null.
    """
    rows: list[dict[str, Any]] = []
    for line in grid.lines:
        named = {c.sources[0].spec.head: e for c, e in zip(grid.columns, line.entries, strict=True)}
        if line.kind == "published":
            for name, entry in named.items():
                if entry is not None:
                    rows[-1][name]["published"] = entry.value
            continue
        gap, p_value = named.pop("difference", None), named.pop("p_value", None)
        found: dict[str, Any] = {
            name: entry and {"mean": entry.value, "std": entry.std, "published": None}
            for name, entry in named.items()
        }
        if gap is not None:
            found["difference"] = {"value": gap.value, "low": gap.low, "high": gap.high}
            found["p_value"] = p_value and p_value.value
        rows.append({head: line.row, **found})
    return {"title": grid.title, "caption": grid.caption, "rows": rows}


def _difference(comparison: Comparison, decimals: int) -> Entry:
    """Return a difference with its 95 % interval, if there is one: equal runs have none."""
    found = comparison.difference
    if not found.low < found.high:
        return Entry(found.value, Estimate(found.value).text(decimals, signed=True))
    text = found.text(decimals, signed=True) + "*" * (comparison.p_value < LEVEL)
    return Entry(found.value, text, low=found.low, high=found.high)


def _sample(records: Sequence[RunRecord]) -> dict[tuple[Place, int], float]:
    """Return the key metric on the held-out domains by place and seed."""
    metric, found = records[0].metric, {}
    for record in records:
        unit = "+".join(sorted(record.scenario.train))
        for column, split in enumerate(("val", "test")):
            value = split_metric(record.evaluation(), split, metric.name)
            if value is not None:
                found[(column, unit, record.scenario.name), record.seed] = metric.display(value)
    return found


def _where(record: RunRecord) -> str:
    protocol = TITLES.get(record.protocol, record.protocol)
    return f"{dataset_title(record.dataset, record.data.label)}, {protocol}"


def _measure(record: RunRecord) -> str:
    return record.metric.title + (" in %" if record.metric.percent else "")


def _decimals(record: RunRecord) -> int:
    return 2 if record.metric.percent else 3


def _columns(records: Sequence[RunRecord]) -> dict[str, tuple[str, Metric]]:
    """Return split and metric by head: the splits, and macro F1 if classes are imbalanced."""
    columns = {split: (split, records[0].metric) for split in SPLITS}
    if any(record.data.imbalance for record in records) and records[0].metric.name != "macro_f1":
        columns["macro F1"] = ("test", find_metric("macro_f1"))
    return columns


def _by_scenario(
    records: Sequence[RunRecord], columns: dict[str, tuple[str, Metric]]
) -> list[tuple[str, _Entries]]:
    """Return a row for each scenario of one method's runs, and their mean if there are several."""
    by_scenario: dict[str, list[RunRecord]] = {}
    for record in records:
        by_scenario.setdefault(record.scenario.name, []).append(record)
    rows: list[tuple[str, _Entries]] = []
    papers: dict[str, list[Published | None]] = {}
    for name, runs in by_scenario.items():
        held_out = [d for d in (runs[0].scenario.val, runs[0].scenario.test) if d is not None]
        cells: _Entries = {}
        for head, column in columns.items():
            paper = _published(runs[0], head)
            papers.setdefault(head, []).append(paper)
            cells[head] = _cell(runs, *column, [paper])
        rows.append((f"{name} ({' → '.join(held_out)})", cells))
    if len(by_scenario) > 1:
        means = {head: _cell(records, *column, papers[head]) for head, column in columns.items()}
        rows.append(("mean", means))
    return rows


def _published(run: RunRecord, split: str) -> Published | None:
    if split not in ("val", "test") or run.metric.name != "accuracy":
        return None
    held = run.scenario.val if split == "val" else run.scenario.test
    domains = run.scenario.train, held
    found = published_accuracy(run.method, run.dataset, run.protocol, *domains, split)
    if found is None:
        return None
    recipe, settings = RECIPES[found.row["paper"]], flatten(run.settings)
    return None if departures(settings, recipe, run.dataset, run.method) else found


def _cell(
    records: Sequence[RunRecord], split: str, metric: Metric, papers: Sequence[Published | None]
) -> tuple[Entry, Entry | None] | None:
    """Return the last round's mean over scenarios and seeds, with its deviation over seeds."""
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
    digits = _decimals(records[0])
    text = f"{mean:z.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")
    ours = Entry(mean, text, std, tuple(sorted(seeds)))
    known = [paper for paper in papers if paper is not None]
    if len(known) < len(papers):
        return ours, None
    published = fmean(paper.value for paper in known)
    sources = "; ".join(dict.fromkeys(paper.source for paper in known))
    return ours, Entry(published, f"paper {published:.2f}", source=sources)


def _collapsed(records: Sequence[RunRecord]) -> list[str]:
    """Return a sentence on the first run whose model predicts a single class, if there is one."""
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
    encoder = first.settings.get("features", {}).get("encoder")
    size, hidden = first.settings["data"]["image_size"], backbone.get("hidden", 0)
    network = network_title(backbone["name"], encoder, size, hidden)
    seeds = sorted({record.seed for record in records})
    parts = [
        "last round",
        f"recipe {first.recipe}" + (f", tuned in {first.tuned.words}" if first.tuned else ""),
        network
        if encoder
        else f"backbone {network}, {'pretrained' if backbone['pretrained'] else 'from scratch'}",
        *(f"{name} {value}" for name, value in first.labels.items() if keys),
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
        *dict.fromkeys(f"privacy: {r.privacy.words()}" for r in records if r.privacy),
        *_collapsed(records),
        *([] if conclusive(first.recipe) else [f"recipe {first.recipe} is {INCONCLUSIVE}"]),
    ]
    if few := few_images(record.data.few for record in records):
        parts.append(few)
    if keys:
        parts.append(f"run keys {' '.join(record.key for record in records)}")
    if sources:
        parts.append(f"published: {'; '.join(dict.fromkeys(sources))}")
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."
