"""Stores: correct pixels, decoded once, complete or absent, with any number of builders."""

from __future__ import annotations

import hashlib
import importlib
import os
import resource
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import Resize

from feddg_bench.common.errors import DataError, PluginError
from feddg_bench.data import decoding
from feddg_bench.data import image_store as store_module
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.decoding import Layout
from feddg_bench.data.image_folders import ImageFolderDataset
from feddg_bench.data.image_store import check_store, open_store
from feddg_datasets.pacs import PACS
from tests.helpers import refused


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
    for image, path in zip(store.images, Shapes(root).records().paths, strict=True):
        expected = Resize((16, 16))(Image.open(root / path).convert("RGB"))
        assert np.array_equal(image, np.asarray(expected))


def test_images_cannot_be_written(root, cache):
    store = open_store(Shapes(root), 8, cache)
    with pytest.raises(ValueError, match="read-only"):
        store.images[0] = 0
    assert store.images[np.array([3, 1])].flags.writeable


def test_nothing_is_read_again(root, cache):
    first = open_store(Shapes(root), 8, cache)

    class Once(Shapes):
        def read(self, index, size):
            pytest.fail("decoded again")

        def content(self, index):
            pytest.fail("hashed again")

    second = open_store(Once(root), 8, cache)
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(second.images, first.images)


def test_the_same_contents_elsewhere_share_a_store(root, cache):
    first = open_store(Shapes(root), 8, cache)
    for path in files(root):
        os.utime(path, (1, 1))
    (root / "day").rename(root / "DAY")

    class Once(Shapes):
        def read(self, index, size):
            pytest.fail("decoded again")

    assert open_store(Once(root), 8, cache).fingerprint == first.fingerprint


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


@pytest.mark.parametrize("how", ["renamed", "overwritten"])
def test_files_that_trade_places_at_equal_size_and_time_are_noticed(root, cache, how):
    """Tools that keep times do this to uncompressed images, which all have one size."""
    pair = [root / "night" / name / "3.bmp" for name in Shapes.classes]
    for path, colour in zip(pair, ("red", "blue"), strict=True):
        Image.new("RGB", (9, 9), colour).save(path)
        os.utime(path, (1, 1))
    first = open_store(Shapes(root), 8, cache)
    if how == "renamed":
        pair[0].rename(root / "kept")
        pair[1].rename(pair[0])
        (root / "kept").rename(pair[1])
    else:
        contents = [path.read_bytes() for path in pair]
        for path, content in zip(pair, reversed(contents), strict=True):
            path.write_bytes(content)
            os.utime(path, (1, 1))
    second = open_store(Shapes(root), 8, cache)
    assert second.fingerprint == Shapes(root).fingerprint() != first.fingerprint
    assert [tuple(second.images[i][0, 0]) for i in (9, 13)] == [(0, 0, 255), (255, 0, 0)]


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


@pytest.mark.parametrize("place", ["first", "last", "sum"])
def test_one_flipped_bit_is_noticed(root, cache, place):
    open_store(Shapes(root), 8, cache)
    (path,) = files(cache / "stores")
    pixels = 12 * 8 * 8 * 3
    byte = {"first": 0, "last": pixels - 1, "sum": pixels + 1}[place]
    spoilt = bytearray(path.read_bytes())
    spoilt[byte] ^= 16
    path.write_bytes(spoilt)
    with refused(DataError, "delete that file") as caught:
        open_store(Shapes(root), 8, cache)
    assert str(path) in str(caught.value)
    path.unlink()
    assert open_store(Shapes(root), 8, cache).images.any()


def test_of_a_large_store_blocks_at_even_distances_are_checked(many, cache, monkeypatch):
    open_store(many, 8, cache)
    (path,) = files(cache / "stores")
    spoilt = bytearray(path.read_bytes())
    spoilt[300 * 8 * 8 * 3] ^= 1  # in the second of five blocks
    path.write_bytes(spoilt)
    monkeypatch.setattr(store_module, "CHECKED_BYTES", 3 * 256 * 8 * 8 * 3)
    open_store(many, 8, cache)  # checks the first, third and fifth
    with refused(DataError, "image 256 and 511"):
        check_store(path, Layout.of(many, 8))


def test_progress_counts_up_to_the_total(root, cache):
    told: list[tuple[int, int]] = []
    open_store(Shapes(root), 8, cache, lambda done, total: told.append((done, total)))
    assert told[-1] == (12, 12)
    assert told == sorted(told)


@pytest.mark.parametrize("content", [b"", b"no image", None], ids=["empty", "text", "truncated"])
def test_an_image_that_cannot_be_decoded_is_named(root, cache, content):
    path = root / "night" / "disc" / "0.jpg"
    path.write_bytes(path.read_bytes()[:-300] if content is None else content)
    with refused(DataError, "replace it with an intact copy", "night/disc/0.jpg", str(root)):
        open_store(Shapes(root), 8, cache)
    assert files(cache / "stores") == []


def test_a_full_disk_leaves_nothing_behind(root, cache):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))  # the store needs 12 x 768 bytes
    try:
        with refused(DataError, "cannot write the 0.00 GiB", "with --cache-dir"):
            open_store(Shapes(root), 16, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(cache / "stores") == []
    assert open_store(Shapes(root), 16, cache).images.any()


def test_a_cache_that_cannot_be_made_is_one_sentence(root, tmp_path):
    (tmp_path / "file").write_text("")
    with refused(DataError, "name another folder with --cache-dir"):
        open_store(Shapes(root), 8, tmp_path / "file" / "cache")


def test_too_full_a_disk_is_told_before_anything_is_decoded(root, cache, monkeypatch):
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(decoding.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        DataError, match=r"0\.03 GiB .* only 0\.00 GiB are free: make room"
    ) as caught:
        open_store(Shapes(root), 1000, cache)
    assert "\n" not in str(caught.value)
    assert files(cache / "stores") == []
    assert open_store(Shapes(root), 16, cache).images.any()  # 9 KB


def test_every_file_is_read_once_to_build_and_never_to_open(root, cache):
    read: list[Path] = []

    class Watched(Shapes):
        def content(self, index):
            read.append(self.file(index))
            return super().content(index)

    store = open_store(Watched(root), 8, cache)
    assert sorted(read) == files(root)
    assert store.fingerprint == Shapes(root).fingerprint()
    read.clear()
    open_store(Watched(root), 8, cache)
    open_store(Watched(root), 9, cache)  # hashed again when it is decoded from the file
    assert sorted(read) == files(root)


def test_a_fingerprint_of_ones_own_is_asked_for(root, cache):
    class Own(Shapes):
        def fingerprint(self) -> str:
            return "f" * 32

    assert open_store(Own(root), 8, cache).fingerprint == "f" * 32


def test_the_fingerprint_is_of_names_and_bytes(root):
    digest = hashlib.blake2b(digest_size=16)
    for path in files(root):
        content = hashlib.blake2b(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root)}\0{content}\n".encode())
    assert Shapes(root).fingerprint() == digest.hexdigest()


def test_the_real_pacs_has_the_fingerprint_of_the_records(test_data):
    if not (test_data / "pacs").is_dir():
        pytest.skip("FEDDG_TEST_DATA has no PACS")
    assert PACS(test_data).fingerprint() == "6fa5e9931a28d9b5e50a95f70c223572"


def test_images_of_a_wrong_shape_are_the_plugins_fault(root, cache):
    class Flat(Shapes):
        def read(self, index, size):
            return np.zeros((8, 8), dtype=np.uint8)

    with refused(PluginError, "Flat.read", "expected uint8 [8, 8, 3]"):
        open_store(Flat(root), 8, cache)


# ---------------------------------------------------------- many images, several processes

MODULE = """
import os, time
from feddg_bench.data.image_folders import ImageFolderDataset

class Many(ImageFolderDataset):
    name = title = "many"
    domains = ("day", "night")
    letters = {"day": "d", "night": "n"}
    classes = ("disc", "ring")
    licence = source = "none"

    def read(self, index, size):
        with open(os.environ["READ_LOG"], "a") as log:
            log.write(f"{index} {os.getpid()}\\\\n")
        time.sleep(float(os.environ.get("READ_PAUSE", "0")))
        return super().read(index, size)
"""
MANY = 1100


@pytest.fixture
def many(tmp_path, monkeypatch) -> DomainDataset:
    """Return a data set of 1,100 images of one grey each; other processes can import its class."""
    (tmp_path / "many_images.py").write_text(MODULE.replace("\\\\n", "\\n"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("READ_LOG", str(tmp_path / "read.log"))
    for i in range(MANY):
        place = tmp_path / "many" / ("day", "night")[i % 2] / ("disc", "ring")[i // 2 % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (i % 256, i // 256, 7)).save(place / f"{i:04}.png")
    yield importlib.import_module("many_images").Many(tmp_path / "many")
    sys.modules.pop("many_images")


def expected(dataset: DomainDataset, size: int) -> np.ndarray:
    numbers = [int(path[-8:-4]) for path in dataset.records().paths]
    pixels = np.array([(n % 256, n // 256, 7) for n in numbers], dtype=np.uint8)
    return np.broadcast_to(pixels[:, None, None], (MANY, size, size, 3))


def read_log(tmp_path: Path) -> list[tuple[int, int]]:
    lines = (tmp_path / "read.log").read_text().splitlines()
    return [(int(index), int(process)) for index, process in map(str.split, lines)]


@pytest.mark.nightly
def test_several_processes_give_the_bytes_of_one(many, cache, tmp_path):
    told: list[tuple[int, int]] = []
    store = open_store(many, 8, cache, lambda *n: told.append(n), processes=2)
    assert np.array_equal(store.images, expected(many, 8))
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (MANY, MANY)
    read = read_log(tmp_path)
    assert sorted(index for index, _ in read) == list(range(MANY))
    processes = {process for _, process in read}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert store.fingerprint == many.fingerprint()
    assert [path.suffix for path in files(cache / "stores")] == [".rgb"]


def test_a_class_that_other_processes_cannot_find_is_decoded_here(many, cache, monkeypatch):
    module = types.ModuleType("only_here")
    module.Hidden = type("Hidden", (type(many),), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", module)
    store = open_store(module.Hidden(many.data_root), 8, cache, processes=2)
    assert np.array_equal(store.images, expected(many, 8))


@pytest.mark.nightly
def test_an_unreadable_image_is_named_by_any_process(many, cache, tmp_path):
    path = tmp_path / "many" / "night" / "disc" / "0805.png"
    path.write_bytes(path.read_bytes()[:40])
    with refused(DataError, "1 of 1,100 images cannot be decoded: night/disc/0805.png ("):
        open_store(many, 8, cache, processes=2)
    assert files(cache / "stores") == []


UNGUARDED = """
import sys
from pathlib import Path
from feddg_bench.data.image_store import open_store
from many_images import Many

open_store(Many(Path(sys.argv[1])), 8, Path(sys.argv[2]), processes=2)
"""


@pytest.mark.nightly
def test_a_script_without_a_main_guard_does_not_hang(many, cache, tmp_path):
    (tmp_path / "unguarded.py").write_text(UNGUARDED)
    roots = [*(Path(__file__).parents[2] / name for name in ("benchmark", "datasets")), tmp_path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots))}
    command = [sys.executable, str(tmp_path / "unguarded.py"), str(many.data_root), str(cache)]
    done = subprocess.run(
        command, env=environment, timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "if __name__ == '__main__':" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(files(cache / "stores")) == 1


STARTED = """
import sys
from pathlib import Path
from feddg_bench.data.image_store import open_store
from many_images import Many

if __name__ == "__main__":
    open_store(Many(Path(sys.argv[1])), 8, Path(sys.argv[2]), processes=2)
"""


@pytest.mark.nightly
def test_after_a_kill_finished_blocks_are_not_decoded_again(many, cache, tmp_path):
    (tmp_path / "started.py").write_text(STARTED)
    roots = [*(Path(__file__).parents[2] / name for name in ("benchmark", "datasets")), tmp_path]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, roots)), "READ_PAUSE": "0.003"}
    command = [sys.executable, str(tmp_path / "started.py"), str(tmp_path / "many"), str(cache)]
    with subprocess.Popen(command, env=os.environ | environment) as process:
        deadline = time.monotonic() + 60
        while not 1 <= sum(blocks_done(cache)) < 4:
            assert time.monotonic() < deadline
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    length = -1
    while length != (length := (tmp_path / "read.log").stat().st_size):
        time.sleep(1)  # its helper processes finish their block and end
    done = blocks_done(cache)
    assert 1 <= sum(done) < len(done) == 5
    (tmp_path / "read.log").unlink()
    told: list[int] = []
    store = open_store(many, 8, cache, lambda n, _: told.append(n))
    again = {index for index, _ in read_log(tmp_path)}
    left = {i for i in range(MANY) if not done[i // 256]}
    assert again == left
    assert told[0] == MANY - len(left)
    assert np.array_equal(store.images, expected(many, 8))
    assert store.fingerprint == many.fingerprint()
    assert len(files(cache / "stores")) == 1


def blocks_done(cache: Path) -> list[int]:
    """Return, for every block of 256 images of 8 x 8 pixels, 1 if it has a checksum, else 0."""
    for path in cache.glob("stores/*.unfinished"):
        sums = path.read_bytes()[MANY * 8 * 8 * 3 :][: 5 * 8]
        return [int(any(sums[8 * i : 8 * i + 8])) for i in range(len(sums) // 8)]
    return []


class StopError(BaseException):
    pass


def stop_after(images: int, many: DomainDataset, cache: Path) -> None:
    """Begin to decode, and stop after some images."""

    def stop(done: int, _: int) -> None:
        if done >= images:
            raise StopError

    with pytest.raises(StopError):
        open_store(many, 8, cache, stop)


def test_what_is_unfinished_is_of_no_use_for_other_contents(many, cache, tmp_path):
    stop_after(512, many, cache)
    assert sum(blocks_done(cache)) == 2
    changed = tmp_path / "many" / "day" / "disc" / "0000.png"
    Image.new("RGB", (2, 2), (0, 0, 7)).save(changed, compress_level=0)
    (tmp_path / "read.log").unlink()
    again = type(many)(tmp_path / "many")
    store = open_store(again, 8, cache)
    assert len(read_log(tmp_path)) == MANY
    assert np.array_equal(store.images, expected(many, 8))
    assert len(files(cache / "stores")) == 1


def test_an_unfinished_store_cut_short_begins_anew(many, cache, tmp_path):
    stop_after(512, many, cache)
    path = next(cache.glob("stores/*.unfinished"))
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "read.log").unlink()
    assert np.array_equal(open_store(many, 8, cache).images, expected(many, 8))
    assert len(read_log(tmp_path)) == MANY


def test_what_a_kill_left_goes_when_the_next_store_is_written(root, cache):
    open_store(Shapes(root), 8, cache)
    left = [
        cache / "stores" / "shapes-v1-0-9px-r1.rgb.unfinished",
        cache / "stores" / "shapes-v1-0-9px-r1.rgb.unfinished.lock",
        cache / "fingerprints" / "shapes-v1-0.1.part",
    ]
    for path in left:
        path.write_bytes(b"left")
    open_store(Shapes(root), 9, cache)
    assert not any(path.exists() for path in left)
    assert len(files(cache / "stores")) == 2


BUILDER = """
import sys, time
from pathlib import Path

import numpy as np

from feddg_bench.data.image_store import open_store
from many_images import Many

root, cache, own = map(Path, sys.argv[1:])
own.with_suffix(".started").touch()
while len(list(own.parent.glob("*.started"))) < 2:
    time.sleep(0.01)
np.save(own, open_store(Many(root), 8, cache).images)
"""


@pytest.mark.nightly
def test_two_processes_that_build_at_once_are_both_right(many, cache, tmp_path):
    results = [tmp_path / "a.npy", tmp_path / "b.npy"]
    roots = [*(Path(__file__).parents[2] / name for name in ("benchmark", "datasets")), tmp_path]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, roots)), "READ_PAUSE": "0.002"}
    begin = [sys.executable, "-c", BUILDER, str(many.data_root), str(cache)]
    processes = [
        subprocess.Popen([*begin, str(result)], env=os.environ | paths) for result in results
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    for result in results:
        assert np.array_equal(np.load(result), expected(many, 8))
    assert len(files(cache / "stores")) == 1
    assert len(read_log(tmp_path)) == MANY  # the second process waits for the first
