"""Data sets beyond RGB classes: regression, groups, other channels; from files to tables."""

from __future__ import annotations

import io
import json
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.testing import assert_close

from feddg_bench import plugins as registry
from feddg_bench.common.errors import DataError, PluginError, SettingsError
from feddg_bench.config.schema import AugmentSettings, BackboneSettings
from feddg_bench.data.augment import Augment, to_float
from feddg_bench.data.dataset import DomainDataset, Listing
from feddg_bench.data.federated import synthetic_federation
from feddg_bench.data.image_store import decoded_sizes, open_store
from feddg_bench.data.inspect.contact_sheet import contact_sheet
from feddg_bench.data.inspect.doctor import examine
from feddg_bench.data.partition import Partition
from feddg_bench.data.protocols import Scenario
from feddg_bench.data.splits import read_split_csv, split_by_domain
from feddg_bench.engine.compatibility import check_fit, methods_for
from feddg_bench.engine.evaluation import evaluate
from feddg_bench.models.backbones import BACKBONES, Grey, build_backbone
from feddg_bench.models.suitability import ANY_SIDE, SIDES
from feddg_bench.plugins import names, outline
from feddg_bench.records.store import ResultsStore
from feddg_bench.runs.request import _say_once
from feddg_bench.testing import toy_regression
from feddg_bench.testing.contract import _pool
from tests.helpers import refused

ABLE = [
    "afl",
    "agrrand",
    "agrsum",
    "coral",
    "dann",
    "ditto",
    "erm",
    "fdse",
    "fedavg",
    "fedbn",
    "feddg_ga",
    "feddyn",
    "fedgma",
    "fednova",
    "fedomg",
    "fedopt",
    "fedprox",
    "fedsam",
    "fish",
    "gperxan",
    "groupdro",
    "mixstyle",
    "mixup",
    "mmd",
    "moon",
    "pcgrad",
    "ppdg",
    "qffl",
    "ridge",
    "scaffold",
    "vrex",
]
BARE = dict.fromkeys(("brightness", "contrast", "saturation", "hue", "grayscale"), 0.0)


class Landsat(DomainDataset):
    """Five-band images of three countries, whose third band encodes the target."""

    name = "landsat"
    title = "Landsat"
    domains = ("angola", "benin", "ghana")
    letters: ClassVar[Mapping[str, str]] = {"angola": "a", "benin": "b", "ghana": "g"}
    classes = ()
    licence = "none"
    source = "made by a test"
    task = "regression"
    metrics = ("worst_group", "pearson")
    groups = ("urban", "rural")
    channels = 5
    pixels = "float16"
    bands = (2, 1, 0)
    default_recipe = "landsat.yaml"

    each = 40

    def scan(self) -> Listing:
        count = self.each * len(Landsat.domains)
        rng = np.random.default_rng(0)
        return Listing(
            tuple(f"{self.domains[i // self.each]}/{i:03d}.npz" for i in range(count)),
            rng.standard_normal(count).astype(np.float32),
            np.arange(count) // self.each,
            np.where(np.arange(count) % 10 == 9, -1, np.arange(count) % 2),
        )

    def fingerprint(self) -> str:
        return "1a2b"

    def stamp(self) -> str:
        return "3c4d"

    def read(self, index: int, size: int) -> np.ndarray:
        rng = np.random.default_rng(index)
        image = rng.standard_normal((size, size, self.channels))
        image[..., 2] += 3 * self.records().labels[index]
        return image.astype(np.float16)


# ---------------------------------------------------------------------------------- data sets


def test_targets_are_no_classes():
    dataset = Landsat()
    assert dataset.count(dataset.records()).tolist() == [[40], [40], [40]]


def test_images_of_a_domain_are_counted():
    class Published(Landsat):
        counts: ClassVar = {"angola": (40,), "benin": (41,), "ghana": (40,)}

    with refused(DataError, "benin holds 40 images instead of 41 (-1)"):
        Published().records()
    found = examine(Published())
    assert [f.text for f in found.findings] == ["benin holds 40 images instead of 41 (-1)"]
    assert found.images == 120


def test_a_domain_without_an_image_is_found():
    class Emptier(Landsat):
        domains = (*Landsat.domains, "mali")

    with refused(DataError, "no image of the domain mali"):
        Emptier().records()


def test_a_target_that_is_no_number_is_found():
    class Broken(Landsat):
        def scan(self):
            records = super().scan()
            records.labels[7] = np.nan
            return records

    with refused(DataError, "has the target nan for angola/007.npz"):
        Broken().records()


def test_equal_images_with_different_targets_are_found():
    class Twice(Landsat):
        def read(self, index, size):
            return super().read(0 if index == 5 else index, size)

    found = examine(Twice())
    assert [f.text for f in found.findings] == [
        "1 image under several names with different targets: angola/000.npz = angola/005.npz"
    ]


def test_a_contact_sheet_of_bands():
    dataset = Landsat()
    picture = Image.open(io.BytesIO(contact_sheet(dataset, 24)))
    assert picture.size == (96 + 6 * 28, 20 + 3 * 28 + 20)
    first = np.flatnonzero(dataset.records().labels == dataset.records().labels[:40].min())[0]
    image = dataset.read(int(first), 24).astype(np.float32)[..., [2, 1, 0]]
    low, high = image.min(axis=(0, 1)), image.max(axis=(0, 1))
    expected = np.rint((image - low) / (high - low) * 255)
    assert np.array_equal(np.asarray(picture)[20:44, 96:120], expected)


def test_a_contact_sheet_of_grey_images():
    class Grey(Landsat):
        channels = 1

        def read(self, index, size):
            return np.full((size, size, 1), index, dtype=np.float16)

    assert contact_sheet(Grey(), 16).startswith(b"\x89PNG")


class Crops(Landsat):
    """The same with classes and RGB bytes."""

    classes = ("wheat", "rice")
    task = "classification"
    metrics = ("accuracy",)
    groups = ()
    channels = 3
    pixels = "uint8"
    wrong: ClassVar[Mapping[str, tuple[int, int]]] = {}

    def scan(self):
        found = super().scan()
        labels = np.arange(len(found.paths)) % 2
        for kind, (index, value) in self.wrong.items():
            {"label": labels, "domain": found.domains}[kind][index] = value
        return Listing(found.paths, labels, found.domains)

    def read(self, index, size):
        return np.full((size, size, 3), index, dtype=np.uint8)


@pytest.mark.parametrize("look", [Crops.records, Crops.records_as_found, examine])
@pytest.mark.parametrize(
    ("kind", "value", "names"),
    [("label", 2, 2), ("label", -1, 2), ("domain", 3, 3), ("domain", -1, 3)],
)
def test_what_is_no_position_is_refused(monkeypatch, look, kind, value, names):
    monkeypatch.setattr(Crops, "wrong", {kind: (7, value)})
    said = f"gave angola/007.npz the {kind} {value}; expected a position among {names}, from 0 to"
    with refused(PluginError, said):
        look(Crops())


def test_a_listing_that_does_not_fit_together_is_refused():
    class Short(Crops):
        def scan(self):
            found = super().scan()
            return Listing(found.paths[:-1], found.labels, found.domains)

    with refused(PluginError, "119 paths, 120 labels and 120 domains"):
        Short().records()


def test_images_that_cannot_be_listed_are_told_with_the_place():
    class Lost(Crops):
        def scan(self):
            return Path("nowhere/labels.csv").read_text()

    with refused(DataError, "Landsat cannot be listed: FileNotFoundError", "(test_tasks.py, line"):
        Lost().records()


class Fragile(Crops):
    """Raises an error at one image."""

    error: Exception = FileNotFoundError(2, "No such file or directory", "007.npz")

    def read(self, index, size):
        if index == 7:
            raise self.error
        return super().read(index, size)


ERRORS = [Fragile.error, OSError("the archive is gone"), KeyError("bands")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_image_that_cannot_be_read_is_named_with_its_data_set(monkeypatch, tmp_path, error):
    monkeypatch.setattr(Fragile, "error", error)
    said = "image angola/007.npz of Landsat", type(error).__name__, "(test_tasks.py, line"
    with refused(DataError, *said) as caught:
        open_store(Fragile(), 8, tmp_path)
    assert "make room" not in str(caught.value)
    (finding,) = [f for f in examine(Fragile()).findings if f.kind == "unreadable"]
    assert [word for word in said if word not in finding.text] == []


def test_an_image_that_a_contact_sheet_cannot_read():
    class First(Fragile):
        def read(self, index, size):
            return super().read(index + 7, size)

    with refused(DataError, "image angola/000.npz of Landsat"):
        contact_sheet(First(), 16)


def test_contents_that_cannot_be_read(tmp_path):
    class Unhashed(Crops):
        def fingerprint(self):
            raise OSError("the archive is gone")

    with refused(DataError, "contents of Landsat: OSError: the archive is gone"):
        open_store(Unhashed(), 8, tmp_path)


# -------------------------------------------------------------------------------- the store


def test_a_store_keeps_channels_and_halves(tmp_path):
    dataset = Landsat()
    store = open_store(dataset, 8, tmp_path)
    assert (store.images.shape, store.images.dtype) == ((120, 8, 8, 5), np.float16)
    assert np.array_equal(store.images[31], dataset.read(31, 8))
    (path,) = (tmp_path / "stores").iterdir()
    assert path.name == "landsat-v1-1a2b-8px-r1.5xfloat16"
    assert path.stat().st_size == 120 * 8 * 8 * 5 * 2 + 8  # and a checksum
    assert decoded_sizes(Landsat, tmp_path) == [8]
    before = path.stat().st_mtime_ns
    open_store(dataset, 8, tmp_path)
    assert path.stat().st_mtime_ns == before


def test_an_image_of_another_type_is_refused(tmp_path):
    class Wrong(Landsat):
        def read(self, index, size):
            return super().read(index, size).astype(np.float32)

    with refused(PluginError, "gave float32 [8, 8, 5]", "expected float16 [8"):
        open_store(Wrong(), 8, tmp_path)


# --------------------------------------------------------------------- splits and partitions


def test_a_regression_is_split_by_domain_alone():
    records = Landsat().scan()
    splits = split_by_domain(
        Scenario("ab-g", "lodo", ("angola", "benin"), None, "ghana"),
        records.domains,
        records.labels,
        Landsat.domains,
        id_val_fraction=0.25,
        id_test_fraction=0.1,
        seed=0,
    )
    sizes = {split: len(index) for split, index in splits.items()}
    assert sizes == {"train": 2 * 27, "id_val": 2 * 9, "id_test": 2 * 4, "test": 40}
    assert np.bincount(records.domains[splits["id_val"]]).tolist() == [9, 9]


def test_a_split_file_of_a_regression(tmp_path):
    records = Landsat().scan()
    path = tmp_path / "split.csv"
    roles = {"angola": "train", "benin": "val", "ghana": "test"}
    rows = [f"{roles[p.split('/')[0]]},{p.split('/')[0]},{p},0.5" for p in records.paths]
    path.write_text("\n".join(["split,domain,path,y", *rows]))
    scenario = Scenario("a-b-g", "ltdo", ("angola",), "benin", "ghana")
    splits = read_split_csv(path, scenario, Landsat())
    assert {split: len(index) for split, index in splits.items()} == {
        "train": 40,
        "val": 40,
        "test": 40,
    }


def test_a_partition_says_only_what_a_client_holds():
    partition = Partition(("c0", "c1"), (np.array([0, 2, 3]), np.array([1])), {})
    domains, labels = np.array([0, 4000, 0, 9]), np.array([61, 5, 61, 7])
    names = [f"writer_{i}" for i in range(5000)]
    clients = partition.as_json(domains, labels, names)["clients"]
    assert clients == [
        {
            "id": "c0",
            "domains": {"writer_0": 2, "writer_9": 1},
            "labels": {"7": 1, "61": 2},
            "indices": [0, 2, 3],
        },
        {"id": "c1", "domains": {"writer_4000": 1}, "labels": {"5": 1}, "indices": [1]},
    ]
    targets = partition.as_json(domains, labels.astype(np.float32), names)["clients"]
    assert [set(client) for client in targets] == [{"id", "domains", "indices"}] * 2


# --------------------------------------------------------------------------------- images


def test_normalised_values_are_kept():
    images = torch.tensor([-2.5, 0.0, 300.0, 1.5], dtype=torch.float16).view(1, 2, 2, 1)
    assert to_float(images).flatten().tolist() == [-2.5, 0.0, 300.0, 1.5]
    bytes_ = torch.full((1, 2, 2, 8), 51, dtype=torch.uint8)
    assert torch.equal(to_float(bytes_), torch.full((1, 8, 2, 2), 0.2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
@pytest.mark.parametrize("channels", [1, 2, 8])
def test_crop_and_flip_for_any_channels(channels, dtype):
    """Every channel is cropped and mirrored like those of an RGB image."""
    generator = torch.Generator().manual_seed(0)
    grey = torch.randint(0, 256, (4, 12, 12, 1), generator=generator).to(torch.uint8)
    augment = Augment(AugmentSettings(**BARE, crop_scale=(0.3, 0.8)))
    expected = augment(grey.expand(-1, -1, -1, 3), torch.Generator().manual_seed(7))
    images = grey.expand(-1, -1, -1, channels).contiguous().to(dtype)
    found = augment(images, torch.Generator().manual_seed(7))
    assert found.shape == (4, channels, 12, 12)
    if dtype == torch.uint8:
        assert_close(found, expected[:, :1].expand_as(found), rtol=0, atol=0)
    else:  # resized in float32, not in bytes, and not divided
        assert_close(found / 255, expected[:, :1].expand_as(found), rtol=0, atol=1.01 / 255)


def test_floats_are_cropped_exactly_as_torch_does():
    images = torch.randn(1, 6, 6, 2).to(torch.float16)
    augment = Augment(AugmentSettings(**BARE, crop_scale=(0.2, 0.2), crop_ratio=(1, 1), flip=0))
    found = augment(images, torch.Generator().manual_seed(0))
    crops = [
        F.interpolate(
            images[:, y : y + 3, x : x + 3].permute(0, 3, 1, 2).float(), size=6, mode="bilinear"
        )
        for y in range(4)
        for x in range(4)
    ]
    assert any(torch.equal(found, crop) for crop in crops)


# ------------------------------------------------------------------------------- backbones


def first_convolution(net):
    return next(m for m in net.modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize("name", sorted({*BACKBONES} - {"features"}))
@pytest.mark.parametrize("channels", [1, 8])
def test_every_backbone_reads_other_channels(name, channels):
    settings = BackboneSettings(name=name, pretrained=False)
    smallest, largest = SIDES.get(name, ANY_SIDE)
    side = smallest if largest else max(32, smallest)
    backbone = build_backbone(settings, channels).eval()
    assert first_convolution(backbone).in_channels == channels
    images = torch.randn(2, channels, side, side)
    assert backbone(images).shape == (2, backbone.num_features)
    assert torch.equal(backbone.normalise(images), images)
    for i in range(channels):
        other = images.clone()
        other[:, i] += 1
        assert not torch.equal(backbone(other), backbone(images)), f"channel {i} is not read"


@pytest.mark.parametrize("padding", ["torch", "tf"])
def test_pretrained_channels_are_copied_in_turn(tmp_path, padding):
    from safetensors.torch import save_file

    net = BACKBONES["mobilenet_v2"].features()
    path = tmp_path / "weights.safetensors"
    save_file(net.state_dict(), path)
    settings = BackboneSettings(name="mobilenet_v2", weights=str(path), padding=padding)
    rgb, wide = build_backbone(settings), build_backbone(settings, 8)
    kernel, wider = first_convolution(rgb).weight, first_convolution(wide).weight
    for i in range(8):
        assert torch.equal(wider[:, i], kernel[:, i % 3])
    others = {n: t for n, t in rgb.state_dict().items() if not torch.equal(t, kernel)}
    assert_close({n: wide.state_dict()[n] for n in others}, others, rtol=0, atol=0)


def test_rgb_backbones_are_as_they_were():
    settings = BackboneSettings(name="lenet", pretrained=False)
    assert any(isinstance(m, Grey) for m in build_backbone(settings).modules())
    imagenet = build_backbone(BackboneSettings(name="resnet18", pretrained=False))
    assert imagenet.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    floats = build_backbone(BackboneSettings(name="resnet18", pretrained=False), 3, rgb=False)
    assert floats.mean.flatten().tolist() == [0, 0, 0]


def test_a_normalisation_of_rgb_is_refused_for_other_channels():
    settings = BackboneSettings(name="resnet18", pretrained=False, normalisation="imagenet")
    with refused(SettingsError, "set backbone.normalisation=none"):
        build_backbone(settings, 8)


# ----------------------------------------------------------------------- methods by task


def test_the_methods_that_can_learn_a_number():
    assert methods_for("regression") == ABLE
    assert methods_for("classification") == list(names("method"))


@pytest.mark.parametrize("name", sorted(set(names("method")) - set(ABLE)))
def test_other_methods_refuse_a_regression(name, start_run):
    with pytest.raises(
        SettingsError,
        match=rf"^{name} cannot learn a regression such as digits4: choose one of afl, .*ppdg",
    ):
        start_run(name, federation=toy_regression())


def test_gaps_of_accuracy_are_refused(start_run):
    with refused(SettingsError, "set hyper.metric=loss"):
        start_run("feddg_ga", {"hyper": {"variant": "official"}}, federation=toy_regression())


@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [
        ("fedavg", {}, "set augment.brightness=0 augment.contrast=0 augment.saturation=0 "),
        ("fedavg", {"augment": {**BARE, "hue": 0.1}}, "set augment.hue=0$"),
        ("ccst", {"augment": BARE}, "ccst changes the style of RGB images, but images of digits4"),
        ("pardon", {"augment": BARE}, "5 channels of float16, not 3 of uint8"),
        ("fedccrl", {"augment": BARE}, "choose a method that leaves images as they are"),
        (
            "fedavg",
            {"augment": BARE, "backbone": {"normalisation": "half"}},
            "set backbone.normalisation=none",
        ),
    ],
)
def test_what_is_for_rgb_is_refused(toy_settings, name, layer, words):
    class Classes(Landsat):
        task = "classification"

    with pytest.raises(SettingsError, match=words):
        check_fit(toy_settings({"method": name}, layer), outline(name), Classes())


def test_five_bands_are_trained_and_measured(start_run, toy_federation):
    images = toy_federation.images.astype(np.float32)[..., [0, 1, 2, 0, 1]] / 255 - 0.4
    federation = replace(
        toy_federation, images=images.astype(np.float16), channels=5, pixels="float16"
    )
    run = start_run("fedavg", {"augment": BARE}, federation=federation)
    first, *_, last = run.rounds(6)[1:]
    assert last.evaluation["id_val"]["dark"]["loss"] < first.evaluation["id_val"]["dark"]["loss"]


def test_a_synthetic_federation_is_like_its_data_set(start_run):
    federation = synthetic_federation(3, 8, 16, 0, like=Landsat)
    assert federation.images.shape == (24, 16, 16, 5)
    assert federation.labels.dtype == np.float32
    run = start_run("fedavg", {"augment": BARE}, federation=federation)
    assert run.rounds(1)[-1].ledger.means()["loss"] > 0


# ------------------------------------------------------------------------------ evaluation


def test_a_regression_is_measured(start_run):
    """Compare with one forward pass; Pearson is no mean, so the whole split is measured, too."""
    federation = toy_regression()
    whole = np.concatenate([index for _, _, index in federation.evaluation])
    parts = [("test", domain, index) for _, domain, index in federation.evaluation]
    federation = replace(federation, evaluation=tuple(parts))
    run = start_run("fedavg", federation=federation)
    found = evaluate(run.executor, federation, run.server.weights, chunk=3)
    assert list(found["test"]) == ["dark", "bright", "all"]
    with torch.no_grad():
        outputs = run.method.eval()(to_float(torch.from_numpy(federation.images[whole])))[:, 0]
    truth = torch.from_numpy(federation.labels[whole])
    every = found["test"]["all"]
    assert every["images"] == len(whole)
    assert every["loss"] == pytest.approx(float(((outputs - truth) ** 2).mean()), rel=1e-5)
    assert every["pearson"] == pytest.approx(np.corrcoef(outputs, truth)[0, 1], abs=1e-5)
    each = {
        name: np.corrcoef(*(v[federation.groups[whole] == g] for v in (outputs, truth)))[0, 1]
        for g, name in enumerate(("even", "odd"))
    }
    worst = min(each, key=each.get)
    assert every["worst_group"] == pytest.approx(each[worst], abs=1e-5)
    assert every["worst_group_name"] == worst


def test_accuracy_alone_needs_no_whole(start_run, toy_federation):
    run = start_run("fedavg")
    assert "all" not in run.rounds(1)[-1].evaluation["test"]
    federation = replace(toy_federation, metrics=("macro_f1", "accuracy"))
    found = start_run("fedavg", federation=federation).rounds(1)[-1].evaluation
    assert found["test"]["all"] == found["test"]["bright"]


@pytest.mark.nightly
def test_metrics_do_not_depend_on_the_number_of_workers(start_run):
    found = []
    for executor in (None, _pool()):
        run = start_run("fedavg", federation=toy_regression(), executor=executor)
        found.append(evaluate(run.executor, run.federation, run.server.weights, chunk=3))
    assert found[0] == found[1]


# ------------------------------------------------------------------- the command, end to end

RECIPE = """
description: tiny
datasets:
  landsat:
    data: {image_size: 16, id_val_fraction: 0.2, id_test_fraction: 0}
    backbone: {name: small_cnn, pretrained: false}
    partition: {clients: 4}
    federation: {rounds: 2, per_round: null}
    train: {lr: 0.005, batch_size: 8}
    augment: {brightness: 0, contrast: 0, saturation: 0, hue: 0, grayscale: 0}
"""


@pytest.fixture
def feddg(feddg, monkeypatch, tmp_path):
    """Return the command with the data set ``landsat`` registered."""
    module = types.ModuleType("feddg_datasets.landsat")
    module.Landsat = Landsat
    monkeypatch.setattr(Landsat, "__module__", module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = EntryPoint("landsat", module.__name__, "feddg_bench.datasets")
    monkeypatch.setitem(registry._found("data set"), entry.name, [entry])
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    Path("landsat.yaml").write_text(RECIPE)
    return feddg


LANDSAT = ("run", "--dataset", "landsat", "--protocol", "ltdo", "--workers", "1")


def test_a_regression_through_the_command(feddg):
    code, out, err = feddg(*LANDSAT, "--scenario", "a-b-g", "--seeds", "0,1")
    assert code == 0, err
    assert re.search(r"round 2/2, \d+ s left  val -?\d\.\d\d test -?\d\.\d\d", err)
    assert out.splitlines()[0].strip() == "FedAvg on Landsat, leave two domains out: worst group"
    record, *_ = ResultsStore(Path("runs"))
    assert (record.task, record.metric.name) == ("regression", "worst_group")
    test = record.evaluation()["test"]
    assert set(test) == {"ghana", "all"}
    assert set(test["all"]) == {
        "pearson",
        "loss",
        "images",
        "worst_group",
        "worst_group_name",
    }
    assert test["all"]["images"] == 40
    assert set(record.data.images["test"]) == {"ghana"}
    assert re.search(r"^ a-b-g \(benin → ghana\) .* -?0\.\d{3} ± 0\.\d{3} *$", out, re.MULTILINE)

    code, out, err = feddg("tables", "--out", "tables", "--select", "best_by_val")
    assert code == 0, err
    (notes,) = Path("tables").glob("landsat*.notes.md")
    assert "round of the best worst group on the validation domain" in notes.read_text()
    table = notes.with_name(notes.name.replace(".notes", "")).read_text()
    assert re.search(r"\|FedAvg\|0\.\d{3} ± 0\.\d{3}\|", table)


def test_a_command_that_names_an_unfit_method_trains_nothing(feddg):
    code, _, err = feddg(*LANDSAT, "--method", "fedavg,fpl", "--scenario", "a-b-g")
    assert code == 2
    assert sum(not line.startswith(("planning ", "loading ")) for line in err.splitlines()) == 1
    assert "fpl cannot learn a regression such as landsat: choose one of afl, agrrand" in err
    assert not Path("runs").exists()


def test_all_means_the_methods_that_suit_the_data_set(feddg, caplog):
    _say_once.cache_clear()
    command = (*LANDSAT, "--method", "all", "--scenario", "a-b-g", "lr=0.01", "--dry-run", "--json")
    code, out, err = feddg(*command)
    assert code == 0, err
    assert sorted({run["settings"]["method"] for run in json.loads(out)}) == ABLE
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"left out: {name} cannot learn a regression such as landsat"
        for name in sorted(set(names("method")) - set(ABLE))
    ] + [
        "scenario a-b-g trains on a single domain, which is not domain generalisation from "
        "several: use --protocol lodo"
    ]


def test_colours_of_bands_are_refused_before_anything_is_decoded(feddg, tmp_path):
    code, _, err = feddg(*LANDSAT, "--scenario", "a-b-g", "augment.hue=0.1")
    assert code == 2
    assert err.endswith("5 channels of float16, not 3 of uint8: set augment.hue=0\n")
    assert not (tmp_path / "cache").exists()


def test_a_card_and_a_profile_of_a_regression(feddg):
    code, out, err = feddg("methods", "show", "fedprox", "--dataset", "landsat", "--json")
    assert code == 0, err
    assert json.loads(out)["backbone"] == "small_cnn, no classes"
    arguments = ("--dataset", "landsat", "--synthetic", "8", "--rounds", "1", "--json")
    code, out, err = feddg("profile", *arguments)
    assert code == 0, err
    assert json.loads(out)["images"] == 32


# ------------------------------------------------------------------- data sets of third parties


def test_codes_that_two_domains_share_are_refused_when_a_data_set_is_opened(feddg, monkeypatch):
    for letters in ({**Landsat.letters, "ghana": "a"}, {"angola": "a", "benin": "b"}):
        monkeypatch.setattr(Landsat, "letters", letters)
        for command in (LANDSAT, ("data", "check", "landsat")):
            code, _, err = feddg(*command)
            assert code == 2
            assert "the data set landsat has the code" in err
            assert "fix `letters`" in err
            assert err.count("\n") == 1


def test_a_list_names_what_is_wrong_with_one_data_set_and_shows_the_others(feddg, monkeypatch):
    def scan(_):
        return Listing(("angola/0",), np.zeros(1, dtype=np.float32), np.array([3]))

    monkeypatch.setattr(Landsat, "scan", scan)
    code, out, err = feddg("data", "list", "--json")
    assert code == 0
    assert err.startswith("feddg-bench: the data set landsat is left out: Landsat.scan gave")
    assert err.count("\n") == 1
    rows = {row["name"] for row in json.loads(out)}
    assert "digits4" in rows
    assert "landsat" not in rows
    code, _, err = feddg(*LANDSAT)
    assert code == 2
    assert "the domain 3; expected a position among 3, from 0 to 2" in err
