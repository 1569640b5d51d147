"""Claims: one holder, dead ones replaced, clocks never compared."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from feddg_bench.sweeps import claims as module
from feddg_bench.sweeps.claims import Claim, Claims


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def claims(tmp_path: Path, clock: Clock) -> Claims:
    return Claims(tmp_path / "claims", expiry=60.0, clock=clock, here=tmp_path / "here")


def elsewhere(path: Path, *, touched: float = 0.0) -> None:
    """Write the claim of a process on another machine whose clock shows ``touched``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("0123456789abcdef" * 2)
    os.utime(path, (touched, touched))


def look(claims: Claims, key: str = "k") -> Claim | None:
    return claims.take(key, claims.held().get(key))


def test_one_holder_until_released(claims: Claims) -> None:
    claim = look(claims)
    assert claim is not None
    assert look(claims) is None
    assert claims.take("k") is None  # a listing from before it was taken
    with claim:
        assert look(claims) is None
    assert claims.held() == {}
    assert look(claims) is not None


def test_only_one_of_many_wins(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    won: list[Claim] = []

    def race() -> None:
        own = Claims(tmp_path)
        barrier.wait()
        for key in map(str, range(20)):
            claim = own.take(key)
            if claim is not None:
                won.append(claim)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claim.path.name for claim in won) == sorted(f"{i}.0" for i in range(20))


def test_without_hard_links(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module.os, "link", no_links)
    claim = look(claims)
    assert claim is not None
    assert look(claims) is None


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6])
def test_another_machines_claim_expires_by_our_clock_alone(
    claims: Claims, clock: Clock, skew: float
) -> None:
    path = claims.folder / "k.0"
    elsewhere(path, touched=time.time() + skew)
    assert look(claims) is None
    clock.now += 59
    assert look(claims) is None
    os.utime(path, (time.time() + skew + 1, time.time() + skew + 1))  # it lives
    clock.now += 59
    assert look(claims) is None
    clock.now += 59
    assert look(claims) is None
    clock.now += 2
    taken = look(claims)
    assert taken is not None
    assert taken.path.name == "k.1"
    with taken:
        assert look(claims) is None
    assert claims.held() == {}


def test_two_watchers_of_a_dead_machine_do_not_both_win(tmp_path: Path, clock: Clock) -> None:
    elsewhere(tmp_path / "k.0")
    watchers = [Claims(tmp_path, expiry=60, clock=clock) for _ in range(2)]
    held = [watcher.held()["k"] for watcher in watchers]
    for watcher, number in zip(watchers, held, strict=True):
        assert watcher.take("k", number) is None
    clock.now += 61
    won = [watcher.take("k", number) for watcher, number in zip(watchers, held, strict=True)]
    assert [claim is not None for claim in won] == [True, False]


def test_a_killed_process_of_this_machine_is_replaced_at_once(claims: Claims) -> None:
    program = "import os, sys, pathlib, feddg_bench.sweeps.claims as c; "
    program += "claim = c.Claims(pathlib.Path(sys.argv[1]), here=pathlib.Path(sys.argv[2]))"
    program += ".take('k'); os.kill(os.getpid(), 9)"
    environment = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[2])}
    command = [sys.executable, "-c", program, claims.folder, claims.here]
    assert subprocess.run(command, check=False, env=environment).returncode == -9
    assert claims.held() == {"k": 0}
    taken = look(claims)
    assert taken is not None
    assert taken.path.name == "k.1"
    with taken:
        pass
    assert claims.held() == {}
    assert list(claims.here.iterdir()) == []  # nothing is left of the dead one


def test_a_clone_of_this_machine_steals_nothing(claims: Claims, clock: Clock) -> None:
    """Same names, same start, same process numbers; only what lies on its own disk is another."""
    claim = look(claims)
    assert claim is not None
    clone = Claims(claims.folder, expiry=60.0, clock=clock, here=claims.here.with_name("clone"))
    assert look(clone) is None
    shutil.rmtree(claims.here)  # nor does anybody, if what shows that it lives is tidied away
    assert look(claims) is None
    claim.beat()
    assert not claim.lost


def test_a_sleeper_leaves_the_next_holders_claim_alone(claims: Claims, clock: Clock) -> None:
    sleeper = look(claims)
    assert sleeper is not None
    other = Claims(claims.folder, expiry=60.0, clock=clock, here=claims.here.with_name("other"))
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
    claims: Claims, clock: Clock, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Between its look at the dead claim and its own, another took it over and finished."""
    elsewhere(claims.folder / "k.0")
    assert look(claims) is None
    clock.now += 61
    won: list[Claim] = []
    create = module._create

    def paused(path: Path, content: bytes) -> bool:
        monkeypatch.undo()
        (claims.folder / "k.0").unlink()
        if again:
            third = claims.take("k")
            assert third is not None
            won.append(third)
        return create(path, content)

    monkeypatch.setattr(module, "_create", paused)
    assert look(claims) is None
    assert claims.held() == ({"k": 0} if again else {})


def test_other_files_in_the_folder_do_no_harm(claims: Claims) -> None:
    claims.folder.mkdir()
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
        (claims.folder / name).write_text("another's")
    (claims.folder / "k.7").mkdir()
    assert claims.held() == {}
    claim = look(claims)
    assert claim is not None
    assert claim.path.name == "k.0"
    with claim:
        assert look(claims) is None
    claims.forget("k")
    assert len(list(claims.folder.iterdir())) == 10


def test_a_claim_cannot_name_a_file_elsewhere(claims: Claims, tmp_path: Path) -> None:
    (tmp_path / "evil.lock").write_text("kept")
    claims.folder.mkdir()
    claims.here.mkdir()
    (claims.folder / "k.0").write_text("../evil")
    assert look(claims) is None
    assert (tmp_path / "evil.lock").read_text() == "kept"


def test_a_holder_learns_that_it_was_replaced(claims: Claims) -> None:
    claim = look(claims)
    assert claim is not None
    with claim:
        claim.beat()
        assert not claim.lost
        elsewhere(claims.folder / "k.1")
        claim.beat()
        assert claim.lost
    assert claims.held() == {"k": 1}  # the new holder's claim stays


def test_a_file_server_that_stumbles_does_not_end_the_heartbeat(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    claim = look(claims)
    assert claim is not None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", stale)
        claim.beat()
    assert not claim.lost
    elsewhere(claims.folder / "k.1")
    claim.beat()
    assert claim.lost


def test_what_another_copy_tidies_away_is_not_ours(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part file goes just when the claim turns out to be another's."""
    claim = look(claims)
    assert claim is not None
    link = os.link

    def tidied(source: Path, target: Path) -> None:
        try:
            link(source, target)
        finally:
            source.unlink()

    monkeypatch.setattr(module.os, "link", tidied)
    assert claims.take("k") is None


def test_a_touch_is_seen(claims: Claims) -> None:
    claim = look(claims)
    assert claim is not None
    os.utime(claim.path, (0, 0))
    claim.beat()
    assert claim.path.stat().st_mtime > 1e9


def test_what_a_kill_while_writing_leaves_is_no_claim(claims: Claims, clock: Clock) -> None:
    claims.folder.mkdir()
    (claims.folder / ".0123.part").write_bytes(b"")
    (claims.folder / "k.0").write_bytes(b"")  # made without hard links, killed before its content
    assert look(claims) is None
    clock.now += 61
    assert look(claims) is not None


def test_what_killed_holders_left_here_is_tidied_away(claims: Claims) -> None:
    claims.here.mkdir()
    old, new = claims.here / "old.lock", claims.here / "new.lock"
    for path in (old, new):
        path.touch()
    held = look(claims)
    assert held is not None
    assert held.life is not None
    for path in (old, Path(held.life.lock_file)):
        os.utime(path, (0, 0))
    claims.forget()
    assert sorted(claims.here.iterdir()) == sorted([new, Path(held.life.lock_file)])


def test_nothing_names_the_machine(claims: Claims) -> None:
    claim = look(claims)
    assert claim is not None
    import socket

    assert socket.gethostname() not in claim.path.read_text()
