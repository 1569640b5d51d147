"""The report's details of one run: settings, curves, bytes, seconds and faults."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from feddg_bench.analysis.tables.commands import repeat_command
from feddg_bench.analysis.tables.describe import Split
from feddg_bench.records.differences import setting_text
from feddg_bench.records.metrics import METRICS, find_metric, metrics_of
from feddg_bench.records.rules import RULES, chosen_rounds, curve
from feddg_bench.records.runs import RecordedRun

REPORTED_SPLITS: tuple[Split, ...] = ("test", "val", "id_test", "id_val")
POINTS = 60
"""Curves with more evaluated rounds are thinned to about this many; chosen rounds are kept."""
LISTED = 20
"""Maximum number of dropped clients listed for a run."""


def shown_metrics(run: RecordedRun) -> tuple[str, ...]:
    """Return the metrics shown for a run: its data set's key metric, then others if measured."""
    first = metrics_of(run.task)[0]
    beside = ("macro_f1",) if run.imbalance else ()
    asked = (name for name, metric in METRICS.items() if metric.asked)
    shown = dict.fromkeys((run.metric.name, first, *beside, "worst_group", "loss", *asked))
    measured = {metric for _, _, metric in run.table.columns}
    return tuple(name for name in shown if name in measured or name == run.metric.name)


class Details:
    """Gathers runs for the page.

    Attributes:
        runs: Result of `_entry` for each run.
        setups: Data shared by runs of one method with the same settings.
    """

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.setups: list[dict[str, Any]] = []
        self._places: dict[Any, int] = {}

    def add(self, run: RecordedRun) -> int:
        """Return a run's position in `runs`; its record is read when it is first added.

        Raises:
            DataError: If the record is damaged.
        """
        if run.key not in self._places:
            entry = self._entry(run)
            self._places[run.key] = len(self.runs)
            self.runs.append(entry)
        return self._places[run.key]

    def _entry(self, run: RecordedRun) -> dict[str, Any]:
        """Return the page's data on a run.

        ``seconds`` and ``memory`` (MiB) are for the whole run. ``dropped`` counts dropped clients,
        ``drops`` lists the first `LISTED` as [round, client, tensor]. ``bytes`` is [up per round,
        down per round, up before round 1, down before round 1], ``phases`` lists [phase, seconds
        per round, seconds before round 1]. ``chosen`` holds, for each selection rule, positions in
        ``evaluated``, the numbers of the evaluated rounds shown. ``curves`` holds values by split
        and metric, shares in percent.
        """
        usage = run.usage
        return {
            "key": run.key,
            "setup": self._setup(run),
            "scenario": {**usage["scenario"], "flag": shlex.quote(run.scenario)},
            "seed": run.seed,
            "environment": _plain(run.environment),
            "started": usage["started"],
            "seconds": number(usage["seconds"], 3),
            "memory": number(usage["memory"], 1),
            "rounds": run.rounds,
            "clients": usage["clients"],
            "skipped": run.skipped,
            "dropped": len(usage["dropped"]),
            "drops": usage["dropped"][:LISTED],
            "bytes": usage["bytes"],
            "phases": [
                [name, number(each, 4), number(before, 4)] for name, each, before in usage["phases"]
            ],
            **_curves(run),
        }

    def _setup(self, run: RecordedRun) -> int:
        """Return the position in `setups` of data that do not depend on scenario and seed."""
        threads = run.environment["threads"]
        mark = (run.method, run.version, run.dataset, run.protocol, run.recipe, run.fingerprint)
        whole = (*mark, id(run.settings), threads)  # runs share their settings object
        if whole not in self._places:
            self._places[whole] = len(self.setups)
            self.setups.append(
                {
                    "method": run.method,
                    "version": run.version,
                    "dataset": run.dataset,
                    "recipe": run.recipe,
                    "images": run.fingerprint,
                    "settings": [[key, setting_text(value)] for key, value in run.settings.items()],
                    "command": repeat_command(run, run.nested, threads),
                }
            )
        return self._places[whole]


def number(value: float, digits: int) -> float | None:
    """Return a number rounded to ``digits`` after the point; ``None`` for NaN and infinity."""
    return round(value, digits) if math.isfinite(value) else None


def _plain(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text; a mapping, such as versions, becomes one line."""
    return {
        name: ", ".join(f"{part} {value[part]}" for part in value)
        if isinstance(value, dict)
        else str(value)
        for name, value in environment.items()
        if value is not None
    }


def _curves(run: RecordedRun) -> dict[str, Any]:
    """Return ``evaluated``, ``chosen`` and ``curves`` of a run."""
    table = run.table
    chosen = {rule: chosen_rounds(table, rule, run.metric.name) for rule in RULES}
    kept = _thinned(len(table.rounds), {place for places in chosen.values() for place in places})
    shown = sorted(shown_metrics(run), key=[*METRICS].index)
    curves = {
        split: {name: values for name in shown if (values := _curve(run, kept, split, name))}
        for split in REPORTED_SPLITS
    }
    return {
        "evaluated": [table.rounds[place] for place in kept],
        "chosen": {rule: [kept.index(place) for place in chosen[rule]] for rule in RULES},
        "curves": curves,
    }


def _curve(
    run: RecordedRun, kept: Sequence[int], split: str, metric: str
) -> list[float | None] | None:
    """Return a metric at these evaluations; ``None`` if it was never measured."""
    every = curve(run.table, split, metric)
    values = [every[place] for place in kept]
    if values.count(None) == len(values):
        return None
    percent = find_metric(metric, run.task).percent
    times, digits = (100, 2) if percent else (1, 4)
    return [None if v is None else number(times * v, digits) for v in values]


def _thinned(count: int, always: Collection[int]) -> list[int]:
    """Return about `POINTS` positions below ``count``, evenly spread, and those of ``always``."""
    if count <= POINTS:
        return list(range(count))
    spread = {round(n * (count - 1) / (POINTS - 1)) for n in range(POINTS)}
    return sorted(spread.union(always))
