"""Digits4: every digit once, four domains that differ, the same pixels everywhere."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from feddg_datasets.digits4 import CELLS, SIDE, Digits4, clouds, deal_classes, enlarge, pattern


@pytest.fixture(scope="module")
def digits() -> Digits4:
    return Digits4()


@pytest.fixture(scope="module")
def sample(digits) -> tuple[np.ndarray, np.ndarray]:
    """Return the first 200 images and their domains."""
    return np.stack([digits.read(i, SIDE) for i in range(200)]), digits.records().domains[:200]


def test_every_digit_is_there_once(digits):
    records = digits.records()
    assert len(records.paths) == len(set(records.paths)) == 1797
    assert np.bincount(records.labels).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    assert records.labels.dtype == records.domains.dtype == np.int64
    for path, label, domain in zip(records.paths, records.labels, records.domains, strict=True):
        assert path.split("/")[:2] == [digits.domains[domain], digits.classes[label]]


def test_domains_share_every_class_evenly(digits):
    records = digits.records()
    table = np.zeros((4, 10), dtype=int)
    np.add.at(table, (records.domains, records.labels), 1)
    assert (np.ptp(table, axis=0) <= 1).all()
    assert np.ptp(table.sum(axis=1)) <= 1


def test_dealing_mixes_the_order():
    domains = deal_classes(np.zeros(1000, dtype=np.int64), 4)
    assert np.bincount(domains).tolist() == [250] * 4
    assert np.bincount(domains[:100]).min() > 10
    assert (domains[:-1] == domains[1:]).any()


def test_letters_name_the_domains(digits):
    assert set(digits.letters) == set(digits.domains)
    assert len(set(digits.letters.values())) == 4


@pytest.mark.parametrize("size", [8, 32, 48])
def test_images_have_the_size_asked_for(digits, size):
    image = digits.read(5, size)
    assert image.shape == (size, size, 3)
    assert image.dtype == np.uint8


def test_pixels_are_the_same_on_every_machine(sample):
    # Computed once. If the drawing changes, raise Digits4.version and replace this value.
    digest = hashlib.blake2b(sample[0].tobytes(), digest_size=8).hexdigest()
    assert digest == "906fd8608a053328"
    assert Digits4.version == 1


def test_contents_are_those_of_scikit_learn(digits):
    assert digits.fingerprint() == "144e72e1b1a17e17a42bc75a717b9870"
    assert digits.stamp() == Digits4().stamp()


def test_domains_differ_as_described(sample):
    images, domains = sample
    border = np.concatenate([images[:, :2].reshape(200, -1), images[:, -2:].reshape(200, -1)], 1)
    paper = [border[domains == d].mean() for d in range(4)]
    colour = np.ptp(images.astype(float), axis=3).mean(axis=(1, 2))
    assert paper[2] > paper[0] > 150  # outline on white paper, ink on darker paper
    assert paper[3] < 80  # chalk on a board
    assert colour[domains == 1].min() > 40  # posters are colourful
    assert colour[domains == 2].max() < 40
    poster = images[domains == 1].astype(float)
    brighter = poster[:, 12:20, 12:20].mean(axis=(1, 2, 3)) > poster.mean(axis=(1, 2, 3))
    assert 0.25 < brighter.mean() < 0.75  # shapes lighter and darker than the pattern


def test_enlarging_keeps_place_and_amount():
    digit = np.zeros((CELLS, CELLS))
    digit[3:5, 3:5] = 1
    plane = enlarge(digit, 3)
    assert plane.sum() == pytest.approx(4 * 9, rel=0.02)
    assert np.allclose(plane, plane[::-1, ::-1])
    down = np.average(np.arange(SIDE), weights=enlarge(digit, 3, shift=(2, 0)).sum(axis=1))
    assert down == pytest.approx(SIDE / 2 - 0.5 + 2, abs=0.05)
    top = np.zeros((CELLS, CELLS))
    top[1, 3:5] = 1
    assert enlarge(top, 3, slant=0.3).sum(axis=0).argmax() > SIDE / 2


def test_noise_and_patterns_stay_in_range():
    rng = np.random.default_rng(0)
    for cells in (3, 8):
        noise = clouds(cells, rng)
        assert noise.shape == (SIDE, SIDE)
        assert 0 <= noise.min() < noise.max() <= 1
    for kind in range(4):
        tiles = pattern(kind, 5, rng)
        assert tiles.shape == (SIDE, SIDE)
        assert set(np.unique(tiles)) == {0, 1}


def test_the_digits_are_those_that_scikit_learn_loads():
    from sklearn.datasets import load_digits

    loaded = load_digits()
    digits, labels = Digits4()._digits
    assert np.array_equal(digits, loaded.images)
    assert np.array_equal(labels, loaded.target)
