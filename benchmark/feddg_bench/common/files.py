"""Atomic file writes, by a temporary file in the same folder and a rename; names and paths."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import BinaryIO

from feddg_bench.common.errors import DataError, SettingsError, printable, unknown


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that becomes ``path`` atomically if the block ends without an error.

    With ``sync`` it is flushed to the disk, so that a power failure cannot undo it; this is not
    worth the time for a file that can be made again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file atomically: no reader sees, and no crash leaves, a partial file.

    For ``sync`` see `replacing`.

    Raises:
        DataError: If it cannot be written; a previous file at ``path`` stays unchanged.
    """
    try:
        try:
            _write(path, data, sync=sync)
        except FileNotFoundError:  # a process that ended the same run removed our temporary file
            _write(path, data, sync=sync)
    except OSError as error:
        _check_folder(path.parent)
        raise DataError(
            f"cannot write {path}: {error.strerror}; nothing written before is lost: make room or "
            f"name another place, and run the same command again"
        ) from error


def _write(path: Path, data: bytes, *, sync: bool) -> None:
    with replacing(path, sync=sync) as file:
        file.write(data)


def check_writable(folder: Path) -> None:
    """Raise `DataError` in one sentence if no file can be written to a folder, new or existing.

    No file is left there, and no folder is created.
    """
    probe = _check_folder(folder) / ".writable"
    try:
        write_whole(probe, b"", sync=False)
    except DataError as error:
        raise DataError(str(error).replace(str(probe), f"to {folder}", 1)) from error
    probe.unlink(missing_ok=True)  # another command may have been quicker


def _check_folder(folder: Path) -> Path:
    """Return the nearest existing folder at or above ``folder``; refuse a file in its place."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise DataError(
            f"cannot write to {folder}: {nearest} is a file, not a folder; name another place"
        )
    return nearest


def expanded(path: Path) -> Path:
    """Return a path with ``~`` or ``~name`` replaced by a user's home.

    Raises:
        SettingsError: If there is no such user, or the user has none, as in a container whose user
            id has no name.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise SettingsError(
            f"{path} is in a home folder that does not exist: set HOME, or name another folder "
            f"(--cache-dir or FEDDG_CACHE, --data-root or FEDDG_DATA, FEDDG_CONFIG)"
        ) from error


def cache_dir(explicit: Path | None = None) -> Path:
    """Return the folder for decoded images, downloads and indexes.

    It is the one given, else ``$FEDDG_CACHE``, else ``~/.cache/feddg-bench``.
    """
    return expanded(explicit or Path(os.environ.get("FEDDG_CACHE") or "~/.cache/feddg-bench"))


def absolute(path: Path) -> Path:
    """Return an absolute path, which stays valid if the working folder changes.

    Raises:
        SettingsError: If it starts with ``~`` and the user has no home, or the working folder is
            gone.
    """
    try:
        return expanded(path).absolute()
    except FileNotFoundError as error:
        raise SettingsError("the working folder is gone: change to another one") from error


def from_here(path: Path) -> str:
    """Return a path for display: relative to the working folder if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def plain_file(path: Path) -> os.stat_result:
    """Return the status of a regular file; pipes and devices cannot be read to an end.

    Raises:
        DataError: If there is none, or it is not a regular file.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        why = error.strerror if isinstance(error, OSError) else error
        named = printable(str(path))
        raise DataError(f"cannot read {named}: {why}; check the path") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"cannot read {path}: it is a folder, pipe or device, not a plain file")
    return status


def file_state(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return size, times and inode of a file; every change of its content changes one of them.

    Tools can keep size and modification time when they replace a file. They cannot set the time of
    the last change of the status, and a renamed file keeps its inode.
    """
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def below(folder: Path, name: str) -> Path:
    """Return the path below a folder for a file name from a table.

    Raises:
        DataError: If it would lead out of the folder.
    """
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"a table in {folder} names the file {name!r}, which lies outside: mend it")
    return folder / path


def shipped(folder: str) -> Path:
    """Return a folder of the repository that comes with the package, such as ``sweeps/recipes``."""
    package = Path(__file__).parents[1]
    installed = package / "shipped" / folder
    return installed if installed.is_dir() else package.parents[1] / folder


def shipped_names(folder: str, *patterns: str) -> tuple[str, ...]:
    """Return the names of the YAML files in a `shipped` folder, without extension."""
    root = shipped(folder)
    paths = {path for pattern in patterns or ("*.yaml",) for path in root.glob(pattern)}
    return tuple(sorted(path.relative_to(root).with_suffix("").as_posix() for path in paths))


def find_yaml(
    kind: str, folder: str, given: str, *patterns: str, also: Collection[str] = ()
) -> Path:
    """Return the YAML file that a user names, by path or by the name of one that is shipped.

    If the name is unknown, the error lists the shipped names and those in ``also``.

    Raises:
        SettingsError: If there is no such name.
    """
    if Path(given).suffix in (".yaml", ".yml"):
        return Path(given)
    names = shipped_names(folder, *patterns)
    if given not in names:
        known = unknown(kind, given, (*names, *also))
        raise SettingsError(f"{known}; or give the path of a .yaml file")
    return shipped(folder) / f"{given}.yaml"


def file_name(*texts: str) -> str:
    """Return a safe file name, or part of one, from texts such as names in a record.

    A text that had to change ends in digits of its hash, so that different texts stay different.

    >>> file_name("pacs", "ltdo", "quick"), file_name("../x")
    ('pacs-ltdo-quick', '_x-d6b96a')
    """
    return "-".join(map(_safe, texts))


def _safe(text: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9_.+-]+", "_", text)[:80].lstrip(".-")
    same = safe == text and safe != ""
    return safe if same else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
