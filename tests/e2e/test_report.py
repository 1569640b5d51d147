"""End-to-end tests of ``feddg-bench report``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from feddg_bench.config.recipes import recipe_names
from tests import fabricate_records as fabricate

Run = Callable[..., Any]


@pytest.fixture
def feddg(feddg: Run, tmp_path: Path) -> Run:
    """Return ``feddg-bench report``, in a folder with 40 runs in ``results``."""
    fabricate.population(tmp_path / "runs", 40, rounds=2)
    return partial(feddg, "report")


def test_default_file_filter_and_figures(feddg: Run, tmp_path: Path) -> None:
    (tmp_path / "runs" / "figures").mkdir()
    (tmp_path / "runs" / "figures" / "one.png").write_bytes(b"png")
    (tmp_path / "runs" / "figures" / "two.png").write_bytes(bytes(2_000_000))
    done = feddg()
    assert done.code == 0, done.err
    assert "Wrote runs/report.html (40 runs, 3 tables, 2 figures, 2," in done.out
    first = (tmp_path / "runs" / "report.html").read_bytes()
    assert feddg("--out", "again.html").code == 0
    assert (tmp_path / "again.html").read_bytes() == first
    done = feddg("--filter", "dataset=pacs", "--filter", "method=moon,ccst", "--no-figures")
    assert "4 runs, 1 table, 0 figures" in done.out
    assert (tmp_path / "runs" / "report.html").read_bytes() != first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--filter", "method=fedavgg"), ("none of the 40 runs", "fedavgg", "fedprox")),
        (("--filter", "lr=1"), ("none of the 40 runs has lr 1", "0.001")),
        (("--filter", "rate=1"), ("--filter: unknown setting 'rate'",)),
        (("--filter", "method"), ("KEY=VALUE",)),
        (("--results", "nowhere"), ("nowhere", "--results")),
    ],
)
def test_bad_input_is_one_sentence(
    feddg: Run, arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    done = feddg(*arguments)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.strip().splitlines()
    assert line.startswith("feddg-bench: error: ")
    for word in words:
        assert word in line
    assert not (tmp_path / "runs" / "report.html").exists()


def test_a_record_cut_short_is_left_out(feddg: Run, tmp_path: Path) -> None:
    path = sorted((tmp_path / "runs" / "runs").glob("*.json"))[0]
    path.write_bytes(path.read_bytes()[:-20])
    done = feddg()
    assert (done.code, done.err) == (0, "")
    assert "(39 runs, " in done.out
    assert path.stem not in (tmp_path / "runs" / "report.html").read_text()


@pytest.mark.nightly
def test_the_wheel_holds_what_commands_need(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling")
    import zipfile

    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    found = {
        Path(name).name for name in names if re.match(r"feddg_bench/analysis/report/page/", name)
    }
    assert found == {"page.html", "page.css", "page.js"}
    shipped = {name for name in names if name.startswith("feddg_bench/shipped/")}
    sources = [*(root / "sweeps").rglob("*.yaml"), *(root / "results/published").glob("*.csv")]
    sources += [path for path in (root / "tests/example_plugin").iterdir() if path.is_file()]
    sources += [*(root / "results/tuning").glob("*.jsonl"), *(root / "results/tables").glob("*")]
    sources += (root / "results/attacks").glob("*.jsonl.xz")
    for path in sources:
        assert f"feddg_bench/shipped/{path.relative_to(root).as_posix()}" in shipped
    assert {"feddg_methods/cards.json", "feddg_methods/digests.json"} <= {*names}
    recipes = {f"feddg_bench/shipped/sweeps/recipes/{name}.yaml" for name in recipe_names()}
    assert recipes <= {*names}  # the demo runs with these and the ledgers
    assert "feddg_bench/shipped/results/tuning/digits4-ltdo-quick.jsonl" in names
