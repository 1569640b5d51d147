"""Papers' tables of images reconstructed from styles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from feddg_attacks.reconstructions import DESIGNS, reconstruction_grid
from feddg_attacks.records import PERCEPTUAL, AttackRecord, AttackResult, save_attack
from feddg_bench.analysis.tables.grid import Entry, Grid, Line
from feddg_bench.analysis.tables.make import make_tables
from feddg_bench.analysis.tables.writers import WRITERS
from feddg_bench.common.errors import SettingsError
from tests.fabricate_attacks import attack, interval
from tests.fabricate_attacks import result as fabricated
from tests.helpers import refused


def result(about: str, **by_domain: dict[str, float]) -> AttackResult:
    told = {d: {k: interval(v, 1) for k, v in f.items()} for d, f in by_domain.items()}
    return fabricated({"rank": interval(0.6)}, about=about, by_domain=told)


def record(key: str, *results: AttackResult, **changes: Any) -> AttackRecord:
    values: dict[str, Any] = {
        "key": key,
        "run_key": key,
        "kind": "style-inversion",
        "dataset": "pacs",
        "scenario": "pa-s-c",
        "recipe": "laptop",
        "settings": {"data": {"image_size": 64}, "hyper": {"style": "pixel"}},
    }
    return attack(*results, **(values | changes))


def line_of(grid: Grid, row: str, kind: str = "ours") -> Line:
    (found,) = [line for line in grid.lines if (line.row, line.kind) == (row, kind)]
    return found


def cell(grid: Grid, row: str, group: str, head: str, kind: str = "ours") -> Entry | None:
    (place,) = [n for n, c in enumerate(grid.columns) if (c.group, c.head) == (group, head)]
    return line_of(grid, row, kind).entries[place]


OURS = "Photo"


def test_published_numbers_stand_beside_ours() -> None:
    photo = {"fid": 300.0, "sample_fid": 200.0, "psnr": 12.0}
    grid = reconstruction_grid("pardon-4", [record("a" * 16, result("clients", photo=photo))])
    ours = cell(grid, OURS, "attack I, sample style", "FID")
    assert ours is not None
    assert (ours.value, ours.low, ours.high, ours.keys) == (200, 199, 201, ("a" * 16,))
    client = cell(grid, OURS, "attack I, client style", "FID")
    assert client is not None
    assert client.value == 300
    theirs = cell(grid, OURS, "attack I, sample style", "FID", "published")
    assert theirs is not None
    assert theirs.value == 203.24
    assert "attack --kind style-inversion" in line_of(grid, "Sketch").entries[0].fill  # type: ignore[union-attr]
    assert line_of(grid, "Sketch").entries[0].value is None  # type: ignore[union-attr]


def test_generators_are_kept_apart_and_the_setup_with_most_records_is_shown() -> None:
    mse = result("clients", photo={"fid": 300.0, "lpips": 0.5})
    lpips = result("clients" + PERCEPTUAL, photo={"fid": 250.0, "lpips": 0.3})
    large = {"data": {"image_size": 128}, "hyper": {"style": "pixel"}}
    records = [
        record("a" * 16, mse, lpips),
        record("b" * 16, result("clients", photo={"fid": 310.0}), seed=1),
        record("c" * 16, result("clients", photo={"fid": 400.0}), settings=large),
    ]
    grid = reconstruction_grid("fisc-9", records)
    assert cell(grid, OURS, "trained on MSE", "FID").value == 305  # type: ignore[union-attr]
    assert cell(grid, OURS, "trained on LPIPS", "FID").value == 250  # type: ignore[union-attr]
    published = cell(grid, OURS, "real images", "IS", "published")
    assert published is not None
    assert published.value == 10.3744
    assert "laptop, pixel, 64 px" in grid.caption
    assert grid.runs[OURS] == {"pa-s-c": ("0:" + "a" * 16, "1:" + "b" * 16)}


@pytest.mark.parametrize("name", list(DESIGNS))
def test_they_are_made_by_name_and_written_in_every_form(name: str, tmp_path: Path) -> None:
    save_attack(tmp_path, record("a" * 16, result("clients", photo={"fid": 300.0})))
    (grid,) = make_tables([name], [tmp_path]).grids
    for form in WRITERS:
        assert "300" in WRITERS[form][form](grid)


def test_an_unknown_table_is_told_all_that_there_is(tmp_path: Path) -> None:
    with refused(SettingsError, "did you mean 'pardon-4'"):
        make_tables(["pardon4"], [tmp_path])
    with refused(SettingsError, "did you mean 'claims'"):
        make_tables(["claim"], [tmp_path], also=["claims"])
