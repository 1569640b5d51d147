"""Signatures of images: a perceptual hash of 64 bits and the mean colour, whatever the file.

The bits say which of the lowest frequencies of the brightness are above their median. Saving an
image again, as JPEG or at another size, flips few of them; between two different pictures, about
half differ.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import plain_file, write_whole

SIDE = 64
"""Side in pixels at which images are compared."""
MOST_BITS = 8
"""Maximum number of bits that may differ after saving a picture again; of 600 images of PACS saved
as JPEG of quality 30 to 90, as WebP, or at 128 to 256 pixels, none had more than 6."""
MOST_COLOUR = 10
"""Maximum difference of the mean of red, green or blue, out of 255; up to 3.9 was observed."""
_MARGIN = 2
"""Bits by which another published picture must be closer than the one of the same name."""
STEP = 4
"""Step in which mean colours are stored."""
MOST_BYTES = 2**28
"""Maximum size of an unpacked file of signatures in bytes."""

# Cosines of the nine lowest frequencies, [9, SIDE], and which of their 9 x 9 products are used: the
# first 8 x 8 without the mean, and one more.
_COSINES = np.cos(np.pi / SIDE * np.arange(9)[:, None] * (np.arange(SIDE) + 0.5))
_CHOSEN = np.array([9 * (i // 8) + i % 8 for i in range(1, 64)] + [8 * 9])


@dataclass(frozen=True)
class Signatures:
    """The signatures of n images."""

    names: tuple[str, ...]  # `domain/class/file` without the file's suffix
    hashes: NDArray[np.uint8]  # uint8 [n, 8], 64 bits each
    colours: NDArray[np.uint8]  # uint8 [n, 3], in steps of `STEP`
    side: int  # pixels of the shorter side of the smallest image, as stored


def signature(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the hash, uint8 [8], and mean colour, uint8 [3], of an RGB image [SIDE, SIDE, 3]."""
    brightness = pixels @ np.array([0.299, 0.587, 0.114])
    frequencies = (_COSINES @ brightness @ _COSINES.T).ravel()[_CHOSEN]
    colour = np.rint(pixels.reshape(-1, 3).mean(axis=0) / STEP)
    return np.packbits(frequencies > np.median(frequencies)), colour.astype(np.uint8)


def save_signatures(path: Path, signatures: Signatures, dataset: str) -> None:
    """Write signatures as a line of JSON and their bytes, compressed by xz.

    Raises:
        DataError: If the file cannot be written.
    """
    about = {"dataset": dataset, "images": len(signatures.names), "side": signatures.side}
    colours = signatures.colours.copy()
    colours[:, [0, 2]] -= colours[:, [1]]  # 0 for grey images, which takes no space
    parts = (
        json.dumps({**about, "names": signatures.names}).encode(),
        b"\n",
        signatures.hashes.tobytes(),
        colours.T.tobytes(),
    )
    write_whole(path, lzma.compress(b"".join(parts), preset=9))


def load_signatures(path: Path, dataset: str) -> Signatures:
    """Read signatures written by `save_signatures`.

    Raises:
        DataError: If it is not such a file, or belongs to another data set.
    """
    plain_file(path)
    try:
        content = lzma.LZMADecompressor().decompress(path.read_bytes(), MOST_BYTES)
        head, _, rest = content.partition(b"\n")
        about = json.loads(head)
        names, side, number = (
            tuple(map(str, about["names"])),
            int(about["side"]),
            len(about["names"]),
        )
        values = np.frombuffer(rest, dtype=np.uint8)
        hashes, colours = values[: 8 * number], values[8 * number :]
        signatures = Signatures(
            names, hashes.reshape(number, 8), colours.reshape(3, number).T.copy(), side
        )
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} holds no signatures ({error}): make them from a clean copy with "
            f"`feddg-bench data sign {dataset}`"
        ) from error
    if about["dataset"] != dataset:
        raise DataError(f"{path} holds signatures of {about['dataset']}, not of {dataset}")
    signatures.colours[:, [0, 2]] += signatures.colours[:, [1]]
    return signatures


@dataclass
class _Comparison:
    """Differences between the images of a copy and the published ones."""

    # Image -> the published picture of another domain or class that it shows.
    moved: dict[int, str] = field(default_factory=dict)
    strange: list[int] = field(default_factory=list)  # images that show no published picture
    # Images that show the published picture in other colours.
    recoloured: list[int] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # published pictures that no image shows


def compare_signatures(copy: Signatures, published: Signatures) -> _Comparison:
    """Compare every image of a copy with the published one of its name, else with the nearest.

    An image that was only renamed within its domain and class counts as the same.
    """
    comparison = _Comparison()
    place = {name: number for number, name in enumerate(published.names)}
    shown: set[int] = set()
    for index, name in enumerate(copy.names):
        own = place.get(name)
        if own is not None:
            differ, gap = _distances(copy, index, published, slice(own, own + 1))
            bits, same_colour = int(differ[0]), gap[0] <= MOST_COLOUR
            if bits <= _MARGIN and same_colour:
                shown.add(own)
                continue
        differ, gap = _distances(copy, index, published, slice(None))
        nearest = int(np.argmin(np.where(gap <= MOST_COLOUR, differ, 64)))
        least = differ[nearest] if gap[nearest] <= MOST_COLOUR else 64
        if own is not None and same_colour and bits <= min(MOST_BITS, least + _MARGIN):
            shown.add(own)
        elif own is not None and bits <= _MARGIN:
            shown.add(own)
            comparison.recoloured.append(index)
        elif least <= MOST_BITS:
            shown.add(nearest)
            if _folder(published.names[nearest]) != _folder(name):
                comparison.moved[index] = published.names[nearest]
        else:
            comparison.strange.append(index)
    comparison.absent = [name for number, name in enumerate(published.names) if number not in shown]
    return comparison


def _distances(
    copy: Signatures, index: int, published: Signatures, rows: slice
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of different bits and the largest colour difference to published images."""
    bits = np.unpackbits(published.hashes[rows] ^ copy.hashes[index], axis=1).sum(axis=1)
    colours = published.colours[rows].astype(np.int64) - copy.colours[index]
    return bits.astype(np.int64), np.abs(colours).max(axis=1) * STEP


def _folder(name: str) -> str:
    return name.rpartition("/")[0]
