"""Handwritten: the digits of four public collections, each written and scanned in its own way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from feddg_bench.common.errors import DataError
from feddg_bench.data.fetch.mirrors import Download
from feddg_datasets.shared.arrays import (
    MNIST_DOWNLOADS,
    MNIST_LAYOUTS,
    MNIST_NEEDED,
    ArrayDataset,
    Part,
    read_mnist,
)
from feddg_datasets.shared.digits import DIGIT_PROMPTS, DIGITS

UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"


class Table(NamedTuple):
    """One of UCI's files: an image in each row, its pixels first."""

    folder: str
    shape: tuple[int, int]
    highest: int  # value of a pixel
    label_columns: int  # one label, one column for each digit, or none: equal parts in order
    digest: str  # SHA-256 of the images, scaled to 255, and their labels


TABLES = {
    "optdigits.tra": Table(
        "optdigits",
        (8, 8),
        16,
        1,
        "4e5e8c1796b129fb140cbea4f6a9e7d5d55e6392f3ca99af98bcfb8a51576cb9",
    ),
    "optdigits.tes": Table(
        "optdigits",
        (8, 8),
        16,
        1,
        "a19cb3d96bba7deace8ee5a513a6eb7bad0403d528f00bf4d351b6a7a55baa91",
    ),
    "semeion.data": Table(
        "semeion",
        (16, 16),
        1,
        10,
        "8e0ce9435c3005eed03c83867f1426977adfa0e73a6c1d2faf83a0a37e19516c",
    ),
    "mfeat-pix": Table(
        "mfeat", (16, 15), 6, 0, "a373a0e4877778dd504ffdd832654f84b759a1658f2f51b370295928cca82ce8"
    ),
}
FIRST = 5_000
"""Images of MNIST in use: without a limit, they would be most of all images."""


def read_digits(name: str, path: Path) -> Part:
    """Read a table of UCI, with one image in each row.

    Args:
        name: Its name in `TABLES`, by which the format is known.
        path: The file.

    Raises:
        DataError: If the file is unreadable or holds something else.
    """
    table = TABLES[name]
    pixels = math.prod(table.shape)
    columns = pixels + table.label_columns
    try:
        lines = path.read_text().replace(",", " ").split("\n")
        rows = np.loadtxt(lines, ndmin=2) if any(lines) else np.full((1, columns), np.nan)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path} ({error}): get the file again") from error
    whole = rows.shape[1] == columns and (rows == np.abs(np.rint(rows))).all()
    values, rest = rows[:, :pixels], rows[:, pixels:]
    labels = np.arange(len(rows)) * 10.0 // len(rows)
    if table.label_columns:
        labels = rest @ np.arange(10) if table.label_columns == 10 else rest[:, -1]
    if not whole or values.max() > table.highest or labels.max() > 9:
        raise DataError(
            f"{path} is not UCI's {name}: expected {columns} whole numbers a line, pixels from 0 "
            f"to {table.highest}; get the file again"
        )
    images = np.rint(values * (255 / table.highest)).astype(np.uint8)
    return Part(images.reshape(-1, *table.shape), labels.astype(np.int64))


def decoded(name: str, path: Path) -> bytes:
    """Return the images and labels of a table (`read_digits`) as bytes."""
    part = read_digits(name, path)
    return part.images.tobytes() + part.labels.astype(np.uint8).tobytes()


class Handwritten(ArrayDataset):
    """Handwritten digits of four collections, 14,213 grey images, bright on dark.

    The collections are mnist, the first 5,000 training images of MNIST (LeCun et al., 1998), 28 x
    28 pixels with a wide margin; optdigits, Optical Recognition of Handwritten Digits (Alpaydin and
    Kaynak, UCI 1998), 5,620 images of 8 x 8 pixels with 17 levels, training part first; semeion,
    Semeion Handwritten Digit (Buscema, UCI 1994), 1,593 binary images of 16 x 16; and mfeat, pixel
    averages of Multiple Features (Duin, UCI 1998), 2,000 images of 15 x 16 with 7 levels, of which
    six repeat others.

    The test part of optdigits contains the 1,797 digits that Digits4 draws: results on these two
    data sets are not independent. Other copies number classes otherwise: on OpenML, class k of
    mfeat is digit k - 1, and classes of semeion are in order of appearance.
    """

    name = "handwritten"
    title = "Handwritten"
    domains = ("mnist", "optdigits", "semeion", "mfeat")
    letters: ClassVar[Mapping[str, str]] = {
        "mnist": "m",
        "optdigits": "o",
        "semeion": "s",
        "mfeat": "f",
    }
    classes = DIGITS
    prompts = DIGIT_PROMPTS
    licence = "CC BY-SA 3.0 (MNIST), CC BY 4.0 (the others)"
    source = (
        f"{UCI}/DIR/FILE, where DIR/FILE are optdigits/optdigits.tra, optdigits/optdigits.tes, "
        f"semeion/semeion.data and mfeat/mfeat-pix, and MNIST's train-images and train-labels"
    )
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "mnist": (479, 563, 488, 493, 535, 434, 501, 550, 462, 495),
        "optdigits": (554, 571, 557, 572, 568, 558, 558, 566, 554, 562),
        "semeion": (161, 162, 159, 159, 161, 159, 161, 158, 155, 158),
        "mfeat": (200,) * 10,
    }
    archive_bytes = 14_822_041
    duplicates = 6
    needed: ClassVar = {**dict(list(MNIST_NEEDED.items())[:2]), **{name: [name] for name in TABLES}}
    layouts = (*MNIST_LAYOUTS, "handwritten", "optdigits", "semeion", "mfeat")
    downloads = (
        *MNIST_DOWNLOADS[:2],
        *(
            Download(
                name,
                (f"{UCI}/{table.folder}",),
                f"sha256:{table.digest}",
                content=partial(decoded, name),
            )
            for name, table in TABLES.items()
        ),
    )
    default_recipe = "handwritten"

    def load(self) -> Iterator[Part]:
        """Read the collections in the order of `domains`."""
        images, labels, *tables = self.files.values()
        yield read_mnist(images, labels).first(FIRST)
        training, test, semeion, mfeat = map(read_digits, TABLES, tables)
        yield training.with_more(test)
        yield semeion
        yield mfeat
