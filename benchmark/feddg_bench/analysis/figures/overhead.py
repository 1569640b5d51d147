"""Figure of overhead: where the seconds of a run went, from records alone.

Numbers are medians, over a run's rounds and over runs: a machine that was busy for a while moves
them little.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from feddg_bench.analysis.figures.drawing import (
    HATCHES,
    Picture,
    Sheet,
    add_key,
    entitle,
    new_figure,
)
from feddg_bench.analysis.figures.series import Frame, Wanted, comparable, groups
from feddg_bench.records.record import RoundRecord
from feddg_bench.records.store import read_record

PHASES = ("training", "aggregation", "communication", "evaluation")
ONCE = "before round 1"


def overhead(frame: Frame, wanted: Wanted) -> Picture:
    """Draw where the seconds of a round go, and what came before round 1, for each method."""
    found, scenarios, notes = comparable(groups(frame.runs))
    rows: list[tuple[str, dict[str, float], float, int]] = []
    places: set[str] = set()
    for group in found:
        seconds: list[dict[str, float]] = []
        once: list[float] = []
        for runs in (v for (s, _), v in sorted(group.runs.items()) if s in scenarios):
            for run in runs:
                record = read_record(run.path)
                seconds.append({phase: _usual(record.rounds, phase) for phase in PHASES})
                once.append(sum(record.once.seconds.values()))
                e = record.environment
                places.add(f"{e.device}, workers {e.workers}, threads {e.threads}")
        usual = {phase: median(s[phase] for s in seconds) for phase in PHASES}
        rows.append((group.label, usual, median(once), len(seconds)))
    rows.sort(key=lambda row: (sum(row[1].values()), row[0]))
    figure = new_figure(6.6, 1.2 + 0.2 * len(rows))
    # What is less than a hundredth of a round is noise.
    prepared = any(first > 0.01 * sum(usual.values()) for _, usual, first, _ in rows)
    labels = ("seconds a round", *([f"seconds {ONCE}"] if prepared else []))
    ratios = (3, 1)[: len(labels)]
    panels = figure.subplots(1, len(labels), sharey=True, width_ratios=ratios, squeeze=False)[0]
    axes, *before = panels
    greys = ("#4d4d4d", "#ffffff", "#bdbdbd", "#ededed")
    for place, (_, usual, first, _) in enumerate(rows):
        left = 0.0
        for phase, grey, hatch in zip(PHASES, greys, HATCHES, strict=False):
            axes.barh(
                place,
                usual[phase],
                left=left,
                height=0.7,
                color=grey,
                hatch=hatch,
                edgecolor="black",
                linewidth=0.4,
                label=phase if place == 0 else None,
            )
            left += usual[phase]
        axes.annotate(f" {left:.2f}", (left, place), va="center", fontsize=7)
        for part in before:
            part.barh(place, first, height=0.7, color="#8a8a8a", edgecolor="black", linewidth=0.4)
    axes.set_yticks(range(len(rows)), labels=[row[0] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.1)
    for part, label in zip(panels, labels, strict=True):
        part.set_xlabel(label)
        part.grid(axis="x")
    add_key(figure, axes.get_legend_handles_labels()[0], PHASES)
    where = "; ".join(sorted(places))
    entitle(figure, f"{frame.title}: where the time goes, medians over rounds and runs", where)
    if len(places) > 1:
        notes.append(f"the runs were measured in {len(places)} ways, which cannot be compared")
    sheet = Sheet(
        ("series", *PHASES, ONCE, "runs"),
        tuple((label, *(usual[p] for p in PHASES), first, n) for label, usual, first, n in rows),
    )
    return Picture(f"overhead-{frame.name}{wanted.suffix()}", figure, sheet, tuple(notes))


def _usual(rounds: Sequence[RoundRecord], phase: str) -> float:
    """Return a phase's median seconds, times the share of rounds that have it at all."""
    found = [s for entry in rounds if (s := entry.seconds.get(phase, 0.0))]
    return median(found) * len(found) / len(rounds) if found else 0.0
