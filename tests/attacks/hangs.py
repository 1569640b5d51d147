"""Clients and workers that sleep, stop or die, and false leases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress

from feddg_bench.core.messages import encode
from feddg_bench.engine.executors import ProcessExecutor
from feddg_bench.sweeps.leases import Leases
from feddg_bench.testing import start_toy_run
from feddg_methods.fedavg import FedAvg
from tests.attacks.lab import PATIENCE, Lab, call
from tests.attacks.pictures import few
from tests.helpers import ALL, Sleeping, children


class Raising(FedAvg):
    """One client raises an exception."""

    def fit(self, client):
        if client.name == "client_1":
            raise ValueError("no luck")
        return super().fit(client)


class Deadly(FedAvg):
    """One client kills its worker process, whichever that is."""

    def fit(self, client):
        if client.name == "client_1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(client)


def attack(lab: Lab) -> None:
    """Try clients that never answer, processes that end too early, and leases with two holders."""
    with closing(ProcessExecutor(2, timeout=8)) as two:
        sleepers(lab, two)
    with closing(ProcessExecutor(2)) as two:
        deaths(lab, two)
    interrupts(lab)
    leases(lab)


def sleepers(lab: Lab, two: ProcessExecutor) -> None:
    """A client that does not answer ends the run; the next run has all workers again."""
    for fault in ("drop", "fail"):
        layer = {"federation": {"per_round": None, "on_fault": fault}}
        _, failed = call(start_toy_run(Sleeping, layer, executor=two).rounds, 1)
        held = failed.startswith("refused") and "client_1" in failed
        lab.add(f"a client sleeps, on_fault={fault}", failed or "went on", held)


def deaths(lab: Lab, two: ProcessExecutor) -> None:
    """A killed worker is replaced once; a client that raises or kills again is named."""
    plain = start_toy_run(FedAvg, ALL)
    plain.rounds(2)
    run = start_toy_run(FedAvg, ALL, executor=two)
    run.rounds(1)
    for worker in two.members:
        os.kill(worker.process.pid, signal.SIGKILL)
    _, failed = call(run.rounds, 2)
    same = encode(run.server.state()) == encode(plain.server.state())
    lab.add("both workers are killed between rounds", failed or f"same: {same}", same)
    for plugin in (Raising, Deadly):
        _, failed = call(start_toy_run(plugin, ALL, executor=two).rounds, 1)
        held = failed.startswith("refused") and "client_1" in failed
        lab.add(f"a client that is {plugin.__name__.lower()}", failed or "went on", held)


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


def leases(lab: Lab) -> None:
    """A lease cannot change outside files or have two holders, whatever a stranger wrote."""
    folder = lab.folder()
    ours = Leases(folder / "leases")
    ours.folder.mkdir()
    victim = folder / "victim"
    victim.write_text("kept")
    (ours.folder / "link.lock").symlink_to(victim)
    _, failed = call(ours.take, "link")
    lab.add("a lease that is a link", failed or "taken", victim.read_text() == "kept")
    for number, text in enumerate(("../evil", "", "\x00" * 32, "x" * 100_000, "[" * 100_000)):
        (ours.folder / f"k{number}.lock").write_text(text)
        taken, failed = call(ours.take, f"k{number}")
        lab.add(
            f"a lease that says {text[:12]!r}",
            failed or f"taken: {taken is not None}",
            taken is not None,
        )
    lease = ours.take("mine")
    assert lease is not None
    with lease:
        second = Leases(ours.folder).take("mine")
        lab.add("a second holder", f"taken: {second is not None}", second is None)
