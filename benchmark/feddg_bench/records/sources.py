"""Files of records: one per file in ``runs/``, or packed, one per line, in ``records/``."""

from __future__ import annotations

import json
import logging
import lzma
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import jiter
from pydantic_core import from_json

from feddg_bench.common.errors import DataError, SettingsError, printable
from feddg_bench.common.files import file_state, write_whole
from feddg_bench.records.checksums import changing

logger = logging.getLogger(__name__)

FOLDERS = (Path("runs"), Path("results"))
"""Default folders of records: the user's own, then those that come with the suite."""
ENDING = ".jsonl.xz"
MIB = 2**20
MOST_TEXT = 8 * MIB
"""Maximum bytes of records per packed file when writing; compression leaves an eighth or less."""
LARGEST = 64 * MIB
"""Maximum bytes of a file of records, unpacked."""


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
            data = read_record(self.path)
        except OSError as error:
            raise DataError(f"it cannot be read: {error.strerror}") from error
        return tuple(_lines(self.name, data)) if self.packed else (data,)

    def text(self, line: int) -> bytes:
        """Return the text of one record, 0 in a file with only one; raises as `texts` does."""
        return (_unpacked(self) if self.packed else self.texts())[line]


_unpacked = lru_cache(maxsize=8)(Source.texts)


def read_record(path: Path) -> bytes:
    """Return the content of a file of records.

    Raises:
        DataError: If it is larger than `LARGEST`; the message is part of a sentence.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise DataError(f"it is larger than {LARGEST // MIB} MiB, and no file of records is")
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
    view, parts, at, room = memoryview(data), list[bytes](), 0, LARGEST
    while at < len(data) or not parts:
        if not data.startswith(b"\xfd7zXZ\0", at):
            raise DataError(f"it is no whole xz file: something else begins at byte {at}")
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=128 * MIB)
        try:
            while not unpacker.eof and at < len(data):
                block = view[at : at + MIB]  # the rest of a stream's last block is copied
                parts.append(unpacker.decompress(block, max_length=room + 1))
                room -= len(parts[-1])
                at += len(block) - len(unpacker.unused_data)
                if room < 0:
                    raise DataError(
                        f"it unpacks to more than {LARGEST // MIB} MiB; `xz -dc` and "
                        f"`split --line-bytes=8M` make parts of it that can be read"
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
        DataError: If it is not JSON, or if an object in it has a duplicate key, whose value depends
            on the reader; the message is part of a sentence.
    """
    data = text.encode() if isinstance(text, str) else text
    try:
        return jiter.from_json(data, catch_duplicate_keys=True)
    except ValueError as error:
        raise DataError(f"it is no JSON of a record: {error}") from error


_KINDS = (("runs", ".json", False), ("records", ENDING, True))
"""Folders of files that hold records, endings of their names, and whether they are packed."""


def holds_records(root: Path) -> bool:
    """Return whether a folder holds a record; a refused command leaves an empty folder."""
    return any(any((root / folder).glob(f"[!.]*{ending}")) for folder, ending, _ in _KINDS)


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
    """Return a folder's files with this ending, by name, except hidden ones.

    There are none if there is no such folder.

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
        if name.endswith(ending) and not name.startswith(".")  # macOS adds ._NAME to NAME
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

    A single record replaces a packed one with the same key, in whatever file. A new one goes to the
    last part of its packed file: packed records never move, so an interruption loses none. A
    record's own file is deleted once the packed record can be read back.

    Raises:
        DataError: If a packed file cannot be read or written, or if it changed after it was packed.
    """
    found, faults = read()
    single = {one.key: one for one in found if not one.source.packed}
    for path, reason in faults.items() if single else ():
        raise DataError(f"{path} cannot be added to: {printable(reason)}")
    parts: dict[Path, dict[str, Packable]] = {}
    for one in found:
        if one.source.packed:
            first = parts.setdefault(one.source.path, {}).setdefault(one.key, one)
            if one.key in single or first is one or not single:
                continue
            if not _same_content(first.text(), one.text()):
                raise DataError(
                    f"{one.source.path} holds {one.key} twice, with different contents: keep one "
                    f"of the two, and pack again"
                )
    there, changed, sizes = list(parts), dict[Path, None](), Counter[Path]()
    for one in sorted(single.values(), key=lambda one: one.order):
        holding = [path for path, inside in parts.items() if one.key in inside]
        own = [path for path in holding if _part(path)[0] == one.packed]
        goes = own[0] if own else _last_part(one, parts, sizes)
        for path in holding:  # an older record, whose packed file can have another name
            del parts[path][one.key]
        parts.setdefault(goes, {})[one.key] = one
        changed |= dict.fromkeys((goes, *holding))
    with changing(changed, there):
        for path in changed:
            _write(path, list(parts[path].values()))
    kept = {one.key for one in read()[0] if one.source.packed} if single else set()
    for one in single.values():
        if one.key in kept:
            one.source.path.unlink()
    return [path for path in changed if parts[path]]


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
    with changing(gone):
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


def _part(path: Path) -> tuple[Path, int]:
    """Return the first of the packed files that a packed file belongs to, and its number there.

    >>> _part(Path("digits4-ltdo-quick@2.jsonl.xz"))
    (PosixPath('digits4-ltdo-quick.jsonl.xz'), 2)
    """
    number = re.search(r"@(\d+)(?=\.jsonl)", path.name)
    first = path.with_name(path.name.replace(number[0], "", 1)) if number else path
    return first, int(number[1]) if number else 1


def _last_part(
    one: Packable, parts: Mapping[Path, Mapping[str, Packable]], sizes: Counter[Path]
) -> Path:
    """Return the last part of a record's packed file, or the next one if that has no room.

    Sizes of parts are kept in ``sizes``.
    """
    numbers = [_part(path)[1] for path in parts if _part(path)[0] == one.packed]
    stem, _, ending = one.packed.name.partition(".jsonl")

    def part(number: int) -> Path:
        return one.packed.with_name(f"{stem}{f'@{number}' * (number > 1)}.jsonl{ending}")

    last, line = part(max(numbers, default=1)), len(_line(one))
    if last not in sizes:
        sizes[last] = sum(len(_line(other)) for other in parts.get(last, {}).values())
    if sizes[last] and sizes[last] + line > MOST_TEXT:
        last = part(_part(last)[1] + 1)
    sizes[last] += line
    return last


def _line(one: Packable) -> bytes:
    """Return the line of a record in a packed file."""
    value = from_json(one.text())
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _same_content(one: bytes, other: bytes) -> bool:
    return one == other or bool(from_json(one) == from_json(other))


def _write(path: Path, records: Sequence[Packable]) -> None:
    """Write records to a packed file; the same records always give the same bytes.

    Without any, the file is deleted.

    Raises:
        DataError: If they cannot be written; then the previous file stays.
    """
    if not records:
        path.unlink(missing_ok=True)
        return
    data = b"".join(map(_line, sorted(records, key=lambda one: one.order)))
    packed = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME) if path.suffix == ".xz" else data
    held = len(_lines(path.name, packed))
    if held != len(records):
        raise DataError(
            f"{path} would hold {held} records instead of {len(records)}: nothing was removed"
        )
    write_whole(path, packed)
