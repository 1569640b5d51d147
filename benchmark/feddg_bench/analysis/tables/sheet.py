"""The numbers of a table by row and column, its reference row, comparisons and order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from feddg_bench.analysis.tables.columns import MeasuredColumn, varied_keys
from feddg_bench.analysis.tables.describe import COMPARED, Description
from feddg_bench.analysis.tables.rows import Row
from feddg_bench.analysis.tables.setups import departures, modal
from feddg_bench.records.runs import RecordedRun
from feddg_bench.records.statistics import (
    TIE,
    Comparison,
    Place,
    Sample,
    by_seed,
    by_unit,
    collapsed,
    compare,
    corrected,
    interquartile_mean,
    mean_and_std,
)


@dataclass(frozen=True, eq=False)
class Sheet:
    """Data from which the cells, the caption and the notes of a table are computed."""

    description: Description
    columns: Sequence[MeasuredColumn]
    unordered: Sequence[Row]

    @cached_property
    def places(self) -> dict[int, list[Place]]:
        """Places that occur in any row, by measured column."""
        found = sorted({place for row in self.unordered for place, _ in row.sample})
        return {c.number: [place for place in found if place[0] == c.number] for c in self.columns}

    @cached_property
    def runs(self) -> list[RecordedRun]:
        """All runs of all rows, from top to bottom."""
        return [run for row in self.rows for run in row.members]

    @cached_property
    def varied(self) -> set[str]:
        """Keys that columns vary; see `varied_keys`."""
        return varied_keys(self.description)

    @cached_property
    def usual(self) -> dict[str, Mapping[str, Any]]:
        """The most frequent settings by data set."""
        by_dataset: dict[str, list[RecordedRun]] = {}
        for run in self.runs:
            by_dataset.setdefault(run.dataset, []).append(run)
        return {dataset: modal(runs) for dataset, runs in by_dataset.items()}

    @cached_property
    def outside(self) -> dict[Row, tuple[str, ...]]:
        """How runs of a row depart from the setup of the paper; empty if they do not."""
        if self.description.paper is None:
            return dict.fromkeys(self.rows, ())
        recipe, found = self.description.own_recipe, {}
        for row in self.rows:
            runs = ((column, r) for column in self.columns for r in row.runs.get(column.number, ()))
            asked = ((run, {**(row.where or {}), **column.where}) for column, run in runs)
            departs = (departures(r.settings, recipe, r.dataset, r.method, w) for r, w in asked)
            found[row] = next(filter(None, departs), ())
        return found

    @cached_property
    def seeds(self) -> list[int]:
        """Seeds that occur in any row."""
        return sorted({seed for row in self.unordered for _, seed in row.sample})

    @cached_property
    def reference(self) -> Row | None:
        """The row that others are compared with."""
        against = self.description.against
        rows = [row for row in self.unordered if row.sample and row.method == against]
        return max(rows, key=lambda row: len(row.sample), default=None)

    @cached_property
    def collapsed(self) -> dict[Row, int]:
        """Number of collapsed runs in the first group, for rows that have any."""
        asked = self.description
        if self.reference is None or not asked.ranked or asked.unit != "%":
            return {}
        theirs = self.first[self.reference]
        # A run can collapse on both of its unseen domains.
        pairs = {row: collapsed(self.first[row], theirs) for row in self.unordered}
        found = {row: len({(of[1:], seed) for of, seed in pairs[row]}) for row in pairs}
        return {row: count for row, count in found.items() if count}

    @cached_property
    def rows(self) -> list[Row]:
        """The rows; ranked ones in order of mean or, if runs collapse, IQM over the first group."""
        if not self.description.ranked:
            return list(self.unordered)
        sign = 1 if self.description.lower_is_better else -1

        def place(row: Row) -> tuple[bool, float, str]:
            mean = self.mean(row)
            if mean is not None and self.collapsed:
                values = np.concatenate([*by_unit(self.first[row]).values()])
                mean = float(interquartile_mean(values))
            return mean is None, sign * (mean or 0), row.label

        return sorted(self.unordered, key=place)

    @cached_property
    def comparisons(self) -> dict[frozenset[int], dict[Row, Comparison]]:
        """Comparison of each row with the reference, by columns; p-values are Holm-corrected."""
        found: dict[frozenset[int], dict[Row, Comparison]] = {}
        for number, group in enumerate(self.description.groups):
            if self.reference is None or not COMPARED & set(group.summaries):
                continue
            numbers = frozenset(c.number for c in self.columns if c.group == number)
            theirs, lower = self.reference.part(numbers), self.description.lower_is_better
            others = [row for row in self.rows if row is not self.reference]
            each = [
                compare(row.part(numbers), theirs, lower_is_better=lower, tie=self.tie)
                for row in others
            ]
            family = [row not in self.outside_family for row in others]
            found[numbers] = dict(zip(others, corrected(each, family), strict=True))
        return found

    @cached_property
    def silent(self) -> set[int]:
        """Columns of groups without any number, in a paper's table that has numbers elsewhere."""
        filled = {c.group for c in self.columns if self.places[c.number]}
        if self.description.paper is None or not filled:
            return set()
        return {c.number for c in self.columns if c.group not in filled}

    @cached_property
    def outside_family(self) -> set[Row]:
        """Rows that no p-value is corrected for: centralised ones, and those like the reference."""
        theirs = None if self.reference is None else self.reference.sample
        return {
            row
            for row in self.unordered
            if row.sample == theirs
            or (row.members and all(r.get("partition.kind") == "pooled" for r in row.members))
        }

    @property
    def tie(self) -> float:
        """Differences below it are ties: `TIE` if in percent, else half the last printed digit."""
        percent = self.description.unit == "%"
        return TIE if percent else 0.5 * 10.0**-self.description.decimals

    @cached_property
    def first(self) -> dict[Row, Sample]:
        """Each row's values in the first group, for seeds with all its scenarios."""
        numbers = [c.number for c in self.columns if c.group == 0]
        places = {place for number in numbers for place in self.places[number]}
        parts = {row: row.part(numbers) for row in self.unordered}
        seeds = {row: by_seed(part, places) for row, part in parts.items()}
        return {
            row: {p: v for p, v in part.items() if p[1] in seeds[row]}
            for row, part in parts.items()
        }

    def mean(self, row: Row) -> float | None:
        """Return a row's mean over the first group; ``None`` if no seed has all its scenarios."""
        values = self.first[row]
        seeds = by_seed(values, {place for place, _ in values})
        return mean_and_std(list(seeds.values()))[0] if seeds else None

    def accuracy(self, row: Row) -> float | None:
        """Return `mean` if it is an accuracy on held-out domains, else ``None``."""
        first = {(c.metric, c.split) for c in self.columns if c.group == 0}
        return self.mean(row) if first <= {("accuracy", "test"), ("accuracy", "val")} else None

    def wanted(self, sources: Sequence[MeasuredColumn]) -> list[Place]:
        """Return the scenarios of some columns; empty if one of these has none in any row."""
        found = [self.places[source.number] for source in sources]
        return [place for places in found for place in places] if all(found) else []
