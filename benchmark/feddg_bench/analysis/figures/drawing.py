"""Style and files of all figures: the same numbers give the same bytes.

Series differ first by marker, line style and hatch, so that they can be read in black and white;
the colours are those of Okabe and Ito (2008), which colour-blind readers can distinguish.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from feddg_bench.analysis.sheets import csv_lines
from feddg_bench.common.files import write_whole
from feddg_bench.common.terminal import say
from feddg_bench.data.dataset import drawn_by_us

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (2, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
MOST = len(COLOURS)
"""Maximum number of distinguishable series on one pair of axes."""
PALE = "#b8b8b8"

DPI = 150
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is the same everywhere
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.titlesize": 9,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.title_fontsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "pdf.fonttype": 42,
    "pdf.compression": 9,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}
"""Format of a picture -> metadata left out, since it changes with version or date."""


Key = Iterable[tuple["Artist", str]]
"""Marks of a figure with their names."""
Drawn = tuple["Figure", str, Key]
"""A figure, its caption and its key."""


@dataclass(frozen=True)
class Picture:
    """A figure with its title, caption and key; see `layout`."""

    name: str  # stem of its files
    figure: Figure  # what was drawn; only valid inside `styled`
    numbers: pd.DataFrame | None = None  # the plotted numbers, if they get a file
    notes: tuple[str, ...] = ()  # sentences about what it leaves out
    photos: bool = False  # whether it shows images, which need more than 256 colours

    def save(self, folder: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
        """Write the picture in each format, and CSV if there are numbers; return the paths.

        A PNG holds the figure's texts as alternative text.

        Raises:
            DataError: If a file cannot be written.
        """
        paths = []
        for ending in formats:
            file = io.BytesIO()
            self.figure.savefig(file, format=ending, dpi=DPI, metadata=FORMATS[ending])
            data = file.getvalue()
            paths.append(folder / f"{self.name}.{ending}")
            write_whole(paths[-1], self._with_texts(data) if ending == "png" else data)
        if self.numbers is not None:
            paths.append(folder / f"{self.name}.csv")
            rows = self.numbers.itertuples(index=False, name=None)
            write_whole(paths[-1], csv_lines([*self.numbers], rows).encode())
        return paths

    def _with_texts(self, png: bytes) -> bytes:
        """Return the PNG with a description.

        If it shows no images, it also gets a palette, which makes it a third as large.
        """
        from PIL import Image

        titles = [legend.get_title().get_text() for legend in self.figure.legends]
        said = [self.figure.get_suptitle(), *titles]
        info = drawn_by_us()
        info.add_itxt("Description", ". ".join(" ".join(text.split()) for text in said if text))
        file = io.BytesIO()
        with Image.open(io.BytesIO(png)) as image:
            whole = image.convert("RGB")
            small = whole if self.photos else _with_palette(whole)
            small.save(file, format="PNG", optimize=True, dpi=(DPI, DPI), pnginfo=info)
        return file.getvalue()


def _with_palette(image: Image) -> Image:
    """Return the image in 256 colours; white and those of `COLOURS` stay exact.

    Pillow's octree shifts them by a few of 255 steps; its median cut merges colours of series.
    """
    import numpy as np
    from PIL import Image, ImageColor

    small = image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    palette = np.reshape(small.getpalette() or [], (-1, 3))
    pixels, places = np.asarray(image), np.asarray(small)
    for colour in ("#ffffff", *COLOURS):
        exact = ImageColor.getrgb(colour)
        palette[places[(pixels == exact).all(axis=-1)][:1]] = exact  # all of them have one place
    small.putpalette(palette.ravel().tolist())
    return small


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save in the suite's style, whatever the user's matplotlib settings are."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams
        parameters.update(STYLE)
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure without a window; ``width`` and ``height`` are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)  # type: ignore[union-attr, call-arg]
    return figure


def layout(
    name: str,
    figure: Figure,
    title: str,
    caption: str = "",
    key: Key = (),
    numbers: pd.DataFrame | None = None,
    notes: Iterable[str] = (),
    *,
    photos: bool = False,
) -> Picture:
    """Finish a figure: its title is above, its caption and its key are below.

    The title is one line: parts after a colon that do not fit go to the start of the caption. Other
    arguments are the fields of a `Picture`.
    """
    handles, names = [list(part) for part in zip(*key, strict=True)] or ([], [])
    points = 72 * figure.get_size_inches()[0]
    room = int(0.18 * points)
    while len(title) > room and ": " in title:
        title, _, rest = title.rpartition(": ")
        caption = "\n".join(filter(None, (rest, caption)))
    if len(title) > room:
        caption = "\n".join(filter(None, (title, caption)))
        title = textwrap.shorten(title, room, placeholder=" ...")
    figure.suptitle(title)
    lines = [textwrap.wrap(line, int(0.23 * points)) for line in caption.splitlines()]
    if caption or names:
        widths = [38 + 5 * len(name) for name in names] or [1]  # a mark, its gaps, its letters
        whole = len(widths) if sum(widths) < points else max(1, int(points) // max(widths))
        legend = figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=whole,
            title="\n".join("\n".join(line) for line in lines),
        )
        legend.get_title().set_multialignment("center")
    return Picture(name, figure, numbers, tuple(notes), photos)


def truncated(label: str, start: float) -> str:
    """Return an axis label that says so if the axis of a number from 0 up starts above 0."""
    return f"{label}, truncated axis" if start > 0 else label


def bare(axes: Axes) -> None:
    """Remove ticks and frame from a pair of axes."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def spread_ticks(values: Sequence[float], gap: float) -> list[float]:
    """Return the values, moved so that neighbours are at least ``gap`` apart, in their order.

    Values that are too close form a block centred on their mean, so that none moves further than
    necessary.

    >>> spread_ticks([1.0, 1.0, 5.0], 1.0)
    [0.5, 1.5, 5.0]
    """
    order = sorted(range(len(values)), key=lambda n: (values[n], n))
    blocks: list[list[int]] = []

    def first(block: list[int]) -> float:
        return fmean(values[n] for n in block) - gap * (len(block) - 1) / 2

    for n in order:
        blocks.append([n])
        while len(blocks) > 1 and first(blocks[-1]) < first(blocks[-2]) + gap * len(blocks[-2]):
            block = blocks.pop()
            blocks[-1] += block
    found = [0.0] * len(values)
    for block in blocks:
        for place, n in enumerate(block):
            found[n] = first(block) + gap * place
    return found


def save(
    make: Callable[[], Iterable[Picture | str]], folder: Path, formats: Sequence[str] = ("png",)
) -> None:
    """Draw each picture and write it immediately; print a message if it cannot be drawn."""
    lacking: set[str] = set()
    with styled():
        for made in make():
            if isinstance(made, str):
                say(made)
                continue
            with _glyphs_noted(lacking):
                paths = made.save(folder, formats)
            for note in made.notes:
                say(f"{made.name}: {note}")
            say(f"Wrote {together(paths)}")
    if lacking:
        say(
            f"the figures' font, {STYLE['font.family']}, lacks {''.join(sorted(lacking))}: a box "
            f"stands for each of these characters"
        )


def together(paths: Sequence[Path]) -> str:
    """Return paths that differ only in their endings as a shell writes them.

    >>> together([Path("a/b.png"), Path("a/b.csv")]), together([Path("a/b.tex")])
    ('a/b.{png,csv}', 'a/b.tex')
    """
    endings = ",".join(path.suffix[1:] for path in paths)
    return f"{paths[0].with_suffix('')}.{endings if len(paths) == 1 else f'{{{endings}}}'}"


@contextmanager
def _glyphs_noted(lacking: set[str]) -> Iterator[None]:
    """Add the characters that the font lacks to a set, instead of matplotlib's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for one in caught:
        if glyph := re.match(r"Glyph (\d+) .* missing from", str(one.message)):
            lacking.add(chr(int(glyph[1])))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
