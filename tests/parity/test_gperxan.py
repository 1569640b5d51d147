"""gPerXAN: its layer in NumPy, a training step in float64, and what is sent and kept."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import BackboneSettings, TrainSettings
from feddg_bench.core.messages import nbytes
from feddg_bench.models.backbones import Backbone, build_backbone
from feddg_bench.models.batch_norm import batch_norm_state, foldable
from feddg_bench.testing import TaskRecorder
from feddg_methods.gperxan import XAN, GPerXAN, GPerXANSettings
from tests.helpers import bitwise, refused
from tests.stages import X, Y, leaves, logits, pooled, same_step, stage_1, stage_2, two_stages
from tests.tester import MethodTester, Twin

EPSILON = 1e-5


def column(values):
    return np.asarray(values)[:, None, None]


def norm_of(channels, rng):
    layer = nn.BatchNorm2d(channels).double()
    for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
        tensor.data.copy_(torch.from_numpy(rng.uniform(0.5, 2, channels)))
    return layer


@pytest.mark.parametrize("side", [3, 1])
@pytest.mark.parametrize("training", [True, False])
def test_the_layer(training, side):
    """Maps of one pixel have no statistics of their own: their IN is the shift."""
    rng = np.random.default_rng(0)
    layer = XAN(norm_of(3, rng)).double().train(training)
    bitwise((layer.gamma, layer.beta), (layer.bn.weight, layer.bn.bias))
    for tensor in (layer.gamma, layer.beta):
        tensor.data.copy_(torch.from_numpy(rng.normal(size=3)))
    layer.s.data.copy_(torch.tensor([0.3, -0.8], dtype=torch.float64))
    x = rng.normal(1, 2, (4, 3, side, side))
    numbers = {name: t.detach().numpy().copy() for name, t in layer.state_dict().items()}
    if training:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    else:
        mean, var = numbers["bn.running_mean"], numbers["bn.running_var"]
    bn = (x - column(mean)) / np.sqrt(column(var) + EPSILON)
    bn = bn * column(numbers["bn.weight"]) + column(numbers["bn.bias"])
    own = x.mean((2, 3), keepdims=True), x.var((2, 3), keepdims=True)
    instance = (x - own[0]) / np.sqrt(own[1] + EPSILON)
    instance = instance * column(numbers["gamma"]) + column(numbers["beta"])
    w = np.exp([0.3, -0.8]) / np.exp([0.3, -0.8]).sum()
    found = layer(torch.from_numpy(x)).detach()
    np.testing.assert_allclose(found, w[0] * instance + w[1] * bn, rtol=1e-10)


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_a_training_step(lam):
    """The received classifier guides the features, and never trains the client's own."""
    method = two_stages("gperxan", nn.BatchNorm2d(4), lam=lam)
    layer = method.backbone.net[1]
    for tensor in (layer.gamma, layer.beta, layer.s, layer.bn.weight, layer.bn.bias):
        nn.init.normal_(tensor)
    p, h_g = leaves(method), {f"classifier.{n}": torch.rand_like(t) for n, t in head(method)}

    def xan(z):
        q = {name.removeprefix("backbone.net.1."): value for name, value in p.items()}
        w = q["s"].exp() / q["s"].exp().sum()
        parts = []
        for over, scale, shift in (
            ((2, 3), q["gamma"], q["beta"]),
            ((0, 2, 3), q["bn.weight"], q["bn.bias"]),
        ):
            mean = z.mean(over, keepdim=True)
            var = (z - mean).square().mean(over, keepdim=True)
            normal = (z - mean) / (var + EPSILON).sqrt()
            parts.append(scale[:, None, None] * normal + shift[:, None, None])
        return w[0] * parts[0] + w[1] * parts[1]

    z = pooled(stage_2(p, stage_1(p, X, xan)))
    expected = F.cross_entropy(logits(p, z), Y) + lam * F.cross_entropy(logits(h_g, z), Y)
    with method.state.serving(SimpleNamespace(weights=h_g)):
        loss = method.training_step((X, Y), 0)
    same_step(method, loss, expected, p)


def head(method):
    return method.classifier.state_dict().items()


# ------------------------------------------------------------------- layers and messages

RESNET = {
    "backbone": {"name": "resnet18", "pretrained": False},
    "federation": {"per_round": 2, "rounds": 1},
    "train": {"batch_size": 16},
}


def test_only_batch_normalisation_stays_and_its_mean_is_evaluated(start_run, toy_federation):
    recorder = TaskRecorder()
    run = start_run("gperxan", RESNET, federation=toy_federation, executor=recorder)
    layers = [layer for layer in run.method.modules() if isinstance(layer, XAN)]
    norm = set(batch_norm_state(run.method))
    assert (len(layers), len(norm)) == (20, 100)
    assert all(".bn." in name for name in norm)
    assert set(run.server.weights) == set(run.method.state_dict()) - norm
    shared = {n.rpartition(".")[2] for n in run.server.weights if ".bn1." in n}
    assert shared == {"gamma", "beta", "s"}
    run.rounds(1)
    whole = nbytes(run.method.state_dict())
    assert run.server.ledger.bytes == {"up": 2 * whole, "down": 2 * nbytes(run.server.weights)}
    counts = [len(toy_federation.clients[reply.client]) for reply in recorder.replies]
    measured = run.method.global_model(run.server)
    assert set(measured) == set(run.method.state_dict())
    for name in ("backbone.net.bn1.bn.running_mean", "backbone.net.layer1.0.bn2.bn.weight"):
        sent = [reply.value.extra["norm"][name].double() for reply in recorder.replies]
        mean = sum(n * each for n, each in zip(counts, sent, strict=True)) / sum(counts)
        assert_close(measured[name].double(), mean, rtol=1e-5, atol=1e-6)
        assert {name in memory["private state"] for memory in recorder.memories.values()} == {True}


def test_its_layers_are_not_folded_into_convolutions():
    """Instance normalisation reads the same output of a convolution."""
    backbone = build_backbone(BackboneSettings(name="resnet18", pretrained=False))
    settings = validate(GPerXANSettings, {})
    method = GPerXAN(settings, backbone=backbone, num_classes=3, train=TrainSettings(), bn="local")
    assert foldable(method.backbone, torch.rand(2, 3, 32, 32)) == []


def test_normalisation_that_also_activates_is_refused():
    class Activating(nn.BatchNorm2d):
        def forward(self, values):
            return super().forward(values).relu()

    net = nn.Sequential(nn.Conv2d(3, 2, 1), Activating(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone = Backbone(net, 2, 0, "none")
    with refused(SettingsError, "gperxan", "Activating", "resnet50"):
        GPerXAN(validate(GPerXANSettings, {}), backbone=backbone, num_classes=3, train={})


class TestGPerXAN(MethodTester):
    """On a network without batch normalisation: the classifier's guidance remains."""

    name = "gperxan"
    twins = (Twin({"lam": 0.0}),)
    apart = ({"lam": 2.0},)
    wrong = ({"lam": -0.1}, {"evaluation": "none"})
    models = (1, 1)
