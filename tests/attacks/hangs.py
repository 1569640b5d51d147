"""Clients and workers that stop or die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress

from feddg_bench.core.messages import encode
from feddg_bench.engine.executors import ProcessExecutor
from feddg_bench.testing import start_toy_run
from feddg_methods.fedavg import FedAvg
from tests.attacks.lab import PATIENCE, Lab, call
from tests.attacks.pictures import few
from tests.helpers import ALL, children


class Deadly(FedAvg):
    """One client kills its worker process, whichever that is."""

    def fit(self, client):
        if client.name == "client_1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(client)


def attack(lab: Lab) -> None:
    """Try processes that end too early or stop."""
    with closing(ProcessExecutor(2)) as two:
        deaths(lab, two)
    interrupts(lab)


def deaths(lab: Lab, two: ProcessExecutor) -> None:
    """Killed workers are replaced once in a run."""
    plain = start_toy_run(FedAvg, ALL)
    plain.rounds(2)
    run = start_toy_run(FedAvg, ALL, executor=two)
    run.rounds(1)
    for worker in two._mib:
        os.kill(int(worker), signal.SIGKILL)
    _, failed = call(run.rounds, 2)
    same = encode(run.server.state()) == encode(plain.server.state())
    lab.add("both workers are killed between rounds", failed or f"same: {same}", same)
    _, failed = call(start_toy_run(Deadly, ALL, executor=two).rounds, 1)
    held = failed.startswith("refused") and "two worker" in failed
    lab.add("a client that is deadly", failed or "went on", held)


def interrupts(lab: Lab) -> None:
    """Two Ctrl-C end a command with stopped workers, and the run can be continued."""
    results = lab.folder()
    run = [sys.executable, "-m", "feddg_bench", "run", "--method", "fedavg", *few(lab)]
    run += ["--workers", 2, "--rounds", 2000, "--results", results]
    process = subprocess.Popen(
        [str(part) for part in run],
        stderr=subprocess.DEVNULL,
        cwd=lab.root,
        start_new_session=True,
    )
    end = time.monotonic() + PATIENCE
    while not list(results.glob("checkpoints/*.safetensors")) and process.poll() is None:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    if process.poll() is None:
        for child in children(process.pid):
            for stopped in (*children(child), child):
                os.kill(stopped, signal.SIGSTOP)
    code: int | str = "none"
    for _ in range(2):
        process.send_signal(signal.SIGINT)  # no effect if it has ended
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # remaining processes
    process.wait()
    left = len(list(results.glob("checkpoints/*.safetensors")))
    held = code == 130 and left == 1
    lab.add("two Ctrl-C while the workers are stopped", f"exit {code}, checkpoints {left}", held)
