"""Make finished tables from their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.describe import (
    COSTS,
    Description,
    compared_with,
    load_description,
    named_tables,
)
from feddg_bench.analysis.tables.generic import generic_tables, shown_as
from feddg_bench.analysis.tables.grid import Grid
from feddg_bench.analysis.tables.reconstructions import DESIGNS, reconstruction_grid
from feddg_bench.analysis.tables.writers import csv_text, latex, markdown
from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.config.reading import known_name
from feddg_bench.plugins import plugin_name
from feddg_bench.records.attacks import read_attacks
from feddg_bench.records.metrics import METRICS, find_metric
from feddg_bench.records.rules import RULES
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

    def markdown(self) -> str:
        """Return the table as Markdown, with its caption and notes."""
        return markdown(self.grid)

    def latex(self) -> str:
        """Return the table as LaTeX."""
        return latex(self.grid)

    _repr_markdown_ = markdown


def make_tables(
    names: Sequence[str],
    folders: Sequence[Path],
    *,
    select: str | None = None,
    against: str | None = None,
    metric: str | None = None,
    also: Sequence[str] = (),
) -> tuple[list[Grid], Sequence[RecordedRun]]:
    """Return tables, and the runs that they are made from.

    Args:
        names: ``all``, ``generic`` (one for each data set, protocol and recipe with runs), papers'
            tables such as ``pardon-1``, or YAML files that describe one.
        folders: Folders of records, read only when all names are known to be right.
        select: Selection rule in place of each table's own.
        against: Method that the others are compared with in every table.
        metric: Metric in place of each table's own, such as ``macro_f1``; it is then part of the
            table's name.
        also: Further names that the caller knows, for the message about an unknown one.

    Raises:
        SettingsError: If a name is unknown, or a description cannot be used.
        DataError: If records cannot be read.
    """
    if select is not None and select not in RULES:
        raise SettingsError(unknown("selection rule", select, RULES))
    if against is not None:
        against = plugin_name("method", against)
    if metric is not None:
        metric = known_name(metric, METRICS)
        if metric not in METRICS:
            raise SettingsError(unknown("metric", metric, METRICS))
    wanted = [name for name in names if name not in ("all", "generic", *DESIGNS)]
    if "all" in names:
        wanted = [*named_tables(), *wanted]
    known = (*DESIGNS, *WORDS, *also)
    described = dict(load_description(name, known) for name in dict.fromkeys(wanted))
    runs = read_runs(folders)
    end = "" if metric is None else f"-{metric}"
    grids = []
    for table in generic_tables(runs, against) if {"all", "generic"} & set(names) else ():
        shown = _measuring(table.description, metric, table.runs)
        grid = build(table.name + end, shown, table.runs, select=select, any_paper=True)
        grids.append(replace(grid, file=table.file + end))
    for name, description in described.items():
        chosen = description if against is None else compared_with(description, against)
        shown = _measuring(chosen, metric, runs)
        grids.append(build(name + end, shown, runs, select=select))
    if drawn := [name for name in DESIGNS if {"all", name} & set(names)]:
        attacks = read_attacks(folders)
        grids += [reconstruction_grid(name, attacks) for name in drawn]
    return grids, runs


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
