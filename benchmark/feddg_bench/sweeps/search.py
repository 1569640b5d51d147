"""Sources of a sweep's jobs: a fixed list, or a search guided by the results so far."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.common.streams import derive_seed
from feddg_bench.records.store import ResultsStore, open_results
from feddg_bench.runs.request import Datasets
from feddg_bench.sweeps.definition import Choice, Point, Range, Sweep
from feddg_bench.sweeps.jobs import Failures, Job, jobs
from feddg_bench.sweeps.leases import Leases


class Search:
    """Source of jobs; here all are known from the start, such as those of a grid."""

    unit = "points"
    """Name of the items that `left` counts."""

    def __init__(self, *jobs: Job) -> None:
        self.found = jobs

    def jobs(self) -> Sequence[Job]:
        """Return all jobs so far; the list only grows."""
        return self.found

    def grow(self) -> bool:
        """Add the jobs of one more point, if any; return whether there can be new jobs.

        After ``True``, call `jobs` again: another process may have added the point.
        """
        return False

    def left(self) -> int:
        """Return the maximum number of items still to come."""
        return 0


class BayesSearch(Search):
    """Points proposed by a tree-structured Parzen estimator from the records so far.

    Only one small file is kept for each point, ``sweeps/ID/N.json`` in the results folder; the
    estimator is rebuilt from these and the records, so that any process on any machine can propose
    the next point. A lease lets one process propose at a time. With one worker, the same results
    lead to the same points.
    """

    def __init__(self, sweep: Sweep, root: Path, datasets: Datasets) -> None:
        self.sweep = sweep
        self.datasets = datasets
        self.store = open_results(root)
        self.folder = root / "sweeps" / sweep.id
        self.leases = Leases.of(root)
        self._points: list[tuple[Point, list[Job]]] = []

    def jobs(self) -> Sequence[Job]:
        """Return the jobs of all points proposed so far."""
        self._read()
        by_key = {job.key: job for _, made in self._points for job in made}
        return list(by_key.values())

    def left(self) -> int:
        """Return the maximum number of points still to come."""
        return max((self.sweep.run_cap or 0) - len(self._points), 0)

    def grow(self) -> bool:
        """Propose one more point, unless there are enough or another process is proposing one."""
        self._read()
        if not self.left():
            return False
        lease = self.leases.take(f"{self.sweep.id}-search")
        if lease is None:
            return False
        with lease:
            self._read()
            if self.left():
                number = len(self._points)
                values = {"number": number, "point": self._propose(number)}
                write_whole(self._path(number), json.dumps(values).encode() + b"\n")
        self._read()
        return True

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05}.json"

    def _read(self) -> None:
        """Read the points that were added since the last call."""
        while (path := self._path(len(self._points))).exists():
            try:
                point: Point = json.loads(path.read_bytes())["point"]
                named = {name: self._value(name, point[name]) for name in self.sweep.parameters}
            except (ValueError, LookupError, TypeError, OSError) as error:
                raise DataError(
                    f"{path} is cut short or not a point of a search; delete it"
                ) from error
            pairs = self.sweep.pairs(named)
            self._points.append((point, jobs(pairs, self.datasets, self.store.root)))

    def _value(self, name: str, raw: Any) -> Any:
        """Return a parameter's value; for a choice, ``raw`` is the position of the value."""
        parameter = self.sweep.parameters[name]
        if isinstance(parameter, Choice):
            low, high = 0.0, len(parameter.values) - 1.0
        else:
            low, high = _bounds(parameter)
        if not low <= raw <= high:
            raise ValueError(raw)
        return parameter.values[raw] if isinstance(parameter, Choice) else parameter.rounded(raw)

    def _propose(self, number: int) -> Point:
        optuna = _optuna()
        space = {name: _distribution(optuna, p) for name, p in self.sweep.parameters.items()}
        goal = self.sweep.objective
        assert goal is not None  # noqa: S101 - a bayes sweep without one is refused
        recorded, failed = self.store.keys(), Failures(self.store.root).keys()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about optional arguments of the estimator
            study = optuna.create_study(
                direction="maximize" if goal.maximize else "minimize",
                sampler=optuna.samplers.TPESampler(
                    seed=derive_seed(0, "sweep", number) % 2**32,
                    constant_liar=True,  # running points count as poor, so that none repeats
                ),
            )
            for point, made in self._points:
                keys = {job.key for job in made}
                value: float | None = None
                state = optuna.trial.TrialState.RUNNING
                if keys <= recorded:
                    value = mean_objective(self.sweep, self.store, made)
                    state = optuna.trial.TrialState.COMPLETE
                if (value is not None and not math.isfinite(value)) or (
                    value is None and keys <= recorded | failed
                ):
                    value, state = None, optuna.trial.TrialState.FAIL
                known = {"params": point, "distributions": space, "state": state, "value": value}
                study.add_trial(optuna.trial.create_trial(**known))
            return dict(study.ask(space).params)


def mean_objective(sweep: Sweep, store: ResultsStore, made: Sequence[Job]) -> float:
    """Return the mean of a sweep's objective over jobs that are recorded."""
    assert sweep.objective is not None  # noqa: S101 - asked for by the caller
    values = []
    for job in made:
        record = store.load(job.key)
        if record is None:
            raise DataError(f"the record {store.path(job.key)} went away; run the sweep again")
        values.append(sweep.objective.value(record))
    return fmean(values)


def open_search(sweep: Sweep, root: Path, datasets: Datasets | None = None) -> Search:
    """Return a sweep's search; all jobs that are known already are resolved now.

    Raises:
        SettingsError: If a point has an unknown setting or one out of range, before any run.
        DataError: If the data set reads its domains from the disk and they cannot be read.
    """
    datasets = datasets or Datasets()
    if sweep.method == "bayes":
        _optuna()
        for end in (0, -1):  # both ends of every parameter, so that a bad bound shows at once
            point = {
                name: _bounds(p)[end] if isinstance(p, Range) else p.values[end]
                for name, p in sweep.parameters.items()
            }
            _settle(sweep, point, datasets, root)
        return BayesSearch(sweep, root, datasets)
    known: dict[str, Job] = {}
    for point in sweep.points():
        for job in _settle(sweep, point, datasets, root):
            known.setdefault(job.key, job)
    return Search(*known.values())


def _settle(sweep: Sweep, point: Point, datasets: Datasets, root: Path) -> list[Job]:
    """Return a point's jobs, which must have the split that the objective measures."""
    made = jobs(sweep.pairs(point), datasets, root)
    goal = sweep.objective
    if goal is not None and goal.name.startswith("val/"):
        for job in made:
            if not job.has_val:
                raise SettingsError(
                    f"{job.title} has no validation domain for {goal.name}; "
                    f"choose by id_{goal.name}, or use protocol ltdo"
                )
    return made


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SettingsError(
            "a bayes search needs optuna: pip install 'feddg-bench[tune]', or set method: random"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _bounds(parameter: Range) -> tuple[float, float]:
    """Return the smallest and the largest value."""
    return parameter.rounded(parameter.low), parameter.rounded(parameter.high)


def _distribution(optuna: Any, parameter: Choice | Range) -> Any:
    """Return a parameter as the estimator's distribution."""
    d = optuna.distributions
    if not isinstance(parameter, Range):
        return d.CategoricalDistribution(tuple(range(len(parameter.values))))
    if parameter.integer:
        return d.IntDistribution(int(parameter.low), int(parameter.high))
    return d.FloatDistribution(*_bounds(parameter), log=parameter.log, step=parameter.step)
