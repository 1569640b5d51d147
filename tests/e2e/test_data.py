"""End-to-end tests of ``feddg-bench data``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from feddg_datasets import pacs
from feddg_datasets.pacs import PACS
from tests.helpers import one_sentence as refused

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def feddg(feddg: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return ``feddg-bench data`` for a user without data or settings."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    return partial(feddg, "data")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder above a PACS of two images of each class in each domain."""
    counts: Mapping[str, tuple[int, ...]] = dict.fromkeys(PACS.domains, (2,) * 7)
    monkeypatch.setattr(pacs.PACS, "counts", counts)
    monkeypatch.setattr(pacs.PACS, "signatures", None)
    rng = np.random.default_rng(0)
    for domain in PACS.domains:
        for name in PACS.classes:
            folder = tmp_path / "images" / "pacs" / domain / name
            folder.mkdir(parents=True)
            for i in range(2):
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"pic_{i:03}.png")
    return tmp_path / "images"


class TestList:
    FACTS: ClassVar = ("title", "images", "domains", "classes", "archive_bytes", "licence")

    def test_what_is_here(self, feddg: Run, tiny: Path) -> None:
        feddg("prepare", "pacs", "--size", "16,8", "--data-root", tiny)
        code, out, _ = feddg("list", "--json", "--data-root", tiny)
        rows = {row["name"]: row for row in json.loads(out)}
        assert code == 0
        assert [rows["pacs"][key] for key in self.FACTS] == [
            "PACS", 56, 4, 7, 174_167_459, "none stated; research use",
        ]  # fmt: skip
        assert rows["pacs"]["here"] is True
        assert rows["pacs"]["folder"] == str(tiny / "pacs")
        assert rows["pacs"]["decoded"] == [8, 16]
        assert rows["digits4"]["images"] == 1797
        assert rows["digits4"]["here"] is True
        assert rows["digits4"]["decoded"] == []

    def test_what_is_not_here_has_its_source(self, feddg: Run) -> None:
        code, out, _ = feddg("list")
        assert code == 0
        assert "pacs: https://www.eecs.qmul.ac.uk/~dl307/project_iccv2017" in out
        assert "9,991" in out
        said = {line.split(":")[0]: line for line in out.splitlines() if ": " in line}
        assert said["pacs"].endswith("or: feddg-bench data download pacs")
        assert "download" not in said["camelyon17"]


class TestCheck:
    def test_a_whole_copy(self, feddg: Run, tiny: Path) -> None:
        code, out, err = feddg("check", "pacs", "--data-root", tiny)
        assert (code, err) == (0, "")
        assert "PACS in " in out
        assert "photo: 14 images of 14 published" in out
        assert out.splitlines()[-1].startswith("clean: ")

    def test_a_copy_that_differs(self, feddg: Run, tiny: Path) -> None:
        (tiny / "pacs/photo/dog/pic_000.png").unlink()
        code, out, _ = feddg("check", "pacs", "--data-root", tiny)
        assert code == 1
        assert "differs: photo/dog holds 1 image instead of 2 (-1)" in out
        assert "do not compare" in out.splitlines()[-1]
        code, out, _ = feddg("check", "pacs", "--data-root", tiny, "--json")
        assert code == 1
        value = json.loads(out)
        assert value["clean"] is value["comparable"] is False
        assert value["counts"]["photo"]["dog"] == 1

    def test_a_split_file(self, feddg: Run, tiny: Path) -> None:
        path = tiny / "a.csv"
        path.write_text("split,domain,path\ntrain,photo,photo/dog/pic_000.png\n")
        code, out, _ = feddg("check", "pacs", "--data-root", tiny, "--split-csv", path)
        assert code == 1
        assert "lacks 55 of the data set's 56 images" in " ".join(out.split())

    def test_a_copy_is_compared_with_ones_own_signatures(self, feddg: Run, tiny: Path) -> None:
        code, out, _ = feddg("sign", "pacs", "--data-root", tiny, "--out", tiny / "own.xz")
        assert code == 0
        assert "own.xz: 56 images" in out
        check = ("check", "pacs", "--data-root", tiny, "--against", tiny / "own.xz")
        code, out, _ = feddg(*check)
        assert code == 0
        assert "every picture with the published one" in out
        first, second = (tiny / f"pacs/photo/{name}/pic_000.png" for name in ("dog", "house"))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        code, out, _ = feddg(*check)
        assert code == 1
        assert "photo/dog/pic_000.png is photo/house/pic_000" in out
        refused(feddg("check", "pacs", "--data-root", tiny, "--against", "none.xz"), "none.xz")

    def test_names_of_files_give_the_terminal_no_commands(self, feddg: Run, tiny: Path) -> None:
        (tiny / "pacs/photo/dog/pic_000.png").unlink()
        (tiny / "pacs/photo/dog/a\n\x1b[31mb.png").write_text("no image")
        _, out, _ = feddg("check", "pacs", "--data-root", tiny)
        assert "\x1b" not in out
        assert "photo/dog/a\\n\\x1b[31mb.png" in out

    def test_what_cannot_be_checked(self, feddg: Run, tiny: Path) -> None:
        refused(feddg("check", "pacs"), "was not found", "feddg-bench data path pacs DIR")
        refused(feddg("check", "pasc"), "did you mean 'pacs'")
        arguments = ("--data-root", tiny, "--split-csv", "none.csv")
        refused(feddg("check", "pacs", *arguments), "no split file none.csv")


class TestPrepare:
    def test_sizes(self, feddg: Run, tiny: Path, tmp_path: Path) -> None:
        code, out, _ = feddg("prepare", "pacs", "--size", "8,16", "--data-root", tiny)
        assert code == 0
        assert "pacs at 8 px: 56 images, 0.00 GiB, decoded in 0 s: " in out
        files = sorted((tmp_path / "cache" / "stores").iterdir())
        assert sorted(path.stat().st_size for path in files) == [56 * 192 + 8, 56 * 768 + 8]
        assert all(str(path) in out for path in files)
        _, again, _ = feddg("prepare", "pacs", "--size", "8", "--data-root", tiny)
        assert "decoded already" in again

    def test_the_recipes_size(self, feddg: Run, tiny: Path) -> None:
        assert "pacs at 128 px" in feddg("prepare", "pacs", "--recipe", "quick",
                                         "--data-root", tiny)[1]  # fmt: skip
        assert "pacs at 64 px" in feddg("prepare", "pacs", "--data-root", tiny)[1]

    def test_bad_input(self, feddg: Run, tiny: Path) -> None:
        refused(feddg("prepare", "pacs", "--size", "big"), "'big'", "8 to 1024")
        refused(feddg("prepare", "pacs", "--size", "8,2000"), "8 to 1024")
        refused(feddg("prepare", "pacs", "--size", "8", "--recipe", "quick"), "not both")
        refused(feddg("prepare", "pacs", "--recipe", "quik"), "did you mean 'quick'")
        refused(feddg("prepare", "nothing"), "unknown data set")
        refused(feddg("prepare", "pacs"), "was not found")
        broken = tiny / "pacs/photo/dog/pic_000.png"
        broken.write_bytes(b"")
        refused(
            feddg("prepare", "pacs", "--size", "8", "--data-root", tiny), "photo/dog/pic_000.png"
        )


class TestShow:
    def test_domains_down_and_classes_across(self, feddg: Run, tiny: Path) -> None:
        code, out, _ = feddg("show", "pacs", "--size", "16", "--data-root", tiny)
        assert (code, out) == (0, "pacs.png\n")
        with Image.open("pacs.png") as image:
            assert image.size == (96 + 7 * 20, 20 + 4 * 20)
            cell = np.asarray(image.crop((96 + 3 * 20, 20 + 20, 96 + 3 * 20 + 16, 20 + 36)))
        with Image.open(tiny / "pacs/photo/guitar/pic_000.png") as image:
            assert np.array_equal(cell, np.asarray(image))
        before = Path("pacs.png").read_bytes()
        feddg("show", "pacs", "--size", "16", "--data-root", tiny)
        assert Path("pacs.png").read_bytes() == before

    def test_what_cannot_be_shown(self, feddg: Run, tiny: Path, tmp_path: Path) -> None:
        refused(feddg("show", "pacs"), "was not found")
        (tmp_path / "file").write_text("")
        out = tmp_path / "file" / "a.png"
        refused(feddg("show", "pacs", "--out", out, "--data-root", tiny), "--out")
        refused(feddg("show", "pacs", "--out", "x.gif", "--data-root", tiny), "x.gif", "is a PNG")
        assert not Path("x.gif").exists()


class TestPath:
    def test_a_folder_is_remembered(self, feddg: Run, tiny: Path, tmp_path: Path) -> None:
        assert "pacs: not found" in feddg("path", "pacs")[1]
        code, out, _ = feddg("path", "pacs", tiny)
        settings = tmp_path / "home/.config/feddg-bench/settings.yaml"
        assert code == 0
        assert out.startswith(f"noted in {settings}\npacs: {tiny / 'pacs'}\n")
        assert settings.read_text() == f"data_roots:\n  pacs: {tiny}\n"
        assert feddg("check", "pacs")[0] == 0
        _, out, _ = feddg("path")
        assert f"pacs: {tiny / 'pacs'}\n" in out
        assert "digits4: embedded\n" in out

    def test_one_folder_for_all(self, feddg: Run, tiny: Path) -> None:
        assert f"pacs: {tiny / 'pacs'}\n" in feddg("path", "all", tiny)[1]
        assert f"looked for in: {tiny} " in feddg("path")[1]

    def test_bad_input(self, feddg: Run, tmp_path: Path) -> None:
        refused(feddg("path", "pasc"), "did you mean 'pacs'")
        refused(feddg("path", "pacs", tmp_path / "absent"), "is no folder")


def test_a_folder_of_ones_own(feddg: Run, tmp_path: Path) -> None:
    """A user's folder is checked, decoded and shown as the runs of its recipe see it."""
    root = tmp_path / "own"
    for domain in ("写真", "sketch"):
        for name, colour in (("cat", (0, 0, 0, 0)), ("dog", (0, 0, 0, 255))):
            (root / domain / name).mkdir(parents=True)
            Image.new("RGBA", (9, 9), colour).save(root / domain / name / "1.png")
    (root / "notes.txt").write_text("")
    for name, colour in (("sketch/cat/more/2.png", "red"), ("sketch/loose.png", "blue")):
        (root / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (9, 9), colour).save(root / name)
    code, out, _ = feddg("check", "folder", "--data-root", root)
    lines = out.splitlines()
    assert code == 1  # the same image in both domains
    assert lines[2:4] == ["  sketch: 3 images", "    cat 2, dog 1"]
    for note in (
        "images in folders inside <domain>/<class>/: 1 of 5, such as sketch/cat/more/2.png",
        "1 image not read (outside <domain>/<class>/): sketch/loose.png",
        "1 file not read (not the ending of an image format that is read): notes.txt",
    ):
        assert f"note: {note}" in " ".join(out.split())
    assert "note: 2 images with transparent pixels, which are composited onto white" in " ".join(
        out.split()
    )
    assert lines[-1] == "1 fault"
    assert "published" not in out
    assert out.count(str(root)) == 1
    assert "in different classes" not in out  # they would be if transparency were dropped
    code, out, _ = feddg("prepare", "folder", "--size", "16", "--data-root", root)
    assert code == 0
    assert "r1+white+exif.rgb" in out
    code, out, _ = feddg("show", "folder", "--data-root", root, "--out", tmp_path / "a.png")
    assert code == 0
    assert "shown as ?" in out
