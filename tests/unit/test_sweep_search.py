"""The Bayesian search: stored points, and learning from validation, never from test images."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from feddg_bench.cli.display import Board
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore
from feddg_bench.runs.request import Datasets, Request
from feddg_bench.sweeps.definition import Objective, Sweep, load_sweep
from feddg_bench.sweeps.jobs import Failures, Job
from feddg_bench.sweeps.leases import Leases
from feddg_bench.sweeps.search import BayesSearch, mean_objective, open_search
from tests.helpers import entry, make_record, measured, refused

pytest.importorskip("optuna")

TEXT = """
program: feddg-bench
command: [feddg-bench, run, "${args_no_hyphens}"]
method: bayes
metric: {name: val/accuracy, goal: maximize}
run_cap: 12
parameters:
  scenario: {value: ip-o-c}
  train.lr: {distribution: log_uniform_values, min: 0.0001, max: 1.0}
  train.optimizer: {values: [adam, sgd]}
"""


def record(job: Job | None, accuracy: float) -> RunRecord:
    """Return a job's record with validation accuracy ``accuracy`` and test ``1 - accuracy``."""
    evaluation = {
        "val": measured(accuracy, "a", images=30),
        "id_val": measured(1.0, "b") | measured(0.0, "c", images=30),
        "test": measured(1 - accuracy, "d", images=30),
    }
    for split, loss in (("val", {"a": 2.0}), ("id_val", {"c": 3.0}), ("test", {"d": 9.0})):
        for domain, value in loss.items():
            evaluation[split][domain]["loss"] = value
    (plan,) = Request.read(pairs=job.pairs if job else ("scenario=ip-o-c",)).plan(Datasets())
    names = plan.settings.model_dump(include={"scenario", "seed"})
    rounds = [entry(1, evaluation)]
    domains = (("b", "c"), "a", "d")
    return make_record(names, domains=domains, key=plan.key, settings=plan.canonical, rounds=rounds)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    path = tmp_path / "sweep.yaml"
    path.write_text(TEXT)
    return load_sweep(path)


def rate(search: BayesSearch, number: int) -> float:
    return float(search.jobs()[number].pairs[-2].partition("=")[2])


def finish(search: BayesSearch, root: Path) -> list[float]:
    """Answer every proposal with a validation accuracy that is best at 0.01; return the rates."""
    store = ResultsStore(root)
    rates = []
    while search.grow():
        job = search.jobs()[-1]
        rates.append(rate(search, len(search.jobs()) - 1))
        store.save(record(job, 1 - abs(rates[-1] - 0.01) ** 0.25))
    return rates


def test_the_same_results_lead_to_the_same_points(sweep: Sweep, tmp_path: Path) -> None:
    first = finish(BayesSearch(sweep, tmp_path / "a", Datasets()), tmp_path / "a")
    assert len(first) == 12
    half = BayesSearch(sweep, tmp_path / "b", Datasets())
    for _ in range(5):
        half.grow()
        job = half.jobs()[-1]
        number = len(half.jobs()) - 1
        value = record(job, 1 - abs(rate(half, number) - 0.01) ** 0.25)
        ResultsStore(tmp_path / "b").save(value)
    again = BayesSearch(sweep, tmp_path / "b", Datasets())  # after a stop, from the files alone
    assert [rate(again, i) for i in range(5)] == first[:5]
    assert finish(again, tmp_path / "b")[-1] is not None
    assert [rate(again, i) for i in range(12)] == first
    assert not list((tmp_path / "b/leases").iterdir())


def test_it_learns_from_validation(sweep: Sweep, tmp_path: Path) -> None:
    """After the start-up points, proposals concentrate near the best rate, 0.01 in [1e-4, 1]."""
    longer = dataclasses.replace(sweep, run_cap=30)
    rates = finish(BayesSearch(longer, tmp_path, Datasets()), tmp_path)
    assert sum(0.001 < rate < 0.1 for rate in rates[15:]) >= 9


def test_points_under_way_or_failed_are_no_reason_to_stop(sweep: Sweep, tmp_path: Path) -> None:
    search = BayesSearch(sweep, tmp_path, Datasets())
    for _ in range(12):
        assert search.grow()
        if len(search.jobs()) == 3:
            Failures(tmp_path).save(search.jobs()[0], "it failed")
    assert not search.grow()
    assert search.left() == 0
    assert len({job.key for job in search.jobs()}) == 12


def test_one_proposes_at_a_time(sweep: Sweep, tmp_path: Path) -> None:
    search, other = (
        BayesSearch(sweep, tmp_path, Datasets()),
        BayesSearch(sweep, tmp_path, Datasets()),
    )
    lease = Leases(tmp_path / "leases").take(f"{sweep.id}-search")
    assert lease is not None
    assert not search.grow()
    with lease:
        pass
    assert search.grow()
    assert [job.key for job in other.jobs()] == [job.key for job in search.jobs()]


def test_a_bad_bound_is_refused_before_any_run(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(TEXT.replace("adam, sgd", "adam, sdg"))
    with refused(SettingsError, "train.optimizer"):
        open_search(load_sweep(path), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"point": 5}',
        '{"point": {}}',
        '{"point": {"scenario": 0, "train.lr": 0.1, "train.optimizer": 2}}',
        '{"point": {"scenario": 0, "train.lr": 0.1, "train.optimizer": -1}}',
        '{"point": {"scenario": 0, "train.lr": "0.1", "train.optimizer": 0}}',
        '{"point": {"scenario": 0, "train.lr": 7, "train.optimizer": 0}}',
    ],
)
def test_a_point_that_is_none_is_one_sentence(sweep: Sweep, tmp_path: Path, text: str) -> None:
    search = BayesSearch(sweep, tmp_path, Datasets())
    search.grow()
    (path,) = search.folder.iterdir()
    assert json.loads(path.read_text())["number"] == 0
    path.write_text(text)
    with pytest.raises(DataError, match=path.name):
        BayesSearch(sweep, tmp_path, Datasets()).jobs()


@pytest.mark.parametrize(
    ("name", "value"),
    [("val/accuracy", 0.75), ("val/loss", 2.0), ("id_val/accuracy", 0.25), ("id_val/loss", 2.5)],
)
def test_objectives_are_means_over_images(name: str, value: float) -> None:
    assert Objective(name, True).value(record(None, 0.75)) == pytest.approx(value)


def test_a_loss_that_overflowed_is_a_failed_point(sweep: Sweep, tmp_path: Path) -> None:
    """NaN is null on disk, and no value for the estimator."""
    lowest = dataclasses.replace(sweep, objective=Objective("val/loss", False))
    search = BayesSearch(lowest, tmp_path, Datasets())
    assert search.grow()
    diverged = record(search.jobs()[0], 0.5)
    diverged.rounds[-1].evaluation["val"]["a"]["loss"] = math.inf
    ResultsStore(tmp_path).save(diverged)
    assert math.isnan(mean_objective(lowest, ResultsStore(tmp_path), search.jobs()))
    assert search.grow()
    assert len(search.jobs()) == 2


def test_the_mean_of_a_point(sweep: Sweep, tmp_path: Path) -> None:
    search = BayesSearch(sweep, tmp_path, Datasets())
    search.grow()
    search.grow()
    made = list(search.jobs())
    for job, accuracy in zip(made, (0.25, 0.75), strict=True):
        ResultsStore(tmp_path).save(record(job, accuracy))
    assert mean_objective(sweep, ResultsStore(tmp_path), made) == pytest.approx(0.5)


def test_runs_that_end_together_are_told_one_after_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    over: set[str] = set()
    with Board(str, lambda: (over, 3)) as board:
        for key in "abc":
            board.tell("begin", key, None, 5)
        over |= {"a", "b", "c"}
        for key in "abc":
            board.tell("end", key)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["[1/3] a", "[2/3] b", "[3/3] c"]
