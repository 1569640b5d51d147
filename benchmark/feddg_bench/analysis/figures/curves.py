"""Curves of several series: one pair of axes for a few, a small one each for many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from feddg_bench.analysis.figures.drawing import (
    COLOURS,
    LINES,
    MARKERS,
    MOST,
    PALE,
    entitle,
    new_figure,
    spread,
)
from feddg_bench.analysis.figures.series import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE = "fedavg"
"""Series that stands in every small panel, if it is there."""
COLUMNS = 5


@dataclass(frozen=True)
class Curve:
    """A series.

    Attributes:
        label: Its name.
        points: By x, ascending.
        flat: Whether it has one value for all x, such as a reference without clients.
    """

    label: str
    points: tuple[Point, ...]
    flat: bool = False


@dataclass(frozen=True)
class Axis:
    """What lies along x.

    Attributes:
        label: Name and unit.
        ticks: Where there are ticks; empty leaves that to matplotlib.
        names: What the ticks say; empty for their numbers.
    """

    label: str
    ticks: tuple[float, ...] = ()
    names: tuple[str, ...] = ()


def draw_curves(curves: Sequence[Curve], axis: Axis, ylabel: str, title: str) -> Figure:
    """Return a figure of the curves, the band of a deviation around those over several seeds."""
    draw = _together if len(curves) <= MOST else _apart
    return draw(curves, axis, ylabel, title)


def _together(curves: Sequence[Curve], axis: Axis, ylabel: str, title: str) -> Figure:
    figure = new_figure(5.6, 3.4)
    axes = figure.subplots()
    for number, curve in enumerate(curves):
        _line(
            axes,
            curve,
            color=COLOURS[number],
            linestyle=LINES[number],
            marker=None if curve.flat else MARKERS[number],
            markerfacecolor="white" if number % 2 else COLOURS[number],
        )
    _dress(axes, curves, axis)
    axes.set_xlabel(axis.label)
    axes.set_ylabel(ylabel)
    _name_ends(axes, curves)
    entitle(figure, title)
    return figure


def _name_ends(axes: Axes, curves: Sequence[Curve]) -> None:
    """Write each curve's name, behind its marker, beside its end."""
    (left, edge), (low, high) = axes.get_xlim(), axes.get_ylim()
    axes.set_xlim(left, edge)
    axes.set_ylim(low, high)
    step = 0.04 * (edge - left)
    places = spread([curve.points[-1].mean for curve in curves], 0.055 * (high - low))
    for number, (curve, place) in enumerate(zip(curves, places, strict=True)):
        last = curve.points[-1]
        ends = (edge if curve.flat else last.x, edge + step), (last.mean, place)
        axes.plot(*ends, color=PALE, linewidth=0.5, clip_on=False, zorder=0)
        colour = COLOURS[number]
        axes.plot(
            [edge + 0.7 * step, edge + 1.7 * step] if curve.flat else edge + 1.2 * step,
            [place, place] if curve.flat else place,
            color=colour,
            linestyle=LINES[number],
            marker=None if curve.flat else MARKERS[number],
            markerfacecolor="white" if number % 2 else colour,
            clip_on=False,
        )
        axes.annotate(
            curve.label, (edge + 2 * step, place), va="center", color=colour, annotation_clip=False
        )


def _apart(curves: Sequence[Curve], axis: Axis, ylabel: str, title: str) -> Figure:
    """Draw a panel for each curve, best at its end first; all others pale behind it."""
    order = sorted(curves, key=lambda curve: (-curve.points[-1].mean, curve.label))
    rows = math.ceil(len(order) / COLUMNS)
    figure = new_figure(1.75 * COLUMNS, 0.6 + 1.35 * rows)
    grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    reference = next((curve for curve in order if curve.label == REFERENCE), None)
    for number, axes in enumerate(grid.flat):
        if number >= len(order):
            axes.set_axis_off()
            grid.flat[number - COLUMNS].tick_params(labelbottom=True)
            continue
        curve = order[number]
        for other in order:
            if other is not curve:
                _line(axes, other, band=False, color=PALE, linewidth=0.4, zorder=1)
        if reference is not None and curve is not reference:
            _line(axes, reference, band=False, color=COLOURS[1], linestyle="--", linewidth=0.9)
        _line(
            axes, curve, color="black", marker=None if curve.flat else "o", markersize=2.5, zorder=3
        )
        _dress(axes, order, axis)
        axes.tick_params(axis="x", labelsize=6.5)  # lambda 0 and 0.1 stand side by side
        axes.set_title(f"{curve.label}  {curve.points[-1].mean:.1f}", loc="left", pad=3)
    figure.supxlabel(axis.label, fontsize=8)
    figure.supylabel(ylabel, fontsize=8)
    dashed = f"; dashed: {REFERENCE}" if reference is not None else ""
    said = f"black: the method above the panel, with its last value{dashed}"
    entitle(figure, title, said)
    return figure


def _line(axes: Axes, curve: Curve, *, band: bool = True, **style: Any) -> None:
    if curve.flat:
        axes.axhline(curve.points[-1].mean, **{**style, "marker": None})
        return
    x = [point.x for point in curve.points]
    mean = [point.mean for point in curve.points]
    axes.plot(x, mean, **style)
    if band and any(point.std for point in curve.points):
        low = [point.mean - (point.std or 0) for point in curve.points]
        high = [point.mean + (point.std or 0) for point in curve.points]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _dress(axes: Axes, curves: Sequence[Curve], axis: Axis) -> None:
    axes.grid(axis="y")
    if axis.ticks:
        axes.set_xticks(axis.ticks, labels=axis.names or None)
        wide = [point.x for curve in curves if not curve.flat for point in curve.points]
        margin = 0.04 * (max(wide) - min(wide) or 1)
        axes.set_xlim(min(wide) - margin, max(wide) + margin)
    else:
        axes.set_xlim(left=0)
