"""Pages of the site about results: every number has its runs, and commands repeat them."""

from __future__ import annotations

import csv
import html
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from feddg_bench.runs.cards import shipped_card
from feddg_bench.runs.request import Request

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generators() -> Any:
    """Return the modules that write pages."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generators
        from generators import leaderboards, overview, suites  # noqa: F401
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return generators


@pytest.fixture(scope="module")
def page(generators: Any) -> str:
    """Return the page of a table with records of its own folder."""
    board = generators.leaderboards._read(
        ROOT / "results/coverage/tables/digits4-ltdo-converged.csv"
    )
    return generators.leaderboards._page(board)


def test_every_track_has_tables(generators: Any) -> None:
    """The name of a table changes once its rates are tuned."""
    for track, found in generators.leaderboards.boards():
        assert found, track


def test_every_number_of_a_test_domain_and_every_mean_is_on_the_page(page: str) -> None:
    path = ROOT / "results/coverage/tables/digits4-ltdo-converged.csv"
    cells = [*csv.DictReader(path.read_text().splitlines())]
    lines = [text.strip("| ").split(" | ") for text in page.splitlines() if text.startswith("| <a")]
    rows = {html.unescape(re.findall(">(.*?)<", line[0])[0]): line for line in lines}
    assert rows.keys() == {cell["row"] for cell in cells}
    kinds = ("mean", "difference", "p_value", "compute")
    wanted = [
        cell
        for cell in cells
        if cell["group"] == "test" or (cell["kind"] in kinds and cell["column"] != "macro F1")
    ]
    assert len(wanted) > 60
    for cell in wanted:
        shown = [text.partition(" <sup>")[0] for text in rows[cell["row"]]]
        assert cell["text"].lstrip("'") in shown, cell
    for cell in cells:
        assert all(f"<code>{key}</code>" in page for key in cell["run_keys"].split())


def test_the_commands_of_a_page_plan_exactly_its_runs(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feddg_bench.common.portable.is_fixed", lambda: True)
    _, *sections = page.split("<details ")
    section = next(each for each in sections if "<summary>FedAvg:" in each)
    keys = re.findall("<code>(.*?)</code>", section)
    (commands,) = re.findall("<pre>(.*?)</pre>", section, flags=re.S)
    planned = []
    for command in html.unescape(commands).splitlines():
        program, run, *words = shlex.split(command)
        assert (program, run) == ("feddg-bench", "run")
        flags, pairs = {}, []
        while words:
            word = words.pop(0)
            if word.startswith("--"):
                flags[word[2:]] = words.pop(0)
            else:
                pairs.append(word)
        planned += [plan.key for plan in Request.read(flags=flags, pairs=pairs).plan(check=False)]
    assert sorted(planned) == sorted(keys)
    assert len(keys) == 12


def test_a_method_undoes_a_world_if_its_interval_lies_above_that_of_fedavg(generators: Any) -> None:
    undone = {
        name: generators.overview._undone(name)
        for name in ("fedccrl", "feddg", "erm", "moon", "stablefdg", "qffl", "mmd")
    }
    assert undone["fedccrl"] == "tint 53 %, hard 29 %"
    assert undone["feddg"] == "tint 14 %"
    assert undone["erm"] == undone["moon"] == "none"
    assert undone["stablefdg"].endswith("label 97 %")
    assert undone["qffl"] == undone["mmd"] == "unclear"  # they do not learn in the control
    assert generators.overview._undone("ridge") == ""  # not measured


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("fedavg", "395,880", "395,880"),
        ("scaffold", "791,760", "791,760"),
        ("pardon", "395,880; once 24", "395,880; once 24"),
        ("fediir", "401,048", "401,040"),  # two calls use one version of the model
    ],
)
def test_bytes_of_a_round(generators: Any, name: str, up: str, down: str) -> None:
    seen = shipped_card(name)
    found = [generators.overview._bytes(seen, way) for way in ("up", "down")]
    assert found == [up, down]


def test_lines_of_code_are_without_docstrings_and_comments(
    generators: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "methods/feddg_methods"
    place.mkdir(parents=True)
    (place / "a.py").write_text('''"""Two
lines."""

# a comment
X = [
    1,  # one
]


def f():
    """Text."""
    return """a
    b"""
''')
    monkeypatch.setattr(generators.overview, "ROOT", tmp_path)
    assert generators.overview._lines("a") == 6


def test_facts_about_other_suites_name_their_sources(generators: Any) -> None:
    suites = generators.suites.SUITES
    assert len(suites) == 6
    for suite in suites:
        assert set(suite.facts) <= {*generators.suites.ROWS}
        assert all(fact and files for fact, files in suite.facts.values())
    ((page),) = generators.suites.pages()
    assert "| resume |" in page.content
    assert page.content.count("| unknown ") == sum(
        len(generators.suites.ROWS) - len({*suite.facts, "version"}) for suite in suites
    )
