"""Equal tuning: the same number of trials for every method, and ledgers of the results.

A method's trials are the unchanged recipe; three more learning rates; then points of a
low-discrepancy sequence over the learning rate and the ranges in ``sweeps/tune/METHOD.yaml``. They
depend only on names and ranges, so every machine makes the same trials, and a larger number of
trials begins with the same ones. All methods get the same learning rates, as multiples of the
recipe's.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import cycle
from operator import add
from pathlib import Path
from statistics import fmean
from typing import Any

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import from_here, shipped
from feddg_bench.common.streams import generator
from feddg_bench.common.titles import counted
from feddg_bench.config.layers import Layer, dotted, merge
from feddg_bench.config.recipes import READINGS
from feddg_bench.plugins import check_name
from feddg_bench.records.record import RunRecord
from feddg_bench.records.runs import read_runs
from feddg_bench.records.sources import holds_records
from feddg_bench.records.statistics import FEWEST
from feddg_bench.records.store import open_results
from feddg_bench.records.tuning import (
    FOLDER,
    RULE,
    Rule,
    Trial,
    TuningLedger,
    find_ledger,
    is_out,
    winners,
    with_leads,
    worth,
)
from feddg_bench.runs.request import Datasets, Plan, Request, read_seeds, shared_out
from feddg_bench.sweeps.definition import Choice, Point, Range, load_ranges
from feddg_bench.sweeps.jobs import Failures, Job, jobs
from feddg_bench.sweeps.search import Search

SEEDS = "100-102"
"""Default seeds of tuning: the fewest that can show a significant lead; tables use small seeds."""
RATES = (1.0, 2.0, 0.5, 4.0)
"""Learning rates of the first trials, as multiples of the recipe's; those of later trials lie
between the smallest and the largest. They reach further up than down, because recipes set their
rates for the steps of few clients."""
MEASURED: Layer = {"evaluation": {"splits": ["id_val"]}}
"""Evaluation of trials: only the split used for selection; costs less, and no other can be used."""
logger = logging.getLogger(__name__)
_RATE = "train.lr"
_DIGITS = 3
_BASES = (3, 2, 5, 7, 11, 13)
_LEVELS = 8


class Worths:
    """Values of trials' runs by key, as far as they are finished; ``None`` for a failed run."""

    def __init__(self, root: Path) -> None:
        self.store = open_results(root)
        self.failures = Failures(root)
        self._known: dict[str, float | None] = {}

    def read(self, jobs: Iterable[Job]) -> dict[str, float | None]:
        """Return the values of those jobs that are finished.

        Raises:
            DataError: If a record cannot be read.
        """
        keys = {job.key for job in jobs}
        for key in keys & self.store.keys() - self._known.keys():
            record = self.store.load(key)
            self._known[key] = None if record is None else worth(record)
        failed = dict.fromkeys(keys & self.failures.keys())
        return failed | {key: self._known[key] for key in keys & self._known.keys()}


@dataclass(frozen=True)
class Tuning:
    """The trials of one method."""

    plan: Plan  # the unchanged recipe, with the first seed
    seeds: tuple[int, ...]
    given: tuple[str, ...]  # `KEY=VALUE` of all trials
    points: tuple[Point, ...]  # settings of each trial, by dotted key
    trials: tuple[tuple[Job, ...], ...]  # the runs of each trial, one per seed
    rule: Rule

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The runs of all trials, if none is stopped."""
        return tuple(job for trial in self.trials for job in trial)

    def due(self, worths: Mapping[str, float | None]) -> tuple[tuple[Job, ...], ...]:
        """Return the runs of each trial that count, as far as known from finished runs.

        In a race, all trials that are left are run with a seed before the next seed. The race ends
        if only the first trial is left. ``worths`` is as returned by `Worths.read`.
        """
        if self.rule != "raced":
            return self.trials
        counts = [1] * len(self.trials)
        rivals = list(range(1, len(self.trials)))
        for many in range(1, len(self.seeds) + 1):
            racing = (0, *rivals)
            for number in racing:
                counts[number] = many
            if any(self.trials[number][many - 1].key not in worths for number in racing):
                break
            rivals = [number for number in rivals if not self._is_out(number, many, worths)]
            if not rivals:
                break
        return tuple(runs[:many] for runs, many in zip(self.trials, counts, strict=True))

    def _is_out(self, number: int, many: int, worths: Mapping[str, float | None]) -> bool:
        """Return whether a trial has lost the race after its first ``many`` seeds, or failed."""
        first, own = ([worths[job.key] for job in self.trials[n][:many]] for n in (0, number))
        if None in first:  # nothing to compare with
            return False
        pairs = zip(own, first, strict=True)
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        failed = len(differences) < many
        return failed or is_out(differences, len(self.trials) - 1, len(self.seeds))

    def is_done(self, worths: Worths) -> bool:
        """Return whether every run that counts is recorded, or failed."""
        found = worths.read(self.jobs)
        return all(job.key in found for runs in self.due(found) for job in runs)

    def ledger(self, worths: Worths) -> TuningLedger:
        """Return the results of the trials, all of which are finished.

        Raises:
            DataError: If a record cannot be read.
        """
        found = worths.read(self.jobs)
        store, failures = worths.store, worths.failures
        trials = with_leads(
            [
                _trial(point, {job.key: store.load(job.key) for job in runs}, failures)
                for point, runs in zip(self.points, self.due(found), strict=True)
            ]
        )
        s = self.plan.settings
        return TuningLedger(
            method=s.method,
            dataset=s.dataset,
            protocol=s.protocol,
            recipe=self.plan.recipe,
            scenario=s.scenario,
            seeds=self.seeds,
            given=self.given,
            metric=self.plan.dataset.metrics[0],
            rule=self.rule,
            trials=trials,
            chosen=next(iter(winners(trials, self.rule)), None),
        )


class Race(Search):
    """Source of the runs of raced trials.

    They depend on the finished runs, which every worker reads, on whatever machine.
    """

    unit = "runs"

    def __init__(self, tunings: Sequence[Tuning], root: Path) -> None:
        self.tunings = tunings
        self.worths = Worths(root)

    def jobs(self) -> Sequence[Job]:
        """Return the runs that count, as far as known."""
        due, _ = self._due()
        return due

    def left(self) -> int:
        """Return the maximum number of runs still to come."""
        _, left = self._due()
        return left

    def _due(self) -> tuple[list[Job], int]:
        """Return the runs that count, as far as known, and the maximum number of others."""
        found = self.worths.read(job for tuning in self.tunings for job in tuning.jobs)
        jobs, left = list[Job](), 0
        for tuning in self.tunings:
            due = [job for runs in tuning.due(found) for job in runs]
            jobs += due
            if any(job.key not in found for job in due):
                left += len(tuning.jobs) - len(due)
        return jobs, left


def open_tuning(
    request: Request, trials: int, ranges: Path | None = None, *, race: bool = False
) -> tuple[list[Tuning], Search]:
    """Return each method's trials, resolved and checked, and a search over all their runs.

    Args:
        request: Methods, data set, recipe and seeds; every trial is run with each seed, on the
            protocol's first scenario if none is named.
        trials: Number of trials of each method.
        ranges: Folder of ``METHOD.yaml``; ``None`` for ``sweeps/tune``. For a method without a
            file, only the learning rate is tuned.
        race: Whether trials are stopped that cannot lead clearly any more.

    Raises:
        SettingsError: If there are several scenarios, a race has too few seeds, a run in the
            results folder has one of the seeds, no images of the training domains are held out, or
            a trial is out of range.
        DataError: If the data set reads its domains from the disk and they cannot be read.
    """
    if ranges is not None:
        _check_ranges(ranges)
    root = request.resources.results
    datasets = Datasets(request.resources.data_root)
    request = replace(request, tuned=False, settings=merge(request.settings, MEASURED))
    request = request.one_scenario(datasets)
    seeds = read_seeds(request.seeds)
    if len(seeds) < FEWEST and race:
        are = "is" if len(seeds) == 1 else "are"
        raise SettingsError(
            f"a race needs at least {FEWEST} seeds, and {len(seeds)} {are} given: add seeds, such "
            f"as --seeds {SEEDS}, or leave out --race"
        )
    if len(seeds) < FEWEST:
        logger.warning(
            "trials of fewer than %d seeds choose nothing and the recipe's settings are kept: add "
            "seeds, such as --seeds %s; trials that are made count",
            FEWEST,
            SEEDS,
        )
    plans = replace(request, seeds=seeds[:1]).plan(datasets, check=False)
    _check(plans[0], seeds, root)
    shared = shared_out(request.settings, [plan.settings.method for plan in plans])
    tunings = []
    for plan in plans:
        s = plan.settings
        own = dotted(shared[s.method])
        given = tuple(f"{k}={json.dumps(v)}" for k, v in own.items())
        read = request.readings
        told = given if read == READINGS[0] else (*given, f"readings={read}")
        _check_ledger(plan, told, root)
        named = {"method": s.method, "dataset": s.dataset, "protocol": s.protocol}
        named |= {"scenario": s.scenario, "seeds": ",".join(map(str, seeds))}
        named["readings"] = request.readings
        if request.recipe is not None:
            named["recipe"] = request.recipe
        space = _space(s.method, own, ranges)
        begin = [*(f"{key}={value}" for key, value in named.items()), *given]

        points = trial_points(s.train.lr, space, trials)
        values = ([f"{key}={json.dumps(v)}" for key, v in point.items()] for point in points)
        made = [tuple(jobs([*begin, *pairs], datasets, root)) for pairs in values]
        if len({runs[0].key for runs in made}) < trials:
            raise SettingsError(
                f"{s.method} has nothing left to tune in {trials} trials beside what is given: "
                f"{', '.join(given)}"
            )
        rule: Rule = "raced" if race else RULE
        tunings.append(Tuning(plan, seeds, told, tuple(points), tuple(made), rule))
    if race:
        return tunings, Race(tunings, root / FOLDER)
    return tunings, Search(*(job for tuning in tunings for job in tuning.jobs))


def _check(plan: Plan, seeds: Sequence[int], root: Path) -> None:
    """Refuse tuning with seeds of recorded runs, or without held-out images."""
    s = plan.settings
    runs = read_runs(root) if holds_records(root) else ()
    for seed in seeds:
        if same := [run for run in runs if run.dataset == s.dataset and run.seed == seed]:
            raise SettingsError(
                f"seed {seed} is that of {counted(len(same), 'run')} on {s.dataset} in "
                f"{from_here(root)}, which tables show: tune with others, such as --seeds {SEEDS}"
            )
    drawn = s.data.split_csv is None and s.protocol != "wilds"
    if drawn and s.data.id_val_fraction == 0:
        raise SettingsError(
            "tuning chooses by held-out images of the training domains and this recipe holds out "
            "none: give data.id_val_fraction=0.1"
        )


def _check_ledger(plan: Plan, given: Sequence[str], root: Path) -> None:
    """Refuse trials whose ledger would replace one of other settings or of another scenario."""
    s = plan.settings
    recorded = find_ledger(root, s.dataset, s.protocol, plan.recipe, s.method)
    if recorded is None:
        return
    path, ledger = recorded
    for what, old, new in (
        ("given", sorted(ledger.given), sorted(given)),
        ("scenario", [ledger.scenario], [s.scenario]),
    ):
        if old != new:
            apart = " ".join(sorted({*old} - {*new})) or "nothing more"
            raise SettingsError(
                f"{path} has {s.method} tuned with {what} {apart}, where this command has "
                f"{' '.join(sorted({*new} - {*old})) or 'nothing more'}: name another --results, "
                f"or move that file away"
            )


def _check_ranges(ranges: Path) -> None:
    """Refuse a missing folder, or one with a file that belongs to no method."""
    if not ranges.is_dir():
        raise SettingsError(f"--ranges {ranges} is no folder: expected one that holds METHOD.yaml")
    for file in sorted(ranges.glob("*.yaml")):
        try:
            check_name("method", file.stem)
        except SettingsError as error:
            raise SettingsError(f"{file}: {error}") from error


def _space(
    method: str, given: Mapping[str, Any], ranges: Path | None
) -> dict[str, Choice | Range | None]:
    """Return the search space of a method: the learning rate, then its own settings with ranges."""
    space: dict[str, Choice | Range | None] = {_RATE: None}
    path = (ranges or shipped("sweeps/tune")) / f"{method}.yaml"
    if path.exists():
        own = load_ranges(path)
        space |= {key: own[key] for key in own if "." in key and key != _RATE}
    return {key: parameter for key, parameter in space.items() if key not in given}


def trial_points(
    rate: float, space: Mapping[str, Choice | Range | None], count: int
) -> list[Point]:
    """Return the settings of the first ``count`` trials; an empty point is the unchanged recipe.

    ``rate`` is the recipe's learning rate; ``space`` holds ``train.lr`` unless it is given.
    """
    points: list[Point] = [{}]
    if _RATE in space:
        points += [{_RATE: _short(rate * factor)} for factor in RATES[1:]]
    rates = Range(rate * min(RATES), rate * max(RATES), log=True)
    for i in range(count - len(points)):
        places = [_place(i, name, base) for name, base in zip(space, cycle(_BASES), strict=False)]
        drawn = zip(space.items(), places, strict=True)
        points.append({name: _short((p or rates).draw(place)) for (name, p), place in drawn})
    return points[:count]


def _place(i: int, name: str, base: int) -> float:
    """Return the position in [0, 1) of a setting's value in the i-th point of the sequence.

    It is Halton's sequence, shifted and with its digits permuted by a stream of the setting's name,
    so that no two settings increase together. The first learning rates lie midway between `RATES`.
    """
    stream = generator(0, "tune", name)
    digits = range(base) if name == _RATE else stream.permutation(base)
    shift = 1 / 6 if name == _RATE else stream.random()
    terms = [digits[i // base**k % base] / base ** (k + 1) for k in range(_LEVELS)]
    place = reduce(add, terms)  # in order, which keeps the trials of existing ledgers
    return float((place + shift) % 1)


def _short(value: Any) -> Any:
    """Return a number with few digits: readable, and the same on every machine."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _trial(point: Point, records: Mapping[str, RunRecord | None], failures: Failures) -> Trial:
    """Return a trial's line in the ledger, based only on held-out images of training domains.

    ``records`` are those of its runs by key, ``None`` for a run that failed.
    """
    made = {key: record for key, record in records.items() if record is not None}
    values = [worth(record) for record in made.values()]
    known = tuple(value for value in values if value is not None)
    seconds = [r.time.seconds for r in made.values() if math.isfinite(r.time.seconds)]
    if len(made) < len(records):
        error = next(failures.error(key) for key in records if key not in made)
    elif len(known) < len(values):
        error = f"no {next(iter(made.values())).metric.name} on id_val was measured"
    else:
        error = None
    whole = len(known) == len(records)
    return Trial(
        settings=point,
        keys=tuple(records),
        id_val=fmean(known) if whole else None,
        values=known if whole else None,
        seconds=math.fsum(seconds) if seconds else None,
        error=error,
    )
