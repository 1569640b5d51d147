"""Figures of the key metric from records: by round, by a setting, by method, against id_test."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from feddg_bench.analysis.figures.curves import FLAT, REFERENCE, Axis, draw_curves
from feddg_bench.analysis.figures.drawing import MARKERS, Picture, new_figure, truncated
from feddg_bench.analysis.figures.series import (
    BAND,
    SPLIT_NAMES,
    Selection,
    comparable,
    curve_of,
    means,
    measure_series,
    of_frame,
    over,
    over_their_seeds,
)
from feddg_bench.analysis.tables.generic import Frame, frames
from feddg_bench.records.robustness import Accuracies, logit
from feddg_bench.records.rules import LAST, UNSEEN
from feddg_bench.records.runs import RecordedRun, key_metric

Place = tuple[float, ...]
"""Values of a sweep's settings."""

POOLED = "pooled"
"""Kind of partition without clients: such runs are the same at every number of clients."""

KNOWN_RULES = {"invariant": "Invariant rule", "erm": "ERM's rule"}
"""Rules of `DomainDataset.answers` whose accuracy is drawn with the methods' -> their names."""


def convergence(frame: Frame, choice: Selection) -> Picture | None:
    """Draw the key metric against the round; ``None`` if no round was evaluated on the split."""
    split = choice.split_of(frame.runs)
    values = measure_series(frame.runs, lambda run: curve_of(run, split))
    values, scenarios, notes = comparable(values)
    points = means(values, scenarios)
    if points.empty:
        return None
    said = over(frame, split, scenarios, points)
    said += BAND if points["std"].any() else ""
    numbers, end = None, f"after round {points.x.max():g}"
    if choice.rule == "mean_last_5":
        numbers = {str(name): c["mean"].iloc[-LAST:].mean() for name, c in points.groupby("series")}
        end = "in the bar"
    first, last = points.x.min(), points.x.max()
    left = first - 0.04 * (last - first)  # a margin for its marker
    drawn = draw_curves(
        points, Axis("round", end, left=left), frame.metric_label(split), said, numbers, LAST,
        references=_references(values, points, scenarios),
    )  # fmt: skip
    shown = _listed(points, scenarios, "round")
    return of_frame("convergence", frame, choice, SPLIT_NAMES[split], drawn, shown, notes)


def _references(
    values: pd.DataFrame, points: pd.DataFrame, scenarios: Collection[str]
) -> dict[str, pd.DataFrame]:
    """Return the reference's points over the seeds of each series that lacks some of its seeds."""
    shared = over_their_seeds(values, points, REFERENCE)
    return {name: means(part, scenarios) for name, part in shared.items()}


@dataclass(frozen=True)
class SweptSetting:
    """One or two settings against which the key metric is drawn."""

    name: str  # of the figure
    keys: tuple[str, ...]  # the settings
    labels: tuple[str, ...]  # of the axis; with two settings, one for each while it is fixed
    letters: tuple[str, ...]  # short names of the settings


SWEEPS = {
    "lambda": SweptSetting(
        "lambda",
        ("partition.heterogeneity",),
        ("heterogeneity \N{GREEK SMALL LETTER LAMDA} (1: all clients alike)",),
        ("\N{GREEK SMALL LETTER LAMDA}",),
    ),
    "clients": SweptSetting(
        "clients",
        ("partition.clients", "federation.per_round"),
        ("clients in a round K; N = {:g} in all", "all clients N; K = {:g} in a round"),
        ("N", "K"),
    ),
    "strength": SweptSetting(
        "strength",
        ("world.q",),
        ("probability Q that the invariant cue is right",),
        ("Q",),
    ),
}


def swept(runs: pd.DataFrame, name: str, choice: Selection) -> list[Picture]:
    """Draw the key metric against a setting, for frames with runs at two or more of its values.

    With two settings, one is fixed: each of its values at which the other varies has a figure.
    """
    sweep, pictures = SWEEPS[name], []
    for frame in frames(runs, free=sweep.keys):
        places = {run.key: _place(run, sweep) for run in frame.runs}
        known = sorted({place for place in places.values() if place})
        for suffix, varied, label, mine in _axes(sweep, known):
            picture = _swept(replace(frame, name=frame.name + suffix), sweep, varied, label, mine,
                             places, choice)  # fmt: skip
            pictures += [picture] if picture else []
    return pictures


def _place(run: RecordedRun, sweep: SweptSetting) -> Place | None:
    """Return a run's place, with K = N if K is not set; ``None`` for a run valid at every place."""
    if run.get("partition.kind") == POOLED and sweep.keys[0].startswith("partition."):
        return None
    first = run.get(sweep.keys[0])
    return tuple(
        float(run.get(key) or (first if key != sweep.keys[0] else 0)) for key in sweep.keys
    )


def _axes(
    sweep: SweptSetting, places: Sequence[Place]
) -> Iterator[tuple[str, int, str, list[Place]]]:
    """Yield the name's suffix, index of the varied setting, axis label and places of each figure.

    If places are pairs (N, K), a figure has those that share K, or those that share N.
    """
    if len(sweep.keys) == 1:
        yield "", 0, sweep.labels[0], list(places)
        return
    for held, letter in ((1, "k"), (0, "n")):
        for value in sorted({place[held] for place in places}):
            mine = [place for place in places if place[held] == value]
            if len(mine) > 1:
                yield f"-{letter}-{value:g}", 1 - held, sweep.labels[held].format(value), mine


def _swept(
    frame: Frame,
    sweep: SweptSetting,
    varied: int,
    label: str,
    shown: Sequence[Place],
    places: Mapping[str, Place | None],
    choice: Selection,
) -> Picture | None:
    """Return the figure of a frame; ``None`` if no series has two points."""
    at = {place: place[0] if len(place) == 1 else float(n) for n, place in enumerate(shown)}
    split = choice.split_of(frame.runs)
    if sweep.name == "strength" and choice.split == UNSEEN:
        split = "test"  # the rules' accuracies are known there

    def numbers(run: RecordedRun) -> dict[float, float]:
        place = places[run.key]
        x = FLAT if place is None else at.get(place)
        found = key_metric(run, run.evaluation(choice.rule), split)
        return {} if found is None or x is None else {x: found}

    values = measure_series(frame.runs, numbers, sweep.keys)
    if split == "test" and sweep.name == "strength":
        known = [
            (KNOWN_RULES[rule], run.scenario, run.seed, x, 100 * value)
            for run in frame.runs
            for rule, value in (run.answers or {}).items()
            for x in numbers(run)
            if rule in KNOWN_RULES
        ]
        rules = pd.DataFrame(known, columns=values.columns).drop_duplicates()
        values = pd.concat([values, rules], ignore_index=True)
    flat = values.x == FLAT
    # These may have fewer scenarios than the runs at the setting's usual value.
    kept, scenarios, notes = comparable(values[~flat], least=2)
    if kept.empty:
        return None
    kept = kept.groupby("series", group_keys=False)[kept.columns].apply(
        lambda part: _at_every_point(part, len(scenarios))
    )
    same = flat & values.seed.isin(kept.seed)
    values = pd.concat([kept, values[same]])
    points = means(values, scenarios)
    names = tuple(f"{place[varied]:g}" for place in shown)
    end, joined = f"at {sweep.letters[varied]} = {names[-1]}", len(names) > 2
    axis = Axis(label, end, tuple(at.values()), names, joined=joined)
    several = over(frame, split, scenarios, points[points.x != FLAT])
    said = f"{several}; {choice.rounds}{BAND if points['std'].any() else ''}"
    references = _references(values, points, scenarios)
    drawn = draw_curves(points, axis, frame.metric_label(split), said, references=references)
    words = {at[place]: f"{place[1]:g}/{place[0]:g}" for place in shown if len(place) == 2}
    listed = _listed(points, scenarios, sweep.name, words)
    return of_frame(sweep.name, frame, choice, SPLIT_NAMES[split], drawn, listed, notes)


def _at_every_point(values: pd.DataFrame, scenarios: int) -> pd.DataFrame:
    """Return the values of the seeds that have all scenarios at every x, or all values if none has.

    Otherwise a point with more seeds could stand out because of them, not because of its setting.
    """
    counts = values.groupby(["seed", "x"]).scenario.nunique().unstack()
    whole = counts.index[(counts == scenarios).all(axis=1)]
    return values[values.seed.isin(whole)] if len(whole) else values


def leaderboard(frame: Frame, choice: Selection) -> Picture | None:
    """Draw the mean of each method, best first, with its means in single scenarios."""
    values, scenarios, notes = comparable(choice.values(frame.runs))
    points = means(values, scenarios).sort_values(
        ["mean", "series"], ascending=[False, True], ignore_index=True
    )
    if points.empty:
        return None
    values = values.merge(points[["series", "seeds"]], on="series")
    whole = [seed in seeds for seed, seeds in zip(values.seed, values.seeds, strict=True)]
    each = values[whole].groupby(["series", "scenario"]).value.mean().unstack().loc[points.series]
    split = choice.split_of(frame.runs)
    labels = frame.scenario_labels(split)
    several = len(each.columns) > 1
    marks = MARKERS if len(each.columns) <= len(MARKERS) else "|" * len(each.columns)
    figure = new_figure(5.6, 1.1 + 0.2 * len(points))
    axes = figure.subplots()
    open_marks: Any = {"color": "#8a8a8a", "markerfacecolor": "white", "markeredgewidth": 0.7}
    handles = [
        axes.plot(each[name], points.index, mark, linestyle="", zorder=2, **open_marks)[0]
        for name, mark in (zip(each.columns, marks, strict=False) if several else ())
    ]
    if points["std"].notna().any():
        axes.errorbar(
            points["mean"], points.index, xerr=points["std"].fillna(0), linestyle="",
            color="black", capsize=2, zorder=3,
        )  # fmt: skip
    axes.plot(points["mean"], points.index, "D", color="black", markersize=5, zorder=4)
    for place, mean in points["mean"].items():
        axes.annotate(f"{mean:.1f}", (1.01, place), xycoords=("axes fraction", "data"), va="center")
    axes.set_yticks(points.index, labels=points.series)
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.grid(axis="both")
    axes.set_xlabel(truncated(frame.metric_label(split), axes.get_xlim()[0]))
    said = f"{over(frame, split, scenarios, points)}; {choice.rounds}"
    said += "; open marks: single scenarios" if several else ""
    said += "; whiskers: one standard deviation over seeds" if points["std"].any() else ""
    named = [labels[name] for name in each.columns]
    key = [*zip(handles, named, strict=True)] if handles and marks is MARKERS else []
    numbers = points[["series", "mean", "std"]].assign(seeds=points.seeds.map(_spaced))
    numbers = pd.concat([numbers, each.reset_index(drop=True)], axis=1)
    drawn = figure, said, key
    return of_frame("leaderboard", frame, choice, SPLIT_NAMES[split], drawn, numbers, notes)


def _spaced(values: Iterable[Any]) -> str:
    return " ".join(map(str, values))


def _listed(
    points: pd.DataFrame,
    scenarios: Collection[str],
    x: str,
    words: Mapping[float, str] | None = None,
    columns: Sequence[str] = ("mean", "std"),
) -> pd.DataFrame:
    """Return the numbers of curves; ``x`` names their first column, ``words`` values in it."""
    said = {FLAT: "all", **(words or {})}
    shown = points[["series", "x", *columns]].rename(columns={"x": x})
    shown[x] = [said.get(at, f"{at:g}") for at in points.x]
    return shown.assign(seeds=points.seeds.map(_spaced), scenarios=_spaced(sorted(scenarios)))


KNOWN = "id_test"
STEPS = (10, 5, 2, 1)
"""Percentages that an axis labels: multiples of the first step, of others if there is space."""
GAP = 1 / 7
"""Minimum distance of two ticks, as a share of the axis."""


def generalisation(frame: Frame, choice: Selection) -> Picture | None:
    """Draw the key metric on a held-out split against that on ``id_test``, one curve per method.

    A point is the mean over scenarios and seeds after an evaluated round. A method that only trains
    slower stays on FedAvg's curve; one that generalises better lies above it. Shares are drawn on a
    logit scale, on which curves are nearly straight. ``None`` if no round was evaluated on both.
    """
    split = choice.split_of(frame.runs)
    held = measure_series(frame.runs, lambda run: curve_of(run, split))
    known = measure_series(frame.runs, lambda run: curve_of(run, KNOWN))
    place = ["series", "scenario", "seed", "x"]
    both = held.merge(known, on=place, suffixes=("", "_known"))
    both, scenarios, notes = comparable(both)
    points = _against_known(both, scenarios)
    if points.empty:
        return None
    percent = frame.runs[0].metric.percent
    ticks, names = _ticks(points["known"].to_numpy(), percent)
    yticks, ynames = _ticks(points["mean"].to_numpy(), percent)
    ends = {str(name): float(m.iloc[-1]) for name, m in points.groupby("series")["mean"]}
    references = {
        name: _drawn(_against_known(part, scenarios), percent)
        for name, part in over_their_seeds(both, points, REFERENCE).items()
    }
    label = frame.metric_label(KNOWN) + ", logit scale" * percent
    axis = Axis(label, "after the last round", ticks, names, logit=percent)
    said = over(frame, split, scenarios, points)
    said += "; curves run through the evaluated rounds; above FedAvg's: better at equal id_test"
    drawn = draw_curves(
        _drawn(points, percent), axis, frame.metric_label(split), said, ends,
        references=references, marked_ends=True,
    )  # fmt: skip
    for axes in drawn[0].axes:
        axes.set_yticks(yticks, labels=ynames)
    shown = _listed(points, scenarios, "round", columns=("known", "mean"))
    shown = shown.rename(columns={"known": KNOWN, "mean": split})
    shows = f"{SPLIT_NAMES[split]} against {SPLIT_NAMES[KNOWN]}"
    return of_frame("generalisation", frame, choice, shows, drawn, shown, notes)


def _against_known(both: pd.DataFrame, scenarios: Collection[str]) -> pd.DataFrame:
    """Return `means` of ``value`` with those of ``value_known`` as a column ``known``."""
    known = means(both.assign(value=both.value_known), scenarios)
    return means(both, scenarios).assign(known=known["mean"])


def _drawn(points: pd.DataFrame, percent: bool) -> pd.DataFrame:
    """Return points of a curve through (known, mean), without a band."""
    x, y = points["known"].to_numpy(), points["mean"].to_numpy()
    if percent:
        x, y = logit(x), logit(y)
    return points.assign(x=x, mean=y, low=np.nan, high=np.nan)


def _ticks(values: Accuracies, percent: bool) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Return places and labels of ticks on a logit axis; of none on others, left to matplotlib."""
    if not percent:
        return (), ()
    extent = np.ptp(logit(values))
    ticks: dict[float, str] = {}
    for tick in (tick for step in STEPS for tick in range(step, 100, step)):
        place = float(logit(np.array(float(tick))))
        free = all(abs(place - other) >= GAP * extent for other in ticks)
        if values.min() <= tick <= values.max() and free:
            ticks[place] = str(tick)
    return tuple(sorted(ticks)), tuple(ticks[place] for place in sorted(ticks))
