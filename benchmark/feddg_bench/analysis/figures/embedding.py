"""t-SNE (van der Maaten and Hinton, 2008) of features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddg_bench.analysis.figures.drawing import (
    COLOURS,
    MARKERS,
    Picture,
    layout,
    new_figure,
)
from feddg_bench.analysis.figures.training import Trained, figure_stem, sample, title_of
from feddg_bench.common.errors import DataError
from feddg_bench.common.streams import derive_seed
from feddg_bench.common.titles import counted
from feddg_bench.core.method import Method
from feddg_bench.plugins import method_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLASSES = 10
"""Maximum number of distinguishable classes in an embedding."""
PERPLEXITY = 30.0
TONES = ("#000000", "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#9a9a9a")


@torch.no_grad()
def features(method: Method, images: Tensor, batch: int = 256) -> NDArray[np.float64]:
    """Return the features [n, D] of images [n, 3, H, W] in [0, 1]; evaluation mode is expected."""
    parts = [method.features(part).float().cpu() for part in images.split(batch)]
    return torch.cat(parts).numpy().astype(np.float64)


def embed(rows: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return positions [n, 2] of features [n, D], the same for the same seed.

    At least four images are needed. ``seed`` is the run's; the embedding has its own stream.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    tsne = TSNE(
        perplexity=min(PERPLEXITY, (len(rows) - 1) / 3),
        init="pca",
        random_state=derive_seed(seed, "figures", "tsne") % 2**32,
        n_jobs=1,
    )
    with threadpool_limits(limits=1):  # sums over several threads vary
        placed: NDArray[np.float64] = tsne.fit_transform(rows)
    return placed


def tsne_picture(runs: Sequence[Trained], count: int) -> Picture:
    """Draw the features of up to ``count`` images per domain, a row per method, a column per round.

    Each embedding is drawn twice: by class, with the class number as marker, and by domain.

    Raises:
        DataError: If fewer than four images are held out.
    """
    from matplotlib.lines import Line2D

    first = runs[0]
    parts = sample(first, count, keep=lambda labels: labels < CLASSES)
    index = np.concatenate([part for _, part in parts])
    if len(index) < 4:
        raise DataError(
            f"t-SNE needs 4 images at least, and {len(index)} are held out: raise "
            f"data.id_test_fraction or --images"
        )
    names = [domain for domain, _ in parts]
    domains = np.repeat(np.arange(len(parts)), [len(part) for _, part in parts])
    across = max(len(run.models) for run in runs)
    figure = new_figure(0.5 + 2.4 * across, 1.2 + 4.5 * len(runs))
    grid = figure.subplots(2 * len(runs), across, squeeze=False)
    rows: list[tuple[str, str, str, float, float]] = []
    shown = set[int]()
    for line, run in enumerate(runs):
        images, labels = (part.cpu() for part in run.images(index))
        truth = labels.numpy()
        shown |= set(truth.tolist())
        for column, (number, weights) in enumerate(run.models.items()):
            found = features(run.load(weights), images.to(run.device))
            places = embed(found, run.plan.settings.seed)
            model = f"{method_title(run.plan.settings.method)}, round {number}"
            _scatter(grid[2 * line, column], places, truth, _by_class)
            _scatter(grid[2 * line + 1, column], places, domains, _by_domain)
            grid[2 * line, column].set_title(f"{model}: classes")
            grid[2 * line + 1, column].set_title(f"{model}: domains")
            rows += [
                (model, first.classes[label], names[domain], round(float(x), 4), round(float(y), 4))
                for (x, y), label, domain in zip(places, truth, domains, strict=True)
            ]
    marks = [(Line2D([], [], **_by_domain(n)), name) for n, name in enumerate(names)]
    classes = {label: first.classes[label] for label in sorted(shown)}
    key = ", ".join(f"{label} {name}" for label, name in classes.items() if name != str(label))
    said = f"t-SNE of features of {counted(len(index), 'image')} that no client holds"
    numbers = pd.DataFrame(rows, columns=["model", "class", "domain", "x", "y"])
    title, caption = f"{title_of(first)}: {said}", key and f"classes: {key}"
    return layout(figure_stem("tsne", runs), figure, title, caption, marks, numbers)


def _by_class(label: int) -> dict[str, Any]:
    colour = TONES[label % len(TONES)]
    return {"linestyle": "", "marker": f"${label}$", "markeredgewidth": 0, "color": colour}


def _by_domain(domain: int) -> dict[str, Any]:
    colour, marker = COLOURS[domain % 6], MARKERS[domain % 6]
    face = "white" if domain % 2 else colour
    style = {"linestyle": "", "marker": marker, "color": colour, "markerfacecolor": face}
    return {**style, "markersize": 3.2, "markeredgewidth": 0.6}


def _scatter(
    axes: Axes,
    places: NDArray[np.float64],
    kinds: NDArray[np.int64],
    style: Callable[[int], dict[str, Any]],
) -> None:
    for kind in np.unique(kinds):
        axes.plot(*places[kinds == kind].T, **style(int(kind)))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(True)
