"""miniDomainNet: the lists define its images and its test images."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from feddg_bench.common.errors import DataError
from feddg_bench.data.splits import SPLITS
from feddg_datasets.minidomainnet import MiniDomainNet
from tests.fabricate import fabricate
from tests.helpers import refused


class TinyMiniDomainNet(MiniDomainNet):
    """Three images of each class in each domain."""

    total = 4 * 126 * 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return fabricate("minidomainnet", tmp_path_factory.mktemp("minidomainnet"))


@pytest.fixture
def copy(made, tmp_path):
    """Return a copy of the lists next to links to the images."""
    base = tmp_path / "domainnet"
    shutil.copytree(made / "domainnet" / "splits_mini", base / "splits_mini")
    for domain in MiniDomainNet.domains:
        (base / domain).symlink_to(made / "domainnet" / domain)
    return tmp_path


def test_records_are_the_listed_images(made):
    dataset = TinyMiniDomainNet(made)
    records = dataset.records()
    assert len(records.paths) == len(set(records.paths)) == 4 * 126 * 3
    assert not any("airplane" in path or "_000004" in path for path in records.paths)
    for path, label, domain in zip(records.paths, records.labels, records.domains, strict=True):
        assert path.split("/")[:2] == [MiniDomainNet.domains[domain], MiniDomainNet.classes[label]]
    assert dataset.read(0, 8).shape == (8, 8, 3)


def test_the_lists_say_train_and_test(made):
    dataset = TinyMiniDomainNet(made)
    splits = dataset.published_splits()
    for path, split in zip(dataset.records().paths, splits, strict=True):
        assert SPLITS[split] == ("id_test" if path.endswith("_000003.jpg") else "train")
    assert np.bincount(splits).tolist() == [1008, 0, 504]


def test_names_and_classes():
    assert len(set(MiniDomainNet.classes)) == 126
    assert list(MiniDomainNet.classes) == sorted(MiniDomainNet.classes)
    assert MiniDomainNet.total == 140_006


def test_the_total_is_checked(made):
    with refused(DataError, "name 1,512 images instead of 140,006"):
        MiniDomainNet(made).records()
    assert len(MiniDomainNet(made).records_as_found().paths) == 1512


def line(copy, text, *, replace=None):
    """Append a line to the first list, or replace the line with number ``replace``."""
    file = copy / "domainnet" / "splits_mini" / "clipart_train.txt"
    lines = file.read_text().splitlines()
    if replace is None:
        lines.append(text)
    else:
        lines[replace] = text
    file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("painting/dog/a.jpg 3", "line 253 is 'painting/dog/a.jpg 3': expected a line such as"),
        ("clipart/dog/a.jpg", "expected a line such as clipart/umbrella"),
        ("clipart/dog/a.jpg x", "expected a line such as"),
        ("clipart/dog.jpg 1", "expected a line such as"),
        ("clipart/airplane/clipart_001_000001.jpg 1", "'airplane' is none of the 126 classes"),
        ("clipart/zebra/new.jpg 125", "zebra has the label 125, but before"),
    ],
)
def test_lines_that_do_not_fit(copy, text, message):
    line(copy, text)
    with pytest.raises(DataError, match=message) as caught:
        TinyMiniDomainNet(copy).records()
    assert "clipart_train.txt, line 253" in str(caught.value)


def test_an_image_listed_twice(copy):
    first = (copy / "domainnet/splits_mini/clipart_test.txt").read_text().splitlines()[0]
    line(copy, first)
    with refused(DataError, "is in the lists twice"):
        TinyMiniDomainNet(copy).records()


def test_labels_shifted_by_one_are_the_same_classes(copy, made):
    for file in (copy / "domainnet" / "splits_mini").iterdir():
        lines = [x.rsplit(" ", 1) for x in file.read_text().splitlines()]
        file.write_text("".join(f"{path} {int(label) + 1}\n" for path, label in lines))
    ours, first = TinyMiniDomainNet(copy).records(), TinyMiniDomainNet(made).records()
    assert ours.paths == first.paths
    assert np.array_equal(ours.labels, first.labels)


def test_a_missing_image_is_named(copy, made):
    name = (copy / "domainnet/splits_mini/clipart_train.txt").read_text().split()[0]
    (copy / "domainnet" / "clipart").unlink()
    shutil.copytree(made / "domainnet" / "clipart", copy / "domainnet" / "clipart")
    (copy / "domainnet" / name).unlink()
    dataset = TinyMiniDomainNet(copy)
    with refused(DataError, "1 of the 1,512 images of the lists", f"such as {name}"):
        dataset.fingerprint()


def test_without_lists_or_a_domain(copy):
    (copy / "domainnet" / "splits_mini" / "real_test.txt").unlink()
    with refused(DataError, "/real_test.txt: No such file or directory; get it again"):
        TinyMiniDomainNet(copy).records()
    shutil.rmtree(copy / "domainnet" / "splits_mini")
    with refused(DataError, "lacks the lists splits_mini/clipart_train.txt"):
        TinyMiniDomainNet(copy).records()
    (copy / "domainnet" / "sketch").unlink()
    with refused(DataError, "lacks the folder sketch"):
        TinyMiniDomainNet(copy).records()
