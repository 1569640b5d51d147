"""Benchmarks: functions that measure and yield rows of one table.

A benchmark is a function decorated with `benchmark` in any ``bench_*.py`` of this folder; its
docstring says how it measures. It runs in a separate process, on one thread. Measure ratios of CPU
times of alternating works, so that a busy machine slows all of them equally.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from feddg_bench.config.schema import Resources
from feddg_bench.core.loop import RoundResult, federate
from feddg_bench.data.federated import synthetic_federation
from feddg_bench.engine.executors import Executor, SerialExecutor
from feddg_bench.runs.request import Request
from feddg_bench.runs.setup import Run, start


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        what: Measured quantity.
        measured: A number, or a sentence if nothing could be measured.
        most: Target: the number should be at most this. ``None`` for no target.
        least: Likewise, at least this.
        unit: Unit after the number.
        why: Reason for the cost, or for a missed target, in one line.
    """

    what: str
    measured: float | str
    most: float | None = None
    least: float | None = None
    unit: str = ""
    why: str = ""


Benchmark = Callable[[], Iterator[Row]]
ALL: dict[str, Benchmark] = {}
"""All benchmarks of the imported modules, by function name."""


def benchmark(measure: Benchmark) -> Benchmark:
    """Register a function as a benchmark."""
    ALL[measure.__name__] = measure
    return measure


def cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process that ``work`` takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def pairs(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each work; works alternate, after one warm-up each."""
    for work in works.values():
        work()
    times = [{name: cpu(work) for name, work in works.items()} for _ in range(repeats)]
    return {name: [taken[name] for taken in times] for name in works}


def interval(times: Sequence[float], over: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of paired ratios and its interval of at least 95 %.

    The interval is from order statistics of six or more.
    """
    ordered = sorted(a / b for a, b in zip(times, over, strict=True))
    assert len(ordered) >= 6, "fewer values have no interval of 95 %"
    count, rank, left = len(ordered), 0, 0.025 * 2 ** len(ordered)
    while rank < count // 2 and (left := left - math.comb(count, rank)) >= 0:
        rank += 1
    low = max(0, rank - 1)
    return statistics.median(ordered), ordered[low], ordered[count - 1 - low]


def ratios(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median CPU-time ratio of each work to the first; works alternate.

    Args:
        works: By name; each also runs once before, as warm-up.
        repeats: Number of measurements of each.
    """
    times = pairs(works, repeats)
    first = next(iter(times.values()))
    return {
        name: statistics.median(a / b for a, b in zip(taken, first, strict=True))
        for name, taken in times.items()
    }


def pacs_run(
    method: str,
    *,
    clients: int = 2,
    images: int = 57,
    settings: dict[str, Any] | None = None,
    executor: Executor | None = None,
) -> Run:
    """Return a run in the setup of the recipe ``quick`` on PACS.

    Images and weights are random, and all clients take part. PARDON and CCST restyle colours.

    Args:
        method: Its name.
        clients: N.
        images: Images per client.
        settings: Further settings, such as ``{"train.batch_size": 16}``.
        executor: Where clients train; by default in this process.
    """
    frame: dict[str, Any] = {
        "data.image_size": 128,
        "backbone": {"name": "mobilenet_v2", "pretrained": False},
        "partition.clients": clients,
        "federation": {"rounds": 10**6, "per_round": None, "bn": "frozen"},
        "train.lr": 2e-4,
        **({"hyper.style": "pixel"} if method in ("pardon", "ccst") else {}),
        **(settings or {}),
    }
    values: dict[str, Any] = {}
    for key, value in frame.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {}).update({name: value} if name else value)
    (plan,) = Request(method, scenario="ip-o-c", settings=values).plan(check=False)
    federation = synthetic_federation(clients, images, plan.settings.data.image_size, 7)
    return start(plan, federation, executor or SerialExecutor(), Resources(device="cpu"))


def rounds(run: Run) -> Iterator[RoundResult]:
    """Yield the results of rounds without evaluation; the first is before round 1."""
    return federate(run.method, run.server, lambda _: {}, rounds=10**6, every=10**6)
