"""The page: template, style and script of this package, data and pictures in one file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from feddg_bench.common.errors import DataError

MIME = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
"""Pictures that a browser shows; of several with one name the first of these."""

FIGURES_LIMIT = 1_000_000
"""Bytes of all pictures together; those that come later by name are left out."""


@dataclass(frozen=True)
class Figure:
    """A picture in the page.

    Attributes:
        name: Stem of its file.
        uri: ``data:`` URI.
    """

    name: str
    uri: str


def figures(folder: Path, limit: int = FIGURES_LIMIT) -> tuple[list[Figure], list[str]]:
    """Return the pictures of a folder that fit, and the names of those that do not.

    Args:
        folder: May be missing.
        limit: Bytes of all together.

    Raises:
        DataError: If one cannot be read.
    """
    order = list(MIME)
    paths = sorted(
        (path for path in folder.glob("*") if path.suffix.lower() in MIME),
        key=lambda path: (path.stem, order.index(path.suffix.lower())),
    )
    first = {path.stem: path for path in reversed(paths)}
    shown: list[Figure] = []
    left: list[str] = []
    for stem in sorted(first):
        path = first[stem]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read figure {path}: {error.strerror}") from error
        if len(content) > limit:
            left.append(path.name)
            continue
        limit -= len(content)
        encoded = base64.b64encode(content).decode()
        shown.append(Figure(stem, f"data:{MIME[path.suffix.lower()]};base64,{encoded}"))
    return shown, left


def render(data: Mapping[str, Any], pictures: Sequence[Figure] = ()) -> str:
    """Return the page. Nothing in it asks for anything outside it, and its policy forbids it.

    Args:
        data: See `feddg_bench.analysis.report.gather.gather`; any text in it may be hostile.
        pictures: Figures below the tables.
    """
    folder = Path(__file__).parent / "page"
    loader = jinja2.FileSystemLoader(folder)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        f"img-src data:; base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html").render(
        policy=policy,
        style=style,
        script=script,
        data=embedded(data),
        figures=pictures,
        version=data["version"],
    )


def embedded(data: Mapping[str, Any]) -> str:
    """Return JSON that can stand inside a script element: it holds no ``<``, ``>`` or ``&``.

    Raises:
        ValueError: If a number is NaN or infinite, which JSON has not.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _source(text: str) -> str:
    """Return the hash by which a policy allows an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
