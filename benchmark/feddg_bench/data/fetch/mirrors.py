"""What a data set offers for download: files on mirrors, or tables of a Hugging Face repository.

These are declarations only; `feddg_bench.data.fetch.obtain` acts on them.
"""

from __future__ import annotations

from dataclasses import dataclass

RECEIPT = "download.json"
"""File beside downloaded data that says where they came from; the doctor ignores it."""


@dataclass(frozen=True)
class Download:
    """One file that several servers hold.

    Attributes:
        name: Name of the file, on every mirror and below the data set's folder.
        mirrors: Addresses of the folders that hold it, in the order to try.
        checksum: ``sha256:`` or ``md5:`` and hexadecimal digits, as somebody published them.
        size: Bytes of the file, where they are known.
        unzipped: Bytes that the file unpacks to with gzip. If given, the checksum is of these
            bytes, so that it does not matter who compressed them.
        unpack: Folder inside this archive that is kept; ``None`` for a file that is not unpacked.
        unpacked_bytes: Most bytes that the archive may unpack to.
    """

    name: str
    mirrors: tuple[str, ...]
    checksum: str
    size: int | None = None
    unzipped: int | None = None
    unpack: str | None = None
    unpacked_bytes: int = 4 * 2**30


@dataclass(frozen=True)
class HubDownload:
    """Parquet tables of images (columns ``image``, ``domain``, ``label``) on Hugging Face.

    Attributes:
        repository: Such as ``flwrlabs/pacs``.
        revision: A commit; or a branch, whose commit at the time of the download is noted.
        folder: Folder of the tables in the repository.
    """

    repository: str
    revision: str = "main"
    folder: str = "data"
