"""What the report says of one run: settings, curves, bytes, seconds, what went wrong."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from feddg_bench.analysis.report.pool import Pool
from feddg_bench.analysis.tables.commands import repeat_command
from feddg_bench.records import metrics
from feddg_bench.records.record import Costs, Evaluation, RoundRecord, RunRecord
from feddg_bench.records.rules import CHOOSING, RULES, best_round, pooled
from feddg_bench.records.runs import Run
from feddg_bench.records.variants import text

SPLITS = ("test", "val", "id_test", "id_val")
METRICS = tuple(metrics.METRICS)
"""All that a curve may show, see `metrics_of`."""
POINTS = 60
"""A curve of more evaluated rounds is thinned to about so many; chosen rounds always stay."""
LISTED = 20
"""A run says so many of its dropped clients."""

FIELDS = (
    "key",
    "setup",
    "scenario",
    "seed",
    "environment",
    "started",
    "seconds",
    "memory",
    "rounds",
    "clients",
    "skipped",
    "dropped",
    "drops",
    "bytes",
    "phases",
    "evaluated",
    "chosen",
    "curves",
)
"""What a run's list holds, in this order:

``setup``, ``scenario`` (with ``flag``, its name as a shell reads it), ``environment`` and
``evaluated`` (round numbers of the curves) are positions in the pools. ``seconds`` and ``memory``
(MiB) are of the whole run. ``skipped`` and ``dropped`` count, ``drops`` lists [round, client,
tensor]. ``bytes`` is [up a round, down a round, up before round 1, down before round 1], ``phases``
lists [phase, seconds a round, seconds before round 1]. ``chosen`` is, for each selection rule, the
position in ``evaluated``, or null. ``curves`` holds, for each of `SPLITS`, null or for each of
`METRICS` null or its values; shares in percent.
"""


def metrics_of(run: Run) -> tuple[str, ...]:
    """Return what is shown of a run: its data set's key metric, and what there is beside it."""
    first = metrics.metrics_of(run.task)[0]
    return tuple(dict.fromkeys((run.metric.name, first, "worst_group", "loss")))


class Details:
    """Gathers runs; what they share goes into pools.

    Attributes:
        runs: One list a run, see `FIELDS`.
        keys: Dotted names of settings.
        values: Values of settings, as text.
        setups: What runs of one method with one set of settings have in common.
        scenarios: Domains by role.
        environments: Versions, device, commit.
        evaluated: Lists of round numbers.
    """

    def __init__(self) -> None:
        self.runs: list[list[Any]] = []
        self.places: dict[str, int] = {}
        self.keys, self.values, self.setups = Pool(), Pool(), Pool()
        self.scenarios, self.environments, self.evaluated = Pool(), Pool(), Pool()
        self._setups: dict[tuple[Any, ...], int] = {}

    def add(self, run: Run) -> int:
        """Return the position of a run, whose record is read the first time.

        Raises:
            DataError: If the record is damaged.
        """
        if run.key not in self.places:
            self.places[run.key] = len(self.runs)
            self.runs.append(self._entry(run, run.record()))
        return self.places[run.key]

    def as_json(self) -> dict[str, Any]:
        """Return runs and pools."""
        return {
            "fields": list(FIELDS),
            "runs": self.runs,
            "keys": self.keys.values,
            "values": self.values.values,
            "setups": self.setups.values,
            "scenarios": self.scenarios.values,
            "environments": self.environments.values,
            "evaluated": self.evaluated.values,
        }

    def _entry(self, run: Run, record: RunRecord) -> list[Any]:
        rounds, once, environment = record.rounds, record.once, record.environment
        places_of_drops = [(0, once.dropped), *((entry.round, entry.dropped) for entry in rounds)]
        drops = [[at, drop.client, drop.tensor] for at, found in places_of_drops for drop in found]
        places, chosen, curves = _curves(run, rounds)
        found: dict[str, Any] = {
            "key": run.key,
            "setup": self._setup(run, record.settings, environment.threads),
            "scenario": self.scenarios.add(
                {**record.scenario.model_dump(mode="json"), "flag": shlex.quote(run.scenario)}
            ),
            "seed": run.seed,
            "environment": self.environments.add(_plain(environment.model_dump())),
            "started": record.time.started,
            "seconds": number(record.time.seconds, 3),
            "memory": number(record.time.peak_memory_mib, 1),
            "rounds": len(rounds),
            "clients": record.partition.clients,
            "skipped": sum(entry.skipped for entry in rounds),
            "dropped": len(drops),
            "drops": drops[:LISTED],
            "bytes": _bytes(rounds, once),
            "phases": _phases(rounds, once),
            "evaluated": self.evaluated.add(places),
            "chosen": chosen,
            "curves": curves,
        }
        return [found[name] for name in FIELDS]

    def _setup(self, run: Run, settings: Mapping[str, Any], threads: int) -> int:
        """Return the position of what does not depend on scenario and seed."""
        mark = (run.method, run.version, run.dataset, run.protocol, run.recipe, run.fingerprint)
        whole = (*mark, id(run.settings), threads)  # runs share their settings object
        if whole not in self._setups:
            pairs = [
                [self.keys.add(key), self.values.add(text(value))]
                for key, value in run.settings.items()
            ]
            self._setups[whole] = self.setups.add(
                {
                    "method": run.method,
                    "version": run.version,
                    "dataset": run.dataset,
                    "protocol": run.protocol,
                    "recipe": run.recipe,
                    "images": run.fingerprint,
                    "settings": pairs,
                    "command": repeat_command(run, settings, threads),
                }
            )
        return self._setups[whole]


def number(value: float, digits: int) -> float | None:
    """Return a number with so many digits behind the point; ``None`` for NaN and infinity."""
    return round(value, digits) if math.isfinite(value) else None


def _plain(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text; those of a mapping, such as versions, in one line."""
    return {
        name: ", ".join(f"{part} {value[part]}" for part in value)
        if isinstance(value, dict)
        else str(value)
        for name, value in environment.items()
    }


Curve = list[float | None]


def _curves(
    run: Run, rounds: Sequence[RoundRecord]
) -> tuple[list[int], list[int | None], list[list[Curve | None] | None]]:
    """Return the numbers of evaluated rounds, which of them each rule chooses, and the curves."""
    found: list[tuple[int, Evaluation]] = [
        (entry.round, entry.evaluation) for entry in rounds if entry.evaluation
    ]
    evaluations = [evaluation for _, evaluation in found]
    chosen = [
        (len(found) - 1 if found else None)
        if rule == "last"
        else best_round(evaluations, CHOOSING[rule], run.metric.name)
        for rule in RULES
    ]
    kept = _thinned(len(found), {place for place in chosen if place is not None})
    shown = metrics_of(run)
    curves: list[list[Curve | None] | None] = []
    for split in SPLITS:
        of_split = [
            _curve(run, [evaluations[place] for place in kept], split, metric)
            if metric in shown
            else None
            for metric in METRICS
        ]
        curves.append(of_split if any(of_split) else None)
    return (
        [found[place][0] for place in kept],
        [None if place is None else kept.index(place) for place in chosen],
        curves,
    )


def _curve(run: Run, evaluations: Sequence[Evaluation], split: str, metric: str) -> Curve | None:
    """Return a metric after each evaluation, or nothing where it was never measured."""
    values = [pooled(evaluation, split, metric) for evaluation in evaluations]
    if all(value is None for value in values):
        return None
    shown = metrics.find_metric(metric, run.task)
    digits = 2 if shown.percent else 4
    return [None if v is None else number(shown.display(v), digits) for v in values]


def _thinned(count: int, always: set[int]) -> list[int]:
    """Return about `POINTS` positions below ``count``, evenly spread, and those that must stay."""
    if count <= POINTS:
        return list(range(count))
    spread = {round(n * (count - 1) / (POINTS - 1)) for n in range(POINTS)}
    return sorted(spread | always)


def _bytes(rounds: Sequence[RoundRecord], once: Costs) -> list[int]:
    n = max(len(rounds), 1)
    up, down = (sum(entry.bytes.up for entry in rounds), sum(entry.bytes.down for entry in rounds))
    return [round(up / n), round(down / n), once.bytes.up, once.bytes.down]


def _phases(rounds: Sequence[RoundRecord], once: Costs) -> list[list[Any]]:
    """Return each phase with its mean seconds a round, and its seconds before round 1."""
    names = sorted({name for entry in (once, *rounds) for name in entry.seconds})
    n = max(len(rounds), 1)
    return [
        [
            name,
            number(sum(entry.seconds.get(name, 0.0) for entry in rounds) / n, 4),
            number(once.seconds.get(name, 0.0), 4),
        ]
        for name in names
    ]
