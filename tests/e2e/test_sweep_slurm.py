"""Sweeps as job arrays: with submitit's local executor, and up to the call of a made-up Slurm."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from feddg_bench.config.schema import Resources
from feddg_bench.records.store import ResultsStore
from feddg_bench.sweeps.definition import load_sweep
from feddg_bench.sweeps.search import open_search
from feddg_bench.sweeps.workers import Copy, shared
from tests.e2e.test_sweep import write

submitit = pytest.importorskip("submitit")
SLURM = ("--engine", "slurm", "--jobs", "64", "--gpus-per-job", "1", "--time", "1-12:00:00")
MORE = ("--partition", "gpu", "--threads", "3", "--slurm", "mem=16G", "--slurm", "exclusive")
OWN = ("setup=module load cuda", "setup=date", "srun_args=--mpi=none", "stderr_to_stdout")
"""Parameters of submitit."""


def test_a_dry_run_shows_the_runs_and_the_script(feddg, tmp_path):
    file = write(tmp_path / "s.yaml", {"seed": {"values": [0, 1]}})
    own = (word for option in OWN for word in ("--slurm", option))
    done = feddg("sweep", file, *SLURM, *MORE, *own, "--dry-run")
    assert done.code == 0, done.err
    assert "2 runs: 2 pending" in done.out
    flags = {line.split(" ", 1)[1] for line in done.out.splitlines() if line.startswith("#SBATCH")}
    assert flags >= {
        "--array=0-63%64",
        "--cpus-per-task=3",
        "--gpus-per-node=1",
        "--time=1-12:00:00",
        "--partition=gpu",
        "--mem=16G",
        "--exclusive",
        "--requeue",
        "--signal=USR2@120",
    }
    assert "\nmodule load cuda\ndate\n" in done.out
    assert "\nsrun --unbuffered" in done.out
    assert " --mpi=none " in done.out
    assert "--error=" not in done.out
    assert f"{tmp_path}/runs/slurm" in done.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (SLURM, "--dry-run shows the script"),
        ((*SLURM, "--workers", "4"), "give --jobs"),
        (("--jobs", "3"), "--engine slurm"),
    ],
)
def test_what_cannot_be_submitted_is_refused(feddg, tmp_path, options, words, monkeypatch):
    monkeypatch.setenv("PATH", "")
    done = feddg("sweep", write(tmp_path / "s.yaml", {}), *options)
    assert done.code == 2
    assert words in done.err
    assert not (tmp_path / "runs/slurm").exists() or not any((tmp_path / "runs/slurm").iterdir())


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return a function that writes the ``sbatch`` of a made-up Slurm."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def answer(does):
        for name, line in (("srun", ""), ("sbatch", does)):
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)

    return answer


def test_slurm_is_given_an_array(feddg, tmp_path, cluster):
    """There are as many jobs as remaining runs; a made-up Slurm takes the script and answers."""
    cluster(f"cp $1 {tmp_path}/taken; echo job 71")
    file = write(tmp_path / "s.yaml", {"seed": {"values": [0, 1]}})
    done = feddg("sweep", file, "--engine", "slurm", "--jobs", "64")
    assert done.code == 0, done.err
    assert "2 jobs for the others: 71_0, 71_1;" in done.out
    assert "--array=0-1%2" in (tmp_path / "taken").read_text()


def test_what_sbatch_refuses_is_refused(feddg, tmp_path, cluster):
    cluster("echo sbatch: error: Invalid --time specification >&2; exit 1")
    done = feddg("sweep", write(tmp_path / "s.yaml", {}), *SLURM[:-1], "soon")
    assert done.code == 2
    reason, refused = done.err.strip().splitlines()[-2:]
    assert reason == "sbatch: error: Invalid --time specification"
    assert "sbatch refused the jobs" in refused


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds a process by its parent")
def test_equal_jobs_share_the_runs_and_go_on_when_their_time_is_up(tmp_path, cache):
    rounds = {"federation.rounds": {"value": 20}, "seed": {"values": [0, 1, 2]}}
    search = open_search(load_sweep(write(tmp_path / "s.yaml", rounds)), tmp_path / "runs")
    where = shared(Resources(results=tmp_path / "runs", cache_dir=cache))
    executor = submitit.LocalExecutor(tmp_path / "jobs", max_num_timeout=5)
    executor.update_parameters(timeout_min=10, signal_delay_s=30)
    (job,) = executor.map_array(Copy(search, where), range(1))
    while "round" not in (job.stdout() or ""):
        assert not job.done(), job.stderr()
        time.sleep(0.05)
    controller = job._process.pid
    (pid,) = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    os.kill(int(pid), signal.SIGUSR2)  # as Slurm does before a job's time is up
    Copy(search, where)(1)  # the other job, in this process: importing PyTorch takes long
    job.result()
    assert "Requeued" in job.stderr() + job.stdout()
    records = list(ResultsStore(tmp_path / "runs"))
    assert {record.key for record in records} == {job.key for job in search.jobs()}
    for record in records:
        assert [entry.round for entry in record.rounds] == list(range(1, 21))
    assert not list((tmp_path / "runs/leases").iterdir())
    assert not list((tmp_path / "runs/checkpoints").iterdir())
