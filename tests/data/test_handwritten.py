"""Handwritten: four collections in their published files, checked by their decoded images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest

from feddg_bench.common.errors import DataError
from feddg_datasets.handwritten import TABLES, Handwritten, decoded, read_digits
from tests.fabricate import fabricate
from tests.helpers import refused


class TinyHandwritten(Handwritten):
    """The same without a promised number of digits."""

    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {}


@pytest.fixture
def made(tmp_path):
    return fabricate("handwritten", tmp_path / "data")


def test_records(made):
    dataset = TinyHandwritten(made)
    records = dataset.records()
    assert np.bincount(records.domains).tolist() == [500, 400, 200, 200]
    assert dataset.count(records)[1:].tolist() == [[40] * 10, [20] * 10, [20] * 10]
    assert len(set(records.paths)) == 1300
    assert records.paths[500] == "optdigits/0/00000.png"
    assert dataset.find() == made / "handwritten"


def test_pixels_fill_the_range_and_labels_are_digits(tmp_path):
    """Rows of each format with known pixels; the darkest value is 0 and the brightest 255."""
    file = tmp_path / "file"
    file.write_text("\n".join([",".join(["0"] * 62 + ["8", "16", "7"]), ""]))
    part = read_digits("optdigits.tra", file)
    assert part.images.reshape(-1)[-3:].tolist() == [0, 128, 255]
    assert part.labels.tolist() == [7]
    file.write_text(" ".join(["1.0000"] * 2 + ["0.0000"] * 254 + [*"0000000010"]) + " \r\n")
    part = read_digits("semeion.data", file)
    assert part.images[0, 0, :3].tolist() == [255, 255, 0]
    assert part.labels.tolist() == [8]
    file.write_text("\n".join("  6" * 16 + "  1" * 224 for _ in range(20)) + "\n")
    part = read_digits("mfeat-pix", file)
    assert part.images.shape == (20, 16, 15)
    assert part.images[0, 1, :2].tolist() == [255, 42]
    assert part.labels.tolist() == sorted([*range(10)] * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: "", "is not UCI's optdigits.tra: expected 65 whole numbers a line"),
        (lambda text: text[:-9], "cannot read"),
        (lambda text: text.replace("1", "one", 1), "cannot read"),
        (lambda text: text.replace("1", "17", 1), "pixels from 0 to 16"),
        (lambda text: text.replace("1", "0.5", 1), "whole numbers"),
        (lambda text: text.replace("1", "-1", 1), "is not UCI's optdigits.tra"),
        (lambda text: text.replace("1", "nan", 1), "is not UCI's optdigits.tra"),
        (lambda text: text.replace(",0\n", ",10\n", 1), "is not UCI's optdigits.tra"),
        (lambda text: text.replace("\n", ",0\n"), "expected 65 whole numbers a line"),
    ],
)
def test_damaged_tables(made, change, message):
    file = made / "handwritten" / "optdigits.tra"
    file.write_text(change(file.read_text()))
    with refused(DataError, message, str(file)):
        TinyHandwritten(made).records()


def test_missing_files_are_named(made):
    (made / "handwritten" / "semeion.data").unlink()
    with refused(DataError, "semeion.data was not found", "data download handwritten"):
        TinyHandwritten(made).records()


def test_the_checksum_is_of_the_images(made):
    """Ends of lines and forms of numbers do not count, a pixel does."""
    offers = {offer.name: offer for offer in Handwritten.downloads}
    assert [*offers][2:] == [*TABLES]
    file = made / "handwritten" / "semeion.data"
    content = decoded(file.name, file)
    text = file.read_text().replace(".0000", "").replace("\n", " \r\n")
    file.write_text(text)
    assert decoded(file.name, file) == content
    assert "instead of 8e0ce943" in offers[file.name].fault(file)
    file.write_text(text.replace("1", "0", 1))
    assert decoded(file.name, file) != content
    file.write_text("<html>")
    assert "it cannot be decoded (cannot read" in offers[file.name].fault(file)


def test_the_real_digits(test_data):
    if not (test_data / "handwritten").is_dir():
        pytest.skip("FEDDG_TEST_DATA has no handwritten")
    dataset = Handwritten(test_data)
    dataset.records()  # also checks the counts
    assert dataset.fingerprint() == "af1e8b82373b975d013a197fae973fe6"
    for offer in Handwritten.downloads:
        assert offer.fault(dataset.find() / offer.name) is None
