"""Records that a figure shows, and the numbers of its series."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from feddg_bench.analysis.figures.drawing import Drawn, Picture, layout
from feddg_bench.analysis.tables.captions import RULE_SENTENCES
from feddg_bench.analysis.tables.generic import Frame
from feddg_bench.analysis.tables.setups import split as split_variants
from feddg_bench.common.errors import DataError, SettingsError, unknown
from feddg_bench.common.files import file_name
from feddg_bench.common.titles import counted
from feddg_bench.config.reading import composed, read_names
from feddg_bench.data.protocols import PROTOCOLS
from feddg_bench.plugins import method_title, names
from feddg_bench.records.frame import read_frame
from feddg_bench.records.rules import RULES, UNSEEN, Rule, curve, unseen_splits
from feddg_bench.records.runs import RecordedRun, key_metric
from feddg_bench.records.sources import FOLDERS

SPLIT_NAMES: Mapping[str, str] = {
    UNSEEN: "unseen domains",
    "test": "test domain",
    "val": "validation domain",
    "id_test": "held-out images of the training domains (id_test)",
    "id_val": "held-out images of the training domains (id_val)",
}


@dataclass(frozen=True)
class Selection:
    """Records to draw, and which of their numbers; ``None`` means all."""

    results: tuple[Path, ...] = (FOLDERS[0],)  # folders of records
    dataset: tuple[str, ...] | None = None  # names of data sets
    protocol: tuple[str, ...] | None = None  # names of protocols
    scenario: tuple[str, ...] | None = None  # names of scenarios
    method: tuple[str, ...] | None = None  # names of methods
    recipe: tuple[str, ...] | None = None  # labels of recipes
    split: str = UNSEEN  # the split whose key metric is drawn; see `split_of`
    rule: Rule = "last"  # the selection rule, if a single round of a run is drawn

    @property
    def suffix(self) -> str:
        """End of file names that distinguishes this selection from the default one."""
        parts = [*(self.scenario or ()), *(self.method or ())]
        parts += [self.split] if self.split != UNSEEN else []
        parts += [self.rule] if self.rule != "last" else []
        return f"-{file_name('-'.join(parts))}" if parts else ""

    def runs(self) -> pd.DataFrame:
        """Return the selected runs, a row each; see `read_frame`.

        Raises:
            SettingsError: If a name is known neither to the suite nor to the records.
            DataError: If there are no such runs, or a record is damaged.
        """
        for kind, name, known in (
            ("split", self.split, SPLIT_NAMES),
            ("selection rule", self.rule, RULES),
        ):
            if name not in known:
                raise SettingsError(unknown(kind, name, known))
        found = read_frame(self.results)
        said = ["feddg-bench run"]
        for field, what, installed in (
            ("dataset", "data set", names("data set")),
            ("protocol", "protocol", PROTOCOLS),
            ("method", "method", names("method")),
            ("scenario", "scenario of these records", ()),
            ("recipe", "recipe of these records", ()),
        ):
            asked = getattr(self, field)
            if asked is None:
                continue
            have = {*found[field], *installed}
            if have:
                asked = read_names(what, asked, have)
            said += [f"--{field} {','.join(asked)}"] if asked else []
            same = {composed(name) for name in asked}
            found = found[found[field].isin([name for name in have if composed(name) in same])]
        if found.empty:
            folders = ", ".join(map(str, self.results))
            raise DataError(
                f"no records in {folders} match; make some: {' '.join(said)}{self.into}"
            )
        return found

    @property
    def into(self) -> str:
        """The option by which a command records into the first folder; empty by default."""
        return f" --results {self.results[0]}" if self.results[0] != FOLDERS[0] else ""

    @property
    def rounds(self) -> str:
        """The rounds that count, in the words of tables."""
        return RULE_SENTENCES[self.rule].format(metric="key metric")

    def split_of(self, runs: Iterable[RecordedRun]) -> str:
        """Return the split to draw: as in tables, `test` where the runs have one unseen domain."""
        both = self.split == UNSEEN and len(unseen_splits(self.rule)) > 1
        measured = both and any(split == "val" for run in runs for split, *_ in run.table.columns)
        return self.split if measured or self.split != UNSEEN else "test"

    def values(self, runs: Sequence[RecordedRun]) -> pd.DataFrame:
        """Return the key metric of runs in the round that the rule chooses, at x = 0."""
        split = self.split_of(runs)

        def value(run: RecordedRun) -> dict[float, float]:
            found = key_metric(run, run.evaluation(self.rule), split)
            return {} if found is None else {0: found}

        return measure_series(runs, value)


def series(
    runs: Iterable[RecordedRun], free: Collection[str] = ()
) -> Iterator[tuple[str, RecordedRun]]:
    """Yield each run with the label of its series: the method's title and other differences.

    The settings ``free`` may vary inside a series.
    """
    by_method: dict[str, list[RecordedRun]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    for method, mine in sorted(by_method.items()):
        for variant in split_variants(mine, free):
            label = method_title(method) + f" ({variant.label})" * bool(variant.label)
            for run in sorted(variant.runs, key=lambda run: run.key):
                yield label, run


def measure_series(
    runs: Iterable[RecordedRun],
    numbers: Callable[[RecordedRun], Mapping[Any, float]],
    free: Collection[str] = (),
) -> pd.DataFrame:
    """Return measured values, with columns ``series, scenario, seed, x, value``.

    ``numbers`` returns the values of a run by x; for ``free`` see `series`.
    """
    rows = [
        (label, run.scenario, run.seed, x, value)
        for label, run in series(runs, free)
        for x, value in numbers(run).items()
    ]
    return pd.DataFrame(rows, columns=["series", "scenario", "seed", "x", "value"])


def comparable(
    values: pd.DataFrame, least: int = 1
) -> tuple[pd.DataFrame, frozenset[str], list[str]]:
    """Return the points that share scenarios, these scenarios, and a note on each series left out.

    Means over different scenarios cannot be compared. The chosen scenarios keep the most values
    (points times scenarios) of series that keep at least ``least`` points.
    """
    if values.empty:
        return values, frozenset(), []
    there = values.groupby(["series", "x"]).scenario.agg(frozenset)

    def kept(scenarios: frozenset[str]) -> int:
        counts = there.map(scenarios.issubset).groupby(level="series").sum()
        return int(counts[counts >= least].sum())

    best: frozenset[str] = max(
        set(there), key=lambda chosen: (kept(chosen) * len(chosen), kept(chosen), sorted(chosen))
    )
    whole = there.map(best.issubset)
    out: dict[str, list[str]] = {}
    for name, count in whole.groupby(level="series").sum().items():
        if count < least:
            lacks = ", ".join(sorted(best - frozenset().union(*there[name])))
            why = f"no run of {lacks}" if lacks else f"{counted(count, 'point')} on this axis"
            out.setdefault(why, []).append(str(name))
    notes = [f"left out ({why}): {', '.join(names)}" for why, names in out.items()]
    counts = whole.groupby(level="series").transform("sum")
    index = pd.MultiIndex.from_frame(values[["series", "x"]])
    keep = (whole & (counts >= least)).reindex(index).to_numpy(dtype=bool)
    return values[keep & values.scenario.isin(best).to_numpy()], best, notes


def means(values: pd.DataFrame, scenarios: Collection[str]) -> pd.DataFrame:
    """Return means over seeds of means over scenarios: ``series, x, mean, std, seeds, low, high``.

    A seed counts at an x if it has all scenarios there; ``std`` is the sample standard deviation
    over seeds, NaN for one seed; ``low`` and ``high`` are one ``std`` from the mean.
    """
    here = values[values.scenario.isin(list(scenarios))].drop_duplicates(
        ["series", "x", "seed", "scenario"], keep="last"
    )
    seeds = here.groupby(["series", "x", "seed"]).value.agg(["mean", "count"]).reset_index()
    whole = seeds[seeds["count"] == len(scenarios)].groupby(["series", "x"])
    found = whole.agg(mean=("mean", "mean"), std=("mean", "std"), seeds=("seed", tuple))
    ends = {"low": found["mean"] - found["std"], "high": found["mean"] + found["std"]}
    return found.assign(**ends).reset_index()


def over_their_seeds(
    values: pd.DataFrame, points: pd.DataFrame, reference: str
) -> dict[str, pd.DataFrame]:
    """Return the reference's values over the seeds of each series that lacks some of its seeds.

    Two curves over different seeds differ because of the seeds too. ``points`` are the `means` of
    ``values``: they name the seeds that count. A series that shares no seed with the reference has
    an empty frame.
    """
    there = values[values.series == reference]
    seeds = {str(name): set().union(*counted) for name, counted in points.groupby("series").seeds}
    every = seeds.get(reference, set())
    return {name: there[there.seed.isin(mine)] for name, mine in seeds.items() if not mine >= every}


BAND = "; band: one standard deviation over seeds"


BOTH = {UNSEEN: ", over val and test"}
"""Split -> the domains that its mean is over, as part of a sentence."""


def over(frame: Frame, split: str, scenarios: Collection[str], points: pd.DataFrame) -> str:
    """Return text on the scenarios, domains and number of seeds that means are over."""
    counts = sorted(set(points.seeds.map(len))) or [0]
    many = " to ".join(map(str, counts if len(counts) == 1 else (counts[0], counts[-1])))
    said = f"{many} seed{'s' * (counts != [1])}"
    if len(scenarios) == 1:
        (name,) = scenarios
        return f"scenario {frame.scenario_labels(split)[name]}{BOTH.get(split, '')}, {said}"
    return f"mean over {len(scenarios)} scenarios{BOTH.get(split, '')}, {said}"


def of_frame(
    kind: str,
    frame: Frame,
    choice: Selection,
    shows: str,
    drawn: Drawn,
    numbers: pd.DataFrame,
    notes: Iterable[str] = (),
) -> Picture:
    """Finish a figure of a frame: ``kind`` begins its name, ``shows`` ends its title."""
    figure, said, key = drawn
    name = f"{kind}-{frame.name}{choice.suffix}"
    return layout(name, figure, f"{frame.title}: {shows}", said, key, numbers, notes)


def curve_of(run: RecordedRun, split: str) -> dict[int, float]:
    """Return the key metric on a split after each round that was evaluated."""
    parts = ("val", "test") if split == UNSEEN else (split,)
    each = [curve(run.table, part, run.metric.name) for part in parts]
    return {
        number: fmean(map(run.metric.display, known))
        for number, *values in zip(run.table.rounds, *each, strict=True)
        if len(known := [value for value in values if value is not None]) == len(parts)
    }
