"""Figure of overhead: seconds of a run by phase, from records alone.

Numbers are medians over a run's rounds and over runs, so that a temporarily busy machine changes
them little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
import pandas as pd

from feddg_bench.analysis.figures.drawing import Picture, new_figure
from feddg_bench.analysis.figures.series import Selection, comparable, measure_series, of_frame
from feddg_bench.analysis.tables.generic import Frame
from feddg_bench.common.titles import counted
from feddg_bench.records.record import RoundRecord
from feddg_bench.records.runs import RecordedRun

PHASES = {
    "training": {"color": "#4d4d4d"},
    "aggregation": {"color": "#ffffff", "hatch": "////"},
    "communication": {"color": "#bdbdbd", "hatch": "...."},
    "protection": {"color": "#808080", "hatch": "++++"},
    "evaluation": {"color": "#ededed", "hatch": "xxxx"},
}
"""Phase of a round -> style of its bar."""
ONCE = "before round 1"


def overhead(frame: Frame, choice: Selection) -> Picture:
    """Draw each method's seconds per round by phase, and its seconds before round 1."""
    places: set[str] = set()

    def numbers(run: RecordedRun) -> dict[str, float]:
        record = run.record()
        e = record.environment
        used = counted(e.workers, "worker"), counted(e.threads, "thread")
        places.add(", ".join([e.device, *used]))
        found = {phase: _usual(record.rounds, phase) for phase in PHASES}
        once = math.fsum(record.once.seconds.values())
        return {**found, "total": math.fsum(found.values()), ONCE: once}

    values, _, notes = comparable(measure_series(frame.runs, numbers))
    of = values.groupby(["series", "x"]).value
    rows = of.median().unstack()
    low, high = (of.quantile(q).unstack().total for q in (0.25, 0.75))
    rows["total"] = rows[list(PHASES)].sum(axis=1)
    alike = np.ptp(rows.total) < (high - low).median()  # then their order would be noise
    rows = rows.sort_index() if alike else rows.sort_values("total")
    figure = new_figure(6.6, 1.2 + 0.2 * len(rows))
    # Less than a hundredth of a round is noise.
    prepared = (rows[ONCE] > 0.01 * rows.total).any()
    labels = ("seconds a round", *([f"seconds {ONCE}"] if prepared else []))
    ratios = (3, 1)[: len(labels)]
    panels = figure.subplots(1, len(labels), sharey=True, width_ratios=ratios, squeeze=False)[0]
    axes, *before = panels
    edge = {"height": 0.7, "edgecolor": "black", "linewidth": 0.4}
    left = pd.Series(0.0, rows.index)
    handles = []
    phases = [phase for phase in PHASES if phase != "protection" or rows[phase].any()]
    for phase, style in ((phase, PHASES[phase]) for phase in phases):
        handles.append(axes.barh(range(len(rows)), rows[phase], left=left, **edge, **style))
        left = left + rows[phase]
    middle = (low + high)[rows.index] / 2
    half = (high - low)[rows.index] / 2
    axes.errorbar(
        middle, range(len(rows)), xerr=half, linestyle="", color="#0072B2", capsize=2, linewidth=1
    )
    for place, total in enumerate(rows.total):
        axes.annotate(f" {total:.2f}", (max(total, (middle + half).iloc[place]), place),
                      va="center", fontsize=7)  # fmt: skip
    for part in before:
        part.barh(range(len(rows)), rows[ONCE], color="#8a8a8a", **edge)
    axes.set_yticks(range(len(rows)), labels=rows.index)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.1)
    for part, label in zip(panels, labels, strict=True):
        part.set_xlabel(label)
        part.grid(axis="x")
    said = f"{'; '.join(sorted(places))}; medians over rounds and runs; whiskers: quartiles of runs"
    if alike:
        said += "; sorted by name: differences between methods are smaller than between runs"
    if len(places) > 1:
        notes.append(f"the runs were measured in {len(places)} ways, which cannot be compared")
    shown = rows[[*phases, ONCE]].assign(runs=of.count().unstack().total)
    drawn = figure, said, zip(handles, phases, strict=True)
    shows = "where the time goes"
    return of_frame("overhead", frame, choice, shows, drawn, shown.reset_index(), notes)


def _usual(rounds: Sequence[RoundRecord], phase: str) -> float:
    """Return a phase's median seconds, times the share of rounds that have it."""
    found = [s for entry in rounds if (s := entry.seconds.get(phase, 0.0))]
    return median(found) * len(found) / len(rounds) if found else 0.0
