"""StableFDG: sharing, shifting, exploration and the highlighter in NumPy, and who gets a style."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.models.backbones import Backbone
from feddg_bench.testing import TaskRecorder
from feddg_methods.shared.adain import EPSILON
from feddg_methods.stablefdg import (
    Highlighter,
    StableFDG,
    StableFDGSettings,
    balancing,
    cycle,
    explored,
    far_apart,
    partners_in_class,
    shifted,
)
from tests.helpers import ALL, bitwise, hyper, refused
from tests.tester import MethodTester, Twin


def styles(maps):
    """Return mean and standard deviation, [B, C] each, with the unbiased variance."""
    return maps.mean((2, 3)), np.sqrt(maps.var((2, 3), ddof=1) + EPSILON)


def wide(values):
    return values[..., None, None]


# --------------------------------------------------------------------------------- sharing


def test_each_client_gets_the_style_of_another_once(start_run):
    recorder = TaskRecorder()
    run = start_run("stablefdg", ALL, executor=recorder)
    run.rounds(2)
    for number in (1, 2):
        asked = [t for t in recorder.tasks if t.round == number]
        sent = {
            reply.client: reply.value["style"]
            for task, reply in zip(recorder.tasks, recorder.replies, strict=True)
            if task.round == number and task.call == "local_style"
        }
        told = {t.client: t.told["style"] for t in asked if t.call == "fit"}
        givers = {n: next(g for g, s in sent.items() if s.equal(told[n])) for n in told}
        assert set(givers.values()) == set(givers) == set(sent)
        assert all(giver != taker for taker, giver in givers.items())


def test_a_cycle():
    assert cycle(["a", "b", "c"], torch.tensor([2, 0, 1])) == {"c": "a", "a": "b", "b": "c"}
    assert cycle(["a"], torch.tensor([0])) == {}


def test_a_client_alone_in_its_round_gets_none(start_run):
    recorder = TaskRecorder()
    start_run("stablefdg", {"federation": {"per_round": 1}}, executor=recorder).rounds(1)
    assert [task.told for task in recorder.tasks] == [{}, {}]


def small(**values):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 2), nn.Tanh())
    net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    backbone = Backbone(net, 5, 0, "none", stages=("1", "3"))
    settings = validate(StableFDGSettings, {"stages": [1], "width": 3, **values})
    return StableFDG(settings, backbone=backbone, num_classes=3, train=TrainSettings()).double()


class Served:
    """A client with two batches."""

    images = torch.rand(5, 3, 4, 4, dtype=torch.float64)

    fabric = SimpleNamespace(autocast=torch.no_grad)

    def batches(self, *, train):
        assert not train
        for part in self.images.split([3, 2]):
            yield part, torch.zeros(len(part), dtype=torch.int64)


def test_a_clients_style():
    method = small()
    with torch.no_grad():
        maps = method.backbone.net[:2](Served.images).numpy()
    each = np.stack(styles(maps))  # [2, B, C]
    found = method.local_style(Served())["style"]
    expected = np.stack([each.mean(1), each.std(1, ddof=1)])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.dtype == torch.float32
    assert method.training


# -------------------------------------------------------------------------------- shifting


def seeding(points, draws):
    """k-means++: the next centre has a probability proportional to its squared distance."""
    chosen = []
    for u in draws:
        if chosen:
            gaps = ((points[:, None] - points[chosen]) ** 2).sum(2).min(1)
        else:
            gaps = np.ones(len(points))
        cut = u * gaps.sum()
        chosen.append(int(np.argmax(gaps.cumsum() > cut)))
    return chosen


def test_the_images_that_keep_their_style_are_seeds_of_k_means():
    rng = np.random.default_rng(0)
    for _ in range(20):
        points, draws = rng.normal(size=(9, 4)), rng.uniform(size=5)
        found = far_apart(torch.from_numpy(points), torch.from_numpy(draws)).tolist()
        assert found == seeding(points, draws)
        assert len(set(found)) == 5


def test_seeds_differ_even_if_points_do_not():
    assert len(set(far_apart(torch.zeros(6, 2), torch.rand(6)).tolist())) == 6


def test_shifted_maps():
    rng = np.random.default_rng(1)
    z, phi = rng.normal(2, 3, (5, 2, 3, 3)), rng.uniform(0.5, 1, (2, 2, 2))
    phi[0, 1] -= 1.2  # some standard deviations would be negative
    draws, noise = rng.uniform(size=3), rng.normal(size=(2, 2, 2))
    mu, sigma = styles(z)
    kept = seeding(np.concatenate([mu, sigma], 1), draws)
    expected = z.copy()
    others = [i for i in range(5) if i not in kept]
    for row, i in enumerate(others):
        new_mu, new_sigma = phi[0] + phi[1] * noise[row]
        normal = (z[i] - wide(mu[i])) / wide(sigma[i])
        expected[i] = normal * wide(np.maximum(new_sigma, 0)) + wide(new_mu)
    found = shifted(*map(torch.from_numpy, (z, phi, draws, noise)))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
    assert (phi[0, 1] + phi[1, 1] * noise[:, 1] < 0).any()


# ------------------------------------------------------------------------------ exploration


@pytest.mark.parametrize("labels", [[0, 0, 0, 1, 2, 2], [4, 4], [0]])
def test_copies_make_classes_even(labels):
    for number in (0, 1, 4, 12):
        extra = balancing(labels, number, torch.rand(number, 2).tolist())
        assert len(extra) == number
        counts = Counter(labels)
        for position in extra:  # each goes to a class with the fewest
            assert counts[labels[position]] == min(counts.values())
            counts[labels[position]] += 1
    assert set(balancing([0, 0, 0, 0, 1, 1], 2, [[0.1, 0.1], [0.9, 0.9]])) == {4, 5}


@pytest.mark.parametrize("extra", [[], [2, 0]])
def test_explored_maps(extra):
    rng = np.random.default_rng(2)
    z, n = rng.normal(2, 3, (3, 2, 4, 4)), 3 + len(extra)
    lam, other = rng.uniform(size=n), np.arange(n)[::-1].copy()
    style = np.stack(styles(z), 1)  # [B, 2, C]
    copies = style[extra] + 2.5 * (style[extra] - style.mean(0))
    copies[:, 1] = np.maximum(copies[:, 1], 0)
    every = np.concatenate([style, copies])
    normal = (z - wide(style[:, 0])) / wide(style[:, 1])
    normal = np.concatenate([normal, normal[extra]])
    share = lam[:, None, None]
    beta, gamma = (share * every + (1 - share) * every[other]).transpose(1, 0, 2)
    given = torch.tensor(extra, dtype=torch.int64), 2.5, torch.from_numpy(other)
    found = explored(torch.from_numpy(z), *given, torch.from_numpy(lam))
    np.testing.assert_allclose(found, wide(gamma) * normal + wide(beta), rtol=1e-6, atol=1e-8)


def test_maps_of_one_pixel_keep_their_values():
    """Their style is all that they hold."""
    z, extra = torch.randn(3, 2, 1, 1), torch.tensor([1])
    found = explored(z, extra, 3.0, torch.tensor([3, 2, 1, 0]), torch.rand(4))
    bitwise(found, torch.cat([z, z[1:2]]))
    noise = torch.randn(1, 2, 2)
    bitwise(shifted(z, torch.ones(2, 2, 2), torch.rand(2), noise), z)


# ------------------------------------------------------------------------------- attention


def test_partners_are_the_next_of_the_class():
    assert partners_in_class([0, 1, 0, 2, 0, 1]) == [2, 5, 4, 3, 0, 1]


def attention(z, other, weights, biases):
    """Return A, [B, P], over all pairs of positions."""
    flat = z.reshape(*z.shape[:2], -1)
    q, k = (w @ flat + b[:, None] for w, b in zip(weights, biases, strict=True))
    q, k = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (q, k))
    scores = np.einsum("bdi,bdj->bij", (q + q[other]) / 2, k).mean(1)
    e = np.exp(scores - scores.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("alone", [True, False])
def test_highlighted_features(alone):
    rng = np.random.default_rng(3)
    method = small(p=0.0)
    images = torch.from_numpy(rng.uniform(size=(4, 3, 5, 5)))
    with torch.no_grad():
        z = method.backbone.net[:4](images).numpy()
    theta = [layer for _, layer in method.highlighter.named_children()]
    weights = [layer.weight.detach().numpy()[:, :, 0, 0] for layer in theta]
    other = np.arange(4) if alone else np.array([1, 2, 3, 0])
    a = attention(z, other, weights, [layer.bias.detach().numpy() for layer in theta])
    flat = z.reshape(4, 5, -1)
    expected = np.concatenate([flat.mean(2), (flat * a[:, None]).sum(2)], 1)
    with torch.no_grad():
        found = method.represent(images, None if alone else torch.from_numpy(other))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert method.classifier.weight.shape == (3, 10)
    if alone:
        bitwise(method.features(images), found)


def test_attention_is_even_over_equal_positions():
    found = Highlighter(4, 3)(torch.ones(2, 4, 3, 3), None)
    assert_close(found, torch.full((2, 1, 3, 3), 1 / 9))


def test_the_loss_is_over_images_and_copies():
    method, given = small(p=1.0, oversampling=0.5), []
    method.classifier.register_forward_hook(lambda _l, inputs, _o: given.append(inputs[0]))
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    loss = method.training_step((torch.rand(6, 3, 4, 4).double(), labels), 0)
    (z,) = given
    assert z.shape == (9, 10)
    # The first two copies are of class 1, and then both are equally frequent.
    logits = z @ method.classifier.weight.T + method.classifier.bias
    known = torch.cat([labels, torch.tensor([1, 1])])
    losses = -logits.log_softmax(1)
    either = [(losses[range(8), known].sum() + losses[8, c]) / 9 for c in (0, 1)]
    assert any(torch.isclose(loss, each) for each in either)
    assert not any(layer._forward_hooks for layer in method.backbone.modules())


def test_a_stage_that_the_backbone_lacks_is_refused(start_run):
    with refused(SettingsError, "hyper.stages=[1, 5] names stage 5", "this backbone has 4"):
        start_run("stablefdg", hyper(stages=[1, 5]))


class TestStableFDG(MethodTester):
    name = "stablefdg"
    twins = (Twin({"p": 0.0, "width": 0}), Twin({"p": 0.0, "width": 0}, ALL))
    base = {"p": 1.0}
    apart = (
        {"p": 0.5},
        {"p": 1.0, "alpha": 0.0},
        {"p": 1.0, "beta": 5.0},
        {"p": 1.0, "oversampling": 0.5},
        {"p": 1.0, "stages": [1]},
        {"p": 1.0, "width": 4},
    )
    wrong = ({"p": 1.1}, {"alpha": -1}, {"beta": 0}, {"oversampling": -1}, {"width": -1})
