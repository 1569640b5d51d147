"""FedIIR: published numbers, the two exchanges, the mean gradient, and when it equals FedAvg."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import BackboneSettings, TrainSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Task, nbytes
from feddg_bench.core.server import Ledger, NoReplyError
from feddg_bench.models.backbones import build_backbone
from feddg_methods.fediir import (
    FedIIR,
    FedIIRSettings,
    gradient_penalty,
    head_gradient,
    mean_gradient,
    moving_average,
)
from tests.helpers import ALL, UNIFORM, bitwise, hyper
from tests.tester import MethodTester, Twin

near = partial(assert_close, rtol=0, atol=2e-10)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


# ---------------------------------------------------------------------- published numbers

W, B = tensor((0.1, -0.2), (0.0, 0.3), (0.2, 0.1)), tensor(0.0, 0.1, -0.1)
Z, LABELS = tensor((1, 2), (-1, 0.5)), torch.tensor([0, 2])
LOSS = 1.510198785258507
GRADIENT = {
    "weight": tensor(
        (-0.5518177734, -0.7484756599), (0.0225139236, 0.6020294255), (0.5293038498, 0.1464462344)
    ),
    "bias": tensor(-0.2676898639, 0.4681151862, -0.2004253224),
}


class Pixels(nn.Module):
    """Returns an image's values as its features."""

    num_features = 2

    def forward(self, images):
        return images.flatten(1)


def build(**values):
    settings = validate(FedIIRSettings, values)
    method = FedIIR(settings, backbone=Pixels(), num_classes=3, train=TrainSettings()).double()
    method.classifier.weight.data, method.classifier.bias.data = W.clone(), B.clone()
    return method


def client_with(*batches, broadcast=None):
    return SimpleNamespace(
        train=TrainSettings(),
        fabric=SimpleNamespace(autocast=nullcontext),
        batches=lambda **_: iter(batches),
        broadcast=broadcast or {},
    )


def total(method, mean, z=Z):
    """Return the loss of the class's training step."""
    with method.state.serving(client_with(broadcast={"mean_gradient": mean})):
        return method.training_step((z[:, None, None], LABELS), 0)


def test_gradient_of_the_head():
    loss, gradient = head_gradient(build().classifier, Z, LABELS)
    assert loss.item() == pytest.approx(LOSS, abs=1e-12)
    near(gradient, GRADIENT)


def test_first_round_of_one_client():
    """From zero, the mean is 5 % of the gradient; the penalty's root is the other 95 %."""
    method = build()
    sent = method.head_gradients(client_with((Z[:, None, None], LABELS)))
    assert sent["batches"] == 1
    near(sent["gradient"], GRADIENT)
    mean = moving_average(None, mean_gradient([(sent["gradient"], 1)]), 0.95)
    near(mean, {name: 0.05 * value for name, value in GRADIENT.items()})
    _, gradient = head_gradient(method.classifier, Z, LABELS)
    assert gradient_penalty(gradient, mean).item() == pytest.approx(1.6788612211, abs=1e-9)
    assert total(method, mean).item() == pytest.approx(1.5118776465, abs=1e-9)


def test_penalty_and_its_gradients():
    method = build(gamma=1e-2)
    mean = {"weight": tensor((0.1, 0), (0, 0.1), (0, 0)), "bias": torch.zeros(3).double()}
    z = Z.clone().requires_grad_()
    loss = total(method, mean, z)
    loss.backward()
    assert loss.item() == pytest.approx(1.5289007024, abs=1e-9)
    assert (loss.item() - LOSS) / 1e-2 == pytest.approx(1.8701917096, abs=1e-8)
    near(
        method.classifier.weight.grad,
        tensor(
            (-0.5567270644, -0.7591885239),
            (0.0248868941, 0.6130230016),
            (0.5318401703, 0.1461655223),
        ),
    )
    near(z.grad, tensor((-0.0013423106, 0.1836221105), (-0.0648447198, 0.0015898248)))


# --------------------------------------------------------------------- oracles in NumPy


def oracle(w, b, z, y, mean_w, mean_b, gamma):
    """Return cross-entropy, its gradients to W and b, penalty and total."""
    logits = z @ w.T + b
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    delta = (p - np.eye(len(b))[y]) / len(y)
    g_w, g_b = delta.T @ z, delta.sum(0)
    penalty = ((g_w - mean_w) ** 2).sum() + ((g_b - mean_b) ** 2).sum()
    return loss, g_w, g_b, penalty, loss + gamma * penalty


@pytest.mark.parametrize("seed", range(8))
def test_total_and_its_gradients_in_numpy(seed):
    rng = np.random.default_rng(seed)
    size, width, classes = (1, 3, 4) if seed == 0 else (5, 3, 4)
    w, b = rng.normal(size=(classes, width)), rng.normal(size=classes)
    z, y = rng.normal(size=(size, width)), rng.integers(classes, size=size)
    mean_w, mean_b = rng.normal(size=w.shape), rng.normal(size=b.shape)
    head = nn.Linear(width, classes).double()
    head.weight.data, head.bias.data = torch.from_numpy(w), torch.from_numpy(b)
    features = torch.from_numpy(z).requires_grad_()
    loss, gradient = head_gradient(head, features, torch.from_numpy(y), create_graph=True)
    mean = {"weight": torch.from_numpy(mean_w), "bias": torch.from_numpy(mean_b)}
    whole = loss + 0.7 * gradient_penalty(gradient, mean)
    whole.backward()

    exact = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9)
    expected = oracle(w, b, z, y, mean_w, mean_b, 0.7)
    exact(loss.item(), expected[0])
    exact(gradient["weight"].detach(), expected[1])
    exact(gradient["bias"].detach(), expected[2])
    exact(whole.item(), expected[4])
    for found, place in ((head.weight.grad, 0), (head.bias.grad, 1), (features.grad, 2)):
        for at in np.ndindex(found.shape):
            sides = []
            for step in (1e-5, -1e-5):
                moved = [w.copy(), b.copy(), z.copy()]
                moved[place][at] += step
                sides.append(oracle(*moved, y, mean_w, mean_b, 0.7)[4])
            exact(found[at].item(), (sides[0] - sides[1]) / 2e-5, atol=1e-8)


class Penalised(nn.Module):
    """Cross-entropy plus the penalty, as a function of features."""

    def __init__(self, head, mean):
        super().__init__()
        self.head, self.mean = head, mean

    def forward(self, z, labels):
        loss, gradient = head_gradient(self.head, z, labels, create_graph=True)
        return loss + 0.7 * gradient_penalty(gradient, self.mean)


def test_gradients_through_a_hidden_layer():
    torch_rng = torch.Generator().manual_seed(0)
    head = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for parameter in head.parameters():
        nn.init.normal_(parameter, generator=torch_rng)
    mean = {n: torch.ones_like(p).detach() for n, p in head.named_parameters()}
    module = Penalised(head, mean)
    names, values = zip(*module.named_parameters(), strict=True)
    y = torch.tensor([0, 1, 1])

    def loss(z, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (z, y))

    z = torch.randn(3, 3, generator=torch_rng).double()
    assert gradcheck(loss, [leaf.detach().clone().requires_grad_() for leaf in (z, *values)])


# ------------------------------------------------------------------------ the mean gradient

SUMS = [({"v": tensor(3, 0)}, 3), ({"v": tensor(0, 2)}, 1)]


@pytest.mark.parametrize(("over", "expected"), [("batches", (0.75, 0.5)), ("clients", (0.5, 1.0))])
def test_mean_over_batches_or_clients(over, expected):
    near(mean_gradient(iter(SUMS), over=over), {"v": tensor(*expected)})


@pytest.mark.parametrize("over", ["batches", "clients"])
def test_mean_gradient_in_numpy(over):
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 6, size=7)
    batches = [rng.normal(size=(n, 4)) for n in counts]
    sums = [
        ({"v": torch.from_numpy(rows.sum(0))}, int(n))
        for rows, n in zip(batches, counts, strict=True)
    ]
    expected = {
        "batches": np.concatenate(batches).mean(0),
        "clients": np.mean([rows.mean(0) for rows in batches], axis=0),
    }[over]
    np.testing.assert_allclose(mean_gradient(sums, over=over)["v"], expected, rtol=1e-9)


def test_no_more_than_two_clients_gradients_are_alive(counted):
    mean_gradient((counted(SUMS[0][0]), 3) for _ in range(20))
    assert counted.most <= 2


class OfAnyForm(FedIIR):
    """Accepts gradients of two numbers, which do not have the classifier's form."""

    uplink: ClassVar = {call: tuple(parts) for call, parts in FedIIR.uplink.items()}


class Scripted:
    """Clients with predefined answers, which do not train."""

    workers = 1

    def __init__(self, answers):
        self.answers = answers
        self.memories = {}
        self.tasks = []

    def start(self, _spec, _method):
        pass

    def map(self, tasks):
        for task in tasks:
            self.tasks.append(task)
            value = LocalUpdate(dict(task.weights))
            if task.call == "head_gradients":
                gradient, batches = self.answers[task.client]
                value = {"gradient": gradient, "batches": batches}
            yield Reply(task.client, 10, value, {}, {})


def scripted(start_run, answers, **values):
    run = start_run(OfAnyForm, hyper(**values), executor=Scripted(answers))
    run.server.cohort = tuple(answers)
    return run


def play(run, rounds):
    """Return the mean gradient sent to clients and the dropped clients, by round."""
    told, dropped = [], []
    for _ in range(rounds):
        run.server.round += 1
        run.server.ledger = Ledger()
        run.method.run_round(run.server)
        told.append(run.server.broadcast["mean_gradient"]["v"])
        dropped.append([entry["client"] for entry in run.server.ledger.dropped])
    return told, dropped


ANSWERS = {"client_0": SUMS[0], "client_2": SUMS[1]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"ema": 0.0}, (0.75, 0.5)),
        ({"ema": 0.0, "mean": "clients"}, (0.5, 1.0)),
        ({}, (0.05 * 0.75, 0.05 * 0.5)),
        ({"ema_bias_correction": True}, (0.75, 0.5)),
        ({"ema": 0.9, "mean": "clients"}, (0.05, 0.1)),
    ],
    ids=str,
)
def test_what_the_first_round_tells(start_run, values, expected):
    told, _ = play(scripted(start_run, ANSWERS, **values), 1)
    near(told[0], tensor(*expected))


@pytest.mark.parametrize(
    ("correct", "expected"), [(False, (0.142625, 0.28525)), (True, (1.0, 2.0))]
)
def test_three_rounds_of_a_constant_gradient(start_run, correct, expected):
    run = scripted(start_run, {"client_1": ({"v": tensor(2, 4)}, 2)}, ema_bias_correction=correct)
    told, _ = play(run, 3)
    near(told[2], tensor(*expected))
    near(run.server.memory["mean_gradient"]["v"], tensor(0.142625, 0.28525))
    assert run.server.memory["updates"] == 3


def test_the_average_follows_a_changing_gradient(start_run):
    run = scripted(start_run, dict(ANSWERS), ema=0.5)
    expected = np.zeros(2)
    for value in ((1.0, 2.0), (-3.0, 0.5), (0.0, 4.0)):
        run.executor.answers = {name: ({"v": tensor(*value)}, 1) for name in ANSWERS}
        expected = 0.5 * expected + 0.5 * np.array(value)
        told, _ = play(run, 1)
        near(told[0], torch.from_numpy(expected))


def test_a_client_whose_gradient_is_not_finite_counts_for_nothing(start_run):
    answers = {**ANSWERS, "client_3": ({"v": tensor(np.nan, 1)}, 50)}
    told, dropped = play(scripted(start_run, answers, ema=0.0), 1)
    near(told[0], tensor(0.75, 0.5))
    assert dropped == [["client_3"]]


def test_if_no_gradient_is_finite_nothing_changes(start_run):
    run = scripted(start_run, dict(ANSWERS), ema=0.5)
    play(run, 1)
    before = run.server.memory["mean_gradient"]["v"].clone()
    weights = {name: value.clone() for name, value in run.server.weights.items()}
    run.executor.answers = {name: ({"v": tensor(np.inf, 1)}, 1) for name in ANSWERS}
    with pytest.raises(NoReplyError):
        play(run, 1)
    bitwise(run.server.memory["mean_gradient"]["v"], before)
    assert run.server.memory["updates"] == 1
    bitwise(run.server.weights, weights)
    run.executor.answers = {name: ({"v": tensor(1, 2)}, 1) for name in ANSWERS}
    told, _ = play(run, 1)
    near(told[0], 0.5 * before + 0.5 * tensor(1, 2))


# -------------------------------------------------------------------- the first exchange


def gradients(run, client):
    task = Task(client, "head_gradients", 1, run.server.weights, {})
    return run.executor.worker.run(task).value


def test_gradients_are_summed_over_all_batches(start_run):
    """9 images in batches of 8: the last batch of one counts as much as the first."""
    run = start_run("fediir")
    sent = gradients(run, "client_0")
    assert sent["batches"] == 2
    method, expected = run.method.train(), {}
    for images, labels in run.executor.worker.data["client_0"].batches(
        shuffle=True,
        augment=True,
        views=1,
        companions=None,
        generator=torch_generator(0, "loader", 1, 1, "client_0"),  # after the one local epoch
    ):
        method.zero_grad()
        F.cross_entropy(method(images), labels).backward()
        for name, parameter in method.classifier.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad.clone()
    assert_close(sent["gradient"], expected, rtol=1e-5, atol=1e-6)


def test_the_first_exchange_trains_nothing(start_run, toy_federation):
    """Neither parameters nor the statistics of batch normalisation change."""
    resnet = {"backbone": {"name": "resnet18", "pretrained": False}, "train": {"batch_size": 8}}
    run = start_run("fediir", resnet, federation=toy_federation)
    sent = gradients(run, "client_1")
    bitwise(run.method.state.federated_weights(), run.server.weights)
    assert any(name.endswith("running_mean") for name in run.server.weights)
    assert run.method.training
    # in training mode the same images give a different gradient
    run.method.eval = lambda: run.method
    other = gradients(run, "client_1")
    assert not torch.allclose(other["gradient"]["weight"], sent["gradient"]["weight"], rtol=1e-3)


def test_the_first_exchange_comes_before_training_at_the_same_weights(start_run, recorder):
    run = start_run("fediir", ALL, executor=recorder)
    run.rounds(2)
    calls = [(task.round, task.call) for task in recorder.tasks]
    assert calls == [
        (round, call) for round in (1, 2) for call in ("head_gradients", "fit") for _ in range(4)
    ]
    for first, second in zip(recorder.tasks[8:12], recorder.tasks[12:], strict=True):
        bitwise(first.weights, second.weights)
        assert first.broadcast == {}
        assert set(second.broadcast) == {"mean_gradient"}
    counts = [reply.value["batches"] for reply in recorder.replies[:4]]
    assert counts == [2, 2, 2, 2]
    total = sum(reply.value["gradient"]["weight"].double() for reply in recorder.replies[:4])
    told = recorder.tasks[4].broadcast["mean_gradient"]["weight"]
    assert_close(told.double(), 0.05 * total / 8, rtol=1e-5, atol=1e-8)


# ----------------------------------------------------------------------- when it equals FedAvg


@pytest.mark.parametrize(
    ("layer", "shares"),
    [({}, [1, 1, 1, 1]), ({"federation": {"weighting": "samples"}}, [9, 11, 12, 12])],
    ids=["default", "samples"],
)
def test_models_count_equally_unless_told_otherwise(start_run, recorder, layer, shares):
    run = start_run("fediir", ALL, layer, executor=recorder)
    run.rounds(1)
    rows = [reply.value.weights["classifier.weight"].double() for reply in recorder.replies[4:]]
    expected = sum(n * row for n, row in zip(shares, rows, strict=True)) / sum(shares)
    assert_close(run.server.weights["classifier.weight"].double(), expected, rtol=1e-6, atol=1e-7)


# -------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_the_gradient_travels_once_each_way(start_run, head):
    """|phi| floats and a number up, |phi| floats down, for each participant, newcomers or not."""
    size = {"linear": 128 * 3 + 3, "mlp": 128 * 64 + 64 + 64 * 3 + 3}[head] * 4
    run = start_run("fediir", hyper(head=head))
    model = nbytes(run.server.weights)
    for result in run.rounds(3)[1:]:
        assert result.ledger.bytes == {"up": 2 * (model + size + 8), "down": 2 * (model + size)}


@pytest.mark.parametrize(
    ("backbone", "classes", "head", "expected"),
    [
        ("resnet18", 7, "mlp", 532_508),
        ("resnet50", 65, "mlp", 8_659_204),
        ("mobilenet_v3_large", 7, "linear", 35_868),
    ],
)
def test_published_sizes_of_the_gradient(backbone, classes, head, expected):
    settings = validate(BackboneSettings, {"name": backbone, "pretrained": False})
    with torch.device("cpu"):
        method = FedIIR(
            validate(FedIIRSettings, {"head": head}),
            backbone=build_backbone(settings),
            num_classes=classes,
            train=TrainSettings(),
        )
    assert nbytes(dict(method.classifier.named_parameters())) == expected


# -------------------------------------------------------------------------------- training


def test_the_penalty_pulls_the_gradient_to_the_mean():
    """Without it the gradient goes to zero, and its distance to the mean is the mean's norm."""

    def distance(gamma):
        method = build(gamma=gamma)
        optimizer = torch.optim.SGD(method.parameters(), lr=0.05)
        for _ in range(200):
            optimizer.zero_grad()
            total(method, mean).backward()
            optimizer.step()
        return gradient_penalty(head_gradient(method.classifier, Z, LABELS)[1], mean).item()

    mean = {name: value / 2 for name, value in GRADIENT.items()}
    assert distance(1e-9) > 0.3
    assert distance(10.0) < 0.01


def test_half_precision_keeps_the_gradient_exact():
    """Under autocast the head's gradient equals that in float32, and is differentiable."""
    head = nn.Linear(16, 3)
    z = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    expected_loss, expected = head_gradient(head, z.float(), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z.requires_grad_()
        loss, gradient = head_gradient(head, z, y, create_graph=True)
        penalty = gradient_penalty(gradient, {n: torch.ones_like(g) for n, g in expected.items()})
    bitwise(loss, expected_loss)
    bitwise({n: g.detach() for n, g in gradient.items()}, expected)
    penalty.backward()
    assert penalty.dtype == torch.float32
    assert z.grad.dtype == torch.bfloat16
    assert bool((z.grad != 0).any())
    assert bool((head.weight.grad != 0).any())


def test_a_hidden_layer(start_run):
    """Kaiming's normal distribution: variance 2 / inputs."""
    weights = start_run("fediir", hyper(head="mlp")).server.weights
    assert [tuple(weights[f"classifier.{i}.weight"].shape) for i in (0, 2)] == [(64, 128), (3, 64)]
    deviation = float(weights["classifier.0.weight"].std())
    assert deviation == pytest.approx((2 / 128) ** 0.5, rel=0.05)


class TestFedIIR(MethodTester):
    """client_0 has one batch of 9 images, the others have two."""

    name = "fediir"
    layer = {"train": {"batch_size": 9}, **ALL, **hyper(gamma=1.0)}
    rounds = 2
    twins = (
        Twin({"gamma": 0.0}, only_theirs=UNIFORM),
        Twin({"gamma": 0.0, "mean": "clients"}, only_theirs=UNIFORM),
        Twin(
            {"gamma": 0.0, "ema_bias_correction": True},
            {"train": {"precision": "bf16-mixed"}},
            only_theirs=UNIFORM,
        ),
    )
    apart = (
        {"gamma": 0.0},
        {"gamma": 0.1},
        {"ema": 0.5},
        {"ema_bias_correction": True},
        {"mean": "clients"},
        {"head": "mlp"},
    )
    wrong = ({"gamma": -1.0}, {"ema": 1.0}, {"mean": "images"}, {"head": "deep"})
