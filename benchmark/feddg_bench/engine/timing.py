"""How long client work takes on random images, and which of two ways of doing it is faster here."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.common.portable import describe_cpu
from feddg_bench.config.schema import EngineSettings, PrivacySettings, Resources, RunSettings
from feddg_bench.core.messages import Task
from feddg_bench.data.federated import Federation
from feddg_bench.data.locations import cache_dir
from feddg_bench.engine.compatibility import ImageFacts
from feddg_bench.engine.devices import find_devices
from feddg_bench.engine.flop import seconds_of
from feddg_bench.engine.worker import Worker, WorkerSpec

logger = logging.getLogger(__name__)


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


_DECIDES: Any = {
    "backbone": True,
    "train": {
        *("optimizer", "batch_size", "precision"),
        *("channels_last", "fold_batch_norm", "depthwise_sums"),
    },
    "augment": True,
    "data": {"image_size"},
    "engine": True,
    "portable": True,
    "federation": {"bn"},
}
"""Settings on which it depends which clients are faster."""


def faster_clients(settings: RunSettings, pictures: ImageFacts, resources: Resources) -> str:
    """Return whether ``exact`` or ``batched`` clients are faster here (`EngineSettings`).

    Measured once for each network, batch size and machine, on three steps of clients with one batch
    of random images each. The answer stays in the cache folder, so that the same request gives a
    run the same key again, and requests that differ in a rate or in rounds the same engine.
    """
    known = {
        **settings.model_dump(mode="json", include=_DECIDES),
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
                cpu = time.process_time()  # other programs do not lengthen it
                seconds = seconds_of(work, torch.device(device))
                if device == "cpu":
                    seconds = time.process_time() - cpu
                times[clients] += [seconds] if number else []  # the first is warm-up
    except SettingsError as error:  # these clients cannot step together
        faster, why = "exact", str(error)
    else:
        faster = min(times, key=lambda clients: min(times[clients]))
        why = ", ".join(f"{c} {min(t) / together * 1e3:.2f} ms a step" for c, t in times.items())
    logger.warning("engine.clients=auto is %s here from now on: %s", faster, why)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, faster.encode())
    return faster


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


def _step_of(
    settings: RunSettings, federation: Federation, device: str, threads: int
) -> Callable[[], object]:
    """Return a function that makes one step of every client in this process."""
    worker = Worker(WorkerSpec(settings, federation, device, threads))
    weights = worker.method.state.federated_weights()
    tasks = [Task(client, "fit", 1, weights, {}) for client in federation.clients]
    return lambda: worker.run_all(tasks)
