"""Limits of the machine that shells and batch systems set: checks, and sentences for errors."""

from __future__ import annotations

import errno
import math
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from feddg_bench.common.errors import SettingsError, in_a_line

GIB = 2**30
USUAL = 6 * GIB
"""Address space with which PyTorch works; an error below it is taken for one of memory."""
LEAST = 4 * GIB
"""Address space below which PyTorch with CUDA ends at times without an error to catch."""

_OUTSIDE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENOSPC)
"""Errors of the operating system that a user can fix, such as an unreadable folder."""


def limit_of(name: str) -> float:
    """Return a limit of this process, such as ``RLIMIT_AS``; infinite if there is none."""
    with suppress(ImportError, AttributeError):  # Windows lacks all, other systems some
        import resource

        limit, _ = resource.getrlimit(getattr(resource, name))
        if limit != resource.RLIM_INFINITY:
            return limit
    return math.inf


def check_address_space() -> None:
    """Refuse a limit of the address space that PyTorch can exceed while it is loaded.

    Raises:
        SettingsError: If the limit is too low.
    """
    limit = limit_of("RLIMIT_AS")
    torch = find_spec("torch") if limit < LEAST else None
    if torch and Path(torch.origin or "").with_name("lib").joinpath("libtorch_cuda.so").exists():
        raise SettingsError(_memory(limit))


def check_open_files(workers: int) -> None:
    """Refuse a limit of open files that worker processes exceed: they would die at their start.

    Raises:
        SettingsError: If the limit is too low.
    """
    needed, limit = 32 + 2 * workers, limit_of("RLIMIT_NOFILE")
    if limit < needed:
        raise SettingsError(
            f"too many open files: {workers} worker processes need {needed}, and the limit is "
            f"{limit}: raise it, such as by ulimit -n 1024"
        )


def limit_sentence(error: Exception) -> str:
    """Return one sentence for an error outside of this program; empty if it is none.

    Within a low limit of the address space every error is one: libraries report it in many ways.
    """
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EMFILE:
        return "too many open files: raise the limit, such as by ulimit -n 1024"
    if code in _OUTSIDE:
        where = f"{error.filename}: " if error.filename else ""  # type: ignore[attr-defined]
        return f"cannot use {where}{error.strerror}; mend that or name another place"  # type: ignore[attr-defined]
    limit = limit_of("RLIMIT_AS")
    if limit < USUAL or (limit < math.inf and isinstance(error, MemoryError)):
        return f"{_memory(limit)} ({in_a_line(error)})"
    return ""


def _memory(limit: float) -> str:
    return (
        f"the limit of the address space, {limit / GIB:.1f} GiB, is too low: PyTorch "
        f"needs about {USUAL // GIB} GiB; raise the limit (ulimit -v unlimited, or the batch "
        f"system's limit of virtual memory)"
    )
