"""Unsuitable files in a data set: each gives one sentence, and nothing hangs or is executed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from feddg_bench.common.errors import DataError, SettingsError, printable, unknown
from feddg_bench.config.keys import file_digest
from feddg_bench.config.schema import DataSettings
from feddg_bench.data import dataset
from feddg_bench.data.dataset import (
    UnreadableError,
    drawn_by_us,
    image_facts,
    pixels_of,
    read_image,
)
from feddg_bench.data.image_store import check_stores, decoded_sizes, open_store
from feddg_bench.data.inspect.doctor import examine
from feddg_datasets.digits4 import Digits4
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
    refused(root, tmp_path, "a link to nothing|a folder, pipe or device")


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
    """Pillow passes EPS files to Ghostscript."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    head = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"
    (root / "day/disc/9.png").write_text(head)
    refused(root, tmp_path, "cannot be decoded")
    assert not (tmp_path / "ran").exists()


def test_of_sixteen_bits_the_upper_eight_are_seen(tmp_path):
    values = np.arange(0, 2**16, 257, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(values).save(tmp_path / "grey.png")
    image = read_image(tmp_path / "grey.png", 16)
    assert np.array_equal(image, np.repeat((values >> 8)[..., None], 3, axis=2))


def test_pictures_of_the_largest_cameras_are_read_and_bombs_are_not(tmp_path, monkeypatch):
    picture = Image.new("L", (12_000, 9_000), 200)
    picture.paste(20, (0, 0, 6_000, 9_000))
    picture.save(tmp_path / "phone.jpg", quality=30)
    read = read_image(tmp_path / "phone.jpg", 8)
    assert abs(read[:, [0, -1], 0].astype(int) - (20, 200)).max() <= 1
    picture = picture.resize((16_385, 16_385))
    picture.save(tmp_path / "bomb.png", compress_level=1)
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(DataError, match="more than 268,435,456 pixels: resize it"):
        read_image(tmp_path / "bomb.png", 8)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(
    ("cut", "read"), [(1, True), (2, True), (3, False), (45, False), (900, False)]
)
def test_a_jpeg_is_read_if_only_its_end_marker_is_missing(tmp_path, cut, read, progressive):
    path = tmp_path / "a.jpg"
    coarse = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((203, 150)).save(path, progressive=progressive)
    whole, data = read_image(path, 64), path.read_bytes()
    path.write_bytes(data[:-cut])
    if read:
        assert np.array_equal(read_image(path, 64), whole)
    else:
        with pytest.raises(UnreadableError, match=r"truncated.*; replace it with an intact copy"):
            read_image(path, 64)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def _drawn(path: Path) -> None:
    Image.new("RGB", (9, 9)).save(path, pnginfo=drawn_by_us())


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BAD = {
    "text": (lambda path: path.write_bytes(b"no image"), "cannot identify image file; replace"),
    "pointer": (lambda path: path.write_bytes(POINTER), "run `git lfs pull` in its folder"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-40]), "replace it with an intact"),
    "drawn": (_drawn, "feddg-bench drew it: move it out of the data set"),
    "link": (_dangling, "it is missing, or a link to nothing: restore it, or remove it"),
    "folder": (_folder, "it is a folder, pipe or device: restore it, or remove it"),
}


@pytest.mark.parametrize("kind", BAD)
def test_unreadable_images_are_all_named_and_can_be_left_out(root, tmp_path, kind):
    spoil, words = BAD[kind]
    cache, names = tmp_path / "cache", ("day/disc/1.png", "day/ring/0.png", "night/ring/2.png")
    whole = open_store(Folder(root), 8, cache)
    for name in names:
        spoil(root / name)
    with pytest.raises(DataError) as caught:
        open_store(Folder(root), 8, cache)
    said = str(caught.value)
    assert said.startswith(f"root: 3 of 12 images cannot be decoded: {names[0]} (")
    assert [name for name in names if said.count(name) != 1] == []
    assert said.count(words) == 3
    assert said.endswith("; data.skip_unreadable=true leaves them out")
    (finding,) = [f for f in examine(Folder(root)).findings if f.kind == "unreadable"]
    assert (finding.text, finding.files) == (said.removeprefix("root: "), names)

    skipping = DataSettings(skip_unreadable=True)
    for _ in range(2):  # decoded, opened
        store = open_store(Folder(root).decoded(skipping), 8, cache)
        assert store.unreadable.tolist() == [1, 3, 11]
        kept = np.setdiff1d(np.arange(12), store.unreadable)
        assert np.array_equal(store.images[kept], whole.images[kept])
        assert store.fingerprint == Folder(root).fingerprint()
    assert list(check_stores(Folder(root), cache)) == []
    with pytest.raises(DataError, match="3 of 12 images"):  # that store is not one of all images
        open_store(Folder(root), 8, cache)


def test_of_many_unreadable_images_ten_are_named(root, tmp_path):
    for path in root.rglob("*.png"):
        path.write_bytes(b"x")
    with pytest.raises(DataError) as caught:
        open_store(Folder(root), 8, tmp_path / "cache")
    assert str(caught.value).count(".png (") == 10
    assert ", and 2 more; data.skip_unreadable" in str(caught.value)


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


# ------------------------------------------------------------- transparency and orientation

CLEAR = {"RGBA": (10, 20, 30, 0), "LA": (10, 0)}


@pytest.mark.parametrize(("mode", "ending"), [("RGBA", "png"), ("LA", "png"), ("RGBA", "webp")])
def test_transparent_pixels_become_white_or_keep_their_colour(tmp_path, mode, ending):
    image = Image.new(mode, (16, 16), CLEAR[mode])
    image.paste((0, 0, 0, 255)[-len(CLEAR[mode]) :], (4, 4, 12, 12))
    path = tmp_path / f"drawing.{ending}"
    image.save(path, lossless=True, exact=True)
    black, white = read_image(path, 16), read_image(path, 16, background="white")
    assert np.array_equal(black, np.asarray(image.convert("RGB")))
    assert (white[:4] == 255).all()
    assert (white[4:12, 4:12] == 0).all()
    assert image_facts(path).transparent


def test_half_transparent_pixels_are_mixed_with_white(tmp_path):
    Image.new("RGBA", (8, 8), (200, 100, 0, 51)).save(tmp_path / "half.png")  # opacity 1/5
    white = read_image(tmp_path / "half.png", 8, background="white")
    assert white[0, 0].tolist() == [255 - (255 - v) // 5 for v in (200, 100, 0)]


@pytest.mark.parametrize("clear", [2, bytes([255, 255, 0])])
def test_a_transparent_colour_of_a_palette(tmp_path, clear):
    image = Image.new("P", (8, 8), 2)
    image.putpalette([9, 9, 9, 8, 8, 8, 7, 7, 7])
    image.paste(1, (0, 0, 8, 4))
    image.save(tmp_path / "a.png", transparency=clear)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (read_image(tmp_path / "a.png", 8)[4:] == 7).all()
    white = read_image(tmp_path / "a.png", 8, background="white")
    assert (white[:4] == 8).all()
    assert (white[4:] == 255).all()


def test_an_opaque_image_with_alpha_is_not_transparent(tmp_path):
    Image.new("RGBA", (8, 8), (1, 2, 3, 255)).save(tmp_path / "a.png")
    assert not image_facts(tmp_path / "a.png").transparent
    assert np.array_equal(
        read_image(tmp_path / "a.png", 8), read_image(tmp_path / "a.png", 8, background="white")
    )


@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientation_is_followed_if_asked(tmp_path, ending, orientation):
    """Pillow is the reference; values outside 1 to 8 turn nothing."""
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"phone.{ending}"
    Image.fromarray(pixels).save(path, exif=exif, lossless=True)
    with Image.open(path) as image:
        straight, turned = np.asarray(image), np.asarray(ImageOps.exif_transpose(image))
    assert np.array_equal(read_image(path, 8), straight)
    assert np.array_equal(read_image(path, 8, exif=True), turned)
    assert image_facts(path).turned == (2 <= orientation <= 8)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_data_turn_nothing(tmp_path):
    path = tmp_path / "a.jpg"
    Image.new("RGB", (8, 8)).save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert np.array_equal(read_image(path, 8, exif=True), read_image(path, 8))
    assert not image_facts(path).turned


@pytest.mark.parametrize("mode", ["F", "I"])
def test_values_of_unknown_range_are_refused(tmp_path, mode):
    Image.new(mode, (8, 8), 1).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match="range is unknown"):
        read_image(tmp_path / "a.tif", 8)


def test_of_a_tiff_sixteen_bits_and_several_pages_are_read(tmp_path):
    values = np.arange(0, 2**16, 257, dtype=np.uint16).reshape(16, 16)
    page = Image.fromarray(values)
    page.save(tmp_path / "a.tif", save_all=True, append_images=[page.rotate(90)])
    assert np.array_equal(read_image(tmp_path / "a.tif", 16)[..., 0], values >> 8)
    facts = image_facts(tmp_path / "a.tif")
    assert (facts.sixteen_bits, facts.frames) == (True, True)


def test_a_store_says_that_large_images_are_reduced(root, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("feddg_bench.data.dataset.LARGE", 80)
    (root / "day/disc/0.png").unlink()
    Image.new("RGB", (9, 9)).save(root / "day/disc/0.jpg")
    open_store(Folder(root), 8, tmp_path / "cache")
    assert caplog.messages == ["1 image above 67 megapixels: decoded at a reduced scale"]


def test_a_store_says_how_its_images_were_decoded(root, tmp_path, caplog):
    path = root / "day/disc/0.png"
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.new("RGBA", (9, 9), (0, 0, 0, 0)).save(path, exif=exif)
    dataset, cache = Folder(root), tmp_path / "cache"
    plain = open_store(dataset, 8, cache)
    assert "transparent pixels of 1 image were decoded" in caplog.messages[0]
    assert "data.background=white" in caplog.messages[0]
    assert "data.exif=true" in caplog.messages[1]
    caplog.clear()
    other = dataset.decoded(DataSettings(background="white", exif=True))
    white = open_store(other, 8, cache)
    assert caplog.messages == []
    assert plain.fingerprint == white.fingerprint
    assert (plain.images[0].max(), white.images[0].min()) == (0, 255)
    assert np.array_equal(plain.images[1:], white.images[1:])
    assert sorted(p.name.rpartition("-")[2] for p in (cache / "stores").glob("*")) == [
        "r1+white+exif.rgb",
        "r1.rgb",
    ]
    assert decoded_sizes(dataset, cache) == [8]
    assert np.array_equal(open_store(Folder(root), 8, cache).images, plain.images)
    damaged = cache / "stores" / Path(str(white.images.filename)).name
    damaged.write_bytes(b"\1" + damaged.read_bytes()[1:])
    (fault,) = check_stores(dataset, cache)
    assert "+white+exif" in fault


def test_what_is_not_decoded_from_image_files_refuses_the_settings():
    for setting in ({"background": "white"}, {"exif": True}, {"skip_unreadable": True}):
        with pytest.raises(SettingsError, match="digits4 makes its images otherwise"):
            Digits4().decoded(DataSettings(**setting))
    assert Digits4().decoded(DataSettings()).exif is False


def test_an_image_in_memory_is_treated_like_its_file(tmp_path):
    path = tmp_path / "a.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("P", (8, 8), 0)
    image.putpalette([9, 9, 9, 8, 8, 8])
    image.paste(1, (0, 0, 4, 4))
    image.save(path, exif=exif, transparency=0)
    for how in ({}, {"background": "white"}, {"exif": True}, {"background": "white", "exif": True}):
        with Image.open(path) as opened:
            assert np.array_equal(pixels_of(opened, 8, **how), read_image(path, 8, **how))
            assert opened.info["transparency"] == 0  # the caller's image is unchanged
        assert np.array_equal(pixels_of(path, 8, **how), read_image(path, 8, **how))
    assert len({pixels_of(path, 8, **how).tobytes() for how in ({}, {"exif": True})}) == 2
    with pytest.raises(DataError, match="an image cannot be decoded"):
        pixels_of(Image.new("F", (8, 8)), 8)


@pytest.mark.parametrize("kept", [40, 80, 120])
def test_damaged_exif_data_cause_no_warning(tmp_path, kept):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x0110] = 6, "maker" * 20, "model" * 20
    path = tmp_path / "photo.jpg"
    Image.new("RGB", (8, 8), "red").save(path, exif=exif.tobytes()[:kept])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset._ignore_warnings.__wrapped__()
        assert read_image(path, 8, exif=True).shape == (8, 8, 3)
