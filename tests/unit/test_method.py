"""The plugin base class: shared and private state, training, and state kept between tasks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing import assert_close

from feddg_bench.common.errors import PluginError
from feddg_bench.common.streams import torch_generator, torch_stream
from feddg_bench.config.schema import MethodSettings, TrainSettings
from feddg_bench.core.messages import LocalUpdate, Task, decode, encode
from feddg_bench.core.method import Method
from feddg_bench.core.state import bare_step
from tests.helpers import bitwise, refused


class Backbone(nn.Module):
    """A small backbone with batch normalisation."""

    num_features = 4

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, images):
        return self.norm(self.conv(images)).relu().mean((2, 3))


class Plugin(Method):
    """Has parts that stay with the client, that never change, and that take no gradient."""

    local: ClassVar = ("head.",)
    frozen: ClassVar = ("encoder.",)

    def build(self):
        self.head = nn.Linear(4, 2)
        self.encoder = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)


def build(method=Plugin, bn="average", **train):
    settings = TrainSettings(**train)
    with torch_stream(0, "init"):
        return method(MethodSettings(), backbone=Backbone(), num_classes=3, train=settings, bn=bn)


NORM = [f"backbone.norm.{n}" for n in ("weight", "bias")]
STATISTICS = [f"backbone.norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")]
REST = {"backbone.conv.weight", "classifier.weight", "classifier.bias", "scale"}


# ------------------------------------------------------------------------- three kinds of state


@pytest.mark.parametrize(
    ("bn", "federated", "private"),
    [
        ("average", {*REST, *NORM, *STATISTICS}, {"head.weight", "head.bias"}),
        ("frozen", {*REST, *NORM}, {"head.weight", "head.bias"}),
        ("local", REST, {"head.weight", "head.bias", *NORM, *STATISTICS}),
    ],
)
def test_what_travels_and_what_stays(bn, federated, private):
    method = build(bn=bn)
    assert set(method.state.federated_weights()) == federated
    assert set(method.state.private_weights()) == private


def test_trainable_is_what_travels_and_takes_gradients():
    assert set(build().trainable) == (REST | set(NORM)) - {"scale"}


def test_without_private_state_nothing_stays():
    assert build(Method).state.private_weights() == {}


@pytest.mark.parametrize(("bn", "live"), [("average", True), ("local", True), ("frozen", False)])
def test_batch_statistics_are_live_unless_frozen(bn, live):
    assert build(bn=bn).live_batch_norm is live


def test_weights_handed_out_are_copies():
    method = build()
    weights = method.state.federated_weights()
    weights["scale"].zero_()
    assert float(method.scale) == 1
    assert all(not tensor.requires_grad for tensor in weights.values())


def test_weights_are_written_in_place():
    method = build()
    before = {name: (id(p), p.data_ptr()) for name, p in method.named_parameters()}
    new = {name: torch.full_like(t, 2) for name, t in method.state.federated_weights().items()}
    method.state.load(new)
    bitwise(method.state.federated_weights(), new)
    assert {name: (id(p), p.data_ptr()) for name, p in method.named_parameters()} == before
    assert all(p.requires_grad for name, p in method.named_parameters() if name != "scale")


def test_writing_no_weights_changes_nothing():
    method = build()
    before = method.state.federated_weights()
    method.state.load({})
    bitwise(method.state.federated_weights(), before)


def test_a_name_that_the_model_lacks_is_an_error():
    with pytest.raises(KeyError):
        build().state.load({"no.such.name": torch.ones(1)})


def test_logits_are_the_classifier_of_the_features():
    method = build().eval()
    images = torch.rand(5, 3, 8, 8)
    assert method.features(images).shape == (5, 4)
    bitwise(method(images), method.classifier(method.features(images)))


# ------------------------------------------------------------------------------------ client


def test_there_is_no_client_outside_a_task():
    with pytest.raises(RuntimeError, match=r"Plugin\.client is only there during a client task"):
        _ = build().client


def test_the_client_is_gone_after_a_task_that_failed():
    method = build()
    client = SimpleNamespace()
    with method.state.serving(client):
        assert method.client is client
    with pytest.raises(KeyError), method.state.serving(client):
        raise KeyError
    with pytest.raises(RuntimeError):
        _ = method.client


# ---------------------------------------------------------------------------------- training


def test_the_loss_of_a_batch_is_the_cross_entropy():
    method = build()
    method.classifier.weight.data.zero_()
    method.classifier.bias.data.copy_(torch.tensor([0.0, 0.0, 2.0]).log1p())
    loss = method.training_step((torch.rand(2, 3, 8, 8), torch.tensor([2, 0])), 0)
    assert_close(loss, -torch.tensor([0.6, 0.2]).log().mean())  # probabilities .2, .2, .6


def test_fit_is_plain_gradient_descent(start_run):
    """Compare with a loop written out here."""
    layer = {"train": {"optimizer": "sgd", "lr": 0.1, "local_epochs": 2, "channels_last": False}}
    run = start_run("fedavg", layer)
    worker, data = run.executor.worker, run.executor.worker.data["client_1"]
    received = run.method.state.federated_weights()
    reply = worker.run(Task("client_1", "fit", 4, received, {}))

    run.method.state.load(received)
    losses = []
    for epoch in range(2):
        stream = torch_generator(0, "loader", epoch, 4, "client_1")
        for images, labels in data.batches(
            shuffle=True, augment=True, views=1, companions=None, generator=stream
        ):
            loss = nn.functional.cross_entropy(run.method(images), labels)
            run.method.zero_grad()
            loss.backward()
            losses += [loss.item()] * len(labels)
            with torch.no_grad():
                for parameter in run.method.parameters():
                    parameter -= 0.1 * parameter.grad
    assert_close(reply.value.weights, run.method.state.federated_weights(), rtol=1e-6, atol=1e-7)
    assert reply.metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert reply.num_examples == 11


def test_hooks_of_an_optimizer_run_at_each_step():
    """Hooks of one optimizer, global hooks of PyTorch, and a replaced ``step``."""
    calls = []

    def optimizer():
        return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, fused=True)

    assert bare_step(optimizer()) != optimizer().step
    own, replaced = optimizer(), optimizer()
    own.register_step_pre_hook(lambda *_: calls.append("own"))
    replaced.step = lambda: calls.append("replaced")
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("any"))
    try:
        for each in (own, replaced, optimizer()):
            bare_step(each)()
    finally:
        handle.remove()
    assert calls == ["own", "any", "replaced", "any"]


def test_a_step_without_its_entry_in_profiles_is_the_same_step():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter, bare in zip(parameters, (False, True), strict=True):
        optimizer = torch.optim.Adam([parameter], fused=True)
        step = bare_step(optimizer) if bare else optimizer.step
        for gradient in (0.1, -0.3):
            parameter.grad = torch.full((3,), gradient)
            step()
    assert torch.equal(*parameters)


def test_cosine_ends_almost_at_rest(start_run):
    """The learning rate of the last epoch is a small fraction of the first one."""

    def moved(round):
        layer = {
            "federation": {"rounds": 20},
            "train": {"optimizer": "sgd", "lr": 0.05, "schedule": "cosine"},
        }
        run = start_run("fedavg", layer)
        before = run.method.state.federated_weights()
        after = run.executor.worker.run(Task("client_0", "fit", round, before, {})).value.weights
        return sum(float((after[n] - before[n]).norm() ** 2) for n in before) ** 0.5

    assert moved(20) < 0.05 * moved(1)


def test_the_learning_rate_falls_once_a_local_epoch(start_run):
    layer = {
        "federation": {"rounds": 2},
        "train": {"lr": 0.5, "schedule": "cosine", "local_epochs": 2, "batch_size": 64},
    }
    run = start_run("fedavg", layer)
    rates = []
    run.method.on_before_optimizer_step = lambda o: rates.append(o.param_groups[0]["lr"])
    for round in (1, 2):
        run.executor.worker.run(Task("client_0", "fit", round, run.server.weights, {}))
    assert rates == pytest.approx([0.5, 0.4267766953, 0.25, 0.0732233047])


# --------------------------------------------------------------------- state of the optimizer


def fit(run, memory, round=1, weights=None):
    weights = weights or run.method.state.federated_weights()
    return run.executor.worker.run(Task("client_0", "fit", round, weights, {}, memory))


def test_a_fresh_optimizer_is_not_remembered(start_run):
    run = start_run("fedavg", {"train": {"optimizer": "adam"}})
    first, second = (fit(run, {}, weights=run.server.weights) for _ in range(2))
    assert first.memory == {}
    bitwise(second.value.weights, first.value.weights)


@pytest.mark.parametrize(
    "train",
    [
        {"optimizer": "adam"},
        {"optimizer": "adam", "channels_last": False},
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "sgd"},
    ],
    ids=str,
)
def test_a_kept_optimizer_goes_on(start_run, train):
    """With full batches, which shuffles do not change, two one-epoch tasks equal one of two."""
    train = {**train, "batch_size": 64, "lr": 0.02, "eps": 1e-4}
    plain = {"crop_scale": None, "flip": 0.0, "brightness": 0.0, "contrast": 0.0}
    plain |= {"saturation": 0.0, "hue": 0.0, "grayscale": 0.0}
    once = start_run("fedavg", {"augment": plain, "train": {**train, "local_epochs": 2}})
    kept = start_run("fedavg", {"augment": plain, "train": {**train, "optimizer_state": "persist"}})
    expected = fit(once, {}).value.weights

    first = fit(kept, {})
    memory = decode(encode(first.memory))  # as if from a checkpoint, or another process
    second = fit(kept, memory, weights=first.value.weights)
    # full batches with images in another order: equal up to the order of summation
    assert_close(second.value.weights, expected, rtol=0, atol=2e-4)
    again = fit(kept, first.memory, weights=first.value.weights)
    bitwise(again.value.weights, second.value.weights)

    forgetful = fit(kept, {}, weights=first.value.weights).value.weights
    stateless = train["optimizer"] == "sgd" and "momentum" not in train
    difference = max(float((forgetful[n] - expected[n]).abs().max()) for n in expected)
    assert (difference < 2e-4) == stateless


def test_what_is_kept_is_not_changed_by_later_tasks(start_run):
    run = start_run("fedavg", {"train": {"optimizer_state": "persist"}})
    first = fit(run, {})
    before = encode(first.memory)
    fit(run, first.memory, 2)
    fit(run, {}, 3)
    assert encode(first.memory) == before


# ------------------------------------------------------------------------------- private state


class Head(Method):
    """A head that stays with the client."""

    local: ClassVar = ("classifier.",)


def test_private_state_stays_with_its_client(start_run):
    base = start_run("fedavg")
    method = Head(MethodSettings(), backbone=base.method.backbone, num_classes=3,
                  train=base.settings.train)  # fmt: skip
    run = start_run("fedavg", method=method)
    assert not any(name.startswith("classifier.") for name in run.server.weights)
    initial = run.method.state.private_weights()
    received = run.method.state.federated_weights()
    worker = run.executor.worker

    first = worker.run(Task("client_0", "fit", 1, received, {}))
    other = worker.run(Task("client_1", "fit", 1, received, {}))
    assert set(first.value.weights) == set(received)
    assert not torch.equal(
        first.memory["private state"]["classifier.weight"],
        other.memory["private state"]["classifier.weight"],
    )

    method.fit = lambda _: LocalUpdate(method.state.private_weights())  # at the start of a task
    back = worker.run(Task("client_0", "fit", 2, received, {}, first.memory))
    bitwise(back.value.weights, first.memory["private state"])
    newcomer = worker.run(Task("client_2", "fit", 2, received, {}))
    bitwise(newcomer.value.weights, initial)


# ------------------------------------------------------------------------------ a client's own data


class Looking(Method):
    """Returns what a client sees of its own data."""

    uplink: ClassVar = {"look": ("domains", "labels", "images")}

    def look(self, client):
        batches = list(client.validation_batches())
        return {
            "domains": dict(client.domains),
            "labels": torch.cat([labels for _, labels in batches]),
            "images": torch.cat([images for images, _ in batches]),
        }


def looking(start_run, federation):
    return start_run(Looking, federation=federation)


def test_a_client_sees_its_validation_images_as_stored(start_run, toy_federation):
    run = looking(start_run, toy_federation)
    for reply in run.server.ask(run.method.look, everyone=True):
        index = toy_federation.validation[reply.client]
        assert reply.value["labels"].tolist() == toy_federation.labels[index].tolist()
        pixels = torch.from_numpy(toy_federation.images[index]).permute(0, 3, 1, 2) / 255
        assert_close(reply.value["images"], pixels)


def test_a_client_knows_how_many_images_of_each_domain_it_has(start_run, toy_federation):
    run = looking(start_run, toy_federation)
    for reply in run.server.ask(run.method.look, everyone=True):
        found = reply.value["domains"]
        ids = toy_federation.domains_of(reply.client)
        assert found == {"dark": int((ids == 0).sum()), "bright": int((ids == 1).sum())}
        assert sum(found.values()) == reply.num_examples


def test_validation_images_must_be_asked_for_by_the_class(start_run, toy_federation):
    run = looking(start_run, replace(toy_federation, validation={}))
    with refused(PluginError, "set client_validation = True"):
        next(run.server.ask(run.method.look))


def test_a_method_knows_clients_and_sources(start_run, toy_federation):
    method = start_run("fedavg").method
    assert method.clients == tuple(toy_federation.clients)
    assert method.sources == ("dark", "bright")
