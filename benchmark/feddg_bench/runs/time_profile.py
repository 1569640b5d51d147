"""Time profile of a run, and its distance from the machine's peak performance."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import Resources
from feddg_bench.core.loop import RoundResult
from feddg_bench.core.messages import Reply, Task
from feddg_bench.data.federated import Federation
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.engine.flop import Tally, count_flop, peak_flops, seconds_of
from feddg_bench.engine.gpu import device_name
from feddg_bench.engine.worker import Worker, peak_memory_mib
from feddg_bench.runs.driver import train
from feddg_bench.runs.observer import Observer
from feddg_bench.runs.request import Plan
from feddg_bench.runs.setup import Run, start

_PHASES = ("training", "communication", "aggregation", "evaluation")


@dataclass(frozen=True)
class Profile:
    """Seconds, bytes and FLOP/s of a few rounds, in one process."""

    method: str
    device: str  # device that computed
    precision: str  # `32-true` or `bf16-mixed`
    rounds: int  # rounds measured, after one warm-up round
    clients: int  # clients of a round
    images: int  # images trained on in a round
    once: dict[str, float]  # seconds before round 1 (statistics, first loading), by phase
    round: dict[str, float]  # seconds of a round by phase: the median over rounds that have it
    client: float  # median seconds of one client's task
    images_per_second: float  # in local training
    bytes_up: int  # sent to the server in a round
    bytes_down: int  # sent to the clients in a round
    flop_per_image: float  # operations of client work per training image; 0 if not known
    flops: dict[str, float]  # achieved operations per second, by phase: training and evaluation
    peak_flops: float  # the same for a large matrix product in this process and precision
    share_of_peak: dict[str, float]  # `flops` over `peak_flops`
    bare_seconds: float  # forward, backward and step alone, on resident tensors, for a round
    bare_ratio: float  # seconds of local training over `bare_seconds`
    peak_memory_mib: float  # peak resident memory of the process
    peak_device_mib: float | None  # peak memory on the GPU, `None` on a CPU


def profile(plan: Plan, federation: Federation, resources: Resources) -> Profile:
    """Run a few rounds in this process and measure them.

    The first round is warm-up, so the plan has one round more than is measured.
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
    evaluated = [r for r in results if r.evaluation is not None]  # the last one is, at least
    phases = {
        phase: statistics.median(
            r.ledger.seconds.get(phase, 0.0)
            for r in (evaluated if phase == "evaluation" else results)
        )
        for phase in _PHASES
    }
    peak = peak_flops(worker.device, settings.train.precision, resources.threads)
    flop = {"training": (watch.tally.flop or 0.0) / len(results)}
    measured = [index for _, _, index in federation.evaluation]
    if measured:
        some = measured[0][: settings.evaluation.batch_size]
        counted = count_flop(lambda: worker.evaluate(run.server.weights, some))
        flop["evaluation"] = counted / len(some) * sum(map(len, measured))
    flops = {phase: work / phases[phase] for phase, work in flop.items()}
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
        flop_per_image=flop["training"] / images,
        flops=flops,
        peak_flops=peak,
        share_of_peak={phase: rate / peak for phase, rate in flops.items()},
        bare_seconds=bare,
        bare_ratio=phases["training"] / bare,
        peak_memory_mib=peak_memory_mib(),
        peak_device_mib=None if on_cpu else gpu.max_memory_allocated(device) / 2**20,
    )


class _Watch(Observer):
    """Collects the costs of all rounds except the first, which is warm-up."""

    def __init__(self) -> None:
        self.once: dict[str, float] = {}
        self.results: list[RoundResult] = []
        self.tally = Tally()

    def replied(self, run: Run, task: Task, reply: Reply[Any]) -> None:
        self.tally.add(task, reply)

    def round(self, run: Run, result: RoundResult) -> None:
        if result.round == 0:
            self.once = dict(result.ledger.seconds)
        elif result.round > 1:
            self.results.append(result)
        if result.round < 2:
            self.tally.flop = 0.0


def bare_seconds(worker: Worker, sizes: list[int]) -> float:
    """Return the seconds of forward, backward and step alone for one epoch of clients of ``sizes``.

    Images are already floats on the device; there is one optimizer and the task's plain loss. So
    anything that a method adds, such as another pass or a transfer, shows in the ratio to this.
    """
    settings, method = worker.settings, worker.method
    size, batch = settings.side, settings.train.batch_size
    channels = worker.spec.federation.channels
    draw = torch_generator(settings.seed, "bare loop")
    images = torch.rand(batch, channels, size, size, generator=draw).to(worker.device)
    if settings.train.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(method.num_classes, (batch,), generator=draw).to(worker.device)
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
            loss.backward()
            optimizer.step()

    loop()
    return min(seconds_of(loop, worker.device) for _ in range(2))
