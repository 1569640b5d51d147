"""Cost of a command before it trains."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tests.benchmarks.rows import Row, benchmark

LIBRARIES = """
import torch
import lightning
from torchmetrics.classification import MulticlassAccuracy
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.Adam([weight], fused=True)
weight.square().backward()
optimizer.step()
"""


def _cpu(*arguments: str) -> float:
    """Return the CPU seconds of a Python process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@benchmark
def start() -> Iterator[Row]:
    """CPU seconds of whole processes, alternating, medians of five: one imports PyTorch; one also
    imports Lightning and a metric of torchmetrics and makes a step of Adam; and `run` makes a
    FedAvg round on Digits4 with two clients and one scenario, with its evaluation and its
    record."""
    frame = ("--clients", "2", "--per-round", "2", "--rounds", "1", "--workers", "1", "--again")
    taken: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        command = ("run", "--method", "fedavg", "--scenario", "ip-o-c", *frame, "--results", folder)
        for _ in range(6):  # the first fills caches
            ours = _cpu("-m", "feddg_bench", *command)
            taken.append((_cpu("-c", "import torch"), _cpu("-c", LIBRARIES), ours))
    alone, libraries, ours = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    yield Row("PyTorch's import", alone, unit=" s")
    yield Row("PyTorch, Lightning, torchmetrics and a step of Adam", libraries, unit=" s")
    yield Row("`run` with one round", ours, unit=" s")
    yield Row("`run` with one round, over PyTorch's import", ours / alone, most=2.3)


@benchmark
def tables_and_report() -> Iterator[Row]:
    """CPU seconds of whole processes on the records of `results`, whose index is there, over the
    import of PyTorch, which neither needs; medians of three."""
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "`tables generic --recipe laptop`": ("tables", "generic", "--recipe", "laptop"),
            "`tables all`": ("tables", "all"),
            "`report`": ("report",),
        }
        out = {"`report`": f"{folder}/report.html"}
        for what, command in commands.items():
            place = ("--results", "results", "--out", out.get(what, folder))
            taken = [
                (_cpu("-m", "feddg_bench", *command, *place), _cpu("-c", "import torch"))
                for _ in range(4)  # the first reads the records and writes the index
            ][1:]
            ours, alone = (statistics.median(column) for column in zip(*taken, strict=True))
            yield Row(f"{what}, over PyTorch's import", ours / alone)
            yield Row(what, ours, unit=" s")
