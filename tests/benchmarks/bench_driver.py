"""The driver's cost per reply, and the number of workers that keep the driver busy."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from feddg_bench.common.titles import counted
from feddg_bench.config.schema import RunSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Task, decode, encode, nbytes
from feddg_bench.core.server import Server
from feddg_bench.data.federated import Federation
from feddg_bench.engine.construction import build_run_method
from tests.benchmarks.rows import Row, benchmark, cpu, pacs_run, rounds

REPLIES, REPEATS, A_MACHINE = 8, 5, 8


class Costs(NamedTuple):
    """CPU seconds for the messages of one model, and its size in MiB."""

    mib: float
    encode: float
    decode: float
    check_and_sum: float

    @property
    def reply(self) -> float:
        return self.decode + self.check_and_sum


class Encoded:
    """Replaces the executor: answers every task with the same bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.memories = data, dict[str, Any]()

    def map(self, tasks: Iterable[Task]) -> Iterator[Reply[LocalUpdate]]:
        for task in tasks:
            yield Reply(task.client, 57, LocalUpdate(decode(self.data)), {}, {})


def costs(backbone: str) -> Costs:
    """Return the driver's costs for FedAvg's messages, medians over rounds of 8 replies."""
    settings = RunSettings.model_validate(
        {
            "method": "fedavg",
            "scenario": "synthetic",
            "backbone": {"name": backbone, "pretrained": False},
            "partition": {"clients": REPLIES},
            "federation": {"per_round": None, "bn": "frozen"},
        }
    )
    names = {f"client_{k:03}": np.zeros(1, np.int64) for k in range(REPLIES)}
    image, label = np.zeros((1, 8, 8, 3), np.uint8), np.zeros(1, np.int64)
    method = build_run_method(settings, Federation(image, 8, label, names, (), 7))
    weights = method.state.federated_weights()
    data = encode(weights)
    server = Server(
        weights,
        tuple(names),
        Encoded(data),
        seed=0,
        federation=settings.federation,
        uplink=method.uplink,
    )
    server.round = 1

    def median(work: Callable[[], object]) -> float:
        work()
        return statistics.median(cpu(work) for _ in range(REPEATS))

    took = median(lambda: decode(data))
    whole = median(lambda: method.aggregate(server, server.ask(method.fit))) / REPLIES
    mib = nbytes(weights) / 2**20
    return Costs(mib, median(lambda: encode(weights)), took, whole - took)


def simulate(workers: int, clients: int, work: float, reply: float) -> float:
    """Return the seconds of a round: free workers take clients, the driver one reply at a time."""
    free, arrived, driver = [0.0] * workers, list[float](), 0.0
    for _ in range(clients):
        arrived.append(heapq.heappop(free) + work)
        heapq.heappush(free, arrived[-1])
    for moment in arrived:
        driver = max(driver, moment) + reply
    return driver


def tree(workers: int, clients: int, work: float, reply: float) -> float:
    """Return the seconds if each machine of 8 workers sums its replies and sends one sum."""
    machines = max(1, workers // A_MACHINE)
    below = simulate(min(workers, A_MACHINE), -(-clients // machines), work, reply)
    return below + (machines * reply if machines > 1 else 0.0)


@benchmark
def driver() -> Iterator[Row]:
    """Encoded replies of FedAvg passed to `Server`: decoded, checked and added; CPU time, one
    thread. The round is simulated from these times and from one client's CPU time in the setup
    "PACS"; the network is left out. Tree: each machine of 8 workers would send one sum."""
    found = {name: costs(name) for name in ("small_cnn", "mobilenet_v2", "resnet50")}
    for name, c in found.items():
        yield Row(
            f"the driver, a reply of {name}, {c.mib:.1f} MiB",
            f"decode {1e3 * c.decode:.1f} ms, check and sum {1e3 * c.check_and_sum:.1f} ms; encode "
            f"{1e3 * c.encode:.1f} ms a round",
        )
    torch.set_num_threads(1)
    going = rounds(pacs_run("fedavg", clients=1))
    next(going)
    next(going)
    work = statistics.median(cpu(lambda: next(going)) for _ in range(3))
    reply = found["mobilenet_v2"].reply
    yield Row("workers that keep the driver busy, PACS", work / reply)
    for workers in (1, 8, 64, 512):
        one, many = (f(workers, 512, work, reply) for f in (simulate, tree))
        yield Row(
            f"a round of 512 clients, {counted(workers, 'worker')}, PACS",
            f"{one:.1f} s, without the driver's work {512 / workers * work:.1f} s, tree "
            f"{many:.1f} s; {512 * found['mobilenet_v2'].mib / 1024:.1f} GiB to the driver",
        )
