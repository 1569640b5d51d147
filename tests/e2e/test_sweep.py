"""End-to-end tests of ``feddg-bench sweep``: runs, stops, failures, several at once, kills."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import yaml

from feddg_bench.common.errors import FeddgError
from feddg_bench.common.parallel import start_process
from feddg_bench.config.schema import Resources
from feddg_bench.records.store import ResultsStore
from feddg_bench.sweeps import workers
from feddg_bench.sweeps.definition import load_sweep
from feddg_bench.sweeps.leases import Leases
from feddg_bench.sweeps.search import Search, open_search
from feddg_bench.sweeps.workers import MAX_DEATHS, Copy
from tests import kill_sweep
from tests.helpers import ended, start, wait_until

TINY: dict[str, object] = {
    "scenario": {"value": "ip-o-c"},
    "data.image_size": {"value": 8},
    "data.id_test_fraction": {"value": 0.5},
    "data.id_val_fraction": {"value": 0.3},
    "partition.clients": {"value": 3},
    "federation.per_round": {"value": 2},
    "federation.rounds": {"value": 2},
    "train.local_epochs": {"value": 1},
    "train.batch_size": {"value": 128},
}


Run = Callable[..., Any]


def write(path: Path, parameters: dict[str, object], **layer: object) -> Path:
    base: dict[str, object] = {"program": "feddg-bench", "method": "grid"}
    base["command"] = ["${env}", "${program}", "run", "${args_no_hyphens}"]
    text = yaml.safe_dump({**base, **layer, "parameters": {**TINY, **parameters}}, sort_keys=False)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("swept", "words"),
    [
        (
            {"method": {"value": "pardon"}, "hyper.style": {"values": ["pixel", "vgg19_16x"]}},
            "vgg19_16x has no weights: get them with feddg-bench data download",
        ),
        (
            {"backbone.name": {"value": "features"}, "features.encoder": {"value": "mine"}},
            "make them with `feddg-bench data encode digits4 --encoder mine --size 8`",
        ),
    ],
    ids=["weights", "features"],
)
def test_what_is_missing_is_told_before_the_first_run(
    feddg: Run, tmp_path: Path, swept: dict[str, object], words: str
) -> None:
    done = feddg("sweep", write(tmp_path / "s.yaml", swept), "--workers", "1")
    assert done.code == 2
    assert words in done.err
    assert not list(ResultsStore(tmp_path / "runs"))


def test_runs_all_once_and_keeps_failures(feddg: Run, tmp_path: Path) -> None:
    """5,000 clients are more than there are images: such a run fails only when it starts."""
    clients = {"partition.clients": {"values": [3, 5000, 4]}}
    file = write(tmp_path / "s.yaml", clients, metric={"name": "val/loss", "goal": "minimize"})
    listed = feddg("sweep", file, "--dry-run")
    assert listed.code == 2
    assert "would fail: partition.clients is 5000" in listed.err
    assert "1 run: 1 pending" in feddg("sweep", file, "partition.clients=3", "--dry-run").out
    assert not (tmp_path / "runs").exists()

    done = feddg("sweep", file, "--workers", "1")
    assert done.code == 1, done.err
    assert "2 of 3 runs" in done.out
    assert "5000" in done.out
    assert "--retry-failed" in done.out
    assert "best by val/loss" in done.out
    for line in (r"\[1/3\] FedAvg ltdo .* seed 0 N=3: [0-9.]+ s", "seed 0 N=5000: FAILED"):
        assert re.search(line, done.err), done.err
    head, *rows = [line.split() for line in done.out.splitlines()[2:] if line.strip()][:4]
    assert head == ["method", "protocol", "settings", "runs", "id_val", "id_test", "val", "test"]
    assert [row[:4] for row in rows[1:]] == [["FedAvg", "ltdo", f"N={n}", "1"] for n in (3, 4)]
    assert len(list(ResultsStore(tmp_path / "runs"))) == 2
    (failed,) = (tmp_path / "runs/failed").iterdir()
    kept = json.loads(failed.read_text())
    assert kept["key"] == failed.stem
    assert "5000" in kept["error"]
    assert not list((tmp_path / "runs/leases").iterdir())

    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs/runs").iterdir()}
    again = feddg("sweep", file, "--workers", "1")
    assert again.code == 1
    assert "[" not in again.err  # nothing was computed
    assert times == {p: p.stat().st_mtime_ns for p in (tmp_path / "runs/runs").iterdir()}
    retried = feddg("sweep", file, "--workers", "1", "--retry-failed")
    assert "FAILED" in retried.err
    assert "1 failed" in feddg("sweep", file, "--dry-run").out


def test_a_sweep_and_run_make_the_same_records(feddg: Run, tmp_path: Path) -> None:
    """The sweep makes the runs that W&B's agent calls, including method and seed."""
    parameters = {
        "method": {"values": ["fedprox"]},
        "hyper.mu": {"value": 0.1},
        "seed": {"value": 3},
    }
    file = write(tmp_path / "s.yaml", parameters)
    assert feddg("sweep", file, "--workers", "1").code == 0
    (record,) = ResultsStore(tmp_path / "runs")
    assert (record.method, record.seed, record.settings["hyper"]["mu"]) == ("fedprox", 3, 0.1)
    sweep = load_sweep(file)
    (point,) = sweep.points()
    called = feddg("run", *sweep.pairs(point), "--workers", "1")
    assert called.code == 0, called.err
    assert "already done" in called.err


def test_bayes_ends_at_the_cap(feddg: Run, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    rates = {"train.lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 0.1}}
    metric = {"name": "val/accuracy", "goal": "maximize"}
    file = write(tmp_path / "s.yaml", rates, method="bayes", metric=metric, run_cap=3)
    assert feddg("sweep", file, "--dry-run").out.endswith(", bayes: 0 runs: none begun yet\n")
    done = feddg("sweep", file, "--workers", "1")
    assert done.code == 0, done.err
    records = list(ResultsStore(tmp_path / "runs"))
    assert len({record.settings["train"]["lr"] for record in records}) == 3
    assert done.out.count("train.lr=") == 3
    assert "[" not in feddg("sweep", file, "--workers", "1").err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": {"value": "x"}}, "seeds 'x'"),
        ({"method": {"values": ["fedavg", "fedpox"]}}, "fedpox"),
        ({"hyper.nu": {"value": 1}}, "hyper.nu"),
    ],
)
def test_bad_points_are_refused_before_any_run(
    feddg: Run, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    done = feddg("sweep", write(tmp_path / "s.yaml", change))
    assert done.code == 2
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_data_that_is_not_there(feddg: Run, tmp_path: Path) -> None:
    change = {
        "dataset": {"value": "pacs"},
        "scenario": {"value": "cs-a-p"},
        "recipe": {"value": "quick"},
    }
    done = feddg("sweep", write(tmp_path / "s.yaml", change), "--data-root", tmp_path / "none")
    assert done.code == 2
    assert "--data-root" in done.err


@pytest.mark.nightly
def test_two_processes_ctrl_c_and_going_on(feddg: Run, tmp_path: Path) -> None:
    """An interrupted sweep with two workers says how to continue, and continues from there."""
    rounds = {"federation.rounds": {"value": 12}, "seed": {"values": [0, 1]}}
    file = write(tmp_path / "s.yaml", rounds)
    results, log = tmp_path / "runs", tmp_path / "log"
    command = ["sweep", file, "--results", results, "--workers"]
    process = start([*command, 2], log)
    wait_until(lambda: list(results.glob("checkpoints/*.safetensors")), process, log)
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process) == 130, log.read_text()
    errors = log.read_text()
    assert "Traceback" not in errors
    assert "Stopped. Run the same command again to continue.\n0 of 2 runs finished." in errors
    done = feddg(*command, 1)
    assert done.code == 0, done.err
    assert "resuming after round" in done.err
    assert not list((results / "leases").iterdir())
    for record in ResultsStore(results):
        assert [entry.round for entry in record.rounds] == list(range(1, 13))
    keys = {job.key for job in open_search(load_sweep(file), results).jobs()}
    assert {record.key for record in ResultsStore(results)} == keys


def killed(leases: Leases, key: str) -> None:
    """Leave the lease of a killed worker."""
    lease = leases.take(key)
    assert lease is not None
    lease.__enter__()
    lease.file.close()


def test_a_run_is_given_up_after_three_deaths(feddg: Run, tmp_path: Path) -> None:
    """They count from one command to the next, until the run makes progress, or is retried."""
    file = write(tmp_path / "s.yaml", {"seed": {"values": [0, 1]}})
    lost, saved = open_search(load_sweep(file), tmp_path / "runs").jobs()
    leases = Leases.of(tmp_path / "runs")
    for key, deaths in ((lost.key, MAX_DEATHS), (saved.key, MAX_DEATHS - 1)):
        for _ in range(deaths):
            killed(leases, key)
    command = ("sweep", file, "--workers", "1")
    done = feddg(*command)
    assert done.code == 1
    assert "1 of 2 runs" in done.out
    kept = json.loads((tmp_path / f"runs/failed/{lost.key}.json").read_text())
    assert kept["error"].startswith("3 workers died, ")
    assert not list(leases.folder.iterdir())

    (tmp_path / f"runs/failed/{lost.key}.json").unlink()
    for _ in range(MAX_DEATHS):
        killed(leases, lost.key)
    assert feddg(*command, "--retry-failed").code == 0
    assert not list(leases.folder.iterdir())
    assert len(list(ResultsStore(tmp_path / "runs"))) == 2


def test_a_dry_run_names_the_holder_of_a_run(feddg: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "s.yaml", {"seed": {"values": [0, 1]}})
    _, job = open_search(load_sweep(file), tmp_path / "runs").jobs()
    lease = Leases.of(tmp_path / "runs").take(job.key)
    assert lease is not None
    with lease:
        *_, run, holder, facts, _, estimate = feddg("sweep", file, "--dry-run").out.splitlines()
    assert run.startswith(job.key)
    assert re.fullmatch(
        rf"  held by process {os.getpid()} of machine .+ since [-: 0-9]+UTC", holder
    )
    assert facts.endswith("2 runs: 2 pending")
    assert estimate == "no estimate: runs/ has no run of FedAvg in this setup"


@pytest.mark.parametrize("options", [(), ("--engine", "slurm")])
def test_a_folder_without_locks_is_refused(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    def missing(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("feddg_bench.sweeps.leases.lock_descriptor", missing)
    monkeypatch.setattr("feddg_bench.sweeps.workers.slurm_executor", lambda *_: None)
    done = feddg("sweep", write(tmp_path / "s.yaml", {}), *options)
    assert done.code == 2
    assert "(Function not implemented): name another folder with --results" in done.err
    assert len(done.err.strip().splitlines()) == 1


class Dying:
    """A process that dies before it takes a run."""

    exitcode = 1

    def __init__(self, _target: object, arguments: tuple[Any, ...], device: str) -> None:
        arguments[0].close()
        started.append(device)

    def join(self) -> None:
        pass


started: list[str] = []


def test_workers_that_only_die_end_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, another process takes over the dead one's device."""
    monkeypatch.setattr(workers, "start_process", Dying)
    copy = Copy(Search(), Resources())
    with pytest.raises(FeddgError, match="none reached a run"):
        workers.work_in_processes(copy, ["cuda:3"], lambda *_: None)
    assert started == ["cuda:3"] * (MAX_DEATHS + 1)


@pytest.mark.usefixtures("feddg")
def test_a_worker_whose_command_is_gone_saves_no_failure(tmp_path: Path) -> None:
    search = open_search(load_sweep(write(tmp_path / "s.yaml", {})), tmp_path / "runs")
    ours, theirs = Pipe(duplex=False)
    ours.close()
    copy = Copy(search, Resources(results=tmp_path / "runs"))
    worker = start_process(workers._serve, (theirs, copy), "cpu")
    theirs.close()
    assert ended(worker) == 1
    assert not (tmp_path / "runs/failed").exists()


@pytest.mark.nightly
@pytest.mark.usefixtures("feddg")
def test_a_killed_worker_is_replaced_and_its_run_goes_on(tmp_path: Path) -> None:
    rounds = {"federation.rounds": {"value": 12}, "seed": {"values": [0, 1]}}
    results, log = tmp_path / "runs", tmp_path / "log"
    file = write(tmp_path / "s.yaml", rounds)
    process = start(["sweep", file, "--results", results, "--workers", 2], log)
    wait_until(lambda: list(results.glob("checkpoints/*.safetensors")), process, log)
    begun = next(results.glob("checkpoints/*.safetensors")).stem  # the other may have no round yet
    holder = Leases.of(results).held()[begun]
    os.kill(int(holder.split()[1]), signal.SIGKILL)
    assert ended(process) == 0, log.read_text()
    assert "resuming after round" in log.read_text()
    for record in ResultsStore(results):
        assert [entry.round for entry in record.rounds] == list(range(1, 13))
    assert not list((results / "leases").iterdir())


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
@pytest.mark.usefixtures("feddg")
def test_killed_again_and_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(["--jobs", 20, "--kills", 4], log, kill_sweep.main)
    assert ended(process, patience=300) == 0, log.read_text()
    killed = re.search(r"'killed': (\d+)", log.read_text())
    assert killed is not None
    assert int(killed[1]) >= 2
