"""The contract finds each kind of broken plugin, by the check that names it."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_bench.testing import CONTRACT, Subject, contract_tests
from feddg_bench.testing.contract import federated_tensors_move_and_stay_finite
from tests.attacks.clients import LEFT, bank, process_put_back


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
    """Clients have a side effect after training (see `tests.attacks.clients`)."""

    def fit(self, client):
        update = super().fit(client)
        LEFT[type(self).__name__](self, client, update)
        return update


class Numpy(Method):
    """Writes into the images in a way that PyTorch does not detect."""

    def fit(self, client):
        update = super().fit(client)
        bank(client).images.numpy()[...] //= 2
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


class Misspelt(Method):
    """Declares an unreadable form of something that it never sends."""

    uplink: ClassVar = {"fit": {"weights": "model"}, "secret": {"secret": "flot32 2, 2"}}


class Sending(Method):
    """The same, for its default settings only."""

    @classmethod
    def sends(cls, _settings):
        return Misspelt.uplink


class Public(Method):
    """Sends the classifier, which was meant to stay with each client."""

    local = ("clasifier.",)


LEFT_TOLD = {
    "another folder": "the working folder",
    "a variable": "environment variables",
    "two threads of PyTorch": "the number of threads",
    "another default type": "PyTorch's default type",
    "a frozen weight": "whether classifier.weight takes gradients",
    "a forward hook": "the hooks of classifier",
    "a hook at a weight": "the hooks of classifier.weight",
    "other groups of the optimizer": "weight_decay of the optimizer",
    "one more group of the optimizer": "groups of the optimizer",
    "evaluation mode of a layer": "training of backbone",
    "another forward": "forward of classifier",
    "another layer": "modules of the module",
    "another cross_entropy": "torch.nn.functional.cross_entropy",
    "another rate in client.train": "the settings of training",
    "other images": "the images",
}
"""Side effects of a client, and their names in the contract's messages."""

BROKEN = [
    *(
        (type(name, (Left,), {}), "clients_leave_the_process_as_it_was", words)
        for name, words in LEFT_TOLD.items()
    ),
    (Numpy, "clients_leave_the_process_as_it_was", "the images or the labels"),
    (Detached, "federated_tensors_move_and_stay_finite", "unchanged: .*generator.weight"),
    (Public, "what_stays_with_a_client_is_there", "no tensor begins with .*clasifier"),
    (Stuck, "it_learns", "the loss went from"),
    (Leaking, "a_task_leaves_no_trace", "answers otherwise"),
    (Forgetful, "a_resumed_run_equals_one_that_never_stopped", "keep it in server.memory"),
    (Undeclared, "any_number_of_clients_may_take_part", "add it to uplink"),
    (Fragile, "clients_that_diverge_are_dropped", "a client is missing"),
    (Meddling, "messages_are_read_only", "changed what they got: .*broadcast"),
    (Overwriting, "messages_are_read_only", "does not support item assignment"),
    (Replacing, "there_is_one_model_whose_tensors_stay_where_they_are", "replaced: "),
    (Random, "the_seed_decides_the_run", "the same seed gave other rounds"),
    (Misspelt, "it_learns", "'flot32 2, 2', which cannot be read"),
    (Sending, "it_learns", "'flot32 2, 2', which cannot be read"),
    (OwnFit, "a_kept_optimizer_makes_a_difference", "no difference"),
]


@pytest.mark.parametrize(
    ("plugin", "name", "words"), BROKEN, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_broken_plugin_is_found(plugin, name, words):
    (check,) = [check for check in CONTRACT if check.__name__ == name]
    with pytest.raises(Exception, match=words), process_put_back():
        check(Subject(plugin))


def test_all_failures_are_told_together():
    with pytest.raises(AssertionError) as caught:
        contract_tests(Undeclared)
    text = str(caught.value)
    assert text.startswith("Undeclared breaks the contract:\n- ")
    assert "it_learns: PluginError: client function 'fit' sent labels" in text
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
    federated_tensors_move_and_stay_finite(Subject(Attentive))


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
        federated_tensors_move_and_stay_finite(Subject(Still))
    said = dict(
        part.rstrip(")").split(" (", 1)
        for part in str(caught.value).removeprefix("after two rounds unchanged: ").split("; ")
    )
    assert set(said) == {"counter", "fixed", "unused", "alone_in_softmax", "classifier.bias"}
    assert "persistent=False" in said["counter"]
    assert "frozen" in said["fixed"]
    assert "no gradient reaches it" in said["unused"]
    assert "its gradient is 0" in said["alone_in_softmax"]
    assert "see aggregate" in said["classifier.bias"]
