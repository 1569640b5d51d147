"""The parts of Lightning that the suite uses; the command imports less of Lightning for them."""

from feddg_bench.common.startup import quicken

quicken()

from lightning import LightningModule  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins import MixedPrecision, Precision  # noqa: E402
from lightning.fabric.plugins.environments.lightning import LightningEnvironment  # noqa: E402
from lightning.fabric.strategies.single_device import SingleDeviceStrategy  # noqa: E402

__all__ = [
    "Fabric",
    "LightningEnvironment",
    "LightningModule",
    "MixedPrecision",
    "Precision",
    "SingleDeviceStrategy",
]
