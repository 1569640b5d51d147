"""The doctor: a complete copy is clean, and each planted fault is found and named."""

from __future__ import annotations

import csv
import lzma
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from feddg_bench.common.errors import DataError
from feddg_bench.data.image_store import open_store
from feddg_bench.data.inspect.doctor import Diagnosis, Finding, examine, sign
from feddg_bench.data.inspect.signatures import load_signatures, save_signatures, signature
from feddg_bench.data.splits import read_split_csv
from feddg_datasets.digits4 import Digits4
from feddg_datasets.pacs import PACS
from tests.helpers import refused

SPLITS = {"art_painting": "val", "photo": "test", "sketch": "train", "cartoon": "train"}


class TinyPACS(PACS):
    """Two images of each class in each domain."""

    counts: ClassVar[Mapping[str, tuple[int, ...]]] = dict.fromkeys(PACS.domains, (2,) * 7)
    signatures = None


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
    path.unlink()  # it can be a link
    path.write_bytes(content[: len(content) // 2])


def duplicate(root: Path) -> None:
    """Replace a photo with a copy of a painting."""
    copied = sorted((root / "art_painting" / "dog").iterdir())[0]
    path = sorted((root / "photo" / "dog").iterdir())[0]
    path.unlink()
    shutil.copyfile(copied, path)


def rename(root: Path) -> None:
    (root / "sketch").rename(root / "skizzen")


FAULTS: dict[str, tuple[Callable[[Path], None], list[str], tuple[str, ...]]] = {
    "class": (drop_class, ["count"], ("photo/guitar holds 0 images instead of",)),
    "truncated": (
        truncate,
        ["unreadable"],
        ("1 of 56 images cannot be decoded: cartoon/horse/pic_",),
    ),
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


@pytest.fixture
def real(test_data) -> Path:
    if not (test_data / "pacs").is_dir():
        pytest.skip("FEDDG_TEST_DATA has no PACS")
    return test_data / "pacs"


def link(real: Path, root: Path, most: int) -> Path:
    """Make a copy with links to the first images of each class."""
    for folder in real.glob("*/*"):
        into = root / folder.relative_to(real)
        into.mkdir(parents=True)
        for path in sorted(folder.iterdir())[:most]:
            (into / path.name).symlink_to(path)
    return root


@pytest.mark.nightly
def test_the_real_pacs_is_clean(real, tmp_path):
    path = write_csv(tmp_path / "right.csv", PACS(real))
    found = examine(PACS(real), path)
    assert found.findings == []
    assert found.notes == []
    assert found.images == 9991
    assert found.fingerprint == "6fa5e9931a28d9b5e50a95f70c223572"
    path = write_csv(tmp_path / "shifted.csv", PACS(real), base=1)
    with refused(DataError, "constant 1 from the data set's in all 9991 rows"):
        read_split_csv(path, None, PACS(real))


def pictures(root: Path) -> dict[str, Finding]:
    """Return all findings except the small number of images."""
    found = examine(PACS(root))
    assert "every picture" in found.compared[-1]
    texts = [f for f in found.findings if "shown by no file" not in f.text and f.kind != "count"]
    return {finding.text: finding for finding in texts}


@pytest.mark.nightly
def test_pictures_saved_anew_are_the_same(real, tmp_path):
    root = link(real, tmp_path / "copy", 8)
    for i, path in enumerate(sorted(root.rglob("*.*"))):
        with Image.open(path) as image:
            small = image.convert("RGB").resize((128 + 8 * (i % 12), 128))
        path.unlink()
        if i % 3:
            small.save(path.with_suffix(".jpg"), quality=50 + 10 * (i % 5))
        else:
            small.save(path.with_name(f"renamed_{i}.png"))
    assert pictures(root) == {}


@pytest.mark.nightly
def test_wrong_pictures_in_the_real_pacs_are_found(real, tmp_path):
    root = link(real, tmp_path / "copy", 12)
    dogs, giraffes = (sorted((root / "photo" / name).iterdir()) for name in ("dog", "giraffe"))
    for dog, giraffe in zip(dogs, giraffes, strict=True):
        dog.rename(tmp_path / "x")
        giraffe.rename(dog)
        (tmp_path / "x").rename(giraffe)

    def replace(place: str, number: int, image: Image.Image, **options: object) -> str:
        path = sorted((root / place).iterdir())[number]
        path.unlink()
        image.save(path, **options)
        return path.relative_to(root).as_posix()

    foreign = []
    for number, path in enumerate(sorted((real / "cartoon" / "house").iterdir())[:10]):
        with Image.open(path) as image:
            foreign.append(replace("art_painting/house", number, image, quality=60))
    black = replace("photo/person", 0, Image.new("RGB", (227, 227)))
    dot = replace("photo/person", 1, Image.new("RGB", (1, 1), (90, 90, 80)))
    with Image.open(sorted((real / "photo/person").iterdir())[2]) as image:
        thin = replace("photo/person", 2, image.resize((31, 500)))
    path = sorted((root / "sketch/horse").iterdir())[0]
    with Image.open(path) as image:
        deep = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    deep_name = replace("sketch/horse", 0, deep)
    with Image.open(sorted((real / "photo/horse").iterdir())[0]) as image:
        grey = replace("photo/horse", 0, image.convert("L"))
    by_words = pictures(root)

    def files(word: str) -> set[str]:
        (finding,) = (f for text, f in by_words.items() if word in text)
        return set(finding.files)

    swapped = files("another class or domain")
    assert len(swapped) == 24 + 10
    assert f"photo/dog/{dogs[0].name} is photo/giraffe/{giraffes[0].stem}" in swapped
    assert {name.split(" is ")[0] for name in swapped} >= set(foreign)
    assert files("none of the published") == {black, dot}
    assert files("half as large") == {dot, thin}
    assert files("16 bits") == {deep_name}
    assert files("other colours") == {grey}
    assert any(black in note for note in examine(PACS(root)).notes)


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
    assert found.compared == []


def test_every_count_that_differs_is_named(copy):
    (copy / "photo" / "dog" / "pic_000.jpg").unlink()
    Image.new("RGB", (5, 4)).save(copy / "sketch" / "horse" / "more.png")
    found = examine(TinyPACS(copy))
    assert [finding.text for finding in found.findings] == [
        "photo/dog holds 1 image instead of 2 (-1)",
        "sketch/horse holds 3 images instead of 2 (+1)",
    ]


def test_a_misspelt_class_is_asked_for(copy):
    for spelt in ("guitars", "gitarre", "laute"):  # the last is recognised by its number of images
        (copy / "photo" / "guitar").rename(copy / "photo" / spelt)
        (text,) = [finding.text for finding in examine(TinyPACS(copy)).findings]
        assert f"is it the folder {spelt} in {copy / 'photo'}? Rename that to guitar" in text
        (copy / "photo" / spelt).rename(copy / "photo" / "guitar")


def test_a_foreign_folder_is_not_taken_for_a_missing_class(copy):
    (copy / "photo" / "guitar").rename(copy / "photo" / "cat")
    shutil.copyfile(copy / "photo/dog/pic_000.jpg", copy / "photo/cat/pic_002.jpg")
    (text,) = [finding.text for finding in examine(TinyPACS(copy)).findings]
    assert text == "photo/guitar holds 0 images instead of 2 (-2)"


def test_a_domain_that_lies_one_folder_too_deep_is_said(copy):
    (copy / "photo").rename(copy / "inner")
    (copy / "photo").mkdir()
    (copy / "inner").rename(copy / "photo" / "photo")
    (finding,) = examine(TinyPACS(copy)).findings
    assert f"the classes lie in {copy / 'photo' / 'photo'}: move them a folder up" in finding.text
    with refused(DataError, "move them a folder up"):
        TinyPACS(copy).records()


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
    assert (
        note == "1 file not read (not the ending of an image format that is read): README.txt"
    )  # the others are system files


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
        (lambda text: text.replace("val,art", "train,art"), None),  # a LODO file
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
    with refused(DataError, "was not found"):
        examine(PACS(tmp_path))


def test_it_can_be_written_as_json(copy):
    truncate(copy)
    value = examine(TinyPACS(copy)).as_json()
    assert value["clean"] is False
    assert value["comparable"] is False
    assert value["fingerprint"] is None
    assert value["findings"][0]["files"] == ("cartoon/horse/pic_000.jpg",)
    assert value["counts"]["photo"]["dog"] == value["published"]["photo"]["dog"] == 2


# ------------------------------------------------------------------- signatures of one's own


def test_other_copies_are_compared_with_a_clean_one(copy, tmp_path):
    path = tmp_path / "own.xz"
    save_signatures(path, sign(TinyPACS(copy)), "pacs")
    found = examine(TinyPACS(copy), against=path)
    assert found.findings == []
    assert "every picture" in found.compared[-1]
    first, second = copy / "photo/dog/pic_000.jpg", copy / "sketch/house/pic_001.jpg"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    (finding,) = examine(TinyPACS(copy), against=path).findings
    assert finding.files == (
        "photo/dog/pic_000.jpg is sketch/house/pic_001",
        "sketch/house/pic_001.jpg is photo/dog/pic_000",
    )
    assert not finding.comparable


def test_signatures_are_written_and_read(copy, tmp_path):
    signatures = sign(TinyPACS(copy))
    save_signatures(tmp_path / "x.xz", signatures, "pacs")
    again = load_signatures(tmp_path / "x.xz", "pacs")
    assert (again.names, again.side) == (signatures.names, 40)
    assert np.array_equal(again.hashes, signatures.hashes)
    assert np.array_equal(again.colours, signatures.colours)
    with refused(DataError, "of pacs, not of officehome"):
        load_signatures(tmp_path / "x.xz", "officehome")


NO_SIGNATURES = (b"[]\n", b"{}\n", b'{"names": ["a"], "side": 1}\nshort')


@pytest.mark.parametrize("content", [b"", b"text", *map(lzma.compress, NO_SIGNATURES)])
def test_what_holds_no_signatures_is_refused(tmp_path, content):
    (tmp_path / "x.xz").write_bytes(content)
    with refused(DataError, "data sign pacs"):
        load_signatures(tmp_path / "x.xz", "pacs")


def test_the_signatures_of_pacs_are_small_and_those_of_the_clean_copy(real):
    assert PACS.signatures.stat().st_size < 100_000
    signatures = load_signatures(PACS.signatures, "pacs")
    dataset = PACS(real)
    assert [path.rpartition(".")[0] for path in dataset.records().paths] == [*signatures.names]
    for index in range(0, 9991, 500):
        bits, colour = signature(dataset.read(index, 64))
        assert np.unpackbits(bits ^ signatures.hashes[index]).sum() <= 1  # a cosine's last bit
        assert np.array_equal(colour, signatures.colours[index])


def test_a_spoilt_store_is_found(copy, tmp_path):
    open_store(TinyPACS(copy), 8, tmp_path / "cache")
    assert examine(TinyPACS(copy), cache_dir=tmp_path / "cache").findings == []
    (path,) = (tmp_path / "cache" / "stores").iterdir()
    spoilt = bytearray(path.read_bytes())
    spoilt[99] ^= 1
    path.write_bytes(spoilt)
    (finding,) = examine(TinyPACS(copy), cache_dir=tmp_path / "cache").findings
    assert finding.kind == "store"
    assert str(path) in finding.text
