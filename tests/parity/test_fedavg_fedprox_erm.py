"""FedAvg, FedProx and ERM: numbers worked out by hand, and the cases in which they coincide."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Trainer
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import FederationSettings, MethodSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Task
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.data.federated import Federation
from feddg_bench.engine.construction import build_run_method
from feddg_methods.erm import balanced_parts
from feddg_methods.fedavg import FedAvg
from feddg_methods.fedprox import proximal_gradient
from tests.helpers import PLAIN, bitwise
from tests.tester import MethodTester, Twin

# ---------------------------------------------------------------------------------- FedAvg


def aggregate(states, sizes, **federation):
    """Return the result of FedAvg's server half for clients' models."""
    server = Server(
        {"w": torch.tensor([1.0, 2.0, -1.0]), "running_mean": torch.tensor([0.5])},
        (),
        executor=None,
        seed=0,
        federation=FederationSettings(**federation),
        uplink=FedAvg.uplink,
    )
    replies = (
        Reply(f"client_{i}", size, LocalUpdate(state), {}, {})
        for i, (state, size) in enumerate(zip(states, sizes, strict=False))
    )
    return FedAvg.aggregate(SimpleNamespace(trainable=["w"]), server, replies)


STATES = [
    {"w": torch.tensor(w), "running_mean": torch.tensor([mean])}
    for w, mean in (([2.0, 2.0, 0.0], 0.2), ([0.0, 3.0, -3.0], 0.4), ([1.0, 1.0, 1.0], 0.1))
]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0.8, 1.7, -0.3)),
        ({"server_lr": 0.5}, (0.9, 1.85, -0.65)),
        ({"weighting": "uniform"}, (1.0, 2.0, -0.6666666667)),
    ],
)
def test_three_clients(settings, expected):
    mean = aggregate(STATES, [10, 30, 60], **settings)
    assert_close(mean["w"], torch.tensor(expected))


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_running_means_take_no_server_step(lr):
    mean = aggregate(STATES, [10, 30, 60], server_lr=lr)
    assert_close(mean["running_mean"], torch.tensor([0.20]))


def test_one_client_is_the_new_model_bit_for_bit():
    bitwise(aggregate(STATES[:1], [7]), STATES[0])


def test_no_more_than_two_replies_are_alive(counted):
    aggregate((counted(STATES[i % 3]) for i in range(20)), range(1, 21))
    assert counted.most <= 3


def test_one_round_is_the_mean_of_what_clients_learn(start_run, recorder):
    run = start_run("fedavg", {"federation": {"per_round": None}}, executor=recorder)
    run.rounds(1)
    rows = {n: [r.value.weights[n].double() for r in recorder.replies] for n in run.server.weights}
    share = [n / 44 for n in (9, 11, 12, 12)]
    for name, tensor in run.server.weights.items():
        expected = sum(p * row for p, row in zip(share, rows[name], strict=True))
        assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)


# --------------------------------------------------------------------------------- FedProx

W, THETA, GRADIENT = torch.tensor([1.0, -2.0]), torch.tensor([1.5, -1.0]), torch.tensor([0.2, -0.1])


@pytest.mark.parametrize(
    ("norm", "penalty", "total"),
    [
        ("squared", 0.0625, (0.25, 0.0)),
        ("l2", 0.0559016994, (0.2223606798, -0.0552786405)),
    ],
)
def test_proximal_term(norm, penalty, total):
    pull = proximal_gradient(THETA, W, mu=0.1, norm=norm)
    assert_close(GRADIENT + pull, torch.tensor(total))

    theta = THETA.clone().requires_grad_()
    distance = (theta - W).norm()
    term = 0.05 * (distance**2 if norm == "squared" else distance)
    assert_close(term, torch.tensor(penalty))
    assert_close(pull, torch.autograd.grad(term, theta)[0])


def test_one_step_of_gradient_descent():
    total = GRADIENT + proximal_gradient(THETA, W, mu=0.1)
    assert_close(THETA - 0.1 * total, torch.tensor([1.475, -1.0]))


@pytest.mark.parametrize("norm", ["squared", "l2"])
def test_there_is_no_pull_where_nothing_has_moved(norm):
    bitwise(proximal_gradient(W, W.clone(), mu=5.0, norm=norm), torch.zeros(2))


def test_the_unsquared_pull_does_not_grow_with_the_distance():
    near, far = (proximal_gradient(W + d, W, mu=1.0, norm="l2") for d in (1e-3, 1e3))
    assert_close(near, far)
    assert_close(far.norm(), torch.tensor(0.5))


def test_minimiser_of_a_quadratic():
    """(a/2)(v - b)^2 + (mu/2)(v - w)^2 with a=2, b=3, w=1, mu=.5 is minimal at 6.5 / 2.5."""
    v, w = torch.tensor(0.0), torch.tensor(1.0)
    for _ in range(200):
        v = v - 0.1 * (2 * (v - 3) + proximal_gradient(v, w, mu=0.5))
    assert float(v) == pytest.approx(2.6, abs=1e-6)


def trained(start_run, name, *layers, rounds=2):
    run = start_run(name, *layers)
    results = run.rounds(rounds)
    return run.server.weights, [r.ledger.means() for r in results]


def test_the_two_norms_differ(start_run):
    squared, _ = trained(start_run, "fedprox", {"hyper": {"mu": 1.0}}, rounds=1)
    l2, _ = trained(start_run, "fedprox", {"hyper": {"mu": 1.0, "norm": "l2"}}, rounds=1)
    assert any(not torch.equal(squared[name], l2[name]) for name in l2)


def test_a_stronger_pull_keeps_models_nearer(start_run):
    def moved(mu):
        layer = {"train": {"optimizer": "sgd", "lr": 0.01}, "hyper": {"mu": mu}}
        run = start_run("fedprox", layer)
        before = {name: tensor.clone() for name, tensor in run.server.weights.items()}
        run.rounds(1)
        return sum(float((run.server.weights[n] - before[n]).norm() ** 2) for n in before)

    distances = [moved(mu) for mu in (0.0, 5.0, 50.0)]
    assert distances == sorted(distances, reverse=True)
    assert distances[2] < 0.7 * distances[0]


@pytest.mark.parametrize("norm", ["squared", "l2"])
def test_the_term_enters_before_momentum_and_stays_out_of_the_logged_loss(start_run, norm):
    """Against training on the loss including the term, as in Equation 2."""
    train = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "local_epochs": 3}
    run = start_run(
        "fedprox", {"train": {**train, "channels_last": False}, "hyper": {"mu": 2.0, "norm": norm}}
    )
    worker, method = run.executor.worker, run.method
    received = method.state.federated_weights()
    reply = worker.run(Task("client_0", "fit", 1, received, {}))

    method.state.load(received)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for epoch in range(3):
        for images, labels in worker.data["client_0"].batches(
            shuffle=True,
            augment=True,
            views=1,
            companions=None,
            generator=torch_generator(0, "loader", epoch, 1, "client_0"),
        ):
            loss = nn.functional.cross_entropy(method(images), labels)
            losses += [loss.item()] * len(labels)
            for name, theta in method.named_parameters():
                distance = (theta - received[name]).norm()
                loss = loss + 1.0 * (distance**2 if norm == "squared" else distance)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_close(reply.value.weights, method.state.federated_weights(), rtol=1e-4, atol=1e-5)
    assert reply.metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


# ------------------------------------------------------------------------------------- ERM


class Mean(Method):
    """One number v, trained on (v - x)^2 / 2, where x is the grey level of an image."""

    def build(self):
        self.v = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, _index):
        levels = batch[0].mean((1, 2, 3)) * 255
        return ((self.v - levels) ** 2 / 2).mean()


class NoBackbone(nn.Module):
    num_features = 1


@pytest.mark.parametrize(
    ("clients", "weighting", "expected"),
    [
        ({"pool": [0, 1, 2, 3]}, "samples", 0.5),
        ({"a": [0], "b": [1, 2, 3]}, "samples", 0.5),
        ({"a": [0], "b": [1, 2, 3]}, "uniform", 1.0),
    ],
)
def test_one_full_step_on_pooled_and_on_spread_images(start_run, clients, weighting, expected):
    """Domain A holds level 4 once, B level 0 three times; v starts at 0, learning rate 1/2."""
    images = np.zeros((4, 8, 8, 3), dtype=np.uint8)
    images[0] = 4
    federation = Federation(
        images,
        8,
        np.zeros(4, dtype=np.int64),
        {name: np.array(index) for name, index in clients.items()},
        (),
        3,
    )
    layer = {
        "train": {"optimizer": "sgd", "lr": 0.5},
        "federation": {"per_round": None, "weighting": weighting},
    }
    settings = start_run("fedavg").settings.train.model_copy(update={"optimizer": "sgd", "lr": 0.5})
    method = Mean(MethodSettings(), backbone=NoBackbone(), num_classes=3, train=settings)
    run = start_run("fedavg", PLAIN, layer, federation=federation, method=method)
    run.rounds(1)
    assert float(run.server.weights["v"]) == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def pooled(toy_federation):
    everything = np.concatenate(list(toy_federation.clients.values()))
    return replace(toy_federation, clients={"client_0": everything})


ONE = {"partition": {"clients": 1}, "federation": {"per_round": 1, "rounds": 3}}


def final(start_run, name, pooled, **train):
    run = start_run(name, ONE, {"train": train}, federation=pooled)
    run.rounds(3)
    return run.server.weights


def test_fedavg_with_one_client_is_erm_bit_for_bit(start_run, pooled):
    sgd = {"optimizer": "sgd", "lr": 0.05}
    bitwise(final(start_run, "fedavg", pooled, **sgd), final(start_run, "erm", pooled, **sgd))


@pytest.mark.parametrize(
    "train", [{"optimizer": "adam"}, {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9}], ids=str
)
def test_with_a_memory_they_differ_unless_it_is_kept(start_run, pooled, train):
    erm = final(start_run, "erm", pooled, **train)
    reset = final(start_run, "fedavg", pooled, **train)
    assert any(not torch.equal(erm[name], reset[name]) for name in erm)
    bitwise(final(start_run, "fedavg", pooled, **train, optimizer_state="persist"), erm)


def test_erm_is_plain_training(start_run, pooled):
    """It equals a loop over epochs with one optimizer, bit for bit."""
    found = final(start_run, "erm", pooled, channels_last=False)

    run = start_run("erm", ONE, {"train": {"channels_last": False}}, federation=pooled)
    method = run.method.train()
    optimizer = torch.optim.Adam(method.parameters(), lr=0.01, fused=True)
    for epoch in range(1, 4):
        for images, labels in run.executor.worker.data["client_0"].batches(
            shuffle=True,
            augment=True,
            views=1,
            companions=None,
            generator=torch_generator(0, "loader", 0, epoch, "client_0"),
        ):
            loss = nn.functional.cross_entropy(method(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    bitwise(found, method.state.federated_weights())


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_erm_runs_under_the_trainer(toy_settings, pooled):
    method = build_run_method(toy_settings({"method": "erm"}), pooled)
    index = pooled.clients["client_0"]
    images = torch.from_numpy(pooled.images[index]).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(pooled.labels[index])

    def loss():
        with torch.no_grad():
            return nn.functional.cross_entropy(method.eval()(images), labels).item()

    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    first = loss()
    trainer = Trainer(
        max_epochs=6,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(images, labels), 8, shuffle=True, generator=order)
    trainer.fit(method.train(), loader)
    after = method.state_dict()
    assert [name for name in before if torch.equal(after[name], before[name])] == []
    assert loss() < 0.5 * first


# ------------------------------------------------------------------------- balanced domains


def test_every_step_has_as_many_images_of_each_domain():
    domains = torch.tensor([0] * 10 + [3] * 1000)
    parts = balanced_parts(domains, 8, torch.Generator().manual_seed(0))
    assert len(parts) == 125
    for part in parts:
        assert torch.bincount(domains[part], minlength=4).tolist() == [8, 0, 0, 8]
    seen = torch.bincount(torch.cat(parts), minlength=1010)
    assert seen[10:].tolist() == [1] * 1000  # the large domain once
    assert {int(n) for n in seen[:10]} == {100}  # 1,000 draws of 10 images


def test_without_balance_a_small_domain_has_a_small_share():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([torch.randperm(1010, generator=generator) for _ in range(10)])[:10_000]
    assert float((drawn < 10).float().mean()) == pytest.approx(0.0099, abs=0.004)


def test_one_full_step_of_each_kind_of_mean():
    """Domain A holds 4, domain B 0, 0, 0; v = 0, one step of rate 0.5 on (v - x)^2 / 2."""
    values, domains = torch.tensor([4.0, 0, 0, 0]), torch.tensor([0, 1, 1, 1])

    def step(part):
        v = torch.zeros((), requires_grad=True)
        ((v - values[part]).square() / 2).mean().backward()
        return -0.5 * float(v.grad)

    assert step(torch.arange(4)) == 0.5
    (part,) = balanced_parts(domains, 3, torch.Generator().manual_seed(0))
    assert step(part) == 1.0


def test_balanced_erm_trains_on_balanced_batches(start_run, toy_federation):
    everything = np.concatenate([*toy_federation.clients.values()])
    sizes = np.bincount(toy_federation.domain_ids[everything])
    pooled = replace(toy_federation, clients={"client_0": everything})
    run = start_run("erm", {"hyper": {"balanced_domains": True}}, federation=pooled)
    seen = []
    step = run.method.training_step
    run.method.training_step = lambda batch, i: (seen.append(len(batch[1])), step(batch, i))[1]
    run.rounds(1)
    assert seen == [16] * -(-max(sizes) // 8)
    assert run.server.weights


class TestFedProx(MethodTester):
    name = "fedprox"
    twins = (Twin({"mu": 0.0, "norm": "squared"}), Twin({"mu": 0.0, "norm": "l2"}))
    apart = ({"mu": 1.0}, {"norm": "l2"})
    models = (1, 1)
