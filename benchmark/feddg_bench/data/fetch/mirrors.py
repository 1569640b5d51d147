"""What a data set offers for download: files on mirrors, or tables of a Hugging Face repository.

These are declarations only; `feddg_bench.data.fetch.obtain` acts on them.
"""

from __future__ import annotations

from dataclasses import dataclass

RECEIPT = "download.json"
"""File beside downloaded data that says where they came from; the doctor passes it over."""


@dataclass(frozen=True)
class Download:
    """One file that several servers hold.

    Attributes:
        name: Of the file, on every mirror and below the data set's folder.
        mirrors: Addresses of the folders that hold it, in the order to try.
        checksum: ``sha256:`` or ``md5:`` and hexadecimal digits, as somebody published them.
        size: Bytes of the file, where they are known.
        unzipped: Bytes that the file unpacks to with gzip: then the checksum is of these, so that
            it does not matter who compressed them.
        unpack: Folder inside this archive that is kept; nothing for a file that stays as it is.
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
        revision: A commit, or a branch, whose commit of that day is then noted.
        folder: Folder of the tables in the repository.
    """

    repository: str
    revision: str = "main"
    folder: str = "data"
