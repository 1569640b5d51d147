"""End-to-end tests of ``feddg-bench tables``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from feddg_bench import cli
from feddg_bench.records.store import pack_runs

TINY = (
    *("--clients", "4", "--per-round", "2", "--rounds", "2", "--workers", "1"),
    *("data.image_size=8", "data.id_test_fraction=0.5", "data.id_val_fraction=0.3"),
)
FORMATS = ("md", "tex", "csv")


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Return a results folder with FedAvg and FedProx on two scenarios, two seeds."""
    folder = tmp_path_factory.mktemp("tables")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDG_CACHE", str(cache))
        patch.setattr(cli.signal, "signal", lambda *_: None)
        arguments = ("run", "--method", "fedavg,fedprox", "--scenario", "ip-o-c,oc-i-p")
        more = ("--seeds", "0,1", "--results", str(folder / "runs"), "--json", *TINY)
        patch.setattr(sys, "argv", ["feddg-bench", *arguments, *more])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
    return folder / "runs"


@pytest.fixture
def feddg(feddg: Run) -> Run:
    """Return ``feddg-bench tables``."""
    return partial(feddg, "tables")


def test_the_last_line_says_what_was_written(feddg: Run, results: Path, tmp_path: Path) -> None:
    done = feddg("claims", "--results", results, "--out", tmp_path / "c")
    assert done.out.splitlines()[-1].endswith(f". Wrote {tmp_path / 'c' / 'claims.md'}")
    broken = tmp_path / "b" / "runs" / "aa.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{}")
    done = feddg("all", "--results", tmp_path / "b")
    assert done.code == 2
    assert "/b/ belongs in a table: run something first" in done.err
    assert not done.out  # no claims of papers: none has runs


def test_all_tables_twice_with_the_same_bytes(feddg: Run, results: Path, tmp_path: Path) -> None:
    done = feddg("all", "--results", results, "--out", tmp_path / "one")
    assert done.code == 0, done.err
    assert "digits4-ltdo-quick" in done.out
    for ending in FORMATS:
        assert (tmp_path / "one" / f"digits4-ltdo-quick.{ending}").stat().st_size > 200
        assert not (tmp_path / "one" / f"pardon-1.{ending}").exists()
    (empty,) = [line for line in done.out.splitlines() if "have no runs" in line]
    assert re.fullmatch(
        "2[0-9] other tables have no runs; see `feddg-bench tables [a-z-]+-1`",
        empty,
    )
    assert "pardon" not in done.out.lower()
    one = tmp_path / "one" / "digits4-ltdo-quick.{md,tex,csv}"
    assert done.out.endswith(f"Read 8 runs from {results}/. Wrote {one}\n")
    for row in ("FedAvg", "FedProx"):
        assert row in done.out
    asked = feddg("all", "pardon-1", "--results", results, "--out", tmp_path / "asked")
    assert "pardon-1.md" in {path.name for path in (tmp_path / "asked").iterdir()}, asked.err
    text = (tmp_path / "one" / "digits4-ltdo-quick.md").read_text()
    assert "|FedAvg" in text
    assert "|FedProx" in text
    assert "±" in text
    text = (tmp_path / "one" / "digits4-ltdo-quick.notes.md").read_text()
    for path in (results / "runs").glob("*.json"):
        assert path.stem in text
    copy = tmp_path / "elsewhere"
    shutil.copytree(results, copy)
    assert feddg("all", "--results", copy, "--out", tmp_path / "two").code == 0
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_names_formats_and_default_folder(feddg: Run, results: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs"
    shutil.copytree(results, copy)
    assert feddg("generic", "--format", "csv,md").code == 0
    found = {path.name for path in (copy / "tables").iterdir()}
    assert {name.rsplit(".", 1)[1] for name in found} == {"csv", "md"}
    assert {name.split("-")[0] for name in found} == {"digits4"}
    assert feddg("fisc-6", "--out", "out", "--format", "tex").code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"fisc-6.tex", "tables.tex"}
    assert feddg("fisc-7", "--out", "out", "--format", "tex").code == 0
    document = (tmp_path / "out" / "tables.tex").read_text()
    assert "input{fisc-7.tex}" in document
    assert "input{fisc-6.tex}" in document  # one table does not remove the others


def test_a_table_of_ones_own(feddg: Run, results: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        """
title: My table
where: {dataset: digits4, protocol: ltdo}
others: true
groups:
  - {split: test, columns: [{head: test}], summaries: {}}
"""
    )
    arguments = ("mine.yaml", "--results", results, "--out", "out", "--against", "fedprox")
    done = feddg(*arguments)
    assert done.code == 0, done.err
    text = (tmp_path / "out" / "mine.md").read_text()
    assert "# My table" in text
    assert "w/t/l" in text
    assert "Comparisons are with FedProx" in (tmp_path / "out" / "mine.notes.md").read_text()


def test_a_table_in_one_line(feddg: Run, results: Path, tmp_path: Path) -> None:
    arguments = ("--rows", "FedProx,fedavg", "--columns", "scenario", "--dataset", "digits4")
    done = feddg(*arguments, "--results", results, "--out", "out", "--recipe", "quick")
    assert done.code == 0, done.err
    text = (tmp_path / "out" / "digits4-ltdo-by-scenario.md").read_text()
    assert "||Chalk|Poster|mean|" in text
    numbers = [
        cell
        for line in text.splitlines()
        if line.startswith("|F")
        for cell in line.split("|")[1:-1]
    ]
    assert [cell for cell in numbers if cell not in done.out] == []
    assert [line.split("|")[1] for line in text.splitlines() if line.startswith("|F")] == [
        "FedProx",
        "FedAvg",
    ]
    done = feddg(*arguments, "--results", results, "--out", "out", "--filter", "lambda=0.1")
    assert "digits4-ltdo-by-scenario-lambda-0.1: " in done.out, done.err
    assert ", by scenario, lambda=0.1\n" in done.out
    for more, said in (
        (("--filter", "lamda=0.1"), "--filter: unknown setting 'lamda'"),
        (("--filter", "K=abc"), "none of the 8 runs has K abc (there are 2)"),
        (("pardon-1",), "leave out 'pardon-1'"),
        (
            ("--protocol", "LODO"),
            "runs has dataset digits4 and protocol lodo (there are ltdo) and method fedprox or",
        ),
        (("--columns", "recipe"), "a table shows one recipe"),
        (("--columns", "scenaro"), "did you mean 'scenario'?"),
    ):
        refused = feddg(*arguments, "--results", results, *more)
        assert refused.code == 2
        assert said in refused.err


def test_selection_rules(feddg: Run, results: Path, tmp_path: Path) -> None:
    for rule in ("last", "mean_last_5", "best_by_val", "best_by_id_val", "oracle"):
        done = feddg("generic", "--results", results, "--out", rule, "--select", rule)
        assert done.code == 0, done.err
        (table,) = (tmp_path / rule).glob("*.notes.md")
        text = table.read_text()
        assert f"Selection rule {rule}".replace("_", r"\_") in text
        assert ("ORACLE" in text) == (rule == "oracle")


def test_a_record_cut_short(
    feddg: Run, results: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "runs"
    shutil.copytree(results, copy)
    path = sorted((copy / "runs").glob("*.json"))[0]
    path.write_bytes(path.read_bytes()[:-20])
    done = feddg("all")
    assert done.code == 0
    assert "\nRead 7 runs from runs/. Wrote runs/tables/" in done.out
    (message,) = caplog.messages
    assert message.startswith("skipped 1 record ")
    assert str(path.relative_to(tmp_path)) in message
    text = (tmp_path / "runs" / "tables" / "digits4-ltdo-quick.notes.md").read_text()
    assert path.stem not in text


def test_two_folders_are_read_as_one(feddg: Run, results: Path, tmp_path: Path) -> None:
    """The user's runs, packed or not, are combined with those of others; messages say so."""
    keys = sorted(path.stem for path in (results / "runs").glob("*.json"))
    for folder, mine in (("runs", keys[:3]), ("results", keys[2:])):  # one is in both
        (tmp_path / folder / "runs").mkdir(parents=True)
        for key in mine:
            shutil.copy(results / "runs" / f"{key}.json", tmp_path / folder / "runs")
    pack_runs(tmp_path / "results")
    done = feddg("all", "--results", results, "--out", "whole")
    assert done.code == 0
    done = feddg("all", "--results", "runs", "--results", "results", "--out", "both")
    assert "Read 8 runs from runs/ and results/. Wrote both/" in done.out
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "both" / path.name).read_bytes()
    assert "Read 3 runs from runs/ (results/ has records, too: " in feddg("all").out
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs" / "runs").mkdir(parents=True)  # left by a refused run
    assert "Read 6 runs from results/. Wrote results/tables/" in feddg("all").out


def test_latex_compiles(feddg: Run, results: Path, tmp_path: Path) -> None:
    compiler = shutil.which("tectonic") or shutil.which("pdflatex")
    if compiler is None:
        pytest.skip("needs tectonic or pdflatex")
    assert feddg("all", "--results", results, "--out", "out", "--format", "tex").code == 0
    options = ["-interaction=nonstopmode", "-halt-on-error"] if "pdflatex" in compiler else []
    done = subprocess.run(
        [compiler, *options, "tables.tex"],
        cwd=tmp_path / "out",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
