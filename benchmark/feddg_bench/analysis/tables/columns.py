"""Measured columns and shown columns of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from feddg_bench.analysis.tables.describe import COSTS, ColumnSpec, Description, RunFilter, Summary
from feddg_bench.records.differences import setting_text
from feddg_bench.records.rules import Rule
from feddg_bench.records.runs import FIELDS

Kind = Literal["measured", "text"] | Summary


@dataclass(frozen=True)
class MeasuredColumn:
    """A measured column."""

    number: int  # position among the measured columns
    group: int  # its group's position in the description
    spec: ColumnSpec
    where: RunFilter  # filter of its runs, including those of the table and the group
    own: RunFilter  # the same without the table's
    split: str | None  # the split it reads; `None` for costs
    metric: str  # name in the evaluation, or one of `COSTS`
    rule: Rule


@dataclass(frozen=True)
class Column:
    """A column that is shown."""

    group: str  # head over several columns; may be empty
    head: str  # head of this one
    kind: Kind  # measured numbers, a summary, or a `text_grid`'s text
    sources: tuple[MeasuredColumn, ...]  # the measured column, or all of a group; empty for texts
    published: RunFilter  # the description's filter of published numbers
    decimals: int  # digits after the point
    detail: bool = False  # whether it is only in the notes and the CSV

    @property
    def title(self) -> str:
        """Head of this column after that of its group, unless it names its split itself."""
        named = (self.head,) if self.kind == "id_test" else (self.group, self.head)
        return " ".join(filter(None, named))

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of its measured columns."""
        return frozenset(column.number for column in self.sources)

    def facts(self) -> dict[str, str]:
        """Return the column's fields in CSV: the values common to its measured columns."""
        facts = {}
        for name in ("dataset", "protocol", "scenario", "train", "val", "test"):
            values = {
                setting_text(source.where[name]) for source in self.sources if name in source.where
            }
            facts[name] = values.pop() if len(values) == 1 else ""
        first = self.sources[0]
        rule = first.rule if first.split else ""
        splits = sorted({source.split for source in self.sources if source.split})
        split = "id_test" if self.kind == "id_test" else "+".join(splits)
        return {**facts, "split": split, "metric": first.metric, "select": rule}


def measured_columns(description: Description, select: Rule | None) -> list[MeasuredColumn]:
    """Return the columns of all groups; ``select`` replaces the description's rules."""
    found: list[MeasuredColumn] = []
    for number, group in enumerate(description.groups):
        for spec in group.columns:
            metric = spec.metric or group.metric or description.metric
            own = {**group.where, **spec.where}
            where = {**description.where, **own}
            part = None if metric in COSTS else spec.split or group.split or "test"
            rule = select or group.select or description.select
            found.append(MeasuredColumn(len(found), number, spec, where, own, part, metric, rule))
    return found


def shown_columns(description: Description, columns: Sequence[MeasuredColumn]) -> Iterator[Column]:
    """Yield the columns from left to right: each group's own, unless hidden, then its summaries."""
    decimals = description.decimals
    for number, group in enumerate(description.groups):
        mine = tuple(column for column in columns if column.group == number)
        for one in () if group.hidden else mine:
            told, detail = one.spec.published, group.detail
            yield Column(group.head, one.spec.head, "measured", (one,), told, decimals, detail)
        for kind, head in group.summaries.items():
            told, detail = group.published.get(kind, {}), group.detail or kind in group.details
            yield Column(group.head, head, kind, mine, told, decimals, detail)


def varied_keys(description: Description) -> set[str]:
    """Return the keys that columns vary; the runs of a row may differ in them."""
    keys = {key for group in description.groups for key in group.where}
    keys |= {key for group in description.groups for c in group.columns for key in c.where}
    if "features.encoder" in keys:  # each has a size of its own
        keys.add("data.image_size")
    return (keys - set(FIELDS)) | (keys & {"method", "protocol"})
