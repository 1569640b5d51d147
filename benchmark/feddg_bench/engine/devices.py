"""What a run computes on: its device, and the executor that its resources ask for."""

from __future__ import annotations

import torch

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.parallel import cores
from feddg_bench.config.schema import Resources
from feddg_bench.engine.executors import Executor, ProcessExecutor, SerialExecutor

MAX_AUTO_WORKERS = 8


def find_device(name: str) -> str:
    """Return the device to compute on.

    Args:
        name: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        SettingsError: If there is no such device here.
    """
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SettingsError(f"unknown device {name!r}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return "cpu"
    found = torch.cuda.device_count()
    if (device.index or 0) >= found:
        raise SettingsError(
            f"device {name!r} is not here: PyTorch sees {found} CUDA devices; use --device cpu"
        )
    return f"cuda:{device.index or 0}"


def open_executor(resources: Resources) -> Executor:
    """Return the executor that the resources ask for.

    Raises:
        SettingsError: If the device is not here.
    """
    workers = resources.workers
    if resources.engine == "ray":
        try:
            from feddg_bench.engine.ray_cluster import RayExecutor
        except ImportError as error:
            raise SettingsError("--engine ray needs Ray: pip install 'feddg-bench[ray]'") from error
        return RayExecutor(workers, resources.device, resources.threads, resources.address)
    if resources.address is not None:
        raise SettingsError("--address names a Ray cluster: give --engine ray with it")
    device = find_device(resources.device)
    if workers == 0:
        workers = 1 if device != "cpu" else min(cores(), MAX_AUTO_WORKERS)
    return SerialExecutor() if workers == 1 else ProcessExecutor(workers)
