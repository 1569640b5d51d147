"""Figures that compare methods: performance profiles, ranks over data sets, and noise.

Noise is the scatter over seeds, and the smallest detectable difference between methods.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from feddg_bench.analysis.figures.curves import REFERENCE, Axis, draw_curves
from feddg_bench.analysis.figures.drawing import (
    COLOURS,
    LINES,
    MARKERS,
    PALE,
    Picture,
    layout,
    new_figure,
    truncated,
)
from feddg_bench.analysis.figures.series import (
    BOTH,
    SPLIT_NAMES,
    Selection,
    comparable,
    means,
    of_frame,
    over,
    series,
)
from feddg_bench.analysis.tables.generic import Frame, frames
from feddg_bench.common.titles import counted
from feddg_bench.data.protocols import TITLES
from feddg_bench.plugins import dataset_title
from feddg_bench.records.rules import Rule
from feddg_bench.records.runs import RecordedRun, key_metric, read_folder
from feddg_bench.records.statistics import (
    LEVEL,
    deviation,
    performance_profile,
    rank_correlation,
    smallest_difference,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THRESHOLDS = 101
LEAST = 3
"""Minimum number of runs of a method for a meaningful profile."""
_FEW = 10
"""Up to this many data sets, a diagram of ranks warns that they are few (Demsar, JMLR 2006)."""


def profiles(frame: Frame, choice: Selection) -> Picture | str | None:
    """Draw the share of each method's runs that reach each value of the key metric.

    Returns a sentence if no method has `LEAST` runs, and ``None`` if there are no values.
    """
    values, scenarios, notes = comparable(choice.values(frame.runs))
    if values.empty:
        return None
    if values.groupby("series").size().max() < LEAST:
        return f"{frame.name}: a profile needs {LEAST} runs of a method"
    thresholds = np.linspace(values.value.min(), values.value.max(), THRESHOLDS)
    parts = []
    for label, part in values.groupby("series"):
        sample = {((0, r.scenario, r.scenario), r.seed): r.value for r in part.itertuples()}
        share, low, high = performance_profile(sample, thresholds)
        points = {"x": thresholds, "mean": 100 * share, "low": 100 * low, "high": 100 * high}
        parts.append(pd.DataFrame({"series": label, **points}))
    curves = pd.concat(parts, ignore_index=True)
    found, split = means(values, scenarios), choice.split_of(frame.runs)
    said = f"{over(frame, split, scenarios, found)}; {choice.rounds}"
    if curves.low.notna().any():
        said += "; band: 95 % of a bootstrap over seeds inside each scenario"
    numbers = dict(zip(found.series, found["mean"], strict=True))
    label = truncated(frame.metric_label(split), thresholds[0])
    axis = Axis(label, "as a mean over runs", left=thresholds[0])
    drawn = draw_curves(curves, axis, "runs that reach it (%)", said, numbers)
    shares = curves.rename(columns={"x": "threshold", "mean": "share"})
    shows = f"{SPLIT_NAMES[split]}, performance profiles"
    return of_frame("profiles", frame, choice, shows, drawn, shares, notes)


def critical_difference(methods: int, datasets: int) -> float:
    """Return the critical difference of average ranks at `LEVEL` (Nemenyi, 1963).

    >>> round(critical_difference(4, 14), 2)
    1.25
    """
    from scipy.stats import studentized_range  # type: ignore[import-untyped]

    q = float(studentized_range.ppf(1 - LEVEL, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * datasets))


def ranks(runs: pd.DataFrame, choice: Selection) -> Picture | str:
    """Draw average ranks over data sets with the critical difference (Demsar, JMLR 2006).

    Notes state the rank correlation of each pair of data sets. Each data set counts once, with the
    recipe and federation that have the most methods, then the most runs. All have the protocol that
    allows the most comparisons, unless none has two methods on two data sets. Returns a sentence if
    no two methods share two data sets.
    """
    each = [(protocol, mine, *_shared(mine, choice)) for protocol, mine in runs.groupby("protocol")]
    enough = [found for found in each if min(found[2].shape) > 1]
    under, shown, table, notes = ("", runs, *_shared(runs, choice))
    if enough:
        protocol, shown, table, notes = max(enough, key=lambda found: found[2].size)
        under = f", {TITLES.get(protocol, protocol)}"
    if min(table.shape) < 2:
        there = Counter(runs["dataset"])
        found_only = [f"{counted(n, 'run')} of {dataset}" for dataset, n in sorted(there.items())]
        return (
            "ranks: needs two methods on at least two data sets; found only "
            f"{', '.join(found_only) or 'none'}"
        )
    from scipy.stats import friedmanchisquare

    found = table.rank(axis=1, ascending=False).mean().sort_values(kind="stable")
    gap = critical_difference(len(found), len(table))
    p = friedmanchisquare(*table.to_numpy().T).pvalue if len(found) > 2 else math.nan
    figure, split = new_figure(6.6, 1.1 + 0.2 * len(found)), choice.split_of(shown["run"])
    _diagram(figure, found, gap if math.isnan(p) or p < LEVEL else math.inf)
    said = f"average rank over {len(table)} data sets ({', '.join(table.index)}), 1 is best; "
    said += f"{choice.rounds}{BOTH.get(split, '')}; ranks that differ by less than {gap:.2f} "
    said += "(Nemenyi, 5 %) are joined"
    said += "" if math.isnan(p) else f"; Friedman's test of any difference: p = {p:.2g}"
    if len(table) <= _FEW:
        said += f"\n{len(table)} data sets are few: hardly any difference could be found"
    order = table.T.loc[found.index].rename_axis("series")
    order.insert(0, "average rank", found)
    notes = [note.replace("run of", "mean of") for note in notes]
    notes += [
        f"Spearman's correlation of {len(found)} methods, {one} and {other}: "
        + rank_correlation(table.loc[one].to_numpy(), table.loc[other].to_numpy()).text(
            2, signed=True
        )
        for one, other in combinations(table.index, 2)
    ]
    title = f"Ranks over data sets{under}: {SPLIT_NAMES[split]}"
    name = f"ranks{choice.suffix}"
    return layout(name, figure, title, said, numbers=order.reset_index(), notes=notes)


def _shared(runs: pd.DataFrame, choice: Selection) -> tuple[pd.DataFrame, Sequence[str]]:
    """Return the means of the methods that data sets share, by data set, and notes on omissions."""
    protocols = {*runs["protocol"]}
    largest: dict[str, Frame] = {}

    def size(frame: Frame) -> tuple[int, int, str]:
        return -len({run.method for run in frame.runs}), -len(frame.runs), frame.name

    for frame in sorted(frames(runs), key=size):
        largest.setdefault(frame.runs[0].dataset, frame)
    rows = []
    for frame in largest.values():
        first = frame.runs[0]
        under = f" ({TITLES.get(first.protocol, first.protocol)})"
        name = dataset_title(first.dataset, first.label) + under * (len(protocols) > 1)
        values, scenarios, _ = comparable(choice.values(frame.runs))
        rows += [(p.series, name, 0, 0, p.mean) for p in means(values, scenarios).itertuples()]
    measured = pd.DataFrame(rows, columns=["series", "scenario", "seed", "x", "value"])
    shared, _, notes = comparable(measured[measured.groupby("series").x.transform("size") > 1])
    return shared.pivot_table(index="scenario", columns="series", values="value"), notes


def _diagram(figure: Figure, ranks: pd.Series[float], gap: float) -> None:
    """Draw methods at their ranks, and bars that join those closer than the gap."""
    axes = figure.subplots()
    for place, (name, rank) in enumerate(ranks.items()):
        axes.plot([rank, rank, len(ranks) + 0.3], [-1, place, place], color="black", linewidth=0.8)
        axes.annotate(f" {name}  {rank:.2f}", (len(ranks) + 0.3, place), va="center")
    bars = 0
    last = -1
    values = ranks.to_numpy()
    for first, rank in enumerate(values):
        end = int(np.flatnonzero(values - rank < gap)[-1])
        if end > first and end > last:
            bars, last = bars + 1, end
            span = [rank - 0.05, values[end] + 0.05]
            axes.plot(span, [-1 + 0.35 * bars] * 2, color="black", linewidth=3)
    axes.set_xlim(0.9, len(ranks) + 0.3)
    axes.set_ylim(len(ranks), -1)
    axes.xaxis.tick_top()
    axes.set_xticks(range(1, len(ranks) + 1))
    axes.set_yticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.spines["top"].set_visible(True)


RULES: tuple[Rule, ...] = ("last", "mean_last_5", "best_by_id_val")
"""Selection rules that are compared, if the runs support them."""
FEWEST_SEEDS = 5
"""Minimum number of seeds of a method on a scenario; fewer give a poor deviation estimate."""
BITS = ("portable", "engine.clients", "engine.together")
"""Settings that change numbers only by rounding."""
_SHOWN = range(2, 11)
_NAMED = (3, 5)

Twins = Mapping[int, Sequence[RecordedRun]]
"""Seed -> its runs: the first, and those that differ from it only in rounding."""


def noise(runs: pd.DataFrame, choice: Selection) -> Iterator[Picture | str]:
    """Yield a figure for each frame in which a method has enough seeds on one scenario.

    Runs of one seed that differ only in `BITS`, or that were made on another CPU and are in another
    results folder, show the effect of rounding on the results.
    """
    copies: dict[str, list[RecordedRun]] = {}
    for root in choice.results[1:]:
        for run in read_folder(root)[0]:
            copies.setdefault(run.key, []).append(run)
    found = [picture for frame in frames(runs) if (picture := _of_frame(frame, choice, copies))]
    yield from found or (
        f"noise: needs {FEWEST_SEEDS} seeds of a method on a scenario, and no records have "
        f"them; make some: feddg-bench run --seeds 0-{FEWEST_SEEDS - 1}{choice.into}",
    )


def _of_frame(
    frame: Frame, choice: Selection, copies: Mapping[str, Sequence[RecordedRun]]
) -> Picture | None:
    seeds: dict[tuple[str, str], dict[int, list[RecordedRun]]] = {}
    for label, run in series(frame.runs, BITS):
        mine = seeds.setdefault((label, run.scenario), {}).setdefault(run.seed, [])
        other = [c for c in copies.get(run.key, ()) if _elsewhere(c, run)]
        mine += [run, *other]
    label, scenario = min(seeds, key=lambda k: (-len(seeds[k]), k[0] != REFERENCE, k))
    twins = {
        seed: sorted(found, key=lambda run: (bool(run.get("portable")), run.key))
        for seed, found in sorted(seeds[label, scenario].items())
    }
    split = choice.split_of(frame.runs)
    values = {rule: _values(twins, rule, split) for rule in RULES}
    values = {rule: found for rule, found in values.items() if len(found) == len(twins)}
    if len(twins) < FEWEST_SEEDS or not values:
        return None
    return _draw(frame, choice, split, f"{label} on {scenario}", values)


def _elsewhere(copy: RecordedRun, run: RecordedRun) -> bool:
    """Return whether a run of the same key was made on another CPU or has other results."""
    cpus = {one.environment.get("cpu") for one in (copy, run)}
    return len(cpus) > 1 or copy.measured != run.measured


def _values(twins: Twins, rule: Rule, split: str) -> dict[int, list[float]]:
    """Return the key metric of each seed's runs, for seeds whose runs all have it."""
    found = {
        seed: [key_metric(run, run.evaluation(rule), split) for run in mine]
        for seed, mine in twins.items()
    }
    return {s: [v for v in vs if v is not None] for s, vs in found.items() if None not in vs}


def _draw(
    frame: Frame,
    choice: Selection,
    split: str,
    title: str,
    values: Mapping[Rule, Mapping[int, list[float]]],
) -> Picture:
    figure = new_figure(6.6, 3.8)
    left, right = figure.subplots(1, 2, width_ratios=(3, 4))
    firsts = {rule: [mine[0] for mine in found.values()] for rule, found in values.items()}
    for seed in next(iter(values.values())):
        left.plot([found[seed][0] for found in values.values()], color=PALE, linewidth=0.6)
    said, rows = [], []
    deviations: list[float] = []
    for place, (rule, found) in enumerate(values.items()):
        spread = deviation(firsts[rule])
        gaps = [abs(twin - mine[0]) for mine in found.values() for twin in mine[1:]]
        style = {"color": COLOURS[place], "marker": MARKERS[place]}
        left.plot([place] * len(found), firsts[rule], linestyle="", **style)
        for mine in found.values():
            aside = [place + 0.15] * len(mine[1:])
            left.plot(aside, mine[1:], linestyle="", fillstyle="none", **style)
        shown = [smallest_difference(spread.value, n) for n in _SHOWN]
        right.plot(_SHOWN, shown, linestyle=LINES[place], label=rule, **style)
        three, five = (shown[_SHOWN.index(n)] for n in _NAMED)
        line = f"{rule}: deviation {spread.text(2)}; "
        line += f"three seeds detect {three:.2f}, five {five:.2f}"
        if gaps:
            line += f"; last bits: {fmean(gaps):.2f} (up to {max(gaps):.2f})"
        if place and deviations[0] > 0:
            ratio = (spread.value / deviations[0]) ** 2
            line += f"; needs {ratio:.2f} times the seeds of {next(iter(values))}"
        deviations.append(spread.value)
        said.append(line)
        rows += [
            (rule, seed, "other last bits" if n else "first", value)
            for seed, mine in found.items()
            for n, value in enumerate(mine)
        ]
    left.set_xticks(range(len(values)), labels=[rule.replace("_", "\n", 1) for rule in values])
    left.set_xlim(-0.5, len(values) - 0.5)
    left.set_ylabel(truncated(frame.metric_label(split), left.get_ylim()[0]))
    right.set_xlabel("seeds of each method")
    right.set_ylabel("detectable difference")
    right.set_ylim(0)
    for n in _NAMED:
        right.axvline(n, color=PALE, linewidth=0.6, zorder=0)
    left.grid(axis="y")
    right.grid(axis="y")
    about = (
        f"{len(next(iter(values.values())))} seeds{BOTH.get(split, '')}; hollow marks and last "
        "bits: the same seed, its sums rounded differently; right: true difference between two "
        "methods with this scatter that an unpaired test finds with 80 % power"
    )
    drawn = figure, "\n".join([about, *said]), zip(*right.get_legend_handles_labels(), strict=True)
    numbers = pd.DataFrame(rows, columns=["rule", "seed", "run", "value"])
    shows = f"noise of {title}, {SPLIT_NAMES[split]}"
    return of_frame("noise", frame, choice, shows, drawn, numbers)
