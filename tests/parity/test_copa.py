"""COPA: the hybrid norm, the ensemble and the local loss by hand, slots, and messages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.streams import torch_stream
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import BackboneSettings, FederationSettings, TrainSettings
from feddg_bench.core.messages import LocalUpdate, Reply, nbytes
from feddg_bench.core.server import Server
from feddg_bench.models.backbones import build_backbone
from feddg_bench.models.batch_norm import batch_norm_state, freeze_batch_norm
from feddg_methods.copa import (
    DEVIATIONS,
    BatchInstanceNorm,
    Copa,
    CopaSettings,
    clip_rho,
    frozen_loss,
    mix_batch_norm,
)
from feddg_methods.fedavg import FedAvg
from tests.helpers import UNIFORM, Features, as_images, bitwise, hyper

close = partial(assert_close, rtol=1e-6, atol=1e-9)
RESNET = {
    "backbone": {"name": "resnet18", "pretrained": False},
    "train": {"batch_size": 16},
    "federation": {"per_round": 2},
}
SMALLER = {"backbone": {"name": "mobilenet_v2"}}
EVERYBODY = {"federation": {"per_round": None}}


# -------------------------------------------------------------- batch-instance normalisation


def backbone(name="resnet18"):
    with torch_stream(0, "init"):
        return build_backbone(BackboneSettings(name=name, pretrained=False))


def images(count=4, side=32):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def normed(x, *, rho, weight, bias, eps, statistics=None):
    """Return the hybrid norm of float64 maps [B, C, H, W], by its definition."""

    def standard(mean, var):
        return (x - mean) / np.sqrt(var + eps)

    across = (x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True))
    if statistics is not None:
        across = tuple(value.reshape(1, -1, 1, 1) for value in statistics)
    within = (x.mean((2, 3), keepdims=True), x.var((2, 3), keepdims=True))
    rho, weight, bias = (value.reshape(1, -1, 1, 1) for value in (rho, weight, bias))
    return weight * (rho * standard(*across) + (1 - rho) * standard(*within)) + bias


def random_layer(rng, channels, rho=None, *, affine=False):
    layer = BatchInstanceNorm(nn.BatchNorm2d(channels), affine=affine).double()
    values = {
        "rho": rng.uniform(0, 1, channels) if rho is None else np.full(channels, rho),
        "batch.weight": rng.normal(1, 0.5, channels),
        "batch.bias": rng.normal(0, 1, channels),
        "batch.running_mean": rng.normal(0, 1, channels),
        "batch.running_var": rng.uniform(0.3, 2, channels),
    }
    state = {name: torch.from_numpy(value) for name, value in values.items()}
    layer.load_state_dict(state, strict=False)
    return layer, values


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (5, 2, 1, 1), (1, 3, 2, 2), (2, 3, 7, 1)], ids=str)
def test_the_hybrid_norm_is_its_formula(seed, affine, training, shape):
    rng = np.random.default_rng(seed)
    layer, v = random_layer(rng, shape[1], affine=affine)
    layer.train(training)
    x = rng.normal(1, 2, shape)
    expected = normed(
        x,
        rho=v["rho"],
        weight=v["batch.weight"],
        bias=v["batch.bias"],
        eps=1e-5,
        statistics=None if training else (v["batch.running_mean"], v["batch.running_var"]),
    )
    close(layer(torch.from_numpy(x)), torch.from_numpy(expected))


@pytest.mark.parametrize(("training", "affine"), [(True, False), (False, False), (False, True)])
def test_the_gradients_of_the_hybrid_norm(training, affine):
    layer, _ = random_layer(np.random.default_rng(0), 2, affine=affine)
    layer.train(training)
    x = torch.randn(3, 2, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    names = [name for name, _ in layer.named_parameters()]

    def call(maps, *parameters):
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, values, (maps,))

    inputs = (x, *(p.detach().clone() for p in layer.parameters()))
    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("training", [True, False])
def test_with_rho_1_it_is_batch_normalisation_and_with_rho_0_instance_normalisation(training):
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    one, _ = random_layer(np.random.default_rng(1), 3, rho=1.0)
    one.train(training)
    found = one(x)
    state = {name.removeprefix("batch."): tensor for name, tensor in one.state_dict().items()}
    plain = nn.BatchNorm2d(3).double().train(training)
    if training:  # the statistics have moved already; they do not matter here
        plain.momentum = 0.0
    plain.load_state_dict({n: t for n, t in state.items() if n != "rho"})
    bitwise(found, plain(x))

    zero, v = random_layer(np.random.default_rng(1), 3, rho=0.0)
    affine = (torch.from_numpy(v["batch.weight"]), torch.from_numpy(v["batch.bias"]))
    close(zero.train(training)(x), F.instance_norm(x, None, None, *affine, eps=1e-5))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "mobilenet_v3_large", "densenet121"])
def test_a_network_computes_at_first_what_it_did_before(name):
    plain, mixed = backbone(name), backbone(name)
    before = set(batch_norm_state(mixed))
    mix_batch_norm(mixed)
    layers = [m for m in mixed.modules() if isinstance(m, BatchInstanceNorm)]
    assert 5 * len(layers) == len(before) == len(batch_norm_state(mixed))
    x = images()
    bitwise(mixed.eval()(x), plain.eval()(x))
    with torch.random.fork_rng([]):  # MobileNetV3 has dropout
        torch.manual_seed(0)
        expected = plain.train()(x)
        torch.manual_seed(0)
        found = mixed.train()(x)
    bitwise(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    theirs = {n.replace(".batch.", "."): p.grad for n, p in mixed.named_parameters()}
    assert all(bool(theirs[n].isfinite().all()) for n in theirs)
    for n, p in plain.named_parameters():  # instance normalisation passes back exact zeros
        bitwise(theirs[n], p.grad)


def test_as_one_scale_and_shift_it_trains_as_before(start_run):
    """With frozen statistics; weights differ only by rounding."""
    frozen = {"federation": {"bn": "frozen"}, "train": {"optimizer": "sgd", "lr": 0.01}}
    found = []
    for affine in (False, True):
        run = start_run("copa", RESNET, frozen, {"hyper": {"affine_norm": affine}})
        run.rounds(1)
        found.append(run.server.weights)
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-3, atol=1e-4)
    assert any(not torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


def test_as_one_scale_and_shift_it_is_exact_for_a_dark_channel():
    """Values far from 0 with little contrast: float32 against float64."""
    layer, _ = random_layer(np.random.default_rng(0), 2, affine=True)
    maps = 5 + 1e-3 * torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    expected = layer.eval()(maps)
    torch.testing.assert_close(layer.float()(maps.float()).double(), expected, rtol=1e-3, atol=2e-3)


def test_mixing_twice_changes_nothing():
    mixed = backbone()
    mix_batch_norm(mixed)
    names = list(mixed.state_dict())
    mix_batch_norm(mixed)
    assert list(mixed.state_dict()) == names


@pytest.mark.parametrize("name", ["small_cnn", "squeezenet1_1"])
def test_a_network_without_batch_normalisation_stays_as_it_is(name):
    mixed = backbone(name)
    before = {n: id(t) for n, t in mixed.state_dict(keep_vars=True).items()}
    mix_batch_norm(mixed)
    assert {n: id(t) for n, t in mixed.state_dict(keep_vars=True).items()} == before


def test_frozen_statistics_are_mixed_with_those_of_the_image():
    rng = np.random.default_rng(5)
    layer, v = random_layer(rng, 3)
    net = nn.Sequential(layer)
    freeze_batch_norm(net)
    x = rng.normal(1, 2, (4, 3, 3, 3))
    expected = normed(
        x,
        rho=v["rho"],
        weight=v["batch.weight"],
        bias=v["batch.bias"],
        eps=1e-5,
        statistics=(v["batch.running_mean"], v["batch.running_var"]),
    )
    close(net.train()(torch.from_numpy(x)), torch.from_numpy(expected))


def test_shares_are_clipped():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(2))
    mix_batch_norm(net)
    net[1].rho.data.copy_(torch.tensor([-0.5, 0.25, 1.5]))
    clip_rho(net)
    bitwise(net[1].rho.data, torch.tensor([0.0, 0.25, 1.0]))
    bitwise(net[2].rho.data, torch.ones(2))


# ----------------------------------------------------------------- a model of four features


def build(slots=2, classes=3, **values):
    with torch_stream(0, "init"):
        return Copa(
            validate(CopaSettings, values),
            backbone=Features(4),
            num_classes=classes,
            train=TrainSettings(),
            clients=tuple(f"client_{i}" for i in range(slots)),
        )


@pytest.mark.parametrize(
    ("ensemble", "expected"),
    [
        ("probabilities", (0.4103016796, 0.2561746857, 0.3335236347)),
        ("logits", (0.3836517312, 0.2326965376, 0.3836517312)),
    ],
)
def test_the_prediction_of_an_ensemble(ensemble, expected):
    method = build(ensemble=ensemble).eval()
    method.ensemble.weight.zero_()
    method.ensemble.bias.copy_(torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 1.0]]))
    logits = method(as_images(torch.rand(5, 4)))
    assert_close(logits.softmax(1), torch.tensor(expected).expand(5, 3), rtol=0, atol=1e-7)
    if ensemble == "probabilities":  # so that cross-entropy is the ensemble's
        assert_close(logits.exp().sum(1), torch.ones(5))


def probabilities(logits):
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


@pytest.mark.parametrize("ensemble", ["probabilities", "logits"])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_the_prediction_is_its_formula(ensemble, slots):
    rng = np.random.default_rng(slots)
    method = build(slots, ensemble=ensemble).double().eval()
    weight, bias = rng.normal(0, 3, (slots, 3, 4)), rng.normal(0, 1, (slots, 3))
    method.ensemble.weight.copy_(torch.from_numpy(weight))
    method.ensemble.bias.copy_(torch.from_numpy(bias))
    z = rng.normal(0, 2, (6, 4))
    logits = np.einsum("scd,bd->bsc", weight, z) + bias
    expected = (
        probabilities(logits).mean(1)
        if ensemble == "probabilities"
        else probabilities(logits.mean(1))
    )
    close(method(as_images(torch.from_numpy(z))).softmax(1), torch.from_numpy(expected))


def test_classifiers_that_are_sure_of_different_classes():
    """With logits too large for exp, the loss is log 2, not infinite, if one of two is right."""
    method = build().eval()
    method.ensemble.weight.zero_()
    method.ensemble.bias.copy_(torch.tensor([[500.0, 0, 0], [0, 500.0, 0]]))
    logits = method(as_images(torch.zeros(3, 4)))
    losses = F.cross_entropy(logits, torch.tensor([0, 1, 2]), reduction="none")
    assert_close(losses, torch.tensor([np.log(2), np.log(2), 500.0], dtype=torch.float32))


# ------------------------------------------------------------------------- the local loss


@pytest.mark.parametrize(
    ("slots", "slot", "beta"), [(2, 0, 1.0), (3, 1, 1.0), (5, 4, 0.3), (3, 2, 0)]
)
def test_the_local_loss_and_its_gradients(slots, slot, beta):
    """CE of the client's own classifier plus beta times the mean CE of the frozen others."""
    rng = np.random.default_rng(slots)
    method = build(slots, beta=beta).double()
    method.slot = slot
    weight, bias = rng.normal(0, 1, (slots, 3, 4)), rng.normal(0, 1, (slots, 3))
    own, own_bias = rng.normal(0, 1, (3, 4)), rng.normal(0, 1, 3)
    method.ensemble.weight.copy_(torch.from_numpy(weight))
    method.ensemble.bias.copy_(torch.from_numpy(bias))
    method.classifier.weight.data.copy_(torch.from_numpy(own))
    method.classifier.bias.data.copy_(torch.from_numpy(own_bias))
    z, labels = rng.normal(0, 1, (6, 4)), rng.integers(0, 3, 6)

    weight[slot], bias[slot] = own, own_bias
    p = probabilities(np.einsum("scd,bd->sbc", weight, z) + bias[:, None])  # [S, B, C]
    share = np.full(slots, beta / (slots - 1))
    share[slot] = 1
    losses = -np.log(p[:, np.arange(6), labels]).mean(1)
    error = (p - np.eye(3)[labels]) / 6
    pixels = as_images(torch.from_numpy(z)).requires_grad_()
    loss = method.training_step((pixels, torch.from_numpy(labels)), 0)
    loss.backward()
    close(loss.detach(), torch.tensor((share * losses).sum()))
    close(pixels.grad[:, 0, 0], torch.from_numpy(np.einsum("s,sbc,scd->bd", share, error, weight)))
    close(method.classifier.weight.grad, torch.from_numpy(error[slot].T @ z))
    close(method.classifier.bias.grad, torch.from_numpy(error[slot].sum(0)))
    assert method.ensemble.weight.grad is None


def test_the_frozen_loss_against_finite_differences():
    logits = torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 1, 0])
    assert torch.autograd.gradcheck(lambda x: frozen_loss(x, labels, 1), logits.requires_grad_())


def test_without_weight_the_frozen_classifiers_do_not_matter(start_run):
    """With beta = 0, f and the own classifier train the same even if the others are infinite."""

    def trained(beta, noise):
        run = start_run("copa", hyper(beta=beta))
        for i in (1, 2, 3):
            run.server.weights["ensemble.weight"][i] += noise
        run.server.round, run.server.cohort = 1, ("client_0",)
        update = next(iter(run.server.ask(run.method.fit))).value
        return update.weights | update.extra["classifier"]

    bitwise(trained(0.0, 0.0), trained(0.0, torch.inf))
    apart, near = trained(1.0, 0.1), trained(1.0, 0.0)
    assert any(not torch.equal(apart[name], near[name]) for name in near)


@pytest.mark.parametrize(
    "train", [{"weight_decay": 0.1}, {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1}]
)
def test_training_leaves_frozen_classifiers_bit_identical(start_run, train):
    run = start_run("copa", {"train": train})
    received = run.server.weights["ensemble.weight"].clone()
    received += torch.randn(received.shape, generator=torch.Generator().manual_seed(0))
    run.server.weights["ensemble.weight"].copy_(received)
    run.server.round, run.server.cohort = 1, ("client_2",)
    update = next(iter(run.server.ask(run.method.fit))).value
    bitwise(run.method.ensemble.weight, received)
    bitwise(run.server.weights["ensemble.weight"], received)
    assert not torch.equal(update.extra["classifier"]["weight"], received[2])
    # it started from its own slot, so it is nearer to that than to any other
    distances = (received - update.extra["classifier"]["weight"]).flatten(1).norm(dim=1)
    assert int(distances.argmin()) == 2


# ----------------------------------------------------------------------------- one slot


class Hybrid(FedAvg):
    """FedAvg with the hybrid norm."""

    def build(self):
        mix_batch_norm(self.backbone)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: clip_rho(self.backbone))
        return optimizer


def one_domain(federation):
    return replace(federation, sources=("all",), domain_ids=np.zeros(60, dtype=np.int64))


def flat(weights):
    """Return COPA's weights with the names and shapes of a model with one classifier."""
    return {
        n.replace("ensemble", "classifier"): t.squeeze(0) if "ensemble" in n else t
        for n, t in weights.items()
    }


@pytest.mark.parametrize(
    ("layers", "norm", "other"),
    [
        ((), "bin", "fedavg"),
        (({"train": {"precision": "bf16-mixed"}},), "bn", "fedavg"),
        (({"federation": {"weighting": "samples", "server_lr": 0.7}},), "bn", "fedavg"),
        ((RESNET,), "bn", "fedavg"),
        ((RESNET, SMALLER, {"federation": {"bn": "frozen"}}), "bn", "fedavg"),
        ((RESNET, SMALLER), "bin", Hybrid),
    ],
    ids=str,
)
def test_with_one_slot_it_is_fedavg_bit_for_bit(
    start_run, toy_federation, large_federation, layers, norm, other
):
    large = RESNET in layers
    federation = one_domain(large_federation if large else toy_federation)
    theirs = start_run(other, UNIFORM, *layers, federation=federation)
    ours = start_run("copa", *layers, hyper(norm=norm, slot="domain"), federation=federation)
    rounds = 1 if large else 3
    expected, found = theirs.rounds(rounds), ours.rounds(rounds)
    bitwise(flat(ours.server.weights), theirs.server.weights)
    for a, b in zip(found, expected, strict=True):
        assert (a.evaluation, a.ledger.means()) == (b.evaluation, b.ledger.means())


def test_with_one_client_it_is_fedavg_bit_for_bit(start_run, toy_federation):
    everything = np.concatenate(list(toy_federation.clients.values()))
    federation = replace(toy_federation, clients={"client_0": everything})
    layer = {"partition": {"clients": 1}, "federation": {"per_round": 1}}
    theirs = start_run("fedavg", layer, federation=federation)
    ours = start_run("copa", layer, federation=federation)
    assert ours.method.slots == ("client_0",)
    expected, found = theirs.rounds(2), ours.rounds(2)
    bitwise(flat(ours.server.weights), theirs.server.weights)
    assert [r.ledger.bytes for r in found] == [r.ledger.bytes for r in expected]


# --------------------------------------------------------------------------------- slots


def counted(slot="auto", clients=0, sources=()):
    settings = validate(CopaSettings, {"slot": slot})
    names = tuple(f"client_{i:03}" for i in range(clients))
    parts = {"backbone": Features(4), "num_classes": 3, "train": TrainSettings()}
    return Copa(settings, **parts, clients=names, sources=sources)


@pytest.mark.parametrize(
    ("slot", "clients", "expected"),
    [
        ("auto", 16, 16),
        ("auto", 17, 3),
        ("client", 17, 17),
        ("domain", 16, 3),
        ("auto", 0, 1),
        ("client", 1, 1),
    ],
)
def test_slots_are_clients_or_domains(slot, clients, expected):
    method = counted(slot, clients, ("art", "photo", "sketch"))
    assert method.ensemble.weight.shape == (expected, 3, 4)
    assert method.ensemble.bias.shape == (expected, 3)
    for i in range(expected):  # all slots start from the same classifier
        bitwise(method.ensemble.weight[i], method.classifier.weight.data)


@pytest.mark.parametrize(
    ("domains", "slot"),
    [
        ({"sketch": 5}, 2),
        ({"art": 2, "photo": 7, "sketch": 5}, 1),
        ({"sketch": 4, "art": 4}, 0),
        ({"sketch": 4, "photo": 4, "art": 1}, 1),
        ({"cartoon": 9, "sketch": 1}, 2),
    ],
)
def test_a_client_belongs_to_the_domain_of_most_of_its_images(domains, slot):
    method = counted("domain", 4, ("art", "photo", "sketch"))
    assert method.slot_of(SimpleNamespace(name="client_001", domains=domains)) == slot


def test_a_client_has_its_own_slot():
    method = counted("client", 4)
    client = SimpleNamespace(name="client_002", domains={"art": 3})
    assert method.slot_of(client) == 2


# --------------------------------------------------------------------------------- server


def serve(weights, **settings):
    settings = {"weighting": "uniform", **settings}
    return Server(weights, (), None, seed=0, federation=FederationSettings(**settings), uplink={})


class OneLayer(nn.Module):
    """A backbone whose only state is a hybrid norm of one channel."""

    num_features = 1

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, images):
        return self.norm(images[:, :1]).mean((2, 3))


def small(slot="client"):
    return Copa(
        validate(CopaSettings, {"slot": slot}),
        backbone=OneLayer(),
        num_classes=2,
        train=TrainSettings(),
        clients=("a", "b", "c"),
        sources=("x", "y"),
    )


def answer(client, count, value, slot=None, steps=0):
    """Return a reply: the extractor is all ``value``, the classifier all 10 times that."""
    weights = {
        **{f"backbone.norm.batch.{n}": torch.full((1,), value) for n in ("weight", "bias")},
        **{f"backbone.norm.batch.running_{n}": torch.full((1,), value) for n in ("mean", "var")},
        "backbone.norm.batch.num_batches_tracked": torch.tensor(steps),
        "backbone.norm.rho": torch.full((1,), value),
    }
    head = {"weight": torch.full((2, 1), 10 * value), "bias": torch.full((2,), 10 * value)}
    extra = {"classifier": head, **({} if slot is None else {"slot": slot})}
    return Reply(client, count, LocalUpdate(weights, extra), {}, {})


def aggregated(method, replies, **settings):
    server = serve(method.state.federated_weights(), **settings)
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    new = method.aggregate(server, iter(replies))
    bitwise(server.weights, before)
    assert set(new) == set(before) == set(method.federated)
    return new, before


def test_extractors_are_averaged_and_classifiers_are_put_into_their_slots():
    replies = [answer("a", 30, 0.2, steps=7), answer("c", 10, 0.8, steps=4)]
    new, before = aggregated(small(), replies)
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert_close(new[f"backbone.norm.batch.{name}"], torch.tensor([0.5]))
    assert_close(new["backbone.norm.rho"], torch.tensor([0.5]))
    assert int(new["backbone.norm.batch.num_batches_tracked"]) == 7
    bitwise(new["ensemble.bias"][[0, 2]], torch.tensor([[2.0, 2.0], [8.0, 8.0]]))
    bitwise(new["ensemble.weight"][2], torch.full((2, 1), 8.0))
    bitwise(new["ensemble.weight"][1], before["ensemble.weight"][1])  # the client was absent
    bitwise(new["ensemble.bias"][1], before["ensemble.bias"][1])


@pytest.mark.parametrize(
    ("weighting", "extractor", "first"), [("uniform", 0.5, 3.0), ("samples", 28 / 60, 2.5)]
)
def test_clients_of_one_domain_share_a_slot(weighting, extractor, first):
    replies = [answer("a", 30, 0.2, 0), answer("b", 20, 0.9, 1), answer("c", 10, 0.4, 0)]
    new, _ = aggregated(small("domain"), replies, weighting=weighting)
    assert_close(new["backbone.norm.rho"], torch.tensor([extractor]))
    assert_close(new["ensemble.bias"], torch.tensor([[first] * 2, [9.0, 9.0]]))


@pytest.mark.parametrize(
    ("lr", "affine", "rho"), [(0.5, 0.6, 0.6), (3.0, -1.4, 0.0), (1.0, 0.2, 0.2)]
)
def test_the_server_step(lr, affine, rho):
    """The affine part and rho move from 1 towards 0.2; rho stays in [0, 1]."""
    method = small()
    new, before = aggregated(method, [answer("b", 5, 0.2)], server_lr=lr)
    assert_close(new["backbone.norm.batch.weight"], torch.tensor([affine]))
    assert_close(new["backbone.norm.rho"], torch.tensor([rho]))
    assert_close(new["backbone.norm.batch.running_var"], torch.tensor([0.2]))
    old = before["ensemble.bias"][1]
    assert_close(new["ensemble.bias"][1], old + lr * (2.0 - old))
    bitwise(new["ensemble.bias"][0], before["ensemble.bias"][0])


def test_absent_clients_keep_their_last_classifier(start_run):
    run = start_run("copa", {"federation": {"rounds": 4, "per_round": 1}})
    first = run.server.weights["ensemble.weight"][0].clone()
    last = dict.fromkeys(run.server.clients, first)
    seen = set()
    for upto in range(1, 5):
        (cohort,) = run.rounds(upto)[-1].cohort
        seen.add(cohort)
        stack = run.server.weights["ensemble.weight"]
        for i, name in enumerate(run.server.clients):
            assert torch.equal(stack[i], last[name]) == (name != cohort), (upto, name)
            last[name] = stack[i].clone()
    assert 1 < len(seen) < 4  # some returned later, some never took part


def test_a_domain_that_nobody_holds_keeps_the_initial_classifier(start_run, toy_federation):
    sources = ("dark", "nobody's", "bright")
    federation = replace(toy_federation, sources=sources, domain_ids=2 * toy_federation.domain_ids)
    run = start_run("copa", EVERYBODY, hyper(slot="domain"), federation=federation)
    first = run.server.weights["ensemble.weight"].clone()
    run.rounds(2)
    found = run.server.weights["ensemble.weight"]
    counts = [np.bincount(federation.domains_of(name)) for name in federation.clients]
    held = {int(count.argmax()) for count in counts}
    assert held == {0, 2}
    assert [torch.equal(found[i], first[i]) for i in range(3)] == [False, True, False]


# ------------------------------------------------------------------------------- messages


def size(weights):
    return nbytes({n: t for n, t in weights.items() if not n.startswith("ensemble.")})


@pytest.mark.parametrize(("slot", "slots", "number"), [("client", 4, 0), ("domain", 2, 8)])
def test_all_classifiers_come_down_and_one_goes_up(start_run, recorder, slot, slots, number):
    """|f| + S |c| down and |f| + |c| up; a domain's slot is identified by a number of 8 bytes."""
    run = start_run("copa", hyper(slot=slot), executor=recorder)
    extractor, classifier = size(run.server.weights), 4 * (3 * 128 + 3)
    for result in run.rounds(3)[1:]:
        assert result.ledger.bytes == {
            "down": 2 * (extractor + slots * classifier),
            "up": 2 * (extractor + classifier + number),
        }
    assert extractor == 4 * sum(p.numel() for p in run.method.backbone.parameters())
    for task, reply in zip(recorder.tasks, recorder.replies, strict=True):
        assert task.broadcast == {}
        assert not any(n.startswith(("classifier", "ensemble")) for n in reply.value.weights)
        assert reply.memory == {}


def test_evaluation_knows_no_client(start_run, recorder):
    """Evaluation depends only on the global weights, not on earlier training."""
    run = start_run("copa", executor=recorder)
    last = run.rounds(2)[-1].evaluation
    other = start_run("copa")
    for split, domain, index in run.federation.evaluation:
        predictions, loss, _ = other.executor.worker.evaluate(run.server.weights, index)
        assert loss / len(predictions) == pytest.approx(last[split][domain]["loss"], rel=1e-6)


# ----------------------------------------------------------- the norm and the bn policies


@pytest.mark.parametrize(
    ("bn", "travels", "stays"),
    [("average", 6, 0), ("frozen", 3, 0), ("local", 1, 5)],
)
def test_the_norm_under_every_policy(start_run, large_federation, recorder, bn, travels, stays):
    layers = (RESNET, SMALLER, {"federation": {"bn": bn}})
    run = start_run("copa", *layers, federation=large_federation, executor=recorder)
    norms = {n.removesuffix(".rho") for n in run.server.weights if n.endswith(".rho")}
    names = [n for n in run.server.weights if n.removesuffix(".rho").split(".batch.")[0] in norms]
    assert (len(norms), len(names)) == (52, 52 * travels)
    before = {n: tensor.clone() for n, tensor in run.server.weights.items()}
    run.rounds(1)
    assert [n for n in before if torch.equal(run.server.weights[n], before[n])] == []
    shares = torch.cat([t for n, t in run.server.weights.items() if n.endswith(".rho")])
    assert len(shares) == 17056
    assert float(shares.min()) >= 0
    assert float(shares.max()) <= 1
    assert float((shares < 1).float().mean()) > 0.05
    for memory in recorder.memories.values():
        assert len(memory.get("private state", {})) == 52 * stays


def test_shares_stay_in_bounds_while_training(start_run, large_federation, recorder):
    """Steps are so large that shares would leave [0, 1] at once without clipping."""
    train = {"optimizer": "sgd", "lr": 0.5, "local_epochs": 2}
    run = start_run(
        "copa", RESNET, SMALLER, {"train": train}, federation=large_federation, executor=recorder
    )
    run.rounds(1)
    for reply in recorder.replies:
        rhos = torch.cat([t for n, t in reply.value.weights.items() if n.endswith(".rho")])
        assert float(rhos.min()) >= 0
        assert float(rhos.max()) <= 1
        assert len(rhos.unique()) > 10


def test_in_half_precision(start_run, large_federation):
    layer = {"train": {"precision": "bf16-mixed", "channels_last": True}}
    run = start_run("copa", RESNET, SMALLER, layer, federation=large_federation)
    results = run.rounds(1)
    assert results[-1].ledger.dropped == []
    assert all(bool(t.isfinite().all()) for t in run.server.weights.values())
    assert {t.dtype for t in run.server.weights.values()} == {torch.float32, torch.int64}


# ------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "values",
    [{"slot": "domain"}, {"beta": 0.0}, {"beta": 3.0}, {"ensemble": "logits"}, {"norm": "bn"}],
    ids=str,
)
def test_every_setting_changes_what_comes_out(start_run, large_federation, values):
    """Compare held-out losses after one round; ``norm`` needs batch normalisation."""
    large = "norm" in values
    layers = (RESNET, SMALLER) if large else ()

    def last(*more):
        federation = large_federation if large else None
        return start_run("copa", *layers, *more, federation=federation).rounds(1)[-1].evaluation

    assert last(hyper(**values)) != last()


def test_equal_shares_are_the_default(start_run):
    assert start_run("copa").settings.federation.weighting == "uniform"
    layer = {"federation": {"weighting": "samples"}}
    assert start_run("copa", layer).settings.federation.weighting == "samples"


def test_it_says_that_it_is_a_reconstruction():
    assert "reconstruction" in (Copa.__doc__ or "")
    assert "reconstruction" in DEVIATIONS[0]
