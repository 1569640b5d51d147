"""Files that hold records: one per file in ``runs/``, or packed, one per line, in ``records/``."""

from __future__ import annotations

import json
import lzma
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic_core import from_json

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.files import write_together

FOLDERS = (Path("runs"), Path("results"))
"""Where records are looked for by default: the user's own, then those that come with the suite."""
ENDING = ".jsonl.xz"
LARGEST = 2**31
"""Bytes that a packed file may unpack to."""
MOST_TEXT = 8 * 2**20
"""Bytes of records in a packed file that we write; they are packed to an eighth or less."""


@dataclass(frozen=True)
class Source:
    """A file that holds records."""

    folder: Path
    name: str  # its name in the folder
    stamp: tuple[int, ...]  # size, times and inode: while these stay, so does its content
    packed: bool  # whether it holds one record per line

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / self.name

    def texts(self) -> tuple[bytes, ...]:
        """Return the text of each record.

        Raises:
            DataError: If the file cannot be read or is cut short; the message is a part of a
                sentence.
        """
        if not self.stamp:
            raise DataError("it is no regular file")
        try:
            data = self.path.read_bytes()
            if not self.packed:
                return (data,)
            unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=2**28)
            text = unpacker.decompress(data, max_length=LARGEST)
        except OSError as error:
            raise DataError(f"it cannot be read: {error.strerror}") from error
        except lzma.LZMAError as error:
            raise DataError(f"it is no whole xz file: {error}") from error
        if not unpacker.eof:
            raise DataError("it is cut short, or far larger than records are")
        return tuple(text.splitlines())

    def text(self, line: int) -> bytes:
        """Return the text of one record, 0 in a file with only one; raises as `texts` does."""
        return (_unpacked(self) if self.packed else self.texts())[line]


_unpacked = lru_cache(maxsize=8)(Source.texts)


_KINDS = (("runs", ".json", False), ("records", ENDING, True))
"""Folders of files that hold records, how their names end, and whether they are packed."""


def holds_records(root: Path) -> bool:
    """Return whether there is a record in a folder: a command that was refused leaves it empty."""
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


def sources(root: Path, *, packed: bool | None = None) -> list[Source]:
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
    except OSError:  # a link to nothing, or a file that has just gone
        return ()
    regular = stat.S_ISREG(s.st_mode)
    return (s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) if regular else ()


def first_part(path: Path) -> Path:
    """Return the first of the packed files that a packed file belongs to.

    >>> str(first_part(Path("digits4-ltdo-quick@2.jsonl.xz")))
    'digits4-ltdo-quick.jsonl.xz'
    """
    stem = path.name.removesuffix(ENDING)
    return path.with_name(re.sub(r"@\d+$", "", stem) + ENDING)


@dataclass(frozen=True)
class Packable:
    """A record that is to be packed, or is."""

    source: Source
    key: str
    name: str  # of the packed file that it belongs to, without its ending
    text: Callable[[], bytes]


def pack_records(
    folder: Path,
    single: Sequence[Packable],
    there: Sequence[Packable],
    reread: Callable[[], Collection[str]],
) -> list[Path]:
    """Move single records into the packed files of a folder, and return the files that changed.

    A single record takes the place of a packed one, ``there``, of the same key, whatever file that
    is in. Its own file goes once ``reread``, which returns the keys that can be read back from
    packed files, has it.

    Raises:
        DataError: If a packed file cannot be written.
    """
    new = {one.key for one in single}
    groups: dict[Path, dict[str, Packable]] = {}
    for one in single:
        groups.setdefault(folder / f"{one.name}{ENDING}", {})[one.key] = one
    for one in there:
        if one.key in new:  # an older record, which may have another name
            groups.setdefault(first_part(one.source.path), {})
    for one in there:
        if one.key not in new and first_part(one.source.path) in groups:
            groups[first_part(one.source.path)].setdefault(one.key, one)
    packed: list[Path] = []
    for path, inside in groups.items():
        packed += write_packed(path, [one.text() for one in inside.values()])
    kept = reread()
    for one in single:
        if one.key in kept:
            one.source.path.unlink()
    return packed


def write_packed(path: Path, texts: Iterable[bytes]) -> list[Path]:
    """Write records to a packed file, and return it; the same records always give the same bytes.

    Those that are too many for one, in the order of seeds, go to ``NAME@2.jsonl.xz`` and so on,
    so that none is above 1 MB. Older such files go, the first among them if there is no record.

    Raises:
        DataError: If they cannot be written; then all records are where they were.
    """
    values = sorted(map(from_json, texts), key=lambda v: (int(v["seed"]), str(v["key"])))
    parts: list[list[bytes]] = []
    room = 0
    for value in values:
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        if room < len(line):
            parts.append([])
            room = MOST_TEXT
        parts[-1].append(line)
        room -= len(line)
    stem = path.name.removesuffix(ENDING)
    files = {
        path.with_name(f"{stem}@{n}{ENDING}") if n > 1 else path: lzma.compress(
            b"".join(lines), preset=9 | lzma.PRESET_EXTREME
        )
        for n, lines in enumerate(parts, 1)
    }
    write_together(files)  # a record may move from one to another
    for source in find_sources(path.parent, ENDING, packed=True):
        if first_part(source.path) == path and source.path not in files:
            source.path.unlink()
    return list(files)
