"""The estimate of a dry run, and titles that tell the runs of a sweep apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from feddg_bench.records.store import ResultsStore
from feddg_bench.runs.request import Datasets
from feddg_bench.runs.speed import Kind, Work, forecast
from feddg_bench.sweeps.jobs import jobs, titles
from tests import fabricate_records as fabricate


def work(
    method: str = "fedavg", rounds: int = 6, clients: int = 5, epochs: int = 2, size: int = 224
) -> Work:
    kind = Kind(method, "digits4", None, "quick", "resnet50", size)
    return Work(kind, rounds, clients, epochs)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder with two runs of FedAvg that took 400 seconds."""
    store = ResultsStore(tmp_path)
    passes = []
    for seed in (0, 1):
        record = fabricate.record(seed=seed)
        s = record.settings
        passes.append(4 * s["federation"]["per_round"] * s["train"]["local_epochs"])
        store.save(
            record.model_copy(update={"time": record.time.model_copy(update={"seconds": 200.0})})
        )
    assert passes == [80, 80]
    return tmp_path


def test_an_estimate_is_the_speed_of_recorded_runs_times_the_work(results: Path) -> None:
    # 400 s for 160 passes over a client's images; 2 runs of 6 x 5 x 2 passes
    assert list(forecast([work(), work()], results)) == [
        "2 pending runs: 60 local trainings (6 rounds x 5 clients each)",
        "estimate: about 5 min one after the other, at the speed of 2 recorded runs",
    ]
    first, _ = forecast([work(rounds=1), work()], results)
    assert first == "2 pending runs: 35 local trainings"
    assert list(forecast([], results)) == []


def test_there_is_no_estimate_without_a_run_of_each_method(results: Path) -> None:
    one = work("pardon", rounds=1, clients=1)
    first, said = forecast([work(), one], results)
    assert first == "2 pending runs: 31 local trainings"
    assert said.startswith("no estimate: ")
    assert said.endswith("/ has no run of PARDON in this setup")
    _, said = forecast([work(name) for name in ("moon", "fedsr", "pardon", "fpl", "moon")], results)
    assert said.endswith("/ has no run of MOON, FedSR, PARDON and 1 more in this setup")
    _, said = forecast([work(), work(size=448)], results)  # larger images take longer
    assert said.endswith("/ has no run of FedAvg in this setup")
    first, _ = forecast([one], results / "none")
    assert first == "1 pending run: 1 local training (1 round x 1 client each)"


def test_titles_of_a_sweep_name_what_differs() -> None:
    points = [
        [
            "scenario=ip-o-c",
            "method=fedavg",
            "rounds=3",
            f"partition.heterogeneity={x}",
            f"seed={s}",
        ]
        for x in (0, 0.5)
        for s in (0, 1)
    ]
    made = [job for pairs in points for job in jobs(pairs, Datasets())]
    assert list(titles(made).values()) == [
        "FedAvg ltdo ip-o-c seed 0 lambda=0",
        "FedAvg ltdo ip-o-c seed 1 lambda=0",
        "FedAvg ltdo ip-o-c seed 0 lambda=0.5",
        "FedAvg ltdo ip-o-c seed 1 lambda=0.5",
    ]
    assert [title.count("=") for title in titles(made[:2]).values()] == [0, 0]
