"""Mixup and Fish: partners, steps worked out in NumPy, and when they equal FedAvg."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.core.messages import Task
from feddg_methods.fish import Fish
from feddg_methods.mixup import Mixup, MixupSettings, partners
from tests.helpers import ALL, Pixels, hyper
from tests.tester import MethodTester, Twin, one_domain

# ---------------------------------------------------------------------------------- Mixup


def test_partners_are_of_another_domain_and_all_of_them_occur():
    domains = torch.tensor([0, 1, 0, 2])
    seen = {i: set() for i in range(4)}
    for seed in range(60):
        draws = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))
        for i, j in enumerate(partners(domains, draws).tolist()):
            seen[i].add(j)
    assert seen == {0: {1, 3}, 1: {0, 2, 3}, 2: {1, 3}, 3: {0, 1, 2}}


def test_with_one_domain_anyone_is_a_partner():
    draws = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    assert partners(torch.tensor([1, 1]), draws).tolist() == [1, 0]


@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_training_step_of_mixup(alpha):
    rng = np.random.default_rng(0)
    x, y, domains = rng.normal(size=(6, 4)), rng.integers(0, 3, 6), np.array([0, 0, 1, 1, 1, 0])
    settings = validate(MixupSettings, {"alpha": alpha})
    method = Mixup(settings, backbone=Pixels(), num_classes=3, train=TrainSettings()).double()
    torch.manual_seed(5)
    lam = float(torch.distributions.Beta(alpha, alpha).sample())
    draws = torch.rand(6, 6).numpy()
    draws[domains[:, None] == domains[None]] = -1
    j = draws.argmax(1)
    mixed = lam * x + (1 - lam) * x[j]
    w, b = (p.detach().numpy() for p in method.classifier.parameters())
    logits = mixed @ w.T + b
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    rows = np.arange(6)
    expected = -(lam * logp[rows, y] + (1 - lam) * logp[rows, y[j]]).mean()
    images = torch.from_numpy(x)[:, :, None, None]
    torch.manual_seed(5)
    batch = (images, torch.from_numpy(y), torch.from_numpy(domains))
    assert method.training_step(batch, 0).item() == pytest.approx(expected, rel=1e-6)


# ----------------------------------------------------------------------------------- Fish


class Quadratic(Fish):
    """F(u) = mean over the batch of (y + 1)/2 (u - y)^2, y the label, in float64."""

    def build(self):
        self.u = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def training_step(self, batch, _index):
        y = batch[1].double()
        return ((y + 1) / 2 * (self.u - y) ** 2).mean()


@pytest.mark.parametrize("epsilon", [0.5, 1.0])
def test_inner_and_outer_steps_on_a_quadratic_loss(start_run, epsilon):
    """9 images in batches of 8 and 1, two epochs."""
    train = {"optimizer": "sgd", "lr": 0.05, "local_epochs": 2}
    run = start_run(Quadratic, {"train": train}, hyper(meta_lr=epsilon))
    reply = run.executor.worker.run(
        Task("client_0", "fit", 1, run.method.state.federated_weights(), {})
    )
    index = run.federation.clients["client_0"]
    labels, domains = run.federation.labels[index], run.federation.domain_ids[index]
    u = 2.0
    for epoch in range(2):
        order = torch.randperm(9, generator=torch_generator(0, "loader", epoch, 1, "client_0"))
        visits = torch_generator(0, "fish", epoch, 1, "client_0")
        for part in np.split(order.numpy(), [8]):
            present, inner = np.unique(domains[part]), u
            for i in torch.randperm(len(present), generator=visits).tolist():
                y = labels[part][domains[part] == present[i]]
                inner -= 0.05 * ((y + 1) * (inner - y)).mean()
            u += epsilon * (inner - u)
    assert reply.value.weights["u"].item() == pytest.approx(u, rel=1e-12)


def test_every_image_is_seen_once_and_no_piece_mixes_domains(start_run):
    run = start_run("fish", ALL)
    client = run.executor.worker._client(Task("client_3", "fit", 1, run.server.weights, {}))
    pieces = [labels.tolist() for _, labels in run.method.batches(client, 0)]
    held = run.federation.labels[run.federation.clients["client_3"]]
    assert sorted(chain(*pieces)) == sorted(held.tolist())
    assert len(pieces) > 2  # two batches, each of two domains


# --------------------------------------------------------------------------------- FedAvg


def test_fish_without_outer_steps_stays(start_run):
    run = start_run("fish", ALL, hyper(meta_lr=0.0))
    before = {n: w.clone() for n, w in run.server.weights.items()}
    run.rounds(1)
    for name in run.method.trainable:
        assert_close(run.server.weights[name], before[name], rtol=0, atol=0)


def test_fish_trains_live_batch_normalisation(start_run, toy_federation):
    """Single images of a domain are left out of batches with several images."""
    layers = {"backbone": {"name": "resnet18", "pretrained": False}, "train": {"batch_size": 3}}
    run = start_run("fish", layers, federation=toy_federation)
    (_, result) = run.rounds(1)
    assert result.ledger.dropped == []


class TestMixup(MethodTester):
    name = "mixup"
    layer = ALL
    twins = (Twin({"alpha": 0.0}, ALL),)
    apart = ({"alpha": 0.0},)
    models = (1, 1)


class TestFish(MethodTester):
    name = "fish"
    layer = ALL
    twins = (Twin({"meta_lr": 1.0}, ALL, federation=one_domain),)
    apart = ({"meta_lr": 1.0},)
    models = (1, 1)
