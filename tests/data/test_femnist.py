"""FEMNIST: writers as domains, read from its table with the published splits."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from feddg_bench.common.errors import DataError
from feddg_bench.data.protocols import scenarios
from feddg_bench.data.splits import SPLITS
from feddg_datasets.femnist import FEMNIST
from tests.fabricate import fabricate
from tests.helpers import refused


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return fabricate("femnist", tmp_path_factory.mktemp("femnist"))


@pytest.fixture
def made(archive, tmp_path):
    """Return a copy that tests may change."""
    return shutil.copytree(archive, tmp_path / "data", copy_function=os.link)


def edit(made, old, new):
    """Replace the first occurrence of a text in the table."""
    file = made / "femnist_v1.0" / "metadata.csv"
    text = file.read_text()
    assert old in text
    file.unlink()  # a hard link: do not change the original's bytes
    file.write_text(text.replace(old, new, 1))


def test_records(made):
    dataset = FEMNIST(made)
    records = dataset.records()
    assert len(records.paths) == 10 * 62 + 2 * 31
    assert dataset.domains == tuple(f"writer_{n:04d}" for n in range(12))
    assert dataset.letters["writer_0011"] == "11"
    for path, label, domain in zip(records.paths, records.labels, records.domains, strict=True):
        writer, name, *rest = path.split("/")
        assert writer == dataset.domains[domain]
        assert name == FEMNIST.classes[label]
        assert rest == ["images", f"{domain:03d}", f"{label:02d}.png"]
    assert dataset.read(0, 28).shape == (28, 28, 3)


def test_classes_are_those_of_leaf():
    assert "".join(FEMNIST.classes) == (
        "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    )


def test_published_splits_are_one_scenario(made):
    dataset = FEMNIST(made)
    splits = dataset.published_splits()
    records = dataset.records()
    assert np.bincount(splits).tolist() == [465, 77, 78, 31, 31]
    for name, writer in (("val", 10), ("test", 11)):
        assert set(records.domains[splits == SPLITS.index(name)]) == {writer}
    (scenario,) = scenarios("wilds", dataset.domains, dataset.letters, None, dataset.official)
    assert scenario.train == dataset.domains[:10]
    assert (scenario.val, scenario.test) == ("writer_0010", "writer_0011")


@pytest.mark.parametrize("layout", ["", "femnist", "FEMNIST"])
def test_layouts(made, layout):
    folder = made / "x" / layout
    folder.parent.mkdir(exist_ok=True)
    (made / "femnist_v1.0").rename(folder)
    dataset = FEMNIST(made / "x")
    assert dataset.find() == folder
    assert len(dataset.records().paths) == 682


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("domain_remapped", "domain", "has no column 'domain_remapped'; expected path, split"),
        (",train,", ",training,", "line 4: split is 'training'; expected one of train"),
        (",train,0,2", ",train,0,62", "line 4: y is '62'; expected a whole number below 62"),
        (",train,0,2", ",train,0,-1", "line 4: y is '-1'"),
        (",train,0,2", ",train,w0,2", "domain_remapped is 'w0'; expected a whole number"),
        (",train,0,2", ",train", "line 4: domain_remapped is ''"),
        ("images/000/02.png", "images/000/01.png", "lists a path twice"),
    ],
)
def test_tables_that_do_not_fit(made, old, new, message):
    edit(made, old, new)
    with pytest.raises(DataError, match=message) as caught:
        FEMNIST(made)
    assert "metadata.csv" in str(caught.value)


@pytest.mark.parametrize("name", ["/etc/passwd", "images/../../../etc/passwd"])
def test_a_table_names_no_file_outside(made, name):
    edit(made, "images/000/02.png", name)
    with refused(DataError, "lies outside"):
        FEMNIST(made).fingerprint()


def test_missing_data(made, tmp_path):
    with refused(DataError, "metadata.csv was not found", "femnist_v1.0") as caught:
        FEMNIST(tmp_path)
    assert "--data-root" in str(caught.value)
    (made / "femnist_v1.0" / "images" / "000" / "02.png").unlink()
    data = FEMNIST(made)
    gone = next(i for i in range(len(data.records().paths)) if data.file(i).name == "02.png")
    with refused(DataError, "cannot decode", "02.png", "missing, or a link to nothing"):
        data.read(gone, 28)


def test_the_class_has_no_domains():
    assert FEMNIST.domains == ()
    assert len(FEMNIST.classes) == 62
