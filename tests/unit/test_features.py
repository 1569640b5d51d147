"""Features of a frozen encoder: encoding, resuming, import, runs, kept models and refusals."""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors

import feddg_bench as fb
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.titles import network_title
from feddg_bench.config.keys import canonical_settings
from feddg_bench.config.schema import (
    AugmentSettings,
    DataSettings,
    FeatureSettings,
    RunSettings,
    TrainSettings,
)
from feddg_bench.data.client_images import ClientImages, ImageBank
from feddg_bench.data.feature_store import Encoding, open_features
from feddg_bench.data.federated import synthetic_federation
from feddg_bench.engine.encoders import build_encoder, encoder_digest
from feddg_bench.models.backbones import BACKBONES, Adapter, CosineClassifier
from feddg_bench.plugins import make_dataset
from feddg_bench.runs.encode import Probe, encode_dataset, import_features, probe
from tests.helpers import bitwise, refused

SIDE = 16
GIVEN = {
    "image_size": SIDE,
    "backbone.name": "features",
    "features.encoder": "small_cnn",
    "rounds": 2,
    "clients": 4,
    "per_round": 2,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with random weights of the encoder."""
    file = tmp_path_factory.mktemp("weights") / "small.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_tensors(BACKBONES["small_cnn"].features().state_dict(), file)
    return file


def encoding(views: int = 1, encoder: str = "small_cnn") -> Encoding:
    features = FeatureSettings(encoder=encoder, views=views)
    return Encoding(features, DataSettings(image_size=SIDE), AugmentSettings())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Path:
    """Return a cache folder with the features of digits4."""
    folder = tmp_path_factory.mktemp("cache")
    encode_dataset(
        make_dataset("digits4"), encoding(), build_encoder("small_cnn", SIDE, weights), folder
    )
    return folder


def test_features_are_those_of_the_images_in_the_order_of_the_listing(
    home: Path, weights: Path
) -> None:
    dataset = make_dataset("digits4")
    store = open_features(encoding().find(dataset, home), 1797)
    found = load_file(store.path)
    assert bytes(found["paths"]).decode().split("\n") == [*dataset.records().paths]
    encoder = build_encoder("small_cnn", SIDE, weights)
    assert store.weights == encoder_digest(encoder)
    for index in (0, 500, 1796):
        pixels = torch.tensor(dataset.read(index, SIDE)).permute(2, 0, 1)[None] / 255
        with torch.inference_mode():
            wanted = encoder(pixels)[0].numpy()
        np.testing.assert_allclose(found["features"][index, 0], wanted, rtol=2e-3, atol=1e-3)


def test_encoding_that_was_killed_resumes_to_the_same_file(
    home: Path, weights: Path, tmp_path: Path
) -> None:
    dataset, encoder = make_dataset("digits4"), build_encoder("small_cnn", SIDE, weights)

    def stop(done: int, total: int) -> None:
        starts.append(done)
        if stopping and done > total // 2:
            raise KeyboardInterrupt

    starts: list[int] = []
    stopping = True
    with pytest.raises(KeyboardInterrupt):
        encode_dataset(dataset, encoding(), encoder, tmp_path, progress=stop)
    with refused(SettingsError, "data encode digits4 --encoder small_cnn --size 16"):
        encoding().find(dataset, tmp_path)
    (part,) = (tmp_path / "features").glob("*.unfinished")
    part.write_bytes(part.read_bytes() + b"half a row")
    starts.clear()
    stopping = False
    resumed = encode_dataset(dataset, encoding(), encoder, tmp_path, progress=stop)
    assert starts[0] == 1024 + 128  # 1,024 images are not done again; the piece after them was cut
    assert resumed.read_bytes() == encoding().find(dataset, home).read_bytes()
    assert [path.name for path in resumed.parent.iterdir()] == [resumed.name]


def test_further_views_are_augmented_and_training_draws_them(weights: Path, tmp_path: Path) -> None:
    dataset, encoder = make_dataset("digits4"), build_encoder("small_cnn", SIDE, weights)
    store = open_features(encode_dataset(dataset, encoding(3), encoder, tmp_path), 1797)
    views = load_file(store.path)["features"]
    assert views.shape == (1797, 3, 128)
    assert (views[:, 0] != views[:, 1]).any(1).all()
    blank = synthetic_federation(1, 1797, 1, 10)
    bank = ImageBank(store.replacing_images(blank), torch.device("cpu"))
    client = ClientImages(bank, np.arange(0, 1797, 7), AugmentSettings(), TrainSettings())
    draws = {"companions": None, "generator": torch.Generator().manual_seed(1)}
    clean = [x for x, _ in client.batches(shuffle=False, augment=False, views=1, **draws)]
    bitwise(torch.cat(clean)[:, :, 0, 0], torch.from_numpy(views[::7, 0]).float())
    drawn = [x for x, _ in client.batches(shuffle=False, augment=True, views=1, **draws)]
    kinds = [
        int(np.flatnonzero((view == row).all(1))[0])
        for view, row in zip(views[::7], torch.cat(drawn)[:, :, 0, 0].numpy(), strict=True)
    ]
    assert np.bincount(kinds, minlength=3).min() > 60  # of 257


def test_imported_features_are_put_into_the_order_of_the_listing(tmp_path: Path) -> None:
    dataset = make_dataset("digits4")
    paths = dataset.records().paths
    order = np.random.default_rng(0).permutation(len(paths))
    rows = np.arange(len(paths), dtype=np.float32)[order, None] / 100 * [1, -1]
    text = np.eye(10, 2, dtype=np.float32)
    lines = "\n".join(paths[i] for i in order).encode()
    tensors = {
        "features": rows.astype(np.float32),
        "paths": np.frombuffer(lines, np.uint8),
        "text": text,
        "logit_scale": np.array(50.0, np.float32),
    }
    file = tmp_path / "mine.safetensors"
    save_file(tensors, file)
    mine = encoding(encoder="mine")
    path = import_features(file, dataset, mine, tmp_path)
    assert mine.find(dataset, tmp_path) == path
    store = open_features(path, len(paths))
    assert store.features.shape == (1797, 1, 2)
    assert (store.logit_scale, store.encoder) == (50.0, "mine")
    np.testing.assert_array_equal(store.text, text)
    wanted = np.arange(len(paths)).astype(np.float32) / 100
    found = load_file(path)["features"][:, 0]
    np.testing.assert_array_equal(found, (wanted[:, None] * [1, -1]).astype(np.float16))
    for changed, words in (
        ({"paths": np.frombuffer(lines[:-3], np.uint8)}, "lacks 1 of Digits4's 1,797"),
        ({"features": rows[:5]}, "holds features [5, 1, 2] of 1797 paths"),
        ({"text": text[:3]}, "holds text features [3, 2]: expected [10, 2]"),
        ({"features": rows * np.nan}, "of Digits4 are not finite numbers of 16 bits: scale them"),
    ):
        save_file({**tensors, **changed}, file)
        with refused(DataError, words):
            import_features(file, dataset, mine, tmp_path)
    file.write_bytes(b"no safetensors")
    with refused(DataError, "cannot read the features"):
        import_features(file, dataset, mine, tmp_path)
    file.unlink()
    with refused(DataError, "there is no file"):
        import_features(file, dataset, mine, tmp_path)


def test_a_run_on_features_keeps_their_fingerprint_and_its_model_predicts_images(
    home: Path, weights: Path, tmp_path: Path
) -> None:
    (record,) = fb.run(
        "fedavg",
        scenario="ip-o-c",
        settings={**GIVEN, "backbone.hidden": 8},
        results=tmp_path,
        cache_dir=home,
        keep="last",
    )
    store = open_features(encoding().find(make_dataset("digits4"), home), 1797)
    data = record.data
    assert (data.fingerprint, data.encoder) == (store.fingerprint, store.weights)
    assert record.settings["features"] == {"encoder": "small_cnn"}
    model = fb.load_model(record.key, tmp_path, encoder=weights)
    dataset = make_dataset("digits4")
    images = [Image.fromarray(dataset.read(index, SIDE)) for index in range(3)]
    features = load_file(store.path)["features"][:3, 0].astype(np.float32)
    known = model.predict(torch.from_numpy(features)[:, :, None, None])
    torch.testing.assert_close(
        model.predict(images).probabilities, known.probabilities, rtol=1e-3, atol=1e-3
    )
    with refused(SettingsError, "has no pretrained weights"):
        fb.load_model(record.key, tmp_path).predict(images)
    other = tmp_path / "other.safetensors"
    save_tensors(BACKBONES["small_cnn"].features().state_dict(), other)
    with refused(SettingsError, "has other weights here"):
        fb.load_model(record.key, tmp_path, encoder=other).predict(images)


def test_runs_on_features_decode_no_image(feddg: Any, home: Path, tmp_path: Path) -> None:
    sweep = {
        "program": "feddg-bench",
        "method": "grid",
        "parameters": {name: {"value": value} for name, value in GIVEN.items()},
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    feddg("sweep", "sweep.yaml", "scenario=ip-o-c", "--cache-dir", home, "--workers", "1")
    assert len(list(fb.load_records(tmp_path / "runs")))
    assert not (home / "stores").exists()


def test_an_encoder_that_is_given_goes_with_any_recipe(
    feddg: Any, home: Path, weights: Path
) -> None:
    given = ("--recipe", "quick", "--size", str(SIDE), "--weights", weights, "--cache-dir", home)
    said = feddg("data", "encode", "digits4", "--encoder", "small_cnn", *given)
    (there,) = (home / "features").glob("*.safetensors")
    assert str(there) in (said.out + said.err).replace("\n", "")  # that of all tests


def test_settings_without_features_have_the_key_they_had() -> None:
    canonical = canonical_settings(RunSettings(method="fedavg", scenario="ip-o-c"))
    assert "features" not in canonical
    assert {"hidden", "adapter", "classifier", "trainable"} & {*canonical["backbone"]} == set()


@pytest.mark.parametrize(
    ("method", "changed", "words"),
    [
        ("ccst", {}, "ccst changes the style of images, and pooled features of digits4 have none"),
        ("mixstyle", {}, "mixstyle changes maps inside a network, which features of digits4"),
        ("fedavg", {"backbone.name": "small_cnn"}, "set backbone.name=features and"),
        ("fedavg", {"features.encoder": None}, "set backbone.name=features and features.encoder"),
        ("fedavg", {"features.encoder": "b"}, "there are no features of Digits4 by b at 16 px"),
        ("fedavg", {"features.views": 2}, "data encode digits4 --encoder small_cnn --size 16 --v"),
        ("fedavg", {"features.digest": "0000"}, "there are no features of Digits4 by small_cnn"),
    ],
)
def test_what_does_not_go_with_features_is_refused(
    home: Path, tmp_path: Path, method: str, changed: dict[str, Any], words: str
) -> None:
    settings = {name: v for name, v in {**GIVEN, **changed}.items() if v is not None}
    with refused(SettingsError, words):
        fb.run(method, scenario="ip-o-c", settings=settings, results=tmp_path, cache_dir=home)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet5", "did you mean 'resnet50'?"),
        ("torchvision:none", "the encoder torchvision:none cannot be built at 16 px"),
        ("features", "encoder"),
    ],
)
def test_an_unknown_encoder_is_refused(name: str, words: str) -> None:
    with refused(SettingsError, words):
        build_encoder(name, SIDE)


def test_encoders_of_torchvision_and_timm_take_weights_of_a_file(tmp_path: Path) -> None:
    from torchvision.models import get_model

    file = tmp_path / "weights.safetensors"
    net = get_model("shufflenet_v2_x0_5").eval()
    save_tensors(net.state_dict(), file)
    encoder = build_encoder("torchvision:shufflenet_v2_x0_5", 32, file)
    images = torch.rand(2, 3, 32, 32)
    features = encoder(images)
    assert features.shape == (2, 1024)
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    torch.testing.assert_close(net.fc(features), net((images - mean) / std))
    assert not any(p.requires_grad for p in encoder.parameters())


@pytest.mark.parametrize(
    ("found", "bad"),
    [
        (Probe(0.16, 0.66, 0.82), False),
        (Probe(0.16, 0.404, 0.781), True),  # a network that was trained for something else
        (Probe(0.1, 0.2, 0.28), True),
        (Probe(0.5, 0.9, 0.95), False),
    ],
    ids=str,
)
def test_an_encoder_without_semantics_is_noticed(found: Probe, bad: bool) -> None:
    assert found.lacks_semantics is bad


def test_the_probe_finds_classes_that_are_there(home: Path) -> None:
    store = open_features(encoding().find(make_dataset("digits4"), home), 1797)
    labels = np.arange(1797) % 2
    features = np.zeros((1797, 1, 4), np.float16)
    features[:, 0, 0] = labels
    assert probe(replace(store, features=features), labels, 2)[1:] == (1.0, 1.0)


def test_heads() -> None:
    z, adapter = torch.rand(3, 4), Adapter(4, 2, 0.25)
    down, up = adapter[0].weight, adapter[2].weight
    wanted = 0.25 * torch.relu(torch.relu(z @ down.T) @ up.T) + 0.75 * z
    torch.testing.assert_close(adapter(z), wanted)
    head = CosineClassifier(4, 2, 0.1)
    cosines = torch.nn.functional.cosine_similarity(z[:, None], head.weight[None], dim=2)
    torch.testing.assert_close(head(z), cosines / 0.1)


def test_a_caption_names_the_encoder() -> None:
    assert network_title("features", "vit", 224) == "frozen vit, 224 px"


class Clip(torch.nn.Module):
    """A stand-in for a model of open_clip: colours are the features of images."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        self.visual.image_mean = self.visual.image_std = (0.5,) * 3
        self.texts = torch.nn.Embedding(99, 3)
        self.logit_scale = torch.nn.Parameter(torch.tensor(3.0))

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.texts(tokens)


def test_texts_are_encoded_by_the_text_tower_and_kept_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, model = ModuleType("open_clip"), Clip()
    package.__spec__ = ModuleSpec("open_clip", None)
    package.list_pretrained = lambda: [("ViT-B-16", "openai")]

    def create(arch: str, pretrained: str, force_image_size: int) -> Clip:
        assert (arch, pretrained, force_image_size) == ("ViT-B-16", "openai", SIDE)
        logging.warning("as open_clip does")  # adds a handler to the root logger if it has none
        return model

    package.create_model = create
    package.get_tokenizer = lambda _: lambda texts: torch.tensor([len(text) for text in texts])
    monkeypatch.setitem(sys.modules, "open_clip", package)
    dataset, name = make_dataset("digits4"), "open_clip:ViT-B-16/openai"
    for wrong in ("ViT-B-61/openai", "ViT-B-16"):
        with refused(SettingsError, f"open_clip '{wrong}'; did you mean 'ViT-B-16/openai'?"):
            build_encoder(f"open_clip:{wrong}", SIDE)
    made = encoding(encoder=name)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    build_encoder(name, SIDE)
    assert not logging.getLogger().handlers
    store = open_features(encode_dataset(dataset, made, build_encoder(name, SIDE), tmp_path), 1797)
    tokens = torch.tensor([len(dataset.prompt(each)) for each in dataset.classes])
    wanted = model.texts(tokens).detach()
    np.testing.assert_array_equal(store.text, wanted.numpy())
    with monkeypatch.context() as other:  # other texts: the same features, no image is read
        other.setattr(type(dataset), "prompts", {"3": "three"})
        other.setattr("feddg_bench.runs.encode.read_checked", None)
        path = encode_dataset(dataset, made, build_encoder(name, SIDE), tmp_path)
        changed = open_features(path, 1797)
    assert changed.path == store.path
    assert (changed.text != store.text).any(axis=1).tolist() == [True] * 10
    encode_dataset(dataset, made, build_encoder(name, SIDE), tmp_path)
    assert open_features(path, 1797).fingerprint == store.fingerprint
    settings = {"image_size": SIDE, "features.encoder": name}
    (record,) = fb.run(
        "zeroshot",
        scenario="ip-o-c",
        recipe="features",
        settings=settings,
        results=tmp_path,
        cache_dir=tmp_path,
        keep="last",
    )
    kept = fb.load_model(record.key, tmp_path).classifier.weight
    unit = torch.nn.functional.normalize(wanted)
    (untrained,) = fb.run(
        "zeroshot",
        scenario="ip-o-c",
        recipe="features",
        settings=settings | {"rounds": 0},
        results=tmp_path,
        cache_dir=tmp_path,
    )
    assert untrained.evaluation() == record.evaluation()
    torch.testing.assert_close(kept.detach(), unit * math.e**3, rtol=1e-5, atol=1e-5)
