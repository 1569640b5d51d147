"""Unpacking archives that nobody vouches for: no way out of the folder, no links, no bombs.

Members are written by this module, never by `tarfile` or `zipfile`: only names and bytes are taken
from an archive, no modes, owners, times or links, so that `tarfile`'s filters (which Python 3.11
has only in its later patches) have nothing left to do.
"""

from __future__ import annotations

import gzip
import re
import shutil
import stat
import tarfile
import unicodedata
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from feddg_bench.common.errors import DataError

CHUNK = 2**20
SMALL = 16 * 2**20
"""Bytes that any archive may unpack to, whatever the ratio: texts and masks shrink a lot."""
BLOCK = 512
"""Of a tar file."""


@dataclass(frozen=True)
class Limits:
    """What an archive may become; beyond it is taken for a bomb.

    Attributes:
        bytes: Most bytes of all files.
        members: Most files and folders.
        ratio: Most bytes for each one of the archive, above 16 MiB.
    """

    bytes: int = 4 * 2**30
    members: int = 500_000
    ratio: float = 100.0

    def room(self, archive: int) -> int:
        """Return the bytes that an archive of so many may unpack to."""
        return min(self.bytes, max(SMALL, int(self.ratio * archive)))


class _UnsafeError(Exception):
    """A member that is not unpacked, and why."""


@dataclass(frozen=True)
class _Member:
    name: str
    is_folder: bool
    size: int
    content: IO[bytes] | None


def unpack(archive: Path, folder: Path, limits: Limits | None = None) -> int:
    """Unpack a zip, tar or tar.gz file into a new folder, whole or not at all.

    Archives inside the archive stay archives.

    Args:
        archive: The file; what it is, its first bytes tell.
        folder: Must not exist yet; it appears when everything is written.
        limits: What the archive may become.

    Returns:
        Number of files.

    Raises:
        DataError: If a member would lie outside, is a link or a device, has the name of another one
            (where case or accents are not told apart, too), the limits are passed, or the archive
            is damaged. Nothing is left then.
    """
    limits = limits or Limits()
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.part")
    try:
        if folder.exists():
            raise DataError(f"{folder} exists already: {archive.name} is not unpacked over it")
        temporary.mkdir(parents=True)
        files = _write(archive, temporary, limits)
        temporary.rename(folder)
    except _UnsafeError as error:
        raise DataError(f"{archive} is not unpacked: {error}") from error
    except _DAMAGE as error:
        raise DataError(f"{archive} is damaged ({error}): get it again") from error
    except OSError as error:
        raise DataError(f"cannot unpack {archive}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return files


_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
)
"""What the libraries raise at damaged archives, or at those packed in a way they cannot read."""


def _write(archive: Path, folder: Path, limits: Limits) -> int:
    """Write all members below a new folder; return the number of files."""
    room = limits.room(archive.stat().st_size)
    files = written = 0
    names = _Names()
    with archive.open("rb") as opened:
        members = _members(opened, limits, room)
        for number, member in enumerate(members, start=1):
            if number > limits.members:
                raise _UnsafeError(f"it has more than {limits.members:,} members")
            parts = safe_parts(member.name)
            if not parts and member.is_folder:
                continue  # "./", the folder itself
            names.claim(parts, member.is_folder, member.name)
            target = folder.joinpath(*parts)
            if member.content is None:
                target.mkdir(parents=True, exist_ok=True)
                continue
            if written + member.size > room:
                raise _UnsafeError(f"it unpacks to more than {room:,} bytes")
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                written += _copy(member.content, file, member)
            files += 1
    return files


def _copy(source: IO[bytes], target: IO[bytes], member: _Member) -> int:
    """Copy a member's bytes, no more than it announced; return their number."""
    done = 0
    while data := source.read(min(CHUNK, member.size - done + 1)):
        done += len(data)
        if done > member.size:
            raise _UnsafeError(f"{member.name!r} holds more bytes than it says")
        target.write(data)
    if done < member.size:
        raise EOFError(f"{member.name!r} breaks off")
    return done


def safe_parts(name: str) -> tuple[str, ...]:
    """Return the folders and file that a member's name leads through, below the folder.

    Raises:
        _UnsafeError: If it is absolute, leads upwards, or means something else on another system.
    """
    if name.startswith("/") or re.match("[A-Za-z]:", name):
        raise _UnsafeError(f"the name {name!r} is absolute")
    if "\\" in name or any(ord(letter) < 32 for letter in name):
        raise _UnsafeError(f"the name {name!r} holds a backslash or a control character")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise _UnsafeError(f"the name {name!r} leads out of the folder")
    return parts


class _Names:
    """The names that are taken, as the least discerning of file systems sees them."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, ...], tuple[str, bool]] = {}

    def claim(self, parts: tuple[str, ...], is_folder: bool, name: str) -> None:
        """Take a member's name, and those of the folders above it.

        Raises:
            _UnsafeError: If another member has it.
        """
        if not parts:
            raise _UnsafeError(f"the name {name!r} is none for a file")
        key: tuple[str, ...] = ()
        for depth, part in enumerate(parts, start=1):
            key = (*key, unicodedata.normalize("NFKC", part).casefold())
            folder = is_folder or depth < len(parts)
            before = self.taken.setdefault(key, (part, folder)) if folder else self.taken.get(key)
            if folder and before == (part, True):
                continue
            if before is not None:
                raise _UnsafeError(f"the name {name!r} is there twice, or differs only in case")
            self.taken[key] = (part, False)


# ---------------------------------------------------------------------------------- formats


def _members(file: IO[bytes], limits: Limits, room: int) -> Iterator[_Member]:
    magic = file.read(4)
    file.seek(0)
    if magic in (b"PK\3\4", b"PK\5\6"):
        return _zip_members(file, limits, room)
    if magic[:2] == b"\x1f\x8b":
        return _tar_members(_Meter(gzip.GzipFile(fileobj=file), limits, room))
    return _tar_members(_Meter(file, limits, room))


def _zip_members(file: IO[bytes], limits: Limits, room: int) -> Iterator[_Member]:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if len(members) > limits.members:
            raise _UnsafeError(f"it has more than {limits.members:,} members")
        if sum(member.file_size for member in members) > room:
            raise _UnsafeError(f"it unpacks to more than {room:,} bytes")
        for member in members:
            if not member.filename:  # zipfile's is_dir would fail
                raise _UnsafeError("a member has no name")
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFDIR if member.is_dir() else stat.S_IFREG):
                raise _UnsafeError(f"{member.filename!r} is neither a file nor a folder")
            if member.flag_bits & 1:
                raise _UnsafeError(f"{member.filename!r} is encrypted")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _UnsafeError(f"{member.filename!r} is compressed in an unusual way")
            # zipfile ends names at a NUL; the one in the archive is what must be safe
            if member.is_dir():
                yield _Member(member.orig_filename, True, 0, None)
            else:
                with archive.open(member) as content:
                    yield _Member(member.orig_filename, False, member.file_size, content)


def _tar_members(source: _Meter) -> Iterator[_Member]:
    with tarfile.open(fileobj=source, mode="r:") as archive:  # type: ignore[call-overload]
        while (member := archive.next()) is not None:
            if member.size < 0:
                raise tarfile.ReadError(f"{member.name!r} has a size below 0")
            if member.isdir():
                yield _Member(member.name, True, 0, None)
            elif member.isreg() and not member.issparse():
                yield _Member(member.name, False, member.size, archive.extractfile(member))
            else:
                raise _UnsafeError(f"{member.name!r} is neither a plain file nor a folder")
    # tarfile takes a damaged header, or the end of the file, for the end of the archive
    if source.last != bytes(BLOCK):
        raise EOFError("it breaks off")
    while source.read(CHUNK):  # so that gzip compares its checksum
        pass


class _Meter:
    """What `tarfile` reads from: forwards, not too much at once, and not without end."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, limits: Limits, room: int) -> None:
        self.file = file
        self.left = room + 4 * BLOCK * (limits.members + 32)  # headers and padding
        self.place = 0
        self.last = b""
        self.returned = b""

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self.place - len(self.returned)

    def seek(self, place: int) -> int:
        """Go on to a place; back by one byte too, as `tarfile` does."""
        step = place - self.tell()
        if step == -1 and self.last and not self.returned:
            self.returned = self.last[-1:]
        elif step < 0:
            raise tarfile.ReadError("it cannot be read backwards")
        while step > 0 and (data := self.read(min(CHUNK, step))):
            step -= len(data)
        return self.tell()

    def read(self, size: int) -> bytes:
        """Return so many bytes, or what is left."""
        if size > CHUNK:
            raise _UnsafeError(f"it has a header of {size:,} bytes")
        data = self.returned[:size]
        self.returned = self.returned[size:]
        if len(data) < size:
            fresh = self.file.read(size - len(data))
            self.place += len(fresh)
            self.left -= len(fresh)
            data += fresh
        if self.left < 0:
            raise _UnsafeError("it unpacks to more bytes than its members may have")
        self.last = data[-BLOCK:]
        return data
