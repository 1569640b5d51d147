"""Scaffold: controls worked out by hand, against a float64 simulation, and messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from feddg_bench.config.schema import MethodSettings, TrainSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Task, nbytes
from feddg_methods.scaffold import Scaffold, control_change
from tests.helpers import bitwise
from tests.quadratics import quadratics
from tests.tester import ONE_CLIENT, MethodTester, Twin, alone


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_three_steps_by_hand(start_run, weighting):
    """F = v^2, w = 1, lr = .1, 3 steps, c_k = .1, c = .3; one of four clients, of equal sizes."""
    run = quadratics(
        start_run,
        "scaffold",
        [[(2, 0)] * 3] * 4,
        federation={"per_round": 1, "weighting": weighting},
    )
    run.method.prepare(run.server)
    control = run.server.broadcast["control"]
    run.server.broadcast["control"] = {**control, "v": torch.tensor(0.3, dtype=torch.float64)}
    own = {**control, "v": torch.tensor(0.1, dtype=torch.float64)}
    run.server.round, run.server.cohort = 1, ("client_2",)
    run.executor.memories["client_2"] = {"control": own}
    run.method.run_round(run.server)
    assert run.server.weights["v"].item() == pytest.approx(0.4632, abs=1e-12)
    kept = run.executor.memories["client_2"]["control"]["v"]
    assert kept.item() == pytest.approx(1.5893333333, abs=1e-9)
    assert run.server.broadcast["control"]["v"].item() == pytest.approx(0.6723333333, abs=1e-9)


def test_the_server_step_moves_the_model_alone(start_run):
    runs = [
        quadratics(start_run, "scaffold", [[(2, 3)], [(1, 8)]], federation={"server_lr": lr})
        for lr in (1.0, 0.5)
    ]
    for run in runs:
        run.rounds(1)
    whole, half = (run.server.weights["v"].item() - 1 for run in runs)
    assert half == pytest.approx(whole / 2, rel=1e-12)
    bitwise(runs[0].server.broadcast["control"], runs[1].server.broadcast["control"])


# ------------------------------------------------------------- against a float64 simulation


def simulate(clients, cohorts, rate, *, epochs=1, momentum=0.0, decay=0.0, uniform, persist=False):
    """SCAFFOLD on numbers; the images of a client are equal, so their order does not matter.

    ``rate`` gives the learning rate of a round and epoch. A gradient enters theta with its rate in
    its own step and, through momentum, again in later steps: ``entered`` is the sum of these.
    """
    v, c, own = 1.0, 0.0, [0.0] * len(clients)
    buffers = [(0.0, 0.0)] * len(clients)
    share = [1 if uniform else len(held) for held in clients]
    for number, cohort in enumerate(cohorts, start=1):
        thetas, changes = {}, {}
        for k in cohort:
            (a, b), theta, entered = clients[k][0], v, 0.0
            velocity, repeat = buffers[k] if persist else (0.0, 0.0)
            for epoch in range(epochs):
                for _ in clients[k]:
                    gradient = a * (theta - b) - own[k] + c + decay * theta
                    velocity, repeat = momentum * velocity + gradient, momentum * repeat + 1
                    theta -= rate(number, epoch) * velocity
                    entered += rate(number, epoch) * repeat
            new = own[k] - c + (v - theta) / entered
            thetas[k], changes[k], own[k], buffers[k] = theta, new - own[k], new, (velocity, repeat)
        v += sum(share[k] * (thetas[k] - v) for k in cohort) / sum(share[k] for k in cohort)
        c += sum(share[k] * changes[k] for k in cohort) / sum(share)
    return v, c, own


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(
    "train",
    [
        {},
        {"weight_decay": 0.05},
        {"momentum": 0.9},
        {"momentum": 0.9, "optimizer_state": "persist"},
        {"schedule": "cosine", "local_epochs": 2},
    ],
    ids=str,
)
def test_five_rounds_of_three_in_five_clients(start_run, uniform, train):
    rng = np.random.default_rng(len(str(train)))
    clients = [[tuple(rng.integers(1, 9, 2).tolist())] * int(n) for n in rng.integers(1, 5, 5)]
    weighting = "uniform" if uniform else "samples"
    run = quadratics(
        start_run,
        "scaffold",
        clients,
        federation={"per_round": 3, "weighting": weighting},
        rounds=5,
        lr=0.01,
        **train,
    )
    cohorts = [[int(name[-1]) for name in r.cohort] for r in run.rounds(5)[1:]]
    epochs = train.get("local_epochs", 1)

    def rate(number, epoch):
        done = ((number - 1) * epochs + epoch) / (5 * epochs)
        return 0.01 * (0.5 * (1 + np.cos(np.pi * done)) if "schedule" in train else 1)

    v, c, own = simulate(
        clients,
        cohorts,
        rate,
        epochs=epochs,
        momentum=train.get("momentum", 0.0),
        decay=train.get("weight_decay", 0.0),
        uniform=uniform,
        persist="optimizer_state" in train,
    )
    assert run.server.weights["v"].item() == pytest.approx(v, rel=1e-6)
    assert run.server.broadcast["control"]["v"].item() == pytest.approx(c, rel=1e-6)
    memories = run.executor.memories
    assert {int(name[-1]) for name in memories if "control" in memories[name]} == {
        k for cohort in cohorts for k in cohort
    }
    for k in {k for cohort in cohorts for k in cohort}:
        found = memories[f"client_{k}"]["control"]["v"].item()
        assert found == pytest.approx(own[k], rel=1e-6)


# --------------------------------------------------------------------------- effect of controls

UNEQUAL = [[(1, 0)], [(4, 6)] * 3, [(2, 9)] * 2]


def minimiser(shares):
    """Return the minimiser of the clients' mean loss, weighted by shares."""
    pairs = [held[0] for held in UNEQUAL]
    return sum(p * a * b for p, (a, b) in zip(shares, pairs, strict=True)) / sum(
        p * a for p, (a, _) in zip(shares, pairs, strict=True)
    )


def end(start_run, weighting, *, corrected=True, **train):
    layer = {"weighting": weighting}
    train = {"batch_size": 3, "local_epochs": 4, **train}
    run = quadratics(start_run, "scaffold", UNEQUAL, federation=layer, rounds=50, **train)
    if not corrected:
        run.method.on_before_optimizer_step = lambda _: None
    run.rounds(50)
    return run.server.weights["v"].item()


@pytest.mark.parametrize("train", [{"lr": 0.1}, {"lr": 0.03, "momentum": 0.9}], ids=str)
@pytest.mark.parametrize(("weighting", "shares"), [("uniform", (1, 1, 1)), ("samples", (1, 3, 2))])
def test_many_local_steps_end_at_the_minimiser_of_the_weighted_loss(
    start_run, weighting, shares, train
):
    """Clients differ in curvature and size; controls converge with momentum, too."""
    assert end(start_run, weighting, **train) == pytest.approx(minimiser(shares), rel=1e-6)


def test_without_controls_they_end_elsewhere(start_run):
    found = end(start_run, "uniform", corrected=False, lr=0.1)
    assert abs(found - minimiser((1, 1, 1))) > 0.1


def test_the_control_is_the_mean_of_the_clients_controls(start_run):
    """Weighted by images, including clients not asked yet, whose controls are 0."""
    run = quadratics(start_run, "scaffold", UNEQUAL, federation={"per_round": 1}, lr=0.05)
    for upto in range(1, 7):
        run.rounds(upto)
        own = [
            memory["control"]["v"].item() if (memory := run.executor.memories.get(n)) else 0.0
            for n in ("client_0", "client_1", "client_2")
        ]
        found = run.server.broadcast["control"]["v"].item()
        assert found == pytest.approx(np.dot([1, 3, 2], own) / 6, rel=1e-9, abs=1e-12)


# ----------------------------------------------------------------------- equal to FedAvg

SGD = {"train": {"optimizer": "sgd", "lr": 0.05}}


def after(start_run, name, *layers, rounds=1, **parts):
    run = start_run(name, SGD, *layers, **parts)
    results = run.rounds(rounds)
    return run.server.weights, [r.ledger.means() for r in results[1:]]


def test_the_second_round_is_not(start_run):
    expected, _ = after(start_run, "fedavg", rounds=2)
    found, _ = after(start_run, "scaffold", rounds=2)
    assert any(not torch.equal(found[name], expected[name]) for name in expected)


# ------------------------------------------------------------------ messages and client memory


class Normed(nn.Module):
    """Three features under batch normalisation."""

    num_features = 3

    def __init__(self):
        super().__init__()
        self.net = nn.BatchNorm1d(3)

    def forward(self, images):
        return self.net(images.mean((2, 3)))


@pytest.mark.parametrize(
    ("bn", "controlled", "federated"),
    [
        ("average", {"backbone.net.weight", "backbone.net.bias"}, 5),
        ("frozen", {"backbone.net.weight", "backbone.net.bias"}, 2),
        ("local", set(), 0),
    ],
)
def test_controls_are_for_trainable_parameters_that_are_shared(
    start_run, recorder, bn, controlled, federated
):
    train = {"optimizer": "sgd", "lr": 0.05, "channels_last": False}
    method = Scaffold(
        MethodSettings(), backbone=Normed(), num_classes=3, train=TrainSettings(**train), bn=bn
    )
    layer = {"train": {**train, "drop_last_if_single": True}, "federation": {"bn": bn}}
    run = start_run("scaffold", layer, method=method, executor=recorder)
    result = run.rounds(2)[2]
    controlled = controlled | {"classifier.weight", "classifier.bias"}
    assert set(run.server.broadcast["control"]) == controlled
    for reply in recorder.replies[-2:]:
        assert set(reply.value.extra["control"]) == controlled
        assert set(reply.memory["control"]) == controlled
        assert len(reply.value.weights) == 2 + federated
    controls = 4 * (12 + 6 * (bn != "local"))
    model = nbytes(run.server.weights)
    assert result.ledger.bytes == {"up": 2 * (model + controls), "down": 2 * (model + controls)}


def test_clients_that_are_not_asked_keep_what_they_have(start_run):
    run = start_run("scaffold", SGD, {"federation": {"per_round": 1}})
    results, kept = run.rounds(1), {}
    for upto in range(2, 6):
        asked = {r.cohort[0] for r in results[1:]}
        assert {n for n, m in run.executor.memories.items() if "control" in m} >= asked
        before = {n: dict(m["control"]) for n, m in run.executor.memories.items() if m}
        results = run.rounds(upto)
        kept = {n: c for n, c in before.items() if n != results[-1].cohort[0]}
        for name, control in kept.items():
            bitwise(run.executor.memories[name]["control"], control)
    assert kept


# --------------------------------------------------------------------------------- edge cases


def test_a_client_without_a_step_changes_nothing(start_run):
    run = quadratics(start_run, "scaffold", [[(1, 5)] * 2, [(3, 8)]], rounds=3)
    run.rounds(1)
    assert run.server.broadcast["control"]["v"].item() != 0
    run.method.batches = lambda *_: iter(())
    memory = dict(run.executor.memories["client_1"])
    for kept in ({}, memory):
        task = Task("client_1", "fit", 2, run.server.weights, dict(run.server.broadcast), kept)
        reply = run.executor.worker.run(task)
        bitwise(reply.value.weights["v"], run.server.weights["v"])
        assert reply.value.extra["control"]["v"].item() == 0
        torch.testing.assert_close(reply.memory, kept, rtol=0, atol=0)


def test_where_nothing_is_to_learn_the_controls_settle_at_zero(start_run):
    """All clients are at their minimum: no gradient, no move, no NaN."""
    run = quadratics(start_run, "scaffold", [[(1, 1)], [(5, 1)] * 3])
    run.rounds(3)
    assert run.server.weights["v"].item() == 1
    assert run.server.broadcast["control"]["v"].item() == 0


def test_a_client_that_diverges_leaves_no_trace_in_the_controls(start_run):
    """The others' changes count with their shares among all clients."""
    run = quadratics(start_run, "scaffold", UNEQUAL)
    run.method.prepare(run.server)
    start = run.server.broadcast["control"]
    change = torch.tensor(0.6, dtype=torch.float64)

    def replies():
        for name, size in (("client_0", 1), ("client_2", 2)):
            extra = {"control": {n: torch.zeros_like(c) for n, c in start.items()} | {"v": change}}
            yield Reply(name, size, LocalUpdate(dict(run.server.weights), extra), {}, {})

    run.method.aggregate(run.server, replies())
    assert run.server.broadcast["control"]["v"].item() == pytest.approx(0.6 * 3 / 6)
    assert float(start["v"]) == 0


def test_the_change_of_a_control():
    w, theta, c = (torch.tensor(x, dtype=torch.float64) for x in (1.0, 0.4632, 0.3))
    assert control_change(w, theta, c, 3 * 0.1).item() == pytest.approx(1.5893333333 - 0.1)


class TestScaffold(MethodTester):
    """A lone client's control equals the server's, so nothing is corrected.

    small_cnn has no buffers: every tensor of the model has a control.
    """

    name = "scaffold"
    layer = SGD
    twins = (
        *(
            Twin({}, SGD | layer, rounds=1, sends=False)
            for layer in (
                {},
                {"train": {**SGD["train"], "momentum": 0.9, "weight_decay": 0.01}},
                {"federation": {"weighting": "uniform", "server_lr": 0.5, "per_round": None}},
            )
        ),
        Twin({}, SGD | ONE_CLIENT, rounds=3, federation=alone, sends=False),
    )
    models = (2, 2)
