"""FedBN: local and averaged parameters, evaluation on a new domain, and messages."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import FederationSettings, TrainSettings
from feddg_bench.core.messages import LocalUpdate, Reply, decode, encode, nbytes
from feddg_bench.core.server import Server
from feddg_bench.engine.executors import ProcessExecutor
from feddg_bench.models.batch_norm import batch_norm_state, batch_norm_statistics
from feddg_bench.testing import TaskRecorder, start_toy_run
from feddg_methods.fedbn import FedBN, FedBNSettings, batch_statistics
from tests.helpers import bitwise
from tests.tester import MethodTester, Twin

MOBILENET = {
    "backbone": {"name": "mobilenet_v2", "pretrained": False},
    "train": {"batch_size": 16},
    "federation": {"per_round": 3},
}
RESNET = {**MOBILENET, "backbone": {"name": "resnet18", "pretrained": False}}
LOCAL = {"federation": {"bn": "local"}}
BATCH = {"hyper": {"evaluation": "batch"}}


@pytest.fixture(scope="module")
def run():
    """A run of one round with three of four clients, of different sizes; no test changes it."""
    started = start_toy_run("fedbn", MOBILENET, executor=TaskRecorder())
    started.rounds(1)
    return started


# --------------------------------------------------------- without batch normalisation


def test_the_user_is_told_once_that_there_is_nothing_to_keep(start_run, caplog):
    with caplog.at_level(logging.WARNING):
        start_run("fedbn").rounds(3)
    assert [record.getMessage() for record in caplog.records] == [
        "the network has no batch normalisation: fedbn is the same as fedavg"
    ]


def test_with_batch_normalisation_there_is_nothing_to_tell(run, caplog):
    with caplog.at_level(logging.WARNING):
        run.method.prepare(run.server)
    assert caplog.records == []


# ------------------------------------------------------------------------- personal models


@pytest.mark.parametrize("more", [{}, pytest.param(BATCH, marks=pytest.mark.nightly)])
def test_a_personal_model_is_the_clients_own_after_training(start_run, toy_federation, more):
    """Its accuracy stays with the client; FedAvg has no such model."""
    held = dict(zip(toy_federation.clients, np.arange(60).reshape(4, 15), strict=True))
    own = replace(toy_federation, of_clients={"client_test": held})
    run = start_run("fedbn", MOBILENET, more, federation=own, executor=TaskRecorder())
    run.rounds(2)
    latest = {}
    for reply in run.executor.replies:
        latest[reply.client] = reply
    assert len(latest) >= 3
    twin = start_run("fedbn", MOBILENET, federation=toy_federation).method.eval()
    for name, reply in latest.items():
        twin.load_state_dict({**reply.value.weights, **reply.memory["private state"]}, strict=False)
        images = torch.from_numpy(own.images[held[name]]).permute(0, 3, 1, 2) / 255
        with torch.no_grad():
            guessed = twin(images).argmax(1).numpy()
        expected = {"accuracy": (guessed == own.labels[held[name]]).mean(), "images": 15}
        assert run.executor.memories[name]["personal"] == expected
        assert "personal" not in reply.value.extra
    plain = start_run("fedbn", MOBILENET, more, federation=toy_federation, executor=TaskRecorder())
    plain.rounds(2)
    bitwise(plain.server.weights, run.server.weights)
    other = start_run("fedavg", MOBILENET, federation=own)
    other.rounds(1)
    assert not any("personal" in memory for memory in other.executor.memories.values())


# -------------------------------------------------------------- local and averaged parameters


@pytest.mark.parametrize(("network", "layers"), [(RESNET, 20), (MOBILENET, 52)], ids=str)
def test_all_batch_normalisation_stays_with_its_client(
    start_run, toy_federation, recorder, network, layers
):
    """Including ResNet's ``downsample.1`` and MobileNet's layers, named by plain numbers."""
    run = start_run("fedbn", network, federation=toy_federation, executor=recorder)
    state = run.method.state_dict()
    kept = {n for n in state if n.endswith("running_var")}
    kept = {n.replace("running_var", k) for n in kept for k in NORM}
    assert len(kept) == 5 * layers
    assert set(run.server.weights) == set(state) - kept
    run.rounds(1)
    for memory in recorder.memories.values():
        assert set(memory["private state"]) == kept


NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def test_the_rest_is_that_of_fedavg_with_local_batch_normalisation(start_run, toy_federation):
    """Bit for bit, over two rounds, so that clients resume from what they kept."""
    layers = (MOBILENET, LOCAL, {"federation": {"server_lr": 0.7}})
    theirs, ours = (
        start_run(name, *layers, federation=toy_federation) for name in ("fedavg", "fedbn")
    )
    expected, found = theirs.rounds(2), ours.rounds(2)
    bitwise(ours.server.weights, theirs.server.weights)
    assert encode(ours.executor.memories) == encode(theirs.executor.memories)
    assert found[-1].evaluation != expected[-1].evaluation  # evaluated with initial layers


def test_a_client_goes_on_with_its_own_and_a_new_one_with_the_initial(
    start_run, toy_federation, recorder
):
    layers = (MOBILENET, {"federation": {"per_round": 1, "rounds": 4}})
    run = start_run("fedbn", *layers, federation=toy_federation, executor=recorder)
    initial = run.method.state.private_weights()
    run.rounds(4)
    counter = next(n for n in initial if n.endswith("num_batches_tracked"))
    seen = {}
    for task, reply in zip(recorder.tasks, recorder.replies, strict=True):
        assert not set(task.weights) & set(initial)  # these never come down
        if task.client in seen:
            bitwise(task.memory["private state"], seen[task.client])
        else:
            assert task.memory == {}
        before = int(seen.get(task.client, initial)[counter])
        assert int(reply.memory["private state"][counter]) == before + 1
        seen[task.client] = reply.memory["private state"]
    assert len(seen) < 4


class OneLayer(nn.Module):
    """A backbone that only normalises two channels."""

    num_features = 2

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, images):
        return self.norm(images[:, :2]).mean((2, 3))


def small(bn="local", **values):
    settings = validate(FedBNSettings, values)
    parts = {"backbone": OneLayer(), "num_classes": 3, "train": TrainSettings()}
    return FedBN(settings, **parts, bn=bn)


def serve(weights, **settings):
    settings = FederationSettings(**{"bn": "local", **settings})
    return Server(weights, (), None, seed=0, federation=settings, uplink={})


def answers(rng, counts):
    """Yield random replies: weights, and norms with counters 1, 2, ..."""
    for number, count in enumerate(counts):
        tensors = {
            "classifier.weight": rng.normal(size=(3, 2)),
            "classifier.bias": rng.normal(size=3),
        }
        norm = {f"backbone.norm.{n}": rng.normal(size=2) for n in NORM[:4]}
        weights, norm = (
            {name: torch.from_numpy(value).float() for name, value in group.items()}
            for group in (tensors, norm)
        )
        norm["backbone.norm.num_batches_tracked"] = torch.tensor(number + 1)
        yield Reply(f"client_{number}", count, LocalUpdate(weights, {"norm": norm}), {}, {})


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("lr", [1.0, 0.5])
@pytest.mark.parametrize("counts", [[10, 30, 60], [5]])
def test_means_by_shares(weighting, lr, counts):
    """The trunk takes the server's step; the norm is a plain mean, kept for evaluation."""
    method = small()
    server = serve(method.state.federated_weights(), weighting=weighting, server_lr=lr)
    replies = list(answers(np.random.default_rng(0), counts))
    new = method.aggregate(server, iter(replies))

    shares = np.array(counts if weighting == "samples" else [1] * len(counts), dtype=float)
    shares /= shares.sum()

    def mean(name, part):
        rows = [part(reply.value)[name].double().numpy() for reply in replies]
        return torch.from_numpy(np.tensordot(shares, np.stack(rows), 1)).float()

    assert set(new) == set(server.weights) == {"classifier.weight", "classifier.bias"}
    for name, old in server.weights.items():
        step = old + lr * (mean(name, lambda value: value.weights) - old)
        assert_close(new[name], step, rtol=1e-5, atol=1e-6)
    norm = dict(server.memory["norm"])
    assert int(norm.pop("backbone.norm.num_batches_tracked")) == len(counts)
    assert len(norm) == 4
    for name, tensor in norm.items():
        assert_close(tensor, mean(name, lambda value: value.extra["norm"]), rtol=1e-5, atol=1e-6)

    server.weights = new
    measured = method.global_model(server)
    assert set(measured) == set(method.state_dict())
    assert set(server.weights) == {"classifier.weight", "classifier.bias"}


def test_before_the_first_round_the_initial_layers_are_measured():
    method = small()
    assert method.global_model(serve(method.state.federated_weights())).keys() == set(
        method.federated
    )


@pytest.mark.parametrize("bn", ["average", "frozen"])
def test_another_policy_is_refused(bn):
    method = small(bn)
    with pytest.raises(SettingsError) as caught:
        method.prepare(serve(method.state.federated_weights(), bn=bn))
    assert str(caught.value) == (
        f"federation.bn={bn} does not go with fedbn, which keeps batch normalisation with the "
        f"clients: leave it out, or set federation.bn=local"
    )


def test_it_overrides_the_policy_of_a_recipe(start_run):
    assert start_run("fedbn").settings.federation.bn == "local"
    assert FedBN.group == "personalisation"


# ------------------------------------------------------------------------------- evaluation


def measured(run, model):
    """Return the loss of a plain function of images on each evaluated set."""
    losses = {}
    for split, domain, index in run.federation.evaluation:
        images = torch.from_numpy(run.federation.images[index]).permute(0, 3, 1, 2).float() / 255
        labels = torch.from_numpy(run.federation.labels[index])
        with torch.no_grad():
            losses[split, domain] = F.cross_entropy(model(images), labels).item()
    return losses


def plain(run, start_run, norm):
    """Return a module of FedAvg that holds the run's weights and these layers."""
    module = start_run("fedavg", MOBILENET, federation=run.federation).method
    module.load_state_dict({**run.server.weights, **norm})
    return module.eval()


def shared_norm(recorder, counts):
    """Return the image-weighted mean of the layers that were sent, in float64."""
    states = [reply.value.extra["norm"] for reply in recorder.replies]
    total = sum(counts)
    return {
        name: torch.stack([s[name] for s in states]).amax(0)
        if not states[0][name].is_floating_point()
        else sum(n / total * s[name].double() for n, s in zip(counts, states, strict=True)).float()
        for name in states[0]
    }


def test_a_new_domain_is_measured_with_the_mean_layers_or_those_of_its_batch(start_run, run):
    counts = [len(run.federation.clients[reply.client]) for reply in run.executor.replies]
    assert len(set(counts)) > 1
    model = plain(run, start_run, shared_norm(run.executor, counts))
    for layer, live in (({}, False), (BATCH, True)):
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.train(live)
        expected = measured(run, model)
        results = start_run("fedbn", MOBILENET, layer, federation=run.federation).rounds(1)
        for (split, domain), loss in expected.items():
            assert results[-1].evaluation[split][domain]["loss"] == pytest.approx(loss, rel=1e-4)


def test_how_it_is_measured_does_not_change_what_is_learnt(start_run, run):
    other = start_run("fedbn", MOBILENET, BATCH, federation=run.federation)
    evaluation = other.rounds(1)[-1].evaluation
    assert encode(other.server.state()) == encode(run.server.state())
    small_batches = {"evaluation": {"batch_size": 3}}
    again = start_run("fedbn", MOBILENET, BATCH, small_batches, federation=run.federation)
    assert again.rounds(1)[-1].evaluation != evaluation  # it depends on the batch


def test_batch_statistics_by_hand():
    method = small(evaluation="batch").eval()
    rng = np.random.default_rng(0)
    norm = method.backbone.norm
    for name in NORM[:4]:
        getattr(norm, name).data.copy_(torch.from_numpy(rng.uniform(0.5, 2, 2)))
    before = {n: t.clone() for n, t in method.state_dict().items()}
    x = rng.uniform(0, 1, (5, 3, 4, 4))
    weight, bias = (t.detach().double().numpy().reshape(2, 1, 1) for t in (norm.weight, norm.bias))
    head, shift = (p.detach().double().numpy() for p in method.classifier.parameters())

    def logits(maps, mean, var):
        z = (weight * (maps[:, :2] - mean) / np.sqrt(var + 1e-5) + bias).mean((2, 3))
        return torch.from_numpy(z @ head.T + shift).float()

    def found(images):
        with torch.no_grad():
            return method(torch.from_numpy(images).float())

    axes = {"axis": (0, 2, 3), "keepdims": True}
    assert_close(
        found(x), logits(x, x[:, :2].mean(**axes), x[:, :2].var(**axes)), rtol=1e-4, atol=1e-5
    )
    kept = (t.double().numpy().reshape(2, 1, 1) for t in (norm.running_mean, norm.running_var))
    assert_close(found(x[:1]), logits(x[:1], *kept), rtol=1e-4, atol=1e-5)  # one has no batch
    bitwise(method.state_dict(), before)
    assert not norm.training
    assert norm.track_running_stats


def test_the_block_of_batch_statistics_ends_with_what_was_before():
    layers = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm1d(2).eval(), nn.ReLU())
    within = []

    def failing():
        with batch_statistics(layers):
            within.extend(layer.training for layer in layers)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert within == [True, True, True]
    assert [layer.training for layer in layers] == [True, False, True]
    assert all(layer.track_running_stats for layer in layers[:2])


def test_training_always_moves_the_statistics(start_run, toy_federation, recorder):
    run = start_run("fedbn", MOBILENET, BATCH, federation=toy_federation, executor=recorder)
    before = run.method.state.private_weights()
    run.rounds(1)
    for reply in recorder.replies:
        norm = reply.value.extra["norm"]
        assert [
            n for n in batch_norm_statistics(run.method) if torch.equal(norm[n], before[n])
        ] == []


# -------------------------------------------------------------------------------- messages


def test_as_much_goes_up_as_in_fedavg_and_less_comes_down(start_run, run):
    fedavg = start_run("fedavg", MOBILENET, federation=run.federation)
    whole, norm = nbytes(fedavg.server.weights), nbytes(run.method.state.private_weights())
    assert norm == 17056 * 4 * 4 + 52 * 8
    assert run.server.ledger.bytes == {"up": 3 * whole, "down": 3 * (whole - norm)}
    for reply in run.executor.replies:
        assert set(reply.value.extra["norm"]) == set(batch_norm_state(run.method))
        bitwise(reply.value.extra["norm"], reply.memory["private state"])
        ours = {t.data_ptr() for t in run.method.state_dict().values()}
        assert not ours & {t.data_ptr() for t in reply.value.extra["norm"].values()}


def test_it_goes_on_where_it_stopped(start_run, run):
    """The checkpoint holds clients' own layers and those used for evaluation."""
    whole = start_run("fedbn", MOBILENET, federation=run.federation)
    expected = whole.rounds(2)[-1]
    resumed = start_run("fedbn", MOBILENET, federation=run.federation)
    resumed.server.restore(decode(encode(run.server.state())))
    assert resumed.rounds(2)[-1].evaluation == expected.evaluation
    assert encode(resumed.server.state()) == encode(whole.server.state())


def test_a_client_that_diverged_leaves_its_layers_out(start_run, run):
    """Infinity in a running variance drops the client and restores its memory."""
    other = start_run("fedbn", MOBILENET, federation=run.federation)
    spoiled = run.server.cohort[0]
    fit = other.method.fit

    def spoiling(client):
        update = fit(client)
        if client.name == spoiled:
            name = next(n for n in update.extra["norm"] if n.endswith("running_var"))
            update.extra["norm"][name].fill_(torch.inf)
        return update

    spoiling.__name__ = "fit"
    other.method.fit = spoiling
    result = other.rounds(1)[-1]
    assert [entry["client"] for entry in result.ledger.dropped] == [spoiled]
    assert result.ledger.dropped[0]["tensor"].startswith("norm.")
    assert other.executor.memories[spoiled] == {}
    assert all(bool(t.isfinite().all()) for t in other.server.memory["norm"].values())


@pytest.mark.nightly
def test_processes_equal_this_process(start_run, toy_federation):
    pool = ProcessExecutor(2)
    try:
        here, there = (
            start_run("fedbn", MOBILENET, federation=toy_federation, executor=e)
            for e in (None, pool)
        )
        assert here.rounds(2)[-1].evaluation == there.rounds(2)[-1].evaluation
        assert encode(there.server.state()) == encode(here.server.state())
    finally:
        pool.close()


class TestFedBN(MethodTester):
    """On a network without batch normalisation."""

    name = "fedbn"
    twins = (Twin(), Twin(layer={"federation": {"weighting": "uniform", "server_lr": 0.7}}))
