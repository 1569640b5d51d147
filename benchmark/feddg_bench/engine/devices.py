"""The devices of a run, and the executor that its resources specify."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import current_process
from typing import Any

import torch

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.parallel import cores, script_is_no_file
from feddg_bench.config.schema import Resources
from feddg_bench.engine.executors import Executor, ProcessExecutor, SerialExecutor
from feddg_bench.engine.gpu import placement

MAX_AUTO_WORKERS = 8


def find_devices(name: str) -> list[str]:
    """Return the devices to compute on: the CPU, or GPUs by their numbers.

    Args:
        name: ``auto``, ``cpu``, ``cuda`` for all that PyTorch sees, ``cuda:N`` or ``cuda:0,2``.

    Raises:
        SettingsError: If this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return ["cpu"]
    named = re.fullmatch(r"([a-z]+)(?::([0-9]{1,4}(?:,[0-9]{1,4})*))?", name)
    module = None
    with suppress(RuntimeError):  # PyTorch has no such kind
        module = torch.get_device_module(named[1]) if named else None
    if named is None or module is None or not hasattr(module, "mem_get_info"):
        raise SettingsError(
            f"unknown device {name!r}: expected auto, cpu, cuda, cuda:N or several as in cuda:0,2"
        )
    kind, asked = named[1], [int(number) for number in (named[2] or "").split(",") if number]
    count = module.device_count()
    if not count or any(number >= count for number in asked):
        raise SettingsError(
            f"device {name!r} is not here: PyTorch sees {count} {kind.upper()} devices; use "
            f"--device cpu"
        )
    return [f"{kind}:{number}" for number in dict.fromkeys(asked or range(count))]


def open_executor(resources: Resources) -> Executor:
    """Return the executor that the resources specify.

    Raises:
        SettingsError: If this machine lacks a device, or if this process may start no others.
    """
    if resources.for_runs().engine == "ray":
        share = resources.workers, resources.device, resources.threads, resources.address
        executor: Executor = load_ray().RayExecutor(*share)
        return executor
    devices = find_devices(resources.device)
    workers = count_workers(resources, devices)
    if workers == 1:
        return SerialExecutor()
    if current_process().daemon:
        raise SettingsError(
            "a daemonic process, such as one of multiprocessing.Pool, may start no worker "
            "processes: give workers=1, or use "
            "concurrent.futures.ProcessPoolExecutor in place of the pool"
        )
    if script_is_no_file():
        raise SettingsError(
            "worker processes import the script that starts them, and this one was read from "
            "standard input: save it to a file, or give workers=1"
        )
    return ProcessExecutor(workers, placement(devices, workers))


def count_workers(resources: Resources, devices: Sequence[str]) -> int:
    """Return how many workers compute on the devices of this machine."""
    auto = min(cores(), MAX_AUTO_WORKERS) if list(devices) == ["cpu"] else len(devices)
    if current_process().daemon:  # it may start no others
        auto = 1
    return resources.workers or auto


def load_ray() -> Any:
    """Return `feddg_bench.engine.ray_cluster`.

    Raises:
        SettingsError: If Ray is not installed.
    """
    try:
        import feddg_bench.engine.ray_cluster as ray_cluster
    except ImportError as error:
        raise SettingsError("--engine ray needs Ray: pip install 'feddg-bench[ray]'") from error
    return ray_cluster
