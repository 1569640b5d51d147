"""IRM and V-REx: the penalties in NumPy, the training step, and when they equal FedAvg."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.plugins import load_method
from feddg_methods.irm import invariance_penalty, risk_slopes
from feddg_methods.vrex import risk_variance
from tests.helpers import ALL, Pixels, hyper
from tests.tester import MethodTester, Twin, one_domain

RNG = np.random.default_rng(3)
Z, Y = RNG.normal(size=(9, 4)), RNG.integers(0, 3, 9)
DOMAINS = np.array([0, 2, 0, 2, 2, 5, 0, 2, 0])  # one image of domain 5


def build(name, **values):
    kind = load_method(name)
    settings = validate(kind.Settings, values, "hyper.")
    torch.manual_seed(0)
    return kind(settings, backbone=Pixels(), num_classes=3, train=TrainSettings()).double()


def batch(rows=slice(None)):
    images = torch.from_numpy(Z[rows])[:, :, None, None]
    return images, torch.from_numpy(Y[rows]), torch.from_numpy(DOMAINS[rows])


def step(method, given, round=5):
    with method.state.serving(SimpleNamespace(round=round, rounds=5)):
        return method.training_step(given, 0)


def losses(logits):
    shifted = logits - logits.max(1, keepdims=True)
    return np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(Y)), Y]


def logits_of(method):
    head = method.classifier
    return Z @ head.weight.detach().numpy().T + head.bias.detach().numpy()


# ------------------------------------------------------------------------------------ IRM


def test_slopes_are_the_derivatives_in_the_scale_of_the_logits():
    logits = 3 * RNG.normal(size=(9, 3))
    slopes = (losses(logits * (1 + 1e-6)) - losses(logits * (1 - 1e-6))) / 2e-6
    found = risk_slopes(torch.from_numpy(logits), torch.from_numpy(Y))
    np.testing.assert_allclose(found, slopes, atol=1e-8)


def test_the_penalty_by_hand():
    """Halves 1, 3, 8 and 2, 6."""
    assert invariance_penalty(torch.tensor([1.0, 2, 3, 6, 8])).item() == 16


def test_the_penalty_is_unbiased():
    """Over all orders of four slopes, its mean is the mean product of two slopes."""
    from itertools import permutations

    slopes = torch.tensor([1.0, -2, 4, 3], dtype=torch.float64)
    found = [invariance_penalty(slopes[list(order)]) for order in permutations(range(4))]
    pairs = [slopes[i] * slopes[j] for i in range(4) for j in range(4) if i != j]
    assert_close(torch.stack(found).mean(), torch.stack(pairs).mean())


def test_training_step_of_irm():
    method = build("irm", penalty=7.0)
    logits = logits_of(method)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    slopes = ((p - np.eye(3)[Y]) * logits).sum(1)
    penalty = 0.0
    for e in (0, 2):
        mine = slopes[e == DOMAINS]
        penalty += len(mine) * mine[0::2].mean() * mine[1::2].mean() / 9
    risk = losses(logits).mean()
    assert step(method, batch()).item() == pytest.approx(risk + 7 * penalty, rel=1e-10)
    early = step(method, batch(), round=2)  # the first two of 5 rounds have weight 1
    assert early.item() == pytest.approx(risk + penalty, rel=1e-10)
    assert method.training_step(batch()[:2], 0).isfinite()  # under a Trainer


# ---------------------------------------------------------------------------------- V-REx


def test_the_variance_by_hand():
    """Risks 1 and 5 of 3 and 1 images: mean 2, variance (3 + 9) / 4."""
    assert risk_variance(torch.tensor([1.0, 5.0]), torch.tensor([3, 1])).item() == 3


def test_training_step_of_vrex_and_its_gradient():
    method = build("vrex", beta=20.0)

    def objective(weight):
        own = losses(Z @ weight.T + method.classifier.bias.detach().numpy())
        risks = np.array([own[e == DOMAINS].mean() for e in (0, 2, 5)])
        n = np.array([4, 4, 1]) / 9
        return n @ risks + 20 * n @ (risks - n @ risks) ** 2

    w = method.classifier.weight.detach().numpy().copy()
    loss = step(method, batch())
    loss.backward()
    assert loss.item() == pytest.approx(objective(w), rel=1e-10)
    for at in np.ndindex(w.shape):
        shift = np.zeros_like(w)
        shift[at] = 1e-6
        slope = (objective(w + shift) - objective(w - shift)) / 2e-6
        assert method.classifier.weight.grad[at].item() == pytest.approx(slope, abs=1e-7)


def test_one_domain_has_no_variance():
    method, one = build("vrex"), batch(DOMAINS == 2)
    expected = losses(logits_of(method))[DOMAINS == 2].mean()
    assert step(method, one).item() == pytest.approx(expected, rel=1e-12)


class TestIRM(MethodTester):
    name = "irm"
    layer = {**ALL, **hyper(anneal=0.0, penalty=5.0)}
    twins = (Twin({"penalty": 0.0}, ALL),)
    apart = ({"penalty": 0.0},)
    models = (1, 1)


class TestVREx(MethodTester):
    name = "vrex"
    layer = {**ALL, **hyper(anneal=0.0, beta=5.0)}
    twins = (
        Twin({"beta": 0.0}, ALL, close=True),
        Twin({"beta": 100.0}, ALL, federation=one_domain),
    )
    apart = ({"beta": 0.0},)
    models = (1, 1)
