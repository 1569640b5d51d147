"""SagNet: the three losses' gradients, each computed by itself in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_methods.sagnet import content_randomised, style_randomised
from tests.helpers import bitwise, hyper, refused
from tests.stages import X, Y, leaves, logits, pooled, stage_1, stage_2, two_stages
from tests.tester import MethodTester

EPSILON = 1e-5


def statistics(maps):
    mu = maps.mean((2, 3))[..., None, None]
    return mu, np.sqrt(((maps - mu) ** 2).mean((2, 3))[..., None, None] + EPSILON)


def test_randomisation():
    rng = np.random.default_rng(0)
    z, other, a = rng.normal(1, 2, (3, 2, 3, 3)), np.array([1, 2, 0]), np.array([0.0, 0.3, 1.0])
    mu, sigma = statistics(z)
    normal, share = (z - mu) / sigma, a[:, None, None, None]
    style = share * sigma + (1 - share) * sigma[other], share * mu + (1 - share) * mu[other]
    given = torch.from_numpy(z), torch.from_numpy(other)
    found = style_randomised(*given, torch.from_numpy(a))
    np.testing.assert_allclose(found, style[0] * normal + style[1], rtol=1e-12)
    found = content_randomised(*given)
    np.testing.assert_allclose(found, sigma * normal[other] + mu, rtol=1e-12)


def test_maps_of_one_pixel_have_no_content():
    z = torch.randn(4, 3, 1, 1, dtype=torch.float64)
    bitwise(content_randomised(z, torch.tensor([1, 2, 3, 0])), z)


# -------------------------------------------------------------------------- a training step


def small(normalised, **values):
    return two_stages("sagnet", nn.GroupNorm(2, 4) if normalised else None, stage=1, **values)


def first(p, x):
    def norm(z):
        return F.group_norm(z, 2, p["backbone.net.1.weight"], p["backbone.net.1.bias"])

    return stage_1(p, x, norm) if "backbone.net.1.weight" in p else stage_1(p, x)


def rest(p, z, convolution, classifier):
    return logits(p, pooled(stage_2(p, z, convolution)), classifier)


def style(z):
    mu = z.mean((2, 3), keepdim=True)
    return mu, ((z - mu).square().mean((2, 3), keepdim=True) + EPSILON).sqrt()


@pytest.mark.parametrize("clip", [1e9, 1e-3])
@pytest.mark.parametrize("normalised", [True, False])
def test_each_loss_trains_its_part(normalised, clip):
    """Without normalisation in G_f, all of it learns from the adversarial loss."""
    method = small(normalised, weight=0.7, clip=clip)
    p = leaves(method)
    torch.manual_seed(7)
    a, styles, contents = torch.rand(6).double(), torch.randperm(6), torch.randperm(6)
    mu, sigma = style(first(p, X))
    a = a.view(-1, 1, 1, 1)
    normal = (first(p, X) - mu) / sigma
    mixed = a * mu + (1 - a) * mu[styles]
    sr = normal * (a * sigma + (1 - a) * sigma[styles]) + mixed
    cr = normal[contents].detach() * sigma + mu
    content = F.cross_entropy(rest(p, sr, "backbone.net.3", "classifier"), Y)
    scores = rest(p, cr, "style_net.0.3", "style_classifier").log_softmax(1)
    by_style, adversarial = -scores[range(6), Y].mean(), -0.7 * scores.mean(1).mean()

    groups = {name: name.split(".")[0] for name in p}
    affine = [n for n in p if n.startswith("backbone.net.1.")]
    attacked = affine or [n for n in p if n.startswith("backbone.net.0.")]
    expected = {}
    for loss, names in (
        (content, [n for n in p if not groups[n].startswith("style")]),
        (by_style, [n for n in p if groups[n].startswith("style")]),
        (adversarial, attacked),
    ):
        found = torch.autograd.grad(loss, [p[n] for n in names], retain_graph=True)
        norm = torch.stack([g.norm() for g in found]).norm()
        scale = min(1.0, clip / norm) if loss is adversarial else 1.0
        for name, g in zip(names, found, strict=True):
            expected[name] = expected.get(name, 0) + scale * g
        assert loss is not adversarial or (scale < 1) == (clip < 1)

    torch.manual_seed(7)
    loss = method.training_step((X, Y), 0)
    assert_close(loss, content + by_style)
    loss.backward()
    method.on_before_optimizer_step(None)
    found = {name: value.grad for name, value in method.named_parameters()}
    assert_close(found, expected, rtol=1e-5, atol=1e-10)


def test_the_style_network_begins_as_the_rest_of_the_network():
    method = small(normalised=True)
    bitwise(method.style_net[0][3].state_dict(), method.backbone.net[3].state_dict())
    assert not torch.equal(method.style_classifier.weight, method.classifier.weight)
    assert [n for n, _ in method.style_net.named_parameters()] == ["0.3.weight", "0.3.bias"]


def test_prediction_is_that_of_the_network_alone():
    method = small(normalised=True).eval()
    p = dict(method.named_parameters())
    bitwise(method(X), rest(p, first(p, X), "backbone.net.3", "classifier"))
    assert not any(layer._forward_hooks for layer in method.modules())


def test_a_stage_that_the_backbone_lacks_is_refused(start_run):
    with refused(SettingsError, "hyper.stage=5 names stage 5", "this backbone has 4"):
        start_run("sagnet", hyper(stage=5))


class TestSagNet(MethodTester):
    name = "sagnet"
    apart = ({"weight": 0.0}, {"stage": 1}, {"clip": 1e-4})
    base = {"weight": 10.0}
    wrong = ({"weight": -1}, {"stage": 0}, {"clip": 0})
    models = (1, 1)
