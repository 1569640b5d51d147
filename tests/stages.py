"""A network of two stages and its formulas, for training steps that work on feature maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.models.backbones import Backbone
from feddg_bench.plugins import load_method

X = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 0])


def two_stages(name, norm=None, **values):
    """Return a method in float64: images [B, 3, 4, 4], maps [B, 4, 4, 4] and [B, 5, 3, 3]."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm or nn.Identity(), nn.Tanh())
    net.extend([nn.Conv2d(4, 5, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    backbone = Backbone(net, 5, 0, "none", stages=("2", "4"))
    kind = load_method(name)
    settings = validate(kind.Settings, values)
    return kind(settings, backbone=backbone, num_classes=3, train=TrainSettings()).double()


def leaves(method):
    """Return copies of the parameters by name, for `stage_1` and the others."""
    return {n: value.detach().clone().requires_grad_() for n, value in method.named_parameters()}


def stage_1(p, x, norm=lambda z: z):
    z = F.conv2d(x, p["backbone.net.0.weight"], p["backbone.net.0.bias"], padding=1)
    return norm(z).tanh()


def stage_2(p, z, convolution="backbone.net.3"):
    return F.conv2d(z, p[f"{convolution}.weight"], p[f"{convolution}.bias"]).tanh()


def logits(p, features, classifier="classifier"):
    return F.linear(features, p[f"{classifier}.weight"], p[f"{classifier}.bias"])


def pooled(z):
    return z.mean((2, 3))


def same_step(method, loss, expected, p):
    """Assert that a training step's loss and all gradients are those of the formulas."""
    assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    loss.backward()
    found = {name: value.grad for name, value in method.named_parameters()}
    gradients = torch.autograd.grad(expected, [*p.values()])
    assert_close(found, dict(zip(p, gradients, strict=True)), rtol=1e-6, atol=1e-9)
    assert not any(layer._forward_hooks for layer in method.modules())
