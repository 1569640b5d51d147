"""Interruption and continuation: signals, resume, checkpoints, full disks; and time to errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import feddg_bench as fb
from feddg_bench import cli
from feddg_bench.common.errors import WorkerDeathError
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore
from feddg_methods.fedavg import FedAvg
from tests.helpers import children, ended, refused, start, wait_until

SOURCES = [str(Path(__file__).parents[2] / root) for root in ("benchmark", "methods", "datasets")]
RUN = (
    *("run", "--method", "pardon", "--scenario", "ip-o-c", "--clients", "6", "--per-round", "3"),
    "data.image_size=8",
)


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def environment(cache: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FEDDG")}
    return inherited | {"PYTHONPATH": os.pathsep.join(SOURCES), "FEDDG_CACHE": str(cache)}


def recorded(results: Path) -> RunRecord:
    (path,) = (results / "runs").glob("*.json")
    return RunRecord.parse(path.read_bytes())


ROUNDS = ("--rounds", "12", "train.optimizer_state=persist", "evaluation.every=5")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> RunRecord:
    """A run without interruption."""
    (record,) = fb.run(
        "pardon",
        scenario="ip-o-c",
        settings={
            "clients": 6,
            "per_round": 3,
            "rounds": 12,
            "train.optimizer_state": "persist",
            "evaluation.every": 5,
            "data.image_size": 8,
        },
        results=tmp_path_factory.mktemp("whole"),
        cache_dir=cache,
        quiet=True,
    )
    return record


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "code", "workers"),
    [(signal.SIGINT, 130, "1"), (signal.SIGTERM, 143, "2"), (signal.SIGHUP, 129, "2")],
)
def test_interrupt_resume_equals_no_stop(
    tmp_path: Path,
    feddg: Run,
    whole: RunRecord,
    number: int,
    code: int,
    workers: str,
) -> None:
    results, log = tmp_path / "parts", tmp_path / "log"
    process = start([*RUN, *ROUNDS, "--workers", workers, "--results", results], log)
    wait_until(lambda: list(results.glob("checkpoints/*.safetensors")), process, log)
    os.killpg(process.pid, number)  # like a terminal's Ctrl-C: to the whole group
    assert ended(process) == code, log.read_text()
    errors = log.read_text()
    assert "Traceback" not in errors
    assert not list((results / "runs").glob("*.json"))
    (checkpoint,) = results.glob("checkpoints/*.safetensors")
    assert (
        "Stopped. Run the same command again to continue.\n"
        f"This run alone: feddg-bench resume {checkpoint.stem} --results "
    ) in errors

    done = feddg("resume", checkpoint.stem[:6], "--results", results, "--workers", 1, "--json")
    assert done.code == 0
    assert len(json.loads(done.out)["runs"]) == 1
    assert "resuming after round" in done.err
    parts = recorded(results)
    assert parts.numbers() == whole.numbers()
    assert parts.time.flop == pytest.approx(whole.time.flop, rel=1e-3)
    assert parts.time.share_of_peak is whole.time.share_of_peak is None
    assert not checkpoint.exists()


def test_same_command_goes_on(tmp_path: Path, feddg: Run) -> None:
    """A run that was killed without warning continues from its last complete checkpoint."""
    run = [*RUN, "--rounds", "12", "--workers", "1", "--results", tmp_path]
    log = tmp_path / "log"
    process = start(run, log)
    wait_until(lambda: list(tmp_path.glob("checkpoints/*.safetensors")), process, log)
    process.kill()
    assert ended(process) == -signal.SIGKILL
    done = feddg(*run)
    assert done.code == 0
    assert "resuming after round" in done.err
    assert [entry.round for entry in recorded(tmp_path).rounds] == list(range(1, 13))


def test_checkpoint_cut_short_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoints" / "0123456789abcdef.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"feddg-bench checkpoint 2\n" + bytes(100))
    argv = ["feddg-bench", "resume", "0123456789abcdef", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert str(path) in errors[0]
    assert "delete it" in errors[0]


def test_a_second_interrupt_ends_at_once(environment: dict[str, str]) -> None:
    """It ends whatever the first interrupt is waiting for."""
    code = (
        "import signal, time\n"
        "from multiprocessing import get_context\n"
        "from feddg_bench import cli\n"
        "from feddg_bench.common.errors import RunInterruptedError\n"
        "child = get_context('fork').Process(target=time.sleep, args=(600,), daemon=True)\n"
        "child.start()\n"
        "signal.signal(signal.SIGINT, cli._interrupt)\n"
        "try:\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(600)\n"
        "except RunInterruptedError:\n"
        "    print('ending', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "ending\n"
    process.send_signal(signal.SIGINT)  # the same interrupt again, passed on by a parent process
    time.sleep(2 * cli.TWICE)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    process.stdout.close()
    deadline = time.monotonic() + 60
    while runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.nightly
@pytest.mark.usefixtures("feddg")
@pytest.mark.parametrize(
    ("stopped", "number", "code"),
    [
        (False, signal.SIGKILL, -signal.SIGKILL),
        (False, signal.SIGINT, 130),
        (True, signal.SIGINT, 130),
    ],
)
def test_no_worker_outlives_its_command(
    tmp_path: Path, stopped: bool, number: int, code: int
) -> None:
    """Stopped workers do not hold up an interrupt, and the run can be resumed."""
    log = tmp_path / "log"
    process = start([*RUN, "--rounds", "500", "--workers", "2", "--results", tmp_path], log)
    assert process.pid is not None
    wait_until(lambda: list(tmp_path.glob("checkpoints/*.safetensors")), process, log)
    workers = [worker for child in children(process.pid) for worker in children(child)]
    assert len(workers) == 2
    for worker in workers * stopped:
        os.kill(worker, signal.SIGSTOP)
    os.kill(process.pid, number)
    assert ended(process) == code
    assert len(list(tmp_path.glob("checkpoints/*.safetensors"))) == 1
    deadline = time.monotonic() + 60
    while any(map(runs, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Deadly(FedAvg):
    """Every client kills its process."""

    def fit(self, client: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.nightly
def test_after_a_run_that_kills_workers_the_next_one_begins(tmp_path: Path, cache: Path) -> None:
    given: dict[str, Any] = {
        "scenario": "ip-o-c",
        "settings": {"clients": 6, "per_round": 3, "rounds": 1, "data.image_size": 8},
        "results": tmp_path,
        "cache_dir": cache,
        "workers": 2,
        "quiet": True,
    }
    with refused(WorkerDeathError, "two worker processes died (signal 9)", "checkpoint") as caught:
        fb.run([Deadly, "fedavg"], **given)
    assert "Deadly" in caught.value.__notes__[-1]
    assert [record.method for record in ResultsStore(tmp_path)] == ["fedavg"]


def test_left_overs_of_killed_runs_are_tidied(tmp_path: Path, feddg: Run) -> None:
    """They are removed by a run, by the same command for a recorded run, and by resume."""
    run = [*RUN, "--rounds", "1", "--workers", "1", "--results", tmp_path]
    key = json.loads(feddg(*run, "--json").out)["runs"][0]["key"]
    resume = ["resume", key, "--workers", "1", "--results", tmp_path]
    for command in (run, resume):
        left = [
            tmp_path / "checkpoints" / f"{key}.safetensors",
            tmp_path / "checkpoints" / f"{key}.safetensors.00.part",
            tmp_path / "runs" / f"{key}.json.00.part",
        ]
        for path in left:
            path.parent.mkdir(exist_ok=True)
            path.touch()
        done = feddg(*command)
        assert not any(path.exists() for path in left), done.err
        assert (tmp_path / "runs" / f"{key}.json").exists()


def test_the_datasets_package_of_others_is_not_hidden() -> None:
    import importlib.util

    found = importlib.util.find_spec("datasets")
    root = Path(__file__).parents[2]
    assert found is None or root not in Path(str(found.origin)).parents
