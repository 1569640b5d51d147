"""WILDS data sets, read by the package wilds from made-up folders in the published layouts."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from feddg_bench.common.errors import DataError
from feddg_bench.data.image_store import open_store
from feddg_bench.data.inspect.doctor import examine
from feddg_bench.data.protocols import scenarios
from feddg_bench.data.splits import SPLITS
from feddg_bench.plugins import load_dataset, names
from feddg_datasets.shared.wilds import quiet
from tests.fabricate import fabricate
from tests.helpers import refused

with quiet():  # importing wilds requests its newest version from the network
    pytest.importorskip("wilds.datasets.wilds_dataset", reason="needs the package wilds")

FOLDERS = {
    "iwildcam": "iwildcam_v2.0",
    "camelyon17": "camelyon17_v1.0",
    "fmow": "fmow_v1.1",
    "poverty": "poverty_v1.1",
}
EVERY = pytest.mark.parametrize("name", FOLDERS)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("something reaches for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    root = tmp_path_factory.mktemp("wilds")
    for name in FOLDERS:
        fabricate(name, root)
    return root


@pytest.fixture
def copy(archives, tmp_path):
    """Return a function that makes a copy for changes."""

    def make(name: str) -> Path:
        folder = FOLDERS[name]
        shutil.copytree(archives / folder, tmp_path / "data" / folder, copy_function=os.link)
        return tmp_path / "data"

    return make


def edit(file: Path, old: str, new: str) -> None:
    """Replace the first occurrence of a text in a file, without changing its hard links."""
    text = file.read_text()
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new, 1))


def of_wilds(name: str, root: Path, **options: object):
    """Return wilds' own object, made without our code except `quiet`."""
    from wilds.datasets.camelyon17_dataset import Camelyon17Dataset
    from wilds.datasets.fmow_dataset import FMoWDataset
    from wilds.datasets.iwildcam_dataset import IWildCamDataset
    from wilds.datasets.poverty_dataset import PovertyMapDataset

    readers = (IWildCamDataset, Camelyon17Dataset, FMoWDataset, PovertyMapDataset)
    reader = dict(zip(FOLDERS, readers, strict=True))[name]
    with quiet():
        return reader(root_dir=str(root), download=False, **options)


@pytest.fixture
def same_times(copy):
    """Return a copy of FMoW with times of one form, which wilds itself can read."""
    root = copy("fmow")
    table = root / "fmow_v1.1" / "rgb_metadata.csv"
    text = table.read_text().replace(".643Z", "Z")
    table.unlink()
    table.write_text(text)
    return root


# ------------------------------------------------------------------- what wilds says


@EVERY
def test_splits_labels_and_metadata_are_those_of_wilds(archives, same_times, name):
    root = same_times if name == "fmow" else archives
    dataset, theirs = load_dataset(name)(root), of_wilds(name, root)
    records, splits, rows = dataset.records(), dataset.published_splits(), dataset.wilds_rows
    assert len(records.paths) == len(set(records.paths)) == len(rows)
    assert list(records.paths) == sorted(records.paths)
    assert records.labels.dtype == (np.float32 if name == "poverty" else np.int64)
    kept = []
    for split in theirs.split_dict:
        subset = theirs.get_subset(split)
        mine = np.flatnonzero(splits == SPLITS.index(split))
        mine = mine[np.argsort(rows[mine])]
        np.testing.assert_array_equal(rows[mine], subset.indices)
        np.testing.assert_array_equal(records.labels[mine], subset.y_array.numpy().reshape(-1))
        kept += subset.indices.tolist()
    assert sorted(kept) == sorted(rows.tolist())
    assert len(rows) == len(theirs) - (1 if name == "fmow" else 0)  # one image is in no split

    metadata = theirs.metadata_array.numpy()[rows].astype(int)
    field = {name: metadata[:, n] for n, name in enumerate(theirs.metadata_fields)}
    domain = [dataset.domains[d] for d in records.domains]
    group = None if records.groups is None else [(*dataset.groups, "")[g] for g in records.groups]
    if name == "iwildcam":
        assert domain == [f"location_{n:03d}" for n in field["location"]]
        assert group is None
    elif name == "camelyon17":
        assert domain == [f"hospital_{n}" for n in field["hospital"]]
        assert group == [f"slide_{n:02d}" for n in field["slide"]]
    elif name == "fmow":
        assert domain == [str(2002 + n) for n in field["year"]]
        region = [str(theirs.metadata_map["region"][n]) for n in field["region"]]
        assert group == [name if name in dataset.groups else "" for name in region]
        assert 0 < group.count("") < len(group)
    else:
        areas = [("rural", "urban")[n] for n in field["urban"]]
        countries = [theirs.metadata_map["country"][n] for n in field["country"]]
        assert domain == [f"{c}_{a}" for c, a in zip(countries, areas, strict=True)]
        assert group == areas


@EVERY
def test_images_are_those_of_wilds(archives, same_times, name):
    root = same_times if name == "fmow" else archives
    dataset, theirs = load_dataset(name)(root), of_wilds(name, root)
    side = {"iwildcam": 32, "poverty": 12}.get(name, 10)
    for index in (0, 57, len(dataset.wilds_rows) - 1):
        expected = theirs.get_input(int(dataset.wilds_rows[index]))
        if name == "poverty":
            expected = expected.numpy().transpose(1, 2, 0).astype(np.float16)
        else:
            expected = np.asarray(expected.convert("RGB"))
        found = dataset.read(index, side)
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, expected)


def test_published_names_are_those_of_wilds():
    from wilds.datasets.fmow_dataset import categories
    from wilds.datasets.poverty_dataset import DHS_COUNTRIES

    assert load_dataset("fmow").classes == tuple(categories)
    countries = dict.fromkeys(
        domain.rpartition("_")[0] for domain in load_dataset("poverty").domains
    )
    assert list(countries) == DHS_COUNTRIES


@pytest.mark.parametrize("fold", "ABCDE")
def test_folds_of_poverty_are_scenarios(archives, fold):
    dataset = load_dataset("poverty")(archives)
    theirs = of_wilds("poverty", archives, fold=fold)
    places = dataset.scenario_splits(f"fold-{fold}")
    for split in SPLITS:
        rows = np.sort(dataset.wilds_rows[places == SPLITS.index(split)])
        np.testing.assert_array_equal(rows, theirs.get_subset(split).indices)
    made = scenarios("wilds", dataset.domains, dataset.letters, f"fold-{fold}", dataset.official)
    assert [scenario.name for scenario in made] == [f"fold-{fold}"]
    test = set(np.unique(dataset.records().domains[places == SPLITS.index("test")]).tolist())
    assert made[0].test == f"{len(test)} domains"
    assert {dataset.domains[d] for d in test}.isdisjoint(made[0].train)
    if fold == "A":
        assert set(dataset.official["fold-A"]["test"]) == {
            f"{country}_{area}"
            for country in ("angola", "cote_d_ivoire", "ethiopia", "mali", "rwanda")
            for area in ("rural", "urban")
        }
        np.testing.assert_array_equal(dataset.published_splits(), places)


@pytest.mark.parametrize(
    ("name", "train", "val", "test"),
    [
        (
            "iwildcam",
            [0, 1, 2, 4, 6, 8, 9, 10],
            "location_003+location_007",
            "location_005+location_011",
        ),
        ("camelyon17", [0, 3, 4], "hospital_1", "hospital_2"),
        ("fmow", list(range(11)), "2013+2014+2015", "2016+2017"),
    ],
)
def test_published_splits_are_one_scenario(archives, name, train, val, test):
    dataset = load_dataset(name)(archives)
    (made,) = scenarios("wilds", dataset.domains, dataset.letters, None, dataset.official)
    assert made.train == tuple(dataset.domains[d] for d in train)
    assert (made.name, made.val, made.test) == ("official", val, test)


def test_fmow_reads_times_of_both_forms(archives, same_times):
    """wilds' own code cannot read the original table's times with pandas 2 or later."""
    with pytest.raises(ValueError, match="doesn't match format"):
        of_wilds("fmow", archives)
    one, other = load_dataset("fmow")(archives), load_dataset("fmow")(same_times)
    assert one.records().paths == other.records().paths
    np.testing.assert_array_equal(one.published_splits(), other.published_splits())


def test_fmow_numbers_images_over_all_rows(archives):
    dataset = load_dataset("fmow")(archives)
    rows = (archives / "fmow_v1.1" / "rgb_metadata.csv").read_text().splitlines()[1:]
    files = [dataset.file(index) for index in range(len(dataset.wilds_rows))]
    assert all(file.is_file() for file in files)
    numbers = [int(file.stem.rpartition("_")[2]) for file in files]
    assert not any(rows[number].startswith("seq") for number in numbers)
    assert max(numbers) > max(dataset.wilds_rows)
    index = int(np.argmax(numbers))
    assert rows[numbers[index]].split(",")[1] == dataset.classes[dataset.records().labels[index]]


def test_iwildcam_takes_grey_images_and_names_of_classes(copy):
    root = copy("iwildcam")
    dataset = load_dataset("iwildcam")(root)
    grey = [
        path
        for path in dataset.records().paths
        if path.endswith("00008b-21bc-11ea-a13a-137349068a90.jpg")
    ]
    image = dataset.read(dataset.records().paths.index(grey[0]), 16)
    assert image.shape == (16, 16, 3)
    assert (image == image[:, :, :1]).all()
    assert dataset.classes[181] == "species 181"
    before = dataset.fingerprint()
    (root / "iwildcam_v2.0" / "categories.csv").unlink()
    bare = load_dataset("iwildcam")(root)
    assert bare.classes[181] == "class_181"
    assert bare.fingerprint() == before


def test_bands_are_resized_with_antialiasing(archives):
    import torch
    import torch.nn.functional as F

    dataset = load_dataset("poverty")(archives)
    with np.load(dataset.file(3)) as arrays:
        bands = torch.from_numpy(arrays["x"])[None]
    for size in (8, 20):
        wanted = F.interpolate(bands, (size, size), mode="bilinear", antialias=True)[0]
        found = dataset.read(3, size)
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, wanted.permute(1, 2, 0).numpy(), atol=4e-3)


# ------------------------------------------------------------------- folders and costs


@EVERY
@pytest.mark.parametrize("layout", ["", "NAME", "NAME_vX"])
def test_layouts(copy, name, layout):
    root = copy(name)
    own = FOLDERS[name]
    folder = root / "x" / layout.replace("NAME_vX", own).replace("NAME", name)
    folder.parent.mkdir(exist_ok=True)
    (root / own).rename(folder)
    for note in folder.glob("RELEASE*"):
        note.unlink()
    dataset = load_dataset(name)(root / "x")
    assert dataset.find() == folder
    assert len(dataset.records().paths) > 100
    assert sorted(path.name for path in (root / "x").iterdir()) == (
        [folder.name] if layout else sorted(p.name for p in folder.iterdir())
    )


@EVERY
def test_another_release_is_refused(copy, name):
    root = copy(name)
    (note,) = (root / FOLDERS[name]).glob("RELEASE*")
    note.rename(note.with_name("RELEASE_v0.9.txt"))
    with refused(DataError, "holds RELEASE_v0.9.txt, another version of"):
        load_dataset(name)(root).records()


@EVERY
def test_contents_decide_the_fingerprint(copy, name):
    root = copy(name)
    dataset = load_dataset(name)(root)
    before, stamp = dataset.fingerprint(), dataset.stamp()
    again = load_dataset(name)(root)
    assert (again.fingerprint(), again.stamp()) == (before, stamp)
    table = root / FOLDERS[name] / dataset.tables[0]
    old, new = {
        "iwildcam": ("train,", "id_val,"),
        "camelyon17": (",0\n", ",1\n"),
        "fmow": (",KEN,", ",DEU,"),
        "poverty": (",2009,", ",2009,1"),
    }[name]
    times = table.stat()
    edit(table, old, new)
    os.utime(table, ns=(times.st_atime_ns, times.st_mtime_ns))  # as tools do that keep times
    changed = load_dataset(name)(root)
    assert changed.records().paths == dataset.records().paths
    assert changed.fingerprint() != before
    assert changed.stamp() != stamp


@EVERY
def test_they_are_decoded_by_processes(archives, name):
    """The pickle for other processes contains no object of wilds."""
    dataset = load_dataset(name)(archives)
    dataset.records()
    sent = pickle.dumps(dataset)
    code = (
        "import pickle, sys; dataset = pickle.loads(sys.stdin.buffer.read()); "
        "dataset.read(1, 16); dataset.content(1); print('wilds' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=sent,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert done.stdout == b"False\n"


def test_stores_hold_colour_images(archives, tmp_path):
    for name in ("iwildcam", "camelyon17", "fmow"):
        dataset = load_dataset(name)(archives)
        store = open_store(dataset, 8, tmp_path / "cache")
        np.testing.assert_array_equal(store.images[5], dataset.read(5, 8))


def test_listing_imports_nothing_heavy(archives):
    """`data list` finds the folders without importing wilds."""
    code = f"""
import sys
from pathlib import Path
from feddg_bench.plugins import load_dataset
root = Path({str(archives)!r})
for name in {tuple(FOLDERS)!r}:
    assert load_dataset(name)(root).find() == root / {FOLDERS!r}[name]
assert not {{'torch', 'wilds', 'pandas'}} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_wilds_is_imported_without_its_look_for_updates(archives, monkeypatch):
    monkeypatch.delenv("OUTDATED_IGNORE", raising=False)
    updaters = {"outdated", "ogb"}
    for module in [n for n in sys.modules if n.partition(".")[0] in {"wilds", *updaters}]:
        monkeypatch.delitem(sys.modules, module)
    before = threading.enumerate()
    load_dataset("camelyon17")(archives).records()
    assert "wilds" in sys.modules
    assert threading.enumerate() == before
    assert not updaters & set(sys.modules)
    assert "OUTDATED_IGNORE" not in os.environ


def test_shared_modules_are_no_data_sets():
    assert "parts" not in names("data set")
    assert set(FOLDERS) <= set(names("data set"))


@EVERY
def test_sums_of_the_published_sizes(name):
    total = {"iwildcam": 203_029, "camelyon17": 455_954, "fmow": 141_696, "poverty": 19_669}[name]
    assert sum(load_dataset(name).split_sizes.values()) == total


@EVERY
def test_the_doctor_compares_with_the_published_sizes(archives, monkeypatch, name):
    """Only a split with another size is reported."""
    dataset = load_dataset(name)(archives)
    sizes = np.bincount(dataset.published_splits(), minlength=5).tolist()
    have, want = sizes[0], dataset.split_sizes["train"]
    right = {**dict(zip(SPLITS, sizes, strict=True)), "train": want}
    monkeypatch.setattr(type(dataset), "split_sizes", right)
    found = examine(dataset)
    (text,) = (f.text for f in found.findings if f.text.startswith("the split"))
    assert text == f"the split train holds {have:,} images instead of {want:,} ({have - want:+,})"
    assert "the number of images of every published split" in found.compared


# ------------------------------------------------------------------- what does not fit

TABLES = [
    ("iwildcam", "datetime", "date", "has no column 'datetime'; expected split, filename, y"),
    (
        "iwildcam",
        "05:01:19.000",
        "05:01:19",
        "datetime is '2013-06-02 05:01:19'; expected a time such as 2013",
    ),
    ("iwildcam", "06-02 05", "02-30 05", "line 3: datetime is '2013-02-30 05:01:19"),
    (
        "iwildcam",
        "train,0,",
        "training,0,",
        "line 4: split is 'training'; expected one of train, id_val",
    ),
    ("iwildcam", ",27,9,11,", ",27,182,11,", "y is '182'; expected a whole number below 182"),
    ("iwildcam", ",0,0,0,", ",0,0,323,", "line 2: location_remapped is '323'; expected a whole"),
    (
        "iwildcam",
        ",0,0,0,",
        ",0,0,0.0,",
        r"line 2: location_remapped is '0\.0'; expected a whole number",
    ),
    (
        "iwildcam",
        ",0,0,0,0,",
        ",0,0,0,1,",
        "no line has 0 in the column sequence_remapped; expected every",
    ),
    (
        "iwildcam",
        "00018b-21bc-11ea-a13a-137349068a90.jpg",
        "00008b-21bc-11ea-a13a-137349068a90.jpg",
        "lists an image twice",
    ),
    ("camelyon17", ",tumor,", ",tumour,", "has no column 'tumor'; expected patient, node"),
    ("camelyon17", "0,004,", "0,4,", "line 2: patient is '4'; expected three digits such as 004"),
    (
        "camelyon17",
        ",0,0,0,0\n",
        ",0,0,5,0\n",
        "line 2: center is '5'; expected a whole number below 5",
    ),
    ("camelyon17", ",0,0,0,0\n", ",2,0,0,0\n", "line 2: tumor is '2'; expected one of 0, 1"),
    (
        "camelyon17",
        ",0,0,0,0\n",
        ",0,50,0,0\n",
        "line 2: slide is '50'; expected a whole number below 50",
    ),
    (
        "camelyon17",
        ",patient,node",
        "patient,node",
        "begins with the column 'patient'; expected a column",
    ),
    ("fmow", "country_code", "country", "has no column 'country_code'"),
    (
        "fmow",
        ",airport,",
        ",aerodrome,",
        "category is 'aerodrome'; expected one of airport, airport_hangar, .* and so on",
    ),
    (
        "fmow",
        "2015-01-12T02:48:56Z",
        "2015-01-12 02:48",
        "timestamp is '2015-01-12 02:48'; expected a time such as 2016",
    ),
    (
        "fmow",
        "2015-01-12T02:48:56Z",
        "2018-01-12T02:48:56Z",
        "line 2: timestamp is '2018.*; expected a time from 2002 to 2017",
    ),
    (
        "fmow",
        "train,airport,",
        "none,airport,",
        "line 2: split is 'none'; expected one of train, val, test, seq",
    ),
    (
        "poverty",
        "wealthpooled",
        "wealth",
        "has no column 'wealthpooled'; expected country, urban, wealthpooled",
    ),
    (
        "poverty",
        "0,angola,",
        "0,atlantis,",
        "line 2: country is 'atlantis'; expected one of angola, .* and so on",
    ),
    ("poverty", ",True\n", ",town\n", "urban is 'town'; expected one of True, False"),
    ("poverty", ",2009,", ",2009,nan", "line 2: wealthpooled is 'nan.*; expected a number"),
]


@pytest.mark.parametrize(("name", "old", "new", "message"), TABLES)
def test_tables_that_do_not_fit(copy, name, old, new, message):
    root = copy(name)
    file = root / FOLDERS[name] / load_dataset(name).tables[0]
    edit(file, old, new)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(name)(root).records()
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_mapping_of_countries_is_checked(copy):
    root = copy("fmow")
    mapping = root / "fmow_v1.1" / "country_code_mapping.csv"
    edit(mapping, "alpha-3", "alpha3")
    with refused(DataError, "country_code_mapping.csv has no column 'alpha-3'"):
        load_dataset("fmow")(root).records()
    mapping.unlink()
    with refused(DataError, "lacks country_code_mapping.csv: get it again"):
        load_dataset("fmow")(root).records()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a CSV file"),
        (b"\xff\xfe\x00", "is not a CSV file"),
        (b"split,y\n", "has no line below"),
    ],
)
def test_files_that_are_no_tables(copy, content, message):
    root = copy("iwildcam")
    file = root / "iwildcam_v2.0" / "metadata.csv"
    file.unlink()
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_dataset("iwildcam")(root).records()


def test_what_only_wilds_trips_over_is_one_sentence(copy, monkeypatch):
    dataset = load_dataset("iwildcam")(copy("iwildcam"))
    monkeypatch.setattr(type(dataset), "check", lambda _: None)
    edit(dataset.folder / "metadata.csv", "05:01:19.000", "05:01:19")
    with refused(DataError, "wilds cannot read iWildCam", "ValueError: time data") as e:
        dataset.records()
    assert "\n" not in str(e.value)


@EVERY
def test_missing_data(tmp_path, name):
    with pytest.raises(DataError, match=rf"was not found .*{FOLDERS[name]}") as caught:
        load_dataset(name)(tmp_path).find()
    assert "--data-root" in str(caught.value)
    assert not list(tmp_path.iterdir())  # wilds would create the folder


@EVERY
def test_missing_and_damaged_images(copy, name):
    dataset = load_dataset(name)(copy(name))
    gone, broken = dataset.file(1), dataset.file(2)
    gone.unlink()
    broken.unlink()
    broken.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"lacks 1 of the [\d,]+ images that \w+\.csv lists") as e:
        dataset.stamp()
    assert str(gone.relative_to(dataset.folder)) in str(e.value)
    with refused(DataError, f"cannot decode the image {gone}", "missing"):
        dataset.read(1, 8)
    with refused(DataError, f"cannot decode the image {broken}"):
        dataset.read(2, 8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": np.zeros((8, 4, 4), np.float32)}, "expected an .npz file with an array x"),
        ({"x": np.zeros((3, 4, 4), np.float32)}, r"holds float32 \[3, 4, 4\]; expected 8 bands"),
        ({"x": np.zeros((8, 4, 4), np.int16)}, r"holds int16 \[8, 4, 4\]; expected 8 bands"),
        ({"x": np.full((8, 4, 4), np.nan, np.float32)}, "not a number, or beyond 65,504"),
        ({"x": np.full((8, 4, 4), 1e5, np.float64)}, "not a number, or beyond 65,504"),
        ({"x": np.array([{}], dtype=object)}, "cannot decode the image"),
    ],
)
def test_bands_that_do_not_fit(copy, arrays, message):
    dataset = load_dataset("poverty")(copy("poverty"))
    file = dataset.file(0)
    file.unlink()
    np.savez(file, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        dataset.read(0, 4)
    assert str(file) in str(caught.value)


def test_without_the_package_there_is_one_sentence(archives, monkeypatch):
    monkeypatch.setitem(sys.modules, "wilds.datasets.camelyon17_dataset", None)
    dataset = load_dataset("camelyon17")(archives)
    assert dataset.find() == archives / "camelyon17_v1.0"
    with refused(DataError, "Camelyon17 is read by the package wilds", "pip install"):
        dataset.records()
