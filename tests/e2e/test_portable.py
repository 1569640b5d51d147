"""With --portable, results are the same bits under every instruction set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.portable import ABSENT, FIXED, begin_portable, cpu_flags
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore
from tests.helpers import refused

SOURCES = [str(Path(__file__).parents[2] / root) for root in ("benchmark", "methods", "datasets")]
RUN = [
    *("run", "--method", "fedccrl", "--scenario", "ip-o-c", "--rounds", "1"),
    *("--clients", "4", "--per-round", "2", "--workers", "1", "data.image_size=8"),
    *("data.id_test_fraction=0.5", "data.id_val_fraction=0.3"),
]
ELSEWHERE = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "AVX2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX",
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 X86_V3",
}
"""An environment in which this CPU computes like other CPUs."""

needs_avx2 = pytest.mark.skipif("avx2" not in cpu_flags(), reason="this CPU has no AVX2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def python(changed: dict[str, str], *arguments: object) -> bytes:
    """Return what Python prints in a changed environment."""
    kept = {k: v for k, v in os.environ.items() if k not in (*FIXED, *ABSENT)}
    environment = kept | {"PYTHONPATH": os.pathsep.join(SOURCES), **changed}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, capture_output=True).stdout


def only(results: Path) -> RunRecord:
    """Return a folder's only record."""
    (record,) = ResultsStore(results)
    assert record.environment.cpu
    return record


@pytest.mark.nightly
@needs_avx2
def test_portable_runs_are_the_same_everywhere(
    tmp_path: Path, cache: Path, feddg: Callable[..., Any]
) -> None:
    """They also have a key of their own."""
    assert feddg(*RUN, "--results", tmp_path / "0").code == 0  # decodes the images for all runs
    found = [only(tmp_path / "0")]
    for name, changed in (("1", {}), ("2", ELSEWHERE)):
        run = (*RUN, "--portable", "--results", tmp_path / name)
        python({"FEDDG_CACHE": str(cache), **changed}, "-m", "feddg_bench", *run)
        found.append(only(tmp_path / name))
    assert found[1].numbers() == found[2].numbers()
    assert [record.environment.portable for record in found] == [None, True, True]
    (listed,) = json.loads(feddg(*RUN, "portable=false", "--dry-run", "--json").out)
    assert found[0].key == listed["key"] != found[1].key == found[2].key


SUMS = """
import torch
sums = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).exp().sum(1)
print(sums.double().tolist())
"""


@pytest.mark.nightly
@needs_avx2
def test_computing_as_other_cpus_do_gives_other_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the test above would prove nothing."""
    exec(SUMS, {})  # noqa: S102
    assert capsys.readouterr().out.encode() != python(ELSEWHERE, "-c", SUMS)


@needs_avx2
def test_a_program_that_uses_the_package_is_not_started_again(monkeypatch) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    with refused(SettingsError, "MKL_CBWR='COMPATIBLE'"):
        begin_portable()
