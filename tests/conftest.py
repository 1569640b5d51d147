"""A toy federation: 4 clients, 3 classes, 16-px images of 2 colours; milliseconds a round."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from feddg_bench.federation import Federation
from feddg_bench.messages import Payload, Reply, Task, Weights, decode, encode
from feddg_bench.settings import RunSettings, merge

if TYPE_CHECKING:  # what imports lightning is imported by the fixtures that need it
    from feddg_bench.executors import Executor
    from feddg_bench.loop import RoundResult
    from feddg_bench.method import Method
    from feddg_bench.server import Server
    from feddg_bench.worker import WorkerSpec

TOY = {
    "method": "fedavg",
    "dataset": "digits4",
    "scenario": "toy",
    "data": {"image_size": 16},
    "backbone": {"name": "small_cnn", "pretrained": False},
    "partition": {"clients": 4},
    "federation": {"rounds": 3, "per_round": 2},
    "train": {"lr": 0.01, "batch_size": 8},
}


@pytest.fixture
def toy_settings() -> Callable[..., RunSettings]:
    """Return a maker of toy settings; layers given win."""

    def make(*layers: dict[str, object]) -> RunSettings:
        return RunSettings.model_validate(merge(TOY, *layers))

    return make


@pytest.fixture
def toy_federation() -> Federation:
    """Two domains (dark, bright) of three classes (which third of the image is lit)."""
    rng = np.random.default_rng(0)
    count = 60
    labels = np.arange(count) % 3
    domains = np.arange(count) % 2
    images = rng.integers(0, 60, (count, 16, 16, 3), dtype=np.uint8)
    for i in range(count):
        images[i, :, 5 * labels[i] : 5 * labels[i] + 5] += np.uint8(120 if domains[i] else 60)
    order = rng.permutation(count)
    parts = np.array_split(order[:44], [9, 20, 32])
    clients = {f"client_{i}": part for i, part in enumerate(parts)}
    held_out = order[44:]
    evaluation = (
        ("id_val", "dark", held_out[domains[held_out] == 0]),
        ("test", "bright", held_out[domains[held_out] == 1]),
    )
    names = ("dark", "bright")
    counts = {name: np.bincount(domains[part], minlength=2) for name, part in clients.items()}
    return Federation(
        images,
        16,
        labels.astype(np.int64),
        clients,
        evaluation,
        3,
        sources=names,
        domains={n: dict(zip(names, c.tolist(), strict=True)) for n, c in counts.items()},
        validation=dict(zip(clients, np.array_split(held_out, 4), strict=True)),
    )


@pytest.fixture
def test_data() -> Path:
    """Return the folder with real data (pacs/, mnist/, weights/), or skip."""
    root = os.environ.get("FEDDG_TEST_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("needs real data: set FEDDG_TEST_DATA to a folder with pacs/ and weights/")
    return Path(root)


@dataclass
class ToyRun:
    """One run on toy data: its parts, and a way to go on with it."""

    settings: RunSettings
    federation: Federation
    executor: Executor
    method: Method
    server: Server

    def rounds(self, upto: int) -> list[RoundResult]:
        """Go on until a round is done, and return what each round did."""
        from feddg_bench.evaluate import evaluate
        from feddg_bench.loop import federate

        return list(
            federate(
                self.method,
                self.server,
                lambda weights: evaluate(self.executor, self.federation, weights, chunk=256),
                rounds=upto,
                per_round=self.settings.federation.per_round,
            )
        )


@pytest.fixture
def start_run(toy_settings, toy_federation) -> Callable[..., ToyRun]:
    """Return a maker of runs: a method's name, layers of settings, and parts to put in."""
    from feddg_bench.executors import SerialExecutor
    from feddg_bench.registry import build_method, load_method
    from feddg_bench.server import Server
    from feddg_bench.worker import WorkerSpec

    def start(
        name: str,
        *layers: Mapping[str, Any],
        federation: Federation = toy_federation,
        executor: Executor | None = None,
        method: Method | None = None,
    ) -> ToyRun:
        settings = toy_settings({"method": name}, load_method(name).needs, *layers)
        executor = executor or SerialExecutor()
        method = method or build_method(settings, federation)
        executor.start(WorkerSpec(settings, federation), method)
        server = Server(
            method.federated_weights(),
            tuple(federation.clients),
            executor,
            seed=settings.seed,
            federation=settings.federation,
            uplink=method.uplink,
            downlink=method.downlink,
        )
        return ToyRun(settings, federation, executor, method, server)

    return start


class Recorder:
    """Runs tasks in this process and keeps a copy of every task, memory included, and reply."""

    workers = 1

    def start(self, spec: WorkerSpec, method: Method) -> None:
        from feddg_bench.worker import Worker

        self.memories: dict[str, Payload] = {}
        self.tasks: list[Task] = []
        self.replies: list[Reply[Any]] = []
        self.worker = Worker(spec, method)

    def map(self, tasks: Iterable[Task]) -> Iterator[Reply[Any]]:
        for task in tasks:
            whole = replace(task, memory=self.memories.get(task.client, {}))
            payloads = ("weights", "broadcast", "memory")
            copies = {name: decode(encode(getattr(whole, name))) for name in payloads}
            self.tasks.append(replace(whole, **copies))
            reply = self.worker.run(whole)
            self.memories[task.client] = reply.memory
            self.replies.append(reply)
            yield reply

    def evaluate(
        self, weights: Weights, indices: Sequence[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, float]]:
        return (self.worker.evaluate(weights, index) for index in indices)

    def close(self) -> None:
        pass


@pytest.fixture
def recorder() -> Recorder:
    """Return an executor that remembers all tasks and replies."""
    return Recorder()


@pytest.fixture
def large_federation(toy_federation: Federation) -> Federation:
    """The toy federation at 32 px, the least that a ResNet makes something of."""
    images = toy_federation.images
    assert isinstance(images, np.ndarray)
    return replace(toy_federation, images=images.repeat(2, axis=1).repeat(2, axis=2), size=32)
