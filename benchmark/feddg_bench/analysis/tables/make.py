"""Make finished tables from their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast, get_args

from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.describe import (
    COSTS,
    Description,
    compared_with,
    load_description,
    named_tables,
)
from feddg_bench.analysis.tables.generic import (
    by_values,
    leaderboards,
    most_complete,
    shown_as,
    varied,
)
from feddg_bench.analysis.tables.grid import Bold, Grid
from feddg_bench.analysis.tables.reconstructions import DESIGNS, reconstruction_grid
from feddg_bench.analysis.tables.rows import of_setup
from feddg_bench.analysis.tables.writers import csv_text, latex, markdown, notes_text
from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.config.reading import known_name
from feddg_bench.plugins import plugin_name
from feddg_bench.records.attacks import read_attacks
from feddg_bench.records.metrics import METRICS, find_metric
from feddg_bench.records.rules import RULES, Rule
from feddg_bench.records.runs import RecordedRun, read_runs

if TYPE_CHECKING:
    import pandas as pd


WORDS = ("all", "generic")
"""What is accepted besides names of tables."""


@dataclass(frozen=True)
class MadeTable:
    """A finished table, for use in a notebook."""

    grid: Grid

    def frame(self) -> pd.DataFrame:
        """Return the cells as a pandas table with one row per cell, as in the CSV file."""
        import pandas as pd

        return pd.read_csv(StringIO(csv_text(self.grid)), dtype={"seeds": str, "run_keys": str})

    def to_markdown(self) -> str:
        """Return the table as Markdown, with its caption and footnotes."""
        return markdown(self.grid)

    def notes(self) -> str:
        """Return definitions, details, commands for missing cells and run keys, as Markdown."""
        return notes_text(self.grid)

    def to_latex(self) -> str:
        """Return the table as LaTeX."""
        return latex(self.grid)

    _repr_markdown_ = to_markdown


class Made(NamedTuple):
    """Finished tables."""

    grids: list[Grid]
    runs: Sequence[RecordedRun]  # the runs that they are made from
    left: list[str]  # leaderboards of other setups, which `all` leaves out


def make_tables(
    names: Sequence[str],
    folders: Sequence[Path],
    *,
    select: str | None = None,
    against: str | None = None,
    metric: str | None = None,
    recipe: str | None = None,
    others: bool = False,
    variants: bool = False,
    bold: str = "tested",
    also: Sequence[str] = (),
) -> Made:
    """Return tables, each of one setup.

    Args:
        names: ``all``, ``generic`` (a leaderboard for each data set, protocol and setup with runs),
            papers' tables such as ``pardon-1``, or YAML files that describe one. Of several setups
            of a data set and protocol, ``all`` has the leaderboard with the most runs.
        folders: Folders of records, read only when all names are known to be right.
        select: Selection rule in place of each table's own.
        against: Method that the others are compared with in every table.
        metric: Metric in place of each table's own, such as ``macro_f1``; it is then part of the
            table's name.
        recipe: Recipe whose runs are shown, in place of each table's own setup.
        others: Whether papers' tables get rows for the other methods with runs.
        variants: Whether each table is followed by one of all settings that were varied.
        bold: What is marked: ``tested``, ``best`` or ``none``.
        also: Further names that the caller knows, for the message about an unknown one.

    Raises:
        SettingsError: If a name is unknown, or a description cannot be used.
        DataError: If records cannot be read.
    """
    rule, against, metric, marked = _checked(select, against, metric, bold)
    wanted = [name for name in names if name not in ("all", "generic", *DESIGNS)]
    if "all" in names:
        wanted = [*named_tables(), *wanted]
    known = (*DESIGNS, *WORDS, *also)
    described = dict(load_description(name, known) for name in dict.fromkeys(wanted))
    runs = read_runs(folders)
    if recipe is not None and recipe not in {run.recipe for run in runs}:
        raise SettingsError(unknown("recipe of these runs", recipe, {run.recipe for run in runs}))
    end = "" if metric is None else f"-{metric}"

    def make(name: str, of: Description, mine: Sequence[RecordedRun], **more: bool) -> None:
        shown = _measuring(of, metric, mine)
        grids.append(build(name + end, shown, mine, select=rule, bold=marked, **more))

    grids: list[Grid] = []
    left: list[str] = []
    if {"all", "generic"} & set(names):
        tables = leaderboards(runs, against, recipe)
        shown = tables if "generic" in names else most_complete(tables)
        left = [table.name for table in tables if table not in shown]
        if variants:
            setups = {table.setup for table in shown}
            shown += [t for t in varied(runs, recipe) if t.setup in setups]
        for table in shown:
            whole = table.name != table.setup
            make(table.name, table.description, table.runs, any_paper=True, variants=whole)
    for name, description in described.items():
        chosen = description if against is None else compared_with(description, against)
        chosen = chosen.model_copy(update={"others": others or chosen.others})
        mine = of_setup(chosen, runs, recipe)
        make(name, chosen, mine)
        if variants:
            title = f"{chosen.title}: what was varied"
            whole_table = chosen.model_copy(update={"title": title})
            make(f"{name}-variants", whole_table, mine, variants=True)
    if drawn := [name for name in DESIGNS if {"all", name} & set(names)]:
        attacks = read_attacks(folders)
        grids += [reconstruction_grid(name, attacks) for name in drawn]
    return Made(grids, runs, left)


def make_table(
    rows: Sequence[str],
    columns: str,
    folders: Sequence[Path],
    *,
    dataset: str | None = None,
    protocol: str | None = None,
    recipe: str | None = None,
    select: str | None = None,
    against: str | None = None,
    metric: str | None = None,
    bold: str = "tested",
) -> Made:
    """Return one table: a row for each method, a column for each value of a field or a setting.

    For arguments see `make_tables` and `by_values`.

    Raises:
        SettingsError: If a name is unknown, no run fits, or several data sets or protocols do.
        DataError: If records cannot be read, or a cell would average runs that differ.
    """
    rule, against, metric, marked = _checked(select, against, metric, bold)
    methods = list(dict.fromkeys(plugin_name("method", name) for name in rows))
    given = None if dataset is None else plugin_name("data set", dataset)
    runs = read_runs(folders)
    name, description = by_values(methods, columns, runs, given, protocol, recipe)
    if against is not None:
        description = compared_with(description, against)
    mine = of_setup(description, runs, recipe)
    shown = _measuring(description, metric, mine)
    return Made([build(name, shown, mine, select=rule, bold=marked)], runs, [])


def _checked(
    select: str | None, against: str | None, metric: str | None, bold: str
) -> tuple[Rule | None, str | None, str | None, Bold]:
    """Return the selection rule, the method, the metric and the marks as they are spelt here."""
    if select is not None and select not in RULES:
        raise SettingsError(unknown("selection rule", select, RULES))
    if bold not in get_args(Bold):
        raise SettingsError(unknown("kind of mark", bold, get_args(Bold)))
    if metric is not None:
        metric = known_name(metric, METRICS)
        if metric not in METRICS:
            raise SettingsError(unknown("metric", metric, METRICS))
    method = against and plugin_name("method", against)
    return select, method, metric, cast(Bold, bold)


def _measuring(
    description: Description, metric: str | None, runs: Sequence[RecordedRun]
) -> Description:
    """Return a description with another metric in all columns but those of costs."""
    if metric is None:
        return description
    task = runs[0].task if runs else "classification"
    groups = [
        group.model_copy(
            update={
                "metric": None,
                "columns": [
                    c if c.metric in COSTS else c.model_copy(update={"metric": None})
                    for c in group.columns
                ],
            }
        )
        for group in description.groups
    ]
    wanted = {**shown_as(find_metric(metric, task)), "lower_is_better": metric == "loss"}
    return description.model_copy(update={**wanted, "groups": groups})
