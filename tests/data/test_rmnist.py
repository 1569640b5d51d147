"""RotatedMNIST: the same digits at the same angles on every machine, read from complete files."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from feddg_bench.common.errors import DataError
from feddg_bench.data.protocols import scenarios
from feddg_datasets.rmnist import RotatedMNIST, deal_images
from feddg_datasets.shared.arrays import Part, read_idx
from tests.fabricate import fabricate
from tests.helpers import refused

TRAIN = "train-images-idx3-ubyte"


class TinyRotatedMNIST(RotatedMNIST):
    """RotatedMNIST without a promised number of digits."""

    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {}


@pytest.fixture
def made(tmp_path):
    return fabricate("rmnist", tmp_path / "data")


def test_sizes_and_the_frozen_shuffle():
    domains = deal_images(70_000, 6)
    assert np.bincount(domains).tolist() == [11_667] * 4 + [11_666] * 2
    assert domains[:20].tolist() == [3, 1, 4, 0, 2, 3, 3, 3, 3, 4, 1, 5, 3, 4, 5, 3, 1, 4, 0, 2]


def test_records(made):
    records = TinyRotatedMNIST(made).records()
    assert np.bincount(records.domains).tolist() == [100] * 6
    assert records.labels[:12].tolist() == [*range(10), 0, 1]
    for index, path in enumerate(records.paths):
        angle, label, file = path.split("/")
        assert angle == RotatedMNIST.domains[records.domains[index]]
        assert int(label) == records.labels[index]
        assert file == f"{index:05d}.png"


def test_images_are_turned_counter_clockwise_and_those_of_angle_0_are_not(made):
    dataset = TinyRotatedMNIST(made)
    images = read_idx(dataset.files["train-images-idx3-ubyte"], (28, 28))
    records = dataset.records()
    for number, angle in enumerate(RotatedMNIST.domains):
        index = int(np.flatnonzero(records.domains[:500] == number)[0])
        turned = Image.fromarray(images[index]).rotate(int(angle), resample=2, fillcolor=0)
        seen = dataset.read(index, 28)
        assert np.array_equal(seen, np.repeat(np.asarray(turned)[..., None], 3, axis=2))
        if angle == "0":
            assert np.array_equal(seen[..., 0], images[index])


def test_a_point_to_the_right_goes_up(made, monkeypatch):
    dataset = TinyRotatedMNIST(made)
    images = np.zeros((600, 28, 28), dtype=np.uint8)
    images[:, 13:15, 24] = 255
    labels = (np.arange(600) % 10).astype(np.int64)
    monkeypatch.setitem(vars(dataset), "parts", (Part(images, labels),))
    index = int(np.flatnonzero(dataset.records().domains == 3)[0])  # 45 degrees
    row, column = np.unravel_index(dataset.read(index, 28)[..., 0].argmax(), (28, 28))
    assert row < 9
    assert column > 18


@pytest.mark.parametrize("layout", ["", "MNIST/raw", "raw", "rmnist"])
def test_layouts_and_spellings_give_the_same(made, tmp_path, layout):
    folder = tmp_path / "other" / layout
    folder.mkdir(parents=True)
    for file in (made / "mnist").iterdir():
        name = file.name.removesuffix(".gz").replace("-idx", ".idx")
        (folder / name).write_bytes(gzip.decompress(file.read_bytes()))
    first, second = TinyRotatedMNIST(made), TinyRotatedMNIST(tmp_path / "other")
    assert second.records().paths == first.records().paths
    assert second.fingerprint() == first.fingerprint()
    assert second.stamp() != first.stamp()
    assert second.find() == folder


def test_missing_files_are_named(made, tmp_path):
    (made / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with refused(DataError, "t10k-labels-idx1-ubyte was not found") as caught:
        TinyRotatedMNIST(made).records()
    for part in (str(made), "data download rmnist", "--data-root", "data path rmnist"):
        assert part in str(caught.value)
    with pytest.raises(
        DataError, match="train-images-idx3-ubyte or train-labels-idx1-ubyte or t10k-images"
    ):
        TinyRotatedMNIST(tmp_path).records()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: gzip.compress(raw)[:-20], "cannot read"),
        (lambda raw: b"no gzip" + raw, "cannot read"),
        (lambda raw: gzip.compress(raw[:-1]), "holds 391,999 bytes of values instead of 392,000"),
        (lambda raw: gzip.compress(raw + b"x"), "392,001 bytes"),
        (lambda raw: gzip.compress(b"\0\0\x0d\x03" + raw[4:]), "is not an idx file of 28x28 bytes"),
        (lambda raw: gzip.compress(raw[:8] + raw[12:16] + raw[8:12][:3]), "is not an idx file"),
        (lambda _: gzip.compress(b""), "is not an idx file"),
    ],
)
def test_damaged_files(made, change, message):
    file = made / "mnist" / f"{TRAIN}.gz"
    file.write_bytes(change(gzip.decompress(file.read_bytes())))
    with pytest.raises(DataError, match=message) as caught:
        TinyRotatedMNIST(made).records()
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_labels_that_do_not_fit(made):
    file = made / "mnist" / "t10k-labels-idx1-ubyte.gz"
    raw = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(raw[:-1] + b"\x0a"))
    with refused(DataError, "holds the label 10: expected digits"):
        TinyRotatedMNIST(made).records()
    file.write_bytes(gzip.compress(raw[:7] + b"\x63" + raw[8:-1]))
    with refused(DataError, "holds 100 images but", "99 labels"):
        TinyRotatedMNIST(made).records()


def test_counts_are_checked(made):
    with pytest.raises(DataError, match=r"0/0 holds \d+ images instead of 1,147"):
        RotatedMNIST(made).records()


def test_scenarios():
    found = scenarios("lodo", RotatedMNIST.domains, RotatedMNIST.letters)
    assert [s.test for s in found] == ["0", "15", "30", "45", "60", "75"]
    assert found[0].name == "15+30+45+60+75-0"
    assert scenarios("lodo", RotatedMNIST.domains, RotatedMNIST.letters, "0") == found[:1]


def test_the_real_digits(test_data):
    if not (test_data / "mnist").is_dir():
        pytest.skip("FEDDG_TEST_DATA has no MNIST")
    dataset = RotatedMNIST(test_data)
    records = dataset.records()  # also checks the counts of every angle and digit
    totals = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]  # MNIST's own totals
    assert np.bincount(records.labels).tolist() == totals
    assert np.array_equal(np.sum(list(RotatedMNIST.counts.values()), axis=0), totals)
    assert records.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert dataset.fingerprint() == "41ad422f159d82297ac9eb74fa5cd617"
