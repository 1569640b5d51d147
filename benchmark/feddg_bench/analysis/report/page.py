"""The page: this package's template, style and script with data and pictures, in one file."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from feddg_bench.common.errors import DataError

MIME = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
"""Picture formats that browsers show; of files with the same name, the first format is used."""


@dataclass(frozen=True)
class Figure:
    """A picture in the page."""

    name: str  # stem of its file
    uri: str  # `data:` URI
    text: str  # alternative text
    title: str  # visible title


KINDS = {
    "clients": "Clients in a round",
    "convergence": "Training, round by round",
    "generalisation": "Held-out domains against training domains",
    "gradcam": "Where models look",
    "lambda": "Heterogeneity of the clients",
    "landscape": "Losses of two clients",
    "leaderboard": "Methods, best first",
    "noise": "Scatter of seeds",
    "overhead": "Seconds of a round",
    "partition": "Images of each client",
    "profiles": "Performance profiles",
    "ranks": "Average ranks over data sets",
    "strength": "Strength of the invariant cue",
    "styles": "Restyled images",
    "tsne": "Features of held-out images",
    "utility": "Attacks and utility",
}
"""First word of a figure's name -> what it shows, before its own title."""


def figures(folder: Path) -> list[Figure]:
    """Return a folder's pictures in the order of their names; the folder may be missing.

    Raises:
        DataError: If one cannot be read.
    """
    found: dict[str, Path] = {}
    for ending in MIME:
        for path in folder.glob("*"):
            if path.suffix.lower() == ending:
                found.setdefault(path.stem, path)
    shown = []
    for stem, path in sorted(found.items()):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read figure {path}: {error.strerror}") from error
        encoded = base64.b64encode(content).decode()
        uri = f"data:{MIME[path.suffix.lower()]};base64,{encoded}"
        text = _description(content)
        shown.append(Figure(stem, uri, text or stem, _caption(stem, text)))
    return shown


def _caption(stem: str, text: str) -> str:
    """Return a figure's visible title: what it shows and its own title, which its text begins with.

    >>> _caption("lambda-pacs-ltdo-laptop", "PACS, recipe laptop: test domain. Mean of 2 scenarios")
    'Heterogeneity of the clients. PACS, recipe laptop: test domain.'
    >>> _caption("my-figure", "")
    'My figure.'
    """
    kind = KINDS.get(stem.partition("-")[0], "")
    title = text.partition(". ")[0] or ("" if kind else stem.replace("-", " ").replace("_", " "))
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in (kind, title) if part)


def _description(content: bytes) -> str:
    """Return the description in a PNG file of this suite; empty for other files."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            return str(image.info.get("Description", ""))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        return ""


def render(data: Mapping[str, Any], pictures: Sequence[Figure] = ()) -> str:
    """Return the page. It loads no external resources, and its security policy forbids them.

    Any text in the data is untrusted.
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
    """Return data as deflated JSON in base64, which has no special characters of HTML.

    Raises:
        ValueError: If a number is NaN or infinite, which JSON does not have.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(errors="replace"))).decode()


def _source(text: str) -> str:
    """Return the hash by which a policy allows an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
