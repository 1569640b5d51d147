"""GPUs: their assignment to workers, how they compute, and a check of their memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import GpuSettings, RunSettings
from feddg_bench.models.backbones import build_backbone

GIB = 2**30

CONTEXT = GIB // 2
"""GPU memory in bytes that a process takes before any computation: driver and libraries."""


def placement(devices: Sequence[str], workers: int) -> list[str]:
    """Return the device of each worker; workers take the devices in turn.

    >>> placement(["cuda:0", "cuda:2"], 3)
    ['cuda:0', 'cuda:2', 'cuda:0']
    """
    return [devices[number % len(devices)] for number in range(workers)]


def use_gpu(settings: GpuSettings, device: torch.device) -> None:
    """Make a GPU this process's current device, and set how it computes."""
    torch.get_device_module(device).set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    torch.backends.cuda.matmul.allow_tf32 = settings.tf32
    torch.backends.cudnn.allow_tf32 = settings.tf32
    torch.backends.cudnn.benchmark = settings.autotune
    torch.use_deterministic_algorithms(settings.deterministic)
    # Filling memory only helps to find bugs, and is slow.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def training_memory(settings: RunSettings, channels: int) -> int:
    """Return the bytes that one worker needs at least, without allocating them.

    They cover driver and libraries, the backbone's weights with gradients and the optimizer's
    moments, and the tensors that one batch stores for the backward pass. Methods with more networks
    or views need more.
    """
    random = settings.backbone.model_copy(update={"pretrained": False, "weights": None})
    side = settings.side
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.device("meta"):
        net = build_backbone(random, channels)
        images = torch.empty(settings.train.batch_size, channels, side, side)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            features = net(images)
    weights = sum(parameter.nbytes for parameter in net.parameters())
    for parameter in net.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    del features  # until here, it kept all saved tensors alive
    moments = 2 if settings.train.optimizer == "adam" else int(settings.train.momentum > 0)
    return CONTEXT + (2 + moments) * weights + sum(kept.values())


def check_gpus(settings: RunSettings, channels: int, places: Sequence[str]) -> None:
    """Check that the workers' GPUs are of one model and have enough memory.

    Args:
        settings: Settings of the run.
        channels: Channels of the images.
        places: Each worker's device.

    Raises:
        SettingsError: If the GPUs are of several models, whose results differ in the last bits, or
            have too little memory.
    """
    workers = Counter(places)
    if "cpu" in workers:
        return
    models: dict[str, str] = {}
    for device in workers:
        models.setdefault(device_name(device), device)
    if len(models) > 1:
        (one, first), (other, second), *_ = models.items()
        raise SettingsError(
            f"{first} is a {one} and {second} a {other}, whose last bits differ: name GPUs of one "
            f"model, such as --device {first}"
        )
    need = training_memory(settings, channels)
    for device, count in workers.items():
        free, _ = torch.get_device_module(device).mem_get_info(device)
        if free < count * need:
            fewer = f"--workers {max(1, free // need) * len(workers)}" if count > 1 else ""
            smaller = f"train.batch_size below {settings.train.batch_size}"
            raise SettingsError(
                f"{device} has {free / GIB:.1f} GiB of free memory, and {count} worker(s) need at "
                f"least {count * need / GIB:.1f}: give {fewer or smaller}"
            )


def device_name(device: str) -> str:
    """Return a GPU's model, or ``cpu``."""
    if device == "cpu":
        return device
    return str(torch.get_device_module(device).get_device_name(device))
