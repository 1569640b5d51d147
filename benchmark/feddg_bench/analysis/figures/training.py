"""Models for figures: trained in memory by the loop of every run, and kept where they are wanted.

A run's checkpoint is deleted with its end, so what a figure shows of a model is trained for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.streams import generator
from feddg_bench.config.schema import Resources
from feddg_bench.core.loop import federate
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Task, Weights
from feddg_bench.core.method import Method
from feddg_bench.data.augment import to_float
from feddg_bench.data.client_images import ImageBank
from feddg_bench.data.federated import Federation
from feddg_bench.engine.evaluation import evaluate
from feddg_bench.engine.executors import Executor, Measured
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.records.store import ResultsStore
from feddg_bench.runs.run import Plan, Report, RunData, open_federation, open_server


class Recording(Executor):
    """An executor that keeps the tasks and replies of local training in the current round.

    Args:
        inner: What runs the tasks.
    """

    spec: WorkerSpec

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        super().__init__(inner.workers)
        self.tasks: dict[str, Task] = {}
        self.updates: dict[str, Weights] = {}
        self.before: Weights = {}
        self._round = -1

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build the workers of a run."""
        self.spec = spec
        self.memories = {}
        self.inner.start(spec, method)
        self.on_reply = self._keep

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Run the tasks."""
        return self.inner.run(tasks)

    def _keep(self, task: Task, reply: Reply[Any]) -> None:
        """Keep a task that trains, and the weights it ends with."""
        if task.round != self._round:
            self._round = task.round
            self.tasks, self.updates, self.before = {}, {}, {}
        if isinstance(reply.value, LocalUpdate):
            self.tasks[reply.client] = task
            self.before = self.before or _copy(task.weights)
            self.updates[reply.client] = _copy(reply.value.weights)

    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Measured]:
        """Measure the weights on each index array."""
        return self.inner.evaluate(weights, indices)

    def peak_memory_mib(self) -> float:
        """Return the peak resident memory so far."""
        return self.inner.peak_memory_mib()

    def close(self) -> None:
        """Let go of processes and memory."""
        self.inner.close()


@dataclass
class Trained:
    """A run in memory, after the last round that was wanted.

    Attributes:
        plan: What was run.
        federation: Images, clients and splits.
        classes: Names of the classes.
        method: The module; holds whatever was loaded last.
        models: Global weights after each wanted round; 0 is before round 1.
        before: What the last round's clients were sent.
        updates: Their weights after local training, by name.
        tasks: What they were asked.
        spec: What a worker is built from.
        private: State of a client that never trained.
    """

    plan: Plan
    federation: Federation
    classes: tuple[str, ...]
    method: Method
    spec: WorkerSpec
    private: Weights
    memories: dict[str, Payload] = field(default_factory=dict)
    models: dict[int, Weights] = field(default_factory=dict)
    before: Weights = field(default_factory=dict)
    updates: dict[str, Weights] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)

    def load(self, weights: Weights, client: str | None = None) -> Method:
        """Return the module in evaluation mode with the weights, and with a client's own state."""
        self.method.state.load(self.private)
        if client is not None:
            self.method.state.load(self.memories.get(client, {}).get("private state", {}))
        self.method.state.load(weights)
        return self.method.eval()

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return next(self.method.parameters()).device

    def images(self, index: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return images float (B, 3, H, W) in [0, 1], and labels (B,), on the module's device."""
        pixels, labels = ImageBank(self.federation, torch.device("cpu")).take(
            torch.from_numpy(np.asarray(index, dtype=np.int64))
        )
        return to_float(pixels).to(self.device), labels.to(self.device)


def train(
    plan: Plan,
    data: RunData,
    executor: Executor,
    resources: Resources,
    report: Report,
    at: Collection[int],
) -> Trained:
    """Train until the last wanted round and keep the global model of each.

    Args:
        plan: What to run.
        data: The data set.
        executor: What runs the clients' tasks.
        resources: Device and threads.
        report: Where progress goes.
        at: Rounds whose models are kept; 0 is before round 1.

    Raises:
        FeddgError: If the data, a file or a setting cannot be used.
    """
    settings = plan.settings
    recording = Recording(executor)
    with tempfile.TemporaryDirectory() as scratch:  # a run would keep its index lists
        store = ResultsStore(Path(scratch))
        federation, record = open_federation(plan, data, store, report.decoding)
    method, server = open_server(plan, federation, recording, resources)
    private = method.state.private_weights()
    trained = Trained(plan, federation, data.dataset.classes, method, recording.spec, private)
    report.begin(plan, None, record)
    for result in federate(
        method,
        server,
        lambda weights: evaluate(
            recording, federation, weights, chunk=settings.evaluation.batch_size
        ),
        rounds=settings.federation.rounds,
        per_round=settings.federation.per_round,
        every=settings.evaluation.every,
    ):
        if result.round:
            images = sum(len(federation.clients[name]) for name in result.cohort)
            report.round(plan, result, images * settings.train.local_epochs)
        if result.round in at:
            trained.models[result.round] = _copy(method.global_model(server))
        if result.round >= max(at):
            break
    trained.before, trained.updates = recording.before, recording.updates
    trained.tasks, trained.memories = recording.tasks, dict(recording.memories)
    return trained


def wanted_rounds(text: str | None, rounds: int) -> list[int]:
    """Return the rounds of a comma-separated list, the last round if there is none.

    Raises:
        SettingsError: If it is not numbers from 0 to the run's last round.

    >>> wanted_rounds("5,1,5", 50)
    [1, 5]
    """
    if text is None:
        return [rounds]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) <= rounds for part in parts):
        raise SettingsError(
            f"cannot use --at {text!r}: expected rounds from 0 to {rounds}, such as 1,{rounds}; "
            f"raise --rounds for later ones"
        )
    return sorted({int(part) for part in parts})


def sample(
    trained: Trained,
    count: int,
    *,
    splits: Collection[str] = ("id_test", "val", "test"),
    keep: Callable[[np.ndarray], np.ndarray] = lambda labels: np.full(len(labels), True),
) -> list[tuple[str, np.ndarray]]:
    """Return up to so many images of each domain that no client trained on, by its own stream.

    Args:
        trained: The run.
        count: Images of a domain.
        splits: Where they may come from.
        keep: Which images may come, by their labels (n,): bool (n,).

    Returns:
        Domains in the order of splits with indices of images, ascending.
    """
    found = []
    seed = trained.plan.settings.seed
    for split, domain, index in trained.federation.evaluation:
        if split not in splits:
            continue
        allowed = index[keep(trained.federation.labels[index])]
        rng = generator(seed, "figures", split, domain)
        chosen = np.sort(rng.permutation(allowed)[:count])
        if len(chosen):
            found.append((f"{domain} ({split})", chosen))
    return found


def _copy(weights: Any) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}
