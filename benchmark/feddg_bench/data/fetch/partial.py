"""The ``.part`` file of a download: what is here, of which file, and is it the right one."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

from feddg_bench.common.errors import DataError


@dataclass(frozen=True)
class Wanted:
    """What a file must be.

    Attributes:
        size: Bytes, where they are known.
        checksum: ``sha256:`` or ``md5:`` and hexadecimal digits, where they are known.
        unzipped: Bytes that it unpacks to with gzip; the checksum is then of these.
    """

    size: int | None = None
    checksum: str | None = None
    unzipped: int | None = None

    def fault(self, path: Path) -> str | None:
        """Say what is wrong with a file, or nothing.

        Raises:
            OSError: If it cannot be read.
        """
        have = path.stat().st_size
        if self.size is not None and have != self.size:
            return f"{have:,} bytes instead of {self.size:,}"
        if self.checksum is None:
            return None
        kind, _, expected = self.checksum.partition(":")
        if self.unzipped is None:
            with path.open("rb") as file:
                found, _ = _digest(file, kind, have)
        else:
            try:
                with gzip.open(path) as file:
                    found, length = _digest(file, kind, self.unzipped + 1)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                return f"it cannot be unpacked ({error})"
            if length > self.unzipped:
                return f"it unpacks to more than {self.unzipped:,} bytes"
            if length < self.unzipped:
                return f"it unpacks to {length:,} bytes instead of {self.unzipped:,}"
        return None if found == expected else f"{kind} {found} instead of {expected}"


@dataclass(frozen=True)
class Note:
    """Which file a part is of, as its server told."""

    url: str | None = None
    etag: str | None = None
    modified: str | None = None
    size: int | None = None

    def checked(self) -> Note:
        """Return it if its fields are of their types.

        Raises:
            TypeError: If not.
        """
        texts = (self.url, self.etag, self.modified)
        if type(self.size) is not int or not all(isinstance(t, str | None) for t in texts):
            raise TypeError
        return self

    @property
    def validator(self) -> str | None:
        """What ``If-Range`` takes: a strong ETag, else the date."""
        strong = self.etag is not None and not self.etag.startswith("W/")
        return self.etag if strong else self.modified

    def same_file(self, other: Note, total: int) -> bool:
        """Tell whether an answer for a range is of the file begun."""
        if self.size != total:
            return False
        if self.url != other.url:
            return True  # another mirror names it differently; the checksum will tell
        pairs = ((self.etag, other.etag), (self.modified, other.modified))
        return all(a == b for a, b in pairs if a is not None and b is not None)


class Part:
    """An open ``.part`` file and the note beside it."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path, self.file = path, file
        self.note_path = path.with_name(f"{path.name}.json")
        self.note = Note()
        with suppress(OSError, ValueError, TypeError):
            self.note = Note(**json.loads(self.note_path.read_bytes())).checked()

    @property
    def length(self) -> int:
        """Bytes that are here."""
        return self.file.seek(0, os.SEEK_END)

    def resumable(self, url: str, wanted: Wanted) -> int:
        """Return the byte to go on from, 0 if what is here cannot be trusted to fit."""
        if self.note.size is None or self.length > self.note.size:
            return 0
        if wanted.checksum is not None:
            return self.length
        return self.length if self.note.url == url and self.note.validator else 0

    def begin(self, start: int, note: Note) -> None:
        """Drop what follows byte ``start``, and note which file comes."""
        self.file.seek(start)
        self.file.truncate()
        self.note = note
        self.note_path.write_text(json.dumps(asdict(note)), encoding="utf-8")

    def write(self, data: bytes) -> None:
        """Add bytes; what is written stays, even if the next moment is this process's last."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.file.write(rest) :]

    def discard(self) -> None:
        """Drop all of it."""
        self.file.seek(0)
        self.file.truncate()
        self.note = Note()
        self.note_path.unlink(missing_ok=True)

    def finish(self, path: Path) -> None:
        """Give the whole file its name."""
        os.fsync(self.file.fileno())
        self.path.replace(path)
        self.note_path.unlink(missing_ok=True)


@contextmanager
def open_part(path: Path) -> Iterator[Part]:
    """Open the part of a file, for this process alone; an empty one is not left behind."""
    part = path.with_name(f"{path.name}.part")
    with FileIO(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = not os.path.samestat(os.fstat(file.fileno()), part.stat())
        except (BlockingIOError, FileNotFoundError):
            taken = True
        except OSError:  # a file system without locks
            taken = False
        if taken:
            raise DataError(f"another process is fetching {path} now: wait for it to end")
        try:
            yield Part(part, file)
        finally:
            with suppress(FileNotFoundError):
                if part.stat().st_size == 0:
                    part.unlink()


def sha256(path: Path) -> str:
    """Return a file's SHA-256, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(file: _Readable, kind: str, most: int) -> tuple[str, int]:
    """Return the hash of at most so many bytes, and how many they were."""
    digest, length = hashlib.new(kind, usedforsecurity=False), 0
    while length < most and (data := file.read(min(2**20, most - length))):
        digest.update(data)
        length += len(data)
    return digest.hexdigest(), length


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...
