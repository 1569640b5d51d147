"""Office-Home: found under its folders' usual names, checked by published counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from feddg_bench.common.errors import DataError
from feddg_bench.data.protocols import scenarios
from feddg_datasets.officehome import OfficeHome
from tests.fabricate import fabricate


class TinyOfficeHome(OfficeHome):
    """Three images of each class in each domain."""

    counts: ClassVar[Mapping[str, tuple[int, ...]]] = dict.fromkeys(OfficeHome.domains, (3,) * 65)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return fabricate("officehome", tmp_path_factory.mktemp("officehome"))


def test_the_archive_as_it_is_unpacked(archive):
    records = TinyOfficeHome(archive).records()
    assert len(records.paths) == 4 * 65 * 3
    assert "real_world/TV/00001.jpg" in records.paths
    for path, label, domain in zip(records.paths, records.labels, records.domains, strict=True):
        assert path.split("/")[:2] == [OfficeHome.domains[domain], OfficeHome.classes[label]]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("office_home", ("art", "clipart", "product", "real_world")),
        ("", ("Art", "Clipart", "Product", "Real_World")),
        ("OFFICE-HOME", ("Art", "Clipart", "Product", "RealWorld")),
        ("office_home_v1.0", ("Art", "Clip Art", "Products", "Real")),
    ],
)
def test_other_spellings_give_the_same_records(archive, tmp_path, layout, names):
    (tmp_path / layout).mkdir(exist_ok=True)
    for old, new in zip(("Art", "Clipart", "Product", "Real World"), names, strict=True):
        (tmp_path / layout / new).symlink_to(archive / "OfficeHomeDataset_10072016" / old)
    ours, first = TinyOfficeHome(tmp_path), TinyOfficeHome(archive)
    assert ours.records().paths == first.records().paths
    assert ours.fingerprint() == first.fingerprint()


def test_counts_are_the_published_ones(archive):
    totals = {domain: sum(counts) for domain, counts in OfficeHome.counts.items()}
    assert totals == {"art": 2427, "clipart": 4365, "product": 4439, "real_world": 4357}
    assert sum(totals.values()) == 15_588
    assert {d: min(c) for d, c in OfficeHome.counts.items()} == {  # the authors' table
        "art": 15, "clipart": 39, "product": 38, "real_world": 23,
    }  # fmt: skip
    assert {len(counts) for counts in OfficeHome.counts.values()} == {len(OfficeHome.classes)}
    with pytest.raises(
        DataError, match=r"art/Alarm_Clock holds 3 images instead of 74 .* \(and \d+ more\)"
    ):
        OfficeHome(archive).records()


def test_default_scenarios_are_those_of_pardon():
    found = scenarios("ltdo", OfficeHome.domains, OfficeHome.letters)
    assert {s.name for s in found} == {"pr-c-a", "cr-a-p", "ap-r-c", "ac-p-r"}
