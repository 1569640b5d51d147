"""What a round costs in worker processes: bytes, time and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from feddg_bench.core.messages import nbytes
from feddg_bench.engine.executors import Executor, ProcessExecutor, SerialExecutor
from tests.benchmarks.bench_memory import descendants, proportional
from tests.benchmarks.rows import Row, benchmark, pacs_run, rounds

CLIENTS, IMAGES, ROUNDS = 20, 8, 3


@benchmark
def round_in_workers() -> Iterator[Row]:
    """A round of 20 clients with 8 images of 32 px each and a MobileNetV2, in two workers and in
    one process: bytes that the main process writes, CPU time and peak memory of all processes;
    shared memory is counted once. Medians of three rounds after the first."""
    for method in ("fedavg", "scaffold"):
        sent, wall, seconds, mib = measured(method, 2)
        _, wall_alone, alone, mib_alone = measured(method, 1)
        what = "a round of 20 clients in two workers"
        why = "bytes to workers, over the bytes of one model"
        yield Row(f"{what}, {method}: models sent", sent, why=why)
        yield Row(f"{what}, {method}: CPU time over one process", seconds / alone)
        yield Row(f"{what}, {method}: time over one process", wall / wall_alone)
        yield Row(f"{what}, {method}: memory over one process", mib / mib_alone)
        yield Row(f"{what}, {method}: CPU time", seconds, unit=" s")
        yield Row(f"{what}, {method}: peak memory", mib, unit=" MiB")


def measured(method: str, workers: int) -> tuple[float, ...]:
    """Return models sent, seconds, CPU seconds and peak MiB of a round, from another process."""
    code = f"from {__name__} import *; print(*measure({method!r}, {workers}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return tuple(map(float, done.stdout.split()))


def measure(method: str, workers: int) -> tuple[float, ...]:
    """Measure in this process (see `measured`)."""
    small = {"data.image_size": 32, "train.batch_size": IMAGES}
    each: list[tuple[float, ...]] = []
    most, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            most.append(sum(map(proportional, descendants(os.getpid()))))

    executor: Executor = SerialExecutor() if workers == 1 else ProcessExecutor(workers)
    with closing(executor):
        run = pacs_run(method, clients=CLIENTS, images=IMAGES, settings=small, executor=executor)
        steps = rounds(run)
        for _ in range(2):  # before round 1, and round 1, in which operations are counted
            next(steps)
        thread = threading.Thread(target=watch)
        thread.start()
        for _ in range(ROUNDS):
            before = written(), time.perf_counter(), cpu()
            next(steps)
            now = written(), time.perf_counter(), cpu()
            each.append(tuple(b - a for a, b in zip(before, now, strict=True)))
        over.set()
        thread.join()
        model = nbytes(run.server.weights)
    sent, wall, seconds = (sorted(values)[ROUNDS // 2] for values in zip(*each, strict=True))
    return sent / model, wall, seconds, max(most)


def written() -> int:
    """Return the bytes that this process has written: to pipes, and to files in memory."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


def cpu() -> float:
    """Return the CPU seconds of this process and its descendants."""
    ticks = 0
    for process in descendants(os.getpid()):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
