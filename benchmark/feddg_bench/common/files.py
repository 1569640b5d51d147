"""Files that are whole or absent: written beside their place and renamed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from feddg_bench.common.errors import DataError


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that becomes ``path``, whole, when the block ends, and never otherwise.

    Args:
        path: The file.
        sync: Wait until the disk has it, so that a power failure cannot undo it; not worth the time
            for what can be made again.
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
    """Write a file so that a reader, or a crash, never sees a part of it.

    Args:
        path: The file.
        data: Its content.
        sync: See `replacing`.

    Raises:
        DataError: If it cannot be written; what stood at ``path`` before is untouched.
    """
    try:
        with replacing(path, sync=sync) as file:
            file.write(data)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}; nothing written before is lost: make room or "
            f"choose another folder with --results, and run the same command again"
        ) from error


def shipped(folder: str, source: str) -> Path:
    """Return a folder of files that come with the package, installed or in the repository."""
    package = Path(__file__).parents[1]
    installed = package / folder
    return installed if installed.is_dir() else package.parents[1] / source
