"""A table with its numbers in it, as the writers of Markdown, LaTeX and CSV need it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, groupby, pairwise
from typing import Literal

from feddg_bench.analysis.tables.columns import Column

DASH = "\N{EN DASH}"
REFERENCE = "reference"
"""Text of the row that others are compared with."""
Bold = Literal["tested", "best", "none"]
"""What is marked: rows that a test says are better than the others, those with the best and the
second best number, or nothing."""
Mark = Literal["best", "second"]
MARKS: tuple[Mark, Mark] = ("best", "second")


@dataclass(frozen=True)
class Entry:
    """What a cell holds."""

    value: float | None  # the number; `None` for a missing one or for `text`
    text: str = DASH
    std: float | None = None  # sample standard deviation over seeds
    seeds: tuple[int, ...] = ()  # the seeds that the number is a mean over
    low: float | None = None
    high: float | None = None
    mark: Mark | None = None
    keys: tuple[str, ...] = ()  # runs that the number comes from
    fill: str = ""  # the command that would fill the cell, if it is missing
    source: str = ""  # where a published number is printed
    footnotes: tuple[str, ...] = ()  # in sentences without a full stop


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    kind: Literal["ours", "published", "difference"]  # difference: ours - published
    row: str  # label of the row it belongs to
    label: str  # what its first cell says
    entries: tuple[Entry | None, ...]  # one for each column; `None` is empty
    facts: dict[str, str] = field(default_factory=dict)  # what sets the row apart, for CSV
    footnotes: tuple[str, ...] = ()  # of the label


@dataclass(frozen=True)
class Grid:
    """A finished table."""

    name: str  # stem of its files
    title: str
    caption: str  # data set, protocol, setup, seeds and selection rule, in a few words
    definitions: tuple[str, ...]  # what was run and how numbers were made, in sentences
    columns: tuple[Column, ...]  # columns from left to right
    lines: tuple[Line, ...]  # lines from top to bottom
    notes: tuple[str, ...]
    fills: tuple[tuple[str, str], ...]  # row label and command for what is missing
    runs: dict[str, dict[str, tuple[str, ...]]]  # row label -> scenario -> `seed:key` of its runs

    @cached_property
    def footnotes(self) -> tuple[str, ...]:
        """All footnotes, in the order of reading."""
        parts = (part for line in self.lines for part in (line, *line.entries) if part is not None)
        return tuple(dict.fromkeys(text for part in parts for text in part.footnotes))

    def numbers(self, footnotes: Iterable[str]) -> list[int]:
        """Return the numbers of footnotes, counted from 1."""
        return [self.footnotes.index(text) + 1 for text in footnotes]

    def filled(self) -> tuple[int, int]:
        """Return how many of our cells hold a number, and how many there are."""
        ours = [e for line in self.lines if line.kind == "ours" for e in line.entries if e]
        return sum(bool(e.keys) for e in ours), len(ours)

    def blocks(
        self, fits: Callable[[Sequence[int]], bool], *, details: bool = False
    ) -> list[list[int]]:
        """Return the positions of the columns that stand side by side, block by block.

        If they do not fit beside each other, each group makes as few blocks as possible: without a
        column alone, apart where summaries begin, and of equal numbers of columns, in this order.
        ``details`` asks for the columns of the notes.
        """
        places = [n for n, column in enumerate(self.columns) if column.detail == details]
        if not places or fits(places):
            return [places] * bool(places)

        def cost(blocks: list[list[int]]) -> tuple[int, bool, int]:
            sizes = [len(block) for block in blocks]
            first = [self.columns[block[0]].kind for block in blocks]
            last = [self.columns[block[-1]].kind for block in blocks]
            apart = any(a == "measured" != b for a, b in zip(last, first[1:], strict=False))
            return sizes.count(1), not apart, max(sizes) - min(sizes)

        found: list[list[int]] = []
        for _, same in groupby(places, lambda n: self.columns[n].group):
            group = list(same)
            for number in range(1, len(group) + 1):
                ways = [
                    [group[a:b] for a, b in pairwise((0, *cuts, len(group)))]
                    for cuts in combinations(range(1, len(group)), number - 1)
                ]
                fitting = [way for way in ways if number == len(group) or all(map(fits, way))]
                if fitting:
                    best = min(fitting, key=cost)
                    found += best
                    break
        return found


def text_grid(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Entry]],
    notes: Iterable[str] = (),
) -> Grid:
    """Return a table whose cells are no numbers of runs alone, such as one of claims.

    Args:
        title: What it shows.
        heads: Heads of the columns after that of the labels.
        rows: The label of each row and its cells.
        notes: Sentences below the table.
    """
    columns = tuple(Column("", head, "text", (), {}, 0) for head in heads)
    lines = []
    for label, *cells in rows:
        entries = tuple(Entry(None, cell) if isinstance(cell, str) else cell for cell in cells)
        lines.append(Line("ours", str(label), str(label), entries))
    return Grid("", title, "", (), columns, tuple(lines), tuple(notes), (), {})
