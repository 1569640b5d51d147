"""One instruction set for every x86-64 CPU with AVX2, fixed before PyTorch and NumPy are loaded."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from feddg_bench.common.errors import SettingsError

FIXED = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
    "MKL_CBWR": "COMPATIBLE",  # its AVX2 differs between vendors
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL "
    "AVX512_SPR X86_V4",
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""Environment variables that must be set when a process begins."""

ABSENT = ("GLIBC_TUNABLES", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_DYNAMIC")
"""Environment variables that must not be set."""


def is_fixed() -> bool:
    """Return whether this process's environment is the portable one."""
    return all(os.environ.get(name) == value for name, value in FIXED.items()) and not any(
        name in os.environ for name in ABSENT
    )


def begin_portable() -> None:
    """Restart this command with the portable environment, unless it already has that.

    Raises:
        SettingsError: If the CPU lacks AVX2, or this is another program that uses the package and
            would lose its state.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not {"avx2", "fma"} <= cpu_flags():
        raise SettingsError(
            "portable=true fixes the instructions of x86-64 CPUs with AVX2, which this one lacks: "
            "leave --portable out"
        )
    if is_fixed():
        return
    if not _is_command():
        variables = " ".join(f"{name}='{value}'" for name, value in FIXED.items())
        raise SettingsError(
            f"portable=true must be known before Python begins: use the command feddg-bench, or "
            f"start with the environment {variables}, without {', '.join(ABSENT)}"
        )
    kept = {name: value for name, value in os.environ.items() if name not in ABSENT}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], kept | FIXED)  # noqa: S606


def _is_command() -> bool:
    """Return whether this process is ``feddg-bench`` with its original arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec is not None and spec.name == "feddg_bench.__main__"
    own = sys.orig_argv[-len(sys.argv[1:]) :] == sys.argv[1:]
    return own and (module or Path(sys.argv[0]).stem == "feddg-bench")


def cpu_flags() -> set[str]:
    """Return the names of the CPU's instructions as Linux reports them; none elsewhere."""
    return set(_cpu("flags").split())


def describe_cpu() -> str:
    """Return the CPU's vendor and its widest vector instructions, never model or serial number.

    For example ``GenuineIntel, avx512f``.
    """
    flags = cpu_flags()
    widest = next((name for name in ("avx512f", "avx2", "avx", "sse4_2") if name in flags), "")
    return ", ".join(filter(None, (_cpu("vendor_id"), widest))) or platform.machine()


def _cpu(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
