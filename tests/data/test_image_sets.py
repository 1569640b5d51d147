"""Data sets of public suites: layouts give the same records, and numbers are checked."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from feddg_bench.common.errors import DataError
from feddg_bench.data.inspect.doctor import examine
from feddg_bench.data.splits import SPLITS
from feddg_bench.plugins import load_dataset, names
from feddg_datasets.coloredmnist import ColoredMNIST, coloured
from feddg_datasets.digits5 import Digits5
from feddg_datasets.domainnet import DUPLICATES, DomainNet
from feddg_datasets.femnist import FEMNIST
from feddg_datasets.office31 import Office31
from feddg_datasets.vlcs import VLCS
from tests.fabricate import fabricate
from tests.helpers import refused

SETS = {
    "vlcs": (10_729, 4, 5),
    "domainnet": (586_575, 6, 345),
    "office31": (4_110, 3, 31),
    "officecaltech10": (2_533, 4, 10),
    "digitsdg": (24_000, 4, 10),
    "digits5": (145_298, 5, 10),
    "coloredmnist": (70_000, 3, 2),
}
"""Published numbers of images, domains and classes."""


def tiny(name, **promises):
    """Return the class without promised numbers of images."""
    return type("Tiny", (load_dataset(name),), {"counts": {}} | promises)


@pytest.mark.parametrize("name", SETS)
def test_published_numbers(name, tmp_path):
    images, domains, classes = SETS[name]
    dataset = load_dataset(name)
    assert sum(map(sum, dataset.counts.values())) == images
    assert (len(dataset.domains), len(set(dataset.classes))) == (domains, classes)
    assert set(dataset.counts) == set(dataset.domains)
    fabricate(name, tmp_path)
    with refused(DataError, "differs from the published data set"):
        dataset(tmp_path).records()


@pytest.mark.parametrize(
    ("name", "inner", "other"),
    [
        ("vlcs", "VLCS", ""),
        ("office31", "office31", "OFFICE31"),  # as in MarsFL, like the next one
        ("officecaltech10", "office_caltech_10", "Office_Caltech_10"),
        ("digitsdg", "digits_dg", "Digits-DG"),
        ("domainnet", "domainnet", "domain_net"),
        ("digits5", "Digit-Five", "Digit5/digit-five"),
        ("coloredmnist", "mnist", "MNIST/raw"),
    ],
)
def test_layouts_give_the_same_records(name, inner, other, tmp_path):
    made = fabricate(name, tmp_path / "made")
    first = tiny(name)(made)
    (tmp_path / "other" / other).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(made / inner, tmp_path / "other" / other, dirs_exist_ok=True)
    second = tiny(name)(tmp_path / "other")
    assert second.records().paths == first.records().paths
    assert second.fingerprint() == first.fingerprint()
    assert second.find() == tmp_path / "other" / other
    for path, label, domain in zip(
        first.records().paths, first.records().labels, first.records().domains, strict=True
    ):
        assert path.split("/")[:2] == [first.domains[domain], first.classes[label]]
    assert first.read(0, 8).shape == (8, 8, 3)


def test_totals_of_domains_are_compared(tmp_path):
    """Only totals are known of some data sets; here 5 classes have 8 images in each domain."""
    made = fabricate("vlcs", tmp_path)
    promised = {"Caltech101": (40,), "LabelMe": (40,), "SUN09": (41,), "VOC2007": (40,)}
    diagnosis = examine(tiny("vlcs", counts=promised)(made))
    assert [finding.text for finding in diagnosis.findings] == [
        "SUN09 holds 40 images instead of 41 (-1)"
    ]
    assert diagnosis.published["LabelMe"] == {"images": 40}
    assert "the number of images of every domain" in diagnosis.compared


def test_vlcs_with_numbers_for_classes(tmp_path):
    """JigenDG's and Dassl's layout; three parts repeat the images of the folder ``full``."""
    made = fabricate("vlcs", tmp_path / "made") / "VLCS"
    paths = tiny("vlcs")(made).records().paths
    for domain, other in zip(VLCS.domains, ("CALTECH", "LABELME", "SUN", "PASCAL"), strict=True):
        (made / domain).rename(made / other)
        for label, name in enumerate(VLCS.classes):
            (made / other / name).rename(made / other / str(label))
        (made / other).rename(made / "full")
        (made / other / "train").mkdir(parents=True)
        shutil.copytree(made / "full" / "0", made / other / "train" / "0")
        (made / "full").rename(made / other / "full")
    assert tiny("vlcs")(made.parent).records().paths == paths


@pytest.mark.parametrize("name", ["vlcs", "digits5"])
@pytest.mark.parametrize("place", ["", "level", "level/other"])
def test_a_deeper_folder_is_named(name, place, tmp_path):
    made = fabricate(name, tmp_path / "made" / place)
    inner = made / {"vlcs": "VLCS", "digits5": "Digit-Five"}[name]
    dataset = tiny(name)(tmp_path / "made")
    if not place:
        assert dataset.find() == inner
        return
    deep = f"was not found in {tmp_path / 'made'}, but in {inner}: give --data-root {inner}"
    with refused(DataError, deep if place == "level" else "was not found (looked in"):
        dataset.find()


def test_classes_have_texts_that_tell_them_apart():
    for name in names("data set"):
        dataset = load_dataset(name)
        texts = [dataset.prompt(dataset, each) for each in dataset.classes]
        assert len({*texts}) == len(texts), name
        assert not [t for t in texts if re.fullmatch(r"a photo of a (\w|\d+)", t)], name
        assert {*dataset.prompts} <= {*dataset.classes} or name == "iwildcam"
    assert DomainNet.prompt(DomainNet, "The_Eiffel_Tower") == "a photo of the eiffel tower"
    assert FEMNIST.prompt(FEMNIST, "a") != FEMNIST.prompt(FEMNIST, "A")


def test_office31_without_the_folder_images(tmp_path):
    """Dassl's layout."""
    made = fabricate("office31", tmp_path / "made") / "office31"
    paths = tiny("office31")(made).records().paths
    for domain in Office31.domains:
        for folder in (made / domain / "images").iterdir():
            folder.rename(made / domain / folder.name)
    assert tiny("office31")(made).records().paths == paths


def test_digitsdg_joins_both_parts(tmp_path):
    dataset = tiny("digitsdg")(fabricate("digitsdg", tmp_path))
    assert dataset.count(dataset.records()).tolist() == [[4] * 10] * 4
    assert dataset.records().paths[0] == "mnist/0/train-frame_0000.jpg"


class TestDomainNet:
    def test_the_lists_leave_duplicates_out(self, tmp_path):
        dataset = tiny("domainnet")(fabricate("domainnet", tmp_path))
        assert len(dataset.records().paths) == 6 * (345 + 172)
        splits = dataset.published_splits()
        assert [SPLITS[place] for place in splits[:3]] == ["train", "train", "id_test"]

    def test_without_lists_the_folders_count(self, tmp_path, monkeypatch):
        shutil.rmtree(fabricate("domainnet", tmp_path) / "domainnet" / "splits")
        dataset = tiny("domainnet")(tmp_path)
        assert len(dataset.records().paths) == 6 * (345 + 172) + 5 * 3
        assert dataset.published_splits() is None
        # as many too many as DomainBed removes
        monkeypatch.setattr(DomainNet, "counts", dict.fromkeys(DomainNet.domains, (517,)))
        monkeypatch.setitem(DUPLICATES, "clipart", 3)
        told = (
            "clipart holds 520 images instead of 517 (+3): its known duplicates, which the lists "
            "splits/*.txt omit, infograph holds 520 images instead of 517 (+3), painting"
        )
        with refused(DataError, told):
            DomainNet(tmp_path).records()

    def test_numbers_agree_with_the_archives(self):
        assert sum(DUPLICATES.values()) == 596_006 - 586_575


class TestDigits5:
    @pytest.fixture
    def made(self, tmp_path):
        return fabricate("digits5", tmp_path)

    def test_records(self, made):
        dataset = tiny("digits5")(made)
        assert dataset.count(dataset.records()).tolist() == [[8] * 10] * 5
        shapes = [part.images.shape[1:] for part in dataset.parts]
        assert shapes == [(32, 32), (32, 32, 3), (32, 32, 3), (32, 32, 3), (28, 28)]
        for part in dataset.parts:  # the stroke's brightness is that of the label
            stroke = part.images[:, 10, 12].reshape(len(part.images), -1)[:, 0].astype(int)
            assert np.abs(stroke - 100 - 15 * part.labels).max() <= 1  # of values from 0 to 1

    def test_values_may_be_stored_as_floats(self, made):
        before = tiny("digits5")(made).fingerprint()
        file = made / "Digit-Five" / "mnist_data.mat"
        content = {k: v.astype(float) for k, v in loadmat(file).items() if k[0] != "_"}
        savemat(file, content)
        assert tiny("digits5")(made).fingerprint() == before
        savemat(file, content | {"test_32": content["test_32"] / 2})
        with refused(DataError, "float64 [20, 32, 32] for 20 labels"):
            tiny("digits5")(made).records()

    def test_the_first_images_of_each_part(self, made, monkeypatch):
        monkeypatch.setattr("feddg_datasets.digits5.TRAINING", 15)
        monkeypatch.setattr("feddg_datasets.digits5.TEST", 2)
        labels = tiny("digits5")(made).parts[2].labels
        assert labels.tolist() == [*range(10), *range(5), 0, 1]

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("syn_number.mat", lambda arrays: arrays.pop("train_data"), "cannot read"),
            ("svhn_test_32x32.mat", lambda arrays: arrays.update(y=np.ones((3, 1))), "for 3 lab"),
            ("mnistm_with_label.mat", lambda arrays: arrays.update(test=np.ones((20, 9))), "cann"),
        ],
    )
    def test_other_contents(self, made, name, change, message):
        content = loadmat(made / "Digit-Five" / name)
        arrays = {key: value for key, value in content.items() if not key.startswith("_")}
        change(arrays)
        savemat(made / "Digit-Five" / name, arrays)
        with refused(DataError, message, name):
            tiny("digits5")(made).records()

    def test_damaged_and_missing_files(self, made):
        file = made / "Digit-Five" / "usps_28x28.mat"
        file.write_bytes(file.read_bytes()[:200])
        with refused(DataError, "cannot read", "usps_28x28.mat"):
            tiny("digits5")(made).records()
        file.unlink()
        told = f"usps_28x28.mat was not found (looked in {made / 'Digit-Five'})"
        with refused(DataError, told, "Digit-Five Download"):
            Digits5(made).records()


class TestColoredMNIST:
    def test_colours(self):
        images = np.array([[[7, 0]], [[9, 1]]], dtype=np.uint8)
        pixels = coloured(images, np.array([False, True]))
        assert pixels.tolist() == [[[[7, 0, 0], [0, 0, 0]]], [[[0, 9, 0], [0, 1, 0]]]]

    def test_probabilities_and_the_frozen_draw(self, test_data):
        """Numbers of the real digits; colours agree with labels as DomainBed's names say."""
        if not (test_data / "mnist").is_dir():
            pytest.skip("FEDDG_TEST_DATA has no MNIST")
        dataset = ColoredMNIST(test_data)
        dataset.records()  # also checks the counts
        green = [part.images[..., 1].any(axis=(1, 2)) for part in dataset.parts]
        agree = [(g == p.labels).mean() for g, p in zip(green, dataset.parts, strict=True)]
        assert np.round(agree, 3).tolist() == [0.898, 0.797, 0.1]
        assert dataset.fingerprint() == "0a14ae4720b7561429e91da5b8447a50"
