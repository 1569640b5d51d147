"""Which records a figure shows, and the numbers of its series."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from feddg_bench.analysis.tables.generic import generic_tables
from feddg_bench.common.errors import DataError, SettingsError, unknown
from feddg_bench.plugins import names
from feddg_bench.records.record import Evaluation
from feddg_bench.records.rules import Rule, split_metric
from feddg_bench.records.runs import Run
from feddg_bench.records.statistics import mean_and_std
from feddg_bench.records.store import read_record
from feddg_bench.records.variants import split as split_variants

SPLITS = ("test", "val", "id_test", "id_val")
SPLIT_NAMES: Mapping[str, str] = {
    "test": "test domain",
    "val": "validation domain",
    "id_test": "held-out images of the training domains (id_test)",
    "id_val": "held-out images of the training domains (id_val)",
}


@dataclass(frozen=True)
class Wanted:
    """What the user asks for; ``None`` is everything.

    Attributes:
        dataset: Name of a data set.
        protocol: Name of a protocol.
        scenarios: Names of scenarios.
        methods: Names of methods.
        recipe: Label of a recipe.
    """

    dataset: str | None = None
    protocol: str | None = None
    scenarios: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    recipe: str | None = None

    def suffix(self) -> str:
        """Return what sets the files of this choice apart from those of everything."""
        parts = [*(self.scenarios or ()), *(self.methods or ())]
        return "".join(f"-{re.sub(r'[^A-Za-z0-9._+]+', '_', part)}" for part in parts)

    def command(self, results: Path) -> str:
        """Return the command that makes records of this choice."""
        parts = ["feddg-bench run", f"--method {','.join(self.methods or ('fedavg', 'pardon'))}"]
        for flag, value in (
            ("dataset", self.dataset),
            ("protocol", self.protocol),
            ("scenario", ",".join(self.scenarios or ())),
            ("recipe", self.recipe),
        ):
            if value:
                parts.append(f"--{flag} {value}")
        if results != Path("results"):
            parts.append(f"--results {results}")
        return " ".join(parts)


def select(runs: Sequence[Run], wanted: Wanted, results: Path) -> list[Run]:
    """Return the runs that are asked for.

    Raises:
        SettingsError: If a name is known neither to the suite nor to the records.
        DataError: If there are no such runs.
    """
    for kind, asked, field in (
        ("data set", (wanted.dataset,), "dataset"),
        ("method", wanted.methods or (), "method"),
    ):
        known = {*names(kind), *(getattr(run, field) for run in runs)}
        for name in asked:
            if name is not None and name not in known:
                raise SettingsError(unknown(kind, name, known))
    if wanted.protocol is not None:
        from feddg_bench.data.protocols import validate_protocol

        validate_protocol(wanted.protocol)
    chosen = [
        run
        for run in runs
        if wanted.dataset in (None, run.dataset) and wanted.protocol in (None, run.protocol)
    ]
    for kind, asked_for, have in (
        ("scenario", wanted.scenarios, {run.scenario for run in chosen}),
        ("recipe", wanted.recipe and (wanted.recipe,), {run.recipe for run in chosen}),
    ):
        for name in asked_for or ():
            if chosen and name not in have:
                raise SettingsError(f"{unknown(f'{kind} of these records', name, have)}")
    chosen = [
        run
        for run in chosen
        if (wanted.scenarios is None or run.scenario in wanted.scenarios)
        and (wanted.methods is None or run.method in wanted.methods)
        and wanted.recipe in (None, run.recipe)
    ]
    if not chosen:
        raise DataError(f"no records in {results} match; make some: {wanted.command(results)}")
    return chosen


@dataclass(frozen=True)
class Frame:
    """Runs that can be compared: of one data set, protocol, recipe and federation.

    Attributes:
        name: Stem for files, such as ``digits4-ltdo-quick``.
        title: The same for people.
        runs: Its runs.
    """

    name: str
    title: str
    runs: tuple[Run, ...]


def frames(runs: Sequence[Run], free: Collection[str] = ()) -> list[Frame]:
    """Return the frames among runs, by name.

    Args:
        runs: Any runs.
        free: Settings in which the runs of a frame may differ.
    """
    by_key = {run.key: run for run in runs}
    if free:
        stripped: dict[int, dict[str, Any]] = {}
        for run in runs:  # runs share their settings object; so must what is left of it
            if id(run.settings) not in stripped:
                left = {key: v for key, v in run.settings.items() if key not in free}
                stripped[id(run.settings)] = left
        runs = [replace(run, settings=stripped[id(run.settings)]) for run in runs]
    return [
        Frame(table.name, table.description.title, tuple(by_key[run.key] for run in table.runs))
        for table in generic_tables(runs)
    ]


@dataclass(frozen=True)
class Group:
    """The runs of one series: one method, settings alike, by scenario and seed."""

    label: str
    method: str
    runs: Mapping[tuple[str, int], tuple[Run, ...]]

    @property
    def scenarios(self) -> frozenset[str]:
        """Scenarios of which there is a run."""
        return frozenset(scenario for scenario, _ in self.runs)


def groups(runs: Iterable[Run], free: Collection[str] = ()) -> list[Group]:
    """Return the series among runs: each method, told apart by what else differs.

    Args:
        runs: Of a frame.
        free: Settings that vary inside a series.
    """
    by_method: dict[str, list[Run]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    found = []
    for method, mine in sorted(by_method.items()):
        for variant in split_variants(mine, free):
            together: dict[tuple[str, int], list[Run]] = {}
            for run in sorted(variant.runs, key=lambda run: run.key):
                together.setdefault((run.scenario, run.seed), []).append(run)
            label = f"{method} ({variant.label})" if variant.label else method
            found.append(
                Group(label, method, {pair: tuple(runs) for pair, runs in together.items()})
            )
    return found


def comparable(found: Sequence[Group]) -> tuple[list[Group], frozenset[str], list[str]]:
    """Return the series that share scenarios, these scenarios, and a note on each that is left out.

    Means over different scenarios cannot be compared (see `most_means`).
    """
    best = most_means([[group.scenarios] for group in found])
    notes = [
        f"{group.label} is left out: it has no run of {', '.join(sorted(best - group.scenarios))}"
        for group in found
        if not best <= group.scenarios
    ]
    return [group for group in found if best <= group.scenarios], best, notes


def most_means(series: Sequence[Sequence[Set[str]]], least: int = 1) -> frozenset[str]:
    """Return the scenarios to take means over: those that keep most means of a scenario.

    Args:
        series: The scenarios at each point of each series.
        least: Points that a series needs to be drawn.
    """

    def kept(scenarios: frozenset[str]) -> int:
        counts = [sum(scenarios <= there for there in points) for points in series]
        return sum(count for count in counts if count >= least)

    return max(
        {frozenset(there) for points in series for there in points},
        key=lambda chosen: (kept(chosen) * len(chosen), kept(chosen), sorted(chosen)),
        default=frozenset(),
    )


@dataclass(frozen=True)
class Point:
    """A mean over seeds of means over scenarios.

    Attributes:
        x: Where.
        mean: The mean.
        std: Sample standard deviation over seeds; ``None`` for one seed.
        seeds: The seeds that have all scenarios.
    """

    x: float
    mean: float
    std: float | None
    seeds: tuple[int, ...]


def points(
    values: Mapping[tuple[float, str, int], float], scenarios: Collection[str]
) -> list[Point]:
    """Return the points that whole seeds give, by x.

    Args:
        values: By x, scenario and seed.
        scenarios: What a seed must have at an x to count there.
    """
    found = []
    for x in sorted({x for x, _, _ in values}):
        seeds = sorted({seed for at, _, seed in values if at == x})
        whole = {
            seed: [values[x, scenario, seed] for scenario in sorted(scenarios)]
            for seed in seeds
            if all((x, scenario, seed) in values for scenario in scenarios)
        }
        if whole:
            mean, std = mean_and_std([sum(v) / len(v) for v in whole.values()])
            found.append(Point(x, mean, std, tuple(whole)))
    return found


def metric_label(run: Run) -> str:
    """Return the key metric of a run's data set as an axis names it."""
    return run.metric.label


def score(run: Run, split: str, rule: Rule) -> float | None:
    """Return the key metric on a split, a share in percent, in the round that a rule chooses."""
    evaluation = run.evaluation(rule)
    return None if evaluation is None else _score(run, evaluation, split)


def scores(run: Run, split: str) -> dict[int, float]:
    """Return the key metric on a split, a share in percent, after each round that was evaluated.

    Raises:
        DataError: If the record is damaged.
    """
    found = {}
    for entry in read_record(run.path).rounds:
        value = _score(run, entry.evaluation or {}, split)
        if value is not None:
            found[entry.round] = value
    return found


def _score(run: Run, evaluation: Evaluation, split: str) -> float | None:
    value = split_metric(evaluation, split, run.metric.name)
    return None if value is None else run.metric.display(value)
