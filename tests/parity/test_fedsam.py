"""FedSAM: quadratic losses worked out in NumPy, and what the second pass must not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.streams import torch_generator
from feddg_bench.config.layers import validate
from feddg_bench.core.messages import Task
from feddg_methods.fedsam import FedSAM, FedSAMSettings, perturbation
from tests.helpers import ALL, bitwise, hyper, refused
from tests.tester import MethodTester, Twin

SGD = {"train": {"optimizer": "sgd", "lr": 0.1}}
RESNET = {
    "backbone": {"name": "resnet18", "pretrained": False},
    "train": {"batch_size": 16},
    "federation": {"per_round": None},
}


def fit(run, client="client_0", round=1):
    task = Task(client, "fit", round, run.method.state.federated_weights(), {})
    return run.executor.worker.run(task)


# ------------------------------------------------------------------------- quadratic losses


class Quadratic(FedSAM):
    """F(u, v) = mean over the batch of a/2 (u - y)^2 + |v|^2 (1 + y), y the label, in float64."""

    def build(self):
        self.u = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.v = nn.Parameter(torch.tensor([1.0, -0.5], dtype=torch.float64))

    def training_step(self, batch, _index):
        y = batch[1].double()
        return (1.5 * (self.u - y) ** 2 + (self.v**2).sum() * (1 + y)).mean()


@pytest.mark.parametrize("rho", [0.05, 0.7])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_on_a_quadratic_loss(start_run, rho, momentum):
    train = {"optimizer": "sgd", "lr": 0.05, "momentum": momentum, "local_epochs": 3}
    run = start_run(Quadratic, {"train": train}, hyper(rho=rho))
    reply = fit(run)

    labels = run.federation.labels[run.federation.clients["client_0"]].astype(float)
    theta, velocity, losses = np.array([2.0, 1.0, -0.5]), np.zeros(3), []

    def loss(theta, y):
        return np.mean(1.5 * (theta[0] - y) ** 2 + (theta[1:] ** 2).sum() * (1 + y))

    def gradient(theta, y):
        return np.array([np.mean(3 * (theta[0] - y)), *(2 * theta[1:] * np.mean(1 + y))])

    for epoch in range(3):
        order = torch.randperm(9, generator=torch_generator(0, "loader", epoch, 1, "client_0"))
        for part in np.split(order.numpy(), [8]):
            y = labels[part]
            losses += [loss(theta, y)] * len(y)
            g = gradient(theta, y)
            velocity = momentum * velocity + gradient(theta + rho * g / np.linalg.norm(g), y)
            theta = theta - 0.05 * velocity
    sent = reply.value.weights
    np.testing.assert_allclose([sent["u"], *sent["v"]], theta, rtol=1e-9)
    assert reply.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-9)


class Flat(Quadratic):
    """Starts at its minimum."""

    def training_step(self, _batch, _index):
        return (self.u - 2) ** 2 + 0 * self.v.sum()


def test_where_the_gradient_is_0_nothing_moves(start_run):
    sent = fit(start_run(Flat, SGD, hyper(rho=0.5))).value.weights
    assert sent["u"] == 2.0
    assert sent["v"].tolist() == [1.0, -0.5]


# --------------------------------------------------------------------------- the perturbation


def test_one_norm_over_all_tensors():
    epsilon = perturbation([torch.tensor([[3.0]]), torch.tensor([0.0, -4.0])], 0.05)
    assert_close(epsilon, [torch.tensor([[0.03]]), torch.tensor([0.0, -0.04])])


def test_no_gradient_no_perturbation():
    epsilon = perturbation([torch.zeros(2, 2), torch.zeros(3)], 0.05)
    bitwise(epsilon, [torch.zeros(2, 2), torch.zeros(3)])


def steps(run):
    """Return weights and gradients around each second pass of a task, and its batch."""
    method, seen = run.method, []
    original = method.on_before_optimizer_step

    def watch(optimizer):
        parameters = dict(method.named_parameters())
        before = {n: p.detach().clone() for n, p in parameters.items()}
        first = {n: p.grad.clone() for n, p in parameters.items()}
        original(optimizer)
        after = {n: p.detach().clone() for n, p in parameters.items()}
        second = {n: p.grad.clone() for n, p in parameters.items()}
        seen.append((before, first, after, second, method._again[0]))

    method.on_before_optimizer_step = watch
    fit(run)
    return seen


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_come_back_bit_for_bit_and_gradients_are_those_beside_them(start_run, precision):
    run = start_run("fedsam", {"train": {"precision": precision}}, hyper(rho=0.5))
    seen = steps(run)
    assert len(seen) == 2
    for before, first, after, second, (images, labels) in seen:
        bitwise(after, before)
        norm = np.sqrt(sum(float(g.double().square().sum()) for g in first.values()))
        beside = {n: before[n] + 0.5 / norm * first[n] for n in before}
        run.method.state.load(beside)
        with run.executor.worker.fabric.autocast():
            loss = F.cross_entropy(run.method(images), labels)
        expected = torch.autograd.grad(loss, list(run.method.parameters()))
        loose = precision == "bf16-mixed"
        for gradient, (name, found) in zip(expected, second.items(), strict=True):
            assert_close(found, gradient, rtol=0.1 if loose else 1e-4, atol=0.02 if loose else 1e-5)
            assert not torch.equal(found, first[name])


# ---------------------------------------------------------------- what happens once, not twice


def test_batch_statistics_are_those_of_the_first_pass(start_run, toy_federation):
    """After one step they equal FedAvg's bit for bit; the weights do not."""
    plain, found = (
        fit(start_run(name, RESNET, federation=toy_federation)).value.weights
        for name in ("fedavg", "fedsam")
    )
    statistics = [n for n in plain if n.endswith(("mean", "var", "tracked"))]
    assert len(statistics) == 60
    bitwise({n: found[n] for n in statistics}, {n: plain[n] for n in statistics})
    assert not torch.equal(found["backbone.net.conv1.weight"], plain["backbone.net.conv1.weight"])


@pytest.mark.parametrize("bn", ["average", "frozen", "local"])
def test_the_second_pass_normalises_as_the_first(start_run, toy_federation, bn):
    run = start_run("fedsam", RESNET, {"federation": {"bn": bn}}, federation=toy_federation)
    method, modes = run.method, []
    layer = method.backbone.net.bn1
    layer.register_forward_hook(
        lambda m, _, out: modes.append((m.training, out.detach().mean().item()))
    )
    counted = method.state_dict()["backbone.net.bn1.num_batches_tracked"]
    fit(run)
    (first, mean), (second, other) = modes
    assert first == second == (bn != "frozen")
    assert int(counted) == (0 if bn == "frozen" else 1)
    assert layer.track_running_stats
    if bn != "frozen":  # batch statistics make the output's mean that of the biases
        assert mean == pytest.approx(0, abs=1e-5)
        assert abs(other) < 0.01


class Dropping(FedSAM):
    """Records its dropout masks."""

    def build(self):
        self.masks = []

    def features(self, images):
        features = super().features(images)
        self.masks.append(F.dropout(torch.ones_like(features), training=self.training))
        return features * self.masks[-1]


def test_both_passes_drop_the_same_features(start_run):
    run = start_run(Dropping, hyper(rho=0.05))
    fit(run)
    first, again, second, once_more = run.method.masks
    bitwise(again, first)
    bitwise(once_more, second)
    assert not torch.equal(first[:1], second[:1])

    plain = start_run(Dropping, hyper(rho=0.0))
    fit(plain)
    bitwise(plain.method.masks, [first, second])


# -------------------------------------------------------------------------- degenerate, messages


def test_a_radius_is_not_negative():
    with refused(SettingsError, "hyper.rho: -1 is not valid"):
        validate(FedSAMSettings, {"rho": -1}, "hyper.")
    assert validate(FedSAMSettings, {}).rho == 0.05


class TestFedSAM(MethodTester):
    name = "fedsam"
    layer = ALL
    twins = (Twin({"rho": 0.0}, ALL), Twin({"rho": 0.0}, {**ALL, **SGD}))
    apart = ({"rho": 0.0}, {"rho": 0.5})
    models = (1, 1)
