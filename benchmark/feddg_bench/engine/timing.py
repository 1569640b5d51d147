"""How long client work takes on random images."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from feddg_bench.config.schema import EngineSettings, PrivacySettings, Resources, RunSettings
from feddg_bench.core.messages import Task
from feddg_bench.data.federated import Federation
from feddg_bench.engine.compatibility import ImageFacts
from feddg_bench.engine.devices import find_devices
from feddg_bench.engine.flop import seconds_of
from feddg_bench.engine.worker import Worker, WorkerSpec


def synthetic_federation(
    clients: int,
    per_client: int,
    size: int,
    num_classes: int,
    *,
    seed: int = 0,
    like: ImageFacts | None = None,
) -> Federation:
    """Return random images in clients of equal size, only for measurements; nothing is held out.

    ``size`` is in pixels. Task, channels and pixel type are those of ``like``; by default, RGB
    images are classified.
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
        1 if task == "regression" else num_classes,
        sources=("synthetic",),
        domain_ids=np.zeros(count, dtype=np.int64),
        validation={name: part[: max(1, per_client // 10)] for name, part in names.items()},
        task=task,
        channels=channels,
        pixels=pixels,
    )


ENOUGH = 0.25
"""Seconds of a step after which `seconds_an_image` does not try a larger one."""
LARGEST = 128
"""Most images of its steps: larger batches take as long for an image, and more memory."""


def seconds_an_image(
    settings: RunSettings, pictures: ImageFacts, classes: int, resources: Resources
) -> tuple[float, float]:
    """Return the seconds that this machine takes to train on an image and to evaluate one.

    Measured on random images with plain training (FedAvg) in the settings of a run, within about
    two seconds. Steps grow up to the run's batch size, at most `LARGEST`, unless a small one takes
    long. No random stream of a run moves: streams are named, and the generators are left as they
    were.
    """
    size = min(settings.train.batch_size, LARGEST)
    sizes = [n for n in (2, 8, 32) if n < size] + [size]
    federation = synthetic_federation(1, size, settings.data.image_size, classes, like=pictures)
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
        # Other programs, such as workers that start meanwhile, do not lengthen CPU time.
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
