"""FedADG: losses worked out by hand, one batch against float64 numbers, and messages."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.streams import torch_generator
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import BackboneSettings, TrainSettings
from feddg_bench.core.messages import Task, nbytes
from feddg_bench.data.federated import Federation
from feddg_bench.models.backbones import BACKBONES, build_backbone
from feddg_bench.models.suitability import ANY_SIDE, SIDES
from feddg_methods.fedadg import (
    VARIANTS,
    Discriminator,
    FedADG,
    FedADGSettings,
    Generator,
    alignment_loss,
    discriminator_loss,
    generator_loss,
    non_negative,
    phases,
    smoothed_cross_entropy,
)
from tests.helpers import PLAIN, bitwise, hyper, refused
from tests.tester import MethodTester, Twin

SMALL = {"hidden": 16, "projection": 8}
small = partial(hyper, **SMALL)


# --------------------------------------------------------------------------- losses by hand

LOGITS, LABEL = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
ON_GENERATED, ON_FEATURES = torch.tensor([0.8, 0.6]), torch.tensor([0.3, 0.4])


@pytest.mark.parametrize(
    ("smoothing", "spread", "expected"),
    [
        (0.2, "others", 0.669846),
        (0.2, "all", 0.503179),
        (0.0, "others", 0.169846),
        (0.0, "all", 0.169846),
    ],
)
def test_label_smoothing(smoothing, spread, expected):
    loss = smoothed_cross_entropy(LOGITS, LABEL, smoothing, spread)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("form", "discriminator", "generator"), [("pacs", 0.225, 0.5), ("vlcs", -0.925, 0.1)]
)
def test_losses_of_the_players(form, discriminator, generator):
    loss = discriminator_loss(ON_GENERATED, ON_FEATURES, form)
    assert loss.item() == pytest.approx(discriminator, abs=1e-6)
    assert generator_loss(ON_GENERATED, form).item() == pytest.approx(generator, abs=1e-6)
    assert alignment_loss(ON_FEATURES).item() == pytest.approx(0.425, abs=1e-6)


@given(seed=st.integers(0, 10**6), classes=st.integers(2, 9), smoothing=st.floats(0, 0.49))
def test_losses_against_float64(seed, classes, smoothing):
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(size=(5, classes)) * 3, rng.integers(0, classes, 5)
    g, f = rng.uniform(size=(2, 5))
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    right = np.eye(classes)[labels]
    targets = {
        "others": (1 - smoothing) * right + smoothing / (classes - 1) * (1 - right),
        "all": (1 - smoothing) * right + smoothing / classes,
    }
    for spread, target in targets.items():
        found = smoothed_cross_entropy(
            torch.tensor(logits), torch.tensor(labels), smoothing, spread
        )
        assert found.item() == pytest.approx(-(target * logp).sum(1).mean(), rel=1e-9)
    g_, f_ = torch.tensor(g), torch.tensor(f)
    for found, expected in (
        (discriminator_loss(g_, f_, "pacs"), np.mean((1 - g) ** 2 + f**2)),
        (discriminator_loss(g_, f_, "vlcs"), -np.mean(g**2 + (1 - f) ** 2)),
        (alignment_loss(f_), np.mean((1 - f) ** 2)),
        (generator_loss(g_, "pacs"), np.mean(g**2)),
        (generator_loss(g_, "vlcs"), np.mean((1 - g) ** 2)),
    ):
        assert found.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("spread", ["others", "all"])
def test_gradient_of_the_smoothed_cross_entropy(spread):
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 2, 1, 1])
    assert gradcheck(lambda x: smoothed_cross_entropy(x, labels, 0.2, spread), logits)


@pytest.mark.parametrize("form", ["pacs", "vlcs"])
@pytest.mark.parametrize("label", ["before", "after"])
def test_gradients_through_both_networks(form, label):
    torch.manual_seed(0)
    generator = Generator(noise=2, classes=3, features=4, hidden=6, relu=False).double()
    discriminator = Discriminator(features=4, classes=3, projection=5, label=label).double()
    y = torch.eye(3, dtype=torch.float64)
    u, f = torch.rand(3, 2, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)

    def losses(u, f):
        on_generated, on_features = discriminator(generator(u, y), y), discriminator(f, y)
        return (
            discriminator_loss(on_generated, on_features, form),
            alignment_loss(on_features),
            generator_loss(on_generated, form),
        )

    assert gradcheck(losses, (u.requires_grad_(), f.requires_grad_()), atol=1e-9)


def test_losses_are_float32_in_half_precision():
    discriminator = Discriminator(features=4, classes=3, projection=5, label="before")
    with torch.autocast("cpu", torch.bfloat16):
        on_features = discriminator(torch.rand(2, 4), torch.eye(3)[:2])
        loss = smoothed_cross_entropy(torch.rand(2, 3).bfloat16(), torch.tensor([0, 1]), 0.1)
        assert on_features.dtype == loss.dtype == torch.float32
        assert discriminator_loss(on_features, on_features).dtype == torch.float32


# --------------------------------------------------------------------------- the two networks


@pytest.mark.parametrize(
    ("features", "classes", "noise", "generator", "discriminator"),
    [
        (2048, 7, 1024, 50_470_912, 12_619_780),
        (2048, 7, 2048, 67_248_128, 12_619_780),
        (1280, 7, 1280, 42_079_232, 9_474_052),
    ],
)
def test_published_sizes(features, classes, noise, generator, discriminator):
    with torch.device("meta"):
        g = Generator(noise=noise, classes=classes, features=features, hidden=4096, relu=True)
        d = Discriminator(features=features, classes=classes, projection=1024, label="before")
    assert sum(tensor.nbytes for tensor in g.state_dict().values()) == generator
    assert sum(tensor.nbytes for tensor in d.state_dict().values()) == discriminator


def test_how_weights_start():
    torch.manual_seed(0)
    g = Generator(noise=30, classes=10, features=50, hidden=200, relu=True)
    for layer, bound in ((g.net[0], (6 / 240) ** 0.5 / 2), (g.net[2], (6 / 250) ** 0.5 / 2)):
        assert 0.98 * bound < layer.weight.abs().max().item() <= bound
    d = Discriminator(features=50, classes=10, projection=20, label="before")
    assert d.projection.weight.norm().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "projection"),
    [*((name, 0) for name in sorted({*BACKBONES} - {"features"})), ("small_cnn", 16)],
)
def test_the_last_relu_is_there_where_features_cannot_be_negative(name, projection):
    """Against the backbones' outputs for noise."""
    torch.manual_seed(0)
    settings = BackboneSettings(name=name, pretrained=False, projection=projection)
    backbone = build_backbone(settings).eval()
    with torch.no_grad():
        side = SIDES.get(name, ANY_SIDE)[1] or 64
        lowest = float(backbone(torch.rand(2, 3, side, side)).min())
    assert non_negative(backbone) == (lowest >= 0)


def build(backbone=None, train=None, classes=3, **values):
    return FedADG(
        validate(FedADGSettings, {**SMALL, **values}),
        backbone=backbone or build_backbone(BackboneSettings(name="small_cnn", pretrained=False)),
        num_classes=classes,
        train=TrainSettings(**(train or {})),
    )


def test_the_relu_can_be_chosen():
    linear = BackboneSettings(name="small_cnn", pretrained=False, projection=4)
    ends = [
        type(build(build_backbone(linear), relu=relu).generator.net[-1])
        for relu in ("auto", "always", "never")
    ]
    assert ends == [nn.Identity, nn.ReLU, nn.Identity]
    assert isinstance(build().generator.net[-1], nn.ReLU)
    assert isinstance(build(relu="never").generator.net[-1], nn.Identity)


# ------------------------------------------------------------ one batch against float64 numbers


class Pixels(nn.Module):
    """Two features: the first two pixels times a trained matrix."""

    num_features = 2

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2, bias=False)

    def forward(self, images):
        return self.net(images[:, 0, 0, :2].to(self.net.weight))


LEVELS = np.array([[10, 200], [120, 40], [250, 90], [30, 30]], dtype=np.uint8)
LABELS = np.array([0, 1, 2, 1])
LR, ADVERSARY_LR, DECAY = 0.3, 0.2, 0.01


def one_batch(start_run, **values):
    """Return the parameters before and after one batch of four images, in float64."""
    torch.manual_seed(1)
    images = np.zeros((4, 8, 8, 3), dtype=np.uint8)
    images[:, 0, :2, 0] = LEVELS
    train = {"optimizer": "sgd", "lr": LR, "batch_size": 4, "channels_last": False}
    values = {
        "hidden": 3,
        "projection": 4,
        "relu": "never",
        "adversary_lr": ADVERSARY_LR,
        "adversary_weight_decay": DECAY,
        "first_epochs": 0,
        "second_epochs": 1,
        **values,
    }
    method = build(Pixels(), train, **values).double()
    for p in method.discriminator.parameters():
        p.data.mul_(3)  # away from D = 1/2, where all gradients are small
    federation = Federation(images, 8, LABELS, {"client_0": np.arange(4)}, (), 3)
    layer = {"train": train, "federation": {"per_round": None}, "partition": {"clients": 1}}
    run = start_run("fedadg", PLAIN, layer, federation=federation, method=method)
    worker = run.executor.worker
    before = {n: t.detach().clone().numpy() for n, t in method.state_dict().items()}
    worker.run(Task("client_0", "fit", 1, run.server.weights, {}))
    after = {n: t.detach().clone().numpy() for n, t in method.state_dict().items()}
    return before, after, method


def leaky(x):
    return np.where(x > 0, x, 0.01 * x)


class Oracle:
    """The formulas of the method on the weights ``p``; gradients by central differences."""

    def __init__(self, weights, noise, s):
        order = torch.randperm(4, generator=torch_generator(0, "loader", 0, 1, "client_0")).numpy()
        self.p, self.s = {n: w.copy() for n, w in weights.items()}, s
        self.x, labels = LEVELS[order] / 255, LABELS[order]
        self.right = np.eye(3)[labels]
        self.y, self.u = s.label_scale * self.right, noise

    def f(self):
        return self.x @ self.p["backbone.net.weight"].T

    def g(self):
        p = self.p
        inside = np.hstack([self.u, self.y]) @ p["generator.net.0.weight"].T
        inside = leaky(inside + p["generator.net.0.bias"])
        return inside @ p["generator.net.2.weight"].T + p["generator.net.2.bias"]

    def d(self, z):
        p, after = self.p, self.s.label == "after"
        seen = z if after else np.hstack([z, self.y])
        seen = seen @ p["discriminator.projection.weight"].T
        seen = np.hstack([seen, self.y]) if after else seen
        seen = leaky(seen @ p["discriminator.net.0.weight"].T + p["discriminator.net.0.bias"])
        score = seen @ p["discriminator.net.2.weight"].T + p["discriminator.net.2.bias"]
        return 1 / (1 + np.exp(-score[:, 0]))

    def loss_d(self, f, g):
        on_f, on_g = self.d(f), self.d(g)
        if self.s.form == "pacs":
            return np.mean((1 - on_g) ** 2 + on_f**2)
        return -np.mean(on_g**2 + (1 - on_f) ** 2)

    def loss_fc(self):
        logits = self.f() @ self.p["classifier.weight"].T + self.p["classifier.bias"]
        logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        e = self.s.smoothing
        target = (1 - e) * self.right + (
            e / 2 * (1 - self.right) if self.s.spread == "others" else e / 3
        )
        ce = -(target * logp).sum(1).mean()
        w = self.s.ce_weight
        return w * ce + (1 - w) * np.mean((1 - self.d(self.f())) ** 2)

    def loss_g(self):
        on_g = self.d(self.g())
        return np.mean(on_g**2 if self.s.form == "pacs" else (1 - on_g) ** 2)

    def descend(self, loss, prefixes, lr, decay=0.0):
        gradients = {}
        for name, weight in self.p.items():
            if name.startswith(prefixes):
                gradients[name] = np.zeros_like(weight)
                for i in np.ndindex(weight.shape):
                    at, values = weight[i], []
                    for h in (1e-5, -1e-5):
                        weight[i] = at + h
                        values.append(loss())
                    weight[i] = at
                    gradients[name][i] = (values[0] - values[1]) / 2e-5
        for name, gradient in gradients.items():
            self.p[name] -= lr * (gradient + decay * self.p[name])

    def play(self):
        def train_d():
            f, g = self.f(), self.g()  # constants: no other player moves
            self.descend(lambda: self.loss_d(f, g), "discriminator", ADVERSARY_LR, DECAY)

        def train_fc():
            self.descend(self.loss_fc, ("backbone", "classifier"), LR)

        first = self.s.order == "discriminator_first"
        for player in (train_d, train_fc) if first else (train_fc, train_d):
            player()
        if self.s.train_generator:
            self.descend(self.loss_g, "generator", ADVERSARY_LR, DECAY)
        return self.p


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"label": "after", "label_scale": 0.6},
        {"form": "vlcs", "ce_weight": 0.3},
        {"order": "model_first", "spread": "all", "smoothing": 0.2},
        {"variant": "released_bai"},
        {"variant": "released_fedccrl"},
    ],
    ids=str,
)
def test_one_batch(start_run, values):
    """All players step in order, each with the gradient of its own loss only."""
    before, after, method = one_batch(start_run, **values)
    noise = torch.rand(
        4, method.generator.noise, generator=torch_generator(0, "noise", 1, "client_0")
    )
    # Made-up weights and decay, for large steps; the variants' own decay is tested below.
    expected = Oracle(before, noise.numpy().astype(float), method.settings).play()
    for name, weight in expected.items():
        assert_close(after[name], weight, rtol=1e-6, atol=1e-9)
        frozen = name.startswith("generator") and not method.settings.train_generator
        moved = np.abs(after[name] - before[name]).max()
        assert (moved == 0) if frozen else (moved > 1e-6), name


# ---------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("variant", "weights", "noise", "epochs", "discriminator", "decay"),
    [
        ("released_bai", (0.15, 0.2, "all", "second"), 0.0, (1, 1), "local", 1e-5),
        ("released_fedccrl", (0.45, 0.0, "others", "both"), 1.0, (3, 3), "averaged", 1e-4),
    ],
)
def test_variants(variant, weights, noise, epochs, discriminator, decay):
    s = validate(FedADGSettings, {"variant": variant})
    assert (s.ce_weight, s.smoothing, s.spread, s.smoothing_in) == weights
    assert (s.noise, s.discriminator, s.adversary_weight_decay) == (noise, discriminator, decay)
    assert (s.first_epochs, s.second_epochs) == epochs
    assert (s.train_generator, s.form, s.order, s.label_scale, s.relu) == (
        False,
        "vlcs",
        "model_first",
        0.6,
        "always",
    )
    assert validate(FedADGSettings, {"variant": variant, "ce_weight": 0.5}).ce_weight == 0.5


@pytest.mark.parametrize(
    ("given", "local_epochs", "expected"),
    [
        ({}, 1, (0, 1)),
        ({}, 2, (0, 2)),
        ({}, 3, (1, 2)),
        ({}, 10, (3, 7)),
        ({}, 15, (5, 10)),
        ({"first_epochs": 1}, 3, (1, 2)),
        ({"second_epochs": 1}, 3, (2, 1)),
        ({"second_epochs": 4}, 3, (0, 4)),
        ({"first_epochs": 5, "second_epochs": 10}, 1, (5, 10)),
    ],
)
def test_epochs_of_the_phases(given, local_epochs, expected):
    assert phases(validate(FedADGSettings, given), local_epochs) == expected


def test_a_round_costs_as_many_epochs_as_the_frame_says(start_run, monkeypatch):
    epochs = []
    batches = FedADG.batches
    monkeypatch.setattr(
        FedADG, "batches", lambda self, c, e: epochs.append(e) or batches(self, c, e)
    )
    run = start_run(
        "fedadg", small(), {"train": {"local_epochs": 4}, "federation": {"per_round": 1}}
    )
    run.rounds(1)
    assert epochs == [0, 1, 2, 3]


# ------------------------------------------------------------------------------- whole rounds


@pytest.mark.parametrize(
    ("smoothing", "same"),
    [
        ({"smoothing": 0.0}, True),
        ({"smoothing": 0.2, "smoothing_in": "second"}, True),
        ({"smoothing": 0.2}, False),
    ],
    ids=str,
)
def test_without_smoothing_the_first_phase_is_fedavg_bit_for_bit(start_run, smoothing, same):
    """One epoch of E0 equals one epoch of FedAvg; alignment starts after it."""
    layer = {"train": {"local_epochs": 1}}
    expected = start_run("fedavg", layer).server.weights
    run = start_run("fedadg", layer, small(**smoothing, second_epochs=1, first_epochs=1))
    phase_two = []
    run.method.align = lambda *_: (
        phase_two.append({n: run.method.state_dict()[n].clone() for n in expected})
        or torch.zeros(())
    )
    run.rounds(1)
    client = start_run("fedavg", layer)
    client.server.round, client.server.cohort = 1, run.server.cohort
    firsts = [reply.value.weights for reply in client.server.ask(client.method.fit)]
    assert len(phase_two) >= len(firsts) == 2
    for found, fedavg in ((phase_two[0], firsts[0]), (phase_two[-1], firsts[-1])):
        assert all(torch.equal(found[name], fedavg[name]) for name in fedavg) == same


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_who_moves_and_what_travels(start_run, recorder, variant):
    """D = 128, C = 3: the sizes of both networks by the formula, with q = D / 2, 0 and D."""
    run = start_run("fedadg", small(variant=variant), executor=recorder)
    q = {"default": 64, "released_bai": 0, "released_fedccrl": 128}[variant]
    generator = 4 * (16 * (q + 3 + 1) + 128 * (16 + 1))
    discriminator = 4 * (8 * (128 + 3) + 8 * 8 + 8 + 8 + 1)
    before = {n: t.clone() for n, t in run.server.weights.items()}
    result = run.rounds(2)[1]
    model = nbytes(start_run("fedavg").server.weights)
    averaged = variant == "released_fedccrl"
    message = model + generator + averaged * discriminator
    assert result.ledger.bytes == {"up": 2 * message, "down": 2 * message}
    still = {n for n, t in run.server.weights.items() if torch.equal(t, before[n])}
    if variant == "default":
        assert still == set()
    else:
        assert still == {n for n in before if n.startswith("generator.")}
    assert any(n.startswith("discriminator.") for n in before) == averaged
    kept = recorder.replies[0].memory.get("private state", {})
    assert nbytes(kept) == (0 if averaged else discriminator)


def test_every_client_has_its_own_discriminator(start_run, recorder):
    run = start_run("fedadg", small(), executor=recorder)
    initial = {n: t.clone() for n, t in run.method.state.private_weights().items()}
    run.rounds(1)
    states = {c: memory["private state"] for c, memory in recorder.memories.items()}
    assert set(states) == set(run.server.cohort)  # others have none: theirs is initial
    first, second = states.values()
    for name, start in initial.items():
        assert not torch.equal(first[name], start)
        assert not torch.equal(first[name], second[name])
    # and training continues from it
    client = run.server.cohort[0]
    task = Task(client, "fit", 2, run.server.weights, {}, dict(recorder.memories[client]))
    again = recorder.worker.run(task).memory["private state"]
    fresh = recorder.worker.run(Task(client, "fit", 2, run.server.weights, {}))
    name = "discriminator.net.0.weight"
    assert not torch.equal(again[name], fresh.memory["private state"][name])


@pytest.mark.parametrize("state", ["reset", "persist"])
def test_momentum_of_the_adversaries_follows_the_frame(start_run, recorder, state):
    layer = {"train": {"optimizer_state": state}, "federation": {"per_round": 1}}
    run = start_run("fedadg", small(), layer, executor=recorder)
    run.rounds(1)
    memory = recorder.replies[0].memory
    adversaries = {n for n, _ in run.method.named_parameters() if n.startswith(("disc", "gen"))}
    assert set(memory.get("adversary", {})) == (adversaries if state == "persist" else set())

    def second(memory):
        client, weights = recorder.tasks[0].client, run.server.weights
        reply = recorder.worker.run(Task(client, "fit", 2, weights, {}, memory))
        return reply.memory["private state"], reply.value.weights

    kept = second(dict(memory))
    forgot = second({n: v for n, v in memory.items() if n != "adversary"})
    for found, other, name in zip(
        kept, forgot, ("discriminator.net.0.bias", "generator.net.0.weight"), strict=True
    ):
        assert torch.equal(found[name], other[name]) == (state == "reset")


def test_the_means_of_the_discriminator_are_logged(start_run):
    run = start_run("fedadg", small(adversary_lr=0.5), {"train": {"local_epochs": 4}})
    results = run.rounds(3)[1:]
    for result in results:
        means = result.ledger.means()
        assert set(means) == {"loss", "D on features", "D on generated"}
        assert all(0 < means[name] < 1 for name in means if name != "loss")
    last = results[-1].ledger.means()
    assert last["D on generated"] > last["D on features"] + 0.05  # D learns to tell them apart


def test_a_saturated_discriminator_keeps_everything_finite(start_run):
    run = start_run("fedadg", small())
    with torch.no_grad():
        run.executor.worker._initial_private["discriminator.net.2.bias"].fill_(1e4)
    results = run.rounds(1)
    assert results[1].ledger.dropped == []
    assert results[1].ledger.means()["D on features"] == 1
    assert all(bool(t.isfinite().all()) for t in run.server.weights.values())


def test_the_derived_programs_leave_the_model_in_evaluation_mode(start_run):
    layer = {"train": {"local_epochs": 1, "batch_size": 3}, "federation": {"per_round": 1}}
    modes = {}
    for order in ("discriminator_first", "model_first"):
        run = start_run("fedadg", layer, small(order=order, first_epochs=1, second_epochs=1))
        seen = modes.setdefault(order, [])
        features = run.method.features
        run.method.features = lambda x, f=features, r=run, s=seen: (
            s.append(r.method.backbone.training) or f(x)
        )
        reply = run.executor.worker.run(Task("client_0", "fit", 1, run.server.weights, {}))
        assert reply.num_examples == 9
    assert modes["discriminator_first"] == [True] * 6
    assert modes["model_first"] == [True] * 3 + [True, False] + [False, False] * 2


class Normed(Pixels):
    """Two features under batch normalisation."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.net, nn.BatchNorm1d(2))

    def forward(self, images):
        return self.net(images[:, 0, 0, :2])


def normed(start_run, federation, bn, **values):
    """Return a run of a model with batch normalisation, and the batch sizes that it sees."""
    method = FedADG(
        validate(FedADGSettings, {**SMALL, "relu": "never", **values}),
        backbone=Normed(),
        num_classes=3,
        train=TrainSettings(),
        bn=bn,
    )
    layer = {"partition": {"clients": 1}, "federation": {"per_round": None, "bn": bn}}
    run = start_run("fedadg", layer, federation=federation, method=method)
    sizes = []
    features = method.features
    method.features = lambda images: sizes.append(len(images)) or features(images)
    return run, sizes


@pytest.mark.parametrize("first_epochs", [0, 1])
@pytest.mark.parametrize("bn", ["average", "frozen"])
def test_batch_normalisation_never_trains_on_one_image(start_run, toy_federation, first_epochs, bn):
    """Client 0 has nine images: a batch of eight and one of one."""
    epochs = {"first_epochs": first_epochs, "second_epochs": 1}
    run, sizes = normed(start_run, toy_federation, bn, **epochs)
    reply = run.executor.worker.run(Task("client_0", "fit", 1, run.server.weights, {}))
    assert sizes == ([8] if bn == "average" else [8, 1]) * (first_epochs + 1)
    assert all(bool(t.isfinite().all()) for t in reply.value.weights.values())


def test_a_client_of_one_image_sends_what_it_received(start_run, toy_federation):
    clients = {"client_0": toy_federation.clients["client_0"][:1]}
    federation = replace(toy_federation, clients=clients)
    run, sizes = normed(start_run, federation, "average")
    before = {n: t.clone() for n, t in run.server.weights.items()}
    run.server.round = 1
    bitwise(run.method.aggregate(run.server, run.server.ask(run.method.fit)), before)
    assert sizes == []


def test_a_class_that_nobody_holds(start_run, toy_federation):
    """Every client conditions on its own labels only; the fourth class does no harm."""
    run = start_run("fedadg", small(), federation=replace(toy_federation, num_classes=4))
    column = run.server.weights["generator.net.0.weight"][:, -1].clone()
    run.rounds(2)
    after = run.server.weights["generator.net.0.weight"][:, -1]
    decayed = (column - after).abs().max() / column.abs().max()
    assert 0 <= float(decayed) < 1e-5  # by weight decay alone
    assert all(bool(t.isfinite().all()) for t in run.server.weights.values())


def test_mixed_precision_sees_every_step(start_run):
    """F and C use D as it is after its step, not the copy that autocast rounded before."""
    layer = {"train": {"precision": "bf16-mixed"}, "federation": {"per_round": 1}}
    run = start_run("fedadg", layer, small(adversary_lr=2.0))
    method, seen = run.method, []
    discriminator = method.discriminator.forward

    def watched(features, y):
        on_features = discriminator(features, y)
        if features.requires_grad:  # the steps of F and C and of G
            state = copy.deepcopy(method.discriminator.state_dict())
            seen.append((state, features.detach(), y, on_features.detach()))
        return on_features

    method.discriminator.forward = watched
    assert run.rounds(1)[1].ledger.dropped == []
    del method.discriminator.forward
    assert len(seen) >= 4
    for state, features, y, found in seen:
        method.discriminator.load_state_dict(state)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = method.discriminator(features, y)
        assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_schedule_spans_the_frame(start_run):
    """Six epochs a round, not three as in the setup: each rate twice; adversaries' rates stay."""
    layer = {
        "train": {"local_epochs": 3, "schedule": "cosine", "lr": 0.01},
        "federation": {"rounds": 2, "per_round": 1},
    }
    run = start_run("fedadg", layer, small(variant="released_fedccrl"))
    rates, descend = [], run.method.descend

    def watched(loss, player):
        rates.append((player, run.method.players[player][1]["lr"]))
        descend(loss, player)

    run.method.descend = watched
    run.rounds(2)
    model = list(dict.fromkeys(rate for player, rate in rates if player == "F, C"))
    expected = [0.005 * (1 + np.cos(np.pi * e / 6)) for e in range(6)]
    assert model == pytest.approx(expected)
    assert {rate for player, rate in rates if player == "D"} == {7e-4}


class TestFedADG(MethodTester):
    name = "fedadg"
    layer = small()
    twins = tuple(
        Twin(
            {**SMALL, "ce_weight": 1.0, "smoothing": 0.0, "order": order},
            {"train": {"local_epochs": 3}},
            sends=False,
        )
        for order in ("discriminator_first", "model_first")
    )


def test_a_first_phase_that_leaves_nothing_is_refused(start_run):
    with refused(SettingsError, "leaves none of"):
        start_run("fedadg", small(first_epochs=1))
