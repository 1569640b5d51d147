"""Claims: who is at work on a run, agreed on through a folder that several machines may share.

A claim is a file ``KEY.N`` with a name of its own in it, created exclusively; the highest N holds.
It is never taken over by changing or removing it but by creating ``KEY.N+1``, which again only one
can, so that no two takers can both believe they won. A holder touches its file every `HEARTBEAT`
seconds. It is dead if *this* process watched the file for `EXPIRY` seconds of its own clock without
a change: clocks of machines are never compared. Sooner, if its process is gone: beside the claim
each holder locks a file of that name in a folder of its own machine, so that a claim whose file is
there and free is a dead one's. What another machine holds is never taken for that, not even on a
clone of this one.

Nobody touches or removes a claim without seeing that it is still the one he means. Should a holder
be stopped for so long that another takes over, it learns of it at its next round and lets go. Until
then two compute the same run, which costs time only: both write the same numbers, each in one
rename, to the same place.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from feddg_bench.common.errors import DataError

HEARTBEAT = 15.0
"""Seconds between the touches of a holder."""
EXPIRY = 120.0
"""Seconds without a touch after which a holder is dead; longer than a file server caches."""

_NAME = re.compile(r"(.+)\.(0|[1-9][0-9]{0,8})")
_LENGTH = 4096


def _here() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"feddg-bench-{user}"


@dataclass
class Claims:
    """The claims in a folder."""

    folder: Path
    heartbeat: float = field(default=HEARTBEAT, kw_only=True)  # seconds between touches
    expiry: float = field(default=EXPIRY, kw_only=True)  # seconds without a touch until one is free
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)  # goes forward only
    # A folder of this machine alone, where holders show that they live.
    here: Path = field(default_factory=_here, kw_only=True)
    _seen: dict[Path, tuple[tuple[bytes, int], float]] = field(default_factory=dict, init=False)

    def held(self) -> dict[str, int]:
        """Return the highest claim of every key that has one, dead ones included."""
        found: dict[str, int] = {}
        for key, number in self._files():
            found[key] = max(found.get(key, 0), number)
        return found

    def _files(self) -> dict[tuple[str, int], Path]:
        """Return the claims' files; others in the folder are none of ours."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            return {
                (match[1], int(match[2])): Path(entry.path)
                for entry in entries
                if (match := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
            }
        return {}

    def take(self, key: str, held: int | None = None) -> Claim | None:
        """Return the claim of ``key`` if it is free, else ``None``.

        ``held`` is its highest claim in `held`, if it has one.

        Raises:
            DataError: If the folder cannot be written.
        """
        number, before = 0, None
        if held is not None:
            number, before = held + 1, self._dead(self.folder / f"{key}.{held}")
            if before is None:
                return None
        path = self.folder / f"{key}.{number}"
        name = uuid.uuid4().hex
        life = self._live(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not _create(path, name.encode()):
                _end(life)
                return None
        except OSError as error:
            _end(life)
            raise DataError(
                f"cannot write {path}: {error.strerror}; "
                f"make room or choose another folder with --results"
            ) from error
        files = self._files()
        below = {f: _content(f) for (k, n), f in files.items() if k == key and n < number}
        claim = Claim(path, number, name.encode(), below, life, self.heartbeat)
        # What we took over may have been released since we looked, and taken again from 0.
        newer = any(k == key and n > number for k, n in files)
        if newer or (held is not None and below.get(self.folder / f"{key}.{held}") != before):
            claim.below = {}  # they are another's
            claim.release()
            return None
        return claim

    def forget(self, *done: str) -> None:
        """Remove all claims of keys whose work is done, and what killed processes left."""
        left = [path for (key, _), path in self._files().items() if key in done]
        for path in (*left, *self.folder.glob(".*.part")):  # whoever writes one does without it
            path.unlink(missing_ok=True)

    def _live(self, name: str) -> FileLock | None:
        """Show on this machine that a holder lives; the lock ends with the process."""
        lock = FileLock(self.here / f"{name}.lock", blocking=False, thread_local=False)
        try:
            self.here.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, Timeout, NotImplementedError):  # it will be missed after EXPIRY only
            return None
        return lock

    def _dead(self, path: Path) -> bytes | None:
        """Return the content of a claim if its holder is dead, else ``None``."""
        try:
            with path.open("rb") as file:  # opening makes a network file system look again
                content, touched = file.read(_LENGTH), os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None  # just released; the next look sees it
        name = content.decode("ascii", "replace")
        if re.fullmatch("[0-9a-f]{32}", name) and (self.here / f"{name}.lock").exists():
            life = self._live(name)
            if life is not None:
                _end(life)
                return content
        now = self.clock()
        before, since = self._seen.get(path, (None, now))
        if before != (content, touched):
            self._seen[path] = (content, touched), now
            return None
        return content if now - since >= self.expiry else None


@dataclass(eq=False)
class Claim:
    """A claim that is held; a context manager that touches it, and in the end removes it."""

    path: Path
    number: int  # the N of its name
    content: bytes
    below: Mapping[Path, bytes | None]  # the dead claims that it took over, with their content
    life: FileLock | None  # what shows on this machine that the holder lives
    heartbeat: float  # seconds between touches
    lost: bool = False  # whether another took it over

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.release()

    def release(self) -> None:
        """Remove the claim and those that it took over, ours last, so that it holds to the end."""
        for path, content in [*self.below.items(), (self.path, self.content)]:
            if not self.lost and _content(path) == content:
                path.unlink(missing_ok=True)
        _end(self.life)

    def beat(self) -> None:
        """Touch the claim, or find that another took it over."""
        try:
            with self.path.open("rb") as file:
                taken = self.path.with_suffix(f".{self.number + 1}").is_file()
                if taken or file.read(_LENGTH) != self.content:
                    self.lost = True
                    return
                os.utime(file.fileno() if os.utime in os.supports_fd else self.path)
        except FileNotFoundError:
            self.lost = True
        except OSError:
            pass  # the file server may come back; if it does not, the claim expires

    def _beat(self) -> None:
        while not self.lost and not self._stop.wait(self.heartbeat):
            self.beat()


def _content(path: Path) -> bytes | None:
    """Return what is in a claim, ``None`` if it is gone."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(_LENGTH)
    return None


def _end(life: FileLock | None) -> None:
    if life is not None:
        Path(life.lock_file).unlink(missing_ok=True)
        life.release()


def _create(path: Path, content: bytes) -> bool:
    """Create a file whole and exclusively; return whether it is ours."""
    beside = path.with_name(f".{uuid.uuid4().hex}.part")
    beside.write_bytes(content)
    try:
        os.link(beside, path)
    except FileExistsError:
        with suppress(FileNotFoundError):  # another copy tidies up
            return beside.stat().st_nlink > 1  # a network file system may repeat what worked
        return False
    except OSError:  # no hard links here
        try:
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
    finally:
        beside.unlink(missing_ok=True)
    return True
