"""Leases: a file lock for each run, by which equal workers share the runs of a results folder.

The operating system releases a lock when its process ends, however it ends. The locked file,
``KEY.lock``, names its holder and counts the workers that died over the run. A worker writes the
count as it would be after its own death when it begins, and takes it back when it releases the run.
Where locks do not reach from one machine to another, two workers can compute the same run, which
only costs time: both write the same numbers to the same path, each in one rename.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, Self

from filelock import lock_descriptor
from pydantic import BaseModel, ValidationError

from feddg_bench.common.errors import DataError, printable

_LENGTH = 1024
"""Bytes of a lease: its text is replaced in place, by one write that a kill cannot divide."""

_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)  # a link could lead anywhere


class _Content(BaseModel):
    deaths: int = 0  # holders that died in succession, the present one included
    round: int = 0  # the last round that any holder finished
    process: int = 0
    machine: str = ""
    since: str = ""

    @classmethod
    def read(cls, file: BinaryIO) -> Self:
        """Return the content of a lease; after a power failure it can be anything."""
        file.seek(0)
        with suppress(ValidationError):
            return cls.model_validate_json(file.read(_LENGTH))
        return cls()


@dataclass(frozen=True)
class Leases:
    """The leases in a folder."""

    folder: Path

    @classmethod
    def of(cls, results: Path) -> Self:
        """Return the leases of a results folder."""
        return cls(results / "leases")

    def check(self) -> None:
        """Raise `DataError` in one sentence if files cannot be locked here; leave none behind."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder) as file:
                _lock(file, self.folder)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def take(self, key: str) -> Lease | None:
        """Return the lease of ``key`` if it is free, else ``None``.

        Raises:
            DataError: If the folder cannot be written, or files cannot be locked there.
        """
        path = self.folder / f"{key}.lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(path, _FLAGS, 0o666), "r+b")
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            if _lock(file, self.folder) and _is_at(file, path):
                return Lease(path, file, _Content.read(file))
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def held(self) -> dict[str, str]:
        """Return the holder of each lease that is held now, as text."""
        holders = {}
        for path in sorted(self.folder.glob("*.lock")):
            with suppress(OSError), path.open("r+b") as file:  # it can be released at any moment
                if not _lock(file, self.folder) and (it := _Content.read(file)).process:
                    text = f"process {it.process} of machine {it.machine} since {it.since}"
                    holders[path.stem] = printable(text)
        return holders

    def forget(self, keys: Iterable[str]) -> None:
        """Remove the leases of some keys and their counts of deaths, unless they are held."""
        for key in {path.stem for path in self.folder.glob("*.lock")} & {*keys}:
            if lease := self.take(key):
                with lease:
                    pass


@dataclass(eq=False)
class Lease:
    """A lease that is held from `Leases.take` to the end of its ``with`` block.

    At the end of the block, deaths are forgotten; if an exception ends it, such as a signal, those
    of earlier holders stay.
    """

    path: Path
    file: BinaryIO
    found: _Content  # its content before
    since: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")

    @property
    def deaths(self) -> int:
        """Number of holders that died in succession, and got no further than those before."""
        return self.found.deaths

    def __enter__(self) -> Self:
        self._write(deaths=self.deaths + 1)
        return self

    def survive(self, number: int) -> None:
        """Forget the deaths if no holder before finished this round."""
        if number > self.found.round:
            self.found = _Content(round=number)
            self._write(deaths=1)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with suppress(OSError, DataError):  # of a file server; the file stays, and is free
                if kind is not None and self.deaths:
                    self._write(deaths=self.deaths)
                else:
                    self.path.unlink()  # while it is locked: a lock without a name is void
        finally:
            self.file.close()

    def _write(self, deaths: int) -> None:
        content = _Content(
            deaths=deaths,
            round=self.found.round,
            process=os.getpid(),
            machine=platform.node(),
            since=self.since,
        )
        try:
            self.file.seek(0)
            self.file.write(content.model_dump_json().encode().ljust(_LENGTH))
            self.file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error


def _lock(file: BinaryIO, folder: Path) -> bool:
    """Lock an open file until it is closed; return ``False`` if another process holds the lock.

    Raises:
        DataError: If the file system has no locks.
    """
    try:
        return lock_descriptor(file.fileno(), blocking=False)
    except OSError as error:
        raise DataError(
            f"workers share runs by file locks, and {folder} is on a file system without them "
            f"({error.strerror}): name another folder with --results, or mount this one with locks "
            f"(Lustre: option flock)"
        ) from error


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Return whether a path still names an open file; its last holder may have removed it."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write {path}: {error.strerror}; make room or choose another folder with --results"
    )
