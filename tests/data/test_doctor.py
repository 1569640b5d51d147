"""The doctor: clean on a whole copy, and each planted fault is found and named."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from feddg_bench.common.errors import DataError
from feddg_bench.data.inspect.doctor import Diagnosis, examine
from feddg_bench.data.splits import read_split_csv
from feddg_datasets.digits4 import Digits4
from feddg_datasets.pacs import PACS

SPLITS = {"art_painting": "val", "photo": "test", "sketch": "train", "cartoon": "train"}


class TinyPACS(PACS):
    """Two images of each class in each domain."""

    counts: ClassVar[Mapping[str, tuple[int, ...]]] = dict.fromkeys(PACS.domains, (2,) * 7)


@pytest.fixture(autouse=True)
def no_other_roots(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDDG_DATA", raising=False)
    monkeypatch.delenv("FEDDG_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def copy(tmp_path) -> Path:
    """Return a folder of 56 images, all different."""
    rng = np.random.default_rng(0)
    for domain in PACS.domains:
        for name in PACS.classes:
            folder = tmp_path / "pacs" / domain / name
            folder.mkdir(parents=True)
            for i in range(2):
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).resize((48, 40)).save(folder / f"pic_{i:03}.jpg")
    return tmp_path / "pacs"


def write_csv(path: Path, dataset: PACS, base: int = 0) -> Path:
    """Write the split file of scheme cs-a-p, with labels that count from ``base``."""
    records = dataset.records()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "split", "domain", "category", "y", "path"])
        for i, (name, y) in enumerate(zip(records.paths, records.labels, strict=True)):
            domain, category, _ = name.split("/")
            writer.writerow([i, SPLITS[domain], domain, category, y + base, name])
    return path


def kinds(found: Diagnosis) -> list[str]:
    return [finding.kind for finding in found.findings]


# -------------------------------------------------- faults, on a fabricated and a real copy


def drop_class(root: Path) -> None:
    shutil.rmtree(root / "photo" / "guitar")


def truncate(root: Path) -> None:
    path = sorted((root / "cartoon" / "horse").iterdir())[0]
    content = path.read_bytes()
    path.unlink()  # it may be a link
    path.write_bytes(content[: len(content) // 2])


def duplicate(root: Path) -> None:
    """Replace a photo by a copy of a painting."""
    copied = sorted((root / "art_painting" / "dog").iterdir())[0]
    path = sorted((root / "photo" / "dog").iterdir())[0]
    path.unlink()
    shutil.copyfile(copied, path)


def rename(root: Path) -> None:
    (root / "sketch").rename(root / "skizzen")


FAULTS: dict[str, tuple[Callable[[Path], None], list[str], tuple[str, ...]]] = {
    "class": (drop_class, ["count"], ("photo/guitar holds 0 images instead of",)),
    "truncated": (truncate, ["unreadable"], ("1 image cannot be decoded: cartoon/horse/pic_",)),
    "duplicate": (
        duplicate,
        ["duplicate"],
        ("1 image under several names across domains: art_painting/dog/pic_", " = photo/dog/"),
    ),
    "domain": (
        rename,
        ["domain"],
        ("the domain sketch has no images; is it the folder skizzen", "Rename that to sketch"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(copy, fault):
    plant, expected, words = FAULTS[fault]
    plant(copy)
    found = examine(TinyPACS(copy))
    assert kinds(found) == expected
    for word in words:
        assert word in found.findings[0].text
    assert not found.comparable


def test_shifted_labels_are_found(copy, tmp_path):
    path = write_csv(tmp_path / "cs-a-p.csv", TinyPACS(copy), base=1)
    found = examine(TinyPACS(copy), path)
    assert kinds(found) == ["split"]
    assert "labels differ by a constant 1" in found.findings[0].text
    assert "subtract 1" in found.findings[0].text


def test_the_real_pacs_is_clean_and_planted_faults_are_found(test_data, tmp_path):
    """All faults at once, since 9,991 images take a while to decode."""
    if not (test_data / "pacs").is_dir():
        pytest.skip("FEDDG_TEST_DATA has no PACS")
    path = write_csv(tmp_path / "right.csv", PACS(test_data))
    found = examine(PACS(test_data), path)
    assert found.findings == []
    assert found.notes == []
    assert found.images == 9991
    assert found.fingerprint == "6fa5e9931a28d9b5e50a95f70c223572"

    root = tmp_path / "copy"
    for folder, _, files in os.walk(test_data / "pacs"):
        into = root / Path(folder).relative_to(test_data / "pacs")
        into.mkdir(parents=True)
        for name in files:
            (into / name).symlink_to(Path(folder) / name)
    for domain in ("sketch", "cartoon"):  # most of the images, not needed below
        for folder in (root / domain).iterdir():
            for path in sorted(folder.iterdir())[40:]:
                path.unlink()
    for plant, _, _ in FAULTS.values():
        plant(root)
    texts = [finding.text for finding in examine(PACS(root)).findings]
    for _, _, words in FAULTS.values():
        assert any(all(word in text for word in words) for text in texts), words

    real = PACS(test_data)
    path = write_csv(tmp_path / "shifted.csv", real, base=1)
    with pytest.raises(DataError, match="constant 1 from the data set's in all 9991 rows"):
        read_split_csv(path, None, real)


# ------------------------------------------------------------------------- other findings


def test_a_whole_copy_is_clean(copy, tmp_path):
    path = write_csv(tmp_path / "cs-a-p.csv", TinyPACS(copy))
    told: list[tuple[int, int]] = []
    found = examine(TinyPACS(copy), path, lambda *n: told.append(n))
    assert found.findings == []
    assert found.notes == []
    assert found.comparable
    assert found.folder == str(copy)
    assert found.counts == found.published
    assert found.fingerprint == TinyPACS(copy).fingerprint()
    assert told[-1] == (56, 56)


def test_embedded_data_can_be_looked_at():
    found = examine(Digits4())
    assert found.findings == []
    assert found.images == 1797
    assert found.folder is None
    assert found.fingerprint == Digits4().fingerprint()
    assert "not known" in found.notes[0]


def test_every_count_that_differs_is_named(copy):
    (copy / "photo" / "dog" / "pic_000.jpg").unlink()
    Image.new("RGB", (5, 4)).save(copy / "sketch" / "horse" / "more.png")
    found = examine(TinyPACS(copy))
    assert [finding.text for finding in found.findings] == [
        "photo/dog holds 1 images instead of 2 (-1)",
        "sketch/horse holds 3 images instead of 2 (+1)",
    ]


def test_a_misspelt_class_is_asked_for(copy):
    (copy / "photo" / "guitar").rename(copy / "photo" / "guitars")
    (text,) = [finding.text for finding in examine(TinyPACS(copy)).findings]
    assert f"is it the folder guitars in {copy / 'photo'}? Rename that to guitar" in text


def test_other_spellings_are_recognised_and_told(copy):
    (copy / "art_painting").rename(copy / "Art Painting")
    found = examine(TinyPACS(copy))
    assert found.findings == []
    assert found.layout.endswith("Art Painting is art_painting")


def test_other_files_change_nothing_but_are_told(copy):
    (copy / "__MACOSX").mkdir()
    (copy / "__MACOSX" / "x.jpg").write_bytes(b"")
    (copy / "README.txt").write_text("")
    (copy / "photo" / "dog" / "Thumbs.db").write_bytes(b"")
    found = examine(TinyPACS(copy))
    assert found.findings == []
    (note,) = found.notes
    assert note.startswith("3 other files are not read: ")
    for name in ("__MACOSX/x.jpg", "README.txt", "photo/dog/Thumbs.db"):
        assert name in note


def test_a_duplicate_under_another_label_is_told_as_such(copy):
    for name in ("horse", "house"):
        shutil.copyfile(copy / "photo/dog/pic_000.jpg", copy / "photo" / name / "pic_001.jpg")
    (finding,) = examine(TinyPACS(copy)).findings
    assert "in different classes: photo/dog/pic_000.jpg = photo/horse/" in finding.text
    assert len(finding.files) == 3


def test_a_duplicate_that_was_saved_anew_is_found(copy):
    with Image.open(copy / "photo/dog/pic_000.jpg") as image:
        (copy / "photo/dog/pic_001.jpg").unlink()
        image.save(copy / "photo/dog/pic_001.png")
    (finding,) = examine(TinyPACS(copy)).findings
    assert "in the same domain and class" in finding.text


def test_published_duplicates_are_no_finding(copy):
    class Known(TinyPACS):
        duplicates = 1

    class Unknown(TinyPACS):
        duplicates = None

    shutil.copyfile(copy / "photo/dog/pic_000.jpg", copy / "photo/dog/pic_001.jpg")
    assert kinds(examine(TinyPACS(copy))) == ["duplicate"]
    for cls, word in ((Known, "as in the published"), (Unknown, "is not known")):
        found = examine(cls(copy))
        assert found.findings == []
        assert word in found.notes[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda text: text.replace("split", "part", 1), "no column 'split'"),
        (lambda text: text.replace("photo/dog/pic_000", "photo/dog/pic_999"), "has no image"),
        (lambda text: text.replace("val,art", "train,art"), None),  # a lodo file
        (lambda text: text.replace("val,art_painting,dog", "test,art_painting,dog"), "fits no"),
        (lambda text: text.replace("train,sketch", "val,sketch"), "fits no scenario"),
        (lambda text: text.rsplit("\n", 2)[0], "lacks 1 of"),
        (lambda text: text[:0], "no column"),
    ],
)
def test_split_files_are_read_to_the_end(copy, tmp_path, change, word):
    path = write_csv(tmp_path / "mine.csv", TinyPACS(copy))
    path.write_text(change(path.read_text().replace("\r\n", "\n")))
    found = examine(TinyPACS(copy), path)
    assert kinds(found) == ([] if word is None else ["split"])
    if word:
        assert word in found.findings[0].text


def test_what_is_not_there_cannot_be_checked(tmp_path):
    with pytest.raises(DataError, match="was not found"):
        examine(PACS(tmp_path))


def test_it_can_be_written_as_json(copy):
    truncate(copy)
    value = examine(TinyPACS(copy)).as_json()
    assert value["clean"] is False
    assert value["comparable"] is False
    assert value["fingerprint"] is None
    assert value["findings"][0]["files"] == ("cartoon/horse/pic_000.jpg",)
    assert value["counts"]["photo"]["dog"] == value["published"]["photo"]["dog"] == 2
