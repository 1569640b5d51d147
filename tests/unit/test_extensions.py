"""Extensions: parts that other packages add to the suite."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from feddg_attacks.extension import Attacks
from feddg_attacks.reconstructions import DESIGNS
from feddg_bench import plugins
from feddg_bench.analysis.tables.make import TableOptions, make_tables
from feddg_bench.cli.figures import _pictures
from feddg_bench.extensions import Extension, extensions
from tests.unit.test_registry import run_python


class Additions(Extension):
    """One figure and two tables."""

    figures = {"theirs": "Draw theirs."}
    grids = ("theirs-1", "theirs-2")

    def draw(self, figure, runs, choice):
        yield f"{figure} of {len(runs)} runs"

    def make_grids(self, wanted, folders):
        return [f"{name} of {folders[0]}" for name in wanted]


@pytest.fixture
def other(monkeypatch, anew):
    """Register `Additions` and an extension that cannot be imported."""
    module = ModuleType("other_extension")
    module.Additions = Additions
    monkeypatch.setitem(sys.modules, "other_extension", module)
    group = "feddg_bench.extensions"
    entries = [
        EntryPoint("theirs", "other_extension:Additions", group),
        EntryPoint("broken", "other_extension:Missing", group),
    ]
    found = {group: entries}
    monkeypatch.setattr(plugins, "entry_points", lambda *, group: found.get(group, []))
    anew()


@pytest.mark.usefixtures("other")
def test_parts_of_all_extensions_that_can_be_imported_are_reached(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert [type(each) for each in extensions()] == [Attacks, Additions]
    assert "left out: the extension broken cannot be imported" in caplog.text
    assert list(_pictures("theirs", [], None)) == ["theirs of 0 runs"]
    made = make_tables(["theirs-2"], [tmp_path], TableOptions())
    assert made.grids == [f"theirs-2 of {tmp_path}"]


def test_the_core_works_without_attacks():
    code = (
        "import sys\n"
        "sys.modules['feddg_attacks'] = None\n"
        "from feddg_bench.cli import helps as names\n"
        "from feddg_bench.cli.figures import OF_RECORDS\n"
        "from feddg_bench.extensions import extensions\n"
        "assert 'run' in names() and 'attack' not in names(), names()\n"
        "assert 'utility' not in OF_RECORDS and extensions() == ()\n"
        "assert 'torch' not in sys.modules\n"
        "print('fine')\n"
    )
    assert run_python(code) == "fine\n"


def test_the_attacks_name_their_tables():
    assert tuple(DESIGNS) == Attacks.grids
