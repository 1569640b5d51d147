"""Figure of noise: how far seeds lie apart, and how large a difference between methods must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from feddg_bench.analysis.figures.curves import REFERENCE
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
from feddg_bench.analysis.figures.series import SPLIT_NAMES, Selection, series
from feddg_bench.analysis.tables.generic import Frame, frames
from feddg_bench.records.rules import Rule
from feddg_bench.records.runs import RecordedRun, key_metric, read_folder
from feddg_bench.records.statistics import deviation, smallest_difference

RULES: tuple[Rule, ...] = ("last", "mean_last_5", "best_by_id_val")
"""Selection rules that are compared, if the runs can follow them."""
FEWEST_SEEDS = 5
"""Seeds needed of one method on one scenario; fewer say little about a deviation."""
BITS = ("portable", "engine.clients", "engine.together")
"""Settings that change only the last bits of numbers."""
_SHOWN = range(2, 11)
_NAMED = (3, 5)

Twins = Mapping[int, Sequence[RecordedRun]]
"""Seed -> its runs: the first, and those that differ from it only in last bits."""


def noise(runs: Sequence[RecordedRun], choice: Selection) -> Iterator[Picture | str]:
    """Yield a figure for each frame in which a method has enough seeds on one scenario.

    Runs of one seed that differ only in `BITS`, or that were made on another processor and lie in
    another results folder, show how much differences in last bits move the results.
    """
    copies: dict[str, list[RecordedRun]] = {}
    for root in choice.results[1:]:
        for run in read_folder(root)[0]:
            copies.setdefault(run.key, []).append(run)
    found = [picture for frame in frames(runs) if (picture := _of_frame(frame, choice, copies))]
    yield from found or (
        f"noise: it takes {FEWEST_SEEDS} seeds of a method on a scenario, and no records have "
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
    values = {rule: _values(twins, rule, choice.split) for rule in RULES}
    values = {rule: found for rule, found in values.items() if len(found) == len(twins)}
    if len(twins) < FEWEST_SEEDS or not values:
        return None
    return _draw(frame, choice, f"{label} on {scenario}", values)


def _elsewhere(copy: RecordedRun, run: RecordedRun) -> bool:
    """Return whether a run of the same key was made on another processor, or has other results."""
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
    frame: Frame, choice: Selection, title: str, values: Mapping[Rule, Mapping[int, list[float]]]
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
        line = f"{rule}: deviation {spread.value:.2f} [{spread.low:.2f}, {spread.high:.2f}]; "
        line += f"three seeds show {three:.2f}, five {five:.2f}"
        if gaps:
            line += f"; last bits: {sum(gaps) / len(gaps):.2f} (up to {max(gaps):.2f})"
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
    left.set_ylabel(frame.metric_label(choice.split))
    right.set_xlabel("seeds of each method")
    right.set_ylabel("smallest difference shown")
    right.set_ylim(0)
    for n in _NAMED:
        right.axvline(n, color=PALE, linewidth=0.6, zorder=0)
    left.grid(axis="y")
    right.grid(axis="y")
    about = (
        f"{len(next(iter(values.values())))} seeds; hollow, and last bits: a seed's run that has "
        "others; a difference is shown if four of five comparisons of two methods as noisy "
        "as this find it"
    )
    handles, labels = right.get_legend_handles_labels()
    head = f"{frame.title}: noise of {title}, {SPLIT_NAMES[choice.split]}"
    entitle(figure, head, "\n".join([about, *said]), handles, labels)
    sheet = Sheet(("rule", "seed", "run", "value"), tuple(rows))
    return Picture(f"noise-{frame.name}{choice.suffix}", figure, sheet)
