"""Warnings about tiny domains, missing classes and imbalance in a user's data set."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddg_bench.config.schema import Resources
from feddg_bench.data.federated import FEW, RATIO, cautions
from feddg_bench.data.inspect.doctor import examine
from feddg_bench.runs.request import Request, _say_once
from feddg_datasets.folder import Folder

SMALL = {"clients": 4, "per_round": 2, "data.image_size": 16}
SMALL |= {"backbone.name": "small_cnn", "backbone.pretrained": False}


def said(counts: list[list[int]], *tested: str) -> list[str]:
    table = np.array(counts)
    classes = tuple("abcdefgh"[: table.shape[1]])
    return list(cautions(table, ("x", "y", "z")[: len(table)], classes, tested))


def test_nothing_is_said_of_what_is_balanced() -> None:
    assert said([[FEW, RATIO * FEW], [FEW, FEW]], "x", "y") == []
    assert said([[FEW - 1, 1], [10, 10]], "x") == []


def test_only_tested_domains_are_tiny() -> None:
    (line,) = said([[3, 2], [20, 20], [900, 900]], "x", "y")
    assert line == (
        "test domains with fewer than 50 images: x (5), y (40); a single image changes accuracy "
        "by up to 20.0 points"
    )
    assert said([[3, 2], [20, 20]]) == []


def test_missing_classes_are_named_by_domain() -> None:
    (line,) = said([[60, 0, 60], [60, 60, 60], [0, 60, 0]])
    assert line == "classes missing from a domain: x has no b; z has no a, no c"


def test_imbalance_is_that_of_all_images_or_of_a_domain() -> None:
    (line,) = said([[2000, 3], [1, 0]])[1:]
    assert line.startswith("classes are imbalanced 667:1 (a 2,001 images, b 3): ")
    (line,) = said([[2000, 1], [1, 2000]])
    assert line.startswith("classes are imbalanced 2,000:1 in domain x (a 2,000 images, b 1): ")
    assert "macro F1" in line


def test_a_regression_has_no_classes() -> None:
    assert list(cautions(np.array([[1], [900]]), ("x", "y"), (), ("y",))) == []
    assert len(list(cautions(np.array([[1], [900]]), ("x", "y"), (), ("x",)))) == 1


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with a tiny domain, a missing class and files that are not read."""
    rng = np.random.default_rng(0)
    for domain, kind, number in (("x", "a", 6), ("x", "b", 5), ("y", "a", 6), ("z", "b", 9)):
        (tmp_path / "data" / domain / kind).mkdir(parents=True)
        for i in range(number):
            pixels = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / domain / kind / f"{i}.png")
    (tmp_path / "data/x/a/6.heic").write_bytes(b"")
    return tmp_path / "data"


def test_a_planned_run_says_each_once(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _say_once.cache_clear()
    where = Resources(data_root=root, results=tmp_path / "runs")
    request = Request(
        dataset="folder", protocol="lodo", scenario="z,y", settings=SMALL, resources=where
    )
    for _ in range(2):
        request.plan()
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert lines == [
        f"data: 1 file is not read: 1 .heic; `feddg-bench data check folder --data-root {root}` "
        "names them",
        "data: test domains with fewer than 50 images: y (6), z (9); a single image changes "
        "accuracy by up to 16.7 points",
        "data: classes missing from a domain: y has no b; z has no a",
    ]
    _say_once.cache_clear()
    Request(scenario="ip-o-c").plan()
    assert len(caplog.records) == len(lines)  # no warning about a published data set


def test_the_check_of_a_folder_reports_them(root: Path) -> None:
    found = examine(Folder(root))
    assert found.counts == {"x": {"a": 6, "b": 5}, "y": {"a": 6, "b": 0}, "z": {"a": 0, "b": 9}}
    assert found.findings == []
    assert [note.partition(":")[0] for note in found.notes] == [
        "test domains with fewer than 50 images",
        "classes missing from a domain",
        "1 file not read (not the ending of an image format that is read)",
    ]


def test_runs_on_a_folder_composite_and_turn_by_its_recipes(root: Path, tmp_path: Path) -> None:
    where = Resources(data_root=root, results=tmp_path / "runs")
    keys = []
    for more in ({}, {"data.background": "black", "data.exif": False}):
        asked = Request(
            dataset="folder", protocol="lodo", scenario="z", settings=SMALL | more, resources=where
        )
        (plan,) = asked.plan(check=False)
        keys.append(plan.key)
        expected = {"background": "white", "exif": True} if not more else {}
        data = plan.canonical["data"]
        assert {name: data[name] for name in ("background", "exif") if name in data} == expected
    assert len(set(keys)) == 2
