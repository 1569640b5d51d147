"""``feddg-bench runs``, keys by their first letters, and a record as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from feddg_bench.records.store import ResultsStore
from feddg_bench.runs.checkpoints import Checkpoint, save_checkpoint
from feddg_bench.runs.request import Datasets
from feddg_bench.sweeps.jobs import Failures, jobs
from tests import fabricate_records as fabricate
from tests.helpers import one_sentence as refused

Run = Callable[..., Any]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder with six finished runs, an interrupted one and a failed one."""
    root = tmp_path / "runs"
    store = ResultsStore(root)
    records = [
        fabricate.record(method, scenario=scenario, seed=seed)
        for method in ("fedavg", "pardon")
        for scenario, seed in (("ip-o-c", 0), ("ip-o-c", 1), ("oc-i-p", 0))
    ]
    for record in records:
        store.save(record)
    store.model(records[0].key, "best").write_bytes(b"")
    begun = fabricate.record("ccst", rounds=4)
    begun = begun.model_copy(update={"rounds": begun.rounds[:3]})
    settings = {**begun.settings, "dataset": "digits4"}
    checkpoint = Checkpoint.model_construct(
        server={"clients": {}, "round": 3},
        record=begun,
        settings=settings,
        recipe="quick",
        data_root=None,
        keep=[],
    )
    save_checkpoint(store.checkpoint(begun.key), checkpoint)
    (lost,) = jobs(["method=moon", "scenario=ic-p-o", "seed=2", "lr=0.5"], Datasets(), root)
    Failures(root).save(lost, "the images went away")
    return root


def found(feddg: Run, *words: str) -> list[dict[str, Any]]:
    """Return the runs that ``feddg-bench runs --json`` lists."""
    done = feddg("runs", *words, "--json")
    assert done.code == 0, done.err
    runs: list[dict[str, Any]] = json.loads(done.out)
    return runs


def test_every_run_is_listed_with_its_state(feddg: Run, results: Path) -> None:
    runs = found(feddg)
    states = {run["key"]: run["state"] for run in runs}
    assert sorted(states.values()) == ["done"] * 6 + ["failed", "interrupted"]
    (ccst,) = found(feddg, "--method", "ccst")
    assert (ccst["round"], ccst["rounds"], ccst["state"]) == (3, 4, "interrupted")
    assert ccst["test"] is not None
    (moon,) = found(feddg, "--method", "Moon")
    assert (moon["state"], moon["scenario"], moon["seed"]) == ("failed", "ic-p-o", 2)
    assert moon["error"] == "the images went away"
    for run in runs:
        if run["state"] == "done":
            (record,) = [r for r in ResultsStore(results) if r.key == run["key"]]
            assert run["test"] == record.score("test")
    assert [run["models"] for run in runs if run["models"]] == [["best"]]


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("--scenario", "ip-o-c"), 5),
        (("--scenario", "Chalk", "--method", "Fed_Avg"), 2),
        (("--scenario", "Outline", "--method", "moon"), 1),  # it failed
        (("--method", "all", "--scenario", "ic-p-o,all"), 8),
        (("--method", "fedavg,pardon", "--seeds", "1-3"), 2),
        (("--dataset", "Digits4", "--recipe", "quick", "--protocol", "ltdo"), 8),
    ],
)
def test_filters_of_runs(feddg: Run, words: tuple[str, ...], count: int) -> None:
    assert len(found(feddg, *words)) == count


@pytest.mark.usefixtures("results")
def test_filters_that_no_run_fits(feddg: Run) -> None:
    there = "no run in runs/ has method fedbn: there are ccst, fedavg, moon, pardon"
    refused(feddg("runs", "--method", "fedbn"), there)
    words = ("--method", "moon", "--seeds", "0")
    refused(feddg("runs", *words), "no run in runs/ has all of these: method, seed")


@pytest.mark.usefixtures("results")
def test_the_list_fits_80_columns(feddg: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = feddg("runs")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "8 runs in runs/: 1 interrupted, 6 done, 1 failed"
    (begun,) = [line for line in lines if "CCST" in line]
    assert begun.split()[-2:] == ["interrupted,", "3/4"]
    (kept,) = [line for line in lines if "best" in line]
    assert kept.split()[-2:] == ["done,", "best"]


def test_first_letters_of_a_key(feddg: Run, results: Path) -> None:
    store = ResultsStore(results)
    key = found(feddg, "--method", "pardon")[0]["key"]
    assert store.find(key[:8], store.keys()) == key
    assert store.find("x", store.keys()) is None
    twins = ["ab01", "ab02", "ab"]
    assert store.find("ab", twins) == "ab"  # a whole key
    with pytest.raises(Exception, match=r"'a' is ambiguous in .*: it begins ab and ab01 and ab02"):
        store.find("a", twins)
    refused(feddg("resume", key[:8]), f"it is finished: runs/runs/{key}.json")
    refused(feddg("predict", key[:8], "."), "holds no image file")


def test_a_record_is_three_lines(results: Path) -> None:
    (record, *_) = [r for r in ResultsStore(results) if r.method == "pardon" and r.seed == 1]
    what, scores, where = str(record).splitlines()
    assert what == f"pardon on digits4, ltdo ip-o-c, seed 1, recipe quick: run {record.key}"
    assert scores.startswith("accuracy (%), round 4 of 4: id_val ")
    assert f"test {100 * (record.score('test') or 0):.2f}" in scores
    assert where.startswith("cpu, 2 workers, ")
    assert repr([record]) == f"[{record}]"
    assert record.score("nothing") is None
