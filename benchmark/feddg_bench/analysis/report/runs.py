"""What the report says about one run: settings, curves, bytes, seconds, what went wrong."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from feddg_bench.analysis.tables.commands import repeat_command
from feddg_bench.analysis.tables.describe import Split
from feddg_bench.records.differences import setting_text
from feddg_bench.records.metrics import METRICS, find_metric, metrics_of
from feddg_bench.records.record import Evaluation, RoundRecord
from feddg_bench.records.rules import RULES, chosen_rounds, pooled_metric
from feddg_bench.records.runs import RecordedRun

REPORTED_SPLITS: tuple[Split, ...] = ("test", "val", "id_test", "id_val")
POINTS = 60
"""A curve of more evaluated rounds is thinned to about this many; chosen rounds always stay."""
LISTED = 20
"""Most dropped clients that a run lists."""


def shown_metrics(run: RecordedRun) -> tuple[str, ...]:
    """Return the metrics shown for a run: its data set's key metric, then those beside it."""
    first = metrics_of(run.task)[0]
    beside = ("macro_f1",) if run.imbalance else ()
    return tuple(dict.fromkeys((run.metric.name, first, *beside, "worst_group", "loss")))


class Details:
    """Gathers runs for the page.

    Attributes:
        runs: What `_entry` returns for each run.
        setups: What runs of one method with one set of settings have in common.
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
        """Return what the page says about a run.

        ``seconds`` and ``memory`` (MiB) are for the whole run. ``dropped`` counts dropped clients,
        ``drops`` lists the first `LISTED` as [round, client, tensor]. ``bytes`` is [up per round,
        down per round, up before round 1, down before round 1], ``phases`` lists [phase, seconds
        per round, seconds before round 1]. ``chosen`` holds, for each selection rule, positions in
        ``evaluated``, the numbers of the evaluated rounds shown. ``curves`` holds values by split
        and metric, shares in percent.
        """
        record = run.record()
        rounds, once, environment = record.rounds, record.once, record.environment
        drops = [[0, drop.client, drop.tensor] for drop in once.dropped]
        drops += [[e.round, drop.client, drop.tensor] for e in rounds for drop in e.dropped]
        n = max(len(rounds), 1)
        traffic = [round(sum(getattr(e.bytes, way) for e in rounds) / n) for way in ("up", "down")]
        phases = sorted({name for entry in (once, *rounds) for name in entry.seconds})
        return {
            "key": run.key,
            "setup": self._setup(run, record.settings, environment.threads),
            "scenario": {
                **record.scenario.model_dump(mode="json"), "flag": shlex.quote(run.scenario)
            },
            "seed": run.seed,
            "environment": _plain(environment.model_dump()),
            "started": record.time.started,
            "seconds": number(record.time.seconds, 3),
            "memory": number(record.time.peak_memory_mib, 1),
            "rounds": len(rounds),
            "clients": record.partition.clients,
            "skipped": sum(entry.skipped for entry in rounds),
            "dropped": len(drops),
            "drops": drops[:LISTED],
            "bytes": [*traffic, once.bytes.up, once.bytes.down],
            "phases": [
                [
                    name,
                    number(sum(e.seconds.get(name, 0.0) for e in rounds) / n, 4),
                    number(once.seconds.get(name, 0.0), 4),
                ]
                for name in phases
            ],
            **_curves(run, rounds),
        }  # fmt: skip

    def _setup(self, run: RecordedRun, settings: Mapping[str, Any], threads: int) -> int:
        """Return the position in `setups` of what does not depend on scenario and seed."""
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
                    "command": repeat_command(run, settings, threads),
                }
            )
        return self._places[whole]


def number(value: float, digits: int) -> float | None:
    """Return a number rounded to ``digits`` after the point; ``None`` for NaN and infinity."""
    return round(value, digits) if math.isfinite(value) else None


def _plain(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text; those of a mapping, such as versions, in one line."""
    return {
        name: ", ".join(f"{part} {value[part]}" for part in value)
        if isinstance(value, dict)
        else str(value)
        for name, value in environment.items()
        if value is not None
    }


def _curves(run: RecordedRun, rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    """Return ``evaluated``, ``chosen`` and ``curves`` of a run."""
    found = [(entry.round, entry.evaluation) for entry in rounds if entry.evaluation]
    evaluations = [evaluation for _, evaluation in found]
    chosen = {rule: chosen_rounds(evaluations, rule, run.metric.name) for rule in RULES}
    kept = _thinned(len(found), {place for places in chosen.values() for place in places})
    shown = [evaluations[place] for place in kept]
    curves = {
        split: {
            metric: values
            for metric in METRICS
            if metric in shown_metrics(run) and (values := _curve(run, shown, split, metric))
        }
        for split in REPORTED_SPLITS
    }
    return {
        "evaluated": [found[place][0] for place in kept],
        "chosen": {rule: [kept.index(place) for place in chosen[rule]] for rule in RULES},
        "curves": curves,
    }


def _curve(
    run: RecordedRun, evaluations: Sequence[Evaluation], split: str, metric: str
) -> list[float | None] | None:
    """Return a metric at each evaluation; ``None`` if it was never measured."""
    values = [pooled_metric(evaluation, split, metric) for evaluation in evaluations]
    if all(value is None for value in values):
        return None
    shown = find_metric(metric, run.task)
    digits = 2 if shown.percent else 4
    return [None if v is None else number(shown.display(v), digits) for v in values]


def _thinned(count: int, always: Collection[int]) -> list[int]:
    """Return about `POINTS` positions below ``count``, evenly spread, and those of ``always``."""
    if count <= POINTS:
        return list(range(count))
    spread = {round(n * (count - 1) / (POINTS - 1)) for n in range(POINTS)}
    return sorted(spread.union(always))
