"""Files that are whole or absent: written beside their place and renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from feddg_bench.errors import DataError


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, never sees a part of it.

    Raises:
        DataError: If it cannot be written; what stood at ``path`` before is untouched.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}; nothing written before is lost: make room or "
            f"choose another folder with --results, and run the same command again"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
