"""Data sets in the form of wilds: as objects and as plugins."""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from feddg_bench import cli
from feddg_bench.common.errors import DataError, PluginError
from feddg_bench.data.dataset import square
from feddg_bench.data.image_store import open_store
from feddg_bench.data.protocols import scenarios
from feddg_bench.data.splits import SPLITS
from feddg_bench.records.store import ResultsStore
from feddg_datasets.shared.wilds import quiet
from feddg_datasets.shared.wilds_adapter import AdaptedWilds, from_wilds, wilds_class
from tests.helpers import refused

with quiet():  # importing wilds requests its newest version from the network
    wilds_dataset = pytest.importorskip(
        "wilds.datasets.wilds_dataset", reason="needs the package wilds"
    )


class Shapes(wilds_dataset.WILDSDataset):
    """72 pictures from three towns; town and weather are metadata; some images are in no split."""

    _dataset_name = "shapes"
    _versions_dict: ClassVar = {"1.0": {"download_url": None, "compressed_size": None}}

    def __init__(
        self, root_dir, *, download=False, kind="picture", fields=("town", "weather", "y")
    ):
        self._version = "1.0"
        self._split_scheme = "official"
        self._data_dir = str(root_dir)
        self.kind = kind
        number = np.arange(72)
        town, weather, y = number % 3, number // 3 % 2, number // 6 % 4
        self._split_dict = {"train": 0, "val": 1, "test": 2, "id_val": 3}
        self._split_names = {name: name for name in self._split_dict}
        split = np.where(town == 1, 1, np.where(town == 2, 2, np.where(number % 9 == 0, 3, 0)))
        split[-3] = -1
        self._split_array = split
        self._y_array = torch.from_numpy(y if kind == "picture" else y * 0.5 - 1)
        self._y_size = 1
        if kind == "picture":
            self._n_classes = 4
        columns = {"town": town, "weather": weather, "y": y}
        self._metadata_fields = list(fields)
        self._metadata_array = torch.from_numpy(np.stack([columns[f] for f in fields], axis=1))
        self._metadata_map = {"town": ["Bad Aibling", "Ulm", "York"], "y": list("ABCD")}
        super().__init__(root_dir, download, "official")

    def get_input(self, idx):
        rng = np.random.default_rng(idx)
        if self.kind == "picture":
            pixels = rng.integers(0, 256, (20, 12), dtype=np.uint8)
            return Image.fromarray(pixels)  # grey, and not square
        if self.kind == "bands":
            return torch.from_numpy(rng.normal(size=(5, 16, 16)))
        return "a text"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "table.csv").write_text("a")
    return tmp_path / "shapes"


def test_pictures(folder):
    shapes = Shapes(folder)
    dataset = from_wilds(shapes, domain="town", group=("weather", "y"))
    assert (dataset.name, dataset.title, dataset.task) == ("shapes", "shapes", "classification")
    assert dataset.domains == ("Bad_Aibling", "Ulm", "York")
    assert dataset.classes == ("A", "B", "C", "D")
    assert dataset.groups == tuple(f"weather {w} {y}" for w in (0, 1) for y in "ABCD")
    assert dataset.metrics == ("accuracy", "worst_group")
    assert dataset.find() == folder

    records, rows = dataset.records(), dataset.wilds_rows
    assert len(rows) == 71
    assert 69 not in rows
    np.testing.assert_array_equal(records.labels, shapes.y_array.numpy()[rows])
    np.testing.assert_array_equal(records.domains, rows % 3)
    np.testing.assert_array_equal(records.groups, rows // 3 % 2 * 4 + rows // 6 % 4)
    assert records.paths[4] == "Ulm/04"
    splits = dataset.published_splits()
    for split in shapes.split_dict:
        mine = rows[splits == SPLITS.index(split)]
        np.testing.assert_array_equal(mine, shapes.get_subset(split).indices)
    (scenario,) = scenarios("wilds", dataset.domains, dataset.letters, None, dataset.official)
    assert (scenario.train, scenario.val, scenario.test) == (("Bad_Aibling",), "Ulm", "York")
    lodo = scenarios("lodo", dataset.domains, dataset.letters, "Ulm")
    assert lodo[0].name == "Bad_Aibling+York-Ulm"

    image = dataset.read(70, 8)
    np.testing.assert_array_equal(image, square(shapes.get_input(71).convert("RGB"), 8))


def test_bands_and_a_regression(folder, tmp_path):
    shapes = Shapes(folder, kind="bands")
    dataset = from_wilds(shapes, domain=["town", "weather"], group="weather", name="s", title="S")
    assert dataset.domains[:2] == ("Bad_Aibling_weather_0", "Bad_Aibling_weather_1")
    assert (dataset.task, dataset.classes) == ("regression", ())
    assert dataset.metrics == ("pearson", "worst_group")
    assert (dataset.channels, dataset.pixels) == (5, "float16")
    records = dataset.records()
    assert records.labels.dtype == np.float32
    assert set(records.labels.tolist()) == {-1.0, -0.5, 0.0, 0.5}
    bands = shapes.get_input(3).numpy().transpose(1, 2, 0).astype(np.float16)
    np.testing.assert_array_equal(dataset.read(3, 16), bands)
    store = open_store(dataset, 8, tmp_path / "cache")
    assert store.images.shape == (71, 8, 8, 5)
    np.testing.assert_array_equal(store.images[3], dataset.read(3, 8))
    assert from_wilds(shapes, domain="town", metrics=("pearson",)).metrics == ("pearson",)


def test_contents_and_readings_decide_the_fingerprint(folder):
    def of(**changed):
        return from_wilds(Shapes(folder), **{"domain": "town", **changed})

    assert of().fingerprint() == of().fingerprint()
    assert of().stamp() == of().stamp()
    other = [of(domain="weather"), of(group="weather"), of(classes=("a", "b", "c", "d"))]
    moved = of()
    moved.opened._split_array[0] = 0
    redrawn = of()
    redrawn.opened.get_input = lambda idx: Image.new("L", (2, 2), idx)
    prints = [dataset.fingerprint() for dataset in (of(), *other, moved, redrawn)]
    assert len(set(prints)) == len(prints)
    before = of().stamp()
    assert redrawn.stamp() != before  # the same files, read differently
    table, times = folder / "table.csv", (folder / "table.csv").stat()
    table.write_text("b")
    os.utime(table, ns=(times.st_atime_ns, times.st_mtime_ns))  # as tools do that keep times
    assert of().stamp() != before


def test_what_does_not_fit_is_refused(folder):
    with refused(PluginError, "shapes has no metadata 'city'; expected one of town"):
        from_wilds(Shapes(folder), domain="city")
    with refused(PluginError, "gives str for image 0; expected a Pillow image"):
        from_wilds(Shapes(folder, kind="text"), domain="town")
    several = Shapes(folder)
    several._y_size = 3
    with refused(PluginError, "has 3 labels an image; expected one"):
        from_wilds(several, domain="town")
    same = Shapes(folder)
    same._metadata_map["town"] = ["a b", "a-b", "c"]
    with refused(PluginError, "domains of shapes have the same name: a b, a-b, c"):
        from_wilds(same, domain="town")
    unknown = Shapes(folder, kind="bands")
    unknown.y_array[7] = torch.nan
    with refused(DataError, "image 7 of shapes has a target that is not a number"):
        from_wilds(unknown, domain="town").records()
    broken = from_wilds(Shapes(folder), domain="town")
    broken.opened.get_input = lambda _: Image.open(folder / "table.csv")
    with refused(DataError, "cannot read image 0 of shapes"):
        broken.read(0, 8)


class CelebA(AdaptedWilds):
    """The example in the module's docstring."""

    name, title = "celeba", "CelebA"
    licence, source = "non-commercial research", "https://mmlab.ie.cuhk.edu.hk"
    domain_fields, group_fields = ("male",), ("male", "y")
    metrics = ("worst_group", "accuracy")

    def open(self, root):
        reader = wilds_class("celebA_dataset", "CelebADataset", self.title)
        return reader(root_dir=str(root), download=False)


def test_celeba_of_wilds_as_a_plugin(tmp_path):
    base = tmp_path / "celebA_v1.0"
    (base / "img_align_celeba").mkdir(parents=True)
    (base / "RELEASE_v1.0.txt").write_text("")
    attributes, partition = ["image_id,Blond_Hair,Male"], ["image_id,partition"]
    for i in range(20):
        name = f"{i + 1:06d}.jpg"
        Image.new("RGB", (18, 22), (i * 12, 0, 0)).save(base / "img_align_celeba" / name)
        attributes.append(f"{name},{1 if i % 2 else -1},{1 if i // 2 % 2 else -1}")
        partition.append(f"{name},{min(i // 6, 2)}")
    (base / "list_attr_celeba.csv").write_text("\n".join(attributes) + "\n")
    (base / "list_eval_partition.csv").write_text("\n".join(partition) + "\n")
    dataset = CelebA(tmp_path)
    records = dataset.records()
    assert dataset.domains == ("male_0", "male_1")
    assert dataset.classes == ("not blond", "blond")
    assert dataset.groups[3] == "male 1 blond"
    assert records.labels.tolist() == [0, 1] * 10
    assert records.groups.tolist() == [0, 1, 2, 3] * 5
    assert np.bincount(dataset.published_splits(), minlength=5).tolist() == [6, 0, 0, 6, 8]
    assert dataset.official["train"] == dataset.domains
    with refused(DataError, "cannot read CelebA in", "FileNotFoundError: The celebA"):
        CelebA(base)


class ShapesPlugin(AdaptedWilds):
    name, title = "shapes", "Shapes"
    licence, source = "none", "nowhere"
    domain_fields, group_fields = ("town",), ("weather",)
    metrics = ("worst_group", "accuracy")

    def open(self, root: Path):
        if not (root / "shapes").is_dir():
            raise FileNotFoundError(f"no folder\n{root}")
        return Shapes(root / "shapes")


@pytest.mark.usefixtures("folder")
def test_a_plugin_runs_through_the_whole_command(tmp_path, monkeypatch, capsys):
    from feddg_bench import plugins as registry

    entry = EntryPoint("shapes", f"{__name__}:ShapesPlugin", "feddg_bench.datasets")
    monkeypatch.setitem(registry._found("data set"), entry.name, [entry])
    for name in ("FEDDG_DATA", "FEDDG_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    (tmp_path / "own.yaml").write_text("datasets: {shapes: {}}\n")
    arguments = (
        "run", "--dataset", "shapes", "--recipe", tmp_path / "own.yaml", "--protocol", "wilds",
        "--data-root", tmp_path, "--results", tmp_path / "runs", "--rounds", "1",
        "--clients", "2", "--per-round", "2", "--workers", "1", "data.image_size=16",
        "backbone.name=small_cnn", "backbone.pretrained=false", "--method", "fedavg",
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["feddg-bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    (found,) = ResultsStore(tmp_path / "runs")
    assert found.metric.name == "worst_group"
    assert found.scenario.test == "York"
    assert found.settings["data"]["names"]["domains"] == ["Bad_Aibling", "Ulm", "York"]
    whole = found.evaluation()["test"]["all"]
    assert whole["worst_group_name"] in ("weather 0", "weather 1")
    capsys.readouterr()

    empty = tmp_path / "empty"
    empty.mkdir()
    missing = tmp_path / "missing"
    for root, words in (
        (empty, f"cannot read Shapes in {empty} (FileNotFoundError: no folder {empty})"),
        (missing, f"there is no folder {missing}: give another --data-root"),
    ):
        command = ["feddg-bench", *map(str, arguments), "--data-root", str(root)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        assert words in capsys.readouterr().err
    assert not missing.exists()
