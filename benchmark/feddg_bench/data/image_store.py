"""Images decoded once, into a memory-mapped array shared by all processes of a machine.

A store's name contains all that determines its pixels: data set, version, content, size,
`RESIZE_RULE`, and the settings of `feddg_bench.data.dataset.DECODING` if not at their defaults.
`feddg_bench.data.decoding` writes it under another name and it is renamed when complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError, in_a_line
from feddg_bench.common.files import replacing
from feddg_bench.common.parallel import in_threads
from feddg_bench.common.titles import counted
from feddg_bench.data.dataset import (
    LARGE,
    DomainDataset,
    FileFacts,
    UnreadableError,
    decodes_files,
    image_facts,
)
from feddg_bench.data.decoding import Layout, Unfinished, hashed_by_file

logger = logging.getLogger(__name__)

RESIZE_RULE = 1
"""Version of `feddg_bench.data.dataset.read_image`: RGB, squashed, bilinear with antialiasing."""
CHECKED_BYTES = 4 * 2**30
"""Approximate number of bytes of pixels compared with their checksums when a store is opened; in a
larger store, these are evenly spaced blocks. ``data check`` compares all."""

_SKIPPED = "+skip"

OnDecoded = Callable[[int, int], None]
"""Called with the number of images done and their total."""


@dataclass(frozen=True)
class Store:
    """The decoded images of a data set, in the order of its records."""

    # [n, size, size, C] of the data set's `pixels`, uint8 RGB by default, read only;
    # `images[indices]` is a copy in memory.
    images: np.memmap[Any, np.dtype[Any]]
    fingerprint: str  # hash of the data set's contents
    # Indices of the images that cannot be decoded and are 0, with ``data.skip_unreadable``.
    unreadable: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def path(self) -> Path:
        """The file."""
        return Path(str(self.images.filename))


def open_store(
    dataset: DomainDataset,
    size: int,
    cache_dir: Path,
    progress: OnDecoded | None = None,
    *,
    processes: int = 0,
) -> Store:
    """Open the store of ``dataset`` at ``size`` pixels a side, building it if necessary.

    ``processes`` is the number that decode; 0 means one per core, or fewer for few images.

    Raises:
        DataError: If an image cannot be decoded, the store cannot be written, or its pixels have
            changed since they were written.
    """
    layout = Layout.of(dataset, size)
    stamp = dataset.stamp()
    fingerprint = _noted(_note(dataset, cache_dir, stamp))
    if fingerprint is None and (
        not hashed_by_file(dataset) or any(_stores(dataset, size, cache_dir))
    ):  # else the images are hashed while they are decoded, so that each is read once
        fingerprint = known_fingerprint(dataset, cache_dir)
    if fingerprint is None or not _whole(_path(dataset, size, cache_dir, fingerprint), layout):
        fingerprint = _build(dataset, size, cache_dir, stamp, progress, processes)
    path = _path(dataset, size, cache_dir, fingerprint)
    step = -(-layout.sums_at // CHECKED_BYTES)
    check_store(path, layout, range(0, layout.blocks, step))
    shape = (layout.images, *layout.shape)
    images = np.memmap(path, dtype=dataset.pixels, mode="r", shape=shape)
    return Store(images, fingerprint, layout.unreadable(path))


def check_store(path: Path, layout: Layout, blocks: range | None = None) -> None:
    """Compare a store's blocks, by default all, with their checksums.

    Raises:
        DataError: If one differs.
    """
    try:
        faults = layout.faults(path, range(layout.blocks) if blocks is None else blocks)
    except OSError as error:
        raise DataError(f"cannot read the decoded images {path}: {error.strerror}") from error
    if faults:
        rows = layout.rows(faults[0])
        raise DataError(
            f"the decoded images {path} have been changed since they were written, the first ones "
            f"between image {rows.start} and {rows.stop - 1}: delete that file, and the same "
            f"command decodes them again; check the disk"
        )


def check_stores(dataset: DomainDataset, cache_dir: Path) -> Iterator[str]:
    """Yield the faults of a data set's stores, of any copy with the same number of images."""
    for size in decoded_sizes(dataset, cache_dir):
        for path in _stores(dataset, size, cache_dir):
            try:
                check_store(path, _layout(dataset, size, path))
            except DataError as error:
                yield str(error)


def known_fingerprint(dataset: DomainDataset, cache_dir: Path) -> str:
    """Return the data set's fingerprint; files are read only if they changed since last time.

    Raises:
        DataError: If they cannot be read.
    """
    note = _note(dataset, cache_dir, dataset.stamp())
    known = _noted(note)
    if known is None:
        try:
            known = dataset.fingerprint()
        except OSError as error:
            raise DataError(
                f"cannot read the contents of {dataset.title}: {in_a_line(error)}"
            ) from error
        _write_note(note, known)
    return known


def decoded_sizes(dataset: DomainDataset | type[DomainDataset], cache_dir: Path) -> list[int]:
    """Return the sizes in pixels of the stores in the cache, of any copy of a data set."""
    name = f"{dataset.name}-v{dataset.version}-*px-r{RESIZE_RULE}*.{_kind(dataset)}"
    stores = (cache_dir / "stores").glob(name)
    sizes = (path.name.rsplit("-", 2)[1].removesuffix("px") for path in stores)
    return sorted({int(size) for size in sizes})


def _build(
    dataset: DomainDataset,
    size: int,
    cache_dir: Path,
    stamp: str,
    progress: OnDecoded | None,
    processes: int,
) -> str:
    """Decode every image into its store, and return the fingerprint of the images.

    An interrupted build resumes where it stopped, as long as the files have the same stamp.
    """
    layout, note = Layout.of(dataset, size), _note(dataset, cache_dir, stamp)
    # `.unfinished` must neither look like a store nor match that of another copy
    unfinished = Unfinished(dataset, size, _path(dataset, size, cache_dir, stamp, ".unfinished"))
    try:
        with unfinished.alone(progress):
            known = _noted(note)  # perhaps written by another process meanwhile
            if known is None or not _whole(_path(dataset, size, cache_dir, known), layout):
                _tidy(dataset, size, cache_dir, unfinished.path)
                unfinished.decode(progress, processes)
                _say_ignored(dataset)
                fingerprint = unfinished.fingerprint()
                unfinished.become(_path(dataset, size, cache_dir, fingerprint))
                _write_note(note, fingerprint)
    except OSError as error:
        raise DataError(
            f"cannot write the {layout.length / 2**30:,.2f} GiB of decoded images to "
            f"{cache_dir / 'stores'}: {error.strerror}; make room or name another folder with "
            f"--cache-dir or FEDDG_CACHE"
        ) from error
    return known_fingerprint(dataset, cache_dir)


def _say_ignored(dataset: DomainDataset) -> None:
    """Tell if decoding a user's images ignores transparency, orientation or most of the pixels."""
    if not (dataset.identity and decodes_files(dataset)):
        return

    def look(index: int) -> FileFacts:
        try:
            return image_facts(dataset.file(index))
        except UnreadableError:  # it is skipped
            return FileFacts(0)

    facts = list(in_threads(look, range(len(dataset.records().paths))))
    clear, turned = sum(f.transparent for f in facts), sum(f.turned for f in facts)
    if clear and dataset.background == "black":
        logger.warning(
            f"transparent pixels of {counted(clear, 'image')} were decoded as the colour below, "
            f"mostly black: data.background=white composites them onto white"
        )
    if large := sum(f.reduced for f in facts):
        logger.warning(
            f"{counted(large, 'image')} above {LARGE // 10**6} megapixels: decoded at a reduced "
            f"scale"
        )
    if turned and not dataset.exif:
        logger.warning(
            f"EXIF data that turn {counted(turned, 'image')} were ignored: data.exif=true follows "
            f"them"
        )


def _path(
    dataset: DomainDataset,
    size: int,
    cache_dir: Path,
    content: str,
    suffix: str = "",
    rule: str | None = None,
) -> Path:
    kind = _kind(dataset)
    rule = decoding_rule(dataset) if rule is None else rule
    name = f"{dataset.name}-v{dataset.version}-{content}-{size}px-r{RESIZE_RULE}{rule}.{kind}"
    return cache_dir / "stores" / f"{name}{suffix}"


def decoding_rule(dataset: DomainDataset) -> str:
    """Return the settings of `DECODING` that are not at their defaults, for names of files."""
    rule = "+white" * (dataset.background == "white") + "+exif" * dataset.exif
    return rule + _SKIPPED * dataset.skip_unreadable


def _kind(dataset: DomainDataset | type[DomainDataset]) -> str:
    """Return the pixel format in a store's name: ``rgb``, or for example ``8xfloat16``."""
    channels, pixels = dataset.channels, dataset.pixels
    return "rgb" if (channels, pixels) == (3, "uint8") else f"{channels}x{pixels}"


def _stores(dataset: DomainDataset, size: int, cache_dir: Path) -> list[Path]:
    """Return the complete stores of the data set at a size, whatever their content."""
    pattern = _path(dataset, size, cache_dir, "*", rule="*")
    found = pattern.parent.glob(pattern.name)
    return [path for path in found if _whole(path, _layout(dataset, size, path))]


def _layout(dataset: DomainDataset, size: int, path: Path) -> Layout:
    return replace(Layout.of(dataset, size), flagged=_SKIPPED in path.name)


def _whole(path: Path, layout: Layout) -> bool:
    try:
        return path.stat().st_size == layout.length
    except OSError:
        return False


def _tidy(dataset: DomainDataset, size: int, cache_dir: Path, present: Path) -> None:
    """Remove leftovers of killed processes, unless another process is resuming them."""
    pattern = _path(dataset, size, cache_dir, "*", ".unfinished")
    for lock in pattern.parent.glob(f"{pattern.name}.lock"):
        if lock.with_suffix("") != present:
            Unfinished(dataset, size, lock.with_suffix("")).remove_if_idle()
    for note in (cache_dir / "fingerprints").glob("*.part"):
        note.unlink(missing_ok=True)  # a process that is writing it only reads its files again


def _note(dataset: DomainDataset, cache_dir: Path, stamp: str) -> Path:
    return cache_dir / "fingerprints" / f"{dataset.name}-v{dataset.version}-{stamp}"


def _noted(note: Path) -> str | None:
    try:
        return note.read_text(encoding="ascii") or None
    except (OSError, UnicodeDecodeError):
        return None


def _write_note(note: Path, fingerprint: str) -> None:
    with suppress(OSError), replacing(note) as file:  # without the note, files are read again
        file.write(fingerprint.encode())
