"""The same bits under every instruction set with --portable, and others without it."""

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
from tests.helpers import refused

SOURCES = [str(Path(__file__).parents[2] / root) for root in ("benchmark", "methods", "datasets")]
RUN = [
    *("run", "--method", "fedccrl", "--scenario", "ip-o-c", "--rounds", "1"),
    *("--clients", "4", "--per-round", "2", "--workers", "1", "data.image_size=8"),
]
ELSEWHERE = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "AVX2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX",
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 X86_V3",
}
"""An environment that makes this CPU compute as others do."""

needs_avx2 = pytest.mark.skipif("avx2" not in cpu_flags(), reason="this CPU has no AVX2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def elsewhere(cache: Path, results: Path, changed: dict[str, str], *more: str) -> None:
    """Run in an environment of its own."""
    kept = {k: v for k, v in os.environ.items() if k not in (*FIXED, *ABSENT)}
    environment = kept | {
        "PYTHONPATH": os.pathsep.join(SOURCES),
        "FEDDG_CACHE": str(cache),
        **changed,
    }
    subprocess.run(
        [sys.executable, "-m", "feddg_bench", *RUN, *more, "--results", results],
        env=environment,
        cwd=results.parent,
        check=True,
        capture_output=True,
    )


def numbers(results: Path, portable: bool | None) -> dict[str, object]:
    (path,) = (results / "runs").glob("*.json")
    record = RunRecord.parse(path.read_bytes())
    assert record.environment.portable == portable
    assert record.environment.cpu
    return record.numbers()


@pytest.mark.slow
@needs_avx2
def test_portable_runs_are_the_same_everywhere_and_others_are_not(
    tmp_path: Path, cache: Path, feddg: Callable[..., Any]
) -> None:
    folders = [tmp_path / name for name in ("here", "there", "here portable", "there portable")]
    assert feddg(*RUN, "--results", folders[0]).code == 0
    elsewhere(cache, folders[1], ELSEWHERE)
    elsewhere(cache, folders[2], {}, "--portable")
    elsewhere(cache, folders[3], ELSEWHERE, "--portable")
    assert numbers(folders[0], None) != numbers(folders[1], None)
    assert numbers(folders[2], True) == numbers(folders[3], True)


@needs_avx2
def test_a_program_that_uses_the_package_is_not_started_again(monkeypatch) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    with refused(SettingsError, "MKL_CBWR='COMPATIBLE'"):
        begin_portable()


@needs_avx2
def test_a_portable_run_has_a_key_of_its_own(tmp_path: Path, feddg: Callable[..., Any]) -> None:
    listed = (*RUN, "--dry-run", "--json")
    outs = [feddg(*listed, *more).out for more in ((), ("portable=false",))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES)}
    command = [sys.executable, "-m", "feddg_bench", *listed, "--portable"]  # begins again
    done = subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
    one, same, other = (json.loads(out)[0]["key"] for out in (*outs, done.stdout))
    assert one == same != other
