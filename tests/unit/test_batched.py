"""Batched clients: same results as training one by one, up to rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from feddg_bench.common.errors import ClientError, SettingsError
from feddg_bench.config.layers import full_key
from feddg_bench.config.schema import Resources
from feddg_bench.core.messages import Task, encode
from feddg_bench.engine.batched import padded
from feddg_bench.engine.compatibility import one_by_one, say_one_by_one
from feddg_bench.engine.executors import ProcessExecutor
from feddg_bench.plugins import load_method, names
from feddg_bench.runs.request import Request
from feddg_bench.testing import start_toy_run
from feddg_bench.testing.toy import toy_regression
from feddg_methods.fedavg import FedAvg
from tests.helpers import bitwise, no_file

ALL = {"federation": {"per_round": None}}
BATCHED = {"engine": {"clients": "batched"}}
SGD = {"train": {"optimizer": "sgd", "lr": 1.0, "batch_size": 32}}
TOGETHER = [name for name in names("method") if not one_by_one(load_method(name))]


class Spread(FedAvg):
    """Its loss couples the images of a batch: an image of weight 0 would change it."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        z = self.features(images)
        return F.cross_entropy(self.classifier(z), labels) + 0.1 * z.var(dim=0).sum()


class Told(FedAvg):
    """Its training step reads the server's broadcast."""

    downlink = ("target",)

    def run_round(self, server):
        server.broadcast["target"] = torch.ones(())
        super().run_round(server)

    def training_step(self, batch, batch_idx):
        target = self.client.broadcast["target"]
        return super().training_step(batch, batch_idx) + (self.classifier.bias - target).norm()


class ToldApart(Told):
    """Its server sends each client a different message."""

    def run_round(self, server):
        tell = {name: {"target": 5.0 * torch.ones(()) * i} for i, name in enumerate(server.cohort)}
        server.weights = self.aggregate(server, server.ask(self.fit, tell=tell))


class Dropping(FedAvg):
    """Draws random numbers in its training step."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.classifier(F.dropout(self.features(images))), labels)


class Naming(FedAvg):
    """Treats one client differently."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return 0 * loss if self.client.name == "client_1" else loss


def replies(plugin, *layers):
    """Return the initial weights and the clients' replies to round 1, exact and batched."""
    found = []
    for layer in ({}, BATCHED):
        run = start_toy_run(plugin, ALL, *layers, layer)
        run.server.broadcast.update({"target": torch.ones(())} if plugin is Told else {})
        weights, broadcast = run.server.weights, dict(run.server.broadcast)
        tasks = [Task(name, "fit", 1, weights, broadcast) for name in run.server.clients]
        found.append(list(run.executor.map(tasks)))
    return weights, *found


def distance(found, expected, start):
    """Return the distance to the expected weights, relative to their distance from the start."""
    way = sum((expected[n].double() - start[n].double()).square().sum() for n in start)
    off = sum((found[n].double() - expected[n].double()).square().sum() for n in start)
    return float((off / way).sqrt())


def all_near(start, exact, batched, bound):
    for one, other in zip(exact, batched, strict=True):
        assert (one.client, one.num_examples) == (other.client, other.num_examples)
        assert 0 < distance(other.value.weights, one.value.weights, start) < bound
        assert other.metrics == pytest.approx(one.metrics, rel=1e-3)


@pytest.mark.parametrize("plugin", [*TOGETHER, Spread, Told])
def test_one_step_of_unequal_batches_has_the_same_gradient(plugin):
    """Clients have 9, 11, 12 and 12 images; an SGD step with rate 1 is the gradient."""
    layer = no_file(plugin) if isinstance(plugin, str) else {}
    start, exact, batched = replies(plugin, layer, SGD)
    all_near(start, exact, batched, 1e-5)


@pytest.mark.parametrize(
    "train",
    [
        {"batch_size": 3},
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01, "schedule": "cosine"},
        {"weight_decay": 0.01, "schedule": "exponential", "batch_size": 4},
        {"batch_size": 11, "drop_last_if_single": True, "channels_last": False},
    ],
    ids=str,
)
def test_two_epochs_of_unequal_clients_are_the_same(train):
    epochs = {"train": {"local_epochs": 2, "eps": 1e-4, **train}}
    all_near(*replies("fedavg", epochs), 1e-3)


def test_a_client_without_a_batch_left_moves_neither_itself_nor_its_moments():
    """With batches of three, the first client takes three steps, the others four."""
    train = {"train": {"batch_size": 3, "optimizer_state": "persist", "eps": 1e-4}}
    runs = [start_toy_run("fedavg", ALL, train, layer) for layer in ({}, BATCHED)]
    for run in runs:
        run.rounds(2)
    exact, batched = (run.executor.memories for run in runs)
    assert {name: int(m["optimizer"]["0"]["step"]) for name, m in batched.items()} == {
        "client_0": 6,
        "client_1": 8,
        "client_2": 8,
        "client_3": 8,
    }
    for name, memory in exact.items():
        for index, entry in memory["optimizer"].items():
            for key, value in entry.items():
                found = batched[name]["optimizer"][index][key]
                torch.testing.assert_close(found, value, rtol=1e-2, atol=1e-4)


def test_padding_has_no_weight():
    images = [torch.ones(n, 3, 2, 2) for n in (2, 4)]
    stacked, labels, shares = padded([(x, torch.ones(len(x))) for x in images])
    assert stacked.shape == (2, 4, 3, 2, 2)
    assert labels.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert shares.tolist() == [[0.5, 0.5, 0, 0], [0.25] * 4]


def test_a_round_of_a_regression_is_the_same():
    runs = [start_toy_run("fedavg", ALL, b, federation=toy_regression()) for b in ({}, BATCHED)]
    start = {name: tensor.clone() for name, tensor in runs[0].server.weights.items()}
    for run in runs:
        run.rounds(1)
    assert 0 < distance(runs[1].server.weights, runs[0].server.weights, start) < 1e-3


# ------------------------------------------------------------------ fallback to exact clients


def test_clients_that_are_told_something_of_their_own_train_one_by_one():
    runs = [start_toy_run(ToldApart, ALL, layer) for layer in ({}, BATCHED)]
    for run in runs:
        run.rounds(2)
    assert encode(runs[0].server.state()) == encode(runs[1].server.state())


def test_which_methods_step_together():
    """Methods with the client half of `Method` and a step without random draws or derivatives."""
    assert TOGETHER == ["agrrand", "agrsum", "fedavg", "fedgma", "fedomg", "pcgrad", "ppdg"]


@pytest.mark.parametrize("name", ["scaffold", "fedsr", "fediir"])
def test_other_methods_train_one_by_one_to_the_bit_and_say_so(name, caplog):
    say_one_by_one.cache_clear()
    runs = [start_toy_run(name, no_file(name), layer) for layer in ({}, BATCHED)]
    for run in runs:
        run.rounds(1)
    bitwise(runs[1].server.weights, runs[0].server.weights)
    assert [r.message.count("one by one") for r in caplog.records if r.name.endswith("ity")] == [1]


@pytest.mark.parametrize(("plugin", "word"), [(Dropping, "random"), (Naming, "name")])
def test_a_step_that_cannot_be_vectorised_is_refused(plugin, word):
    with pytest.raises(ClientError, match=f"{word}.*engine.clients=exact"):
        start_toy_run(plugin, BATCHED).rounds(1)


def test_live_batch_normalisation_is_refused_before_anything_is_trained(large_federation):
    resnet = {"backbone": {"name": "resnet18", "pretrained": False}}
    with pytest.raises(SettingsError, match=r"live batch norm.*federation.bn=frozen"):
        start_toy_run("fedavg", resnet, BATCHED, federation=large_federation)


@pytest.mark.parametrize("fold", [False, True])
def test_frozen_batch_normalisation_is_not(fold):
    train = {"lr": 1e-4, "fold_batch_norm": fold}
    layers = {"backbone": {"name": "resnet18", "pretrained": False}, "train": train}
    runs = [
        start_toy_run("fedavg", layers, {"federation": {"bn": "frozen"}}, layer)
        for layer in ({}, BATCHED)
    ]
    losses = [run.rounds(1)[-1].ledger.means()["loss"] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


# ------------------------------------------------------------------------------------- engines


@pytest.mark.nightly
def test_processes_give_the_same_bits():
    """Groups depend on the cohort only, not on the worker that trains them."""
    layers = ALL, {"engine": {"clients": "batched", "together": 3}}
    executor = ProcessExecutor(2)
    try:
        here, there = (start_toy_run("fedavg", *layers, executor=e) for e in (None, executor))
        here.rounds(2)
        there.rounds(2)
        assert encode(there.server.state()) == encode(here.server.state())
    finally:
        executor.close()


# ---------------------------------------------------------------------------------------- keys


def plan(method="fedavg", *, cache=None, **engine):
    resources = Resources(cache_dir=cache, device="cpu")
    settings = {"engine": engine, "data": {"image_size": 16}, "train": {"batch_size": 2}}
    request = Request(method, scenario="ip-o-c", settings=settings, resources=resources)
    return request.plan(check=False)[0]


def test_keys():
    """Runs with clients one by one keep the key from before batched clients existed."""
    exact = plan()
    assert "engine" not in exact.canonical
    assert plan(clients="exact", together=3).key == exact.key
    assert plan("scaffold", clients="batched").key == plan("scaffold").key
    batched = plan(clients="batched")
    assert batched.canonical["engine"] == {"clients": "batched"}
    assert len({exact.key, batched.key, plan(clients="batched", together=3).key}) == 3


def test_short_keys_mean_what_they_meant():
    assert full_key("clients") == "partition.clients"
    assert full_key("engine.clients") == "engine.clients"


# -------------------------------------------------------------------------------- the command


@pytest.mark.nightly
def test_the_command(feddg, tmp_path, caplog):
    given = ("run", "--method", "fedavg,scaffold", "--scenario", "ip-o-c", "--clients", 4,
             "--per-round", 2, "--rounds", 1, "--workers", 1, "data.image_size=16")  # fmt: skip
    say_one_by_one.cache_clear()
    done = feddg(*given, "engine.clients=batched")
    assert done.code == 0, done.err
    assert caplog.text.count("one by one") == 1
    assert feddg(*given).code == 0
    assert len(list((tmp_path / "runs").rglob("*.json"))) >= 3  # SCAFFOLD's record is the same
    wrong = feddg(*given, "engine.clients=both")
    assert wrong.code == 2
    assert "engine.clients" in wrong.err
