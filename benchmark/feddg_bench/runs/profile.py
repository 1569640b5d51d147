"""Where the time of a run goes, and how far that is from what the machine can do."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.common.portable import describe_cpu
from feddg_bench.config.schema import Resources, RunSettings
from feddg_bench.core.loop import RoundResult
from feddg_bench.core.messages import Reply, Task
from feddg_bench.core.tasks import TASKS
from feddg_bench.data.federated import Federation
from feddg_bench.data.locations import cache_dir
from feddg_bench.engine.compatibility import Pictures
from feddg_bench.engine.devices import device_name, find_devices
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.engine.worker import Worker, WorkerSpec, peak_memory_mib
from feddg_bench.runs.observer import Observer
from feddg_bench.runs.request import Plan
from feddg_bench.runs.run import train
from feddg_bench.runs.setup import Run, start

logger = logging.getLogger(__name__)

_PHASES = ("training", "communication", "aggregation", "evaluation")


@dataclass(frozen=True)
class Profile:
    """Seconds, bytes and FLOP/s of a few rounds, in one process."""

    method: str
    device: str  # what computed
    precision: str  # `32-true` or `bf16-mixed`
    rounds: int  # rounds measured, after one of warm-up
    clients: int  # clients of a round
    images: int  # images trained on in a round
    once: dict[str, float]  # seconds before round 1 (statistics, first loading), by phase
    round: dict[str, float]  # seconds of a round by phase: the median over the rounds
    client: float  # median seconds of one client's task
    images_per_second: float  # in local training
    bytes_up: int  # sent to the server in a round
    bytes_down: int  # sent to the clients in a round
    flop_per_image: float  # floating point operations of one training step, for each image
    flops: float  # achieved in local training, operations a second
    peak_flops: float  # of a large matrix product in the same process and precision
    share_of_peak: float  # `flops / peak_flops`
    bare_seconds: float  # forward, backward and step alone, on resident tensors, for a round
    bare_ratio: float  # seconds of local training over `bare_seconds`
    peak_memory_mib: float  # peak resident memory of the process
    peak_device_mib: float | None  # peak memory on the GPU, `None` on a CPU

    def as_json(self) -> dict[str, object]:
        """Return the profile as JSON values."""
        return asdict(self)


def profile(plan: Plan, federation: Federation, resources: Resources) -> Profile:
    """Run a few rounds in this process and measure them.

    The plan has one round more than is measured.
    """
    settings = plan.settings
    executor = SerialExecutor()
    run = start(plan, federation, executor, resources)
    watch = _Watch()
    train(run, watch)
    worker, results = executor.worker, watch.results
    cohort = results[-1].cohort
    epochs = settings.train.local_epochs
    images = sum(len(federation.clients[name]) for name in cohort) * epochs
    phases = {
        phase: statistics.median(r.ledger.seconds.get(phase, 0.0) for r in results)
        for phase in _PHASES
    }
    flop = flop_per_image(worker, watch.task)
    flops = flop * images / phases["training"]
    peak = peak_flops(worker.device, settings.train.precision)
    bare = bare_seconds(worker, [len(federation.clients[name]) for name in cohort]) * epochs
    on_cpu = worker.device.type == "cpu"
    device, gpu = run.spec.device, torch.get_device_module(worker.device)
    return Profile(
        method=settings.method,
        device=f"cpu, {resources.threads} thread(s)" if on_cpu else device_name(device),
        precision=settings.train.precision,
        rounds=len(results),
        clients=len(cohort),
        images=images,
        once=watch.once,
        round=phases,
        client=statistics.median(s for r in results for s in r.ledger.clients.values()),
        images_per_second=images / phases["training"],
        bytes_up=results[-1].ledger.bytes["up"],
        bytes_down=results[-1].ledger.bytes["down"],
        flop_per_image=flop,
        flops=flops,
        peak_flops=peak,
        share_of_peak=flops / peak,
        bare_seconds=bare,
        bare_ratio=phases["training"] / bare,
        peak_memory_mib=peak_memory_mib(),
        peak_device_mib=None if on_cpu else gpu.max_memory_allocated(device) / 2**20,
    )


def synthetic_federation(
    clients: int,
    per_client: int,
    size: int,
    num_classes: int,
    *,
    seed: int = 0,
    like: Pictures | None = None,
) -> Federation:
    """Return random images in clients of equal size, for speed alone; nothing is held out.

    ``size`` is in pixels. Task, channels and type are as in ``like``, classes of RGB images by
    default.
    """
    task, channels, pixels = "classification", 3, "uint8"
    if like is not None:
        task, channels, pixels = like.task, like.channels, like.pixels
    rng = np.random.default_rng(seed)
    count = clients * per_client
    shape = (count, size, size, channels)
    images = (
        rng.integers(0, 256, shape, dtype=np.uint8)
        if pixels == "uint8"
        else rng.standard_normal(shape, dtype=np.float32).astype(pixels)
    )
    labels = (
        rng.integers(0, num_classes, count)
        if task == "classification"
        else rng.standard_normal(count, dtype=np.float32)
    )
    width = len(str(clients - 1))
    parts = np.arange(count).reshape(clients, per_client)
    names = {f"client_{i:0{width}}": part for i, part in enumerate(parts)}
    return Federation(
        images,
        size,
        labels,
        names,
        (),
        TASKS[task].outputs(num_classes),
        sources=("synthetic",),
        domain_ids=np.zeros(count, dtype=np.int64),
        validation={name: part[: max(1, per_client // 10)] for name, part in names.items()},
        task=task,
        channels=channels,
        pixels=pixels,
    )


def peak_flops(device: torch.device, precision: str) -> float:
    """Return the operations a second of a large matrix product: the best of several."""
    size = 2048 if device.type == "cpu" else 8192
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(_seconds(lambda: a @ b, device) for _ in range(5))


def faster_clients(settings: RunSettings, pictures: Pictures, resources: Resources) -> str:
    """Return whether ``exact`` or ``batched`` clients are faster here (`EngineSettings`).

    Measured once for a network, a size of batches and a machine: three steps of clients with one
    batch of random images each. The answer stays in the cache folder, so that a run that is asked
    for again has the same key.
    """
    parts = {"backbone", "train", "augment", "data", "engine", "portable", "federation"}
    known = {
        **settings.model_dump(mode="json", include=parts),
        "machine": [describe_cpu(), torch.__version__, resources.device, resources.threads],
        "method": [settings.method, pictures.task, pictures.channels],
    }
    name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir(resources.cache_dir) / "engine" / name
    if path.exists() and (said := path.read_text()) in ("exact", "batched"):
        return said
    together, device = settings.engine.together, find_devices(resources.device)[0]
    federation = synthetic_federation(
        together, settings.train.batch_size, settings.data.image_size, 10, like=pictures
    )
    once = {"local_epochs": 1, "optimizer_state": "reset"}
    random = {"pretrained": False, "weights": None}
    times: dict[str, list[float]] = {"exact": [], "batched": []}
    try:
        works = {}
        for clients in times:
            changed = {
                "train": settings.train.model_copy(update=once),
                "backbone": settings.backbone.model_copy(update=random),
                "engine": settings.engine.model_copy(update={"clients": clients}),
            }
            own = settings.model_copy(update=changed)
            works[clients] = _step_of(own, federation, device, resources.threads)
        for number in range(4):
            for clients, work in works.items():
                cpu = time.process_time()  # which other programs do not lengthen
                seconds = _seconds(work, torch.device(device))
                if device == "cpu":
                    seconds = time.process_time() - cpu
                times[clients] += [seconds] if number else []  # the first is warm-up
    except SettingsError as error:  # what cannot step together
        faster, why = "exact", str(error)
    else:
        faster = min(times, key=lambda clients: min(times[clients]))
        why = ", ".join(f"{c} {min(t) / together * 1e3:.2f} ms a step" for c, t in times.items())
    logger.warning("engine.clients=auto is %s here from now on: %s", faster, why)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, faster.encode())
    return faster


def _step_of(
    settings: RunSettings, federation: Federation, device: str, threads: int
) -> Callable[[], object]:
    """Return what makes one step of every client, in this process."""
    worker = Worker(WorkerSpec(settings, federation, device, threads))
    weights = worker.method.state.federated_weights()
    tasks = [Task(client, "fit", 1, weights, {}) for client in federation.clients]
    return lambda: worker.run_all(tasks)


class _Watch(Observer):
    """Keeps what rounds cost, the first as warm-up left out, and the last task of training."""

    def __init__(self) -> None:
        self.once: dict[str, float] = {}
        self.results: list[RoundResult] = []
        self.task: Task

    def replied(self, run: Run, task: Task, reply: Reply[Any]) -> None:
        if task.call == "fit":
            self.task = task

    def round(self, run: Run, result: RoundResult) -> None:
        if result.round == 0:
            self.once = dict(result.ledger.seconds)
        elif result.round > 1:
            self.results.append(result)


def flop_per_image(worker: Worker, task: Task) -> float:
    """Return the operations of a client's task by PyTorch's counter, for each image trained on."""
    images = len(worker.data[task.client]) * worker.settings.train.local_epochs
    return count_flop(lambda: worker.run(task)) / images


def count_flop(work: Callable[[], object]) -> int:
    """Return the floating point operations of ``work`` in convolutions and matrix products."""
    mapping = {torch.ops.aten.convolution_backward: _convolution_backward_flop}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        work()
    flop: int = counter.get_total_flops()
    return flop


def _convolution_backward_flop(
    grad_shape: Sequence[int], _input: object, weight_shape: Sequence[int], *rest: Any, **_: object
) -> int:
    """Return the operations of a convolution's backward pass.

    As many as forward for each of the gradients of input and weight that is asked for. PyTorch's
    own formula takes grouped convolutions for full ones: six times too much for MobileNetV2.
    """
    wanted: Sequence[bool] = rest[7]
    return 2 * math.prod(grad_shape) * math.prod(weight_shape[1:]) * sum(wanted[:2])


def bare_seconds(worker: Worker, sizes: list[int]) -> float:
    """Return the time of forward, backward and step alone for one epoch of clients of these sizes.

    Images are floats on the device already; one optimizer; the task's plain loss. What a method
    adds (another pass, a transfer) is therefore in the ratio to this.
    """
    settings, method = worker.settings, worker.method
    size, batch = settings.data.image_size, settings.train.batch_size
    channels = worker.spec.federation.channels
    images = torch.rand(batch, channels, size, size, device=worker.device)
    if settings.train.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, method.num_classes, (batch,), device=worker.device)
    if worker.spec.federation.task == "regression":
        labels = labels.float()
    parts = [part for n in sizes for part in (*[batch] * (n // batch), n % batch) if part]
    optimizer = method.configure_optimizers()
    method.train()

    def loop() -> None:
        for part in parts:
            with worker.fabric.autocast():
                loss = method.task.loss(method(images[:part]), labels[:part], "mean")
            optimizer.zero_grad()
            worker.fabric.backward(loss)
            optimizer.step()

    loop()
    return min(_seconds(loop, worker.device) for _ in range(2))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize = torch.get_device_module(device).synchronize
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
