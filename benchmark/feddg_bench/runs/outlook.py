"""Preview of a command: descriptions of its setups, and an estimate of the time they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from feddg_bench.common.errors import FeddgError
from feddg_bench.common.terminal import duration
from feddg_bench.common.titles import backbone_title, counted, network_title
from feddg_bench.config.schema import (
    EngineSettings,
    EvaluationSettings,
    PrivacySettings,
    Resources,
    RunSettings,
)
from feddg_bench.core.messages import Task
from feddg_bench.data.federated import ImageFacts, measured_federation, spread
from feddg_bench.engine.devices import count_workers, find_devices
from feddg_bench.engine.flop import seconds_of
from feddg_bench.engine.worker import Worker, WorkerSpec
from feddg_bench.plugins import method_title
from feddg_bench.runs.cards import operations
from feddg_bench.runs.request import Plan

ENOUGH = 0.5
"""Duration of a step in seconds above which `seconds_an_image` tries no larger one."""
LARGEST = 128
"""Maximum images of its steps: larger batches take as long per image, and more memory."""


def outlook(plans: Sequence[Plan], resources: Resources) -> Iterator[str]:
    """Yield a line for each setup of runs, and one with the estimated time of all runs here."""
    methods: dict[str, dict[str, None]] = {}
    for plan in plans:
        methods.setdefault(_set_up(plan), {})[method_title(plan.settings.method)] = None
    for words, names in methods.items():
        yield f"setup: {', '.join(names)}: {words}" if len(methods) > 1 else f"setup: {words}"
    if plans and resources.engine == "processes":
        if find_devices(resources.device)[0] != "cpu" and (settings := _faster(plans)):
            cached = any(plan.recipe == "pardon" for plan in plans)
            yield (
                f"faster on this GPU, but the numbers change: {', '.join(settings)}"
                + "; recipe pardon-cached has these" * cached
            )
        try:
            seconds = expected_seconds(plans, resources)
        except FeddgError:
            raise
        except Exception:  # the run meets it, too, and names the client and the remedy
            return
        runs, time = counted(len(plans), "run"), duration(max(1, seconds))
        yield f"estimate: {runs} in about {time} on this machine, if nothing else uses it"


def _set_up(plan: Plan) -> str:
    s = plan.settings
    clients, chosen = s.partition.count(len(plan.scenario.train)), s.federation.per_round
    who = f"{'all' if chosen is None else chosen} of {counted(clients, 'client')} a round"
    if s.partition.kind == "pooled":
        who = "all images in one place"
    rounds = counted(s.federation.rounds, "round")
    weights = "pretrained" if s.backbone.pretrained else "from scratch"
    network = f"{backbone_title(s.backbone.name)} {weights}, {s.data.image_size} px"
    if encoder := s.features.encoder:
        network = network_title(s.backbone.name, encoder, s.data.image_size, s.backbone.hidden)
    return f"{network}, {rounds}, {who}"


def _faster(plans: Sequence[Plan]) -> list[str]:
    """Return settings with which a GPU is faster and which some of the runs do not have."""
    found: dict[str, None] = {}
    for s in (plan.settings for plan in plans):
        exact = s.train.precision == "32-true"
        lacking = {
            "gpu.tf32=true": exact and not s.gpu.tf32,
            "train.precision=bf16-mixed": exact,
            "evaluation.every=5": s.evaluation.every < 5 <= s.federation.rounds,
            "hyper.transfer=cached": s.hyper.get("transfer") == "online",
        }
        found |= dict.fromkeys(setting for setting, missing in lacking.items() if missing)
    return [*found]


def expected_seconds(plans: Sequence[Plan], resources: Resources) -> float:
    """Return the estimated seconds of runs here.

    The estimate is images times seconds per image, over the workers. Plain training is measured; a
    built-in method that has more operations for an image, by its card, is estimated to take that
    much longer. Decoding, the server's work and start-up are not counted.
    """
    workers = count_workers(resources, find_devices(resources.device))
    measured: dict[str, tuple[float, float]] = {}
    images: dict[str, tuple[int, int, int]] = {}
    total = 0.0
    for plan in plans:
        s, dataset = plan.settings, plan.dataset
        network = str((s.backbone, s.train, s.features, s.data.image_size, s.augment))
        if network not in measured:
            classes = len(dataset.classes) or 1
            measured[network] = seconds_an_image(s, dataset, classes, resources)
        spreading = str((s.protocol, s.scenario, s.data, s.partition, s.evaluation.splits))
        if spreading not in images:
            images[spreading] = _images(plan)
        trained, clients, evaluated = images[spreading]
        train, evaluate = measured[network]
        asked = s.federation.per_round or clients
        share = asked / clients
        work = trained * share * s.train.local_epochs * s.federation.rounds * train
        looks = evaluated * evaluations(s.evaluation, s.federation.rounds) * evaluate
        total += work * max(1.0, operations(s.method) or 0.0) / min(workers, asked)
        total += looks / workers
    return total


def _images(plan: Plan) -> tuple[int, int, int]:
    """Return the numbers of training images, of their clients, and of images of an evaluation."""
    s = plan.settings
    parts = spread(s, plan.dataset, plan.scenario)
    trained = sum(map(len, parts.clients.values()))
    wanted = s.evaluation.splits or [name for name in parts.splits if name != "train"]
    return trained, len(parts.clients), sum(len(parts.splits[name]) for name in wanted)


def evaluations(settings: EvaluationSettings, rounds: int) -> int:
    """Return the number of evaluated rounds of a run.

    >>> evaluations(EvaluationSettings(every=5, start=10), 16)
    3
    """
    due = {r for r in range(settings.start, rounds + 1) if r % settings.every == 0}
    return len(due | {rounds})


def seconds_an_image(
    settings: RunSettings, pictures: ImageFacts, classes: int, resources: Resources
) -> tuple[float, float]:
    """Return the seconds that this machine takes to train on an image and to evaluate one.

    Measured on random images with plain training (FedAvg) in the settings of a run, within about
    three seconds. Steps grow up to the run's batch size, at most `LARGEST`, unless a small one
    takes long. The run's random streams are not affected: streams are named, and the generators
    stay unchanged.
    """
    size = min(settings.train.batch_size, LARGEST)
    sizes = [n for n in (2, 8, 32) if n < size] + [size]
    federation = measured_federation(settings, 1, size, classes, pictures)
    parts = {f"holds {n}": np.arange(n) for n in sizes}
    once = {"local_epochs": 1, "optimizer_state": "reset"}
    plain = settings.model_copy(
        update={
            "method": "fedavg",
            "hyper": {},
            "train": settings.train.model_copy(update=once),
            "backbone": settings.backbone.model_copy(update={"pretrained": False, "weights": None}),
            "engine": EngineSettings(),
            "privacy": PrivacySettings(),
        }
    )
    device, threads = find_devices(resources.device)[0], torch.get_num_threads()
    try:
        data = replace(federation, clients=parts, validation={})
        worker = Worker(WorkerSpec(plain, data, device, resources.threads, counts=False))
        weights = worker.method.state.federated_weights()
        # CPU time is not affected by other programs, such as workers that start meanwhile.
        alone = device == "cpu" and resources.threads == 1
        for n in sizes:
            task = Task(f"holds {n}", "fit", 1, weights, {})
            train = _seconds(partial(worker.run, task), device, alone=alone)
            if train > ENOUGH:
                break
        rows = np.arange(n)
        evaluate = _seconds(partial(worker.evaluate, weights, rows), device, alone=alone)
    finally:
        torch.set_num_threads(threads)
    return train / n, evaluate / n


def _seconds(work: Callable[[], object], device: str, *, alone: bool) -> float:
    """Return the time of some work: CPU time of this process if it computes ``alone``."""
    cpu = time.process_time()
    wall = seconds_of(work, torch.device(device))
    return time.process_time() - cpu if alone else wall
