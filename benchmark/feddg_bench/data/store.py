"""Images decoded once, into one memory-mapped array that every process of a machine shares.

A store is a file of nothing but pixels, so its length tells whether it is whole, and its name says
all that decides them: data set, version, content, size and `RESIZE_RULE`.
`feddg_bench.data.decoding` writes it under another name and it is renamed when complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import replacing
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.decoding import Unfinished, hashed_by_file, image_bytes

RESIZE_RULE = 1
"""Version of `feddg_bench.data.dataset.read_image`: RGB, squashed, bilinear with antialiasing."""

Progress = Callable[[int, int], None]
"""Called with the number of images done and their total."""


@dataclass(frozen=True)
class Store:
    """The decoded images of a data set, in the order of its records.

    Attributes:
        images: [n, size, size, C] of the data set's ``pixels``, uint8 RGB by default, read only;
            ``images[indices]`` is a copy in memory.
        labels: int64 [n], or float32 [n] for a regression.
        domains: int64 [n], positions in the data set's ``domains``.
        groups: int64 [n], positions in the data set's ``groups``, -1 for none; empty where it has
            no groups.
        paths: n relative names.
        fingerprint: Hash of the data set's contents.
    """

    images: np.memmap[Any, np.dtype[Any]]
    labels: NDArray[np.int64] | NDArray[np.float32]
    domains: NDArray[np.int64]
    paths: tuple[str, ...]
    fingerprint: str
    groups: NDArray[np.int64]


def open_store(
    dataset: DomainDataset,
    size: int,
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    processes: int = 0,
) -> Store:
    """Open the store of ``dataset`` at ``size`` pixels a side, building it if need be.

    Args:
        dataset: What to decode.
        size: Pixels a side.
        cache_dir: Folder of stores.
        progress: Told of images that are decoded.
        processes: That decode; 0 is a core each, if there are images enough.

    Raises:
        DataError: If an image cannot be decoded, or the store cannot be written.
    """
    records = dataset.records()
    shape = (len(records.paths), size, size, dataset.channels)
    length = len(records.paths) * image_bytes(dataset, size)
    stamp = dataset.stamp()
    fingerprint = _noted(_note(dataset, cache_dir, stamp))
    if fingerprint is None and (
        not hashed_by_file(dataset) or any(_stores(dataset, size, cache_dir, length))
    ):  # else the images are hashed while they are decoded, so that each is read once
        fingerprint = known_fingerprint(dataset, cache_dir)
    if fingerprint is None or not _whole(_path(dataset, size, cache_dir, fingerprint), length):
        fingerprint = _build(dataset, size, cache_dir, stamp, progress, processes)
    path = _path(dataset, size, cache_dir, fingerprint)
    images = np.memmap(path, dtype=dataset.pixels, mode="r", shape=shape)
    groups = np.empty(0, dtype=np.int64) if records.groups is None else records.groups
    return Store(images, records.labels, records.domains, records.paths, fingerprint, groups)


def known_fingerprint(dataset: DomainDataset, cache_dir: Path) -> str:
    """Return the data set's fingerprint, read from files only if they changed since last time."""
    note = _note(dataset, cache_dir, dataset.stamp())
    known = _noted(note)
    if known is None:
        known = dataset.fingerprint()
        _write_note(note, known)
    return known


def decoded_sizes(dataset: DomainDataset | type[DomainDataset], cache_dir: Path) -> list[int]:
    """Return the sizes in pixels at which stores of a data set lie in the cache, of any copy."""
    name = f"{dataset.name}-v{dataset.version}-*px-r{RESIZE_RULE}.{_kind(dataset)}"
    found = (cache_dir / "stores").glob(name)
    sizes = (path.name.rsplit("-", 2)[1].removesuffix("px") for path in found)
    return sorted({int(size) for size in sizes})


def _build(
    dataset: DomainDataset,
    size: int,
    cache_dir: Path,
    stamp: str,
    progress: Progress | None,
    processes: int,
) -> str:
    """Decode every image into its store, and return the fingerprint of what was decoded.

    An interrupted build goes on where it stopped, as long as the files have the same stamp.
    """
    total = len(dataset.records().paths)
    length = total * image_bytes(dataset, size)
    # `.unfinished` may neither look like a store nor be taken for one of another copy
    unfinished = Unfinished(dataset, size, _path(dataset, size, cache_dir, stamp, ".unfinished"))

    def wanted() -> bool:
        """Tell whether another process has finished it meanwhile."""
        known = _noted(_note(dataset, cache_dir, stamp))
        return known is None or not _whole(_path(dataset, size, cache_dir, known), length)

    try:
        with unfinished.alone(wanted, progress) as still_wanted:
            if still_wanted:
                _remove_stale(dataset, size, cache_dir, unfinished)
                unfinished.decode(progress, processes)
                fingerprint = unfinished.fingerprint()
                path = _path(dataset, size, cache_dir, fingerprint)
                unfinished.become(path, keep=_whole(path, length))
                _write_note(_note(dataset, cache_dir, stamp), fingerprint)
                unfinished.forget()  # last, as who waits for it looks for the note then
    except OSError as error:
        raise DataError(
            f"cannot write the {length / 2**30:,.2f} GiB of decoded images to "
            f"{cache_dir / 'stores'}: {error.strerror}; make room or name another folder with "
            f"--cache-dir or FEDDG_CACHE"
        ) from error
    return known_fingerprint(dataset, cache_dir)


def _path(
    dataset: DomainDataset, size: int, cache_dir: Path, content: str, suffix: str = ""
) -> Path:
    kind = _kind(dataset)
    name = f"{dataset.name}-v{dataset.version}-{content}-{size}px-r{RESIZE_RULE}.{kind}{suffix}"
    return cache_dir / "stores" / name


def _kind(dataset: DomainDataset | type[DomainDataset]) -> str:
    """Return what a store's name says of its pixels: ``rgb``, or such as ``8xfloat16``."""
    channels, pixels = dataset.channels, dataset.pixels
    return "rgb" if (channels, pixels) == (3, "uint8") else f"{channels}x{pixels}"


def _stores(dataset: DomainDataset, size: int, cache_dir: Path, length: int) -> Iterator[Path]:
    """Yield the whole stores of the data set at a size, of whatever content."""
    pattern = _path(dataset, size, cache_dir, "*")
    return (path for path in pattern.parent.glob(pattern.name) if _whole(path, length))


def _whole(path: Path, length: int) -> bool:
    try:
        return path.stat().st_size == length
    except OSError:
        return False


def _remove_stale(dataset: DomainDataset, size: int, cache_dir: Path, present: Unfinished) -> None:
    """Remove unfinished stores of files that have changed since, unless a process is at it."""
    pattern = _path(dataset, size, cache_dir, "*", ".unfinished")
    for path in pattern.parent.glob(pattern.name):
        if path != present.path:
            Unfinished(dataset, size, path).remove_if_idle()


def _note(dataset: DomainDataset, cache_dir: Path, stamp: str) -> Path:
    return cache_dir / "fingerprints" / f"{dataset.name}-v{dataset.version}-{stamp}"


def _noted(note: Path) -> str | None:
    try:
        return note.read_text() or None
    except OSError:
        return None


def _write_note(note: Path, fingerprint: str) -> None:
    with suppress(OSError), replacing(note) as file:  # without the note we only read files again
        file.write(fingerprint.encode())
