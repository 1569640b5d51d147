"""FDSE: layers, loss and both aggregations in float64, and what travels."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.core.messages import nbytes
from feddg_methods.fdse import Decomposed, consensus, consistency, personalised
from tests.helpers import ALL, PLAIN, hyper, refused
from tests.tester import MethodTester

# ------------------------------------------------------------------------------- layers


def convolved(x, kernels, groups=1):
    """Return 3 x 3 convolutions of maps [B, C, H, W] with a border of zeros."""
    b, c, h, w = x.shape
    wide = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    out = np.zeros((b, len(kernels), h, w))
    per = c // groups
    for n, kernel in enumerate(kernels):
        first = n // (len(kernels) // groups) * per
        for i in range(3):
            for j in range(3):
                part = wide[:, first : first + per, i : i + h, j : j + w]
                out[:, n] += np.einsum("bchw,c->bhw", part, kernel[:, i, j])
    return out


def normal(x):
    mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5)


@pytest.mark.parametrize(("t", "g"), [(4, 2), (5, 2), (6, 3)])
def test_a_decomposed_convolution(t, g):
    """BN_2([s, U(s)]) with s = BN_1(DFE(x)), cut to T channels."""
    conv = nn.Conv2d(3, t, 3, padding=1).double()
    layer = Decomposed(conv, g).double()
    m = -(-t // g)
    kernels = conv.weight.detach().numpy()[:m]  # the DFE begins as the layer's first filters
    (erase,) = (p.detach().numpy() for p in layer.dse.parameters() if p.dim() == 4)
    assert erase.shape == (m * (g - 1), 1, 3, 3)
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 4))
    s = normal(convolved(x, kernels))
    expected = normal(np.concatenate([s, convolved(s, erase, groups=m)], 1)[:, :t])
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, rtol=1e-9, atol=1e-9)


def test_strides_stay_and_other_convolutions_too(start_run):
    run = start_run("fdse", {"backbone": {"name": "small_cnn"}})
    found = {n: m for n, m in run.method.named_modules() if isinstance(m, Decomposed)}
    assert [layer.dfe.out_channels for layer in found.values()] == [8, 16, 32, 64]
    assert all(layer.dfe.stride == (2, 2) for layer in found.values())
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


# --------------------------------------------------------------------------------- loss


def test_consistency():
    """1 / T ||muhat - mu||^2 + (1 / T sum_c (vhat_c - v_c))^2, with a gradient of the batch."""
    rng = np.random.default_rng(1)
    z = rng.normal(1, 2, (5, 3, 2, 2))
    mu, old_mu = rng.normal(size=(2, 3))
    v, old_v = rng.uniform(0.5, 2, (2, 3))
    norm = nn.BatchNorm2d(3).double()
    norm.running_mean.copy_(torch.from_numpy(old_mu))
    norm.running_var.copy_(torch.from_numpy(old_v))

    def loss(values):
        muhat = 0.9 * old_mu + 0.1 * values.mean((0, 2, 3))
        vhat = 0.9 * old_v + 0.1 * values.var((0, 2, 3), ddof=1)
        return ((muhat - mu) ** 2).mean() + (vhat - v).mean() ** 2

    leaf = torch.from_numpy(z).requires_grad_()
    norm(leaf)
    found = consistency(leaf, norm, torch.from_numpy(mu), torch.from_numpy(v))
    assert found.item() == pytest.approx(loss(z), rel=1e-12)
    found.backward()
    for place in ((0, 0, 0, 0), (4, 2, 1, 0)):
        step = np.zeros_like(z)
        step[place] = 1e-5
        slope = (loss(z + step) - loss(z - step)) / 2e-5
        assert leaf.grad[place].item() == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("number", [1, 2])
def test_the_loss_of_a_step(start_run, recorder, number):
    """The term begins in round 2, and later layers weigh more."""
    values = {"lam": 3.0, "beta": 0.7}
    run = start_run("fdse", ALL, PLAIN, hyper(**values), executor=recorder)
    run.rounds(number)
    method = run.method
    task = next(t for t in recorder.tasks if t.round == number)
    client = recorder.worker._client(task)
    method.train()
    method.state.load(task.weights)
    batch = next(iter(client.batches(train=False)))
    seen = []
    layers = [(n, m) for n, m in method.named_modules() if isinstance(m, Decomposed)]
    hooks = [m.norm.register_forward_pre_hook(lambda _m, z: seen.append(z[0])) for _, m in layers]
    with method.state.serving(client), torch.no_grad():
        plain = torch.nn.functional.cross_entropy(method(batch[0]), batch[1])
        method.state.load(task.weights)
        loss = method.training_step(batch, 0)
    for hook in hooks:
        hook.remove()
    w = np.exp(0.7 * np.arange(len(layers)))
    w = w / w.sum()
    expected = plain.item()
    if number > 1:
        for share, (name, _), z in zip(w, layers, seen, strict=False):
            mu, v = (task.weights[f"{name}.norm.running_{s}"].double() for s in ("mean", "var"))
            flat = z.double().transpose(0, 1).flatten(1)
            moved = (0.1 * (flat.mean(1) - mu)).square().mean()
            spread = (0.1 * (flat.var(1) - v)).mean().square()
            expected += 3.0 * share * (moved + spread).item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert not any(layer._forward_pre_hooks for layer in method.modules())


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
