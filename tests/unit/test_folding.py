"""Batch normalisation folded into the preceding convolution; in-place ReLU6."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import nn

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import BackboneSettings, Resources, RunSettings
from feddg_bench.data.federated import synthetic_federation
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.models.backbones import Backbone, build_backbone
from feddg_bench.models.batch_norm import fold_all, foldable, folded, freeze_batch_norm
from feddg_bench.models.networks import InPlaceReLU6
from feddg_bench.runs.driver import train as train_run
from feddg_bench.runs.request import Request
from feddg_bench.runs.setup import start, warn_of_slow_bf16


def backbone(name: str) -> Backbone:
    """Return a network with random weights and statistics."""
    torch.manual_seed(0)
    net = build_backbone(BackboneSettings(name=name, pretrained=False))
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.1)
    with torch.no_grad():
        net.train()(torch.rand(8, 3, 64, 64))
    return net


@pytest.mark.parametrize(
    ("name", "pairs", "layers"),
    # torchvision's DenseNet normalises before convolutions, except after each layer's first one.
    [
        ("mobilenet_v2", 52, 52),
        ("mobilenet_v3_large", 46, 46),
        ("resnet18", 20, 20),
        ("resnet50", 53, 53),
        ("densenet121", 59, 121),
        ("small_cnn", 0, 0),
    ],
)
def test_every_network_gives_the_same_with_what_can_be_folded(
    name: str, pairs: int, layers: int
) -> None:
    net = backbone(name).eval()
    images = torch.rand(4, 3, 32, 32)
    found = foldable(net, images[:1])
    assert len(found) == pairs
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in net.modules()) == layers
    with torch.no_grad():
        before = net(images)
        with folded(found, fold_all(found)):
            after = net(images)
        assert torch.equal(net(images), before)  # unfolded again
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
    assert not pairs or not torch.equal(after, before)


def test_gradients_reach_the_same_parameters() -> None:
    """In float64: on some CPUs, float32 rounding moves activations across the kinks of ReLU6."""
    net = backbone("mobilenet_v2").double()
    for layer in net.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    freeze_batch_norm(net)
    images = torch.rand(4, 3, 64, 64, dtype=torch.float64)
    pairs = foldable(net, images[:1])

    def gradients() -> dict[str, torch.Tensor]:
        net.train().zero_grad()
        net(images).square().sum().backward()
        return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}

    before = gradients()
    with folded(pairs):
        after = gradients()
    assert list(after) == list(before) == [name for name, _ in net.named_parameters()]
    for name, gradient in before.items():
        assert float((after[name] - gradient).norm()) < 1e-9 * float(gradient.norm()), name


def test_a_result_that_goes_elsewhere_too_is_not_folded() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            nn.init.constant_(self.norm.weight, 2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            result = self.conv(images)
            normal: torch.Tensor = self.norm(result) + result
            return normal

    with pytest.raises(SettingsError, match="fold_batch_norm"):
        foldable(Twice(), torch.rand(1, 3, 8, 8))


def test_what_changed_in_place_before_its_normalisation_is_not_folded() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(4))
    assert foldable(net, torch.rand(1, 3, 8, 8)) == []


def test_only_frozen_normalisation_is_folded_in_training() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunSettings(method="fedavg", scenario="ip-o-c", train={"fold_batch_norm": True})
    given = {"train": {"fold_batch_norm": "auto"}}
    assert RunSettings.model_validate({"method": "fedavg", "scenario": "ip-o-c", **given})


def test_relu6_in_place_has_the_bits_of_pytorchs() -> None:
    values = torch.randn(64, 8, dtype=torch.float32).mul_(6)
    values[0, :3] = torch.tensor([0.0, 6.0, -0.0])
    gradient = torch.randn_like(values)
    results = []
    for function in (F.relu6, InPlaceReLU6()):
        leaf = values.clone().requires_grad_()
        result = function(leaf * 1)
        (found,) = torch.autograd.grad(result, leaf, gradient)
        results.append((result.detach(), found))
    (plain, plain_gradient), (ours, our_gradient) = results
    assert torch.equal(plain, ours)
    assert torch.equal(plain_gradient, our_gradient)


def test_relu6_in_place_works_under_vmap_and_copies() -> None:
    net = nn.Sequential(nn.Linear(3, 4), InPlaceReLU6())
    values = torch.randn(5, 2, 3)
    mapped = torch.func.vmap(copy.deepcopy(net))(values)
    torch.testing.assert_close(mapped, net(values))


@pytest.mark.nightly
def test_runs_that_fold_have_other_bits_and_nearly_the_same_numbers() -> None:
    frame = {
        "data": {"image_size": 32},
        "backbone": {"name": "mobilenet_v2", "pretrained": False},
        "partition": {"clients": 2},
        "federation": {"rounds": 1, "per_round": None, "bn": "frozen"},
    }

    def trained(train: bool | str, evaluation: bool) -> tuple[torch.Tensor, float]:
        given = {"fold_batch_norm": train}, {"fuse_batch_norm": evaluation}
        settings = {**frame, "train": given[0], "evaluation": given[1]}
        (plan,) = Request("fedavg", scenario="ip-o-c", settings=settings).plan(check=False)
        federation = synthetic_federation(2, 4, 32, 7)
        run = start(plan, federation, SerialExecutor(), Resources(device="cpu"))
        train_run(run)
        assert isinstance(run.executor, SerialExecutor)
        loss = run.executor.worker.evaluate(run.server.weights, np.arange(8)).loss
        weights = [run.server.weights[name].flatten() for name in run.method.trainable]
        return torch.cat(weights), loss

    plain, plain_loss = trained(False, False)
    fused, fused_loss = trained(False, True)
    folded_, folded_loss = trained("auto", False)
    assert torch.equal(plain, fused)
    assert fused_loss == pytest.approx(plain_loss, rel=1e-5)
    assert not torch.equal(plain, folded_)
    assert folded_loss == pytest.approx(plain_loss, rel=1e-2)


def test_slow_bf16_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fast = {"avx2", "avx512_bf16"}
    for flags, portable in (({"avx2"}, False), ({"avx2"}, False), (fast, False), (set(), False)):
        warn_of_slow_bf16(frozenset(flags), portable)
    assert [r.getMessage()[:20] for r in caplog.records] == ["this CPU has neither"]
    warn_of_slow_bf16(frozenset(fast), True)
    assert caplog.records[-1].getMessage().startswith("--portable does without AVX512-BF16 and AMX")
