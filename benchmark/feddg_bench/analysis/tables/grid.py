"""A table with its numbers in it, as the writers of Markdown, LaTeX and CSV need it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from feddg_bench.analysis.tables.columns import Column

DASH = "\N{EN DASH}"


@dataclass(frozen=True)
class Entry:
    """What a cell holds.

    Attributes:
        value: The number; ``None`` for a missing one or for ``text``.
        text: What is printed.
        std: Sample standard deviation over seeds.
        seeds: Seeds that the number is over.
        low: Lower end of a 95 % bootstrap interval.
        high: Upper end.
        mark: ``best`` or ``second``, where a test supports it.
        keys: Runs that the number comes from.
        fill: The command that would fill the cell, if it is missing.
        source: Where a published number stands.
        footnotes: Numbers of the footnotes that the cell refers to, counted from 0.
    """

    value: float | None
    text: str = DASH
    std: float | None = None
    seeds: tuple[int, ...] = ()
    low: float | None = None
    high: float | None = None
    mark: Literal["best", "second"] | None = None
    keys: tuple[str, ...] = ()
    fill: str = ""
    source: str = ""
    footnotes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        kind: Our numbers, the published ones, or the difference (ours - published).
        row: Label of the row it belongs to.
        label: What its first cell says.
        entries: One for each column; ``None`` is empty.
        facts: Method, recipe and what sets the row apart, for CSV.
        footnotes: Numbers of the footnotes that the label refers to, counted from 0.
    """

    kind: Literal["ours", "published", "difference"]
    row: str
    label: str
    entries: tuple[Entry | None, ...]
    facts: dict[str, str] = field(default_factory=dict)
    footnotes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Grid:
    """A finished table.

    Attributes:
        name: Stem of its files.
        title: First line.
        caption: What was run and how numbers were made, in sentences.
        columns: Columns from left to right.
        lines: Lines from top to bottom.
        footnotes: Sentences that cells and labels refer to.
        notes: Other sentences.
        fills: Row label and command for what is missing.
        runs: Row label -> scenario -> ``seed:key`` of its runs.
        width: Columns that stand beside each other at most; ``None`` for all.
    """

    name: str
    title: str
    caption: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    footnotes: tuple[str, ...]
    notes: tuple[str, ...]
    fills: tuple[tuple[str, str], ...]
    runs: dict[str, dict[str, tuple[str, ...]]]
    width: int | None = None

    def filled(self) -> tuple[int, int]:
        """Return how many of our cells hold a number, and how many there are."""
        ours = [e for line in self.lines if line.kind == "ours" for e in line.entries if e]
        return sum(bool(e.keys) for e in ours), len(ours)

    def blocks(self) -> list[list[int]]:
        """Return the positions of the columns that stand beside each other, block by block.

        Where the table is wider than it may be each group is a block, or several.
        """
        places = list(range(len(self.columns)))
        if self.width is None or len(places) <= self.width:
            return [places]
        groups = [list(found) for _, found in groupby(places, lambda n: self.columns[n].group)]
        starts = [(group, at) for group in groups for at in range(0, len(group), self.width)]
        return [group[at : at + self.width] for group, at in starts]
