"""The parts of Lightning that the suite uses, without imports that they do not need here."""

import torch  # noqa: F401 - imported before its compiler is deferred

from feddg_bench.common.deferred import defer_unused

defer_unused()

from lightning import LightningModule  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins import MixedPrecision  # noqa: E402
from lightning.fabric.plugins.environments.lightning import LightningEnvironment  # noqa: E402
from lightning.fabric.strategies.single_device import SingleDeviceStrategy  # noqa: E402

__all__ = [
    "Fabric",
    "LightningEnvironment",
    "LightningModule",
    "MixedPrecision",
    "SingleDeviceStrategy",
]
