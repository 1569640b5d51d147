"""Digits4: 1,797 handwritten digits in four visual domains, embedded, for first runs and tests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.common.streams import derive_seed
from feddg_bench.data.dataset import DomainDataset, Listing, square
from feddg_datasets.shared.digits import DIGIT_PROMPTS, DIGITS

SIDE = 32
CELLS = 8
"""Side of scikit-learn's digits."""

Array = NDArray[np.float64]
"""A digit [8, 8], a plane [32, 32] or a picture [32, 32, 3], in [0, 1] unless stated otherwise."""


class Digits4(DomainDataset):
    """The digits of scikit-learn (Alpaydin and Kaynak, UCI 1998), 8 x 8 grey, drawn in four styles.

    1,797 images of 32 x 32 pixels, RGB, ten classes; CC BY 4.0. Every digit is in one domain, and
    every domain has a quarter of each class. Ink is small slanted writing in uneven ink on stained
    paper; poster, a large flat shape on a pattern that is lighter or darker; outline, a pencil line
    around the stroke, on ruled paper; chalk, soft and patchy pastel chalk on a dark board.

    Every machine draws the same pixels: each digit has its own uniform stream of PCG64, and IEEE
    754 defines all operations to the last bit; their order is fixed.
    """

    name = "digits4"
    title = "Digits4"
    domains = ("ink", "poster", "outline", "chalk")
    letters: ClassVar[Mapping[str, str]] = {"ink": "i", "poster": "p", "outline": "o", "chalk": "c"}
    classes = DIGITS
    prompts = DIGIT_PROMPTS
    licence = "CC BY 4.0"
    source = "it comes with scikit-learn, as sklearn.datasets.load_digits"
    no_download = "it comes with scikit-learn and is here already"
    default_recipe = "quick"
    synthetic = True

    def scan(self) -> Listing:
        """List the digits in scikit-learn's order."""
        _, labels = self._digits
        domains = deal_classes(labels, len(self.domains))
        paths = tuple(
            f"{self.domains[domain]}/{label}/{index:04d}.png"
            for index, (domain, label) in enumerate(zip(domains, labels, strict=True))
        )
        return Listing(paths, labels, domains)

    def fingerprint(self) -> str:
        """Return a hash over scikit-learn's digits and `version`."""
        digits, labels = self._digits
        digest = hashlib.blake2b(f"digits4 v{self.version}".encode(), digest_size=16)
        digest.update(digits.astype(np.uint8).tobytes())
        digest.update(labels.astype(np.uint8).tobytes())
        return digest.hexdigest()

    def stamp(self) -> str:
        """Return the fingerprint: there are no files to read."""
        return self.fingerprint()

    def read(self, index: int, size: int) -> NDArray[np.uint8]:
        """Draw digit ``index`` at 32 pixels, then resize it."""
        from PIL import Image

        digits, _ = self._digits
        draw = (draw_ink, draw_poster, draw_outline, draw_chalk)[self.records().domains[index]]
        stream = np.random.PCG64(derive_seed(0, "digits4", index))
        picture = draw(digits[index] / 16, np.random.Generator(stream))
        pixels = np.rint(picture.clip(0, 1) * 255).astype(np.uint8)
        return square(Image.fromarray(pixels), size)

    @cached_property
    def _digits(self) -> tuple[Array, NDArray[np.int64]]:
        """The digits [1797, 8, 8], whole numbers from 0 to 16, and their labels [1797]."""
        package = find_spec("sklearn")
        if package is None or package.origin is None:
            raise DataError("Digits4 needs scikit-learn: pip install scikit-learn")
        # Read only the file: importing scikit-learn takes half a second.
        path = Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
        table = np.loadtxt(path, delimiter=",")
        return table[:, :-1].reshape(-1, CELLS, CELLS), table[:, -1].astype(np.int64)


def deal_classes(labels: NDArray[np.int64], num_domains: int) -> NDArray[np.int64]:
    """Deal shuffled images, class by class, to domains in turn, independently of the run's seed.

    Returns:
        int64 [n]: domains, whose sizes in all and in every class differ by at most one.
    """
    keys = np.random.Generator(np.random.PCG64(derive_seed(0, "digits4"))).random(len(labels))
    domains = np.empty(len(labels), dtype=np.int64)
    domains[np.lexsort((keys, labels))] = np.arange(len(labels)) % num_domains
    return domains


# ---------------------------------------------------------------------------- four domains


def draw_ink(digit: Array, rng: np.random.Generator) -> Array:
    """Small slanted writing in blue, black or brown ink that fades, on stained paper."""
    scale, slant = 3 + 0.2 * rng.random(), 0.2 + 0.15 * rng.random()
    ink = enlarge(digit, scale, slant, shift=2 * rng.random(2) - 1)
    stains, grain = clouds(4, rng), rng.random((SIDE, SIDE))
    paper = np.array([0.96, 0.91, 0.79]) * (1 - 0.18 * stains)[..., None] - 0.04 * grain[..., None]
    inks = np.array([[0.10, 0.12, 0.34], [0.12, 0.12, 0.14], [0.36, 0.18, 0.10]])
    colour = inks[int(3 * rng.random())] + 0.08 * rng.random(3)
    return paint(paper, colour, stroke(ink) * (1 - 0.4 * clouds(5, rng)))


def draw_poster(digit: Array, rng: np.random.Generator) -> Array:
    """A large flat shape in the opposite hue of the two-coloured pattern behind it."""
    hue, shape_is_dark = rng.random(), rng.random() < 0.5
    behind, other, shape = (0.74, 0.56, 0.24) if shape_is_dark else (0.32, 0.50, 0.90)
    second_hue = hue + 0.08 + 0.2 * rng.random()
    tiles = pattern(kind=int(4 * rng.random()), period=4 + int(4 * rng.random()), rng=rng)
    wall = np.broadcast_to(colour_of(hue, behind, 0.3), (SIDE, SIDE, 3))
    wall = paint(wall, colour_of(second_hue, other, 0.35), tiles)
    mask = stroke(enlarge(digit, 3.8), gain=7)
    return paint(wall, colour_of(hue + 0.5, shape, 0.35), mask)


def draw_outline(digit: Array, rng: np.random.Generator) -> Array:
    """A grey pencil line, about 2 pixels wide, around the stroke, on paper with blue rules."""
    paper = np.array([0.93, 0.96, 0.99]) * (1 - 0.05 * clouds(3, rng))[..., None]
    rows = (np.arange(SIDE) + int(6 * rng.random())) % 6 == 0
    rules = np.broadcast_to(0.8 * rows[:, None], (SIDE, SIDE))
    paper = paint(paper, np.array([0.62, 0.76, 0.90]), rules)
    ink = enlarge(digit, 3.5)
    padded = np.pad(ink, 1, mode="edge")
    down = (padded[2:, 1:-1] - padded[:-2, 1:-1]) / 2
    right = (padded[1:-1, 2:] - padded[1:-1, :-2]) / 2
    distance = np.abs(ink - 0.44) / (np.sqrt(down * down + right * right) + 0.02)  # in pixels
    line = (1.5 - distance).clip(0, 1) * (0.75 + 0.25 * clouds(8, rng))
    return paint(paper, 0.18 + 0.12 * rng.random() + np.array([0, 0, 0.03]), line)


def draw_chalk(digit: Array, rng: np.random.Generator) -> Array:
    """A blurred, patchy stroke of white or pastel chalk on a smeared dark board."""
    boards = np.array([[0.13, 0.25, 0.20], [0.15, 0.18, 0.24], [0.14, 0.14, 0.15]])
    board = np.broadcast_to(boards[int(3 * rng.random())], (SIDE, SIDE, 3))
    smears = clouds(4, rng)
    board = paint(board, np.array([0.60, 0.63, 0.60]), 0.3 * smears * smears)
    chalks = np.array(
        [[0.95, 0.95, 0.92], [0.97, 0.90, 0.62], [0.95, 0.75, 0.78], [0.72, 0.86, 0.96]]
    )
    chalk = chalks[int(4 * rng.random())]
    patches = (0.5 + 0.5 * clouds(12, rng)) * (0.65 + 0.35 * rng.random((SIDE, SIDE)))
    return paint(board, chalk, blur(stroke(enlarge(digit, 3.5, slant=-0.1), gain=4)) * patches)


# -------------------------------------------------------------------------- drawing tools


def enlarge(
    digit: Array, scale: float, slant: float = 0.0, shift: Array | tuple[float, float] = (0.0, 0.0)
) -> Array:
    """Return the digit's ink as a smooth plane [32, 32], about 0 to 1.

    Args:
        digit: [8, 8].
        scale: Pixels per cell.
        slant: Cells to the right per cell upwards.
        shift: Pixels down and to the right.
    """
    centre, middle = SIDE / 2 - 0.5, CELLS / 2 - 0.5
    rows = (np.arange(SIDE) - centre - shift[0]) / scale + middle
    columns = (np.arange(SIDE) - centre - shift[1]) / scale + middle
    columns = columns[None, :] + slant * (rows[:, None] - middle)
    tall = np.zeros((SIDE, CELLS))
    for cell in range(CELLS):
        tall += spline(rows - cell)[:, None] * digit[cell]
    plane = np.zeros((SIDE, SIDE))
    for cell in range(CELLS):
        plane += spline(columns - cell) * tall[:, cell, None]
    return plane


def spline(offset: Array) -> Array:
    """Interpolation weight at a distance in cells: mixes Catmull-Rom and a quadratic B-spline."""
    d = np.abs(offset)
    sharp = np.where(d < 1, (1.5 * d - 2.5) * d * d + 1, ((2.5 - 0.5 * d) * d - 4) * d + 2)
    soft = np.where(d < 0.5, 0.75 - d * d, 0.5 * (1.5 - d) * (1.5 - d))
    return 0.6 * np.where(d < 2, sharp, 0) + 0.4 * np.where(d < 1.5, soft, 0)


def clouds(cells: int, rng: np.random.Generator) -> Array:
    """Return smooth noise [32, 32] in [0, 1]: uniform values on a grid, linear between them."""
    grid = rng.random((cells, cells))
    position = ((np.arange(SIDE) + 0.5) * cells / SIDE - 0.5).clip(0, cells - 1)
    first = position.astype(np.int64).clip(0, cells - 2)
    weight = position - first
    tall = grid[first] + (grid[first + 1] - grid[first]) * weight[:, None]
    plane: Array = tall[:, first] + (tall[:, first + 1] - tall[:, first]) * weight
    return plane


def pattern(kind: int, period: int, rng: np.random.Generator) -> Array:
    """Return a plane of 0 and 1: diagonal stripes, checks, vertical stripes or dots."""
    line = np.arange(SIDE) + int(period * rng.random())
    rows, columns = np.broadcast_arrays(line[:, None], line)
    pitch = period + 2
    across = 2 * (line % pitch) - pitch + 1  # twice the distance from the middle of a dot
    dots = 9 * ((across * across)[:, None] + across * across) < 4 * period * period
    tiles = (
        (rows + columns) // period,
        rows // period + columns // period,
        columns // period,
        dots.astype(np.int64),
    )
    return np.where(tiles[kind] % 2 == 1, 1.0, 0.0)


def stroke(ink: Array, gain: float = 5) -> Array:
    """Return the mask of the ink, from 0 to 1; a larger ``gain`` makes the edges steeper."""
    return ((ink - 0.5) * gain + 0.5).clip(0, 1)


def blur(plane: Array) -> Array:
    """Average with the neighbours, weights 1, 2, 1 along both axes."""
    padded = np.pad(plane, 1, mode="edge")
    tall = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    return (tall[:, :-2] + 2 * tall[:, 1:-1] + tall[:, 2:]) / 4


def paint(picture: Array, colour: Array, cover: Array) -> Array:
    """Lay a colour [3] over a picture, with the plane ``cover`` as opacity."""
    return picture + (colour - picture) * cover[..., None]


def colour_of(hue: float, lightness: float, spread: float) -> Array:
    """Return RGB [3] of a hue in turns; channels are within half of ``spread`` of the lightness."""
    wheel = np.abs((6 * hue + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1
    return lightness + spread * (wheel.clip(0, 1) - 0.5)
