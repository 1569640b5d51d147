"""Stores: right pixels, decoded once, whole or absent, whoever builds them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import Resize

from feddg_bench.data import ImageFolderDataset
from feddg_bench.errors import DataError
from feddg_bench.store import open_store


class Shapes(ImageFolderDataset):
    name = "shapes"
    title = "Shapes"
    domains = ("day", "night")
    letters: ClassVar[Mapping[str, str]] = {"day": "d", "night": "n"}
    classes = ("disc", "ring")
    licence = "none"
    source = "made by a test"


@pytest.fixture(autouse=True)
def no_other_roots(monkeypatch):
    monkeypatch.delenv("FEDDG_DATA", raising=False)
    monkeypatch.delenv("FEDDG_CONFIG", raising=False)


@pytest.fixture
def root(tmp_path) -> Path:
    """Return a folder of 12 images of different sizes, modes and formats."""
    rng = np.random.default_rng(0)
    formats = (("RGB", "jpg"), ("L", "png"), ("RGBA", "png"))
    for domain in Shapes.domains:
        for name in Shapes.classes:
            folder = tmp_path / "images" / domain / name
            folder.mkdir(parents=True)
            for i, (mode, suffix) in enumerate(formats):
                coarse = rng.integers(0, 256, (4, 5 + i, 3), dtype=np.uint8)
                picture = Image.fromarray(coarse).resize((40 + 7 * i, 30)).convert(mode)
                picture.save(folder / f"{i}.{suffix}")
    return tmp_path / "images"


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_pixels_labels_and_domains(root, cache):
    store = open_store(Shapes(root), 16, cache)
    assert store.images.shape == (12, 16, 16, 3)
    assert store.paths[0] == "day/disc/0.jpg"
    assert list(store.paths) == sorted(store.paths)
    assert store.domains.tolist() == [0] * 6 + [1] * 6
    assert store.labels.tolist() == [0, 0, 0, 1, 1, 1] * 2
    for image, path in zip(store.images, store.paths, strict=True):
        expected = Resize((16, 16))(Image.open(root / path).convert("RGB"))
        assert np.array_equal(image, np.asarray(expected))


def test_images_cannot_be_written(root, cache):
    store = open_store(Shapes(root), 8, cache)
    with pytest.raises(ValueError, match="read-only"):
        store.images[0] = 0
    assert store.images[np.array([3, 1])].flags.writeable


def test_nothing_is_read_again(root, cache, monkeypatch):
    first = open_store(Shapes(root), 8, cache)

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(Shapes, "read", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    second = open_store(Shapes(root), 8, cache)
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(second.images, first.images)


def test_the_same_contents_elsewhere_share_a_store(root, cache, monkeypatch):
    first = open_store(Shapes(root), 8, cache)
    for path in files(root):
        os.utime(path, (1, 1))
    (root / "day").rename(root / "DAY")
    monkeypatch.setattr(Shapes, "read", lambda *_: pytest.fail("decoded again"))
    assert open_store(Shapes(root), 8, cache).fingerprint == first.fingerprint


@pytest.mark.parametrize("change", ["pixels", "name", "label"])
def test_other_contents_have_another_store(root, cache, change):
    first = open_store(Shapes(root), 8, cache)
    path = root / "night" / "ring" / "1.png"
    if change == "pixels":
        Image.new("RGB", (9, 9), (255, 0, 0)).save(path)
    elif change == "name":
        path.rename(path.with_name("7.png"))
    else:
        path.rename(root / "night" / "disc" / "7.png")
    second = open_store(Shapes(root), 8, cache)
    assert second.fingerprint != first.fingerprint
    assert not np.array_equal(second.images, first.images)
    if change == "pixels":
        assert (second.images[10] == (255, 0, 0)).all()


def test_each_size_and_version_has_its_store(root, cache):
    class Newer(Shapes):
        version = 2

    open_store(Shapes(root), 8, cache)
    open_store(Shapes(root), 9, cache)
    open_store(Newer(root), 8, cache)
    assert len(files(cache / "stores")) == 3


def test_a_store_cut_short_is_rebuilt(root, cache):
    whole = np.array(open_store(Shapes(root), 8, cache).images)
    (path,) = files(cache / "stores")
    path.write_bytes(path.read_bytes()[:-1])
    assert np.array_equal(open_store(Shapes(root), 8, cache).images, whole)


def test_progress_counts_up_to_the_total(root, cache):
    told: list[tuple[int, int]] = []
    open_store(Shapes(root), 8, cache, lambda done, total: told.append((done, total)))
    assert told[-1] == (12, 12)
    assert told == sorted(told)


@pytest.mark.parametrize("content", [b"", b"no image", None], ids=["empty", "text", "truncated"])
def test_an_image_that_cannot_be_decoded_is_named(root, cache, content):
    path = root / "night" / "disc" / "0.jpg"
    path.write_bytes(path.read_bytes()[:-300] if content is None else content)
    with pytest.raises(DataError, match="replace it by a fresh copy") as caught:
        open_store(Shapes(root), 8, cache)
    assert str(path) in str(caught.value)
    assert files(cache / "stores") == []


def test_a_full_disk_leaves_nothing_behind(root, cache):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))  # of 12 x 768 bytes
    try:
        with pytest.raises(DataError, match=r"cannot write the 0 MB .* with --cache-dir"):
            open_store(Shapes(root), 16, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(cache / "stores") == []
    assert open_store(Shapes(root), 16, cache).images.any()


def test_a_cache_that_cannot_be_made_is_one_sentence(root, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="name another folder with --cache-dir"):
        open_store(Shapes(root), 8, tmp_path / "file" / "cache")


BUILDER = """
import sys, time
from pathlib import Path

import numpy as np

from feddg_bench.store import open_store
from feddg_datasets.digits4 import Digits4

cache, own = Path(sys.argv[1]), Path(sys.argv[2])


class Slow(Digits4):
    # Reads nothing before both processes have begun to write.
    def read(self, index, size):
        deadline = time.monotonic() + 60
        while not self.__dict__.get("both") and len(list(cache.glob("stores/*.part"))) < 2:
            assert time.monotonic() < deadline, "the other process never came"
            time.sleep(0.01)
        self.both = True
        return np.full((size, size, 3), index % 251, dtype=np.uint8)


np.save(own, open_store(Slow(), 8, cache).images)
"""


@pytest.mark.slow
def test_two_processes_that_build_at_once_are_both_right(cache, tmp_path):
    results = [tmp_path / "a.npy", tmp_path / "b.npy"]
    roots = [Path(__file__).parents[2] / name for name in ("benchmark", "datasets")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots))}
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILDER, str(cache), str(result)], env=environment)
        for result in results
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    expected = np.arange(1797) % 251
    for result in results:
        assert (np.load(result) == expected[:, None, None, None]).all()
    assert len(files(cache / "stores")) == 1
