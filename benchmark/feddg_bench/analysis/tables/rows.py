"""Rows of a table and their values from runs.

The runs' DataFrame ends here: `tables all` selects the runs of 47,000 cells, which took 4.7 seconds
as filters of a DataFrame. Rows therefore hold lists of runs and dictionaries of numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from feddg_bench.analysis.tables.columns import MeasuredColumn, measured_columns, varied_keys
from feddg_bench.analysis.tables.describe import Description, RowSpec, RunFilter, filtered, fitting
from feddg_bench.analysis.tables.setups import (
    Variant,
    in_track,
    least_departing,
    setups,
    split,
    usual_settings,
)
from feddg_bench.common.errors import DataError
from feddg_bench.config.recipes import recipe_rank
from feddg_bench.plugins import method_title
from feddg_bench.records.differences import setting_text, varying
from feddg_bench.records.frame import runs_where
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import curve
from feddg_bench.records.runs import RecordedRun, metric_of
from feddg_bench.records.statistics import Measured, Sample

if TYPE_CHECKING:
    import pandas as pd

NO_RUNS = Variant("", {}, ())
FRAMES = ("partition.", "federation.", "backbone.")
"""Prefixes of the settings that make up the setup of a paper's table."""


@dataclass(eq=False)
class Row:
    """Runs that agree in all that no column varies, or no runs; must not change after reading."""

    spec: RowSpec
    label: str  # text of its first cell
    where: RunFilter | None  # filter of its runs, including the table's; None for published rows
    variant: Variant = NO_RUNS  # its runs and differences
    values: dict[int, Sample] = field(default_factory=dict)  # column -> its values
    runs: dict[int, list[RecordedRun]] = field(default_factory=dict)  # column -> its runs
    silent: set[int] = field(default_factory=set)  # columns for which its runs have no number

    @property
    def members(self) -> tuple[RecordedRun, ...]:
        """All its runs."""
        return self.variant.runs

    @property
    def method(self) -> str:
        """Name of its method; empty if it has none or several."""
        method = (self.where or {}).get("method")
        return method if isinstance(method, str) else ""

    @cached_property
    def sample(self) -> Sample:
        """The values of all columns."""
        return self.part(self.values)

    def part(self, columns: Iterable[int]) -> Sample:
        """Return the values of some columns."""
        found = [self.values.get(column, {}) for column in columns]
        return found[0] if len(found) == 1 else {k: v for one in found for k, v in one.items()}


def make_rows(
    table: str,
    description: Description,
    columns: Sequence[MeasuredColumn],
    runs: Sequence[RecordedRun],
    variants: bool = False,
) -> list[Row]:
    """Return the rows of `choose_rows` with their values.

    Raises:
        DataError: If one cell would hold runs that differ, or two runs of one seed.
    """
    return fill_rows(table, description, columns, choose_rows(description, columns, runs, variants))


def fill_rows(
    table: str,
    description: Description,
    columns: Sequence[MeasuredColumn],
    rows: Sequence[Row],
) -> list[Row]:
    """Return the rows of `choose_rows` with the numbers of their runs.

    Raises:
        DataError: If one cell would hold runs that differ, or two runs of one seed.
    """
    free = varied_keys(description)
    return [_filled(table, row, columns, free) for row in rows]


def choose_rows(
    description: Description,
    columns: Sequence[MeasuredColumn],
    runs: Sequence[RecordedRun],
    variants: bool = False,
) -> list[Row]:
    """Return the rows without values, those of the description first.

    A row holds the runs that depart least from the recipe's usual settings (`least_departing`).
    With ``variants``, a row whose runs differ in settings is split into several instead.
    """
    by_method: dict[str, list[RecordedRun]] = {}
    for run in fitting(runs, description.where):
        by_method.setdefault(run.method, []).append(run)
    specs = list(description.rows)
    if description.others:
        listed = {{**description.where, **(spec.where or {})}.get("method") for spec in specs}
        specs += [
            RowSpec(label=method_title(method), where={"method": method})
            for method in sorted(set(by_method) - listed)
        ]
    free, filters = varied_keys(description), _filters(columns)
    rows: list[Row] = []
    for place, spec in enumerate(specs):
        if spec.where is None:
            rows.append(Row(spec, spec.label, None))
            continue
        where = {**description.where, **spec.where}
        method = where.get("method")
        named = [method] if isinstance(method, str) else sorted(by_method)
        pool = [run for name in named for run in by_method.get(name, ())]
        mine = fitting(pool, spec.where)
        used = {run.key for own in filters.values() for run in fitting(mine, own)}
        if used:
            mine = [run for run in mine if run.key in used]
            chosen = Variant("", {}, tuple(least_departing(mine, where, free)))
            for variant in split(mine, free) if variants else [chosen]:
                label = f"{spec.label} ({variant.label})" if variant.label else spec.label
                rows.append(Row(spec, label, where, variant))
        elif place < len(description.rows):
            rows.append(Row(spec, spec.label, where))
    return rows


def _filled(table: str, row: Row, columns: Sequence[MeasuredColumn], free: Collection[str]) -> Row:
    """Return a row with the numbers of its runs; they may differ in the settings ``free``."""
    full = Row(row.spec, row.label, row.where, row.variant)
    order = sorted(row.members, key=lambda run: (run.scenario, run.seed, run.key))
    of_filter = {key: fitting(order, own) for key, own in _filters(columns).items()}
    for column in columns if row.members else ():
        _fill(table, full, column, of_filter[repr(column.own)], free)
    return full


def _filters(columns: Sequence[MeasuredColumn]) -> dict[str, RunFilter]:
    """Return the distinct filters of columns; columns that differ only in split share runs."""
    return {repr(column.own): column.own for column in columns}


def of_setup(
    description: Description, runs: pd.DataFrame, recipe: str | None = None
) -> tuple[Description, Sequence[RecordedRun]]:
    """Return a table's description and runs in the setup that it shows.

    It is the setup of the recipe with the highest `rank` that is complete: it has a number in each
    cell for which any setup has one. If none is complete, it is the one with the most numbers.
    Setups of another track than a paper's are left out (`in_track`). ``recipe`` overrides all this.
    All runs count if the description filters by recipe.

    The description is `in_frame_of` the setup.
    """
    columns = measured_columns(description, None)
    filters = [spec.where or {} for spec in description.rows]
    if any("recipe" in where for where in (*filters, *(column.where for column in columns))):
        return description, [*runs["run"]]
    made = []
    free = {key: where for key, where in description.where.items() if not key.startswith(FRAMES)}
    fit = filtered(runs, free)
    if description.paper and recipe is None:
        fit = runs_where(fit, lambda run: in_track(run, description.own_recipe))
    for _, setup in setups(fit):
        mine = [*setup["run"]]
        if recipe in (None, mine[0].recipe):
            adapted = in_frame_of(mine[0], description)
            rows = make_rows("", adapted, measured_columns(adapted, None), mine)
            if cells := {(row.label, place) for row in rows for place, _ in row.sample}:
                numbers = sum(len(row.sample) for row in rows)
                made.append((mine, adapted, cells, numbers))
    whole = {cell for _, _, cells, _ in made for cell in cells}

    def place(
        one: tuple[list[RecordedRun], Description, set[Any], int],
    ) -> tuple[bool, int, bool, int]:
        (first, *_), _, cells, numbers = one
        complete = cells == whole
        own = first.recipe == description.own_recipe
        return complete, recipe_rank(first.recipe) * complete, own, numbers

    best = max(made, key=place, default=None)
    return (description, ()) if best is None else (best[1], best[0])


def in_frame_of(run: RecordedRun, description: Description) -> Description:
    """Return a paper's table for runs of another recipe than the paper's.

    Where the table asks for the usual number of clients of the paper's recipe, for example, it then
    asks for that of the run's recipe. Other tables, and runs of the paper's recipe, keep theirs.
    """
    if description.paper is None or run.recipe == description.own_recipe:
        return description
    papers = usual_settings(description.own_recipe, run.dataset) or {}
    ours = usual_settings(run.recipe, run.dataset) or {}
    usual = {
        key: ours[key]
        for key, value in description.where.items()
        if key.startswith(FRAMES) and key in ours and papers.get(key) == value
    }
    where = {**description.where, **usual}
    return description.model_copy(update={"where": where, "framed": tuple(usual)})


def on_split(row: Row, column: MeasuredColumn, split: str) -> Sample:
    """Return a row's numbers in a column on another split; empty if none was measured."""
    other = replace(column, split=split)
    found = {_place(run, column): _value(run, other) for run in row.runs.get(column.number, ())}
    return {place: value for place, value in found.items() if value is not None}


def by_round(
    row: Row, columns: Sequence[MeasuredColumn], split: str | None = None
) -> dict[int, Sample]:
    """Return a row's numbers in some columns, after each round that all runs evaluated.

    Args:
        row: Row whose runs are read.
        columns: Columns with a split.
        split: Split to read in place of that of each column.
    """
    found: dict[int, dict[Measured, float]] = defaultdict(dict)
    runs = [(run, column) for column in columns for run in row.runs.get(column.number, ())]
    for run, column in runs:
        place, show = _place(run, column), find_metric(column.metric, run.task).display
        values = curve(run.table, split or str(column.split), column.metric, column.spec.over)
        for number, value in zip(run.table.rounds, values, strict=True):
            if value is not None:
                found[number][place] = show(value)
    return {number: sample for number, sample in found.items() if len(sample) == len(runs)}


def _fill(
    table: str, row: Row, column: MeasuredColumn, runs: Sequence[RecordedRun], free: Collection[str]
) -> None:
    """Put the numbers of a cell's runs into its row."""
    cell = f"the cell {column.spec.head!r} of row {row.label!r} in table {table}"
    for dataset in sorted({run.dataset for run in runs} if free else ()):
        mine = [{k: setting_text(r.get(k)) for k in free} for r in runs if r.dataset == dataset]
        for key in sorted(varying(mine)):
            found = " and ".join(sorted({one[key] for one in mine}))
            raise DataError(
                f"{cell} would average runs with {key} {found}; say which under the column's "
                f"`where`"
            )
    taken: dict[Measured, RecordedRun] = {}
    values: dict[Measured, float] = {}
    for run in runs:
        value = _value(run, column)
        if value is None:
            row.silent.add(column.number)
            continue
        pair = _place(run, column)
        if pair in taken:
            raise DataError(
                f"runs {taken[pair].key} and {run.key} have one seed and would both fall into "
                f"{cell}; move one of the records away, or tell them apart under `where`"
            )
        taken[pair] = run
        values[pair] = value
    row.values[column.number], row.runs[column.number] = values, list(taken.values())


def _place(run: RecordedRun, column: MeasuredColumn) -> Measured:
    """Return a run's place and seed; its unit is the set of domains that it was trained on."""
    return (column.number, f"{run.dataset} {run.protocol} {run.train}", run.scenario), run.seed


def _value(run: RecordedRun, column: MeasuredColumn) -> float | None:
    """Return a run's number in a column; shares are in percent."""
    if column.split is None:
        return run.costs.get(column.metric)
    evaluation = run.evaluation(column.rule)
    if evaluation is None:
        return None
    value = metric_of(run, evaluation, column.split, column.metric, column.spec.over)
    return None if value is None else find_metric(column.metric, run.task).display(value)
