"""Peak memory of the server's step with K = 20 clients and a ResNet-50.

Each method runs in a process of its own. Clients answer one at a time with made-up weights,
through the real server and the real ``aggregate``; the model itself is only described, not
allocated. Prints, for each method, what one round takes at its peak beyond the process before
the global model is made: the global model and the two replies that the loop holds are counted
in. Then the same in copies of the model (target for PPDG, PCGrad and FedOMG: below 4), and the
seconds of the round. These three keep the updates in a temporary file: 2.2 GB in $TMPDIR (/tmp).

Run: python tests/benchmarks/bench_server_memory.py [--clients 20] [--backbone resnet50]
     [--projection 2048] [METHOD ...]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

METHODS = ("fedavg", "fedgma", "ppdg", "pcgrad", "fedomg")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--projection", type=int, default=2048)
    parser.add_argument("--here", action="store_true", help="measure in this process")
    options = parser.parse_args()
    if options.here:
        print(*measure(options.methods[0], options.clients, options.backbone, options.projection))
        return
    from feddg_bench.plugins import names

    settings = [f"--{n}={getattr(options, n)}" for n in ("clients", "backbone", "projection")]
    print(f"K = {options.clients}, {options.backbone}, projection {options.projection}")
    for method in options.methods:
        if method not in names("method"):
            print(f"{method:8} is not there")
            continue
        command = [sys.executable, __file__, "--here", *settings, method]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        extra, model, seconds = (float(number) for number in done.stdout.split())
        print(
            f"{method:8} {extra:7.0f} MiB = {extra / model:.2f} copies of {model:.1f} MiB,"
            f" {seconds:.0f} s"
        )


class Answering:
    """Stands in for the executor: answers each task with the global model and some noise."""

    workers = 1

    def __init__(self) -> None:
        self.memories: dict[str, Any] = {}

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        import torch

        from feddg_bench.core.messages import LocalUpdate, Reply

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
    """Return the MiB that a round takes at its peak, the MiB of the model, and seconds."""
    import torch

    from feddg_bench.config.schema import RunSettings
    from feddg_bench.core.messages import nbytes
    from feddg_bench.core.server import Server
    from feddg_bench.data.federated import Federation
    from feddg_bench.engine.build import build_run_method
    from feddg_bench.engine.worker import keep_freed_memory

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
    """Return this process's resident memory now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
