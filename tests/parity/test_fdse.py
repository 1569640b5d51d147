"""FDSE: a training step and both aggregations in float64, and what travels."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.core.messages import nbytes
from feddg_methods.fdse import Decomposed, consensus, personalised
from tests.helpers import ALL, PLAIN, bitwise, hyper, refused
from tests.stages import X, Y, leaves, logits, pooled, same_step, two_stages
from tests.tester import MethodTester

# -------------------------------------------------------------------------- a training step


def normalised(z, scale, shift):
    mean, var = z.mean((0, 2, 3), keepdim=True), z.var((0, 2, 3), keepdim=True, correction=0)
    return scale.view(-1, 1, 1) * (z - mean) / (var + 1e-5).sqrt() + shift.view(-1, 1, 1)


def decomposed(p, x, name, channels, **convolution):
    """Return what the DSE makes, and its normalised values (Equations 2 and 3)."""
    p = {n.removeprefix(f"{name}."): value for n, value in p.items() if n.startswith(f"{name}.")}
    s = F.conv2d(x, p["dfe.weight"], **convolution)
    s = normalised(s, p["dse.norm.weight"], p["dse.norm.bias"]).clamp(min=0)
    more = F.conv2d(s, p["dse.erase.weight"], padding=1, groups=s.shape[1])
    z = torch.cat([s, more], 1)[:, :channels]
    return z, normalised(z, p["norm.weight"], p["norm.bias"])


@pytest.mark.parametrize("g", [2, 3])
@pytest.mark.parametrize("lam", [0.0, 3.0])
def test_a_training_step(lam, g):
    """Cross entropy + lambda sum_l w_l L_l (Equations 4 to 7); later layers weigh more."""
    method = two_stages("fdse", lam=lam, beta=0.7, ratio=g)
    named = {"backbone.net.0": 4, "backbone.net.3": 5}
    layers = {name: method.get_submodule(name) for name in named}
    received, kept = {}, {}
    for name, layer in layers.items():
        for tensor in (*layer.norm.parameters(), *layer.dse.norm.parameters()):
            nn.init.normal_(tensor)
        for part in ("mean", "var"):
            statistic = getattr(layer.norm, f"running_{part}")
            received[f"{name}.norm.running_{part}"] = torch.rand_like(statistic)
            kept[name, part] = nn.init.uniform_(statistic).clone()
    p = leaves(method)

    z, made = X, {}
    for name, channels in named.items():
        made[name], z = decomposed(p, z, name, channels, padding=int(channels == 4))
        z = z.tanh()
    expected = F.cross_entropy(logits(p, pooled(z)), Y)
    w = torch.tensor([1.0, np.exp(0.7)], dtype=torch.float64)
    for share, (name, z) in zip(w / w.sum(), made.items(), strict=True):
        muhat = 0.9 * kept[name, "mean"] + 0.1 * z.mean((0, 2, 3))
        vhat = 0.9 * kept[name, "var"] + 0.1 * z.var((0, 2, 3))
        mu, v = (received[f"{name}.norm.running_{part}"] for part in ("mean", "var"))
        moved, spread = (muhat - mu).square().mean(), (vhat.sum() - v.sum()) / len(v)
        expected = expected + lam * share * (moved + spread**2)
    with method.state.serving(SimpleNamespace(weights=received)):
        loss = method.training_step((X, Y), 0)
    same_step(method, loss, expected, p)


def test_strides_stay_and_other_convolutions_too(start_run):
    run = start_run("fdse", {"backbone": {"name": "small_cnn"}})
    found = {n: m for n, m in run.method.named_modules() if isinstance(m, Decomposed)}
    assert [layer.dfe.out_channels for layer in found.values()] == [8, 16, 32, 64]
    assert all(layer.dfe.stride == (2, 2) for layer in found.values())
    conv = nn.Conv2d(3, 5, 3)
    bitwise(Decomposed(conv, 2).dfe.weight, conv.weight[:3])  # it begins as the first filters
    depthwise = nn.Conv2d(4, 4, 3, groups=4)
    net = nn.Sequential(depthwise)
    with refused(SettingsError, "fdse needs a network with convolutions"):
        type(run.method)(
            run.method.settings, backbone=Wrapped(net), num_classes=2, train=run.settings.train
        )


class Wrapped(nn.Module):
    num_features = 4

    def __init__(self, net):
        super().__init__()
        self.net = net


# -------------------------------------------------------------------------- aggregation


def nearest(rows):
    """Return the point of the convex hull of rows that is nearest to 0, by all its faces."""
    best = min(rows, key=np.linalg.norm)
    for size in range(2, len(rows) + 1):
        for face in combinations(rows, size):
            d = np.stack(face)
            system = np.block(
                [[d @ d.T, np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]]
            )
            u = np.linalg.lstsq(system, np.eye(size + 1)[-1], rcond=None)[0][:size]
            point = u @ d
            if (u >= 0).all() and np.linalg.norm(point) < np.linalg.norm(best):
                best = point
    return best


@pytest.mark.parametrize(("clients", "width"), [(1, 3), (2, 3), (4, 6), (5, 2), (4, 1)])
def test_consensus(clients, width):
    """The step is the mean length along the direction on which the clients agree most."""
    for seed in range(5):
        rows = np.random.default_rng(seed).normal(0.5, 1, (clients, width))
        lengths = np.linalg.norm(rows, axis=1)
        expected = lengths.mean() * nearest(rows / lengths[:, None])
        gram = torch.from_numpy(rows @ rows.T)
        a = consensus(gram, torch.full((clients,), 1 / clients)).numpy()
        assert (a >= 0).all()
        np.testing.assert_allclose(a @ rows, expected, atol=1e-7)


def test_a_client_that_stays_where_it_is_agrees_with_no_step():
    gram = torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert consensus(gram, torch.ones(2))[0].item() == pytest.approx(0, abs=1e-12)


def test_personalised():
    rng = np.random.default_rng(2)
    values = rng.normal(size=(3, 4, 2))
    sent = {
        f"c{k}": {"erase": torch.from_numpy(v), "n": torch.tensor(k)} for k, v in enumerate(values)
    }
    found = personalised(sent, ["erase"], tau=0.5)
    flat = values.reshape(3, -1)
    q = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    a = np.exp(q @ q.T / 0.5)
    expected = a / a.sum(1, keepdims=True) @ flat
    for k, row in enumerate(expected):
        assert [*found[f"c{k}"]] == ["erase"]
        np.testing.assert_allclose(found[f"c{k}"]["erase"].flatten(), row, rtol=1e-12)
    zero = {c: {"bias": torch.zeros(2)} for c in ("a", "b")}  # as before the first step
    assert_close(personalised(zero, ["bias"], tau=0.5)["a"]["bias"], torch.zeros(2))


def test_two_rounds(start_run, recorder):
    """Shared tensors follow Equation 8 and the DSEs Equation 9; statistics of BN_1 stay."""
    run = start_run(
        "fdse", PLAIN, hyper(tau=0.3), {"federation": {"per_round": 2}}, executor=recorder
    )
    own: dict = {}
    for number in (1, 2, 3):
        old = {name: t.double().numpy() for name, t in run.server.weights.items()}
        begun = len(recorder.tasks)
        run.rounds(number)
        tasks, replies = recorder.tasks[begun:], recorder.replies[begun:]
        for task in tasks:
            told = task.told.get("dse", {})
            assert told.keys() == own.get(task.client, {}).keys()
            for name, value in told.items():
                np.testing.assert_allclose(value, own[task.client][name], rtol=1e-4, atol=1e-6)
        shares = np.array([reply.num_examples for reply in replies], dtype=float)
        for name, w in old.items():
            sent = np.stack([reply.value.weights[name].double().numpy() for reply in replies])
            rows = (sent - w).reshape(len(sent), -1)
            lengths = np.linalg.norm(rows, axis=1)
            new = w + (lengths.mean() * nearest(rows / lengths[:, None])).reshape(w.shape)
            if "running" in name:
                new = np.average(sent, axis=0, weights=shares)
            elif "num_batches" in name:
                new = sent.max(0)
            found = run.server.weights[name]
            np.testing.assert_allclose(found, new, rtol=1e-3, atol=1e-6, err_msg=name)
        for name in replies[0].value.extra["dse"]:
            if "running" in name or "num_batches" in name:
                continue
            rows = np.stack([r.value.extra["dse"][name].double().numpy() for r in replies])
            flat = rows.reshape(len(rows), -1)
            q = flat / np.linalg.norm(flat, axis=1, keepdims=True)
            a = np.exp(q @ q.T / 0.3)
            mixed = (a / a.sum(1, keepdims=True) @ flat).reshape(rows.shape)
            for reply, value in zip(replies, mixed, strict=True):
                own.setdefault(reply.client, {})[name] = value
    assert own.keys() > {reply.client for reply in replies}


def test_an_unseen_domain_gets_the_mean_of_the_rounds_erasers(start_run, recorder):
    run = start_run("fdse", executor=recorder)
    run.rounds(1)
    model = run.method.global_model(run.server)
    assert model.keys() == run.method.state_dict().keys()
    shares = [reply.num_examples for reply in recorder.replies]
    name = next(n for n in model if n.endswith("dse.norm.running_var"))
    sent = [reply.value.extra["dse"][name] for reply in recorder.replies]
    mean = sum(n * t for n, t in zip(shares, sent, strict=True)) / sum(shares)
    assert_close(model[name], mean)


def test_what_travels(start_run):
    """Up: the model; down: the shared part, and from a client's second round on its DSE."""
    run = start_run("fdse", ALL)
    first, second, third = (r.ledger.bytes for r in run.rounds(3)[1:])
    clients = len(run.federation.clients)
    shared, whole = nbytes(run.server.weights), nbytes(run.method.global_model(run.server))
    dse = nbytes(run.server.memory["dse"]["client_0"])
    assert first == {"up": clients * whole, "down": clients * shared}
    assert second == third == {"up": clients * whole, "down": clients * (shared + dse)}


@pytest.mark.parametrize("bn", ["local", "frozen"])
def test_another_policy_is_refused(start_run, bn):
    run = start_run("fdse", {"federation": {"bn": bn}})
    with refused(SettingsError, f"federation.bn={bn} does not go with fdse"):
        run.rounds(1)


def test_a_network_that_is_not_trained_is_refused(start_run):
    with refused(SettingsError, "backbone.trainable=head"):
        start_run("fdse", {"backbone": {"trainable": "head"}})


class TestFDSE(MethodTester):
    name = "fdse"
    rounds = 2
    apart = ({"ratio": 4}, {"lam": 50.0}, {"tau": 0.05})
    wrong = ({"ratio": 1}, {"lam": -1}, {"beta": -1}, {"tau": 0})
