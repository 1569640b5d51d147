"""Images decoded into a file by several processes, block by block, so that a kill costs little.

Beside the unfinished file lies its journal: a byte for every block, 1 once its pixels are on the
disk, and 64 bytes for every image, the hash of the file it came from. Each process writes its rows
in place; nothing but the numbers of blocks crosses between processes, and no process holds more
than one image a thread.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeGuard
from uuid import uuid4

import numpy as np

from feddg_bench.common.errors import DataError, PluginError
from feddg_bench.common.parallel import Team, cores, in_threads
from feddg_bench.data.dataset import DomainDataset, FileDataset

BLOCK = 256
"""Images of a block, which is done or not; progress is told after each."""

WORTH_A_PROCESS = 1024
"""Images for which starting one more process pays."""

_HASH = 64
_POLL_SECONDS = 0.2


class NoRoomError(DataError):
    """The disk is too full for the images that are to be decoded."""


def image_bytes(dataset: DomainDataset, size: int) -> int:
    """Return the bytes of one decoded image."""
    return size * size * dataset.channels * np.dtype(dataset.pixels).itemsize


def hashed_by_file(dataset: DomainDataset) -> TypeGuard[FileDataset]:
    """Tell whether the data set's fingerprint is the one that `FileDataset.combine` makes."""
    return isinstance(dataset, FileDataset) and type(dataset).fingerprint is FileDataset.fingerprint


class Unfinished:
    """A store on its way.

    Args:
        dataset: What to decode.
        size: Pixels a side.
        path: The unfinished file; its name must tell the contents of the data set.
    """

    def __init__(self, dataset: DomainDataset, size: int, path: Path) -> None:
        self.dataset = dataset
        self.size = size
        self._place(path)
        self.images = len(dataset.records().paths)
        self.blocks = -(-self.images // BLOCK)
        self.length = self.images * image_bytes(dataset, size)

    def _place(self, path: Path) -> None:
        self.path = path
        self.journal = path.with_name(f"{path.name}.journal")

    @contextmanager
    def alone(
        self, wanted: Callable[[], bool], progress: Callable[[int, int], None] | None
    ) -> Iterator[bool]:
        """Wait until no other process decodes these images, and keep others waiting.

        Yields whether the store is still ``wanted``. Where files cannot be locked each process
        decodes all images into a file of its own, and a kill costs what it has done.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = None
        told = 0
        while lock is None:
            lock = self._lock()
            if lock is None:
                done = self._images_in(self._done())
                if progress is not None and told < done < self.images:
                    progress(done, self.images)
                    told = done
                time.sleep(_POLL_SECONDS)
        try:
            still_wanted = wanted()
            if not still_wanted:
                self.forget()  # made anew by us
            yield still_wanted
        finally:
            os.close(lock)

    def _lock(self) -> int | None:
        """Return a descriptor that holds the lock, or nothing if another process holds it."""
        descriptor = os.open(self.journal, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # a file system without locks
            os.close(descriptor)
            self.journal.unlink(missing_ok=True)
            self._place(self.path.with_name(f"{self.path.name}.{uuid4().hex}"))
            return os.open(self.journal, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), self.journal.stat()):
                return descriptor
        os.close(descriptor)  # another process ended and removed it just now
        return None

    def remove_if_idle(self) -> None:
        """Remove what there is, unless a process works at it."""
        lock = self._lock()
        if lock is not None:
            self._remove()
            os.close(lock)

    def decode(self, progress: Callable[[int, int], None] | None, processes: int) -> None:
        """Decode all blocks that are not done.

        Raises:
            DataError: If an image cannot be decoded, or there is no room.
            OSError: If something cannot be written.
        """
        try:
            done = self._prepare()
            finished = self._images_in(done)
            if progress is not None and finished:
                progress(finished, self.images)
            todo = [block for block in range(self.blocks) if not done[block]]
            for block in self._decoded(todo, processes):
                done[block] = 1
                finished += len(self.rows(block))
                if progress is not None:
                    progress(finished, self.images)
        except (OSError, NoRoomError):
            if not any(self._done()):
                self._remove()
            raise
        except DataError:
            self._remove()  # mending an image changes the content, so this is of no use
            raise

    def fingerprint(self) -> str:
        """Return the fingerprint of the data set, from the journal where that has it."""
        if hashed_by_file(self.dataset):
            return self.dataset.combine(self._hashes())
        return self.dataset.fingerprint()

    def become(self, path: Path, *, keep: bool) -> None:
        """Turn into the store ``path``, or vanish where that is to be kept."""
        if keep:
            self.path.unlink(missing_ok=True)
        else:
            self.path.replace(path)

    def forget(self) -> None:
        """Remove the journal, and with it the lock."""
        self.journal.unlink(missing_ok=True)

    def rows(self, block: int) -> range:
        """Return the images of a block."""
        return range(block * BLOCK, min((block + 1) * BLOCK, self.images))

    # ------------------------------------------------------------------------- the journal

    def _prepare(self) -> bytearray:
        """Make room and return the blocks that are done already."""
        journal_length = self.blocks + (_HASH * self.images if hashed_by_file(self.dataset) else 0)
        whole = self.path.exists() and self.path.stat().st_size == self.length
        if not whole or self.journal.stat().st_size != journal_length:
            for path in (self.path, self.journal):
                path.open("ab").close()
                os.truncate(path, 0)
            self._check_room()
            os.truncate(self.path, self.length)
            os.truncate(self.journal, journal_length)
        self._check_room()
        return self._done()

    def _check_room(self) -> None:
        status = self.path.stat()
        missing = self.length - status.st_blocks * 512
        free = shutil.disk_usage(self.path.parent).free
        if missing > free:
            raise DataError(
                f"decoding {self.dataset.title} at {self.size} px needs {missing / 2**30:,.2f} GiB "
                f"more in {self.path.parent} but only {free / 2**30:,.2f} GiB are free: make room "
                f"or name another folder with --cache-dir or FEDDG_CACHE"
            )

    def _done(self) -> bytearray:
        """Return a byte for each block, 1 if it is done."""
        with suppress(FileNotFoundError), self.journal.open("rb") as file:
            return bytearray(file.read(self.blocks).ljust(self.blocks, b"\0"))
        return bytearray(self.blocks)

    def _images_in(self, done: bytearray) -> int:
        return sum(len(self.rows(block)) for block in range(self.blocks) if done[block])

    def _hashes(self) -> Iterator[str]:
        with self.journal.open("rb") as file:
            file.seek(self.blocks)
            for _ in range(self.images):
                yield file.read(_HASH).hex()

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)

    # ---------------------------------------------------------------------------- decoding

    def _decoded(self, blocks: Sequence[int], processes: int) -> Iterable[int]:
        """Decode blocks and yield each when it is done."""
        if processes == 0:
            processes = min(cores(), len(blocks) * BLOCK // WORTH_A_PROCESS)
        if min(processes, len(blocks)) > 1:
            team = Team.start(partial(Writer, self, threads=False), min(processes, len(blocks)))
            if team is not None:
                return team.share(blocks)
        writer = Writer(self)
        return (writer(block) for block in blocks)


class Writer:
    """Decodes blocks into the unfinished file, with a thread a core or with one."""

    def __init__(self, unfinished: Unfinished, *, threads: bool = True) -> None:
        self.unfinished = unfinished
        self.threads = threads

    def __call__(self, block: int) -> int:
        """Decode a block and note that it is done, in this order also on the disk."""
        unfinished = self.unfinished
        with (
            unfinished.path.open("r+b", buffering=0) as pixels,
            unfinished.journal.open("r+b", buffering=0) as journal,
        ):
            write = partial(self._write_image, pixels.fileno(), journal.fileno())
            for _ in (in_threads if self.threads else map)(write, unfinished.rows(block)):
                pass
            os.fsync(pixels)
            os.fsync(journal)
            _write_at(journal.fileno(), b"\1", block)
        return block

    def _write_image(self, pixels: int, journal: int, index: int) -> None:
        dataset, size = self.unfinished.dataset, self.unfinished.size
        if hashed_by_file(dataset):  # before it is decoded, which then finds it in memory
            content = bytes.fromhex(dataset.content(index))
            _write_at(journal, content, self.unfinished.blocks + _HASH * index)
        image = np.ascontiguousarray(dataset.read(index, size))
        shape = (size, size, dataset.channels)
        if image.shape != shape or image.dtype != np.dtype(dataset.pixels):
            raise PluginError(
                f"{type(dataset).__name__}.read gave {image.dtype} {list(image.shape)} for image "
                f"{index}; expected {dataset.pixels} {list(shape)}"
            )
        _write_at(pixels, image.view(np.uint8).data.cast("B"), index * image.nbytes)


def _write_at(descriptor: int, data: bytes | memoryview, place: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written
