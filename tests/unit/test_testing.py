"""The contract finds each kind of broken plugin, by the check that names it."""

from __future__ import annotations

import logging
import os
import random
import re
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_bench.testing import CONTRACT, Subject, contract_tests
from feddg_bench.testing.contract import federated_weights_train


class Detached(Method):
    """Sends a part that is never trained."""

    def build(self):
        self.generator = torch.nn.Linear(2, 2)


class Forgetful(Method):
    """The server half keeps state on the object, which a checkpoint does not save."""

    def aggregate(self, server, updates):
        self.count = getattr(self, "count", 0) + 1
        new = super().aggregate(server, updates)
        new["classifier.bias"] += 0.1 * self.count
        return new


class Leaking(Method):
    """Clients leave state for the next one, which a snapshot of attributes does not show."""

    def build(self):
        self.seen = [0]

    def training_step(self, batch, batch_idx):
        self.seen[0] += len(batch[1])
        return super().training_step(batch, batch_idx) * (1 + 0.01 * self.seen[0])


class Left(Method):
    """Clients have a side effect after training, and use a constant."""

    frozen = ("constant",)
    history: ClassVar = {}

    def build(self):
        self.register_buffer("constant", torch.ones(2))

    def fit(self, client):
        update = super().fit(client)
        LEFT[type(self).__name__][0](self, client)
        return update


class Numpy(Method):
    """Writes into the images in a way that PyTorch does not detect."""

    def fit(self, client):
        update = super().fit(client)
        client.data.bank.images.numpy()[...] //= 2
        return update


class Undeclared(Method):
    """Also sends labels."""

    def fit(self, client):
        update = super().fit(client)
        return LocalUpdate(update.weights, {"labels": [0, 1, 2]})


class Meddling(Method):
    """Counts in the server's broadcast."""

    downlink = ("seen",)

    def prepare(self, server):
        server.broadcast["seen"] = torch.zeros(1)

    def fit(self, client):
        client.broadcast._content["seen"].add_(1)  # bypasses the copy that a read gives
        return super().fit(client)


class Overwriting(Meddling):
    """Replaces an entry of the server's broadcast."""

    def fit(self, client):
        client.broadcast["seen"] = torch.ones(1)
        return super().fit(client)


class Replacing(Method):
    """Gives a parameter new memory in every task."""

    def fit(self, client):
        self.classifier.weight.data = self.classifier.weight.data.clone()
        return super().fit(client)


class Stuck(Method):
    """Does not learn at all: the loss has the wrong sign."""

    def training_step(self, batch, batch_idx):
        return -super().training_step(batch, batch_idx)


class Fragile(Method):
    """Requires every client's reply."""

    def aggregate(self, server, updates):
        replies = list(updates)
        assert len(replies) == len(server.cohort), "a client is missing"
        return super().aggregate(server, iter(replies))


class Random(Method):
    """Draws from a generator outside the run's streams."""

    def training_step(self, batch, batch_idx):
        noise = torch.rand((), generator=_GENERATOR)
        return super().training_step(batch, batch_idx) * (1 + noise)


_GENERATOR = torch.Generator()


class Seeding(Method):
    """Seeds the global generators, as scripts of one experiment do."""

    def fit(self, client):
        SEEDS[type(self).__name__](0)
        return super().fit(client)


SEEDS = {"PyTorch": torch.manual_seed, "NumPy": np.random.seed, "Python": random.seed}


class Building(Method):
    """Sets the process's number of threads."""

    def build(self):
        torch.set_num_threads(2)


class Precise(Method):
    """Sets the precision of matrix products, as tutorials do."""

    def build(self):
        torch.set_float32_matmul_precision("high")


class WritingWeights(Method):
    """Moves the global model in place."""

    def aggregate(self, server, updates):
        new = super().aggregate(server, updates)
        server.weights["classifier.bias"].lerp_(new["classifier.bias"], 0.5)
        return server.weights


class WritingBroadcast(Method):
    """Counts in the broadcast before the clients have read it."""

    downlink = ("rounds",)

    def prepare(self, server):
        server.broadcast["rounds"] = torch.zeros(1)

    def aggregate(self, server, updates):
        server.broadcast["rounds"] += 1
        return super().aggregate(server, updates)


class WritingMemory(Method):
    """Counts in its memory, which a skipped round cannot undo."""

    def prepare(self, server):
        server.memory["rounds"] = torch.zeros(1)

    def aggregate(self, server, updates):
        server.memory["rounds"] += 1
        return super().aggregate(server, updates)


class NumpyRandom(Method):
    """Draws in the server half from a generator of its own."""

    def aggregate(self, server, updates):
        new = super().aggregate(server, updates)
        new["classifier.bias"] += float(np.random.default_rng().normal())
        return new


class Collecting(Method):
    """Clients collect in a dictionary of the class."""

    seen: ClassVar = {}

    def fit(self, client):
        self.seen[client.name, client.round] = True
        return super().fit(client)


class OwnFit(Method):
    """Ignores that the optimizer's state can be kept."""

    def fit(self, client):
        optimizer = self.configure_optimizers()
        for batch in self.batches(client, 0):
            loss = self.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            client.log("loss", loss.detach(), len(batch[1]))
        return LocalUpdate(self.state.federated_weights())


class Public(Method):
    """Sends the classifier, which was meant to stay with each client."""

    local = ("clasifier.",)


_CROSS_ENTROPY = F.cross_entropy

LEFT = {
    "folder": (lambda _m, _c: os.chdir(os.sep), "the working folder"),
    "threads": (lambda _m, _c: torch.set_num_threads(2), "the number of threads"),
    "type": (lambda _m, _c: torch.set_default_dtype(torch.float64), "PyTorch's default type"),
    "gradients": (lambda _m, _c: torch.set_grad_enabled(False), "whether PyTorch computes"),
    "precision": (
        lambda _m, _c: torch.set_float32_matmul_precision("high"),
        "the precision of matrix products",
    ),
    "convolutions": (
        lambda _m, _c: setattr(torch.backends.cudnn, "benchmark", True),
        "the choice of convolutions",
    ),
    "tiny numbers": (lambda _m, _c: torch.set_flush_denormal(True), "the rounding of tiny numbers"),
    "logging": (lambda _m, _c: logging.getLogger().setLevel(7), "the level of logging"),
    "frozen weight": (
        lambda m, _c: m.classifier.bias.requires_grad_(False),
        "whether classifier.bias takes gradients",
    ),
    "forward hook": (
        lambda m, _c: m.classifier.register_forward_hook(lambda *a: a[2] * 2),
        "forward hooks of classifier",
    ),
    "hook at a weight": (
        lambda m, _c: m.classifier.weight.register_hook(lambda g: g * 2),
        "hooks of classifier.weight",
    ),
    "forward": (
        lambda m, _c: setattr(m.classifier, "forward", lambda x: x[:, :3] * m.classifier.bias),
        "forward of classifier",
    ),
    "layer": (
        lambda m, _c: setattr(m.backbone, "further", torch.nn.Identity()),
        "modules of backbone",
    ),
    "attribute of a layer": (lambda m, _c: setattr(m.backbone, "seen", 1), "seen of backbone"),
    "cross_entropy": (
        lambda _m, _c: setattr(F, "cross_entropy", lambda *a, **k: _CROSS_ENTROPY(*a, **k) * 2),
        "torch.nn.functional",
    ),
    "rate": (lambda _m, c: vars(c.train).update(lr=0.1), "the settings of training"),
    "labels": (lambda _m, c: c.data.bank.labels.add_(0).fill_(0), "the labels"),
    "constant": (lambda m, _c: m.constant.mul_(2), "constant, which no task loads anew"),
}
"""Side effects of a client, and their names in the contract's messages."""

BROKEN = [
    *((type(name, (Left,), {}), "no_side_effects", words) for name, (_, words) in LEFT.items()),
    (Numpy, "no_side_effects", "the images"),
    (Building, "no_side_effects", "build changes .*: the number of threads"),
    (Precise, "no_side_effects", "build changes .*: the precision of matrix products"),
    (Detached, "federated_weights_train", "unchanged: .*generator.weight"),
    (Public, "local_prefixes_match", "no tensor begins with .*clasifier"),
    (Stuck, "loss_falls", "the loss went from"),
    (Leaking, "tasks_are_independent", "answers otherwise"),
    (Forgetful, "resume_is_exact", "keep it in server.memory"),
    (Collecting, "no_side_effects", "attributes of the class Collecting"),
    (NumpyRandom, "seed_determines_run", "the same seed gave (other rounds|another state)"),
    (Undeclared, "any_cohort_size_works", "add it to uplink"),
    (Fragile, "diverged_clients_are_dropped", "a client is missing"),
    (Meddling, "messages_are_read_only", "changed what they got: .*broadcast"),
    (Overwriting, "messages_are_read_only", "does not support item assignment"),
    (WritingWeights, "messages_are_read_only", r"in place: weights\.classifier\.bias;"),
    (WritingBroadcast, "messages_are_read_only", r"in place: broadcast\.rounds;"),
    (WritingMemory, "messages_are_read_only", r"in place: memory\.rounds;"),
    *(
        (type(name, (Seeding,), {}), "seed_determines_run", f"leave {name}'s global generator")
        for name in SEEDS
    ),
    (Replacing, "parameters_stay_in_place", "replaced: "),
    (Random, "seed_determines_run", "the same seed gave (other rounds|another state)"),
    (OwnFit, "optimizer_state_persists", "no difference"),
]


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Put back what clients leave behind in this process."""
    monkeypatch.chdir(".")
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)
    monkeypatch.setattr(logging.getLogger(), "level", logging.getLogger().level)
    yield
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = False
    torch.set_flush_denormal(False)
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = (
            "none"
        )
    else:
        torch.set_float32_matmul_precision("highest")
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("plugin", "name", "words"), BROKEN, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_broken_plugin_is_found(plugin, name, words):
    (check,) = [check for check in CONTRACT if check.__name__ == name]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the contract raises
        check(Subject(plugin))
    notes = getattr(caught.value, "__notes__", ())
    assert re.search(words, " ".join([str(caught.value), *notes]))


def test_all_failures_are_told_together():
    with pytest.raises(AssertionError) as caught:
        contract_tests(Undeclared)
    text = str(caught.value)
    assert text.startswith("Undeclared breaks the contract:\n- ")
    assert "loss_falls: PluginError: client function 'fit' sent labels" in text
    assert "\n  The rule: The loss on in-domain images falls within three rounds.\n" in text


class Attentive(Method):
    """Weights the positions of the last feature map by a softmax."""

    def build(self):
        self.query = torch.nn.Conv2d(self.num_features, 1, 1, bias=False)
        self.kept = {}
        self.backbone.net[-3].register_forward_hook(lambda _layer, _input, maps: self.keep(maps))

    def keep(self, maps):
        self.kept["maps"] = maps

    def features(self, images):
        self.backbone(images)
        maps = self.kept.pop("maps")
        shares = self.query(maps).flatten(2).softmax(2)
        return (maps.flatten(2) * shares).sum(2)


def test_attention_over_places_is_trained():
    federated_weights_train(Subject(Attentive))


class Opposed(Method):
    """Each round of two clients cancels out in one tensor, as opposite steps of Adam do."""

    def aggregate(self, server, updates):
        new = super().aggregate(server, updates)
        if len(server.cohort) == 2:
            new["classifier.bias"] = server.weights["classifier.bias"]
        return new


def test_clients_may_cancel_out():
    federated_weights_train(Subject(Opposed))


class Still(Method):
    """Has tensors that stay unchanged, for five reasons."""

    def build(self):
        self.register_buffer("counter", torch.zeros(1))
        self.fixed = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.alone_in_softmax = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.alone_in_softmax.softmax(0).sum() + 0 * self.unused.detach().sum()

    def aggregate(self, server, updates):
        return super().aggregate(server, updates) | {
            "classifier.bias": server.weights["classifier.bias"]
        }


def test_the_reason_is_told_for_which_a_tensor_does_not_move():
    with pytest.raises(AssertionError) as caught:
        federated_weights_train(Subject(Still))
    said = dict(
        part.rstrip(")").split(" (", 1)
        for part in str(caught.value).removeprefix("in three rounds unchanged: ").split("; ")
    )
    assert set(said) == {"counter", "fixed", "unused", "alone_in_softmax", "classifier.bias"}
    assert "persistent=False" in said["counter"]
    assert "frozen" in said["fixed"]
    assert "no gradient reaches it" in said["unused"]
    assert "its gradient is 0" in said["alone_in_softmax"]
    assert "see aggregate" in said["classifier.bias"]
