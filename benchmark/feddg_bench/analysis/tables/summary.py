"""The table at the end of a command: scenarios down, splits across, published numbers beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feddg_bench.records.published import published_accuracy
from feddg_bench.records.record import RunRecord
from feddg_bench.records.rules import split_metric
from feddg_bench.records.statistics import mean_and_std

SPLITS = ("id_val", "id_test", "val", "test")


@dataclass(frozen=True)
class Cell:
    """A metric over seeds, in percent if it is a share.

    Attributes:
        mean: Mean over seeds.
        std: Sample standard deviation; ``None`` for one seed.
        published: The paper's number, if there is one.
    """

    mean: float
    std: float | None
    published: float | None

    def text(self, decimals: int) -> str:
        """Return mean and deviation for people."""
        mean = f"{self.mean:.{decimals}f}"
        return mean if self.std is None else f"{mean} ± {self.std:.{decimals}f}"


@dataclass(frozen=True)
class Table:
    """Rows of cells by split, and a caption that says what was run.

    Attributes:
        title: Method, data set and protocol.
        splits: Splits that at least one scenario has.
        rows: Label and cells of each scenario, then of the mean.
        caption: Recipe, backbone, choices of the method, seeds, keys, sources.
        decimals: Digits behind the point that are worth reading.
    """

    title: str
    splits: tuple[str, ...]
    rows: tuple[tuple[str, dict[str, Cell | None]], ...]
    caption: str
    decimals: int = 2

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

    Args:
        records: Finished runs of one method, data set and protocol.
    """
    first = records[0]
    scenarios = list(dict.fromkeys(record.scenario.name for record in records))
    sources: list[str] = []
    rows = []
    for name in scenarios:
        runs = [record for record in records if record.scenario.name == name]
        cells = {split: _cell(runs, split, sources) for split in SPLITS}
        scenario = runs[0].scenario
        held_out = " → ".join(d for d in (scenario.val, scenario.test) if d is not None)
        rows.append((f"{name} ({held_out})", cells))
    splits = tuple(s for s in SPLITS if any(cells[s] is not None for _, cells in rows))
    if len(scenarios) > 1:
        rows.append(
            (
                "mean",
                {split: _mean([c[split] for _, c in rows], records, split) for split in splits},
            )
        )
    return Table(
        f"{first.method} on {first.dataset}, {first.protocol}: {first.metric.title}"
        + (" in %" if first.metric.percent else ""),
        splits,
        tuple(rows),
        _caption(records, sources),
        2 if first.metric.percent else 3,
    )


def _value(record: RunRecord, split: str) -> float | None:
    """Return the key metric of the last round, in percent if it is a share."""
    value = split_metric(record.evaluation(), split, record.metric.name)
    return None if value is None else record.metric.display(value)


def _cell(runs: Sequence[RunRecord], split: str, sources: list[str]) -> Cell | None:
    values = [_value(run, split) for run in runs]
    known = [value for value in values if value is not None]
    if not known:
        return None
    paper = None
    run = runs[0]
    if split in ("val", "test") and run.metric.name == "accuracy":
        paper = published_accuracy(run.method, run.dataset, run.protocol, run.scenario, split)
    if paper and paper.source not in sources:
        sources.append(paper.source)
    return Cell(*mean_and_std(known), paper.value if paper else None)


def _mean(cells: list[Cell | None], records: Sequence[RunRecord], split: str) -> Cell | None:
    """Return the mean over scenarios; its deviation is that of the seeds' means."""
    known = [cell for cell in cells if cell is not None]
    if not known:
        return None
    by_seed: dict[int, list[float]] = {}
    for record in records:
        value = _value(record, split)
        if value is not None:
            by_seed.setdefault(record.seed, []).append(value)
    _, std = mean_and_std([sum(values) / len(values) for values in by_seed.values()])
    papers = [cell.published for cell in known if cell.published is not None]
    paper = sum(papers) / len(papers) if len(papers) == len(known) else None
    return Cell(sum(cell.mean for cell in known) / len(known), std, paper)


def _caption(records: Sequence[RunRecord], sources: list[str]) -> str:
    first = records[0]
    backbone = first.settings["backbone"]
    seeds = sorted({record.seed for record in records})
    parts = [
        "last round",
        f"recipe {first.recipe}",
        f"backbone {backbone['name']} at {first.settings['data']['image_size']} px"
        + (", pretrained" if backbone["pretrained"] else ", from scratch"),
        *(f"{name} {value}" for name, value in first.labels.items()),
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
        f"run keys {' '.join(record.key for record in records)}",
    ]
    if sources:
        parts.append(f"published: {'; '.join(sources)}")
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."
