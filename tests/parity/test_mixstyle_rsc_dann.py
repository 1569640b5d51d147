"""MixStyle, RSC and DANN: steps worked out in NumPy, and when they equal FedAvg."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import BackboneSettings, TrainSettings
from feddg_bench.models.backbones import BACKBONES, build_backbone
from feddg_methods.dann import DANN, DANNSettings, Reversed, rise
from feddg_methods.mixstyle import mixed_styles
from feddg_methods.rsc import RSC, RSCSettings, unmuted
from tests.helpers import Pixels, bitwise, hyper, refused
from tests.stages import X, Y, leaves, logits, pooled, same_step, stage_1, stage_2, two_stages
from tests.tester import MethodTester, Twin


def softmax(logits):
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


# ------------------------------------------------------------------------------- stages


@pytest.mark.parametrize("name", sorted({*BACKBONES} - {"features"}))
def test_stages_give_maps_of_falling_resolution(name):
    """The rest of the network, which `after` copies, makes the same features of such maps."""
    backbone = build_backbone(BackboneSettings(name=name, pretrained=False)).eval()
    given = []
    hooks = [
        stage.register_forward_hook(lambda _layer, _inputs, out: given.append(out.clone()))
        for stage in backbone.stages
    ]
    side = 28 if name in ("lenet", "femnist_cnn", "domainbed_mnist") else 64
    with torch.no_grad():
        features = backbone(torch.zeros(2, 3, side, side))
        maps, number = list(given), len(given) // 2
        for hook in hooks:
            hook.remove()
        bitwise(backbone.after(number).eval()(maps[number - 1]), features)
        bitwise(backbone.maps(torch.zeros(2, 3, side, side), number), maps[number - 1])
    assert len(maps) == len(backbone.stages) >= 2
    sides = [each.shape[-1] for each in maps]
    assert sides == sorted(set(sides), reverse=True)
    assert all(each.shape[-1] > 1 for each in maps)
    numbers = range(1, len(maps) + 1)
    assert [backbone.channels(n) for n in numbers] == [each.shape[1] for each in maps]


# ------------------------------------------------------------------------------ MixStyle


def mixed(x, j, lam):
    """Return maps with the mixed means and deviations, which take no gradient."""
    mu = x.mean((2, 3), keepdim=True).detach()
    sigma = (x.var((2, 3), keepdim=True) + 1e-6).sqrt().detach()
    share = lam.view(-1, 1, 1, 1)
    gamma, beta = (share * s + (1 - share) * s[j] for s in (sigma, mu))
    return gamma * (x - mu) / sigma + beta


def test_mixed_styles():
    """The result has the mixed mean and standard deviation, and the own map's pattern."""
    x, j = torch.randn(3, 2, 4, 4, dtype=torch.float64), torch.tensor([2, 0, 1])
    lam = torch.tensor([0.25, 1.0, 0.0], dtype=torch.float64)
    found = mixed_styles(x, j, lam)
    assert_close(found, mixed(x, j, lam))
    assert_close(found[2].mean((1, 2)), x[1].mean((1, 2)))
    assert_close(found[2].std((1, 2)), x[1].std((1, 2)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_training_step_of_mixstyle(seed):
    """Partners are drawn once, lambda in each stage; two of the four batches are mixed."""
    method = two_stages("mixstyle", stages=[1, 2])
    p = leaves(method)
    torch.manual_seed(seed)
    z = stage_1(p, X)
    if torch.rand(()) < 0.5:
        j, beta = torch.randperm(6), torch.distributions.Beta(0.1, 0.1)
        lam = [beta.sample((6,)).double() for _ in (1, 2)]
        z = mixed(stage_2(p, mixed(z, j, lam[0])), j, lam[1])
    else:
        z = stage_2(p, z)
    expected = F.cross_entropy(logits(p, pooled(z)), Y)
    torch.manual_seed(seed)
    same_step(method, method.training_step((X, Y), 0), expected, p)


def test_an_image_that_is_its_own_partner_stays():
    maps = torch.randn(2, 3, 5, 5)
    assert_close(mixed_styles(maps, torch.tensor([0, 1]), torch.tensor([0.3, 0.8])), maps)


@pytest.mark.parametrize("stages", [[0], [1, 5]])
def test_a_stage_that_the_backbone_lacks_is_refused(start_run, stages):
    with refused(SettingsError, "and this backbone has 4", "from 1 to 4"):
        start_run("mixstyle", hyper(stages=stages))


class TestMixStyle(MethodTester):
    name = "mixstyle"
    twins = (Twin({"p": 0.0}), Twin({"p": 0.0, "partners": "domain"}))
    base = {"p": 1.0}
    apart = (
        {"p": 0.5},
        {"p": 1.0, "alpha": 5.0},
        {"p": 1.0, "stages": [1, 2, 3]},
        {"p": 1.0, "partners": "domain"},
    )
    wrong = ({"p": 1.1}, {"alpha": 0}, {"partners": "style"})
    models = (1, 1)


# ---------------------------------------------------------------------------------- RSC


def test_values_from_the_quantile_on_are_muted():
    """Of 0, 1, 2, 3 the upper third begins at 2: the quantile 2/3."""
    values = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]])
    assert unmuted(values, 1 / 3).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    assert unmuted(values, 1.0).sum() == 0


@pytest.mark.parametrize(("p", "share"), [(1 / 3, 1 / 3), (0.5, 1.0), (0.25, 0.5)])
def test_training_step_of_rsc(p, share):
    """With a linear classifier the gradient of the true class's logit is that class's weights."""
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(6, 4)), rng.integers(0, 3, 6)
    settings = validate(RSCSettings, {"features": p, "images": share})
    method = RSC(settings, backbone=Pixels(), num_classes=3, train=TrainSettings()).double()
    w, b = (t.detach().numpy() for t in method.classifier.parameters())
    g = w[y]
    kept = g < np.sort(g)[:, [math.ceil(round(3 * (1 - p), 9))]]
    rows = np.arange(6)
    fall = softmax(z @ w.T + b)[rows, y] - softmax((z * kept) @ w.T + b)[rows, y]
    spared = fall < np.sort(fall)[math.ceil(round(5 * (1 - share), 9))]
    mask = kept | spared[:, None]
    expected = -np.log(softmax((z * mask) @ w.T + b)[rows, y]).mean()
    batch = (torch.from_numpy(z)[:, :, None, None], torch.from_numpy(y))
    assert method.training_step(batch, 0).item() == pytest.approx(expected, rel=1e-6)
    assert (share == 1.0) == (not spared.any())


class TestRSC(MethodTester):
    name = "rsc"
    twins = (Twin({"features": 0.0}), Twin({"images": 0.0}))
    apart = ({"features": 0.6}, {"images": 0.9})
    wrong = ({"features": 1.0}, {"images": -0.1})
    models = (1, 1)


# --------------------------------------------------------------------------------- DANN


def test_the_rise_of_lambda():
    assert rise(0.0, 10.0) == 0.0
    assert rise(0.5, 10.0) == pytest.approx(math.tanh(2.5))
    assert rise(1.0, 10.0) == pytest.approx(0.9999092)
    method = two_stages("dann", weight=2.0)
    with method.state.serving(SimpleNamespace(round=3, rounds=5)):
        assert method.strength() == pytest.approx(2 * math.tanh(2.5))


def test_the_gradient_is_reversed():
    values = torch.tensor([1.0, -2.0], requires_grad=True)
    out = Reversed.apply(values, 0.3)
    assert out.tolist() == [1.0, -2.0]
    out.backward(torch.tensor([1.0, 10.0]))
    assert_close(values.grad, torch.tensor([-0.3, -3.0]))


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_gradients_of_dann(lam):
    """Of features: labels minus lambda times domains; of the discriminator: domains."""
    rng = np.random.default_rng(2)
    x, y, d = rng.normal(size=(5, 4)), rng.integers(0, 3, 5), np.array([0, 1, 1, 0, 1])
    method = DANN(
        validate(DANNSettings, {"hidden": 6}),
        backbone=Pixels(),
        num_classes=3,
        train=TrainSettings(),
        sources=("a", "b"),
    ).double()
    w, b = (t.detach().numpy() for t in method.classifier.parameters())
    v1, c1, v2, c2 = (t.detach().numpy() for t in method.discriminator.parameters())
    hidden = np.maximum(x @ v1.T + c1, 0)
    by_label = (softmax(x @ w.T + b) - np.eye(3)[y]) / 5
    by_domain = (softmax(hidden @ v2.T + c2) - np.eye(2)[d]) / 5
    through = (by_domain @ v2) * (hidden > 0)
    expected = by_label @ w - lam * through @ v1

    images = torch.from_numpy(x)[:, :, None, None].requires_grad_()
    method.strength = lambda: lam
    method.state.client = object()  # a task is running
    try:
        loss = method.training_step((images, torch.from_numpy(y), torch.from_numpy(d)), 0)
    finally:
        method.state.client = None
    loss.backward()
    np.testing.assert_allclose(images.grad[:, :, 0, 0], expected, rtol=1e-5, atol=1e-9)
    found = method.discriminator[2].weight.grad
    np.testing.assert_allclose(found, by_domain.T @ hidden, rtol=1e-5, atol=1e-9)
    assert loss.item() == pytest.approx(
        -np.log(softmax(x @ w.T + b)[range(5), y]).mean()
        - np.log(softmax(hidden @ v2.T + c2)[range(5), d]).mean(),
        rel=1e-6,
    )


class TestDANN(MethodTester):
    name = "dann"
    apart = ({"weight": 5.0}, {"gamma": 1.0}, {"hidden": 16})
    rounds = 2
    wrong = ({"hidden": 0}, {"weight": -1}, {"gamma": -1})
    models = (1, 1)
