"""Markdown pages that lie outside ``docs``, and the links to them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath

from generators import ROOT, UNLISTED, Page

OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


@cache
def copied() -> frozenset[str]:
    """Return the paths of the pages that become pages of the site, from the repository's root."""
    tables = {path for path in (ROOT / "results").rglob("*.md") if "records" not in path.parts}
    paths = {path.relative_to(ROOT).as_posix() for path in tables}
    return frozenset(paths | {name for name in OTHERS if (ROOT / name).is_file()})


def pages() -> Iterator[Page]:
    """Yield a copy of every page; the contents of a page written by hand may name it."""
    for path in sorted(copied()):
        text = (ROOT / path).read_text(encoding="utf-8")
        yield Page(path, UNLISTED + relinked(text, path, f"generated/{path}"))


def relinked(text: str, path: str, shown: str) -> str:
    """Return a page whose links lead to the same files of the repository, or to their pages.

    Args:
        text: Its content.
        path: Its path from the repository's root, from which its links start.
        shown: Its path from ``docs``.
    """

    def link(found: re.Match[str]) -> str:
        target, sharp, anchor = found[2].partition("#")
        if "://" in target or not target or target.startswith(("/", "mailto:")):
            return found[0]
        linked = os.path.normpath(PurePosixPath(path).parent / target)
        if (ROOT / linked).is_dir():  # a site has no page for it
            return found[1]
        if linked in copied():
            new = f"/generated/{linked}"
        elif PurePosixPath(linked).is_relative_to("docs") and linked.endswith(".md"):
            new = f"/{linked.removeprefix('docs/')}"
        else:
            new = os.path.relpath(ROOT / linked, (ROOT / "docs" / shown).parent)
        return f"[{found[1]}]({new}{sharp}{anchor})"

    return re.sub(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)", link, text)
