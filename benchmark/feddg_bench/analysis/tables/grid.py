"""A table with its numbers in it, as the writers of Markdown, LaTeX, CSV and HTML need it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["measured", "mean", "worst", "rank", "wins", "difference", "p_value"]


@dataclass(frozen=True)
class Column:
    """A column that is shown.

    Attributes:
        group: Head over several columns; may be empty.
        head: Head of this one.
        kind: Whether its numbers are measured, or which summary they are.
        facts: Data set, protocol, scenario's domains, split, metric, selection rule, for CSV.
        decimals: Digits behind the point.
    """

    group: str
    head: str
    kind: Kind
    facts: dict[str, str]
    decimals: int


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
    text: str
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
    """

    kind: Literal["ours", "published", "difference"]
    row: str
    label: str
    entries: tuple[Entry | None, ...]
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """A finished table.

    Attributes:
        name: Stem of its files.
        title: First line.
        caption: What was run and how numbers were made, in sentences.
        columns: Columns from left to right.
        lines: Lines from top to bottom.
        footnotes: Sentences that cells refer to.
        notes: Other sentences.
        fills: Row label and command for what is missing.
        runs: Row label -> scenario -> ``seed:key`` of its runs.
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

    def filled(self) -> tuple[int, int]:
        """Return how many of our cells hold a number, and how many there are."""
        ours = [e for line in self.lines if line.kind == "ours" for e in line.entries if e]
        return sum(bool(e.keys) for e in ours), len(ours)

    def groups(self) -> list[tuple[str, int]]:
        """Return the heads over columns with the number of columns under each."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            if found and found[-1][0] == column.group:
                found[-1] = (column.group, found[-1][1] + 1)
            else:
                found.append((column.group, 1))
        return found

    def facts(self) -> dict[str, Any]:
        """Return what a line about the table says."""
        filled, cells = self.filled()
        return {"name": self.name, "title": self.title, "filled": filled, "cells": cells}
