"""Leases: one holder, dead holders replaced, clocks never compared."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from feddg_bench.sweeps import leases as module
from feddg_bench.sweeps.leases import Lease, Leases


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(tmp_path: Path, clock: Clock) -> Leases:
    return Leases(tmp_path / "leases", expiry=60.0, clock=clock, here=tmp_path / "here")


def elsewhere(path: Path, *, touched: float = 0.0) -> None:
    """Write the lease of a process on another machine whose clock shows ``touched``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("0123456789abcdef" * 2)
    os.utime(path, (touched, touched))


def look(leases: Leases, key: str = "k") -> Lease | None:
    return leases.take(key, leases.held().get(key))


def test_one_holder_until_released(leases: Leases) -> None:
    lease = look(leases)
    assert lease is not None
    assert look(leases) is None
    assert leases.take("k") is None  # a listing from before it was taken
    with lease:
        assert look(leases) is None
    assert leases.held() == {}
    assert look(leases) is not None


def test_only_one_of_many_wins(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    won: list[Lease] = []

    def race() -> None:
        own = Leases(tmp_path)
        barrier.wait()
        for key in map(str, range(20)):
            lease = own.take(key)
            if lease is not None:
                won.append(lease)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(lease.path.name for lease in won) == sorted(f"{i}.0" for i in range(20))


def test_without_hard_links(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module.os, "link", no_links)
    lease = look(leases)
    assert lease is not None
    assert look(leases) is None


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6])
def test_another_machines_lease_expires_by_our_clock_alone(
    leases: Leases, clock: Clock, skew: float
) -> None:
    path = leases.folder / "k.0"
    elsewhere(path, touched=time.time() + skew)
    assert look(leases) is None
    clock.now += 59
    assert look(leases) is None
    os.utime(path, (time.time() + skew + 1, time.time() + skew + 1))  # the holder is alive
    clock.now += 59
    assert look(leases) is None
    clock.now += 59
    assert look(leases) is None
    clock.now += 2
    taken = look(leases)
    assert taken is not None
    assert taken.path.name == "k.1"
    with taken:
        assert look(leases) is None
    assert leases.held() == {}


def test_two_watchers_of_a_dead_machine_do_not_both_win(tmp_path: Path, clock: Clock) -> None:
    elsewhere(tmp_path / "k.0")
    watchers = [Leases(tmp_path, expiry=60, clock=clock) for _ in range(2)]
    held = [watcher.held()["k"] for watcher in watchers]
    for watcher, number in zip(watchers, held, strict=True):
        assert watcher.take("k", number) is None
    clock.now += 61
    won = [watcher.take("k", number) for watcher, number in zip(watchers, held, strict=True)]
    assert [lease is not None for lease in won] == [True, False]


def test_a_killed_process_of_this_machine_is_replaced_at_once(leases: Leases) -> None:
    program = "import os, sys, pathlib, feddg_bench.sweeps.leases as c; "
    program += "lease = c.Leases(pathlib.Path(sys.argv[1]), here=pathlib.Path(sys.argv[2]))"
    program += ".take('k'); os.kill(os.getpid(), 9)"
    environment = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[2])}
    command = [sys.executable, "-c", program, leases.folder, leases.here]
    assert subprocess.run(command, check=False, env=environment).returncode == -9
    assert leases.held() == {"k": 0}
    taken = look(leases)
    assert taken is not None
    assert taken.path.name == "k.1"
    with taken:
        pass
    assert leases.held() == {}
    assert list(leases.here.iterdir()) == []  # no file of the dead process is left


def test_a_clone_of_this_machine_steals_nothing(leases: Leases, clock: Clock) -> None:
    """Same names, same start, same process ids; only the files on its own disk differ."""
    lease = look(leases)
    assert lease is not None
    clone = Leases(leases.folder, expiry=60.0, clock=clock, here=leases.here.with_name("clone"))
    assert look(clone) is None
    shutil.rmtree(leases.here)  # nor does anyone if its lock is deleted
    assert look(leases) is None
    lease.beat()
    assert not lease.lost


def test_a_sleeper_leaves_the_next_holders_lease_alone(leases: Leases, clock: Clock) -> None:
    sleeper = look(leases)
    assert sleeper is not None
    other = Leases(leases.folder, expiry=60.0, clock=clock, here=leases.here.with_name("other"))
    assert look(other) is None
    clock.now += 61
    taker = look(other)
    assert taker is not None
    taker.release()
    third = look(other)
    assert third is not None
    assert third.path == sleeper.path
    os.utime(third.path, (0, 0))
    sleeper.beat()
    assert sleeper.lost
    assert third.path.stat().st_mtime == 0
    sleeper.release()
    third.beat()
    assert not third.lost


@pytest.mark.parametrize("again", [False, True], ids=["free", "taken again"])
def test_a_taker_that_paused_does_not_win_beside_another(
    leases: Leases, clock: Clock, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Between its check of the dead lease and its own lease, another took over and finished."""
    elsewhere(leases.folder / "k.0")
    assert look(leases) is None
    clock.now += 61
    won: list[Lease] = []
    create = module._create

    def paused(path: Path, content: bytes) -> bool:
        monkeypatch.undo()
        (leases.folder / "k.0").unlink()
        if again:
            third = leases.take("k")
            assert third is not None
            won.append(third)
        return create(path, content)

    monkeypatch.setattr(module, "_create", paused)
    assert look(leases) is None
    assert leases.held() == ({"k": 0} if again else {})


def test_other_files_in_the_folder_do_no_harm(leases: Leases) -> None:
    leases.folder.mkdir()
    for name in (
        "k.\u00b2",
        "k.00012",
        "k.-1",
        "k.1e3",
        "k.9999999999",
        "k.",
        ".1",
        "note",
        "k.1 ",
    ):
        (leases.folder / name).write_text("another's")
    (leases.folder / "k.7").mkdir()
    assert leases.held() == {}
    lease = look(leases)
    assert lease is not None
    assert lease.path.name == "k.0"
    with lease:
        assert look(leases) is None
    leases.forget("k")
    assert len(list(leases.folder.iterdir())) == 10


def test_a_lease_cannot_name_a_file_elsewhere(leases: Leases, tmp_path: Path) -> None:
    (tmp_path / "evil.lock").write_text("kept")
    leases.folder.mkdir()
    leases.here.mkdir()
    (leases.folder / "k.0").write_text("../evil")
    assert look(leases) is None
    assert (tmp_path / "evil.lock").read_text() == "kept"


def test_a_holder_learns_that_it_was_replaced(leases: Leases) -> None:
    lease = look(leases)
    assert lease is not None
    with lease:
        lease.beat()
        assert not lease.lost
        elsewhere(leases.folder / "k.1")
        lease.beat()
        assert lease.lost
    assert leases.held() == {"k": 1}  # the new holder's lease stays


def test_a_file_server_that_stumbles_does_not_end_the_heartbeat(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    lease = look(leases)
    assert lease is not None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", stale)
        lease.beat()
    assert not lease.lost
    elsewhere(leases.folder / "k.1")
    lease.beat()
    assert lease.lost


def test_what_another_copy_tidies_away_is_not_ours(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part file is deleted just when the lease turns out to belong to another."""
    lease = look(leases)
    assert lease is not None
    link = os.link

    def tidied(source: Path, target: Path) -> None:
        try:
            link(source, target)
        finally:
            source.unlink()

    monkeypatch.setattr(module.os, "link", tidied)
    assert leases.take("k") is None


def test_a_touch_is_seen(leases: Leases) -> None:
    lease = look(leases)
    assert lease is not None
    os.utime(lease.path, (0, 0))
    lease.beat()
    assert lease.path.stat().st_mtime > 1e9


def test_what_a_kill_while_writing_leaves_is_no_lease(leases: Leases, clock: Clock) -> None:
    leases.folder.mkdir()
    (leases.folder / ".0123.part").write_bytes(b"")
    (leases.folder / "k.0").write_bytes(b"")  # made without hard links, killed before writing
    assert look(leases) is None
    clock.now += 61
    assert look(leases) is not None


def test_what_killed_holders_left_here_is_tidied_away(leases: Leases) -> None:
    leases.here.mkdir()
    old, new = leases.here / "old.lock", leases.here / "new.lock"
    for path in (old, new):
        path.touch()
    held = look(leases)
    assert held is not None
    assert held.life is not None
    for path in (old, Path(held.life.lock_file)):
        os.utime(path, (0, 0))
    leases.forget()
    assert sorted(leases.here.iterdir()) == sorted([new, Path(held.life.lock_file)])


def test_nothing_names_the_machine(leases: Leases) -> None:
    lease = look(leases)
    assert lease is not None
    import socket

    assert socket.gethostname() not in lease.path.read_text()
