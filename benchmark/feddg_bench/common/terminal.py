"""Output for people; names of domains, classes and folders are written as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table


def terminal(*, stderr: bool = False) -> Console:
    """Return a console that does not read brackets as markup: a domain may be called ``[dark]``."""
    return Console(stderr=stderr, markup=False)


def print_markdown(markdown: str) -> None:
    """Print Markdown: rendered on a terminal, elsewhere unchanged."""
    console = terminal()
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(markdown, code_theme="ansi_dark"), highlight=False)
    else:
        print(markdown, end="", flush=True)  # noqa: T201 - it is not rich's markup


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    caption: str = "",
    right: Collection[str] = (),
    whole: Collection[str] = (),
    gap: int = 2,
) -> Table:
    """Return a table that fits into 80 columns if its cells may be broken.

    Args:
        title: Stands above.
        columns: Headings; if all are empty, none are shown.
        rows: A text for each column; ``None`` draws a line.
        caption: Stands below.
        right: Columns of numbers.
        whole: Columns that, like numbers, are never broken.
        gap: Blanks between columns.
    """
    drawn = Table(
        title=title or None,
        caption=caption or None,
        title_justify="left",
        caption_justify="left",
        show_header=any(columns),
        box=SIMPLE_HEAD,
        padding=(0, gap, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        numbers = column in right
        drawn.add_column(
            column,
            justify="right" if numbers else "left",
            no_wrap=numbers or column in whole,
            overflow="fold",
        )
    for row in rows:
        if row is None:
            drawn.add_section()
        else:
            drawn.add_row(*row)
    return drawn


def text(template: str) -> TextColumn:
    """Return a column of a live display that shows a text, such as ``{task.description}``."""
    return TextColumn(template, markup=False)


def duration(seconds: float) -> str:
    """Return a length of time as people write it.

    >>> [duration(s) for s in (4.2, 90, 8000)]
    ['4 s', '2 min', '2 h 13 min']
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class Display:
    """A live display on standard error, plain lines if that is no terminal; a context manager."""

    def __init__(self, *columns: ProgressColumn) -> None:
        self.console = terminal(stderr=True)
        self.bar = 24 if self.console.width >= 110 else 12
        self.progress = Progress(
            text("{task.description}"),
            BarColumn(bar_width=self.bar),
            *columns,
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        """Print one line above the display."""
        self.console.print(line, highlight=False, soft_wrap=True)
