"""Leases: exclusive claims of workers on runs, in a folder that several machines can share.

A lease is a file ``KEY.N`` that holds a unique name and is created exclusively; the highest N is
valid. A lease is taken over only by creating ``KEY.N+1``, never by changing or removing its file.
Only one worker can do that, so no two can both believe that they hold the lease. A holder touches
its file every `HEARTBEAT` seconds. It counts as dead if *this* process saw no change of the file
for `EXPIRY` seconds of its own clock: clocks of different machines are never compared. It counts as
dead sooner if its process is gone: each holder also locks a file with the lease's unique name in a
folder of its own machine; if that file exists and is not locked, the holder is dead. A holder on
another machine is never mistaken for dead in this way, not even on a clone of this machine.

A lease is touched or removed only after a check that it is still the same. If a holder is stopped
for so long that another worker takes over, it notices at its next round and releases the run. Until
then, two workers compute the same run, which only costs time: both write the same numbers to the
same path, each in one rename.
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
"""Seconds between two touches by a holder."""
EXPIRY = 120.0
"""Seconds without a touch after which a holder is dead; longer than a file server caches."""

_NAME = re.compile(r"(.+)\.(0|[1-9][0-9]{0,8})")
_LENGTH = 4096


def _here() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"feddg-bench-{user}"


@dataclass
class Leases:
    """The leases in a folder."""

    folder: Path
    heartbeat: float = field(default=HEARTBEAT, kw_only=True)  # seconds between touches
    expiry: float = field(default=EXPIRY, kw_only=True)  # seconds without a touch until it is free
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)  # must be monotonic
    # A local folder of this machine, where holders show that they are alive.
    here: Path = field(default_factory=_here, kw_only=True)
    _seen: dict[Path, tuple[tuple[bytes, int], float]] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, results: Path) -> Self:
        """Return the leases of a results folder."""
        return cls(results / "leases")

    def held(self) -> dict[str, int]:
        """Return the number of the highest lease of each key that has one, dead or not."""
        highest: dict[str, int] = {}
        for key, number in self._files():
            highest[key] = max(highest.get(key, 0), number)
        return highest

    def _files(self) -> dict[tuple[str, int], Path]:
        """Return the leases' files by key and number; other files in the folder are ignored."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            return {
                (match[1], int(match[2])): Path(entry.path)
                for entry in entries
                if (match := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
            }
        return {}

    def take(self, key: str, held: int | None = None) -> Lease | None:
        """Return the lease of ``key`` if it is free, else ``None``.

        ``held`` is the number that `held` gives for the key, if it has one.

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
        lease = Lease(path, number, name.encode(), below, life, self.heartbeat)
        # The old lease may have been released since the check, and taken again from 0.
        newer = any(k == key and n > number for k, n in files)
        if newer or (held is not None and below.get(self.folder / f"{key}.{held}") != before):
            lease.below = {}  # they belong to another worker
            lease.release()
            return None
        return lease

    def free(self) -> None:
        """Release the leases of dead holders, so that a new command counts deaths from 0."""
        for key, number in self.held().items():
            if lease := self.take(key, number):
                lease.release()

    def forget(self, *done: str) -> None:
        """Remove all leases of finished keys, and files left by killed processes."""
        left = [path for (key, _), path in self._files().items() if key in done]
        for path in (*left, *self.folder.glob(".*.part")):  # a process can do without its own
            path.unlink(missing_ok=True)
        for path in self.here.glob("*.lock"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > self.expiry:
                    _end(self._live(path.stem))  # no effect if it is held

    def _live(self, name: str) -> FileLock | None:
        """Lock a file to show on this machine that a holder is alive, until its process ends."""
        lock = FileLock(self.here / f"{name}.lock", blocking=False, thread_local=False)
        try:
            self.here.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, Timeout, NotImplementedError):  # its death is noticed only after EXPIRY
            return None
        return lock

    def _dead(self, path: Path) -> bytes | None:
        """Return the content of a lease if its holder is dead, else ``None``."""
        try:
            with path.open("rb") as file:  # opening refreshes a network file system's cache
                content, touched = file.read(_LENGTH), os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None  # just released, as the next call finds
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
class Lease:
    """A lease that is held; as a context manager it touches its file, and removes it at the end."""

    path: Path
    number: int  # the N of its name
    content: bytes
    below: Mapping[Path, bytes | None]  # the dead leases that it took over, with their content
    life: FileLock | None  # the lock that shows on this machine that the holder is alive
    heartbeat: float  # seconds between touches
    lost: bool = False  # whether another worker took it over

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

    @property
    def deaths(self) -> int:
        """Number of holders that died in succession, without a `survive` in between."""
        return len(self.below)

    def survive(self) -> None:
        """Forget the deaths: work has passed the point where the last holder died."""
        self._remove(self.below)
        self.below = {}

    def release(self) -> None:
        """Remove the leases that it took over, then its own, so that it stays valid to the end."""
        self._remove({**self.below, self.path: self.content})
        _end(self.life)

    def _remove(self, leases: Mapping[Path, bytes | None]) -> None:
        for path, content in leases.items():
            if not self.lost and _content(path) == content:
                path.unlink(missing_ok=True)

    def beat(self) -> None:
        """Touch the lease, or find that another took it over."""
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
            pass  # the file server can come back; if it does not, the lease expires

    def _beat(self) -> None:
        while not self.lost and not self._stop.wait(self.heartbeat):
            self.beat()


def _content(path: Path) -> bytes | None:
    """Return the content of a lease, ``None`` if it is gone."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(_LENGTH)
    return None


def _end(life: FileLock | None) -> None:
    if life is not None:
        Path(life.lock_file).unlink(missing_ok=True)
        life.release()


def _create(path: Path, content: bytes) -> bool:
    """Create a complete file exclusively; return whether this process created it."""
    beside = path.with_name(f".{uuid.uuid4().hex}.part")
    beside.write_bytes(content)
    try:
        os.link(beside, path)
    except FileExistsError:
        with suppress(FileNotFoundError):  # another worker may have tidied up
            return beside.stat().st_nlink > 1  # a network file system can repeat a successful link
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
