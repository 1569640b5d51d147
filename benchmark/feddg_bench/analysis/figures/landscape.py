"""Loss of two clients around the global model, on the plane that their updates span.

The plane through three models (Garipov et al., NeurIPS 2018) contains the global model and the
models of both clients. It shows the direction of each client's update and its effect on the other
client. Random directions (Li et al., NeurIPS 2018) would show neither client's model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from feddg_bench.analysis.figures.drawing import Picture, layout, new_figure
from feddg_bench.analysis.figures.training import Trained, figure_stem, holding, shares, title_of
from feddg_bench.common.errors import DataError, SettingsError, unknown
from feddg_bench.common.streams import generator
from feddg_bench.core.messages import Weights
from feddg_bench.plugins import method_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOW, HIGH = -0.5, 1.5
"""Ends of both axes, in steps along a client's update."""


def on_plane(
    origin: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    x: float,
    y: float,
    trainable: Collection[str],
) -> Weights:
    """Return the model origin + x (one - origin) + y (other - origin).

    Buffers, such as the variances of batch normalisation, must not leave their range: they are a
    convex mean of the three, with negative weights set to 0. Integers are the origin's.
    """
    inside = np.clip([1 - x - y, x, y], 0, None)
    inside = inside / inside.sum()
    made = {}
    for name, start in origin.items():
        if not start.is_floating_point():
            made[name] = start.clone()
            continue
        a, b, c = (1 - x - y, x, y) if name in trainable else inside
        made[name] = a * start + b * one[name] + c * other[name]
    return made


def grid_losses(
    make: Callable[[float, float], Weights],
    losses: Callable[[Weights], tuple[float, ...]],
    steps: int,
) -> NDArray[np.float64]:
    """Return the losses on a square grid, [losses, y, x], from `LOW` to `HIGH` in both directions.

    ``make`` returns the model at (x, y), ``losses`` a model's losses; ``steps`` is points per side.
    """
    ticks = np.linspace(LOW, HIGH, steps)
    values = [[losses(make(float(x), float(y))) for x in ticks] for y in ticks]
    return np.moveaxis(np.array(values), -1, 0)


@torch.no_grad()
def mean_loss(model: torch.nn.Module, images: Tensor, labels: Tensor, batch: int = 256) -> float:
    """Return the mean cross-entropy of a model in evaluation mode, in double precision."""
    total = 0.0
    for part, truth in zip(images.split(batch), labels.split(batch), strict=True):
        total += float(F.cross_entropy(model(part).double(), truth, reduction="sum"))
    return total / len(labels)


def cosine(
    origin: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    trainable: Collection[str],
) -> float:
    """Return the cosine of the angle between two updates; 0 if one of them is 0."""
    a, b = (
        torch.cat([(model[n].double() - origin[n].double()).flatten() for n in trainable])
        for model in (one, other)
    )
    length = float(a.norm() * b.norm())
    return float(a @ b) / length if length else 0.0


@dataclass(frozen=True)
class Landscape:
    """Losses of two clients around the model that one method sent them."""

    method: str
    held: tuple[str, ...]  # main domains of each client, in words
    grid: NDArray[np.float64]  # losses of the first and the second client, [2, y, x]
    corners: NDArray[np.float64]  # the same at the global model and the two clients' models, [2, 3]
    cosine: float  # between the two updates


def landscape_picture(
    runs: Sequence[Trained], pair: Sequence[str], count: int, steps: int
) -> Picture:
    """Draw the losses of two clients around the model sent to them.

    ``pair`` names two clients; if it is empty, those whose domains differ most are drawn. At most
    ``count`` training images of each are used, on a grid of ``steps`` points per side.

    Raises:
        SettingsError: If a client of the pair did not train in that round.
        DataError: If no two clients did, or one of them returned no model in another run.
    """
    first = runs[0]
    clients = _pair(first, pair)
    found = []
    for run in runs:
        for client in clients:
            if client not in run.updates:
                raise DataError(
                    f"{run.plan.settings.method}: {client} sent no model in round "
                    f"{max(run.models)}; choose others with --pair"
                )
        found.append(_measure(run, clients, count, steps))
    ticks = np.linspace(LOW, HIGH, steps)
    numbers = [
        (one.method, clients[n], float(x), float(y), float(one.grid[n, row, column]))
        for one in found
        for n in range(2)
        for row, y in enumerate(ticks)
        for column, x in enumerate(ticks)
    ]
    return layout(
        figure_stem("landscape", runs),
        _draw(found, clients),
        f"{title_of(first)}: loss around the global model, round {max(first.models)}",
        numbers=pd.DataFrame(numbers, columns=["method", "client", "x", "y", "loss"]),
    )


def _measure(run: Trained, clients: tuple[str, str], count: int, steps: int) -> Landscape:
    trainable = frozenset(run.method.trainable)
    models = (run.before, run.updates[clients[0]], run.updates[clients[1]])
    images = [run.images(_some(run, client, count)) for client in clients]

    def losses(weights: Weights) -> tuple[float, ...]:
        return tuple(
            mean_loss(run.load(weights, client), *data)
            for client, data in zip(clients, images, strict=True)
        )

    return Landscape(
        method_title(run.plan.settings.method),
        tuple(holding(run, client) for client in clients),
        grid_losses(lambda x, y: on_plane(*models, x, y, trainable), losses, steps),
        np.array([losses(model) for model in models]).T,
        cosine(*models, sorted(trainable & set(run.before))),
    )


def _pair(run: Trained, pair: Sequence[str]) -> tuple[str, str]:
    """Return the requested clients, or the round's two clients whose domains differ most."""
    there = sorted(run.updates)
    for client in pair:
        if client not in there:
            raise SettingsError(unknown(f"client of round {max(run.models)}", client, there))
    if len(pair) == 2 and pair[0] != pair[1]:
        return pair[0], pair[1]
    if pair:
        raise SettingsError("expected two clients for --pair, such as client_001,client_014")
    if len(there) < 2:
        raise DataError(
            f"{run.plan.settings.method} trained {len(there)} client in round {max(run.models)}, "
            f"and a landscape needs two: raise --per-round, or choose a method with clients"
        )

    def nearness(two: tuple[str, str]) -> float:
        one, other = (shares(run, client) for client in two)
        return -round(float(np.abs(one - other).sum()), 9)

    return min(combinations(there, 2), key=lambda two: (nearness(two), two))


def _some(run: Trained, client: str, count: int) -> NDArray[np.int64]:
    """Return up to ``count`` of a client's training images, the same for all methods."""
    rng = generator(run.plan.settings.seed, "figures", "landscape", client)
    chosen: NDArray[np.int64] = np.sort(rng.permutation(run.federation.clients[client])[:count])
    return chosen


def _draw(found: Sequence[Landscape], clients: Sequence[str]) -> Figure:
    """Return contours of both clients' losses, a row per method, on one scale."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    values = np.concatenate([one.grid.ravel() for one in found])
    low = max(float(values.min()), 1e-6)
    high = min(float(values.max()), 30 * low) * (1 + 1e-9)  # higher walls would hide the valley
    levels = np.geomspace(low, high if high > low else 2 * low, 11)
    figure = new_figure(6.6, 0.7 + 2.7 * len(found))
    panels = figure.subplots(len(found), 2, sharex=True, sharey=True, squeeze=False)
    steps = np.linspace(LOW, HIGH, found[0].grid.shape[-1])
    for line, one in zip(panels, found, strict=True):
        for number, axes in enumerate(line):
            grid = np.clip(one.grid[number], levels[0], levels[-1])
            filled = axes.contourf(
                steps, steps, grid, levels=levels, norm=LogNorm(), cmap="Greys", extend="both"
            )
            axes.contour(steps, steps, grid, levels=levels, colors="white", linewidths=0.5)
            for (x, y), marker, loss, said in zip(
                ((0, 0), (1, 0), (0, 1)), "osD", one.corners[number], ("global", "A", "B"),
                strict=True,
            ):  # fmt: skip
                axes.plot(x, y, marker, color="black", markerfacecolor="white", markersize=6)
                axes.annotate(
                    f"{said} {loss:.3g}", (x, y), xytext=(6, 6), textcoords="offset points",
                    fontsize=7, bbox={"boxstyle": "round,pad=0.15", "fc": "white", "lw": 0},
                )  # fmt: skip
            axes.set_aspect("equal")
            letter = "AB"[number]
            said = f"{one.method}: loss of client {letter}, {clients[number]}"
            axes.set_title(f"{said}\n{one.held[number]}")
        line[0].set_ylabel(f"steps along B's update\n(cosine with A's: {one.cosine:.2f})")
    for axes in panels[-1]:
        axes.set_xlabel("steps along A's update")
    bar = figure.colorbar(filled, ax=list(panels.flat), label="cross-entropy", shrink=0.8)
    bar.ax.yaxis.set_major_locator(FixedLocator(list(levels[::2])))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    return figure
