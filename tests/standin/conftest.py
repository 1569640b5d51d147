"""Stand-in devices for this process, and an environment that gives them to other processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from feddg_bench.plugins import names
from tests.helpers import hyper, no_file

UNCROPPED = {"augment": {"crop_scale": None, "flip": 0.0}}
METHODS = {name: no_file(name) for name in names("method")} | {
    "fedadg": hyper(hidden=32, projection=16)
}
"""Every method, with the settings that it needs on toy data."""

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def standin_path(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return folders that give the devices ``standin:0, 1`` to every process with them on its path.

    PyTorch finds the entry point on import, as with the package of a GPU maker.
    """
    site = tmp_path_factory.mktemp("site")
    package = site / "feddg_standin-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: feddg-standin\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[torch.backends]\nfeddg_standin = feddg_standin:install\n"
    )
    return [str(site), str(HERE)]


@pytest.fixture(scope="package")
def standin(standin_path: list[str]) -> Iterator[ModuleType]:
    """Give the devices to this process and its child processes; return ``torch.standin``."""
    sys.path[:0] = standin_path
    import feddg_standin

    feddg_standin.install()
    benchmark = torch.backends.cudnn.benchmark
    yield feddg_standin.device_module
    torch._C._set_multithreading_enabled(True)
    torch.__future__.set_swap_module_params_on_conversion(False)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.benchmark = benchmark
    del sys.path[: len(standin_path)]
