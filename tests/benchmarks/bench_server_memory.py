"""Peak memory of the server's step, in model copies."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddg_bench.config.schema import RunSettings
from feddg_bench.core.messages import LocalUpdate, Reply, nbytes
from feddg_bench.core.server import Server
from feddg_bench.data.federated import Federation
from feddg_bench.engine.construction import build_run_method
from feddg_bench.engine.worker import keep_freed_memory
from tests.benchmarks.rows import Row, benchmark


@benchmark
def server_memory() -> Iterator[Row]:
    """Peak memory of aggregating 10 synthetic replies of a ResNet-50, in multiples of the model,
    beyond that of the process before: the global model and the two replies that the loop holds are
    included. PPDG, PCGrad and FedOMG keep updates in a temporary file."""
    for name in ("fedavg", "ppdg", "pcgrad", "fedomg"):
        code = f"from {__name__} import *; print(*measure({name!r}, 10, 'resnet50', 0))"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        extra, model, _ = (float(number) for number in done.stdout.split())
        most = None if name == "fedavg" else 4
        yield Row(f"memory of the server, {name}", extra / model, most=most, unit=" copies")


class Answering:
    """Replaces the executor: answers each task with the global model plus noise."""

    workers = 1

    def __init__(self) -> None:
        self.memories: dict[str, Any] = {}

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        for task in tasks:
            generator = torch.Generator().manual_seed(int(task.client[-3:]))
            state = {
                name: torch.randn(w.shape, generator=generator).mul_(1e-3).add_(w)
                if w.is_floating_point()
                else w + 1
                for name, w in task.weights.items()
            }
            update = LocalUpdate(state)
            del state
            reply = Reply(task.client, 10, update, {}, {})
            del update
            yield reply
            del reply


def measure(name: str, clients: int, backbone: str, projection: int) -> tuple[float, float, float]:
    """Return a round's peak memory in MiB, the model's size in MiB, and the seconds."""
    keep_freed_memory()  # as in a run
    settings = RunSettings.model_validate(
        {
            "method": name,
            "scenario": "synthetic",
            "backbone": {"name": backbone, "pretrained": False, "projection": projection},
            "partition": {"clients": clients},
            "federation": {"per_round": None},
        }
    )
    image, label = np.zeros((1, 8, 8, 3), np.uint8), np.zeros(1, np.int64)
    names = {f"client_{k:03}": np.zeros(1, np.int64) for k in range(clients)}
    federation = Federation(image, 8, label, names, (), 7)
    with torch.device("meta"):
        method = build_run_method(settings, federation)
    shapes = {n: (t.shape, t.dtype) for n, t in method.state_dict().items()}
    torch.ones(64, 64) @ torch.ones(64, 64)  # loads the libraries
    before = resident_mib()

    server = Server(
        {n: torch.ones(shape, dtype=dtype) for n, (shape, dtype) in shapes.items()},
        tuple(names),
        Answering(),
        seed=0,
        federation=settings.federation,
        uplink=method.uplink,
        downlink=method.downlink,
    )
    server.round = 1
    model = nbytes(server.weights) / 2**20
    start = time.perf_counter()
    server.weights = method.aggregate(server, server.ask(method.fit))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return peak - before, model, seconds


def resident_mib() -> float:
    """Return the current resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
