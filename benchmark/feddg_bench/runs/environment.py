"""What the last bits of a run's numbers may depend on, for its record."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

import feddg_bench
from feddg_bench.common.portable import describe_cpu
from feddg_bench.config.schema import Resources
from feddg_bench.engine.devices import find_devices
from feddg_bench.engine.gpu import device_name
from feddg_bench.records.record import EnvironmentRecord


def environment(
    resources: Resources, workers: int, *, device: str | None = None, portable: bool = False
) -> EnvironmentRecord:
    """Return what the last bits of numbers may depend on, and nothing that identifies a machine."""
    versions = {"python": platform.python_version(), "feddg_bench": feddg_bench.__version__}
    versions |= {"torch": str(torch.__version__)}
    versions |= {name: version(name) for name in ("torchvision", "lightning")}
    return EnvironmentRecord(
        versions=versions,
        system=f"{platform.system()} {platform.machine()}",
        cpu=describe_cpu(),
        portable=portable or None,
        device=device or device_name(find_devices(resources.device)[0]),
        threads=resources.threads,
        workers=workers,
        commit=_commit(),
    )


def _commit() -> str | None:
    """Return the commit of the source tree this runs from, with ``+`` if it has changes."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() or None
