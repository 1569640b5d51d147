"""A table with its numbers in it, as the writers of Markdown, LaTeX and CSV need it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from feddg_bench.analysis.tables.columns import Column

DASH = "\N{EN DASH}"


@dataclass(frozen=True)
class Entry:
    """What a cell holds."""

    value: float | None  # the number; `None` for a missing one or for `text`
    text: str = DASH
    std: float | None = None  # sample standard deviation over seeds
    seeds: tuple[int, ...] = ()  # the seeds that the number is a mean over
    low: float | None = None
    high: float | None = None
    mark: Literal["best", "second"] | None = None  # where a test supports it
    keys: tuple[str, ...] = ()  # runs that the number comes from
    fill: str = ""  # the command that would fill the cell, if it is missing
    source: str = ""  # where a published number is printed
    footnotes: tuple[int, ...] = ()  # numbers, counted from 0


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    kind: Literal["ours", "published", "difference"]  # difference: ours - published
    row: str  # label of the row it belongs to
    label: str  # what its first cell says
    entries: tuple[Entry | None, ...]  # one for each column; `None` is empty
    facts: dict[str, str] = field(default_factory=dict)  # what sets the row apart, for CSV
    footnotes: tuple[int, ...] = ()  # of the label, counted from 0


@dataclass(frozen=True)
class Grid:
    """A finished table."""

    name: str  # stem of its files, unless `file` is given
    title: str
    caption: tuple[str, ...]  # what was run and how numbers were made, in sentences
    columns: tuple[Column, ...]  # columns from left to right
    lines: tuple[Line, ...]  # lines from top to bottom
    footnotes: tuple[str, ...]  # sentences that cells and labels refer to
    notes: tuple[str, ...]
    fills: tuple[tuple[str, str], ...]  # row label and command for what is missing
    runs: dict[str, dict[str, tuple[str, ...]]]  # row label -> scenario -> `seed:key` of its runs
    width: int | None = None  # most columns that stand side by side; `None` for all
    file: str = ""  # stem of Markdown and CSV that hold other tables, too

    def filled(self) -> tuple[int, int]:
        """Return how many of our cells hold a number, and how many there are."""
        ours = [e for line in self.lines if line.kind == "ours" for e in line.entries if e]
        return sum(bool(e.keys) for e in ours), len(ours)

    def blocks(self) -> list[list[int]]:
        """Return the positions of the columns that stand side by side, block by block.

        If the table is wider than `width`, each group makes one block or several.
        """
        places = list(range(len(self.columns)))
        if self.width is None or len(places) <= self.width:
            return [places]
        groups = [list(found) for _, found in groupby(places, lambda n: self.columns[n].group)]
        starts = [(group, at) for group in groups for at in range(0, len(group), self.width)]
        return [group[at : at + self.width] for group, at in starts]
