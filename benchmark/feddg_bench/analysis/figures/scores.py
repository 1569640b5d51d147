"""Figures of the key metric from records: against the round, against a setting, by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from feddg_bench.analysis.figures.curves import Axis, Curve, draw_curves
from feddg_bench.analysis.figures.drawing import (
    MARKERS,
    Picture,
    Sheet,
    add_key,
    entitle,
    new_figure,
)
from feddg_bench.analysis.figures.series import (
    SPLIT_NAMES,
    Frame,
    Group,
    Point,
    Wanted,
    comparable,
    frames,
    groups,
    metric_label,
    most_means,
    points,
    score,
    scores,
)
from feddg_bench.records.rules import Rule
from feddg_bench.records.runs import Run
from feddg_bench.records.statistics import mean_and_std

Place = tuple[float, ...]
"""Values of a sweep's settings."""

POOLED = "pooled"
"""Kind of partition without clients: such runs are the same at every number of clients."""


def convergence(frame: Frame, wanted: Wanted, split: str) -> Picture | None:
    """Draw the key metric against the round; ``None`` if no round was evaluated on the split."""
    found, scenarios, notes = comparable(groups(frame.runs))
    curves = []
    for group in found:
        values = {
            (float(number), scenario, seed): value
            for (scenario, seed), runs in group.runs.items()
            for run in runs
            for number, value in scores(run, split).items()
        }
        if whole := points(values, scenarios):
            curves.append(Curve(group.label, tuple(whole)))
    if not curves:
        return None
    title = f"{frame.title}: {SPLIT_NAMES[split]}\n{_over(scenarios, curves)}"
    figure = draw_curves(curves, Axis("round"), metric_label(frame.runs[0]), title)
    name = f"convergence-{frame.name}{_on(split)}{wanted.suffix()}"
    return Picture(name, figure, _sheet("round", curves, scenarios), tuple(notes))


@dataclass(frozen=True)
class Sweep:
    """A setting, or two, against which the key metric is drawn.

    Attributes:
        name: Of the figure.
        keys: The settings.
        labels: Of the axis; where there are two settings, while the one or the other is held.
    """

    name: str
    keys: tuple[str, ...]
    labels: tuple[str, ...]


SWEEPS = {
    "lambda": Sweep(
        "lambda",
        ("partition.heterogeneity",),
        ("heterogeneity \N{GREEK SMALL LETTER LAMDA} (1: all clients alike)",),
    ),
    "clients": Sweep(
        "clients",
        ("partition.clients", "federation.per_round"),
        ("clients in a round K; N = {:g} in all", "all clients N; K = {:g} in a round"),
    ),
}


def swept(
    runs: Sequence[Run], sweep: Sweep, wanted: Wanted, split: str, rule: Rule
) -> list[Picture]:
    """Draw the key metric against a setting, for frames with runs at two values of it or more.

    Of two settings one is held: there is a figure for each value of it at which the other varies.
    """
    pictures = []
    for frame in frames(runs, sweep.keys):
        places = sorted({_place(run, sweep) for run in frame.runs if not _is_pooled(run)})
        for name, label, mine in _axes(sweep, places):
            kept = tuple(run for run in frame.runs if _is_pooled(run) or _place(run, sweep) in mine)
            part = replace(frame, name=frame.name + name, runs=kept)
            pictures.append(_swept(part, sweep, label, mine, wanted, split, rule))
    return [picture for picture in pictures if picture is not None]


def _is_pooled(run: Run) -> bool:
    return bool(run.get("partition.kind") == POOLED)


def _place(run: Run, sweep: Sweep) -> Place:
    """Return where a run stands on the axis; all clients where K is not said."""
    first = run.get(sweep.keys[0])
    return tuple(
        float(run.get(key) or (first if key != sweep.keys[0] else 0)) for key in sweep.keys
    )


def _axes(sweep: Sweep, places: Sequence[Place]) -> list[tuple[str, str, list[Place]]]:
    """Return what each figure's name ends with, its axis, and its places.

    Where these are pairs (N, K) a figure has those that share K or share N.
    """
    if len(sweep.keys) == 1:
        return [("", sweep.labels[0], list(places))]
    found = []
    for held, letter in ((1, "k"), (0, "n")):
        for value in sorted({place[held] for place in places}):
            mine = [place for place in places if place[held] == value]
            if len(mine) > 1:
                found.append((f"-{letter}-{value:g}", sweep.labels[held].format(value), mine))
    return found


def _swept(
    frame: Frame,
    sweep: Sweep,
    label: str,
    places: Sequence[Place],
    wanted: Wanted,
    split: str,
    rule: Rule,
) -> Picture | None:
    """Return the figure of a frame; ``None`` if no series has two points."""
    at = {place: place[0] if len(place) == 1 else float(n) for n, place in enumerate(places)}
    values: dict[str, Values] = {}
    flat: dict[str, Values] = {}
    for group in groups(frame.runs, sweep.keys):
        for (scenario, seed), runs in group.runs.items():
            for run in runs:
                value = score(run, split, rule)
                if value is None:
                    continue
                if not _is_pooled(run):
                    x = at[_place(run, sweep)]
                    values.setdefault(group.label, {})[x, scenario, seed] = value
                elif places:
                    flat.setdefault(group.label, {})[at[places[-1]], scenario, seed] = value
    there: list[dict[float, set[str]]] = []
    for mine in values.values():
        there.append({})
        for x, scenario, _ in mine:
            there[-1].setdefault(x, set()).add(scenario)
    # Of fewer scenarios, maybe, than the runs at the setting's usual value.
    scenarios = most_means([list(series.values()) for series in there], least=2)
    curves, notes = [], []
    for series, mine in values.items():
        whole = points(_at_every_point(mine, scenarios), scenarios)
        if len(whole) > 1:
            curves.append(Curve(series, tuple(whole)))
        else:
            notes.append(f"{series} is left out: it has {len(whole)} point on this axis")
    if not curves:
        return None
    seeds = {seed for curve in curves for point in curve.points for seed in point.seeds}
    for series, mine in flat.items():
        same = {place: value for place, value in mine.items() if place[2] in seeds}
        if whole := points(same, scenarios):
            curves.append(Curve(series, tuple(whole), flat=True))
    curves.sort(key=lambda curve: curve.label)
    varied = 0 if len({place[0] for place in places}) > 1 else -1
    names = tuple(f"{place[varied]:g}" for place in places)
    ticks = tuple(at[place] for place in places)
    title = f"{frame.title}: {SPLIT_NAMES[split]}\nrule {rule}; {_over(scenarios, curves)}"
    figure = draw_curves(curves, Axis(label, ticks, names), metric_label(frame.runs[0]), title)
    name = f"{sweep.name}-{frame.name}{_on(split)}{wanted.suffix()}"
    shown = {at[place]: f"{place[1]:g}/{place[0]:g}" for place in places if len(place) == 2}
    sheet = _sheet(sweep.name, curves, scenarios, shown)
    return Picture(name, figure, sheet, tuple(notes))


Values = dict[tuple[float, str, int], float]
"""By x, scenario and seed."""


def _at_every_point(values: Values, scenarios: frozenset[str]) -> Values:
    """Return the values of the seeds that are at every point, if any are: the same draw all along.

    Otherwise a point with more seeds would stand apart for their sake, not for its setting's.
    """
    seeds = [set(point.seeds) for point in points(values, scenarios)]
    shared = set.intersection(*seeds) if seeds else set()
    return {place: v for place, v in values.items() if place[2] in shared} if shared else values


def leaderboard(frame: Frame, wanted: Wanted, split: str, rule: Rule) -> Picture | None:
    """Draw the mean of each method, best first, with the means of single scenarios."""
    found, scenarios, notes = comparable(groups(frame.runs))
    rows: list[tuple[Group, Point, dict[str, float]]] = []
    for group in found:
        values = {
            (0.0, scenario, seed): value
            for (scenario, seed), runs in group.runs.items()
            for run in runs
            if (value := score(run, split, rule)) is not None
        }
        for point in points(values, scenarios):
            each = {
                s: mean_and_std([values[0.0, s, seed] for seed in point.seeds])[0]
                for s in sorted(scenarios)
            }
            rows.append((group, point, each))
    if not rows:
        return None
    rows.sort(key=lambda row: (-row[1].mean, row[0].label))
    figure = new_figure(5.6, 1.1 + 0.2 * len(rows))
    axes = figure.subplots()
    named = sorted(scenarios)
    for place, (_, point, each) in enumerate(rows):
        for scenario, marker in zip(named, _few(named), strict=True) if len(named) > 1 else ():
            axes.plot(
                each[scenario],
                place,
                marker,
                color="#8a8a8a",
                markerfacecolor="white",
                markersize=4,
                markeredgewidth=0.7,
                zorder=2,
            )
        if point.std:
            axes.errorbar(point.mean, place, xerr=point.std, color="black", capsize=2, zorder=3)
        axes.plot(point.mean, place, "D", color="black", markersize=5, zorder=4)
        axes.annotate(
            f"{point.mean:.1f}", (1.01, place), xycoords=("axes fraction", "data"), va="center"
        )
    axes.set_yticks(range(len(rows)), labels=[group.label for group, _, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="both")
    said = [metric_label(frame.runs[0])]
    said += ["open: single scenarios"] if len(named) > 1 else []
    said += ["bar: deviation over seeds"] if any(point.std for _, point, _ in rows) else []
    axes.set_xlabel("; ".join(said))
    if 1 < len(named) <= len(MARKERS):
        keys = [
            axes.plot([], [], marker, color="#8a8a8a", markerfacecolor="white")[0]
            for marker in _few(named)
        ]
        add_key(figure, keys, named)
    curves = [Curve(group.label, (point,)) for group, point, _ in rows]
    over = _over(scenarios, curves)
    entitle(figure, f"{frame.title}: {SPLIT_NAMES[split]}", f"rule {rule}; {over}")
    sheet = Sheet(
        ("series", "mean", "std", "seeds", *named),
        tuple(
            (g.label, p.mean, p.std, _listed(p.seeds), *(each[s] for s in named))
            for g, p, each in rows
        ),
    )
    name = f"leaderboard-{frame.name}{_on(split)}{wanted.suffix()}"
    return Picture(name, figure, sheet, tuple(notes))


def _few(named: Sequence[str]) -> Sequence[str]:
    return MARKERS[: len(named)] if len(named) <= len(MARKERS) else ["|"] * len(named)


def _on(split: str) -> str:
    return "" if split == "test" else f"-{split}"


def _listed(seeds: Sequence[int]) -> str:
    return " ".join(map(str, seeds))


def _over(scenarios: frozenset[str], curves: Sequence[Curve]) -> str:
    """Return what the means are over."""
    counts = {len(point.seeds) for curve in curves for point in curve.points}
    seeds = (
        f"{min(counts)} to {max(counts)} seeds"
        if len(counts) > 1
        else (f"{max(counts, default=0)} seed{'' if counts == {1} else 's'}")
    )
    band = ", band: one standard deviation" if max(counts, default=0) > 1 else ""
    if len(scenarios) == 1:
        return f"scenario {next(iter(scenarios))}, {seeds}{band}"
    return f"mean over {len(scenarios)} scenarios, {seeds}{band}"


def _sheet(
    x: str,
    curves: Sequence[Curve],
    scenarios: frozenset[str],
    names: Mapping[float, str] | None = None,
) -> Sheet:
    def place(curve: Curve, point: Point) -> str:
        return "all" if curve.flat else (names or {}).get(point.x, f"{point.x:g}")

    over = " ".join(sorted(scenarios))
    return Sheet(
        ("series", x, "mean", "std", "seeds", "scenarios"),
        tuple(
            (curve.label, place(curve, p), p.mean, p.std, _listed(p.seeds), over)
            for curve in curves
            for p in curve.points
        ),
    )
