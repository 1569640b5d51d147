"""Curves of several series: few share one pair of axes, many have a small panel each."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from feddg_bench.analysis.figures.drawing import (
    COLOURS,
    LINES,
    MARKERS,
    MOST,
    PALE,
    Drawn,
    Key,
    new_figure,
    spread_ticks,
    truncated,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE = "FedAvg"
"""Series that is drawn in every small panel, if it has runs."""
COLUMNS = 5
MARKED = 12
"""Maximum number of markers on a curve: more would merge into a line."""
FLAT = math.inf
"""The x of a series with the same value at every x, such as a reference without clients."""


@dataclass(frozen=True)
class Axis:
    """The x axis."""

    label: str  # name and unit
    end: str  # origin of the number after a name, such as `after round 50`
    ticks: tuple[float, ...] = ()  # positions of ticks; empty leaves them to matplotlib
    names: tuple[str, ...] = ()  # labels of the ticks; empty for their numbers
    left: float = 0  # where the axis begins, if there are no ticks
    joined: bool = True  # whether lines join the points: two values show no course between them
    logit: bool = False  # whether both axes have logit scales


def draw_curves(
    points: pd.DataFrame,
    axis: Axis,
    ylabel: str,
    said: str,
    numbers: Mapping[str, float] | None = None,
    tail: int = 0,
    *,
    references: Mapping[str, pd.DataFrame] | None = None,
    marked_ends: bool = False,
) -> Drawn:
    """Draw curves, with bands around them if the points have any.

    Args:
        points: ``series, x, mean, low, high``; see `feddg_bench.analysis.figures.series.means`.
        axis: The x axis.
        ylabel: Label of the y axis.
        said: Beginning of the caption: what the values are means over.
        numbers: Values that order small panels and follow their names; by default the last ones.
        tail: Points at each curve's end whose mean is drawn as a bar.
        references: Points of `REFERENCE` to draw in the panel of a series, such as those over the
            same seeds; elsewhere its own curve.
        marked_ends: Mark the end of every curve in small panels.
    """
    curves = {str(name): part for name, part in points.groupby("series")}
    if all(len(curve) <= tail for curve in curves.values()):
        tail = 0  # the bar would be the mean of the whole curve
    if len(curves) <= MOST:
        return _together(curves, axis, ylabel, said, tail)
    last = {label: _last(curve) for label, curve in curves.items()}
    end = max((c.x.iloc[-1] for c in curves.values() if not _is_flat(c)), default=0)
    short = (
        ()
        if numbers
        else [label for label, c in curves.items() if not _is_flat(c) and c.x.iloc[-1] < end]
    )
    order = numbers or last
    figure, key = _apart(curves, axis, ylabel, order, short, tail, marked_ends, references or {})
    return figure, said, key


Curves = dict[str, pd.DataFrame]


def _last(curve: pd.DataFrame) -> float:
    return float(curve["mean"].iloc[-1])


def _is_flat(curve: pd.DataFrame) -> bool:
    return bool(curve.x.iloc[-1] == FLAT)


def _together(curves: Curves, axis: Axis, ylabel: str, said: str, tail: int) -> Drawn:
    figure = new_figure(5.6, 3.4)
    axes = figure.subplots()
    styles: dict[str, dict[str, Any]] = {
        label: {
            "color": COLOURS[number],
            "linestyle": LINES[number] if axis.joined else "",
            "marker": MARKERS[number],
            "markerfacecolor": "white" if number % 2 else COLOURS[number],
        }
        for number, label in enumerate(curves)
    }
    for label, curve in curves.items():
        _line(axes, curve, **styles[label])
        _bar(axes, curve, tail, styles[label]["color"])
    _dress(axes, curves, axis)
    axes.set_xlabel(axis.label)
    axes.set_ylabel(_ylabel(ylabel, axes, axis))
    _name_ends(axes, curves, styles)
    return figure, said + (f"; bars: {_tail(tail)}" if tail else ""), ()


def _ylabel(label: str, axes: Axes, axis: Axis) -> str:
    return f"{label}, logit scale" if axis.logit else truncated(label, axes.get_ylim()[0])


def _name_ends(axes: Axes, curves: Curves, styles: dict[str, dict[str, Any]]) -> None:
    """Write each curve's name, after its marker, next to the curve's end."""
    (left, edge), (low, high) = axes.get_xlim(), axes.get_ylim()
    axes.set_xlim(left, edge)
    axes.set_ylim(low, high)
    step = 0.04 * (edge - left)
    places = spread_ticks([_last(curve) for curve in curves.values()], 0.055 * (high - low))
    for (label, curve), place in zip(curves.items(), places, strict=True):
        start = min(edge, float(curve.x.iloc[-1]))
        ends = (start, edge + step), (_last(curve), place)
        axes.plot(*ends, color=PALE, linewidth=0.5, clip_on=False, zorder=0)
        style = {**styles[label], "clip_on": False}
        if _is_flat(curve):
            ends = (edge + 0.7 * step, edge + 1.7 * step), (place, place)
            axes.plot(*ends, **{**style, "marker": None})
        else:
            axes.plot(edge + 1.2 * step, place, **style)
        where = (edge + 2 * step, place)
        axes.annotate(label, where, va="center", color=style["color"], annotation_clip=False)


def _apart(
    curves: Curves,
    axis: Axis,
    ylabel: str,
    numbers: Mapping[str, float],
    short: Collection[str],
    tail: int,
    ends: bool,
    references: Mapping[str, pd.DataFrame],
) -> tuple[Figure, Key]:
    """Draw a panel for each curve, the best first, with all others pale behind it.

    The curves in ``short`` do not reach the end, from which the numbers after names are taken.
    """
    from matplotlib.lines import Line2D

    order = sorted(curves, key=lambda label: (-numbers[label], label))
    rows = math.ceil(len(order) / COLUMNS)
    figure = new_figure(1.75 * COLUMNS, 0.9 + 1.35 * rows)
    grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    dashed = REFERENCE + (" over the method's seeds" if references else "")
    styles: dict[str, dict[str, Any]] = {
        f"the method above, and its value {axis.end}": {"color": "black", "zorder": 3},
        dashed: {"color": COLOURS[1], "linestyle": "--", "linewidth": 0.9},
        "other methods": {"color": PALE, "linewidth": 0.4, "zorder": 1},
    }
    own, reference, pale = styles.values()
    for style, marker in zip((own, reference, pale), "Ds." if ends else "", strict=False):
        style |= {"marker": marker, "markersize": 4, "markevery": [-1]}
    for style, marker in zip((own, reference, pale), "os." * (not axis.joined), strict=False):
        style |= {"marker": marker, "markersize": 3, "linestyle": ""}
    if tail:
        styles[_tail(tail)] = {"color": COLOURS[2], "linewidth": 3, "alpha": 0.6}
    for number, axes in enumerate(grid.flat):
        if number >= len(order):
            axes.set_axis_off()
            grid.flat[number - COLUMNS].tick_params(labelbottom=True)
            continue
        label = order[number]
        for other in order:
            if other != label and not (other == REFERENCE and label in references):
                _line(axes, curves[other], band=False, **pale)
        if REFERENCE in curves and label != REFERENCE:
            its = references.get(label, curves[REFERENCE])
            if len(its):
                _line(axes, its, band=False, **reference)
        _line(axes, curves[label], **{**_marks(curves[label]), **own})
        _bar(axes, curves[label], tail, COLOURS[2])
        _dress(axes, curves, axis)
        axes.tick_params(axis="x", labelsize=6.5)  # lambda 0 and 0.1 are close together
        said_of = label if label in short else f"{label}  {numbers[label]:.1f}"
        axes.set_title(textwrap.fill(said_of, 24), loc="left", pad=3)  # the panel's width
        if number + COLUMNS >= len(order):  # the lowest of its column
            axes.set_xlabel(textwrap.fill(axis.label, 26), fontsize=7)
    figure.supylabel(_ylabel(ylabel, grid.flat[0], axis), fontsize=8)
    if REFERENCE not in curves:
        del styles[dashed]
    return figure, [(Line2D([], [], **style), name) for name, style in styles.items()]


def _marks(curve: pd.DataFrame) -> dict[str, Any]:
    return {"marker": "o", "markersize": 2.5} if len(curve) <= MARKED else {}


def _line(axes: Axes, curve: pd.DataFrame, *, band: bool = True, **style: Any) -> None:
    if _is_flat(curve):
        axes.axhline(_last(curve), **{**style, "marker": None})
        return
    axes.plot(curve.x, curve["mean"], **{"markevery": math.ceil(len(curve) / MARKED), **style})
    if band and (curve.low < curve.high).any():
        ends = curve.low.fillna(curve["mean"]), curve.high.fillna(curve["mean"])
        axes.fill_between(curve.x, *ends, color=style["color"], alpha=0.15, linewidth=0)


def _tail(count: int) -> str:
    return f"mean of the last {count} evaluated rounds"


def _bar(axes: Axes, curve: pd.DataFrame, tail: int, colour: str) -> None:
    """Draw the mean of the last points as a bar across their range of x."""
    if len(curve) > tail > 0:
        end = curve.iloc[-tail:]
        axes.hlines(
            end["mean"].mean(), end.x.min(), end.x.max(), color=colour, linewidth=3, alpha=0.6
        )


def _dress(axes: Axes, curves: Curves, axis: Axis) -> None:
    axes.grid(axis="y")
    if axis.ticks:
        axes.set_xticks(axis.ticks, labels=axis.names or None)
        wide = [x for curve in curves.values() for x in curve.x if x != FLAT]
        margin = 0.04 * (max(wide) - min(wide) or 1)
        axes.set_xlim(min(wide) - margin, max(wide) + margin)
    else:
        axes.set_xlim(left=axis.left)
