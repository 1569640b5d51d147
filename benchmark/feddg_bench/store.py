"""Images decoded once, into one memory-mapped array that every process of a machine shares.

A store is a file of nothing but pixels, so its length tells whether it is whole, and its name says
all that decides them: data set, version, content, size and `RESIZE_RULE`. It is written under
another name and renamed when complete; processes that build it at once each finish their own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddg_bench.data import DomainDataset
from feddg_bench.errors import DataError
from feddg_bench.files import replacing

RESIZE_RULE = 1
"""Version of `feddg_bench.data.read_image`: RGB, squashed, bilinear with antialiasing."""

BLOCK = 256
"""Images decoded before they are written and progress is told."""

Progress = Callable[[int, int], None]
"""Called with the number of images done and their total."""


@dataclass(frozen=True)
class Store:
    """The decoded images of a data set, in the order of its records.

    Attributes:
        images: uint8 [n, size, size, 3], read only; ``images[indices]`` is a copy in memory.
        labels: int64 [n].
        domains: int64 [n], positions in the data set's ``domains``.
        paths: n relative names.
        fingerprint: Hash of the data set's contents.
    """

    images: np.memmap[Any, np.dtype[np.uint8]]
    labels: NDArray[np.int64]
    domains: NDArray[np.int64]
    paths: tuple[str, ...]
    fingerprint: str


def open_store(
    dataset: DomainDataset, size: int, cache_dir: Path, progress: Progress | None = None
) -> Store:
    """Open the store of ``dataset`` at ``size`` pixels a side, building it if need be.

    Raises:
        DataError: If an image cannot be decoded, or the store cannot be written.
    """
    records = dataset.records()
    fingerprint = known_fingerprint(dataset, cache_dir)
    name = f"{dataset.name}-v{dataset.version}-{fingerprint}-{size}px-r{RESIZE_RULE}.rgb"
    path = cache_dir / "stores" / name
    shape = (len(records.paths), size, size, 3)
    if not path.is_file() or path.stat().st_size != math.prod(shape):
        build(dataset, size, path, progress)
    images = np.memmap(path, dtype=np.uint8, mode="r", shape=shape)
    return Store(images, records.labels, records.domains, records.paths, fingerprint)


def known_fingerprint(dataset: DomainDataset, cache_dir: Path) -> str:
    """Return the data set's fingerprint, read from files only if they changed since last time."""
    note = cache_dir / "fingerprints" / f"{dataset.name}-v{dataset.version}-{dataset.stamp()}"
    with suppress(OSError):
        known = note.read_text()
        if known:
            return known
    fingerprint = dataset.fingerprint()
    with suppress(OSError), replacing(note) as file:  # without the note we only read files again
        file.write(fingerprint.encode())
    return fingerprint


def build(dataset: DomainDataset, size: int, path: Path, progress: Progress | None = None) -> None:
    """Decode every image of ``dataset`` into the file ``path``.

    Raises:
        DataError: If an image cannot be decoded, or the file cannot be written.
    """
    total = len(dataset.records().paths)
    try:
        with replacing(path) as file, ThreadPoolExecutor(os.cpu_count()) as pool:
            for start in range(0, total, BLOCK):
                block = range(start, min(start + BLOCK, total))
                for image in pool.map(lambda index: dataset.read(index, size), block):
                    file.write(np.ascontiguousarray(image).data)
                if progress is not None:
                    progress(block.stop, total)
    except OSError as error:
        raise DataError(
            f"cannot write the {total * size * size * 3 / 1e6:,.0f} MB of decoded images to "
            f"{path.parent}: {error.strerror}; make room or name another folder with --cache-dir "
            f"or FEDDG_CACHE"
        ) from error
