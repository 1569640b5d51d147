"""PACS: found under all usual names of its folders, checked by counts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from feddg_bench.common.errors import DataError, SettingsError
from feddg_datasets.pacs import PACS
from tests.helpers import refused


class TinyPACS(PACS):
    """Two images of each class in each domain."""

    counts: ClassVar[Mapping[str, tuple[int, ...]]] = dict.fromkeys(PACS.domains, (2,) * 7)


def make(root: Path, names: Mapping[str, str] | None = None) -> Path:
    """Write two images of each class in each domain below ``root`` and return it."""
    for domain in PACS.domains:
        for name in PACS.classes:
            folder = root / (names or {}).get(domain, domain) / name
            folder.mkdir(parents=True)
            Image.new("RGB", (5, 4)).save(folder / "pic_001.jpg")
            Image.new("L", (5, 4), 200).save(folder / "n02103406_343-1.png")
    return root


def test_records(tmp_path):
    records = TinyPACS(make(tmp_path)).records()
    assert len(records.paths) == 56
    assert list(records.paths) == sorted(records.paths)
    assert "art_painting/dog/pic_001.jpg" in records.paths
    for path, label, domain in zip(records.paths, records.labels, records.domains, strict=True):
        assert path.split("/")[:2] == [PACS.domains[domain], PACS.classes[label]]


def test_sketches_are_read_as_rgb(tmp_path):
    pacs = TinyPACS(make(tmp_path))
    index = pacs.records().paths.index("sketch/dog/n02103406_343-1.png")
    assert np.array_equal(pacs.read(index, 3), np.full((3, 3, 3), 200))


@pytest.mark.parametrize("layout", ["", "Pacs", "kfold", "pacs_v1.0", "PACS/kfold", "pacs/images"])
def test_layouts(tmp_path, layout):
    make(tmp_path / layout)
    assert len(TinyPACS(tmp_path).records().paths) == 56


@pytest.mark.parametrize("art", ["art painting", "Art_painting", "art", "ArtPainting", "ART"])
def test_spellings_give_the_same_records(tmp_path, art):
    make(tmp_path / "a")
    make(tmp_path / "b", {"art_painting": art, "photo": "Photo", "sketch": "SKETCH"})
    first, second = TinyPACS(tmp_path / "a"), TinyPACS(tmp_path / "b")
    assert first.records().paths == second.records().paths
    assert first.fingerprint() == second.fingerprint()


def test_what_archives_leave_behind_is_ignored(tmp_path):
    make(tmp_path)
    dog = tmp_path / "photo" / "dog"
    for path in (
        dog / "._pic_001.jpg",
        dog / ".DS_Store",
        dog / "Thumbs.db",
        tmp_path / "__MACOSX" / "photo" / "dog" / "pic_001.jpg",
        tmp_path / "photo" / "__MACOSX" / "pic_001.jpg",
        tmp_path / "splits" / "photo_train_kfold.txt",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image")
    assert len(TinyPACS(tmp_path).records().paths) == 56


@pytest.mark.parametrize("suffix", [".JPG", ".jpeg", ".bmp", ".webp"])
def test_suffixes(tmp_path, suffix):
    make(tmp_path)
    old = tmp_path / "photo" / "dog" / "pic_001.jpg"
    old.unlink()
    Image.new("RGB", (5, 4), (9, 9, 9)).save(old.with_suffix(suffix))
    assert f"photo/dog/pic_001{suffix}" in TinyPACS(tmp_path).records().paths


def test_the_environment_and_the_settings_file_are_looked_at(tmp_path, monkeypatch):
    make(tmp_path / "data" / "pacs")
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"data_root: {tmp_path / 'data'}\n")
    monkeypatch.setenv("FEDDG_CONFIG", str(settings))
    assert len(TinyPACS().records().paths) == 56
    monkeypatch.delenv("FEDDG_CONFIG")
    monkeypatch.setenv("FEDDG_DATA", str(tmp_path / "data"))
    assert len(TinyPACS().records().paths) == 56


def test_a_folder_that_is_given_is_the_only_one(tmp_path, monkeypatch):
    make(tmp_path / "data" / "pacs")
    monkeypatch.setenv("FEDDG_DATA", str(tmp_path / "data"))
    with refused(SettingsError, f"there is no folder {tmp_path / 'elsewhere'}", "--data-root"):
        TinyPACS(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with refused(DataError, f"(looked in {tmp_path / 'elsewhere'})"):
        TinyPACS(tmp_path / "elsewhere").records()


def test_missing_data_say_where_to_look_and_get_them(monkeypatch):
    monkeypatch.setenv("FEDDG_DATA", "/from/environment")
    with pytest.raises(DataError) as caught:
        PACS().records()
    message = str(caught.value)
    for part in (
        "/from/environment",
        "feddg-bench data download pacs",
        "--data-root",
        "FEDDG_DATA",
        "data path pacs DIR`, which stores the path",
    ):
        assert part in message
    assert "\n" not in message


def test_without_any_root_the_message_still_helps():
    with refused(DataError, "--data-root"):
        PACS().records()


def test_a_missing_domain_is_named(tmp_path):
    make(tmp_path / "pacs")
    (tmp_path / "pacs" / "sketch").rename(tmp_path / "pacs" / "sketched")
    with refused(DataError, "pacs lacks the folder sketch; is it the folder sketched in", "Rename"):
        TinyPACS(tmp_path).records()
    shutil.rmtree(tmp_path / "pacs" / "sketched")
    with refused(DataError, "pacs lacks the folder sketch: get it again from https://www.eecs"):
        TinyPACS(tmp_path).records()


def test_a_missing_class_is_named(tmp_path):
    make(tmp_path)
    for domain in PACS.domains:
        (tmp_path / domain / "house").rename(tmp_path / domain / "hut")
    with refused(DataError, "no image of the class house"):
        TinyPACS(tmp_path).records()


def test_a_differing_count_is_named(tmp_path):
    make(tmp_path)
    (tmp_path / "cartoon" / "horse" / "pic_001.jpg").unlink()
    Image.new("RGB", (5, 4)).save(tmp_path / "photo" / "dog" / "more.png")
    with pytest.raises(DataError) as caught:
        TinyPACS(tmp_path).records()
    assert "photo/dog holds 3 images instead of 2 (+1)" in str(caught.value)
    assert "cartoon/horse holds 1 image instead of 2 (-1)" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_promised_counts_are_those_of_the_paper():
    totals = {domain: sum(counts) for domain, counts in PACS.counts.items()}
    assert totals == {"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929}


def test_default_scenarios_are_those_of_the_literature():
    assert list(PACS.letters.values()) == ["p", "a", "c", "s"]
    cycle = [PACS.letters[domain] for domain in PACS.domains]
    assert list(zip(cycle, cycle[1:] + cycle[:1], strict=True)) == [
        ("a", "p"), ("p", "s"), ("s", "c"), ("c", "a"),
    ]  # fmt: skip


def test_the_real_data_are_whole(test_data):
    if not (test_data / "pacs").is_dir():
        pytest.skip("FEDDG_TEST_DATA has no PACS")
    pacs = PACS(test_data)
    records = pacs.records()
    assert len(records.paths) == 9991
    assert np.bincount(records.domains).tolist() == [2048, 1670, 3929, 2344]
    assert pacs.read(0, 32).shape == (32, 32, 3)
