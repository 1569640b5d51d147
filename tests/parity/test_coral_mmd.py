"""DeepCORAL and MMD: both distances in NumPy, the training step, and when they equal FedAvg."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.plugins import load_method
from feddg_methods.coral import coral_distance
from feddg_methods.mmd import GAMMAS, squared_mmd
from tests.helpers import ALL
from tests.tester import MethodTester, Twin, one_domain

METHODS = ("coral", "mmd")
RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(5, 3)), 2 * RNG.normal(size=(4, 3)) + 1


def coral(x, y):
    return ((np.cov(x.T) - np.cov(y.T)) ** 2).sum() / (4 * x.shape[1] ** 2)


def mmd(x, y):
    def mean(a, b):
        squares = ((a[:, None] - b[None]) ** 2).sum(-1)
        return sum(np.exp(-g * squares) for g in GAMMAS).mean()

    return mean(x, x) + mean(y, y) - 2 * mean(x, y)


ORACLES = {"coral": (coral, coral_distance), "mmd": (mmd, squared_mmd)}


@pytest.mark.parametrize("name", METHODS)
def test_the_distance_in_numpy(name):
    oracle, ours = ORACLES[name]
    x, y = torch.from_numpy(X).requires_grad_(), torch.from_numpy(Y).requires_grad_()
    assert ours(x, y).item() == pytest.approx(oracle(X, Y), rel=1e-10)
    assert ours(x, x).item() == pytest.approx(0, abs=1e-12)
    assert gradcheck(ours, (x, y))


def test_coral_by_hand():
    """Variances 2 and 8 of one feature: 36 / 4."""
    x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0], [14.0]])
    assert coral_distance(x, y).item() == 9


def test_mmd_by_hand():
    """One image each at squared distance 2, with one kernel: 2 - 2 exp(-1)."""
    x, y = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    assert squared_mmd(x, y, (0.5,)).item() == pytest.approx(2 - 2 * np.exp(-1))


# -------------------------------------------------------------------------- training step


class Pixels(nn.Module):
    """Returns an image's values as its features."""

    num_features = 3

    def forward(self, images):
        return images.flatten(1)


@pytest.mark.parametrize(
    ("name", "values"), [("coral", {}), ("coral", {"means": True}), ("mmd", {})], ids=str
)
def test_training_step(name, values):
    """Three domains with 3, 2 and 3 images, and a fourth with one, which is left out."""
    kind = load_method(name)
    settings = validate(kind.Settings, {"weight": 3.0, **values}, "hyper.")
    method = kind(settings, backbone=Pixels(), num_classes=2, train=TrainSettings()).double()
    z, labels = RNG.normal(size=(9, 3)), RNG.integers(0, 2, 9)
    domains = np.array([4, 0, 1, 0, 4, 1, 2, 4, 0])
    w, b = (p.detach().numpy() for p in method.classifier.parameters())
    logits = z @ w.T + b
    loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(9), labels]
    parts = [z[domains == e] for e in (0, 1, 4)]

    def distance(x, y):
        if values:
            means = ((x.mean(0) - y.mean(0)) ** 2).mean()
            return means + ((np.cov(x.T) - np.cov(y.T)) ** 2).mean()
        return ORACLES[name][0](x, y)

    penalty = np.mean([distance(parts[i], parts[j]) for i, j in ((0, 1), (0, 2), (1, 2))])
    images = torch.from_numpy(z)[:, :, None, None]
    batch = (images, torch.from_numpy(labels), torch.from_numpy(domains))
    found = method.training_step(batch, 0).item()
    assert found == pytest.approx(loss.mean() + 3 * penalty, rel=1e-10)
    alone = method.training_step(batch[:2], 0).item()  # under a Trainer
    assert alone == pytest.approx(loss.mean(), rel=1e-10)


@pytest.mark.parametrize("name", METHODS)
def test_the_penalty_brings_domains_together(name):
    y = torch.from_numpy(Y).requires_grad_()
    start = ORACLES[name][1](torch.from_numpy(X), y)
    for _ in range(50):
        (slope,) = torch.autograd.grad(ORACLES[name][1](torch.from_numpy(X), y), y)
        y = (y - 0.1 * slope).detach().requires_grad_()
    assert ORACLES[name][1](torch.from_numpy(X), y) < 0.9 * start


class TestCoral(MethodTester):
    name = "coral"
    layer = ALL
    twins = (Twin({"weight": 0.0}, ALL), Twin({}, ALL, rounds=1, federation=one_domain))
    apart = ({"weight": 0.0},)
    models = (1, 1)


class TestMmd(TestCoral):
    name = "mmd"
