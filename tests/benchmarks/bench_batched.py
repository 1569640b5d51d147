"""What clients that step together cost beside clients that train one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from feddg_bench.config.schema import Resources
from feddg_bench.core.messages import Task
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.engine.timing import synthetic_federation
from feddg_bench.runs.request import Request
from feddg_bench.runs.setup import start
from tests.benchmarks.rows import Row, benchmark, ratios

CLIENTS = 10
FRAMES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "digits4, 37 images, batches of 32 and 5": ("digits4", 37, {}),
    "digits4, 16 images, batches of 8": ("digits4", 16, {"train": {"batch_size": 8}}),
    "RMNIST, 128 images, batches of 64": ("rmnist", 128, {}),
}
"""Data set whose recipe `quick` it is, images of a client, settings."""


def local_training(
    dataset: str, images: int, settings: dict[str, Any], clients: str
) -> Callable[[], object]:
    """Return what makes the local training of a round of FedAvg, in this process."""
    given = {**settings, "partition": {"clients": CLIENTS}, "engine": {"clients": clients}}
    request = Request("fedavg", dataset=dataset, recipe="quick", settings=given)
    plan = request.plan(check=False)[0]
    federation = synthetic_federation(CLIENTS, images, plan.settings.data.image_size, 10)
    run = start(plan, federation, SerialExecutor(), Resources(device="cpu"))

    def work() -> None:
        tasks = (Task(name, "fit", 1, run.server.weights, {}) for name in run.server.clients)
        deque(run.executor.map(tasks), maxlen=0)

    return work


@benchmark
def batched() -> Iterator[Row]:
    """The whole local training of a round of FedAvg with `small_cnn` in the recipe `quick`, 10
    clients of a worker together over one by one; the median of 9."""
    for name, frame in FRAMES.items():
        works = {clients: local_training(*frame, clients) for clients in ("exact", "batched")}
        yield Row(f"clients together: {name}", ratios(works, 9)["batched"], most=0.55)
