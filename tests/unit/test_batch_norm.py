"""Batch normalisation: detection by type, names in the state, freezing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from feddg_bench.config.schema import BackboneSettings, MethodSettings, TrainSettings
from feddg_bench.core.method import Method
from feddg_bench.models.backbones import Backbone, build_backbone
from feddg_bench.models.batch_norm import (
    FrozenBatchNorm,
    batch_norm_state,
    batch_norm_statistics,
    foldable,
    freeze_batch_norm,
)


def random_backbone(name: str, device: str = "cpu") -> Backbone:
    with torch.device(device):
        return build_backbone(BackboneSettings(name=name, pretrained=False))


@pytest.mark.parametrize(
    ("name", "layers"),
    [("resnet50", 53), ("densenet121", 121), ("resnet18", 20), ("mobilenet_v3_large", 46)],
)
def test_every_layer_is_found(name, layers):
    backbone = random_backbone(name, "meta")
    assert len(batch_norm_state(backbone)) == 5 * layers
    assert len(batch_norm_statistics(backbone)) == 3 * layers


@pytest.mark.parametrize("name", ["small_cnn", "squeezenet1_1"])
def test_networks_without_batch_norm_have_no_names(name):
    assert batch_norm_state(random_backbone(name)) == []


def test_names_are_those_of_the_state_dict():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4))
    assert batch_norm_state(net) == [
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert batch_norm_statistics(net) == batch_norm_state(net)[2:]
    assert batch_norm_statistics(net[1]) == ["running_mean", "running_var", "num_batches_tracked"]


def test_layers_by_any_name_are_part_of_the_state():
    backbone = random_backbone("resnet50", "meta")
    downsampling = [n for n in batch_norm_state(backbone) if "downsample.1.running_mean" in n]
    assert len(downsampling) == 4
    assert set(batch_norm_state(backbone)) <= set(backbone.state_dict())


def test_frozen_layers_ignore_training_mode():
    backbone = random_backbone("resnet18")
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = backbone.eval()(images)
    before = copy.deepcopy(backbone.state_dict())

    freeze_batch_norm(backbone)
    backbone.train()
    features = backbone(images)
    features.square().sum().backward()

    torch.testing.assert_close(features, expected, rtol=0, atol=0)
    assert backbone.training
    assert list(backbone.state_dict()) == list(before)
    for name in batch_norm_statistics(backbone):
        assert torch.equal(backbone.state_dict()[name], before[name]), name
    affine = [n for n in batch_norm_state(backbone) if n.endswith(("weight", "bias"))]
    assert len(affine) == 40
    assert all(backbone.get_parameter(n).grad.abs().sum() > 0 for n in affine)


def test_unfrozen_layers_do_change_their_statistics():
    backbone = random_backbone("resnet18").train()
    before = copy.deepcopy(backbone.state_dict())
    backbone(torch.rand(4, 3, 32, 32))
    assert not any(
        torch.equal(backbone.state_dict()[n], before[n]) for n in batch_norm_statistics(backbone)
    )


def test_freezing_keeps_the_tensors_that_an_optimiser_holds():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    before = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    parameters = list(net.parameters())
    freeze_batch_norm(net)
    freeze_batch_norm(net)
    assert {name: tensor.data_ptr() for name, tensor in net.state_dict().items()} == before
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))


def test_frozen_layers_include_those_that_a_method_adds():
    class Adds(Method):
        def build(self):
            self.norm = nn.BatchNorm1d(2)

    parts = {"backbone": random_backbone("resnet18", "meta"), "num_classes": 3}
    method = Adds(MethodSettings(), **parts, train=TrainSettings(), bn="frozen")
    assert type(method.norm) is FrozenBatchNorm
    assert "norm.running_mean" not in method.federated


def test_frozen_layers_take_vectors_too():
    net = nn.Sequential(nn.BatchNorm1d(2))
    net[0].running_mean.copy_(torch.tensor([1.0, 2.0]))
    net[0].running_var.copy_(torch.tensor([4.0, 9.0]))
    freeze_batch_norm(net)
    torch.testing.assert_close(
        net.train()(torch.tensor([[3.0, 8.0]])), torch.tensor([[1.0, 2.0]]), rtol=1e-4, atol=0
    )


def test_a_layer_that_activates_too_still_does():
    """As in timm's EfficientNet, whose batch-normalisation layers include the activation."""
    timm = pytest.importorskip("timm")
    net = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected, names = net(images), list(net.state_dict())
    freeze_batch_norm(net)
    freeze_batch_norm(net)
    torch.testing.assert_close(net.train()(images), expected)
    assert list(net.state_dict()) == names
    assert foldable(net, images) == []
