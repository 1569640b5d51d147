"""Kill -9 a sweep repeatedly, at random instants, and check what it leaves behind.

    python tests/kill_sweep.py --jobs 200 --kills 50

Several copies of ``feddg-bench sweep`` share one results folder, as on several machines. They are
forked from a process that has imported PyTorch, so that a restart costs no time. At the end every
job must be recorded completely, by one copy only, and with the numbers of an undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml

from feddg_bench import cli
from feddg_bench.records.store import ResultsStore
from feddg_bench.sweeps.definition import load_sweep
from feddg_bench.sweeps.leases import Leases
from feddg_bench.sweeps.search import open_search

ROUNDS = 3
AT_WORK = 0.8
"""Share of the kills that wait until the victim runs a job."""
TINY = {
    "scenario": "ip-o-c",
    "data.image_size": 8,
    "data.id_test_fraction": 0.5,
    "data.id_val_fraction": 0.3,
    "partition.clients": 3,
    "federation.per_round": 2,
    "federation.rounds": ROUNDS,
    "train.local_epochs": 1,
    "train.batch_size": 128,
}


def write_sweep(path: Path, jobs: int) -> None:
    """Write a sweep of tiny jobs."""
    parameters: dict[str, object] = {name: {"value": value} for name, value in TINY.items()}
    parameters["seed"] = {"values": list(range(jobs))}
    command = ["${env}", "feddg-bench", "run", "${args_no_hyphens}"]
    layer = {"method": "grid", "program": "feddg-bench", "command": command}
    path.write_text(yaml.safe_dump({**layer, "parameters": parameters}, sort_keys=False))


def start(sweep: Path, results: Path, log: Path) -> int:
    """Fork a copy of the command and return its process number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.argv = ["feddg-bench", "sweep", str(sweep), "--results", str(results), "--workers", "1"]
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(code)


def kill_sweep(folder: Path, *, jobs: int, kills: int, copies: int, seed: int) -> Counter[str]:
    """Run and kill, check what is left, and return the number of events of each kind.

    Raises:
        AssertionError: If a job is missing, doubled, cut short or has other numbers.
    """
    import feddg_bench.runs.driver  # noqa: F401 - before the forks, which then start at once

    rng = random.Random(seed)  # noqa: S311 - instants, not secrets
    sweep, results, logs = folder / "tiny.yaml", folder / "results", folder / "logs"
    logs.mkdir(parents=True)
    write_sweep(sweep, jobs)
    store = ResultsStore(results)
    running: dict[int, Path] = {}
    started = 0
    done: Counter[str] = Counter()
    while done["killed"] < kills:
        while len(running) < copies:
            log = logs / f"{started}.log"
            running[start(sweep, results, log)] = log
            started += 1
        victim = rng.choice(list(running))
        if rng.random() < AT_WORK:  # otherwise at any instant, most likely while it starts
            while victim in running and not held(results, victim):
                reap(running)
                time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.5))
        reap(running)
        if victim in running:
            keys = held(results, victim)
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            running.pop(victim)
            done["killed"] += 1
            done["killed at a job"] += bool(keys)
            done["killed between rounds"] += any(store.checkpoint(key).exists() for key in keys)
        if len(list(store.runs.glob("*.json"))) == jobs:
            break  # on a fast machine; the returned counts include the kills
    done["recorded by the last kill"] = len(list(store.runs.glob("*.json")))
    if not running:
        running[start(sweep, results, logs / f"{started}.log")] = logs / f"{started}.log"
        started += 1
    while running:
        reap(running)
        time.sleep(0.05)
    done["started"] = started
    check(sweep, results, logs)
    done["jobs"] = jobs
    text = "".join(log.read_text() for log in logs.iterdir())
    done["resumed"] = text.count("resuming after round")
    return done


def held(results: Path, process: int) -> list[str]:
    """Return the keys of the jobs that a process holds."""
    holder = f"process {process} of"
    return [key for key, text in Leases.of(results).held().items() if text.startswith(holder)]


def reap(running: dict[int, Path]) -> None:
    """Remove the copies that have ended; they must have succeeded."""
    for child, log in list(running.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0, log.read_text()
            running.pop(child)


def check(sweep: Path, results: Path, logs: Path) -> None:
    """Assert that every job was done exactly once and completely, and that nothing else is left."""
    jobs = open_search(load_sweep(sweep), results).jobs()
    store = ResultsStore(results)
    names = sorted(path.name for path in store.runs.iterdir())
    assert names == sorted(f"{job.key}.json" for job in jobs), "missing, doubled or left over"
    for record in store:
        assert [entry.round for entry in record.rounds] == list(range(1, ROUNDS + 1))
        assert record.evaluation()["test"]
    for empty in ("checkpoints", "leases", "failed"):
        left = list((results / empty).iterdir()) if (results / empty).exists() else []
        assert not left, left
    finished = Counter(
        title
        for log in logs.iterdir()
        for title in re.findall(r"^\[\d+/\d+\] (.*?): [\d.]+ s", log.read_text(), re.MULTILINE)
    )
    assert max(finished.values()) == 1, finished.most_common(3)
    alone = results.parent / "alone"
    arguments = ["--workers", "1", "--results", str(alone), "seed=0,1"]
    sys.argv = ["feddg-bench", "sweep", str(sweep), *arguments]
    cli.app(standalone_mode=False)
    for record in ResultsStore(alone):
        same = store.load(record.key)
        assert same is not None
        assert same.numbers() == record.numbers()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        facts = kill_sweep(Path(folder), **vars(given))
    print(f"{dict(facts)} in {time.monotonic() - began:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
