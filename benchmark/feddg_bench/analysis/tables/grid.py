"""A table with its numbers, as the writers of Markdown, LaTeX and CSV need it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, groupby, pairwise
from typing import Literal

from feddg_bench.analysis.tables.columns import Column

DASH = "\N{EN DASH}"
REFERENCE = "reference"
"""Cell text of the row that others are compared with."""
Bold = Literal["tested", "best", "none"]
"""Rows to mark: those better than the others by a test, those with the best and the second-best
number, or none."""
Mark = Literal["best", "second"]
MARKS: tuple[Mark, Mark] = ("best", "second")


@dataclass(frozen=True)
class Entry:
    """The content of a cell."""

    value: float | None  # the number; `None` for a missing one or for `text`
    text: str = DASH
    std: float | None = None  # sample standard deviation over seeds
    seeds: tuple[int, ...] = ()  # the seeds that the number is a mean over
    low: float | None = None
    high: float | None = None
    mark: Mark | None = None
    keys: tuple[str, ...] = ()  # keys of the runs behind the number
    fill: str = ""  # the command that fills the cell, if its number is missing
    source: str = ""  # source of a published number
    footnotes: tuple[str, ...] = ()  # sentences without a full stop


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    kind: Literal["ours", "published", "difference"]  # difference: ours - published
    row: str  # label of the row it belongs to
    label: str  # text of its first cell
    entries: tuple[Entry | None, ...]  # one for each column; `None` is empty
    facts: dict[str, str] = field(default_factory=dict)  # identifying fields of the row, for CSV
    footnotes: tuple[str, ...] = ()  # of the label


@dataclass(frozen=True)
class Grid:
    """A finished table."""

    name: str  # stem of its files
    title: str
    caption: str  # short: data set, protocol, setup, seeds and selection rule
    columns: tuple[Column, ...]  # columns from left to right
    lines: tuple[Line, ...]  # lines from top to bottom
    notes: tuple[str, ...]  # sentences on how numbers were obtained, and on rows that stand out
    fills: tuple[tuple[str, str], ...]  # row label and command for missing cells
    runs: dict[str, dict[str, tuple[str, ...]]]  # row label -> scenario -> `seed:key` of its runs
    absent: tuple[tuple[str, str], ...] = ()  # heads of groups without runs, and the command

    @cached_property
    def footnotes(self) -> tuple[str, ...]:
        """All footnotes, in reading order."""
        parts = (part for line in self.lines for part in (line, *line.entries) if part is not None)
        return tuple(dict.fromkeys(text for part in parts for text in part.footnotes))

    def numbers(self, footnotes: Iterable[str]) -> list[int]:
        """Return the numbers of footnotes, counted from 1."""
        return [self.footnotes.index(text) + 1 for text in footnotes]

    def filled(self) -> tuple[int, int]:
        """Return how many cells of our own runs hold a number, and how many there are."""
        ours = [e for line in self.lines if line.kind == "ours" for e in line.entries if e]
        return sum(bool(e.keys) for e in ours), len(ours)

    def blocks(
        self, fits: Callable[[Sequence[int]], bool], *, details: bool = False
    ) -> list[list[int]]:
        """Return the positions of the columns of each block, which stand side by side.

        If not all of them fit, each group is split into as few blocks as possible. Preferences, in
        this order: no block of one column, a break where summaries begin, blocks of equal size.
        ``details`` selects the columns of the notes.
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
    """Return a table whose cells are not only numbers of runs, such as a table of claims.

    Args:
        title: Its title.
        heads: Heads of the columns after the labels.
        rows: The label of each row and its cells.
        notes: Sentences below the table.
    """
    columns = tuple(Column("", head, "text", (), {}, 0) for head in heads)
    lines = []
    for label, *cells in rows:
        entries = tuple(Entry(None, cell) if isinstance(cell, str) else cell for cell in cells)
        lines.append(Line("ours", str(label), str(label), entries))
    return Grid("", title, "", columns, tuple(lines), tuple(notes), (), {})
