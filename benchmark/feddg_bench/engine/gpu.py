"""GPUs: their assignment to workers, and how they compute."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import GpuSettings


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


def check_gpus(places: Sequence[str]) -> None:
    """Check that the workers' GPUs are of one model.

    Args:
        places: Each worker's device.

    Raises:
        SettingsError: If they are of several models, whose results differ in the last bits.
    """
    models: dict[str, str] = {}
    for device in places:
        models.setdefault(device_name(device), device)
    if len(models) > 1:
        (one, first), (other, second), *_ = models.items()
        raise SettingsError(
            f"{first} is a {one} and {second} a {other}, whose last bits differ: name GPUs of one "
            f"model, such as --device {first}"
        )


def device_name(device: str) -> str:
    """Return a GPU's model, or ``cpu``."""
    if device == "cpu":
        return device
    return str(torch.get_device_module(device).get_device_name(device))
