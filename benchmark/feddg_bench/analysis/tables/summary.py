"""The table at the end of a command: scenarios down, splits across, with published numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feddg_bench.analysis.tables.frames import RECIPES, departures
from feddg_bench.records.published import Published, published_accuracy
from feddg_bench.records.record import RunRecord
from feddg_bench.records.rules import split_metric
from feddg_bench.records.runs import flatten
from feddg_bench.records.statistics import mean_and_std

_SPLITS = ("id_val", "id_test", "val", "test")


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
    splits: tuple[str, ...]  # splits that at least one scenario has
    rows: tuple[tuple[str, dict[str, Cell | None]], ...]  # scenarios, then the mean
    caption: str  # recipe, backbone, choices of the method, seeds, keys, sources
    decimals: int = 2  # digits after the point that are worth reading

    def as_json(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "title": self.title,
            "caption": self.caption,
            "rows": [
                {"scenario": label, **{s: c and vars(c) for s, c in cells.items()}}
                for label, cells in self.rows
            ],
        }


def summary(records: Sequence[RunRecord]) -> Table:
    """Return the table of one method's runs: last round, mean over seeds.

    The runs must be finished, and of one data set and protocol.
    """
    first = records[0]
    by_scenario: dict[str, list[RunRecord]] = {}
    for record in records:
        by_scenario.setdefault(record.scenario.name, []).append(record)
    papers = {
        (name, split): _published(runs[0], split)
        for name, runs in by_scenario.items()
        for split in _SPLITS
    }
    rows: list[tuple[str, dict[str, Cell | None]]] = []
    for name, runs in by_scenario.items():
        held_out = [d for d in (runs[0].scenario.val, runs[0].scenario.test) if d is not None]
        cells = {split: _cell(runs, split, [papers[name, split]]) for split in _SPLITS}
        rows.append((f"{name} ({' → '.join(held_out)})", cells))
    splits = tuple(s for s in _SPLITS if any(cells[s] for _, cells in rows))
    if len(by_scenario) > 1:
        of_all = {s: [papers[name, s] for name in by_scenario] for s in splits}
        rows.append(("mean", {s: _cell(records, s, of_all[s]) for s in splits}))
    unit = " in %" if first.metric.percent else ""
    return Table(
        f"{first.method} on {first.dataset}, {first.protocol}: {first.metric.title}{unit}",
        splits,
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
    records: Sequence[RunRecord], split: str, papers: Sequence[Published | None]
) -> Cell | None:
    """Return the last round's mean over scenarios and seeds, and its deviation over seeds."""
    scenarios: dict[str, list[float]] = {}
    seeds: dict[int, list[float]] = {}
    for record in records:
        value = split_metric(record.evaluation(), split, record.metric.name)
        if value is not None:
            scenarios.setdefault(record.scenario.name, []).append(record.metric.display(value))
            seeds.setdefault(record.seed, []).append(record.metric.display(value))
    if not scenarios:
        return None
    mean, _ = mean_and_std([mean_and_std(values)[0] for values in scenarios.values()])
    _, std = mean_and_std([mean_and_std(values)[0] for values in seeds.values()])
    known = [paper.value for paper in papers if paper is not None]
    return Cell(mean, std, sum(known) / len(known) if len(known) == len(papers) else None)


def _caption(records: Sequence[RunRecord], sources: Sequence[str]) -> str:
    first = records[0]
    backbone = first.settings["backbone"]
    seeds = sorted({record.seed for record in records})
    parts = [
        "last round",
        f"recipe {first.recipe}" + (f", tuned in {first.tuned.words}" if first.tuned else ""),
        f"backbone {backbone['name']} at {first.settings['data']['image_size']} px"
        + (", pretrained" if backbone["pretrained"] else ", from scratch"),
        *(f"{name} {value}" for name, value in first.labels.items()),
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
        *dict.fromkeys(f"privacy: {r.privacy.words()}" for r in records if r.privacy),
        f"run keys {' '.join(record.key for record in records)}",
    ]
    if sources:
        parts.append(f"published: {'; '.join(dict.fromkeys(sources))}")
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."
