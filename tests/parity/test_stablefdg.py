"""StableFDG: a whole training step in float64, its parts in NumPy, and who gets a style."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.testing import TaskRecorder
from feddg_methods.shared.adain import EPSILON
from feddg_methods.stablefdg import (
    Highlighter,
    balancing,
    cycle,
    explored,
    far_apart,
    partners_in_class,
    shifted,
)
from tests.helpers import ALL, bitwise, hyper, refused
from tests.stages import X, Y, leaves, logits, pooled, same_step, stage_1, stage_2, two_stages
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


class Served:
    """A client with two batches."""

    images = torch.rand(5, 3, 4, 4, dtype=torch.float64)

    fabric = SimpleNamespace(autocast=torch.no_grad)

    def batches(self, *, train):
        assert not train
        for part in self.images.split([3, 2]):
            yield part, torch.zeros(len(part), dtype=torch.int64)


def test_a_clients_style():
    method = two_stages("stablefdg", stages=[1])
    maps = stage_1(leaves(method), Served.images).detach().numpy()
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


def attention(p, z, other):
    """Return A, [B, P], over all pairs of positions."""
    q, k = (
        torch.einsum("dc,bcp->bdp", p[f"highlighter.theta_{n}.weight"][:, :, 0, 0], z.flatten(2))
        + p[f"highlighter.theta_{n}.bias"][:, None]
        for n in "qk"
    )
    q, k = (each / each.square().sum(1, keepdim=True).sqrt() for each in (q, k))
    return torch.einsum("bdi,bdj->bij", (q + q[other]) / 2, k).mean(1).softmax(1)


def highlighted(p, z, other):
    return torch.cat([pooled(z), (z.flatten(2) * attention(p, z, other)[:, None]).sum(2)], 1)


@pytest.mark.parametrize("alone", [True, False])
def test_highlighted_features(alone):
    method = two_stages("stablefdg", stages=[1], width=3)
    p = leaves(method)
    other = [0, 1, 2, 3, 4, 5] if alone else [1, 2, 3, 4, 5, 0]
    expected = highlighted(p, stage_2(p, stage_1(p, X)), other)
    found = method.represent(X, None if alone else torch.tensor(other))
    assert_close(found, expected)
    assert method.classifier.weight.shape == (3, 10)
    if alone:
        bitwise(method.features(X), found)


def test_attention_is_even_over_equal_positions():
    found = Highlighter(4, 3)(torch.ones(2, 4, 3, 3), None)
    assert_close(found, torch.full((2, 1, 3, 3), 1 / 9))


# -------------------------------------------------------------------------- a training step


def style(z):
    """Return mean and standard deviation, [B, C, 1, 1] each, constants for the gradient."""
    return wide(pooled(z)).detach(), wide((z.var((2, 3)) + EPSILON).sqrt()).detach()


def drawn_copies(labels, number):
    """Draw images of the rarest classes: a number for the class, one for the image."""
    every, copies = list(labels), []
    for u, v in torch.rand(number, 2).tolist():
        counts = Counter(every)
        rarest = sorted(c for c in counts if counts[c] == min(counts.values()))
        own = rarest[int(u * len(rarest))]
        members = [i for i, c in enumerate(labels) if c == own]
        copies.append(members[int(v * len(members))])
        every.append(own)
    return copies


@pytest.mark.parametrize(("p", "seed"), [(1.0, 0), *((0.5, seed) for seed in range(1, 9))])
def test_a_training_step(p, seed):
    """The loss and all gradients, by the page of formulas; numbers are drawn in the same order."""
    alpha, labels = 2.0, Y.tolist()
    method = two_stages("stablefdg", p=p, alpha=alpha, oversampling=0.5, stages=[1, 2], width=3)
    w, phi = leaves(method), torch.rand(2, 2, 4, dtype=torch.float64) - 0.2

    torch.manual_seed(seed)
    if shifting := bool(torch.rand(()) < p):
        uniform, noise = torch.rand(3), torch.randn(3, 2, 4)
    exploring = [stage for stage in (1, 2) if torch.rand(()) < p]
    copies = drawn_copies(labels, 3) if exploring else []
    every = labels + [labels[i] for i in copies]
    mixing = {}
    for stage in exploring:
        lam = torch.distributions.Beta(0.1, 0.1).sample((len(every),)).double()
        mixing[stage] = lam.view(-1, 1, 1, 1), torch.randperm(len(every))

    z = stage_1(w, X)
    if shifting:
        mu, sigma = style(z)
        kept = seeding(torch.cat([mu, sigma], 1).flatten(1).numpy(), uniform.numpy())
        new = dict(
            zip([i for i in range(6) if i not in kept], phi[0] + phi[1] * noise, strict=True)
        )
        z = torch.stack(
            [
                wide(new[i][1].clamp(min=0)) * (z[i] - mu[i]) / sigma[i] + wide(new[i][0])
                if i in new
                else z[i]
                for i in range(6)
            ]
        )
    for stage in (1, 2):
        z = stage_2(w, z) if stage == 2 else z
        if stage in mixing:
            (lam, other), joining, copies = mixing[stage], copies, []
            mu, sigma = style(z)
            normal = (z - mu) / sigma
            far = [s[joining] + alpha * (s[joining] - s.mean(0)) for s in (mu, sigma)]
            mu, sigma = torch.cat([mu, far[0]]), torch.cat([sigma, far[1].clamp(min=0)])
            beta, gamma = (lam * s + (1 - lam) * s[other] for s in (mu, sigma))
            z = gamma * torch.cat([normal, normal[joining]]) + beta
    pairs = []  # the next image of the class, from the last one on the first
    for i in range(len(every)):
        order = [*range(i + 1, len(every)), *range(i + 1)]
        pairs.append(next(j for j in order if every[j] == every[i]))
    expected = F.cross_entropy(logits(w, highlighted(w, z, pairs)), torch.tensor(every))

    torch.manual_seed(seed)
    with method.state.serving(SimpleNamespace(broadcast={"style": phi})):
        loss = method.training_step((X, Y), 0)
    same_step(method, loss, expected, w)


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
