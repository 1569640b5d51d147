"""The contract of methods, checked for every registered one."""

from __future__ import annotations

import copy
import weakref
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from feddg_bench.core.aggregation import weighted_mean
from feddg_bench.core.messages import Task, encode
from feddg_bench.engine.executors import ProcessExecutor, SerialExecutor
from feddg_bench.plugins import load_method, names
from feddg_bench.testing import CONTRACT, Subject
from feddg_methods.fedavg import FedAvg
from tests.helpers import UNTRAINED, bitwise, methods_apart, no_file, numbers

CASES = [(name, {"hyper": dict(load_method(name).Settings.toy)}) for name in names("method")]
VARIANTS = [
    ("fedprox", {"hyper": {"mu": 0.5, "norm": "l2"}}),
    ("moon", {"hyper": {"first_visit": "initial"}}),
    ("pardon", {"hyper": {"style": "pixel", "transfer": "cached"}}),
    ("ccst", {"hyper": {"style": "pixel", "preset": "official"}}),
    ("ccst", {"hyper": {"style": "pixel", "preset": "fedccrl"}}),
    ("fedccrl", {"hyper": {"variant": "released"}}),
    ("fedsr", {"hyper": {"variant": "aggregated"}}),
    ("fediir", {"hyper": {"head": "mlp"}}),
    ("feddg_ga", {"hyper": {"variant": "pardon"}}),
    ("ppdg", {"hyper": {"granularity": "tensor"}}),
    (
        "gperxan",
        {
            "hyper": {"evaluation": "batch"},
            "backbone": {"name": "resnet18"},
            "train": {"batch_size": 16, "lr": 0.001},
        },
    ),
]
BY_DAY = ("fedavg", "erm", "scaffold", "pardon")
"""FedAvg, a pooled method, one with client memory and one that sends before round 1."""
every_method = pytest.mark.parametrize(
    ("name", "layer"),
    [
        pytest.param(
            *case, marks=[] if case[0] in BY_DAY and case in CASES else pytest.mark.nightly
        )
        for case in (*CASES, *VARIANTS)
    ],
    ids=str,
)

RESNET = {
    "backbone": {"name": "resnet18", "pretrained": False},
    "train": {"batch_size": 16},
    "federation": {"per_round": None},
}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture(scope="module")
def pool():
    """Two processes for all tests of this module, because starting them is slow."""
    executor = ProcessExecutor(2)
    yield executor
    executor.close()


@every_method
def test_contract(name, layer):
    """All checks in one test, because most of them use the same rounds."""
    subject = Subject(name, layer)
    for check in CONTRACT:
        check(subject)


# ------------------------------------------------------------------------ one reply at a time


class Counting(SerialExecutor):
    """Counts clients' models still in memory when the next client starts to train."""

    def start(self, spec, method):
        super().start(spec, method)
        self.sent, self.most = [], 0

    def run(self, tasks):
        return map(self.count, tasks)

    def count(self, task):
        self.most = max(self.most, sum(ref() is not None for ref in self.sent))
        reply = self.worker.run(task)
        if task.call == "fit":
            self.sent.append(weakref.ref(next(iter(reply.value.weights.values()))))
        return reply


ALIKE = ("prepare", "run_round", "aggregate", "fit")
"""Members of a method that decide how long models of clients are held."""


@pytest.mark.parametrize("name", methods_apart(ALIKE, UNTRAINED))
def test_no_model_of_a_client_is_held_while_the_next_one_trains(start_run, name):
    everyone = {"federation": {"per_round": None}}
    run = start_run(name, everyone, no_file(name), executor=Counting())
    run.rounds(1)
    assert len(run.executor.sent) == len(run.server.clients)
    assert run.executor.most == 0


# ----------------------------------------------------------------------------- client memory

KEPT = {"federation": {"per_round": None}, "train": {"optimizer_state": "persist"}}
RESET = {"federation": {"per_round": None}, "train": {"optimizer_state": "reset"}}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "train",
    [{"optimizer": "adam"}, {"optimizer": "sgd", "momentum": 0.9}],
    ids=str,
)
def test_a_kept_optimizer_goes_from_process_to_process(start_run, pool, train):
    """With channels last, the default: a memory format that encoding does not preserve."""
    layers = ({"train": {**train, "channels_last": True}}, KEPT)
    here, there = (start_run("fedavg", *layers, executor=e) for e in (None, pool))
    here.rounds(3)
    there.rounds(3)
    bitwise(there.server.weights, here.server.weights)
    assert encode(there.executor.memories) == encode(here.executor.memories)


def test_a_new_run_remembers_nothing_of_the_last(start_run):
    first = start_run("fedavg", KEPT)
    first.rounds(1)
    again = start_run("fedavg", KEPT, executor=first.executor)
    assert again.executor.memories == {}


# ------------------------------------------------------------------------ batch normalisation


def statistics(weights):
    return {n: tensor for n, tensor in weights.items() if n.endswith(STATISTICS)}


def resnet(start_run, toy_federation, recorder, bn):
    layer = {"federation": {"bn": bn}}
    return start_run("fedavg", RESNET, layer, federation=toy_federation, executor=recorder)


def test_averaged_batch_statistics(start_run, toy_federation, recorder):
    run = resnet(start_run, toy_federation, recorder, "average")
    run.rounds(1)
    found = statistics(run.server.weights)
    assert len(found) == 60
    states = [statistics(reply.value.weights) for reply in recorder.replies]
    bitwise(found, weighted_mean(states, [9, 11, 12, 12]))
    assert not torch.equal(
        states[0]["backbone.net.bn1.running_mean"], states[1]["backbone.net.bn1.running_mean"]
    )
    assert int(found["backbone.net.bn1.num_batches_tracked"]) == 1
    assert recorder.replies[0].memory == {}


def test_frozen_batch_statistics(start_run, toy_federation, recorder):
    run = resnet(start_run, toy_federation, recorder, "frozen")
    initial = copy.deepcopy(statistics(run.method.state_dict()))
    before = {n: tensor.clone() for n, tensor in run.server.weights.items()}
    run.rounds(1)
    assert len(initial) == 60
    bitwise(statistics(run.method.state_dict()), initial)
    assert statistics(run.server.weights) == {}
    assert recorder.replies[0].memory == {}
    affine = [f"backbone.net.bn1.{n}" for n in ("weight", "bias")]
    assert not any(torch.equal(run.server.weights[n], before[n]) for n in affine)


@pytest.mark.nightly
def test_local_batch_normalisation(start_run, toy_federation, recorder):
    """Each client keeps its own affine parameters and statistics, and resumes from them."""
    run = resnet(start_run, toy_federation, recorder, "local")
    run.rounds(2)
    assert not any("bn" in n or "downsample.1" in n for n in run.server.weights)
    for reply in recorder.replies:
        assert set(reply.value.weights) == set(run.server.weights)
    memories = [memory["private state"] for memory in recorder.memories.values()]
    assert all(len(memory) == 100 for memory in memories)
    for n in ("backbone.net.bn1.running_mean", "backbone.net.layer4.1.bn2.weight"):
        values = [memory[n] for memory in memories]
        assert not any(torch.equal(a, b) for a, b in pairwise(values))
    counted = [int(memory["backbone.net.bn1.num_batches_tracked"]) for memory in memories]
    assert counted == [2, 2, 2, 2]


@pytest.mark.nightly
@pytest.mark.parametrize("bn", ["average", "local"])
def test_batch_normalisation_in_processes(start_run, toy_federation, pool, bn):
    smaller = {"backbone": {"name": "mobilenet_v2"}}
    layers = (RESNET, smaller, {"federation": {"bn": bn, "per_round": 2}})
    here, there = (
        start_run("fedavg", *layers, federation=toy_federation, executor=e) for e in (None, pool)
    )
    assert numbers(here.rounds(2)) == numbers(there.rounds(2))
    bitwise(there.server.weights, here.server.weights)
    assert encode(there.executor.memories) == encode(here.executor.memories)


# -------------------------------------------------------------------------- random numbers


class Dropping(FedAvg):
    """Draws from the global generator, as layers do."""

    def features(self, images):
        return F.dropout(super().features(images), training=self.training)

    def draw(self, _client):
        return {"numbers": torch.rand(2).tolist()}

    def other(self, client):
        return self.draw(client)


def test_every_task_has_its_own_stream(start_run):
    worker = start_run(Dropping).executor.worker
    drawn = {
        tuple(worker.run(Task(client, call, round, {}, {})).value["numbers"])
        for client in ("client_0", "client_1")
        for call in ("draw", "other")
        for round in (1, 2)
    }
    assert len(drawn) == 8


def test_layers_draw_from_the_stream_of_their_task(start_run, recorder):
    run = start_run(Dropping, {"federation": {"per_round": None}}, executor=recorder)
    before = torch.get_rng_state()
    run.rounds(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again = [recorder.worker.run(task) for task in reversed(recorder.tasks)]
    for first, second in zip(recorder.replies, reversed(again), strict=True):
        bitwise(first.value.weights, second.value.weights)


# ----------------------------------------------------------------------------------- failures


class Failing(FedAvg):
    """Fails at one client."""

    def training_step(self, batch, batch_idx):
        if self.client.name == "client_1":
            raise ValueError("no luck")
        return super().training_step(batch, batch_idx)


class Diverging(FedAvg):
    """Diverges at one client in the first round."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return (
            loss * torch.nan if (self.client.name, self.client.round) == ("client_1", 1) else loss
        )


def test_an_error_in_client_work_is_not_swallowed(start_run):
    run = start_run(Failing, RESET)
    with pytest.raises(ValueError, match="no luck") as caught:
        run.rounds(1)
    assert caught.value.__notes__ == ["client_1, round 1, fit"]


def test_a_client_that_diverged_is_dropped_for_the_round(start_run):
    run = start_run(Diverging, RESET)
    results = run.rounds(2)
    assert [[entry["client"] for entry in r.ledger.dropped] for r in results] == [
        [],
        ["client_1"],
        [],
    ]


def test_a_client_that_diverged_comes_back_with_the_memory_it_had(start_run):
    run = start_run(Diverging, KEPT)
    results = run.rounds(2)
    assert [len(r.ledger.dropped) for r in results] == [0, 1, 0]


@pytest.mark.nightly
def test_replies_that_nobody_takes_do_no_harm(start_run, pool):
    run = start_run("fedavg", {"federation": {"per_round": None}}, executor=pool)
    run.server.round = 1
    replies = run.server.ask(run.method.fit)
    first = next(replies)
    replies.close()
    again = list(run.server.ask(run.method.fit))
    assert [reply.client for reply in again] == list(run.server.clients)
    bitwise(again[0].value.weights, first.value.weights)
