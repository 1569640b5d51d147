"""What figures of trained models share: names, titles, and a grid of images by domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddg_bench.analysis.figures.drawing import PALE, bare, new_figure
from feddg_bench.analysis.figures.training import Trained
from feddg_bench.analysis.tables.titles import dataset_title, domain_title
from feddg_bench.common.files import file_name
from feddg_bench.data.protocols import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")


def title_of(run: Trained) -> str:
    """Return a title that says which experiment a figure is about."""
    s = run.plan.settings
    where = f"{dataset_title(s.dataset)}, {TITLES.get(s.protocol, s.protocol)}"
    return f"{where}, scenario {s.scenario}, recipe {run.plan.recipe}"


def figure_stem(figure: str, runs: Sequence[Trained]) -> str:
    """Return the stem of a figure's files."""
    s = runs[0].plan.settings
    methods = "-".join(run.plan.settings.method for run in runs)
    return file_name(f"{figure}-{s.dataset}-{s.protocol}-{s.scenario}-{methods}")


def pixels(images: Tensor) -> NDArray[np.float32]:
    """Return images [B, 3, H, W] as matplotlib draws them, [B, H, W, 3]."""
    found: NDArray[np.float32] = images.detach().cpu().float().permute(0, 2, 3, 1).numpy()
    return found


def shares(run: Trained, client: str) -> NDArray[np.float64]:
    """Return the share of each training domain in a client's images, [D]."""
    domains = run.federation.domains_of(client)
    counts = np.bincount(domains, minlength=len(run.federation.sources)).astype(np.float64)
    found: NDArray[np.float64] = counts / counts.sum()
    return found


def holding(run: Trained, client: str) -> str:
    """Return what a client mostly holds, such as ``95 % Ink, 5 % Chalk``."""
    found = shares(run, client)
    most = np.argsort(-found, kind="stable")[:2]
    return ", ".join(
        f"{100 * found[d]:.0f} % {domain_title(run.federation.sources[d])}"
        for d in most
        if found[d]
    )


def image_grid(
    heads: Sequence[str],
    domains: Sequence[tuple[str, Sequence[T]]],
    draw: Callable[[T, Sequence[Axes]], None],
    *,
    row_height: float,
) -> Figure:
    """Return a figure with domains down and their images across, each with one column per head.

    ``draw`` fills the axes of one image, one per head; ``row_height`` is in inches.
    """
    many, across = max(len(images) for _, images in domains), len(heads)
    figure = new_figure(0.5 + 0.95 * across * many, 0.6 + row_height * len(domains))
    # Narrow columns between images show which columns belong together.
    widths = ([1.0] * across + [0.12]) * many
    grid = figure.subplots(len(domains), len(widths), squeeze=False, width_ratios=widths)
    for axes in grid.flat:
        bare(axes)
    for line, (domain, images) in zip(grid, domains, strict=True):
        for number, image in enumerate(images):
            start = number * (across + 1)
            draw(image, list(line[start : start + across]))
            for axes in line[start : start + across]:
                edge = axes.spines[:]  # or white images would have none
                edge.set(visible=True, color=PALE, linewidth=0.4)
        line[0].set_ylabel(domain.replace(" (", "\n("), fontsize=7)
    for column, axes in enumerate(grid[0]):
        if column % (across + 1) < across:
            axes.set_title(heads[column % (across + 1)])
    return figure
