"""Images of every domain as they are, and as methods restyle them for training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from feddg_bench.figures.drawing import Picture, new_figure


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
    many = max(len(images) for _, images in domains)
    across = len(methods) + 1
    figure = new_figure(0.5 + 0.92 * across * many, 0.6 + 1.0 * len(domains))
    grid = figure.subplots(len(domains), across * many, squeeze=False)
    for line, (domain, images) in zip(grid, domains, strict=True):
        for axes in line:
            axes.set_xticks([])
            axes.set_yticks([])
        for number, versions in enumerate(images):
            for axes, version in zip(line[number * across :], versions, strict=False):
                axes.imshow(np.clip(version, 0, 1), interpolation="nearest")
        for axes in line[len(images) * across :]:
            axes.set_axis_off()
        line[0].set_ylabel(domain.replace(" (", "\n("), fontsize=7)
    for axes, said in zip(grid[0], ("image", *methods) * many, strict=True):
        axes.set_title(said)
    figure.suptitle(title)
    return Picture(name, figure, photos=True)
