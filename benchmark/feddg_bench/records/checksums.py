"""``SHA256SUMS`` of a folder of packed files, as `sha256sum` writes and checks it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from feddg_bench.common.errors import DataError, printable
from feddg_bench.common.files import write_whole

SUMS = "SHA256SUMS"
_CHANGED = f"its SHA-256 is not that in {SUMS}: it changed after it was packed"


def sums_faults(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a results folder that are not those of its ``SHA256SUMS``, with reasons.

    A file without a line there is not checked.
    """
    for path in sorted(root.glob(f"*/{SUMS}")):
        try:
            sums = _read(path.parent)
        except DataError as error:
            yield path, str(error)
            continue
        for name, digest in sums.items():
            found = _digest(path.with_name(name))
            if found != digest:
                lost = f"it is not here, but {SUMS} has a line for it"
                yield path.with_name(name), _CHANGED if found else lost


@contextmanager
def changing(paths: Collection[Path], others: Collection[Path] = ()) -> Iterator[None]:
    """Write the sums of packed files that the block writes or deletes.

    During the block they have no line, so an interruption leaves no wrong one. ``others`` that
    have no line get one.

    Raises:
        DataError: If a file changed after it was packed, or if the sums cannot be read or written.
    """
    folders = {path.parent: _read(path.parent) for path in (*paths, *others)}
    for path in paths:
        known = folders[path.parent].pop(path.name, None)
        if known not in (None, _digest(path)):
            raise DataError(
                f"{path} cannot be added to: {_CHANGED}; restore it, or delete its line there"
            )
    for folder in {path.parent for path in paths}:
        _write(folder, folders[folder])
    yield
    for path in (*paths, *others):
        if path.name not in folders[path.parent] and (digest := _digest(path)):
            folders[path.parent][path.name] = digest
    for folder, sums in folders.items():
        _write(folder, sums)


def _read(folder: Path) -> dict[str, str]:
    """Return the digests in a folder's sums by file name.

    Raises:
        DataError: If they cannot be read; the message is part of a sentence.
    """
    try:
        lines = (folder / SUMS).read_text().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / SUMS} cannot be read: {error}") from error
    found = [re.fullmatch(r"([0-9a-f]{64}) [ *]([^/]+)", line) for line in lines]
    if None in found:
        line = printable(lines[found.index(None)])[:80]
        raise DataError(f"{folder / SUMS}: {line!r} is no SHA-256 with the name of a file")
    return {match[2]: match[1] for match in found if match}


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, empty if there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _write(folder: Path, sums: Mapping[str, str]) -> None:
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    path = folder / SUMS
    if text and (not path.exists() or path.read_text() != text):
        write_whole(path, text.encode())
    elif not text:
        path.unlink(missing_ok=True)
