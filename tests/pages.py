"""The pages of the documentation that are written by hand."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "docs/generated"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        ROOT / "results/README.md",
        *(page for page in (ROOT / "docs").rglob("*.md") if GENERATED not in page.parents),
    ]
)


def name(page: Path) -> str:
    """Return a page's path from the repository's root."""
    return page.relative_to(ROOT).as_posix()
