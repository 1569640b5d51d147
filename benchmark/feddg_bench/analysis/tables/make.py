"""Make finished tables by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.describe import (
    COSTS,
    Description,
    GroupSpec,
    compared_with,
    filtered,
    fitting,
    load_description,
    named_tables,
    no_run,
    read_filter,
)
from feddg_bench.analysis.tables.generic import (
    by_values,
    leaderboards,
    most_telling,
    shown_as,
    slug,
    varied,
)
from feddg_bench.analysis.tables.grid import Bold, Grid
from feddg_bench.analysis.tables.rows import of_setup
from feddg_bench.analysis.tables.writers import csv_text, latex, markdown, notes_text
from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.config.reading import known_name, listed
from feddg_bench.data.protocols import PROTOCOLS
from feddg_bench.extensions import extensions
from feddg_bench.plugins import plugin_name
from feddg_bench.records.differences import assignments, setting_text
from feddg_bench.records.frame import read_frame
from feddg_bench.records.metrics import DERIVED, METRICS, find_metric
from feddg_bench.records.rules import RULES, UNSEEN, Rule
from feddg_bench.records.runs import RecordedRun

if TYPE_CHECKING:
    import pandas as pd


BY_TEST_DOMAIN = "by test domain"
"""Head over accuracies of clients, whose images are not of the test domain."""

WORDS = ("all", "generic")
"""Words that are accepted in addition to names of tables."""


@dataclass(frozen=True)
class MadeTable:
    """A finished table, for use in a notebook."""

    grid: Grid

    def frame(self) -> pd.DataFrame:
        """Return the cells as a pandas data frame with one row per cell, as in the CSV file."""
        import pandas as pd

        return pd.read_csv(StringIO(csv_text(self.grid)), dtype={"seeds": str, "run_keys": str})

    def to_markdown(self) -> str:
        """Return the table as Markdown, with its caption and footnotes."""
        return markdown(self.grid)

    def notes(self) -> str:
        """Return notes, details, commands for missing cells and run keys, as Markdown."""
        return notes_text(self.grid)

    def to_latex(self) -> str:
        """Return the table as LaTeX."""
        return latex(self.grid)

    _repr_markdown_ = to_markdown


@dataclass(frozen=True)
class TableOptions:
    """Runs that tables show, and how they show them; each overrides the tables' own choice."""

    dataset: str | None = None
    """Data set of a table made of ``rows`` and ``columns``."""
    protocol: str | None = None
    """Protocol of such a table."""
    recipe: str | None = None
    """Recipe whose runs are shown."""
    filters: Sequence[str] | None = None
    """``KEY=VALUE`` filters of runs, such as ``K=5``; commas separate alternatives."""
    select: str | None = None
    """Selection rule, such as ``mean_last_5``."""
    against: str | None = None
    """Method that the others are compared with."""
    metric: str | None = None
    """Metric, such as ``macro_f1``; it is then appended to the name of a named table."""
    others: bool = False
    """Whether papers' tables also get rows for other methods with runs."""
    variants: bool = False
    """Whether each named table is followed by one with all varied settings."""
    bold: str = "tested"
    """``tested`` marks what a test supports, ``best`` the best and the second, ``none`` nothing."""

    @classmethod
    def of(cls, **given: Any) -> TableOptions:
        """Return options with names in the suite's spelling.

        Raises:
            SettingsError: If a name is unknown.
        """
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise SettingsError(unknown("argument of tables", name, cls.__dataclass_fields__))
        chosen = cls(**given)
        metric = chosen.metric and known_name(chosen.metric, METRICS)
        for kind, value, known in (
            ("selection rule", chosen.select, RULES),
            ("kind of mark", chosen.bold, get_args(Bold)),
            ("metric", metric, METRICS),
        ):
            if value is not None and value not in known:
                raise SettingsError(unknown(kind, str(value), known))
        return replace(
            chosen,
            metric=metric,
            against=chosen.against and plugin_name("method", chosen.against),
            dataset=chosen.dataset and plugin_name("data set", chosen.dataset),
            protocol=chosen.protocol and known_name(chosen.protocol, PROTOCOLS),
        )

    def runs(self, folders: Sequence[Path]) -> pd.DataFrame:
        """Return the recorded runs that match the filters, a row each; see `read_frame`.

        Raises:
            SettingsError: If there are runs, and none matches.
        """
        where, found = read_filter(self.filters or ()), read_frame(folders)
        kept = filtered(found, where)
        if len(found) and not len(kept):
            raise SettingsError(no_run([*found["run"]], where))
        return kept

    def table(
        self,
        name: str,
        described: Description,
        runs: Sequence[RecordedRun],
        *,
        any_paper: bool = False,
        variants: bool = False,
    ) -> Grid:
        """Return the described table of the given runs."""
        shown = described if self.metric is None else _measuring(described, self.metric, runs)
        rule, bold = cast("Rule | None", self.select), cast("Bold", self.bold)
        return build(
            name, shown, runs, select=rule, any_paper=any_paper, variants=variants, bold=bold
        )

    def grids(
        self, name: str, described: Description, runs: Sequence[RecordedRun]
    ) -> Iterator[Grid]:
        """Yield the described table and, if it is asked for, that of all settings varied."""
        end = f"-{self.metric}" if self.metric else ""
        yield self.table(name + end, described, runs)
        if self.variants:
            whole = described.model_copy(update={"title": f"{described.title}: what was varied"})
            yield self.table(f"{name}-variants{end}", whole, runs, variants=True)

    def adapted(self, described: Description) -> Description:
        """Return a description with the requested rows and comparisons."""
        chosen = described if self.against is None else compared_with(described, self.against)
        return chosen.model_copy(update={"others": self.others or chosen.others})


class Made(NamedTuple):
    """Finished tables."""

    grids: list[Grid]
    runs: pd.DataFrame  # the runs that they are made from; see `read_frame`
    left: list[str] = []  # noqa: RUF012  # leaderboards of other setups, omitted by `all`
    others: int = 0  # number of runs in the leaderboards' setups with other settings


def make_tables(
    names: Sequence[str],
    folders: Sequence[Path],
    chosen: TableOptions = TableOptions(),
    also: Sequence[str] = (),
) -> Made:
    """Return tables, each of one setup.

    Args:
        names: ``all``, ``generic`` (a leaderboard for each data set, protocol and setup with runs),
            papers' tables such as ``pardon-1``, or YAML files that describe one. ``all`` has only
            the largest and the best trained leaderboard for each data set and protocol.
        folders: Folders of records, read only after all names have been checked.
        chosen: Options, see `TableOptions.of`.
        also: Further valid names, for the message about an unknown one.

    Raises:
        SettingsError: If a name is unknown, or a description cannot be used.
        DataError: If records cannot be read.
    """
    added = [name for extension in extensions() for name in extension.grids]
    wanted = [name for name in names if name not in (*WORDS, *added)]
    if "all" in names:
        wanted = [*named_tables(), *wanted]
    known = (*added, *WORDS, *also)
    named = dict(load_description(name, known) for name in dict.fromkeys(wanted))
    runs, recipe = chosen.runs(folders), chosen.recipe
    if recipe is not None and len(runs) and recipe not in (there := {*runs["recipe"]}):
        raise SettingsError(unknown("recipe of these runs", recipe, there))
    end = f"-{chosen.metric}" if chosen.metric else ""
    grids: list[Grid] = []
    left: list[str] = []
    others = 0
    if {"all", "generic"} & set(names):
        tables = leaderboards(runs, chosen.against, recipe)
        shown = tables if "generic" in names else most_telling(tables)
        left = [table.name for table in tables if table not in shown]
        others = sum(table.others for table in shown) * (not chosen.variants)
        if chosen.variants:
            setups = {table.setup for table in shown}
            shown += [t for t in varied(runs, recipe) if t.setup in setups]
        for table in shown:
            name, whole = table.name + end, table.name != table.setup
            described = table.described(cast("Rule | None", chosen.select))
            grids.append(chosen.table(name, described, table.runs, any_paper=True, variants=whole))
    for name, description in named.items():
        adapted = chosen.adapted(description)
        adapted, mine = of_setup(adapted, runs, recipe)
        if recipe is not None and not mine and name in names:
            raise SettingsError(_unfit(name, adapted, runs, recipe))
        made = [*chosen.grids(name, adapted, mine)]
        if made[0].lines or name in names:  # no lines: its rows are methods with runs
            grids += made
    for extension in extensions():
        if asked := [name for name in extension.grids if {"all", name} & set(names)]:
            grids += extension.make_grids(asked, folders)
    return Made(grids, runs, left, others)


def _unfit(name: str, described: Description, runs: pd.DataFrame, recipe: str) -> str:
    """Return why a table shows no run of a recipe."""
    mine = runs.loc[runs["recipe"] == recipe, "run"]
    lacking = {k: v for k, v in described.where.items() if not fitting(mine, {k: v})}
    why = "none of its runs fits a row and a column"
    if lacking:
        why = f"none of its runs has {' '.join(assignments(lacking))}"
    return f"recipe {recipe!r} has no number for the table {name}: {why}; leave out --recipe"


def make_table(
    rows: Sequence[str], columns: str, folders: Sequence[Path], chosen: TableOptions
) -> Made:
    """Return one table with a row per method and a column per value of a field or a setting.

    For arguments see `make_tables` and `by_values`.

    Raises:
        SettingsError: If a name is unknown, no run fits, or several data sets or protocols do.
        DataError: If records cannot be read, or a cell would average runs that differ.
    """
    asked = [] if listed(rows) == ["all"] else listed(rows)
    methods = list(dict.fromkeys(plugin_name("method", name) for name in asked))
    runs = chosen.runs(folders)
    where = chosen.dataset, chosen.protocol, chosen.recipe
    name, described = by_values(methods, columns, runs, *where)
    _, mine = of_setup(chosen.adapted(described), runs, chosen.recipe)
    if mine and "dataset" in described.where:  # columns that only other setups have stay empty
        ours = runs[runs["key"].isin({run.key for run in mine})]
        name, described = by_values(methods, columns, ours, *where)
    only = read_filter(chosen.filters or ())
    said = assignments({key: ",".join(map(setting_text, only[key])) for key in only})
    title = ", ".join([described.title, *said])
    adapted = chosen.adapted(described.model_copy(update={"title": title}))
    adapted, mine = of_setup(adapted, runs, chosen.recipe)
    return Made([*chosen.grids(f"{name}-{slug(said)}" if said else name, adapted, mine)], runs)


def _measuring(description: Description, metric: str, runs: Sequence[RecordedRun]) -> Description:
    """Return a description with another metric in all columns except those of costs."""
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
    found = find_metric(metric, task)
    if found.over is not None or metric in DERIVED:
        groups = _of_test(groups, BY_TEST_DOMAIN if found.clients else "test") or groups
    wanted = {**shown_as(found), "lower_is_better": found.lower}
    return description.model_copy(update={**wanted, "groups": groups})


def _of_test(groups: Sequence[GroupSpec], head: str) -> list[GroupSpec]:
    """Return the columns of the split ``test``, each once, for a metric that others lack.

    ``head`` replaces the heads that name this split.
    """
    kept: list[GroupSpec] = []
    for group in groups:
        columns = [c for c in group.columns if (c.split or group.split or "test") == "test"]
        kinds = {k: text for k, text in group.summaries.items() if k not in ("id_test", "excess")}
        shown = any(columns == o.columns and {*kinds} <= {*o.summaries} for o in kept)
        if columns and not (shown and group.hidden):
            told = head if group.head in (UNSEEN, "test") else group.head
            more = {"columns": columns, "summaries": kinds, "head": told}
            kept.append(group.model_copy(update=more))
    return kept
