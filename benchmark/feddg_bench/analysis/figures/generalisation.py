"""Figure of generalisation: the unseen domain against held-out images of the training domains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feddg_bench.analysis.figures.curves import Axis, draw_curves
from feddg_bench.analysis.figures.drawing import Picture, Sheet
from feddg_bench.analysis.figures.series import (
    SPLIT_NAMES,
    Selection,
    comparable,
    curve_of,
    means,
    measure_series,
    over,
)
from feddg_bench.analysis.tables.generic import Frame
from feddg_bench.records.robustness import Accuracies, logit

KNOWN = "id_test"
STEPS = (10, 5, 2, 1)
"""Percentages that an axis names: multiples of the first one, of others where there is room."""
GAP = 1 / 7
"""Least distance of two ticks, as a share of the axis."""


def generalisation(frame: Frame, choice: Selection) -> Picture | None:
    """Draw the key metric on a held-out split against that on ``id_test``, a curve a method.

    A point is the mean over scenarios and seeds after an evaluated round. A method that only trains
    slower stays on FedAvg's curve; one that generalises better lies above it. Shares are drawn on a
    logit scale, on which curves are nearly straight. ``None`` if no round was evaluated on both.
    """
    held = measure_series(frame.runs, lambda run: curve_of(run, choice.split))
    known = measure_series(frame.runs, lambda run: curve_of(run, KNOWN))
    place = ["series", "scenario", "seed", "x"]
    both = held.merge(known, on=place, suffixes=("", "_known"))
    both, scenarios, notes = comparable(both)
    points = means(both, scenarios)
    if points.empty:
        return None
    across = means(both.assign(value=both.value_known), scenarios)["mean"]
    percent = frame.runs[0].metric.percent
    xs, ys = (_scaled(values.to_numpy(), percent) for values in (across, points["mean"]))
    drawn = points.assign(x=xs.values, mean=ys.values, low=np.nan, high=np.nan)
    ends = {str(name): float(m.iloc[-1]) for name, m in points.groupby("series")["mean"]}
    axis = Axis(frame.metric_label(KNOWN), "after the last round", xs.ticks, xs.names)
    title = f"{frame.title}: {SPLIT_NAMES[choice.split]} against {SPLIT_NAMES[KNOWN]}"
    said = over(scenarios, frame.scenario_labels(), points)
    said += "; curves run through the evaluated rounds; above FedAvg's: better at equal id_test"
    figure = draw_curves(
        drawn, axis, frame.metric_label(choice.split), title, said, ends, marked_ends=True
    )
    for axes in figure.axes:
        axes.set_yticks(ys.ticks, labels=ys.names)
    sheet = Sheet(
        ("series", "round", KNOWN, choice.split, "seeds", "scenarios"),
        tuple(
            (
                p.series,
                f"{p.x:g}",
                x,
                p.mean,
                " ".join(map(str, p.seeds)),
                " ".join(sorted(scenarios)),
            )
            for p, x in zip(points.itertuples(), across, strict=True)
        ),
    )
    return Picture(f"generalisation-{frame.name}{choice.suffix}", figure, sheet, tuple(notes))


@dataclass(frozen=True)
class _Scaled:
    """Values on an axis."""

    values: Accuracies
    ticks: tuple[float, ...]
    names: tuple[str, ...]


def _scaled(values: Accuracies, percent: bool) -> _Scaled:
    """Return values as they are drawn: percentages as logits, others as they are."""
    if not percent:
        return _Scaled(values, (), ())
    places = logit(values)
    ticks: dict[float, str] = {}
    for tick in (tick for step in STEPS for tick in range(step, 100, step)):
        place = float(logit(np.array(float(tick))))
        free = all(abs(place - other) >= GAP * np.ptp(places) for other in ticks)
        if values.min() <= tick <= values.max() and free:
            ticks[place] = str(tick)
    return _Scaled(places, tuple(sorted(ticks)), tuple(ticks[place] for place in sorted(ticks)))
