"""The site: ``make docs`` builds it into ``build/site``, without a network.

Pages about code are written by `docs/generators` into ``docs/generated`` before Sphinx reads them.
Every warning is an error, and `check_links` adds those about links that Sphinx does not follow.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from pygments.lexers.shell import BashLexer
from sphinx.util import logging

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("FEDDG_QUICK_START", "1")  # as the command does

import feddg_bench  # noqa: E402
import generators  # noqa: E402
from generators.repository import relinked  # noqa: E402

project = "feddg-bench"
author = "The feddg-bench authors"
copyright = f"2026, {author}"
version = release = feddg_bench.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["generators"]
default_role = "code"  # docstrings name code in single quotes
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!feddg_bench\.).*"),  # other packages: their inventories need a network
    ("py:.*", r"feddg_bench\.[a-z_]+\..*"),  # modules of our own that are not public
]

smartquotes_action = "qe"  # `--seeds` in a sentence keeps both hyphens
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 4

autodoc_typehints = "description"
toc_object_entries = False  # each page copies the contents of all: these cost a third of the build
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # attributes are described once, where the class says what they are

html_theme = "furo"
html_title = "feddg-bench"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["sort.js"]
html_copy_source = False
html_show_sourcelink = False

_project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))
if _address := _project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["address"]:
    _source = {"name": "Source", "url": _address, "html": "Source", "class": ""}
    html_theme_options = {"footer_icons": [_source]}


def setup(app: Any) -> None:
    """Write the generated pages before Sphinx looks for pages, and check links at the end."""
    app.connect("config-inited", lambda *_: generators.write(HERE / "generated"))
    app.connect("source-read", relink)
    app.add_lexer("console", BashLexer)  # commands without prompts, with comments
    app.connect("doctree-resolved", dashes)
    app.connect("build-finished", check_links)


def relink(_app: Any, name: str, text: list[str]) -> None:
    """Lead links of a page written by hand to pages of the site."""
    if not name.startswith("generated/"):
        text[0] = relinked(text[0], f"docs/{name}.md", f"{name}.md")


def dashes(_app: Any, tree: nodes.document, _name: str) -> None:
    """Print the two hyphens between a parameter and its meaning as a dash."""
    for text in [*tree.findall(nodes.Text)]:
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def check_links(app: Any, failed: Exception | None) -> None:
    """Warn about each link of a built page whose file or anchor is not on the site."""
    if failed or app.builder.format != "html":
        return
    out = Path(app.outdir)
    texts = {path: path.read_text(encoding="utf-8") for path in out.rglob("*.html")}
    anchors = {path: {*re.findall(r'\sid="([^"]+)"', text)} for path, text in texts.items()}
    for path, text in texts.items():
        for target in {*re.findall(r'\s(?:href|src)="([^"]+)"', text)}:
            if re.match(r"[a-z]+:|//", target):
                continue
            name, _, anchor = map(unquote, target.partition("#"))
            linked = (path.parent / name.partition("?")[0]).resolve() if name else path
            linked = linked / "index.html" if linked.is_dir() else linked
            if not linked.exists() or (anchor and anchor not in anchors.get(linked, {anchor})):
                where = path.relative_to(out)
                logging.getLogger(__name__).warning(f"{where}: nothing is at the link {target}")
