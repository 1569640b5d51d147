"""Digest of a method's code: edits that change it and edits that do not."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from feddg_bench.core.method import Method
from feddg_bench.plugins import load_method
from feddg_bench.runs.code import code_digest
from tests.digests import FILE, ours

PLUGIN = '''"""A plugin."""

from feddg_bench.core.method import Method
from theirs.formula import scale

DEVIATIONS = ("none",)


class Theirs(Method):
    """A method."""

    citation = "A, B"
    version = 1

    def forward(self, images):
        return super().forward(scale(images, by=0.5))  # half
'''
FORMULA = "def scale(x, *, by):\n    return by * x\n"


def digest(folder: Path, monkeypatch: pytest.MonkeyPatch, plugin: str, formula: str) -> str:
    package = folder / "theirs"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "formula.py").write_text(formula)
    (package / "plugin.py").write_text(plugin)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        try:
            method: type[Method] = importlib.import_module("theirs.plugin").Theirs
            return code_digest(method)
        finally:  # other tests have packages of this name
            for name in ("theirs", "theirs.formula", "theirs.plugin"):
                sys.modules.pop(name, None)


def test_what_changes_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(plugin: str = PLUGIN, formula: str = FORMULA) -> str:
        return digest(tmp_path, monkeypatch, plugin, formula)

    first = of()
    for harmless in (
        PLUGIN.replace("# half", "# a half"),
        PLUGIN.replace("A method.", "The method."),
        PLUGIN.replace("A, B", "A, B, C"),
        PLUGIN.replace('("none",)', '("one", "two")'),
        PLUGIN.replace(
            "(scale(images, by=0.5))", "(\n            scale(images, by=0.5)\n        )"
        ),
    ):
        assert harmless != PLUGIN
        assert of(harmless) == first
    assert of(formula='"""Formulas."""\n\n\n' + FORMULA) == first
    assert of(PLUGIN.replace("0.5", "0.25")) != first
    assert of(PLUGIN.replace("by=0.5", "by=-0.5")) != first
    assert of(formula=FORMULA.replace("by * x", "by + x")) != first


def test_a_relative_import_counts_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = PLUGIN.replace("from theirs.formula", "from .formula")
    assert plugin != PLUGIN
    first = digest(tmp_path, monkeypatch, plugin, FORMULA)
    other = digest(tmp_path, monkeypatch, plugin, FORMULA.replace("by * x", "by + x"))
    assert first != other


def test_a_base_counts_and_the_core_does_not() -> None:
    assert code_digest(load_method("agrsum")) != code_digest(load_method("agrrand"))
    assert code_digest(Method) == code_digest(
        type("Other", (Method,), {"__module__": Method.__module__})
    )


def test_our_methods_have_the_code_that_their_version_stands_for() -> None:
    """Raise the version if results can change; else `make digests` lists the edit as harmless."""
    known = json.loads(FILE.read_text())
    changed = [
        name
        for name, (version, digest) in ours().items()
        if digest not in known.get(name, {}).get(version, ())
    ]
    assert not changed, f"raise `version` of {changed}, or run `make digests`"
