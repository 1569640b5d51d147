"""GroupDRO and AFL: both rules for the weights, a round worked out in NumPy, and messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from feddg_bench.core.messages import nbytes
from feddg_methods.afl import simplex_projection
from feddg_methods.groupdro import exponentiated
from feddg_methods.shared.domain_weights import mean_losses
from tests.helpers import ALL, PLAIN, hyper
from tests.tester import MethodTester, Twin

METHODS = ("groupdro", "afl")


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# ------------------------------------------------------------------- rules for the weights


def test_groupdro_by_hand():
    """Weights 1/4, 3/4 and losses log 2, log 3 at step 1: 2/4, 9/4, so 2/11, 9/11."""
    q = exponentiated(tensor(0.25, 0.75), tensor(2, 3).log(), step=1.0)
    assert_close(q, tensor(2 / 11, 9 / 11))


def test_groupdro_does_not_overflow():
    q = exponentiated(tensor(0.5, 0.5), tensor(1e6, 0), step=1.0)
    assert q.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ((0.2, 0.8), (0.2, 0.8)),
        ((0.7, 0.9), (0.4, 0.6)),
        ((0.5, 2.0), (0, 1)),
        ((1.0, 1.2, 0.1), (0.4, 0.6, 0)),
    ],
)
def test_projection_by_hand(point, expected):
    assert_close(simplex_projection(tensor(*point)), tensor(*expected))


@pytest.mark.parametrize("seed", range(5))
def test_projection_is_the_nearest_point_of_a_fine_grid(seed):
    v = np.random.default_rng(seed).normal(size=3)
    a, b = np.meshgrid(np.linspace(0, 1, 201), np.linspace(0, 1, 201))
    grid = np.stack([a, b, 1 - a - b], -1)[a + b <= 1]
    nearest = grid[((grid - v) ** 2).sum(-1).argmin()]
    found = simplex_projection(torch.from_numpy(v))
    assert found.sum().item() == pytest.approx(1)
    np.testing.assert_allclose(found, nearest, atol=0.01)


def test_a_domain_without_images_takes_the_mean_of_the_others():
    losses = mean_losses(torch.tensor([0.1, 0.0, 0.9]), torch.tensor([0.5, 0.0, 0.3]))
    assert_close(losses, tensor(0.2, 1.6, 3.0), rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------- a round


class Losses:
    """Domain losses of a federation's images under a model, computed without the method."""

    def __init__(self, run):
        self.run = run
        run.method.state.load(run.server.weights)
        run.method.eval()

    def __call__(self, clients):
        f = self.run.federation
        index = np.concatenate([f.clients[name] for name in clients])
        images = torch.from_numpy(f.images[index]).permute(0, 3, 1, 2) / 255
        with torch.no_grad():
            logits = self.run.method(images).double().numpy()
        logits -= logits.max(1, keepdims=True)
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(index)), f.labels[index]]
        return np.array([losses[f.domain_ids[index] == d].mean() for d in (0, 1)])


@pytest.mark.parametrize("name", METHODS)
def test_the_weights_after_one_round(start_run, name):
    run = start_run(name, ALL, PLAIN, hyper(step=0.7))
    losses = Losses(run)(run.federation.clients)
    run.rounds(1)
    if name == "groupdro":
        expected = 0.5 * np.exp(0.7 * losses)
        expected /= expected.sum()
    else:
        expected = 0.5 + 0.7 * (losses - losses.mean())
    assert 0 < expected.min() < expected.max() < 1
    np.testing.assert_allclose(run.server.memory["lambda"], expected, rtol=1e-5)
    ids = np.concatenate([run.federation.domains_of(c) for c in run.federation.clients])
    shares = np.bincount(ids) / len(ids)
    np.testing.assert_allclose(run.server.broadcast["image_weights"], expected / shares, rtol=1e-5)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_step_of_one_round_is_the_weighted_gradient(start_run, weighting):
    """One plain step of each client, on all its images: w - lr sum_d lambda_d grad L_d."""
    sgd = {"train": {"optimizer": "sgd", "lr": 0.1, "batch_size": 64}}
    layers = (ALL, PLAIN, sgd, {"federation": {"weighting": weighting}})
    run = start_run("groupdro", *layers, hyper(step=0.0))
    f, before = run.federation, {n: w.double() for n, w in run.server.weights.items()}
    run.method.state.load(run.server.weights)
    gradients, share = {}, np.zeros(2)
    weights = [len(i) / 44 if weighting == "samples" else 1 / 4 for i in f.clients.values()]
    for index, weight in zip(f.clients.values(), weights, strict=True):
        for d in (0, 1):
            mine = index[f.domain_ids[index] == d]
            share[d] += weight * len(mine) / len(index)
    for index, weight in zip(f.clients.values(), weights, strict=True):
        images = torch.from_numpy(f.images[index]).permute(0, 3, 1, 2) / 255
        losses = torch.nn.functional.cross_entropy(
            run.method.train()(images), torch.from_numpy(f.labels[index]), reduction="none"
        )
        rows = torch.from_numpy((0.5 / share)[f.domain_ids[index]])
        run.method.zero_grad()
        (weight * (rows * losses).mean()).backward()
        for name, parameter in run.method.named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad.double()
    run.rounds(1)
    for name in run.method.trainable:
        expected = before[name] - 0.1 * gradients[name]
        assert_close(run.server.weights[name].double(), expected, rtol=1e-4, atol=2e-6)


def test_the_worst_domain_gains_weight(start_run):
    run = start_run("afl", ALL, hyper(step=0.5))
    losses = Losses(run)(run.federation.clients)
    run.rounds(1)
    assert run.server.memory["lambda"][losses.argmax()] > 0.5


def test_a_client_of_weightless_domains_counts_for_nothing(start_run, toy_federation, recorder):
    """client_0 gets only the dark images, whose weight is 0."""
    ids = toy_federation.domain_ids
    held = np.concatenate([*toy_federation.clients.values()])
    toy_federation.clients["client_0"] = held[ids[held] == 0]
    toy_federation.clients["client_1"] = held[ids[held] == 1]
    del toy_federation.clients["client_2"], toy_federation.clients["client_3"]
    run = start_run("afl", ALL, hyper(step=0.0), federation=toy_federation, executor=recorder)
    run.rounds(0)
    run.method.publish(run.server, tensor(0, 1))
    run.rounds(1)
    for name, w in recorder.replies[-1].value.weights.items():
        assert_close(run.server.weights[name], w, rtol=0, atol=0)


# ------------------------------------------------------------------------- FedAvg, messages


@pytest.mark.parametrize(("step", "sent"), [(0.1, 2), (0.0, 1)])
def test_two_numbers_a_domain_go_up_and_one_comes_down(start_run, step, sent):
    run = start_run("groupdro", ALL, hyper(step=step))
    model, clients, domains = nbytes(run.server.weights), 4, 2
    first, second, third = (result.ledger.bytes for result in run.rounds(2))
    assert first == {"up": clients * 4 * domains, "down": 0}
    assert second == {
        "up": clients * (model + 4 * domains * sent),
        "down": clients * (model + 4 * domains),
    }
    down = 4 * domains if step else 0
    assert third["down"] == clients * (model + down)


class TestGroupDRO(MethodTester):
    name = "groupdro"
    layer = ALL
    twins = (Twin({"step": 0.0, "start": "images"}, ALL, logs=False, sends=False, close=True),)


class TestAFL(TestGroupDRO):
    name = "afl"
