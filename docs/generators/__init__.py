"""Pages that follow from code, declarations and records; ``conf.py`` has them written.

To add pages, write a module whose function ``pages`` yields `Page`s, and name it in `MODULES`; then
name the pages in the table of contents of a page that is written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

MODULES = (
    "commands",
    "settings",
    "recipes",
    "cards",
    "messages",
    "api",
    "records",
    "notebook",
    "leaderboards",
    "suites",
    "repository",
)
ROOT = Path(__file__).parents[2]
UNLISTED = "---\norphan: true\n---\n\n"
"""Head of a page that the sidebar leaves out: every page repeats the sidebar, so long ones cost."""


class Page(NamedTuple):
    """A page or another file of the site: its path in ``docs/generated``, and its content."""

    path: str
    content: str | bytes


def pages() -> Iterator[Page]:
    """Yield every generated page."""
    for name in MODULES:
        yield from import_module(f"{__name__}.{name}").pages()


def write(folder: Path) -> None:
    """Write pages that are new or changed, and remove files that are no longer generated."""
    written = set()
    for page in pages():
        path = folder / page.path
        content = page.content if isinstance(page.content, bytes) else page.content.encode()
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        written.add(path)
    for path in folder.rglob("*"):
        if path.is_file() and path not in written:
            path.unlink()


def cell(text: object) -> str:
    """Return a text as a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(columns: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)
