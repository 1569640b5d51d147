"""Limits of the machine: refused before workers start, or one sentence for the error."""

from __future__ import annotations

import errno
import math

import pytest

from feddg_bench.common import limits
from feddg_bench.common.errors import SettingsError
from feddg_bench.engine import executors


@pytest.mark.parametrize(
    ("gib", "error", "words"),
    [
        (3, MemoryError(), "address space, 3.0 GiB, is too low: .* (MemoryError: MemoryError)"),
        (5, RuntimeError("could not create a primitive"), "5.0 GiB.* could not create a primitive"),
        (5, SystemError("error return without exception set"), "5.0 GiB"),
        (8, MemoryError(), "8.0 GiB"),
        (8, RuntimeError("could not create a primitive"), ""),
        (math.inf, MemoryError(), ""),
        (math.inf, OSError(errno.EMFILE, "Too many open files"), "ulimit -n 1024"),
        (math.inf, PermissionError(errno.EACCES, "Permission denied", "r"), "cannot use r: Perm"),
        (
            math.inf,
            OSError(errno.EROFS, "Read-only file system"),
            "cannot use Read-only file system",
        ),
        (math.inf, OSError(errno.EIO, "Input/output error"), ""),
    ],
)
def test_a_sentence_for_an_error_that_a_limit_explains(
    monkeypatch: pytest.MonkeyPatch, gib: float, error: Exception, words: str
) -> None:
    monkeypatch.setattr(limits, "limit_of", lambda _: gib * limits.GIB)
    found = limits.limit_sentence(error)
    assert bool(found) == bool(words)
    for part in words.split(".*"):
        assert part.strip() in found


def test_workers_need_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "limit_of", lambda _: 63)
    limits.check_open_files(15)
    with pytest.raises(SettingsError, match="16 worker processes need 64, and the limit is 63"):
        limits.check_open_files(16)


def test_workers_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        def SimpleQueue(self) -> None:  # noqa: N802 - a name of multiprocessing
            raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(executors, "process_context", lambda _: Context())
    with pytest.raises(SettingsError, match=r"cannot share memory .* --workers 1"):
        executors.ProcessExecutor(2).open_pool()


def test_the_limit_of_this_process() -> None:
    resource = pytest.importorskip("resource")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits.limit_of("RLIMIT_NOFILE") == (
        math.inf if soft == resource.RLIM_INFINITY else soft
    )
    assert limits.limit_of("RLIMIT_NOSUCH") == math.inf
