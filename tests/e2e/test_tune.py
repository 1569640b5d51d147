"""End-to-end tests of ``feddg-bench tune`` and ``run --tuned``: trials, ledgers, kills."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from feddg_bench.records.record import TunedRecord
from feddg_bench.records.store import ResultsStore
from tests.e2e.test_sweep import TINY
from tests.helpers import ended, start, wait_until

pytestmark = pytest.mark.nightly

Run = Callable[..., Any]
PAIRS = [f"{key}={spec['value']}" for key, spec in TINY.items()]  # type: ignore[index]


@pytest.fixture(autouse=True)
def none_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no ledgers but the test's own."""
    monkeypatch.setattr("feddg_bench.records.tuning.shipped", lambda folder: tmp_path / folder)


def ledgers(results: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in results.glob("tuning/digits4-ltdo-quick/*")}


def tune(*more: str) -> list[str]:
    return ["tune", "--methods", "fedavg,fedprox", "--trials", "2", *PAIRS, *more]


def test_tune_then_run_with_what_won(feddg: Run, tmp_path: Path) -> None:
    listed = feddg(*tune("--dry-run"))
    assert listed.code == 0, listed.err
    assert "12 runs: 12 pending" in listed.out
    refused = feddg("run", "--method", "fedavg", "--tuned", *PAIRS)
    assert refused.code == 2
    assert "fedavg was not tuned" in refused.err
    assert len(refused.err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()

    done = feddg(*tune("--workers", "1"))
    assert done.code == 0, done.err
    found = ledgers(tmp_path / "runs")
    assert set(found) == {"fedavg", "fedprox"}
    trials = list(ResultsStore(tmp_path / "runs/tuning"))
    assert {record.seed for record in trials} == {100, 101, 102}
    assert not list(ResultsStore(tmp_path / "runs"))  # trials are not in the tables' folder

    for path in tmp_path.glob("runs/tuning/digits4-ltdo-quick/*"):
        path.unlink()
    again = feddg(*tune("--workers", "1"))
    assert "[" not in again.err  # nothing was computed
    assert ledgers(tmp_path / "runs") == found

    ledger = json.loads(found["fedprox"])
    assert ledger["rule"] == "paired_contenders"
    assert [len(trial["values"]) for trial in ledger["trials"]] == [3, 3]
    assert ledger["trials"][1].keys() >= {"lead", "standard_error"}
    best = ledger["trials"][ledger["chosen"]]
    ran = feddg("run", "--method", "fedprox", "--tuned", *PAIRS, "--workers", "1")
    assert ran.code == 0, ran.err
    (record,) = ResultsStore(tmp_path / "runs")
    assert record.tuned == TunedRecord(
        trials=2, settings=best["settings"], seeds=3, scenario="ip-o-c"
    )
    rate = best["settings"].get("train.lr", 0.002)
    assert record.settings["train"]["lr"] == rate
    shown = feddg("settings", "train.lr", "--method", "fedprox", "--tuned", "ltdo", "--json")
    (row,) = json.loads(shown.out)
    assert (row["value"], row["origin"]) == (rate, "tuned" if best["settings"] else "recipe")


def test_a_race_makes_only_the_runs_that_count(feddg: Run, tmp_path: Path) -> None:
    """Of three seeds, a trial ends with the first one that it does not win."""
    listed = feddg(*tune("--race", "--dry-run"))
    assert listed.code == 0, listed.err
    assert "and at most 8 runs more, which depend on the results" in listed.out
    assert "4 runs: 4 pending" in listed.out
    found = {}
    for workers in ("1", "2"):
        root = tmp_path / workers
        done = feddg(*tune("--race", "--workers", workers, "--results", str(root)))
        assert done.code == 0, done.err
        found[workers] = [json.loads(text) for _, text in sorted(ledgers(root).items())]
        for ledger in found[workers]:
            assert ledger["rule"] == "raced"
            recipe, other = (trial["values"] for trial in ledger["trials"])
            wins = [theirs > own for own, theirs in zip(recipe, other, strict=True)]
            assert all(wins[:-1])
            assert len(wins) == 3 or not wins[-1]
        trials = [trial for ledger in found[workers] for trial in ledger["trials"]]
        made = {record.key for record in ResultsStore(root / "tuning")}
        assert made == {key for trial in trials for key in trial["keys"]}
        for trial in trials:
            del trial["seconds"]
    assert found["1"] == found["2"]
    few = feddg(*tune("--race", "--seeds", "100"))
    assert few.code == 2
    assert "a race needs at least 3 seeds, and 1 is given" in few.err


def test_a_model_of_one_class_is_warned_of(feddg: Run, caplog: pytest.LogCaptureFixture) -> None:
    """With this learning rate, the model collapses in the first round."""
    words = "its model predicts a single class on id_val"
    assert feddg("run", "--method", "fedprox", *PAIRS, "--workers", "1").code == 0
    assert words not in caplog.text
    ran = feddg("run", "--method", "fedavg", *PAIRS, "lr=10", "--workers", "1")
    assert "FedAvg ip-o-c seed 0 (run " in caplog.text
    told = f"{words}, id_test, val, test; try a smaller train.lr than 10.0"
    assert caplog.text.count(told) == 1
    assert "A single class predicted on id_val, id_test, val, test" in " ".join(ran.out.split())
    alone = ("--trials", "1", "--seeds", "100", "lr=10", "--workers", "1")
    assert feddg("tune", "--methods", "fedavg", *PAIRS, *alone).code == 0
    assert caplog.text.count(f"{words}; try a smaller train.lr") == 1


def test_a_sweep_of_tuned_runs(feddg: Run, tmp_path: Path) -> None:
    assert feddg(*tune("--seeds", "100,101", "--workers", "1", "--results", "R")).code == 0
    layer = {"program": "feddg-bench", "method": "grid", "parameters": TINY}
    layer |= {"command": ["${env}", "${program}", "run", "tuned=true", "${args_no_hyphens}"]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(layer))
    assert "fedavg was not tuned" in feddg("sweep", "s.yaml").err
    done = feddg("sweep", "s.yaml", "--results", "R", "--workers", "1")
    assert done.code == 0, done.err
    (record,) = ResultsStore(tmp_path / "R")
    assert record.tuned is not None
    assert record.tuned.trials == 2
    ran = feddg("run", "--tuned", *PAIRS, "--results", "R", "--workers", "1")
    assert "already done" in ran.err
    assert "tuned in 2 trials of 2 seeds" in ran.out


def test_killed_in_the_middle(feddg: Run, tmp_path: Path) -> None:
    """After a kill, the same command makes the remaining trials and the same choice."""

    def command(results: Path, workers: int) -> list[str]:
        seeds = ("--seeds", "100")
        return tune("--results", str(results), "--workers", str(workers), *seeds)

    def values(results: Path) -> list[Any]:
        found = [json.loads(text) for _, text in sorted(ledgers(results).items())]
        for trial in [trial for ledger in found for trial in ledger["trials"]]:
            del trial["seconds"]
        return found

    killed, whole, log = tmp_path / "killed", tmp_path / "whole", tmp_path / "log"
    process = start(command(killed, 1), log)
    wait_until(lambda: list(killed.glob("tuning/runs/*.json")), process, log)
    process.kill()
    assert ended(process) == -signal.SIGKILL
    assert not ledgers(killed)
    made = {record.key for record in ResultsStore(killed / "tuning")}
    done = feddg(*command(killed, 2))
    assert done.code == 0
    lines = re.findall(r"^\[\d/4\] ", done.err, re.MULTILINE)  # one for each completed run
    assert len(lines) == 4 - len(made)
    assert feddg(*command(whole, 1)).code == 0
    assert values(killed) == values(whole)
