"""Human-readable output; names of domains, classes and folders are printed literally."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from feddg_bench.common.errors import printable
from feddg_bench.common.notices import wrapped


class _Terminal(Console):
    """A console that prints text literally: brackets are not markup, escapes are shown."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Print as rich does."""
        super().print(*(lines(o) if isinstance(o, str) else o for o in objects), **how)


def terminal(*, stderr: bool = False) -> Console:
    """Return a console that does not read brackets as markup: ``[dark]`` can be a domain."""
    return _Terminal(stderr=stderr, markup=False)


def lines(text: str) -> str:
    r"""Return text whose only control characters are line breaks; see `printable`.

    >>> lines("a\x1b[2J\nb")
    'a\\x1b[2J\nb'
    """
    return "\n".join(map(printable, text.split("\n")))


def say(text: object) -> None:
    """Print text that can contain names from records, files and folders."""
    print(lines(str(text)), flush=True)  # noqa: T201 - it is not rich's markup


def print_markdown(markdown: str) -> None:
    """Print Markdown: rendered on a terminal, elsewhere unchanged."""
    console = terminal()
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(lines(markdown), code_theme="ansi_dark"), highlight=False)
    else:
        print(lines(markdown), end="", flush=True)  # noqa: T201 - it is not rich's markup


def text_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    caption: str = "",
    right: Collection[str] = (),
    whole: Collection[str] = (),
    gap: int = 2,
) -> Table:
    """Return a table that wraps its cells between words if the terminal is too narrow.

    Args:
        title: Text above the table.
        columns: Headings; if all are empty, none are shown.
        rows: A text for each column; ``None`` draws a line.
        caption: Text below the table.
        right: Columns of numbers, which are right-aligned.
        whole: Columns that are never wrapped.
        gap: Spaces between columns.
    """
    drawn = Table(
        title=lines(title) or None,
        caption=lines(caption) or None,
        title_justify="left",
        caption_justify="left",
        show_header=any(columns),
        box=SIMPLE_HEAD,
        padding=(0, gap, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        drawn.add_column(
            lines(column),
            justify="right" if column in right else "left",
            no_wrap=column in whole,
            overflow="fold",
        )
    for row in rows:
        if row is None:
            drawn.add_section()
        else:
            drawn.add_row(*map(lines, row))
    return drawn


def text(template: str) -> TextColumn:
    """Return a column of a live display that shows a text, such as ``{task.description}``."""
    return _Plain(template, markup=False)


class _Plain(TextColumn):
    def render(self, task: Task) -> Text:
        """Return the text, with escapes shown."""
        return Text(printable(super().render(task).plain))


def duration(seconds: float) -> str:
    """Return a duration in human-readable form.

    >>> [duration(s) for s in (4.2, 90, 8000)]
    ['4 s', '2 min', '2 h 13 min']
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class Display:
    """A live display on standard error, plain lines without a terminal; a context manager."""

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
        """Print a message above the display."""
        self.console.print(wrapped(line), highlight=False, soft_wrap=True)
