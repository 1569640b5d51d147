"""Images of every domain beside what methods make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.analysis.figures.drawing import PALE, Picture, bare, entitle, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")


def image_grid(
    heads: Sequence[str],
    domains: Sequence[tuple[str, Sequence[T]]],
    draw: Callable[[T, Sequence[Axes]], None],
    *,
    row_height: float,
) -> Figure:
    """Return a figure with domains down and their images across, several columns for each.

    Args:
        heads: Of the columns of one image.
        domains: Name and images of each.
        draw: Fills the axes of one image, one for each head.
        row_height: Inches.
    """
    many, across = max(len(images) for _, images in domains), len(heads)
    figure = new_figure(0.5 + 0.95 * across * many, 0.6 + row_height * len(domains))
    # A narrow column between images, so that one sees which columns belong together.
    widths = ([1.0] * across + [0.12]) * many
    grid = figure.subplots(len(domains), len(widths), squeeze=False, width_ratios=widths)
    for axes in grid.flat:
        bare(axes)
    for line, (domain, images) in zip(grid, domains, strict=True):
        for number, image in enumerate(images):
            start = number * (across + 1)
            draw(image, list(line[start : start + across]))
            for axes in line[start : start + across]:
                for side in axes.spines.values():  # or white images would have no edge
                    side.set(visible=True, color=PALE, linewidth=0.4)
        line[0].set_ylabel(domain.replace(" (", "\n("), fontsize=7)
    for column, axes in enumerate(grid[0]):
        if column % (across + 1) < across:
            axes.set_title(heads[column % (across + 1)])
    return figure


def draw_styles(
    name: str,
    title: str,
    methods: Sequence[str],
    domains: Sequence[tuple[str, Sequence[Sequence[NDArray[np.float32]]]]],
) -> Picture:
    """Draw images side by side.

    Args:
        name: Stem of the files.
        title: Above all.
        methods: Heads of the columns after the first.
        domains: Name, and for each image what it is and what each method makes of it, (H, W, 3)
            in [0, 1] each.
    """

    def draw(versions: Sequence[NDArray[np.float32]], line: Sequence[Axes]) -> None:
        for axes, version in zip(line, versions, strict=True):
            axes.imshow(np.clip(version, 0, 1), interpolation="nearest")

    figure = image_grid(("image", *methods), domains, draw, row_height=0.98)
    entitle(figure, title)
    return Picture(name, figure, photos=True)
