"""Figure of utility against leakage: cost and effect of noise on the styles that are sent."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from feddg_attacks.records import AttackRecord, Interval, overall
from feddg_bench.analysis.figures.drawing import (
    COLOURS,
    LINES,
    MARKERS,
    PALE,
    Picture,
    new_figure,
    truncated,
)
from feddg_bench.analysis.figures.series import Selection, of_frame
from feddg_bench.analysis.tables.generic import Frame, frames
from feddg_bench.plugins import method_title
from feddg_bench.records.runs import flatten, key_metric

NOISE = ("hyper.perturb_noise", "privacy.noise_multiplier")
"""Settings that can differ along a curve: the noise of FISC's Table 10, or that of ``dp_style``."""
OWN = ("hyper.", "privacy.")
"""A method's own settings, and those of its protection."""
WITH_NOISE = {*NOISE, "hyper.perturb_shrink", "privacy.mechanism", "privacy.clip_norm"}

Settings = tuple[tuple[str, Any], ...]  # a method's own and those of its protection


@dataclass(frozen=True)
class Point:
    """A method at one level of noise."""

    noise: float
    auc: Interval  # of membership, from what clients send besides weights
    values: tuple[float, ...]  # key metric of each run


def utility(
    runs: pd.DataFrame, attacks: Iterable[AttackRecord], choice: Selection
) -> Iterator[Picture | str]:
    """Yield a figure for each setup in which a method was run and attacked at two noise levels."""
    records = list(attacks)
    drawn = False
    for frame in frames(runs):
        curves = {
            method: points
            for method in sorted({run.method for run in frame.runs})
            if len(points := _points(method, frame, records, choice)) > 1
        }
        if curves:
            drawn = True
            yield _draw(frame, curves, choice)
    if not drawn:
        yield (
            "utility: no method is recorded under two noises, with attacks under the same: `run` "
            f"and `attack` one with two values of {' or '.join(NOISE)}"
        )


def _points(
    method: str, frame: Frame, attacks: Sequence[AttackRecord], choice: Selection
) -> list[Point]:
    """Return a method's points by noise, over the scenarios and seeds that they have in common.

    If it was run with several other settings, those with the most points are used.
    """
    own_runs = [run for run in frame.runs if run.method == method]
    first = own_runs[0]
    leaked: dict[Settings, list[Interval]] = {}
    for attack in attacks:
        settings = flatten(attack.settings)
        of_runs = (attack.dataset, attack.protocol, attack.recipe, attack.method)
        same = of_runs == (first.dataset, first.protocol, first.recipe, method)
        same = same and (attack.kind, attack.attacker) == ("membership", "server")
        if same and settings["partition.clients"] == first.settings["partition.clients"]:
            leaked.setdefault(_own(settings), []).extend(
                result.figures["auc"]
                for result in attack.results
                if result.item != "weights" and "auc" in result.figures
            )
    curves: dict[tuple[Settings, str], dict[Settings, dict[tuple[str, int], float]]] = {}
    for run in own_runs:
        own = _own(run.settings)
        value = key_metric(run, run.evaluation(choice.rule), choice.split_of(own_runs))
        if leaked.get(own) and value is not None:
            reading = tuple(x for x in own if x[0] not in WITH_NOISE)
            others = {k: v for k, v in run.settings.items() if not k.startswith(OWN)}
            curve = curves.setdefault((reading, repr(sorted(others.items()))), {})
            curve.setdefault(own, {})[run.scenario, run.seed] = value
    made = max(curves.values(), key=len, default={})
    common = set.intersection(*map(set, made.values())) if made else set()
    if not common:
        return []
    return sorted(
        (
            Point(_noise(own), overall(leaked[own]), tuple(values[at] for at in sorted(common)))
            for own, values in made.items()
        ),
        key=lambda point: point.noise,
    )


def _own(settings: Mapping[str, Any]) -> Settings:
    own = {k: v for k, v in settings.items() if k.startswith(OWN)}
    # A setting that is off counts as absent.
    return tuple(sorted((k, repr(v)) for k, v in own.items() if v or k not in WITH_NOISE))


def _noise(own: Settings) -> float:
    known = dict(own)
    return next((float(known[name]) for name in NOISE if name in known), 0.0)


def _draw(frame: Frame, curves: Mapping[str, Sequence[Point]], choice: Selection) -> Picture:
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
            label=method_title(method),
        )
        for point, at, height in zip(points, x, y, strict=True):
            axes.annotate(
                f"{point.noise:g}", (at, height), (3, 3), textcoords="offset points", fontsize=6
            )
            i = point.auc
            rows.append((method, point.noise, i.value, i.low, i.high, height, len(point.values)))
    axes.axvline(0.5, color=PALE, linewidth=0.6, zorder=0)
    what = "membership AUC from data sent besides weights (chance: 0.5)"
    axes.set_xlabel(truncated(what, axes.get_xlim()[0]))
    axes.set_ylabel(truncated(frame.metric_label(choice.split_of(frame.runs)), axes.get_ylim()[0]))
    axes.grid()
    about = "Numbers at marks: deviation of the noise on styles; bars: 95 % intervals."
    drawn = figure, about, zip(*axes.get_legend_handles_labels(), strict=True)
    metric = frame.runs[0].metric.name
    head = ["method", "noise", "auc", "auc_low", "auc_high", metric, "runs"]
    numbers = pd.DataFrame(rows, columns=head)
    return of_frame("utility", frame, choice, "utility against leakage", drawn, numbers)
