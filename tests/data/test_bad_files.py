"""Files that a data set should not hold: each is one sentence, and nothing hangs or runs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddg_bench.common.errors import DataError, printable, unknown
from feddg_bench.config.keys import file_digest
from feddg_bench.data.dataset import read_image
from feddg_bench.data.store import open_store
from feddg_datasets.folder import Folder


@pytest.fixture
def root(tmp_path) -> Path:
    """Return a folder of two domains and two classes, three images each."""
    for place in ("day/disc", "day/ring", "night/disc", "night/ring"):
        (tmp_path / "root" / place).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (9, 9), (i, 50, 90)).save(tmp_path / "root" / place / f"{i}.png")
    return tmp_path / "root"


def refused(root: Path, cache: Path, word: str) -> None:
    with pytest.raises(DataError, match=word) as caught:
        open_store(Folder(root), 8, cache)
    assert "9.png" in str(caught.value)


@pytest.mark.parametrize("target", ["/nowhere", "9.png", "/dev/zero"])
def test_links_that_lead_to_no_plain_file(root, tmp_path, target):
    (root / "day/disc/9.png").symlink_to(target)
    refused(root, tmp_path, "cannot read")


def test_a_pipe(root, tmp_path):
    os.mkfifo(root / "day/disc/9.png")
    refused(root, tmp_path, "pipe")


def test_a_folder_named_like_an_image(root, tmp_path):
    (root / "day/disc/9.png").mkdir()
    refused(root, tmp_path, "folder")


def test_a_name_that_is_no_utf8(root, tmp_path):
    (root / "day/disc/0.png").rename(os.fsdecode(os.fsencode(root / "day/disc") + b"/\xff.png"))
    assert len(open_store(Folder(root), 8, tmp_path).images) == 12


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read(root):
    (root / "day/disc").chmod(0)
    with pytest.raises(DataError, match="Permission denied"):
        Folder(root)


def test_no_program_is_started(root, tmp_path, monkeypatch):
    """Pillow gives EPS to Ghostscript."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    head = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"
    (root / "day/disc/9.png").write_text(head)
    refused(root, tmp_path, "cannot decode")
    assert not (tmp_path / "ran").exists()


def test_of_sixteen_bits_the_upper_eight_are_seen(tmp_path):
    values = np.arange(0, 2**16, 257, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(values).save(tmp_path / "grey.png")
    image = read_image(tmp_path / "grey.png", 16)
    assert np.array_equal(image, np.repeat((values >> 8)[..., None], 3, axis=2))


def test_more_pixels_than_anybody_needs_are_not_decoded(tmp_path, monkeypatch):
    Image.new("L", (8193, 8192)).save(tmp_path / "huge.png")
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(DataError, match="more than 67,108,864 pixels"):
        read_image(tmp_path / "huge.png", 8)


@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_weights_that_are_no_plain_file(tmp_path, target):
    path = tmp_path / "weights.pth"
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    with pytest.raises(DataError, match="pipe or device"):
        file_digest(path)


def test_names_give_a_terminal_no_commands():
    name = "a\n\x1b[31mb\udcff é.png"
    assert printable(name) == "a\\n\\x1b[31mb\\udcff é.png"
    assert printable(name).isprintable()


def test_known_names_without_end_are_counted():
    names = [f"name{i:04d}" for i in range(900)]
    text = unknown("scenario", "nam0007", names)
    assert len(text) < 1200
    assert "did you mean" in text
    assert text.endswith(f"and {900 - text.split('Known: ')[1].count('name')} more")
