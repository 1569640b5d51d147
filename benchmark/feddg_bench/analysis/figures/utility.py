"""Figure of utility against leakage: what noise on sent styles costs, and what it hides."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feddg_bench.analysis.figures.drawing import (
    COLOURS,
    LINES,
    MARKERS,
    PALE,
    Picture,
    Sheet,
    entitle,
    new_figure,
)
from feddg_bench.analysis.figures.series import SPLIT_NAMES, Selection
from feddg_bench.analysis.tables.commands import overrides
from feddg_bench.config.layers import dotted
from feddg_bench.records.attacks import AttackRecord, Interval, overall
from feddg_bench.records.runs import RecordedRun, key_metric

NOISE = ("hyper.perturb_noise", "privacy.noise_multiplier")
"""Settings that may differ along a curve: the noise of FISC's Table 10, or that of ``dp_style``."""
WITH_NOISE = {*NOISE, "hyper.perturb_shrink", "privacy.mechanism", "privacy.clip_norm"}

Frame = tuple[str, str, str]  # data set, protocol, recipe
Settings = tuple[tuple[str, Any], ...]  # a method's own and those of its protection


@dataclass(frozen=True)
class Point:
    """A method under one noise."""

    noise: float
    auc: Interval  # of membership, from what clients send beside weights
    values: tuple[float, ...]  # key metric of each run


def utility(
    runs: Sequence[RecordedRun], attacks: Iterable[AttackRecord], choice: Selection
) -> Iterator[Picture | str]:
    """Yield a figure for each frame in which a method was run and attacked under two noises."""
    found = list(attacks)
    drawn = False
    for frame in sorted({(run.dataset, run.protocol, run.recipe) for run in runs}):
        mine = [run for run in runs if (run.dataset, run.protocol, run.recipe) == frame]
        curves = {
            method: points
            for method in sorted({run.method for run in mine})
            if len(points := _points(method, mine, found, choice)) > 1
        }
        if curves:
            drawn = True
            yield _draw(frame, mine[0], curves, choice)
    if not drawn:
        yield (
            "utility: no method is recorded under two noises, with attacks under the same; see "
            "docs/guide.md, Attacks"
        )


def _points(
    method: str, runs: Sequence[RecordedRun], attacks: Sequence[AttackRecord], choice: Selection
) -> list[Point]:
    """Return a method's points by noise, over the scenarios and seeds that all of them have."""
    made: dict[Settings, dict[tuple[str, int], float]] = {}
    clients = set()
    for run in runs:
        if run.method != method or set(overrides(run)) - WITH_NOISE or run.tuned:
            continue
        value = key_metric(run, run.evaluation(choice.rule), choice.split)
        if value is not None:
            made.setdefault(_own(run.settings), {})[run.scenario, run.seed] = value
            clients.add(run.settings["partition.clients"])
    told: dict[Settings, list[Interval]] = {}
    for attack in attacks:
        settings = dotted(attack.settings)
        of_runs = (attack.dataset, attack.protocol, attack.recipe, attack.method)
        same = of_runs == (runs[0].dataset, runs[0].protocol, runs[0].recipe, method)
        same = same and (attack.kind, attack.attacker) == ("membership", "server")
        if same and settings["partition.clients"] in clients:
            told.setdefault(_own(settings), []).extend(
                result.figures["auc"]
                for result in attack.results
                if result.item != "weights" and "auc" in result.figures
            )
    curves: dict[Settings, list[Settings]] = {}
    for own in made:
        if told.get(own):
            curves.setdefault(tuple(x for x in own if x[0] not in WITH_NOISE), []).append(own)
    chosen = max(curves.values(), key=len, default=[])
    common = set.intersection(*(set(made[own]) for own in chosen)) if chosen else set()
    if not common:
        return []
    return sorted(
        (
            Point(_noise(own), overall(told[own]), tuple(made[own][at] for at in sorted(common)))
            for own in chosen
        ),
        key=lambda point: point.noise,
    )


def _own(settings: Mapping[str, Any]) -> Settings:
    own = {k: v for k, v in settings.items() if k.startswith(("hyper.", "privacy."))}
    # What is off is as good as absent.
    return tuple(sorted((k, repr(v)) for k, v in own.items() if v or k not in WITH_NOISE))


def _noise(own: Settings) -> float:
    known = dict(own)
    return next((float(known[name]) for name in NOISE if name in known), 0.0)


def _draw(
    frame: Frame, run: RecordedRun, curves: Mapping[str, Sequence[Point]], choice: Selection
) -> Picture:
    figure = new_figure(5.2, 3.8)
    axes = figure.subplots()
    rows: list[tuple[Any, ...]] = []
    for place, (method, points) in enumerate(curves.items()):
        x = [point.auc.value for point in points]
        y = [statistics.mean(point.values) for point in points]
        reach = [
            [max(0.0, point.auc.value - point.auc.low) for point in points],
            [max(0.0, point.auc.high - point.auc.value) for point in points],
        ]
        axes.errorbar(
            x,
            y,
            xerr=reach,
            color=COLOURS[place % len(COLOURS)],
            marker=MARKERS[place % len(MARKERS)],
            linestyle=LINES[place % len(LINES)],
            elinewidth=0.5,
            label=method,
        )
        for point, at, height in zip(points, x, y, strict=True):
            axes.annotate(
                f"{point.noise:g}", (at, height), (3, 3), textcoords="offset points", fontsize=6
            )
            i = point.auc
            rows.append((method, point.noise, i.value, i.low, i.high, height, len(point.values)))
    axes.axvline(0.5, color=PALE, linewidth=0.6, zorder=0)
    axes.set_xlabel("membership AUC from what clients send beside weights; 0.5 is chance")
    axes.set_ylabel(f"{run.metric.name}, {SPLIT_NAMES[choice.split]}")
    axes.grid()
    handles, labels = axes.get_legend_handles_labels()
    title = f"{frame[0]}, {frame[1]}, recipe {frame[2]}: utility against leakage"
    about = "Numbers at marks: deviation of the noise on styles; bars: 95 % intervals."
    entitle(figure, title, about, handles, labels)
    head = ("method", "noise", "auc", "auc_low", "auc_high", run.metric.name, "runs")
    name = "-".join(("utility", *frame))
    return Picture(f"{name}{choice.suffix}", figure, Sheet(head, tuple(rows)))
