"""Decoding of images into a file, in parallel and block by block, so that a kill costs little.

A store is a file with the pixels, followed by one checksum per block of images, which is 0 until
the block's pixels are on disk; and, with ``data.skip_unreadable``, a byte per image, 1 if it cannot
be decoded. An unfinished store ends with hashes of the image files.
"""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeGuard

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.common.parallel import (
    GUARD,
    cores,
    in_processes,
    in_threads,
    runs_the_script_again,
)
from feddg_bench.common.titles import counted
from feddg_bench.data.dataset import (
    DomainDataset,
    FileDataset,
    UnreadableError,
    decodes_files,
    read_checked,
)

BLOCK_IMAGES = 256
"""Maximum images per block; it is decoded whole or not at all, and progress is shown after each."""
BLOCK_BYTES = 2**26
"""Maximum bytes per block, unless one image has more; each process holds one block in memory."""
WORTH_A_PROCESS = 1024
"""Number of images that makes one more process worthwhile."""

_HASH = 64
_SUM = np.dtype("<u8")
"""A block's CRC-32 plus 1."""
_POLL_SECONDS = 0.2


class NoRoomError(DataError):
    """The disk has too little space for the decoded images."""


def hashed_by_file(dataset: DomainDataset) -> TypeGuard[FileDataset]:
    """Return whether `FileDataset.combine` computes the data set's fingerprint."""
    return isinstance(dataset, FileDataset) and type(dataset).fingerprint is FileDataset.fingerprint


@dataclass(frozen=True)
class Layout:
    """Layout of a store's file."""

    images: int
    shape: tuple[int, int, int]  # of one image, [size, size, channels]
    pixels: str  # type of the pixels
    flagged: bool = False  # whether unreadable images are flagged, instead of refused

    @classmethod
    def of(cls, dataset: DomainDataset, size: int) -> Layout:
        """Return the layout of a data set at ``size`` pixels a side."""
        shape = size, size, dataset.channels
        return cls(len(dataset.records().paths), shape, dataset.pixels, dataset.skip_unreadable)

    @property
    def image_bytes(self) -> int:
        """Size of one image in bytes."""
        return int(np.prod(self.shape)) * np.dtype(self.pixels).itemsize

    @property
    def block(self) -> int:
        """Number of images per block."""
        return max(1, min(BLOCK_IMAGES, BLOCK_BYTES // self.image_bytes))

    @property
    def blocks(self) -> int:
        """Number of blocks; the last one may be smaller."""
        return -(-self.images // self.block)

    @property
    def sums_at(self) -> int:
        """Byte offset of the checksums."""
        return self.images * self.image_bytes

    @property
    def flags_at(self) -> int:
        """Byte offset of the flags of unreadable images."""
        return self.sums_at + self.blocks * _SUM.itemsize

    @property
    def length(self) -> int:
        """Size of a store in bytes."""
        return self.flags_at + self.images * self.flagged

    def unreadable(self, path: Path) -> NDArray[np.int64]:
        """Return the indices of the images that a store leaves out."""
        with path.open("rb") as file:
            file.seek(self.flags_at)
            return np.flatnonzero(np.frombuffer(file.read(self.images * self.flagged), np.uint8))

    def rows(self, block: int) -> range:
        """Return the indices of a block's images."""
        return range(block * self.block, min((block + 1) * self.block, self.images))

    def sums(self, path: Path) -> NDArray[np.uint64]:
        """Return the checksum of each block, 0 for unfinished ones."""
        with path.open("rb") as file:
            file.seek(self.sums_at)
            return np.frombuffer(file.read(self.blocks * _SUM.itemsize), dtype=_SUM).copy()

    def faults(self, path: Path, blocks: Iterable[int]) -> list[int]:
        """Return the blocks whose pixels do not match their checksum.

        Raises:
            OSError: If the file cannot be read.
        """
        sums = self.sums(path)
        pixels = np.memmap(path, mode="r", shape=self.sums_at)

        def is_right(block: int) -> bool:
            rows = self.rows(block)
            start, stop = rows.start * self.image_bytes, rows.stop * self.image_bytes
            return checksum(pixels[start:stop]) == int(sums[block])

        wanted = list(blocks)
        return [
            b for b, right in zip(wanted, in_threads(is_right, wanted), strict=True) if not right
        ]


MOST_NAMED = 10
"""Maximum number of unreadable images that a message names."""


def unreadable_images(dataset: DomainDataset, faults: Mapping[int, str]) -> str:
    """Return a sentence that names the images that cannot be decoded, given why by index."""
    paths = dataset.records().paths
    named = [f"{paths[index]} ({why})" for index, why in sorted(faults.items())[:MOST_NAMED]]
    more = f", and {len(faults) - MOST_NAMED:,} more" if len(faults) > MOST_NAMED else ""
    skip = "; data.skip_unreadable=true leaves them out" if decodes_files(dataset) else ""
    some = f"{len(faults):,} of {counted(len(paths), 'image')}"
    return f"{some} cannot be decoded: {', '.join(named)}{more}{skip}"


def checksum(pixels: NDArray[np.generic]) -> int:
    """Return the checksum of a block of pixels, as stored; it is never 0."""
    return zlib.crc32(pixels.reshape(-1).view(np.uint8).data) + 1


class Unfinished:
    """A store that is being written.

    The name of the unfinished file must identify the contents of the data set.
    """

    def __init__(self, dataset: DomainDataset, size: int, path: Path) -> None:
        self.dataset, self.size, self.path = dataset, size, path
        self.layout = Layout.of(dataset, size)
        self.length = self.layout.length
        if hashed_by_file(dataset):
            self.length += _HASH * self.layout.images

    def _lock(self) -> FileLock:
        return FileLock(self.path.with_name(f"{self.path.name}.lock"), blocking=False)

    @contextmanager
    def alone(self, progress: Callable[[int, int], None] | None) -> Iterator[None]:
        """Wait until no other process decodes these images, then lock them.

        Raises:
            OSError: If the folder cannot be written or does not support locks.
        """
        if runs_the_script_again():  # the parent waits for this process and keeps the lock
            raise SystemExit(
                "feddg-bench: a process that was to help with decoding ran the whole script again: "
                f"{GUARD}"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock, told = self._lock(), 0
        while not lock.is_locked:
            try:
                lock.acquire()
            except Timeout:
                done = self._images_done()
                if progress is not None and told < done < self.layout.images:
                    progress(done, self.layout.images)
                    told = done
                time.sleep(_POLL_SECONDS)
            except NotImplementedError as error:
                raise OSError(0, "its files cannot be locked") from error
        try:
            yield
        finally:
            if not self.path.exists():  # else a process that resumes it needs the same lock
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()

    def remove_if_idle(self) -> None:
        """Remove the unfinished file and its lock, unless a process is working on it."""
        lock = self._lock()
        try:
            with lock:
                self.path.unlink(missing_ok=True)
                Path(lock.lock_file).unlink(missing_ok=True)
        except Timeout:
            pass

    def decode(self, progress: Callable[[int, int], None] | None, processes: int) -> None:
        """Decode all unfinished blocks.

        Raises:
            DataError: If images cannot be decoded and are not to be skipped, or the disk is full.
            OSError: If a file cannot be written.
        """
        faults: dict[int, str] = {}
        try:
            done = self._prepare()
            finished = self._images_done()
            if progress is not None and finished:
                progress(finished, self.layout.images)
            todo = [block for block in range(self.layout.blocks) if not done[block]]
            for block, faulty in self._decoded(todo, processes):
                faults |= faulty
                finished += len(self.layout.rows(block))
                if progress is not None:
                    progress(finished, self.layout.images)
        except (OSError, NoRoomError):
            if not self._images_done():
                self.path.unlink(missing_ok=True)
            raise
        except DataError:
            self.path.unlink()  # useless, since a repaired file changes the content
            raise
        if faults and not self.layout.flagged:
            self.path.unlink()
            found = f"{self.dataset.title}{self.dataset._where()}"
            raise DataError(f"{found}: {unreadable_images(self.dataset, faults)}")

    def fingerprint(self) -> str:
        """Return the data set's fingerprint, from hashes taken during decoding if there are any."""
        dataset = self.dataset
        if not hashed_by_file(dataset):
            return dataset.fingerprint()
        with self.path.open("rb") as file:
            file.seek(self.layout.length)
            return dataset.combine(file.read(_HASH).hex() for _ in range(self.layout.images))

    def become(self, path: Path) -> None:
        """Turn the unfinished file into the store ``path``."""
        os.truncate(self.path, self.layout.length)
        self.path.replace(path)

    def _prepare(self) -> NDArray[np.uint64]:
        """Extend the file to its full length, if it fits on the disk, and return the checksums."""
        if not self.path.exists() or self.path.stat().st_size != self.length:
            self.path.open("wb").close()
        status = self.path.stat()
        missing = self.length - status.st_blocks * 512
        free = shutil.disk_usage(self.path.parent).free
        if missing > free:
            raise NoRoomError(
                f"decoding {self.dataset.title} at {self.size} px needs {missing / 2**30:,.2f} GiB "
                f"more in {self.path.parent} but only {free / 2**30:,.2f} GiB are free: make room "
                f"or name another folder with --cache-dir or FEDDG_CACHE"
            )
        os.truncate(self.path, self.length)
        return self.layout.sums(self.path)

    def _images_done(self) -> int:
        try:
            done = np.flatnonzero(self.layout.sums(self.path))
        except OSError:
            return 0
        return sum(len(self.layout.rows(block)) for block in done.tolist())

    def _decoded(
        self, blocks: Sequence[int], processes: int
    ) -> Iterable[tuple[int, dict[int, str]]]:
        """Decode blocks; yield each when it is done, with the faults of its unreadable images."""
        if processes == 0:
            processes = min(cores(), len(blocks) * self.layout.block // WORTH_A_PROCESS)
        if min(processes, len(blocks)) > 1:
            make, size = partial(Writer, self, threads=False), min(processes, len(blocks))
            if (decoded := in_processes(make, blocks, size)) is not None:
                return decoded
        writer = Writer(self)
        return (writer(block) for block in blocks)


class Writer:
    """Decodes blocks into the unfinished file, with one thread per core or with a single one."""

    def __init__(self, unfinished: Unfinished, *, threads: bool = True) -> None:
        self.unfinished = unfinished
        self.threads = threads

    def __call__(self, block: int) -> tuple[int, dict[int, str]]:
        """Decode a block, then mark it as done; both reach the disk in this order.

        Returns the block and the faults of its images. With faults that are not skipped, nothing is
        written.
        """
        layout = self.unfinished.layout
        rows = layout.rows(block)
        pixels = np.empty((len(rows), *layout.shape), dtype=layout.pixels)
        contents, faults = [], {}
        read = (in_threads if self.threads else map)(self._read, rows)
        for place, (content, image) in enumerate(read):
            contents.append(content)
            if isinstance(image, str):
                faults[rows[place]] = image
            pixels[place] = 0 if isinstance(image, str) else image
        if faults and not layout.flagged:
            return block, faults
        with self.unfinished.path.open("r+b") as file:
            file.seek(rows.start * layout.image_bytes)
            file.write(pixels.view(np.uint8).data)
            file.seek(layout.length + _HASH * rows.start)
            file.write(b"".join(contents))
            if layout.flagged:
                file.seek(layout.flags_at + rows.start)
                file.write(bytes(index in faults for index in rows))
            file.flush()
            os.fsync(file.fileno())
            file.seek(layout.sums_at + _SUM.itemsize * block)
            file.write(np.array(checksum(pixels), dtype=_SUM).tobytes())
        return block, faults

    def _read(self, index: int) -> tuple[bytes, NDArray[np.uint8] | NDArray[np.float16] | str]:
        """Return a hash of an image's file, if there is one, and the image, or its fault."""
        dataset, content = self.unfinished.dataset, b""
        if hashed_by_file(dataset):  # hashed first, so that decoding finds the file in memory
            content = bytes.fromhex(dataset.content(index))
        try:
            return content, read_checked(dataset, index, self.unfinished.size)
        except UnreadableError as error:
            return content, error.why
        except DataError as error:
            return content, str(error)
