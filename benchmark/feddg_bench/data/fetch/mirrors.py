"""Downloads that data sets declare: files on mirrors, or tables of a Hugging Face repository.

`feddg_bench.data.fetch.obtain` acts on these declarations.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddg_bench.common.errors import DataError

RECEIPT = "download.json"
"""File next to downloaded data that records their origin; the doctor ignores it."""


@dataclass(frozen=True)
class Download:
    """One file, available from several servers.

    Attributes:
        name: Name of the file, on every mirror and below the data set's folder.
        mirrors: Addresses of the folders that hold it, in the order to try.
        checksum: ``sha256:`` or ``md5:`` and hexadecimal digits, as published.
        size: Size of the file in bytes, if known.
        unzipped: Bytes that the file unpacks to with gzip. If given, the checksum is of these
            bytes, so that it does not depend on the compression.
        content: Decodes the file. If given, the checksum is of the returned bytes, so that it does
            not depend on ends of lines.
        unpack: Folder inside this archive that is kept; ``None`` for a file that is not unpacked.
        unpacked_bytes: Maximum number of bytes that the archive may unpack to.
    """

    name: str
    mirrors: tuple[str, ...]
    checksum: str
    size: int | None = None
    unzipped: int | None = None
    content: Callable[[Path], bytes] | None = None
    unpack: str | None = None
    unpacked_bytes: int = 4 * 2**30

    def urls(self, mirrors: Sequence[str]) -> list[str]:
        """Return the file's addresses on ``mirrors``, or on its own mirrors if these are empty."""
        return [f"{mirror.rstrip('/')}/{self.name}" for mirror in mirrors or self.mirrors]

    def fault(self, path: Path) -> str | None:
        """Return the fault of a file in words, or ``None``.

        Raises:
            OSError: If it cannot be read.
        """
        have = path.stat().st_size
        if self.size is not None and have != self.size:
            return f"{have:,} bytes instead of {self.size:,}"
        kind, _, expected = self.checksum.partition(":")
        if self.content is not None:
            try:
                digest = hashlib.new(kind, self.content(path), usedforsecurity=False).hexdigest()
            except DataError as error:
                return f"it cannot be decoded ({error})"
        elif self.unzipped is None:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, kind).hexdigest()
        else:
            try:
                with gzip.open(path) as file:
                    content = file.read(self.unzipped + 1)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                return f"it cannot be unpacked ({error})"
            if len(content) > self.unzipped:
                return f"it unpacks to more than {self.unzipped:,} bytes"
            if len(content) < self.unzipped:
                return f"it unpacks to {len(content):,} bytes instead of {self.unzipped:,}"
            digest = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
        return None if digest == expected else f"{kind} {digest} instead of {expected}"


@dataclass(frozen=True)
class HubDownload:
    """Parquet tables of images (columns ``image``, ``domain``, ``label``) on Hugging Face.

    Attributes:
        repository: Such as ``flwrlabs/pacs``.
        revision: A commit; or a branch, whose commit at the time of the download is recorded.
        folder: Folder of the tables in the repository.
    """

    repository: str
    revision: str = "main"
    folder: str = "data"
