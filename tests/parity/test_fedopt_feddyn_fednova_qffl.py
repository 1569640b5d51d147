"""FedOpt, FedDyn, FedNova and q-FFL: float64 simulations on one number, fixed points, limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from feddg_bench.common.errors import SettingsError
from feddg_methods.fedopt import MOMENTS
from feddg_methods.qffl import lipschitz_constant
from tests.helpers import refused
from tests.quadratics import quadratics
from tests.tester import ONE_CLIENT, MethodTester, Twin, alone

SGD = {"train": {"optimizer": "sgd", "lr": 0.05}}

CLIENTS = [[(1, 0)], [(4, 6)] * 3, [(2, 9)] * 2, [(3, 2)] * 4]
"""Images (a, b) of each client, all equal within one: their order does not matter."""


def sizes(weighting):
    return [1 if weighting == "uniform" else len(held) for held in CLIENTS]


def cohorts(run, rounds):
    return [[int(name[-1]) for name in result.cohort] for result in run.rounds(rounds)[1:]]


def minimiser(weights):
    """Return the minimiser of the mean of the clients' losses a (v - b)^2 / 2."""
    pairs = [held[0] for held in CLIENTS]
    return sum(p * a * b for p, (a, b) in zip(weights, pairs, strict=True)) / sum(
        p * a for p, (a, _) in zip(weights, pairs, strict=True)
    )


def steps(held, v, lr, *, gradient=lambda _: 0.0, momentum=0.0, epochs=1):
    """Return a client's number after training, and the sum of the factors of its gradients."""
    (a, b), velocity, repeat, entered = held[0], 0.0, 0.0, 0.0
    for _ in range(epochs * len(held)):
        velocity = momentum * velocity + a * (v - b) + gradient(v)
        repeat = momentum * repeat + 1
        v -= lr * velocity
        entered += lr * repeat
    return v, entered


# --------------------------------------------------------------------------------------- FedOpt


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad", "momentum"])
def test_fedopt(start_run, optimizer, weighting):
    """Algorithm 2, six rounds; momentum as in Hsu et al."""
    b1, b2, tau = {"adagrad": 0.0}.get(optimizer, 0.9), 0.99, 1e-3
    eta = 1.0 if optimizer == "momentum" else 0.01
    run = quadratics(
        start_run,
        "fedopt",
        CLIENTS,
        hyper={"optimizer": optimizer},
        federation={"weighting": weighting, "per_round": 2},
        lr=0.03,
    )
    x, m, v, p = 1.0, 0.0, tau**2, sizes(weighting)
    for cohort in cohorts(run, 6):
        moves = [p[k] * (steps(CLIENTS[k], x, 0.03)[0] - x) for k in cohort]
        delta = sum(moves) / sum(p[k] for k in cohort)
        if optimizer == "momentum":
            m = b1 * m + delta
            x += eta * m
            continue
        m = b1 * m + (1 - b1) * delta
        if optimizer == "adagrad":
            v += delta**2
        elif optimizer == "yogi":
            v -= (1 - b2) * delta**2 * np.sign(v - delta**2)
        else:
            v = b2 * v + (1 - b2) * delta**2
        x += eta * m / (np.sqrt(v) + tau)
    assert run.server.weights["v"].item() == pytest.approx(x, rel=1e-9)


def test_second_moments_by_hand():
    """From v = 4, Delta^2 = 9 and beta_2 = 0.75; Yogi moves by a quarter of 9 towards it."""
    v, square = torch.tensor(4.0), torch.tensor(9.0)
    found = {name: moment(v, square, 0.75).item() for name, moment in MOMENTS.items()}
    assert found == {"adagrad": 13.0, "yogi": 6.25, "adam": 5.25}


class TestFedOpt(MethodTester):
    name = "fedopt"
    twins = (Twin({"optimizer": "momentum", "beta1": 0.0}, rounds=1, close=True),)
    apart = (
        {"optimizer": "yogi"},
        {"optimizer": "adagrad"},
        {"optimizer": "momentum"},
        {"eta": 0.02},
        {"beta1": 0.5},
        {"beta2": 0.5},
        {"tau": 0.1},
    )
    rounds = 2
    wrong = ({"eta": 0}, {"beta1": 1}, {"beta2": -0.1}, {"tau": 0}, {"optimizer": "sgd"})
    models = (1, 1)


# --------------------------------------------------------------------------------------- FedDyn


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("evaluation", ["server", "mean"])
def test_feddyn(start_run, weighting, evaluation):
    """Algorithm 1, eight rounds of two in four clients; alpha as in the authors' code."""
    alpha = 0.5
    run = quadratics(
        start_run,
        "feddyn",
        CLIENTS,
        hyper={"alpha": alpha, "evaluation": evaluation},
        federation={"weighting": weighting, "per_round": 2},
        lr=0.03,
    )
    count = np.mean(sizes(weighting))
    own = [alpha * count / n for n in sizes(weighting)]
    x, mean, h, g = 1.0, 1.0, 0.0, [0.0] * 4
    for cohort in cohorts(run, 8):
        thetas = {}
        for k in cohort:
            thetas[k], _ = steps(
                CLIENTS[k], x, 0.03, gradient=lambda v, k=k, x=x: own[k] * (v - x) - g[k]
            )
        for k in cohort:
            g[k] -= own[k] * (thetas[k] - x)
        h -= alpha / 4 * sum(thetas[k] - x for k in cohort)
        mean = np.mean([thetas[k] for k in cohort])
        x = mean - h / alpha
    assert run.server.weights["v"].item() == pytest.approx(x, rel=1e-9)
    found = run.method.global_model(run.server)["v"].item()
    assert found == pytest.approx(mean if evaluation == "mean" else x, rel=1e-9)
    kept = [run.executor.memories[f"client_{k}"]["gradient"]["v"].item() for k in range(4)]
    assert kept == pytest.approx(g, rel=1e-9)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_feddyn_ends_at_the_minimiser_of_the_weighted_loss(start_run, weighting):
    """FedAvg does not, with several local steps."""
    layer = {"weighting": weighting, "per_round": None}
    train = {"lr": 0.05, "local_epochs": 10, "batch_size": 4}
    found = {}
    for name, hyper in (("feddyn", {"alpha": 1.0}), ("fedavg", {})):
        run = quadratics(start_run, name, CLIENTS, hyper=hyper, federation=layer, **train)
        run.rounds(50)
        found[name] = run.server.weights["v"].item()
    best = minimiser(sizes(weighting))
    assert found["feddyn"] == pytest.approx(best, rel=1e-5)
    assert abs(found["fedavg"] - best) > 0.03


class TestFedDyn(MethodTester):
    name = "feddyn"
    layer: ClassVar = {"federation": {"weighting": "uniform"}}
    apart = ({"alpha": 0.1},)
    rounds = 2
    wrong = ({"alpha": 0}, {"evaluation": "all"})
    models = (1, 1)


# -------------------------------------------------------------------------------------- FedNova


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("train", [{}, {"momentum": 0.9}, {"local_epochs": 3}], ids=str)
def test_fednova(start_run, weighting, train):
    """x + tau_eff sum_i p_i Delta_i / ||a_i||_1 over five rounds."""
    run = quadratics(
        start_run,
        "fednova",
        CLIENTS,
        federation={"weighting": weighting, "per_round": 3},
        lr=0.01,
        **train,
    )
    x, counts = 1.0, sizes(weighting)
    for cohort in cohorts(run, 5):
        p = {k: counts[k] / sum(counts[j] for j in cohort) for k in cohort}
        ends = {
            k: steps(
                CLIENTS[k],
                x,
                0.01,
                momentum=train.get("momentum", 0.0),
                epochs=train.get("local_epochs", 1),
            )
            for k in cohort
        }
        effective = sum(p[k] * length for k, (_, length) in ends.items())
        x += effective * sum(p[k] * (theta - x) / length for k, (theta, length) in ends.items())
    assert run.server.weights["v"].item() == pytest.approx(x, rel=1e-9)


@pytest.mark.parametrize("name", ["fednova", "fedavg"])
def test_fednova_weights_losses_equally_whatever_the_steps(start_run, name):
    """Small steps, and 1 to 4 of them: FedAvg minimises a mean with twice the weights."""
    run = quadratics(start_run, name, CLIENTS, federation={"weighting": "samples"}, lr=0.005)
    run.rounds(50)
    for _ in range(3):
        run.server.round = 0
        run.rounds(50)
    counts = sizes("samples")
    weights = counts if name == "fednova" else [n * n for n in counts]
    assert run.server.weights["v"].item() == pytest.approx(minimiser(weights), rel=1e-2)


def test_a_client_without_a_step_does_not_move_the_model(start_run):
    run = quadratics(start_run, "fednova", CLIENTS, rounds=1)
    run.method.batches = lambda *_: iter(())
    run.rounds(1)
    assert run.server.weights["v"].item() == 1.0


class TestFedNova(MethodTester):
    name = "fednova"
    layer = SGD
    twins = (Twin({}, SGD | ONE_CLIENT, federation=alone, sends=False, close=True),)


# ---------------------------------------------------------------------------------------- q-FFL


def test_a_lipschitz_constant_by_hand():
    """F = 4, ||Delta w||^2 = 3, q = 2, L = 10: 2 * 4 * 3 + 10 * 16."""
    assert lipschitz_constant(4.0, 3.0, q=2.0, lipschitz=10.0) == 184.0


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(("q", "lipschitz"), [(0.0, None), (0.5, None), (2.0, 25.0)])
def test_qffl(start_run, weighting, q, lipschitz):
    """Algorithm 2, five rounds of three in four clients."""
    run = quadratics(
        start_run,
        "qffl",
        CLIENTS,
        hyper={"q": q, "lipschitz": lipschitz},
        federation={"weighting": weighting, "per_round": 3},
        lr=0.05,
    )
    run.method.task = SimpleNamespace(loss=lambda v, labels, _: (labels + 1) * v.double() ** 2 / 2)
    constant, x, counts = lipschitz or 20.0, 1.0, sizes(weighting)
    for cohort in cohorts(run, 5):
        top = bottom = 0.0
        for k in cohort:
            a, b = CLIENTS[k][0]
            loss = a * (x - b) ** 2 / 2 + 1e-10
            move = constant * (x - steps(CLIENTS[k], x, 0.05)[0])
            top += counts[k] * loss**q * move
            bottom += counts[k] * (q * loss ** (q - 1) * move**2 + constant * loss**q)
        x -= top / bottom
    assert run.server.weights["v"].item() == pytest.approx(x, rel=1e-6)


class TestQFFL(MethodTester):
    name = "qffl"
    twins = (
        Twin({"q": 0.0}, sends=False, close=True),
        Twin({"q": 0.0}, {"federation": {"weighting": "uniform"}}, sends=False, close=True),
    )
    apart = ({"q": 0.1}, {"lipschitz": 50.0})
    wrong = ({"q": -1}, {"lipschitz": 0})


# ------------------------------------------------------------------------------------ SGD only


@pytest.mark.parametrize("name", ["fednova", "scaffold"])
def test_adam_is_refused(start_run, name):
    with refused(SettingsError, f"{name} needs to know how far", "set train.optimizer=sgd"):
        start_run(name, {"train": {"optimizer": "adam"}})
