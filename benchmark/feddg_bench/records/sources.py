"""Files of records: one per file in ``runs/``, or packed, one per line, in ``records/``."""

from __future__ import annotations

import json
import logging
import lzma
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import jiter
from pydantic_core import from_json

from feddg_bench.common.errors import DataError, SettingsError, printable
from feddg_bench.common.files import file_state, write_together, write_whole

logger = logging.getLogger(__name__)

FOLDERS = (Path("runs"), Path("results"))
"""Default folders of records: the user's own, then those that come with the suite."""
ENDING = ".jsonl.xz"
MIB = 2**20
MOST_TEXT = 8 * MIB
"""Maximum bytes of records per packed file when writing; compression leaves an eighth or less."""
LARGEST = 64 * MIB
"""Maximum unpacked size of a packed file in bytes."""
LARGEST_RECORD = 32 * MIB
MOST_VALUES = 2**20
"""Maximum bytes and values of one record: 200 times those of a record of 50 rounds. A parsed value
takes up to 300 bytes, so with these limits a reader stays below 512 MiB."""
MOST_STREAMS = 1000
"""Maximum number of streams in a packed file: each takes some time, however small it is."""


@dataclass(frozen=True)
class Source:
    """A file of records."""

    folder: Path
    name: str  # its name in the folder
    stamp: tuple[int, ...]  # size, times and inode, which change with the content
    packed: bool  # whether it holds one record per line

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / self.name

    def texts(self) -> tuple[bytes, ...]:
        """Return the text of each record.

        Raises:
            DataError: If the file cannot be read, is incomplete, or is far larger than records are;
                the message is part of a sentence.
        """
        if not self.stamp:
            raise DataError("it is no regular file")
        try:
            data = read_record(self.path, LARGEST if self.packed else LARGEST_RECORD)
        except OSError as error:
            raise DataError(f"it cannot be read: {error.strerror}") from error
        texts = tuple(_lines(self.name, data)) if self.packed else (data,)
        if max(map(len, texts), default=0) > LARGEST_RECORD:
            raise DataError(f"a line of it is longer than {LARGEST_RECORD // MIB} MiB")
        return texts

    def text(self, line: int) -> bytes:
        """Return the text of one record, 0 in a file with only one; raises as `texts` does."""
        return (_unpacked(self) if self.packed else self.texts())[line]


_unpacked = lru_cache(maxsize=8)(Source.texts)


def read_record(path: Path, most: int = LARGEST_RECORD) -> bytes:
    """Return the content of a file of records.

    Raises:
        DataError: If it is larger than such files are; the message is part of a sentence.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DataError(f"it is larger than {most // MIB} MiB, and no file of records is")
    return data


def _lines(name: str, data: bytes) -> list[bytes]:
    """Return the lines of a packed file; those of ledgers are not compressed."""
    return (unpack_streams(data) if name.endswith(".xz") else data).splitlines()


def unpack_streams(data: bytes) -> bytes:
    """Return the content of all streams of an xz file, concatenated as by ``xz -dc``.

    Raises:
        DataError: If a stream is incomplete, if there is other data, or if the content is larger
            than `LARGEST`; the message is part of a sentence.
    """
    view, parts, at, room, streams = memoryview(data), [], 0, LARGEST, 0
    while at < len(data) or not streams:
        if not data.startswith(b"\xfd7zXZ\0", at):
            raise DataError(f"it is no whole xz file: something else begins at byte {at}")
        streams += 1
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=128 * MIB)
        try:
            while not unpacker.eof and at < len(data):
                block = view[at : at + MIB]  # the rest of a stream's last block is copied
                parts.append(unpacker.decompress(block, max_length=room + 1))
                room -= len(parts[-1])
                at += len(block) - len(unpacker.unused_data)
                if room < 0 or streams > MOST_STREAMS:
                    raise DataError(
                        f"it unpacks to more than {LARGEST // MIB} MiB, or has more than "
                        f"{MOST_STREAMS} streams; `xz -dc` and `split --line-bytes=8M` make parts "
                        f"of it that can be read"
                    )
        except lzma.LZMAError as error:
            raise DataError(f"it is no whole xz file: {error}") from error
        if not unpacker.eof:
            raise DataError("it is cut short")
        while data.startswith(bytes(4), at):  # padding, which the format allows
            at += 4
    return b"".join(parts)


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        DataError: If it is not JSON, if it holds far more values than records do, or if an object
            in it has a duplicate key, whose value depends on the reader; the message is part of a
            sentence.
    """
    data = text.encode() if isinstance(text, str) else text
    if len(data) > MOST_VALUES and data.count(b",") > MOST_VALUES:
        raise DataError(f"it holds more than {MOST_VALUES:,} values, and no record does")
    try:
        return jiter.from_json(data, catch_duplicate_keys=True)
    except ValueError as error:
        raise DataError(f"it is no JSON of a record: {error}") from error


_KINDS = (("runs", ".json", False), ("records", ENDING, True))
"""Folders of files that hold records, endings of their names, and whether they are packed."""


def holds_records(root: Path) -> bool:
    """Return whether a folder holds a record; a refused command leaves an empty folder."""
    return any(any((root / folder).glob(f"*{ending}")) for folder, ending, _ in _KINDS)


def default_folders() -> list[Path]:
    """Return the first of `FOLDERS` that holds records, or the first if none does."""
    return [next(filter(holds_records, FOLDERS), FOLDERS[0])]


def asked_folders(given: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """Return the folders of records that a Python caller names, `default_folders` if none.

    Raises:
        SettingsError: If it is neither a path nor a sequence of paths.
    """
    if given is None:
        return default_folders()
    folders = [given] if isinstance(given, str | Path) else given
    if not isinstance(folders, Iterable) or not all(isinstance(f, str | Path) for f in folders):
        raise SettingsError(f"results: {given!r} cannot be read; expected a folder, or several")
    return [Path(folder) for folder in folders] or default_folders()


def find_records(root: Path, *, packed: bool | None = None) -> list[Source]:
    """Return the files of a results folder that hold records, single ones first, by name.

    If ``packed`` is given, only packed files are returned (true), or only single ones (false).
    """
    asked = [kind for kind in _KINDS if packed in (None, kind[2])]
    return [
        source
        for folder, ending, kind in asked
        for source in find_sources(root / folder, ending, packed=kind)
    ]


def find_sources(folder: Path, ending: str, *, packed: bool) -> list[Source]:
    """Return a folder's files with this ending, by name; none if there is no such folder.

    Raises:
        DataError: If the folder cannot be read.
    """
    if not folder.is_dir():
        return []
    try:
        with os.scandir(folder) as entries:
            named = [(entry.name, _stamp(entry)) for entry in entries]
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}") from error
    return [
        Source(folder, name, stamp, packed)
        for name, stamp in sorted(named)
        if name.endswith(ending)
    ]


def _stamp(entry: os.DirEntry[str]) -> tuple[int, ...]:
    try:
        s = entry.stat()
    except OSError:  # a dangling link, or a file that was just deleted
        return ()
    regular = stat.S_ISREG(s.st_mode)
    return file_state(s) if regular else ()


@dataclass(frozen=True)
class Packable:
    """A record to be packed, or already packed."""

    source: Source
    key: str  # of several records with the same key, one counts
    order: tuple[Any, ...]  # its position in a packed file
    single: Path  # its own file
    packed: Path  # the first of the packed files that it belongs to
    text: Callable[[], bytes]


Reader = Callable[[], tuple[Sequence[Packable], Mapping[Path, str]]]
"""Returns all records of a kind, and the faults of packed files."""


def pack(read: Reader) -> list[Path]:
    """Move single records into packed files, and return the files that changed.

    A single record replaces a packed one with the same key, in whatever file. Its own file is
    deleted once the packed record can be read back. Unusable single files stay.

    Raises:
        DataError: If a packed file cannot be read or written, or if two packed records of one key
            differ.
    """
    found, faults = read()
    single = {one.key: one for one in found if not one.source.packed}
    there = [one for one in found if one.source.packed]
    for path, reason in faults.items() if single else ():
        raise DataError(f"{path} cannot be added to: {printable(reason)}")
    groups: dict[Path, dict[str, Packable]] = {}
    for one in single.values():
        groups.setdefault(one.packed, {})[one.key] = one
    for one in there:
        if one.key in single:  # an older record, whose packed file can have another name
            groups.setdefault(_first_part(one.source.path), {})
    for one in there:
        if one.key not in single and _first_part(one.source.path) in groups:
            first = groups[_first_part(one.source.path)].setdefault(one.key, one)
            if first is not one and not _same_content(first.text(), one.text()):
                raise DataError(
                    f"{one.source.path} holds {one.key} with other contents than "
                    f"{first.source.path}: keep one of the two, and pack again"
                )
    packed = [
        path for first, inside in groups.items() for path in _write(first, [*inside.values()])
    ]
    kept = {one.key for one in read()[0] if one.source.packed} if single else set()
    for one in single.values():
        if one.key in kept:
            one.source.path.unlink()
    return packed


def unpack(read: Reader) -> list[Path]:
    """Move packed records into single files, and return the packed ones.

    An existing single file stays unchanged, unless it is unusable and therefore set aside. A packed
    file stays, with a warning, if part of it is unusable or if its contents differ from those of
    single files.

    Raises:
        DataError: If a file cannot be written.
    """
    found, faults = read()
    usable = {one.single for one in found if not one.source.packed}
    packed, stay = [one for one in found if one.source.packed], dict(faults)
    for one in packed:
        if one.single not in usable:
            if one.single.exists():
                name = set_aside(one.single, ".broken")
                logger.warning("%s cannot be used and is set aside as %s", one.single, name)
            write_record(one.single, from_json(one.text()))
            usable.add(one.single)
        if not _same_content(one.single.read_bytes(), one.text()):
            stay[one.source.path] = f"{one.single} holds other contents"
    for path, reason in stay.items():
        logger.warning("%s stays: %s", path, printable(reason))
    gone = {one.source.path for one in packed} - stay.keys()
    for path in gone:
        path.unlink()
    return sorted(gone)


def write_record(path: Path, record: Any) -> None:
    """Write a record as human-readable JSON."""
    write_whole(path, json.dumps(record, indent=1, ensure_ascii=False).encode() + b"\n")


def set_aside(path: Path, ending: str = "") -> str:
    """Rename a file, so that a new one can take its place, and return its new name."""
    names = (f"{path.name}{ending}{f'.{n}' if n else ''}" for n in count(0 if ending else 1))
    name = next(name for name in names if not path.with_name(name).exists())
    if path.exists():
        path.rename(path.with_name(name))
    return name


def _first_part(path: Path) -> Path:
    """Return the first of the packed files that a packed file belongs to.

    >>> str(_first_part(Path("digits4-ltdo-quick@2.jsonl.xz")))
    'digits4-ltdo-quick.jsonl.xz'
    """
    return path.with_name(re.sub(r"@\d+(?=\.jsonl)", "", path.name))


def _same_content(one: bytes, other: bytes) -> bool:
    return one == other or bool(from_json(one) == from_json(other))


def _write(path: Path, records: Sequence[Packable]) -> list[Path]:
    """Write records to a packed file, and return it; the same records always give the same bytes.

    Records that exceed one file continue, in order, in ``NAME@2.jsonl.xz`` and so on, so that no
    file exceeds 1 MB. Older such files are deleted, even the first if there is no record.

    Raises:
        DataError: If they cannot be written; then all records stay in place.
    """
    parts: list[list[bytes]] = []
    room = 0
    for one in sorted(records, key=lambda one: one.order):
        value = from_json(one.text())
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        if room < len(line):
            parts.append([])
            room = MOST_TEXT
        parts[-1].append(line)
        room -= len(line)
    stem, _, ending = path.name.partition(".jsonl")
    files: dict[Path, bytes] = {}
    for n, lines in enumerate(parts, 1):
        data = b"".join(lines)
        name = path.with_name(f"{stem}{f'@{n}' if n > 1 else ''}.jsonl{ending}")
        files[name] = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME) if ending else data
    held = sum(len(_lines(name.name, data)) for name, data in files.items())
    if held != len(records):
        raise DataError(
            f"{', '.join(map(str, files))} would hold {held} records instead of {len(records)}: "
            f"nothing was written or removed"
        )
    write_together(files)  # a record can move between them
    for source in find_sources(path.parent, f".jsonl{ending}", packed=True):
        if _first_part(source.path) == path and source.path not in files:
            source.path.unlink()
    return list(files)
