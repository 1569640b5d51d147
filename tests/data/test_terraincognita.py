"""TerraIncognita: the authors' archives and DomainBed's folders give the same records."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from feddg_bench.common.errors import DataError
from feddg_datasets.terraincognita import TerraIncognita
from tests.fabricate import fabricate
from tests.helpers import refused


@pytest.fixture
def made(tmp_path):
    return fabricate("terraincognita", tmp_path / "data")


def annotations(made, name="train"):
    return made / "terra_incognita" / "eccv_18_annotation_files" / f"{name}_annotations.json"


def test_records_of_the_archives(made):
    records = TerraIncognita(made).records()
    counts = np.zeros((4, 10), dtype=int)
    np.add.at(counts, (records.domains, records.labels), 1)
    expected = np.full((4, 10), 4)
    expected[:, 1] += 1  # each place's first bird is also a bobcat, counted once for two boxes
    assert np.array_equal(counts, expected)
    assert list(records.paths) == sorted(set(records.paths))
    twice = [path.split("/")[2] for path in records.paths]
    assert len(twice) - len(set(twice)) == 4


def test_domainbeds_folders_give_the_same(made, tmp_path):
    first = TerraIncognita(made)
    for index, path in enumerate(first.records().paths):
        target = tmp_path / "domainbed" / "terra_incognita" / f"location_{path[1:]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(first.file(index), target)
    second = TerraIncognita(tmp_path / "domainbed")
    assert second.records().paths == first.records().paths
    assert second.fingerprint() == first.fingerprint()


def test_the_join_is_not_quadratic(made):
    """Comparing 100,000 images with 100,000 annotations each would take an hour."""
    content = json.loads(annotations(made).read_text())
    content["images"] += [
        {"id": f"i{n}", "file_name": f"i{n}.jpg", "location": 999} for n in range(100_000)
    ]
    content["annotations"] += [
        {"id": n, "image_id": f"i{n}", "category_id": 0} for n in range(100_000)
    ]
    annotations(made).write_text(json.dumps(content))
    assert len(TerraIncognita(made).records().paths) == 164


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("annotations"), "has no list 'annotations'"),
        (lambda c: c["images"][0].pop("location"), "an entry of 'images' has no 'location'"),
        (lambda c: c["annotations"][0].pop("image_id"), "'annotations' has no 'image_id'"),
        (lambda c: c["annotations"][0].update(category_id=999), "category 999 of an annotation"),
    ],
)
def test_annotations_that_do_not_fit(made, change, message):
    content = json.loads(annotations(made).read_text())
    change(content)
    annotations(made).write_text(json.dumps(content))
    with pytest.raises(DataError, match=message) as caught:
        TerraIncognita(made).records()
    assert str(annotations(made)) in str(caught.value)


def test_damaged_and_missing_files(made):
    annotations(made).write_text("{")
    with refused(DataError, "train_annotations.json is not JSON"):
        TerraIncognita(made).records()
    annotations(made).unlink()
    with refused(DataError, "cannot read", "train_annotations.json"):
        TerraIncognita(made).records()


def test_missing_images(made):
    images = made / "terra_incognita" / "eccv_18_all_images_sm"
    content = json.loads(annotations(made).read_text())
    name = next(i["file_name"] for i in content["images"] if i["location"] == 38)
    (images / name).unlink()
    with pytest.raises(DataError, match=rf"annotated images are not in .* such as {name}"):
        TerraIncognita(made).records()
    shutil.rmtree(images)
    with refused(DataError, "no folder eccv_18_all_images_sm"):
        TerraIncognita(made).records()


def test_reported_numbers():
    assert sum(TerraIncognita.totals.values()) == 24_330
    assert tuple(TerraIncognita.totals) == TerraIncognita.domains
