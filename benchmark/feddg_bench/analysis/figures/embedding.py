"""t-SNE (van der Maaten and Hinton, 2008) of features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddg_bench.analysis.figures.drawing import (
    COLOURS,
    MARKERS,
    Picture,
    Sheet,
    add_key,
    entitle,
    new_figure,
)
from feddg_bench.common.streams import derive_seed
from feddg_bench.core.method import Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PERPLEXITY = 30.0
TONES = ("#000000", "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#9a9a9a")


@torch.no_grad()
def features(method: Method, images: Tensor, batch: int = 256) -> NDArray[np.float64]:
    """Return the features [n, D] of images (n, 3, H, W) in [0, 1]; evaluation mode is expected."""
    parts = [method.features(part).float().cpu() for part in images.split(batch)]
    return torch.cat(parts).numpy().astype(np.float64)


def embed(rows: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return positions [n, 2] of features [n, D], the same for the same seed.

    Args:
        rows: Features of at least four images.
        seed: Of the run; the embedding has its own stream.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    tsne = TSNE(
        perplexity=min(PERPLEXITY, (len(rows) - 1) / 3),
        init="pca",
        random_state=derive_seed(seed, "figures", "tsne") % 2**32,
        n_jobs=1,
    )
    with threadpool_limits(limits=1):  # sums over threads end otherwise each time
        placed: NDArray[np.float64] = tsne.fit_transform(rows)
    return placed


@dataclass(frozen=True)
class Cloud:
    """An embedding.

    Attributes:
        title: Method and round.
        places: [n, 2].
        labels: Class of each image, [n].
        domains: Domain of each image as a place in the list of names, [n].
    """

    title: str
    places: NDArray[np.float64]
    labels: NDArray[np.int64]
    domains: NDArray[np.int64]


def draw_clouds(
    name: str,
    title: str,
    lines: Sequence[Sequence[Cloud]],
    classes: Sequence[str],
    domains: Sequence[str],
) -> Picture:
    """Draw embeddings, rounds across; each once by class, as its number, and once by domain."""
    from matplotlib.lines import Line2D

    across = max(map(len, lines))
    figure = new_figure(0.5 + 2.4 * across, 1.2 + 4.5 * len(lines))
    grid = figure.subplots(2 * len(lines), across, squeeze=False)
    for number, line in enumerate(lines):
        for column in range(across):
            upper, lower = grid[2 * number, column], grid[2 * number + 1, column]
            cloud = line[column]
            _scatter(upper, cloud, by_class=True)
            _scatter(lower, cloud, by_class=False)
            upper.set_title(f"{cloud.title}: classes")
            lower.set_title(f"{cloud.title}: domains")
    handles = [
        Line2D(
            [], [], linestyle="", color=COLOURS[n % 6], marker=MARKERS[n % 6],
            markerfacecolor="white" if n % 2 else COLOURS[n % 6],
        )
        for n in range(len(domains))
    ]  # fmt: skip
    add_key(figure, handles, domains)
    shown = sorted({int(label) for line in lines for cloud in line for label in cloud.labels})
    key = ""
    if any(classes[label] != str(label) for label in shown):
        key = ", ".join(f"{label} {classes[label]}" for label in shown)
    entitle(figure, title, key)
    clouds = [cloud for line in lines for cloud in line]
    sheet = Sheet(
        ("model", "class", "domain", "x", "y"),
        tuple(
            (cloud.title, classes[label], domains[domain], round(float(x), 4), round(float(y), 4))
            for cloud in clouds
            for (x, y), label, domain in zip(cloud.places, cloud.labels, cloud.domains, strict=True)
        ),
    )
    return Picture(name, figure, sheet)


def _scatter(axes: Axes, cloud: Cloud, *, by_class: bool) -> None:
    x, y = cloud.places.T
    if by_class:
        for label in np.unique(cloud.labels):
            mine = cloud.labels == label
            axes.plot(
                x[mine], y[mine], linestyle="", marker=f"${label}$", markersize=4,
                markeredgewidth=0, color=TONES[label % len(TONES)],
            )  # fmt: skip
    else:
        for domain in np.unique(cloud.domains):
            mine = cloud.domains == domain
            colour = COLOURS[domain % 6]
            axes.plot(
                x[mine], y[mine], linestyle="", marker=MARKERS[domain % 6], markersize=3.2,
                color=colour, markerfacecolor="white" if domain % 2 else colour,
                markeredgewidth=0.6,
            )  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(True)
