"""Examples in docstrings print the stated output; links and Python code of pages work."""

from __future__ import annotations

import doctest
import importlib
import re

import pytest

from tests import pages
from tests.helpers import run_cell
from tests.pages import PAGES, ROOT

SOURCES = (ROOT / "benchmark", ROOT / "methods", ROOT / "datasets")
MODULES = sorted(
    ".".join(path.relative_to(source).with_suffix("").parts)
    for source in SOURCES
    for path in source.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0


def test_examples_are_found():
    assert "feddg_bench.config.layers" in MODULES


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_what_a_page_links_to_is_there(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        linked = page.parent / path if path else page
        if pages.GENERATED in linked.resolve().parents:  # `make docs` checks these
            continue
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text()), target


def anchors(text):
    """Return the anchors of a page's headings, as code forges generate them."""
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, flags=re.M)
    }


SLOW = ("docs/howto/python.md",)
WITH_PYTHON = [
    pytest.param(
        page, marks=[pytest.mark.nightly] * (pages.name(page) in SLOW), id=pages.name(page)
    )
    for page in PAGES
    if "```python\n" in page.read_text()
]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, cache, capsys):
    monkeypatch.setenv("FEDDG_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    for block in blocks:
        run_cell(monkeypatch, "a_page", block)
    if page.name != "CONTRIBUTING.md":
        assert capsys.readouterr().out
