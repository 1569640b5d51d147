"""`fb.run` called inside pools, threads, an event loop, a task of Ray."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import feddg_bench as fb
from feddg_bench.common.errors import SettingsError
from tests.helpers import refused

pytestmark = pytest.mark.nightly
SETTINGS = {
    "clients": 4,
    "per_round": 2,
    "rounds": 1,
    "data.image_size": 8,
    "data.id_test_fraction": 0.5,
    "data.id_val_fraction": 0.3,
}


def job(workers: int, folder: Path, cache: Path) -> int:
    """Run, and return the number of workers."""
    words: dict[str, Any] = {"scenario": "ip-o-c", "settings": SETTINGS, "quiet": True}
    words |= {"workers": workers, "results": folder / "r", "cache_dir": cache}
    (record,) = fb.run("fedavg", **words)
    return record.environment.workers


def pool(way: str) -> Callable[..., int]:
    """Return a function that calls another one in a daemonic process."""

    def call(*arguments: Any) -> int:
        with multiprocessing.get_context(way).Pool(1) as processes:
            found: int = processes.apply(*arguments[:1], arguments[1:])
        return found

    return call


def executor(*arguments: Any) -> int:
    """Call in a process that is not daemonic."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        found: int = processes.submit(*arguments).result()
    return found


def thread(*arguments: Any) -> int:
    """Call in a thread, where no handler of signals can be set."""
    with ThreadPoolExecutor(1) as threads:
        found: int = threads.submit(*arguments).result()
    return found


def loop(*arguments: Any) -> int:
    """Call in a running event loop, as a cell of a notebook does."""

    async def call() -> int:
        found: int = arguments[0](*arguments[1:])
        return found

    return asyncio.run(call())


def task(*arguments: Any) -> int:
    """Call in a task of Ray."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        found: int = ray.get(ray.remote(arguments[0]).remote(*arguments[1:]))
    finally:
        ray.shutdown()
    return found


@pytest.mark.filterwarnings("ignore")  # of Ray
@pytest.mark.parametrize("inside", [pool("spawn"), executor, thread, loop, task])
def test_a_run_inside_something_works_or_says_how(
    tmp_path: Path, cache: Path, inside: Callable[..., int]
) -> None:
    daemonic = inside.__qualname__.startswith("pool")
    if daemonic:
        with refused(SettingsError, "workers=1", "futures.ProcessPoolExecutor"):
            inside(job, 2, tmp_path, cache)
        assert inside(job, 0, tmp_path, cache) == 1
    else:
        assert inside(job, 2, tmp_path, cache) == 2
