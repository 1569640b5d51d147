"""The examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
