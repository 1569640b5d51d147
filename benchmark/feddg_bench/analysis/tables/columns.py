"""Columns of a table: those that are measured, and those that are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from feddg_bench.analysis.tables.describe import COSTS, ColumnSpec, Description, Where
from feddg_bench.analysis.tables.grid import Column, Kind
from feddg_bench.records.rules import Rule
from feddg_bench.records.runs import FIELDS
from feddg_bench.records.variants import text


@dataclass(frozen=True)
class Measured:
    """A measured column.

    Attributes:
        number: Position among the measured columns.
        group: Its group's position in the description.
        spec: Its description.
        where: What its runs have, that of table and group included.
        own: The same without that of the table.
        split: The split it reads; ``None`` for costs.
        metric: Name in the evaluation, or one of `COSTS`.
        rule: Selection rule.
    """

    number: int
    group: int
    spec: ColumnSpec
    where: Where
    own: Where
    split: str | None
    metric: str
    rule: Rule


@dataclass(frozen=True)
class Shown:
    """A column that is shown, and the measured columns that it is made of.

    Attributes:
        column: Its head and what CSV says of it.
        sources: One measured column, or all of a group.
        published: What its description says about published numbers.
    """

    column: Column
    sources: tuple[Measured, ...]
    published: Where

    @property
    def kind(self) -> Kind:
        """Whether its numbers are measured, or which summary they are."""
        return self.column.kind

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of its measured columns."""
        return frozenset(column.number for column in self.sources)


def measured_columns(description: Description, select: Rule | None) -> list[Measured]:
    """Return the columns of all groups; ``select`` wins over the description's rules."""
    found: list[Measured] = []
    for number, group in enumerate(description.groups):
        for spec in group.columns:
            metric = spec.metric or group.metric or description.metric
            own = {**group.where, **spec.where}
            where = {**description.where, **own}
            part = None if metric in COSTS else spec.split or group.split or "test"
            rule = select or group.select or description.select
            found.append(Measured(len(found), number, spec, where, own, part, metric, rule))
    return found


def shown_columns(description: Description, columns: Sequence[Measured]) -> list[Shown]:
    """Return the columns from left to right: of each group its own, then its summaries."""
    shown: list[Shown] = []
    for number, group in enumerate(description.groups):
        mine = tuple(column for column in columns if column.group == number)

        def add(head: str, kind: Kind, sources: tuple[Measured, ...], published: Where) -> None:
            column = Column(group.head, head, kind, _facts(sources), description.decimals)  # noqa: B023 - called at once
            shown.append(Shown(column, sources, published))

        for measured in () if group.hidden else mine:
            add(measured.spec.head, "measured", (measured,), measured.spec.published)
        for kind, head in group.summaries.items():
            add(head, kind, mine, group.published.get(kind, {}))
    return shown


def _facts(sources: tuple[Measured, ...]) -> dict[str, str]:
    """Return what CSV says of a column: what all that it is made of have in common."""
    facts = {}
    for name in ("dataset", "protocol", "scenario", "train", "val", "test"):
        values = {text(column.where[name]) for column in sources if name in column.where}
        facts[name] = values.pop() if len(values) == 1 else ""
    facts["split"] = sources[0].split or ""
    facts["metric"] = sources[0].metric
    facts["select"] = sources[0].rule if sources[0].split else ""
    return facts


def varied_keys(description: Description) -> set[str]:
    """Return the keys that columns vary, in which the runs of a row may differ."""
    keys = {key for group in description.groups for key in group.where}
    keys |= {key for group in description.groups for c in group.columns for key in c.where}
    return (keys - set(FIELDS)) | (keys & {"method", "protocol"})
