"""Client work as a function of a message; no other code runs it."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from feddg_bench.common.errors import noted
from feddg_bench.common.lightning import (
    Fabric,
    LightningEnvironment,
    MixedPrecision,
    Precision,
    SingleDeviceStrategy,
)
from feddg_bench.config.schema import RunSettings
from feddg_bench.core.client import Client, Received
from feddg_bench.core.halves import client_half
from feddg_bench.core.messages import LocalUpdate, Reply, Task, Weights, copied, leaves, plain
from feddg_bench.core.method import Method
from feddg_bench.data.augment import to_float
from feddg_bench.data.client_images import ClientImages, ImageBank
from feddg_bench.data.federated import Federation
from feddg_bench.engine.construction import build_run_method
from feddg_bench.engine.flop import count_flop
from feddg_bench.engine.gpu import use_gpu
from feddg_bench.engine.portable_functions import use_portable
from feddg_bench.models.batch_norm import Fold, FrozenBatchNorm, Pair, fold_all, foldable, folded
from feddg_bench.models.networks import DepthwiseByCase
from feddg_bench.models.tasks import TASKS
from feddg_bench.protection.guarantee import noised
from feddg_bench.records.metrics import PERSONAL, find_metric

logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # it announces every precision

COUNTED = 8
"""Number of a client's images on which operations are counted."""


class Predictions(NamedTuple):
    """Evaluation of n images."""

    predictions: np.ndarray  # class ids or numbers, [n]
    loss: float  # summed
    outputs: np.ndarray | None  # logits, float32 [n, C], if a metric needs them


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a process needs to build its worker.

    Attributes:
        settings: What to compute.
        federation: Images, clients and splits.
        device: Where to compute, such as ``cpu`` or ``cuda:0``.
        threads: CPU threads of this worker.
        sharing: Workers on the same device, this one included.
        plugin: The method's class, if it is not the one registered under its name.
        counts: Whether operations are counted, for which some work is done twice.
    """

    settings: RunSettings
    federation: Federation
    device: str = "cpu"
    threads: int = 1
    sharing: int = 1
    plugin: type[Method] | None = None
    counts: bool = True


class _Precision(Precision):
    """Lightning's float32, without a generator for each batch."""

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()


class _MixedPrecision(MixedPrecision):
    """Lightning's, with fast gradients of depthwise convolutions on a CPU."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with super().forward_context(), DepthwiseByCase():
            yield


@cache
def _fabric(device: torch.device, precision: Literal["32-true", "bf16-mixed"]) -> Fabric:
    """Return the `Fabric` of all runs: a new one would read what all installed packages register.

    A worker may run in the allocation of a launcher, such as Slurm, torchrun or MPI, but is not one
    of its processes: `LightningEnvironment` keeps Fabric from reading the launcher's variables.
    """
    cuda = device.type == "cuda"
    mixed = None if precision == "32-true" else _MixedPrecision(precision, device.type)
    plugins: list[Any] = [LightningEnvironment(), mixed or _Precision()]
    own = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("LT_")}
    try:  # without the variables of `fabric run`, which has no plugin
        return Fabric(
            accelerator="cuda" if cuda else "cpu",
            devices=[device.index or 0] if cuda else 1,
            strategy=SingleDeviceStrategy(device),
            plugins=plugins,
        )
    finally:
        os.environ.update(own)


class Worker:
    """Runs client tasks on one device. A process has one worker, with its only model.

    ``run`` is a function of the task alone: its reply does not depend on which tasks ran before,
    in which order or in which process.
    """

    def __init__(self, spec: WorkerSpec, method: Method | None = None) -> None:
        use_portable(wanted=spec.settings.portable, device=spec.device, threads=spec.threads)
        torch.set_num_threads(spec.threads)
        keep_freed_memory()
        # Lightning sets this on import for forked processes, which we never create. With it,
        # PyTorch's optimizers load the GPU driver's library again at every step.
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
        self.spec = spec
        self.settings = spec.settings
        self.device = torch.device(spec.device)
        if self.device.type != "cpu":
            use_gpu(self.settings.gpu, self.device)
        self.fabric = _fabric(self.device, self.settings.train.precision)
        self.method = method or build_run_method(self.settings, spec.federation, spec.plugin)
        self.method.to(self.device)
        if self.settings.train.channels_last:
            self.method.to(memory_format=torch.channels_last)
        self.method.state.bind()
        self.bank = ImageBank(spec.federation, self.device, spec.sharing)
        federation = spec.federation
        self.data = {name: self._images(rows) for name, rows in federation.clients.items()}
        self.validation = {name: self._images(rows) for name, rows in federation.validation.items()}
        self.domain_ids = {
            name: torch.from_numpy(federation.domains_of(name)) for name in self.data
        }
        self._initial_private = self.method.state.private_weights()
        self._folded = self._foldable()
        self._keeps_outputs = any(find_metric(name).logs for name in federation.metrics)
        self._evaluated: tuple[Weights, list[int], list[Fold]] | None = None
        self._counted: set[tuple[str, bool]] = set()
        self._modes: list[bool] = []
        self._modules = [*self.method.modules()]

    def _images(self, rows: np.ndarray) -> ClientImages:
        return ClientImages(self.bank, rows, self.settings.augment, self.settings.train)

    def _foldable(self) -> dict[str, list[Pair]]:
        """Return the batch normalisation layers to fold in ``train`` and in ``evaluation``."""
        fold, fuse = self.settings.train.fold_batch_norm, self.settings.evaluation.fuse_batch_norm
        if not (fold or fuse):
            return {"train": [], "evaluation": []}
        federation, layout = self.spec.federation, torch.contiguous_format
        if self.settings.train.channels_last:
            layout = torch.channels_last
        shape = (2, federation.channels, federation.size, federation.size)
        images = torch.linspace(0, 1, math.prod(shape), device=self.device).view(shape)
        pairs = foldable(self.method.backbone, images.contiguous(memory_format=layout))
        frozen = [pair for pair in pairs if isinstance(pair[1], FrozenBatchNorm)]
        if fold == "auto" and all(conv.groups == 1 for conv, _ in frozen):
            fold = False
        return {"train": frozen if fold else [], "evaluation": pairs if fuse else []}

    def run(self, task: Task, *, stays: bool = False) -> Reply[Any]:
        """Load the global weights, run the task, and keep no state of it.

        Args:
            task: The task.
            stays: Whether the value is not sent, so that it can be of any type; used for figures.
        """
        client = self._client(task)
        personal = client.memory.pop(PERSONAL, None)
        value, seconds = self._do(task, client)
        own = {tensor.data_ptr() for tensor in self.method.state.tensors.values()}
        if not stays:
            value = plain(value, own)
            value = noised(value, task, self.method, self.settings.privacy, self.settings.seed)
        memory = plain(client.memory, own)
        leaves(memory)  # raises if anything may not be kept
        if not stays and isinstance(value, LocalUpdate):  # last, because it loads other weights
            personal = self._personal(client) or personal
        if personal is not None:
            memory[PERSONAL] = personal
        images = len(self.data[task.client])
        return Reply(task.client, images, value, client.metrics(), memory, seconds)

    def _do(self, task: Task, client: Client) -> tuple[Any, dict[str, float]]:
        """Return the value of a task for its client, and `Reply.seconds`."""
        start = time.perf_counter()
        self._evaluated = None
        self._train_mode()
        self.method.state.load(client.memory.pop("private state", self._initial_private))
        self.method.state.load(task.weights)
        loaded = time.perf_counter()
        with (
            client_half(self.method, client, task.call),
            self.method.state.serving(client),
            folded(self._folded["train"]),
        ):
            value = getattr(self.method, task.call)(client)
        for tensor in self.method.state.tensors.values():
            tensor.grad = None
        if self._initial_private:
            client.memory["private state"] = self.method.state.private_weights()
        return value, {"copy": loaded - start, "work": time.perf_counter() - loaded}

    def _personal(self, client: Client) -> dict[str, float] | None:
        """Return the main metric of a client's personal model on its own test images, if any."""
        federation = self.spec.federation
        index = federation.of_clients.get("client_test", {}).get(client.name)
        if index is None:
            return None
        state = self.method.state
        with client_half(self.method, client, "personal_model"), state.serving(client):
            model = self.method.personal_model(client)
            if model is None:
                return None
            return federation.main_metric(index, self.evaluate(model, index).predictions)

    def _train_mode(self) -> None:
        """Call ``self.method.train()`` if needed; checking is faster than calling it each time."""
        if [module.training for module in self._modules] != self._modes:
            self.method.train()
            self._modes = [module.training for module in self._modules]

    def run_counted(self, task: Task) -> Reply[Any]:
        """Run a task; the operations of the first one of each call are counted separately.

        They are counted again after round 1, in which methods do less that use an earlier model.
        """
        counted: dict[str, float] = {}
        kind = task.call, task.round > 1
        if self.spec.counts and kind not in self._counted:
            self._counted.add(kind)
            with suppress(Exception):  # an error that does not come from counting is raised below
                counted = self._count(task)
        reply = self.run(task)
        return replace(reply, counted=counted) if counted else reply

    def _count(self, task: Task) -> dict[str, float]:
        """Return `Reply.counted`, from a few images of the client.

        Counting in the task itself could change rounding: PyTorch then adds gradients differently.
        """
        client = self._client(task)
        few = self.data[task.client].index[:COUNTED].numpy()
        client.data = self._images(few)
        client.domain_ids = client.domain_ids[:COUNTED]
        held = self.validation.get(task.client)
        if held is not None:  # in proportion: the caller counts by training images
            part = max(1, round(len(held) * len(few) / len(self.data[task.client])))
            client.validation = self._images(held.index[:part].numpy())
        return {"flop an image": count_flop(lambda: self._do(task, client)) / len(few)}

    def _client(self, task: Task) -> Client:
        return Client(
            name=task.client,
            round=task.round,
            rounds=self.settings.federation.rounds,
            data=self.data[task.client],
            weights=Received(task.weights, self.device),
            broadcast=Received({**task.broadcast, **task.told}),
            memory=copied(task.memory),
            fabric=self.fabric,
            train=self.settings.train,
            seed=self.settings.seed,
            domain_ids=self.domain_ids[task.client].clone(),
            sources=self.spec.federation.sources,
            validation=self.validation.get(task.client),
        )

    @torch.no_grad()
    def evaluate(self, weights: Weights, index: np.ndarray) -> Predictions:
        """Evaluate global weights on some images."""
        task = TASKS[self.spec.federation.task]
        self.method.eval()
        folds = self._load_to_evaluate(weights)
        predictions, kept = [], []
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with noted("evaluation"):
            for part in torch.from_numpy(index).split(self.settings.evaluation.batch_size):
                images, labels = self.bank.take(part)
                with self.fabric.autocast(), folded(self._folded["evaluation"], folds):
                    outputs = self.method(to_float(images)).float()
                predictions.append(task.predict(outputs))
                loss += task.loss(outputs, labels, "sum")
                kept += [outputs] if self._keeps_outputs else []
        outputs = torch.cat(kept).cpu().numpy() if kept else None
        return Predictions(torch.cat(predictions).cpu().numpy(), float(loss), outputs)

    def _load_to_evaluate(self, weights: Weights) -> list[Fold]:
        """Load global weights unless they are already loaded, and return their `Fold`s.

        PyTorch counts the in-place changes of each tensor.
        """

        def versions() -> list[int]:
            return [t._version for t in (*self.method.state.tensors.values(), *weights.values())]

        known = self._evaluated
        if known is None or known[0] is not weights or known[1] != versions():
            self.method.state.load(self._initial_private)
            self.method.state.load(weights)
            folds = fold_all(self._folded["evaluation"])
            known = self._evaluated = weights, versions(), folds
        return known[2]


def keep_freed_memory() -> None:
    """Ask glibc to reuse freed memory instead of giving it back to the system.

    Every layer allocates and frees large feature maps. Memory that was given back must be cleared
    page by page when it is requested again, which costs 5 to 10 % of a training step on a CPU. On
    anything but Linux with glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def peak_memory_mib() -> float:
    """Return this process's peak resident memory in MiB; NaN on Windows."""
    try:
        import resource
    except ImportError:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024 if sys.platform != "darwin" else 1024**2), 1)
