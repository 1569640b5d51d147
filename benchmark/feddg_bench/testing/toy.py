"""A toy federation: 4 clients, 3 classes, small images of 2 domains; milliseconds per round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from feddg_bench.config.layers import Layer, merge
from feddg_bench.config.schema import RunSettings
from feddg_bench.core.client import Client
from feddg_bench.core.loop import RoundResult, federate
from feddg_bench.core.messages import Reply, Task, decode, encode, leaves
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.data.federated import Federation
from feddg_bench.engine.compatibility import check_fit, check_start
from feddg_bench.engine.construction import build_run_method
from feddg_bench.engine.evaluation import evaluate
from feddg_bench.engine.executors import Executor, SerialExecutor
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.outlines import outline_of
from feddg_bench.plugins import load_method
from feddg_bench.runs.setup import open_server
from feddg_bench.testing.traces import generators

TOY: Layer = {
    "method": "fedavg",
    "dataset": "digits4",
    "scenario": "toy",
    "data": {"image_size": 16},
    "backbone": {"name": "small_cnn", "pretrained": False},
    "partition": {"clients": 4},
    "federation": {"rounds": 3, "per_round": 2},
    "train": {"lr": 0.01, "batch_size": 8},
}
"""Settings of a very short run."""

DOMAINS = ("dark", "bright")


def toy_settings(*layers: Mapping[str, Any]) -> RunSettings:
    """Return toy settings, overridden by the given layers."""
    return RunSettings.model_validate(merge(TOY, *layers))


def toy_regression(size: int = 16) -> Federation:
    """Return the toy federation as a regression: where the lit third of an image begins.

    Targets range from -1 (left) to 1. Images are in the groups ``even`` and ``odd`` by their index,
    but every fifth is in none.
    """
    federation = toy_federation(size)
    rng = np.random.default_rng(1)
    images = rng.integers(0, 60, (60, size, size, 3), dtype=np.uint8)
    third = size // 3
    last = size - third - 1
    starts = rng.integers(0, last + 1, 60)
    for image, start, domain in zip(images, starts, federation.domain_ids, strict=True):
        image[:, start : start + third] += np.uint8(120 if domain else 60)
    numbers = np.arange(60)
    return replace(
        federation,
        images=images,
        labels=(starts / (last / 2) - 1).astype(np.float32),
        num_classes=1,
        task="regression",
        metrics=("pearson", "worst_group"),
        groups=np.where(numbers % 5 == 0, -1, numbers % 2),
        group_names=("even", "odd"),
    )


def toy_federation(size: int = 16) -> Federation:
    """Return 60 images of two domains; the class is the third of the image that is lit.

    Four clients have 9, 11, 12 and 12 training images, and validation images too. 16 images are
    held out, as ``id_val`` (dark) and ``test`` (bright).
    """
    rng = np.random.default_rng(0)
    count = 60
    labels = np.arange(count) % 3
    domains = np.arange(count) % 2
    images = rng.integers(0, 60, (count, size, size, 3), dtype=np.uint8)
    third = size // 3
    for i in range(count):
        start = third * labels[i]
        images[i, :, start : start + third] += np.uint8(120 if domains[i] else 60)
    order = rng.permutation(count)
    parts = np.array_split(order[:44], [9, 20, 32])
    clients = {f"client_{i}": part for i, part in enumerate(parts)}
    held_out = order[44:]
    evaluation = (
        ("id_val", "dark", held_out[domains[held_out] == 0]),
        ("test", "bright", held_out[domains[held_out] == 1]),
    )
    return Federation(
        images,
        size,
        labels.astype(np.int64),
        clients,
        evaluation,
        3,
        sources=DOMAINS,
        domain_ids=domains,
        validation=dict(zip(clients, np.array_split(held_out, 4), strict=True)),
    )


@dataclass
class ToyRun:
    """One run: its parts, and a way to continue it."""

    settings: RunSettings
    federation: Federation
    executor: Executor
    method: Method
    server: Server

    def rounds(self, upto: int) -> list[RoundResult]:
        """Continue to the end of round ``upto``, and return all results, ``prepare`` first."""
        return list(
            federate(
                self.method,
                self.server,
                lambda weights: evaluate(self.executor, self.federation, weights, chunk=256),
                rounds=upto,
                per_round=self.settings.federation.per_round,
            )
        )


def start_toy_run(
    plugin: type[Method] | str,
    *layers: Mapping[str, Any],
    federation: Federation | None = None,
    executor: Executor | None = None,
    method: Method | None = None,
    device: str = "cpu",
    counts: bool = False,
) -> ToyRun:
    """Build a run on toy data.

    Args:
        plugin: A method's class or its registered name.
        layers: Settings; later ones take precedence.
        federation: Data to use instead of `toy_federation`.
        executor: Executor to use instead of this process.
        method: A module to use instead of a new one of ``plugin``.
        device: Where this process trains.
        counts: Whether operations are counted, for which a client's first work is done twice.
    """
    loaded = load_method(plugin) if isinstance(plugin, str) else plugin
    name = plugin if isinstance(plugin, str) else plugin.__name__.lower()
    federation = federation or toy_federation()
    own: Layer = {"method": name, "data": {"image_size": federation.size}}
    settings = toy_settings(own, loaded.needs, *layers)
    executor = executor or SerialExecutor()
    if method is None:
        check_fit(settings, outline_of(loaded), federation)
        method = build_run_method(settings, federation, loaded)
    check_start(settings, method, len(federation.clients))
    executor.start(WorkerSpec(settings, federation, device, plugin=loaded, counts=counts), method)
    server = open_server(settings, federation, method, executor, device)
    return ToyRun(settings, federation, executor, method, server)


class TaskRecorder(SerialExecutor):
    """Runs tasks in this process and keeps every reply and a copy of every task with its memory.

    Attributes:
        tasks: The tasks in the order in which they ran.
        replies: The reply to each task.
        changed: Read-only parts of tasks that a client changed.
        ends: States of the global generators at the end of each task.
    """

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build the worker and forget earlier tasks."""
        super().start(spec, method)
        self.tasks: list[Task] = []
        self.replies: list[Reply[Any]] = []
        self.changed: set[str] = set()
        self.ends: list[dict[str, int]] = []
        state = self.worker.method.state
        serving = state.serving

        @contextmanager
        def noting(client: Client) -> Iterator[None]:
            with serving(client):
                yield
                self.ends.append(generators())

        state.serving = noting  # type: ignore[method-assign]  # within the task's streams

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Run the tasks one by one."""
        for task in tasks:
            parts = ("weights", "broadcast", "told", "memory")
            before = {name: encode(dict(getattr(task, name))) for name in parts}
            self.tasks.append(
                replace(task, **{name: decode(data) for name, data in before.items()})
            )
            reply = self.worker.run_counted(task)
            self.replies.append(reply)
            self.changed |= {n for n in parts[:3] if encode(dict(getattr(task, n))) != before[n]}
            yield reply


def toy_leaves(payload: Any) -> dict[str, Tensor]:
    """Return every non-empty tensor of a payload by its path."""
    return {path: t for path, t in leaves(payload) if isinstance(t, Tensor) and t.numel()}
