"""Index of a results folder, so that unchanged files need not be parsed again.

It is an sqlite3 database next to the records, or in the cache folder if the results folder is not
writable, and can be deleted at any time. An index that is damaged or written by other code is
rebuilt; a locked one is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import cache_dir

Content = tuple[list[dict[str, Any]], bytes]
"""Content of a file: JSON values, and the numbers of its runs."""

_TABLE = (
    "CREATE TABLE files (name TEXT PRIMARY KEY, stamp TEXT, said TEXT, numbers BLOB, crc INTEGER)"
)
_PATIENCE = 1.0
"""Seconds to wait for another process that writes."""


class Index:
    """The index of a results folder, valid only while the code of this package is unchanged."""

    def __init__(self, root: Path) -> None:
        code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
        self.version = zlib.crc32(code) & 0x7FFFFFFF
        name = hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:16]
        self.path = root / ".index"
        if not os.access(root, os.W_OK):
            with suppress(SettingsError):  # there is no home folder
                self.path = cache_dir() / "indexes" / name
        self.files: dict[str, tuple[Any, ...]] = {}
        with suppress(sqlite3.Error, OSError):
            if self.path.is_file():
                with self._opened() as database:
                    rows = database.execute("SELECT * FROM files").fetchall()
                self.files = {row[0]: row[1:] for row in rows}

    def get(self, name: str, stamp: Sequence[int]) -> Content | None:
        """Return the stored content of a file, unless the file has changed."""
        with suppress(KeyError, ValueError, TypeError, AttributeError):  # damaged
            known, said, numbers, crc = self.files[name]
            if stamp and known == json.dumps(stamp) and crc == _checksum(said, numbers):
                return from_json(said, cache_strings="keys"), numbers
        return None

    def put(self, name: str, stamp: Sequence[int], content: Content) -> None:
        """Store the content of a file."""
        said = to_json(content[0], inf_nan_mode="constants").decode()
        crc = _checksum(said, content[1])
        self.files[name] = (json.dumps(stamp), said, content[1], crc)

    def write(self, new: Sequence[str], gone: Sequence[str] = ()) -> None:
        """Write the stored content of ``new`` files, and remove files that are ``gone``."""
        with suppress(sqlite3.Error, OSError):  # locked, read-only, or no space left
            try:
                self._write(new, gone)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:  # damaged, or written by other code
                self.path.unlink()
                self._write(new, gone)

    def _write(self, new: Sequence[str], gone: Sequence[str]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._opened() as database, database:
            database.executemany("DELETE FROM files WHERE name = ?", [(name,) for name in gone])
            database.executemany(
                "REPLACE INTO files VALUES (?, ?, ?, ?, ?)",
                [(name, *self.files[name]) for name in new],
            )

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Open the database, and close it at the end.

        Raises:
            sqlite3.DatabaseError: If it is not a database, or was written by other code.
        """
        with closing(sqlite3.connect(self.path, timeout=_PATIENCE)) as database:
            known = database.execute("SELECT sql FROM sqlite_master WHERE sql > ''").fetchall()
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if not known:
                database.execute(_TABLE)
                database.execute(f"PRAGMA user_version = {self.version}")
            elif (known, version) != ([(_TABLE,)], self.version):
                raise sqlite3.DatabaseError("it is of another version")
            yield database


def _checksum(said: str, numbers: bytes) -> int:
    return zlib.crc32(numbers, zlib.crc32(said.encode()))
