"""What is written for a person; names of domains, classes and folders stand as they are."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn


def terminal(*, stderr: bool = False) -> Console:
    """Return a console that takes no brackets for commands: a domain may be called ``[dark]``."""
    return Console(stderr=stderr, markup=False)


def text(template: str) -> TextColumn:
    """Return a column of a live display that shows a text, such as ``{task.description}``."""
    return TextColumn(template, markup=False)


class Display:
    """A live display on standard error, plain lines where it is no terminal; a context manager.

    Args:
        columns: What follows the name and the bar of each task.
    """

    def __init__(self, *columns: ProgressColumn) -> None:
        self.console = terminal(stderr=True)
        self.progress = Progress(
            text("{task.description}"),
            BarColumn(bar_width=24),
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
