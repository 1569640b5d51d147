"""Heat maps of partitions: who holds how many images of each domain, or of each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from feddg_bench.analysis.figures.drawing import Picture, Sheet, entitle, new_figure

By = Literal["domain", "label"]
FEW = 24
"""Clients up to which each cell says its number."""
MANY = 40
"""Rows beyond which they are not named one by one."""


@dataclass(frozen=True)
class Spread:
    """A partition that is drawn.

    Attributes:
        label: What sets it apart, such as ``lambda = 0.1``.
        counts: Images by row (domain or class) and client, int64 [R, N].
    """

    label: str
    counts: NDArray[np.int64]


def heat_maps(
    name: str, title: str, rows: Sequence[str], spreads: Sequence[Spread], by: By
) -> Picture:
    """Draw partitions one under the other, all on one scale of greys."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    most = max(int(spread.counts.max()) for spread in spreads)
    clients = max(spread.counts.shape[1] for spread in spreads)
    named = len(rows) <= MANY
    height = max(0.5, (0.19 if named else 0.04) * len(rows))
    figure = new_figure(7.2, 0.9 + (height + 0.35) * len(spreads))
    grid = figure.subplots(len(spreads), 1, sharex=True, squeeze=False)[:, 0]
    scale = Normalize(0, most)
    for axes, spread in zip(grid, spreads, strict=True):
        n = spread.counts.shape[1]
        axes.pcolormesh(
            np.arange(n + 1) - 0.5,
            np.arange(len(rows) + 1) - 0.5,
            spread.counts,
            cmap="Greys",
            norm=scale,
            edgecolors="#d0d0d0" if clients <= 100 else "none",
            linewidth=0.3,
            rasterized=clients * len(rows) > 2000,  # else the PDF holds a path for each cell
        )
        if clients <= FEW:
            _say_numbers(axes, spread.counts, most)
        axes.invert_yaxis()
        axes.set_yticks(range(len(rows)) if named else [], labels=rows if named else [])
        axes.tick_params(length=0)
        pure = np.mean((spread.counts > 0).sum(axis=0) == 1)
        kind = {"domain": "domain", "label": "class"}[by]
        axes.set_title(
            f"{spread.label}: {100 * pure:.0f} % of clients hold a single {kind}", loc="left"
        )
        for side in axes.spines.values():
            side.set_visible(True)
    if not named:
        grid[len(grid) // 2].set_ylabel(f"{len(rows)} {'domains' if by == 'domain' else 'classes'}")
    grid[-1].set_xlabel("client")
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    mappable = ScalarMappable(scale, cmap="Greys")
    whole = MaxNLocator(integer=True, nbins=8)
    figure.colorbar(mappable, ax=list(grid), label="images", fraction=0.03, pad=0.01, ticks=whole)
    entitle(figure, title)
    return Picture(name, figure, _sheet(rows, spreads, by))


def _say_numbers(axes: Any, counts: NDArray[np.int64], most: int) -> None:
    for (row, client), count in np.ndenumerate(counts):
        if count:
            ink = "white" if count > 0.55 * most else "black"
            axes.text(client, row, int(count), ha="center", va="center", color=ink, fontsize=6)


def _sheet(rows: Sequence[str], spreads: Sequence[Spread], by: By) -> Sheet:
    return Sheet(
        ("partition", "client", by, "images"),
        tuple(
            (spread.label, client, name, int(spread.counts[row, client]))
            for spread in spreads
            for client in range(spread.counts.shape[1])
            for row, name in enumerate(rows)
            if spread.counts[row, client]  # thousands of writers are mostly zeros
        ),
    )
