"""Claims: who is at work on a run, agreed on through a folder that several machines may share.

A claim is a file ``KEY.N``, created exclusively; the highest N holds. It is never taken over by
changing or removing it but by creating ``KEY.N+1``, which again only one can, so that no two
takers can both believe they won. A holder touches its file every `HEARTBEAT` seconds. It is dead if
its process is gone, where that can be seen from here, or if *this* process watched the file for
`EXPIRY` seconds of its own clock without a change: clocks of machines are never compared.

Should a holder be stopped for so long that another takes over, it learns of it at its next round
and lets go. Until then two compute the same run, which costs time only: both write the same
numbers, each in one rename, to the same place.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from feddg_bench.common.errors import DataError

HEARTBEAT = 15.0
"""Seconds between the touches of a holder."""
EXPIRY = 120.0
"""Seconds without a touch after which a holder is dead; longer than a file server caches."""


class Claims:
    """The claims in a folder.

    Args:
        folder: Where they lie.
        heartbeat: Seconds between touches.
        expiry: Seconds without a touch until a claim is free.
        clock: A clock that only goes forward.
    """

    def __init__(
        self,
        folder: Path,
        *,
        heartbeat: float = HEARTBEAT,
        expiry: float = EXPIRY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.heartbeat = heartbeat
        self.expiry = expiry
        self.clock = clock
        self._seen: dict[Path, tuple[tuple[bytes, int], float]] = {}

    def held(self) -> dict[str, int]:
        """Return the highest claim of every key that has one, dead ones included."""
        found: dict[str, int] = {}
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                key, _, number = path.name.rpartition(".")
                if key and number.isdigit():
                    found[key] = max(found.get(key, 0), int(number))
        return found

    def take(self, key: str, held: int | None = None) -> Claim | None:
        """Return the claim of ``key`` if it is free, else ``None``.

        Args:
            key: What to claim.
            held: Its highest claim in `held`, if it has one.

        Raises:
            DataError: If the folder cannot be written.
        """
        number = 0
        if held is not None:
            if not self._dead(self.folder / f"{key}.{held}"):
                return None
            number = held + 1
        path = self.folder / f"{key}.{number}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not _create(path, json.dumps(_owner(os.getpid())).encode()):
                return None
        except OSError as error:
            raise DataError(
                f"cannot write {path}: {error.strerror}; "
                f"make room or choose another folder with --results"
            ) from error
        if self.held().get(key, -1) > number:  # what we took over was released in the meantime
            path.unlink(missing_ok=True)
            return None
        return Claim(path, number, self.heartbeat)

    def forget(self, key: str) -> None:
        """Remove all claims of a key whose work is done."""
        for path in self.folder.glob(f"{key}.*"):
            path.unlink(missing_ok=True)

    def _dead(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:  # opening makes a network file system look again
                state = (file.read(), os.fstat(file.fileno()).st_mtime_ns)
        except OSError:
            return False  # just released; the next look sees it
        with suppress(ValueError, KeyError, TypeError):
            owner = json.loads(state[0])
            if owner["host"] == _host() and owner != _owner(owner["pid"]):
                return True
        now = self.clock()
        before, since = self._seen.get(path, (None, now))
        if before != state:
            self._seen[path] = (state, now)
            return False
        return now - since >= self.expiry


class Claim:
    """A claim that is held; a context manager that touches it, and in the end removes it."""

    def __init__(self, path: Path, number: int, heartbeat: float) -> None:
        self.path = path
        self.number = number
        self.heartbeat = heartbeat
        self.lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if not self.lost:
            for number in range(self.number + 1):  # ours last, so that it holds to the end
                self.path.with_suffix(f".{number}").unlink(missing_ok=True)

    def beat(self) -> None:
        """Touch the claim, or find that another took it over."""
        try:
            if self.path.with_suffix(f".{self.number + 1}").exists():
                self.lost = True
                return
            os.utime(self.path)
        except FileNotFoundError:
            self.lost = True
        except OSError:
            pass  # the file server may come back; if it does not, the claim expires

    def _beat(self) -> None:
        while not self.lost and not self._stop.wait(self.heartbeat):
            self.beat()


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


def _owner(pid: int) -> dict[str, str | int | None]:
    """Return what tells a living process from all others; ``None`` for one that is gone."""
    return {"host": _host(), "pid": pid, "started": _started(pid)}


def _host() -> str:
    """Return a hash of this machine's start and of the space in which its process numbers count."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - a name, not a path
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _started(pid: int) -> str | None:
    """Return when a process started, in its kernel's ticks; ``alive`` if only that is known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        state, *rest = stat.rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except (OSError, IndexError):
        pass
    if os.name == "posix":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
    return "alive"
