"""Leases: one holder at a time, free as soon as it ends, and deaths are counted."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from feddg_bench.common.errors import DataError
from feddg_bench.sweeps import leases as module
from feddg_bench.sweeps.leases import Lease, Leases

HOLD = """
import pathlib, sys, time
from feddg_bench.sweeps.leases import Leases
with Leases(pathlib.Path(sys.argv[1])).take("k") as lease:
    for number in map(int, sys.argv[2:]):
        lease.survive(number)
    print(lease.deaths, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def leases(tmp_path: Path) -> Leases:
    return Leases(tmp_path / "leases")


@contextmanager
def holder(leases: Leases, *rounds: int) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the lease of k and finish rounds; kill it after the block."""
    command = [sys.executable, "-c", HOLD, str(leases.folder), *map(str, rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdecimal()
        try:
            yield process
        finally:
            process.kill()


def deaths(leases: Leases) -> int:
    """Return the number of deaths that are counted; as after Ctrl-C, it stays the same."""
    lease = leases.take("k")
    assert lease is not None
    with suppress(KeyboardInterrupt), lease:
        raise KeyboardInterrupt
    return lease.deaths


def test_one_holder_until_released(leases: Leases) -> None:
    for _ in range(2):
        lease, other = leases.take("k"), leases.take("other")
        assert lease is not None
        assert other is not None
        assert leases.take("k") is None
        with lease, other:
            assert leases.take("k") is None
        assert not list(leases.folder.iterdir())


def test_only_one_of_many_wins(leases: Leases) -> None:
    barrier = threading.Barrier(8)
    won: list[Lease] = []

    def race() -> None:
        barrier.wait()
        won.extend(lease for key in map(str, range(20)) if (lease := leases.take(key)))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(lease.path.stem for lease in won) == sorted(map(str, range(20)))
    for lease in won:
        with lease:
            pass


def test_a_killed_holder_is_replaced_at_once_and_a_stopped_one_keeps_its_run(
    leases: Leases,
) -> None:
    with holder(leases) as process:
        process.send_signal(signal.SIGSTOP)
        assert leases.take("k") is None
        ((key, text),) = leases.held().items()
        assert key == "k"
        assert text.startswith(f"process {process.pid} of machine {platform.node()} since 2")
        assert text.endswith(" UTC")
    assert leases.held() == {}
    assert deaths(leases) == 1
    assert leases.held() == {}


@pytest.mark.parametrize(
    ("rounds", "counted"),
    [
        (((), (), ()), [1, 2, 3]),
        (((), (1,), ()), [1, 1, 2]),  # it got further: only its own death counts
        (((1, 2), (1, 2), (2, 3)), [1, 2, 1]),  # the second made the same rounds again
    ],
)
def test_deaths_in_succession_count_until_a_new_round(
    leases: Leases, rounds: tuple[tuple[int, ...], ...], counted: list[int]
) -> None:
    for finished, number in zip(rounds, counted, strict=True):
        with holder(leases, *finished):
            pass
        assert deaths(leases) == number
    lease = Leases(leases.folder).take("k")  # as a new command does
    assert lease is not None
    assert lease.deaths == counted[-1]
    with lease:  # the run ends
        pass
    assert not list(leases.folder.iterdir())


def test_forgetting_leaves_holders_alone(leases: Leases) -> None:
    with holder(leases):
        leases.forget(["k", "none"])
        assert leases.take("k") is None
    leases.forget(["other"])
    assert deaths(leases) == 1
    leases.forget(["k"])
    assert not list(leases.folder.iterdir())


def test_a_lock_whose_name_its_holder_removed_is_no_lease(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it, its holder ended."""
    first = leases.take("k")
    assert first is not None
    lock = module.lock_descriptor

    def late(number: int, *, blocking: bool) -> bool:
        monkeypatch.undo()
        with first:
            pass
        return lock(number, blocking=blocking)

    monkeypatch.setattr(module, "lock_descriptor", late)
    assert leases.take("k") is None
    assert deaths(leases) == 0


@pytest.mark.parametrize("content", [b"", b"\0" * 1024, b'{"deaths": "x"}', b"[" * 5000])
def test_a_file_cut_short_by_a_power_failure_counts_no_deaths(
    leases: Leases, content: bytes
) -> None:
    leases.folder.mkdir()
    (leases.folder / "k.lock").write_bytes(content)
    assert deaths(leases) == 0


def test_without_locks_one_sentence_says_what_to_do(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre without its mount option."""
    leases.check()
    assert not list(leases.folder.iterdir())

    def missing(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(module, "lock_descriptor", missing)
    for work in (leases.check, lambda: leases.take("k")):
        with pytest.raises(DataError, match="Lustre: option flock") as caught:
            work()
        assert str(leases.folder) in str(caught.value)
