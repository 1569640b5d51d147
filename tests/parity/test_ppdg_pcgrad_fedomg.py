"""PPDG, PCGrad and FedOMG: published numbers, the rules written out on vectors, and edges."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import FederationSettings, TrainSettings
from feddg_bench.core.messages import LocalUpdate, Reply
from feddg_bench.core.server import NoReplyError, Server
from feddg_bench.plugins import load_method
from feddg_methods.fedomg import conflict_averse_coefficients
from tests.helpers import bitwise
from tests.tester import MethodTester, Twin

approx = partial(pytest.approx, rel=1e-6, abs=1e-6)
NAMES = ("ppdg", "pcgrad", "fedomg")
READINGS = ("running", "algorithm1", "eq5", "pcgrad_style")

TWO = [[1, 0], [-1, 1]]
THREE = [[1, 0], [-1, 1], [-0.5, -1]]
FOUR = [[2, 0, 1], [-1, 1, 0], [0, -2, 1], [1, 1, -3]]


class NoBackbone(nn.Module):
    num_features = 1


def build(name, **hyper):
    """Return a method whose parameters are ``a``, the first coordinate, and ``b``, the others."""
    plugin = load_method(name)
    settings = validate(plugin.Settings, hyper)
    method = plugin(settings, backbone=NoBackbone(), num_classes=2, train=TrainSettings())
    method.trainable = ["a", "b"]
    return method


def as_state(vector, mean=0.0, count=0):
    vector = torch.as_tensor(np.asarray(vector), dtype=torch.float32)
    return {
        "a": vector[0].clone(),
        "running_mean": torch.tensor([mean], dtype=torch.float32),
        "b": vector[1:].reshape(1, -1).clone(),
        "num_batches_tracked": torch.tensor(count),
    }


def serve(w, *, seed=0, round=1, **federation):
    server = Server(
        as_state(w, 0.5, 3),
        (),
        executor=None,
        seed=seed,
        federation=FederationSettings(**federation),
        uplink={"fit": ("weights",)},
    )
    server.round = round
    return server


def answer(server, deltas, sizes=None, means=None, counts=None):
    """Yield clients' replies; deltas are K rows."""
    w = np.concatenate([server.weights[n].numpy().ravel() for n in ("a", "b")])
    for k, delta in enumerate(deltas):
        state = as_state(
            w + np.asarray(delta, np.float32),
            means[k] if means else 0.0,
            counts[k] if counts else 0,
        )
        yield Reply(f"client_{k}", sizes[k] if sizes else 10, LocalUpdate(state), {}, {})


def step(name, deltas, *, sizes=None, w=None, federation=None, seed=0, round=1, **hyper):
    """Return how far the global parameters move, float64 [P]."""
    w = np.zeros(len(deltas[0])) if w is None else w
    server = serve(w, seed=seed, round=round, **(federation or {}))
    new = build(name, **hyper).aggregate(server, answer(server, deltas, sizes))
    moved = [(new[n].double() - server.weights[n].double()).flatten() for n in ("a", "b")]
    return torch.cat(moved).numpy()


def assert_near(found, expected):
    """Relative error of the whole vector at most 1e-6."""
    expected = np.asarray(expected)
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected) + 1e-12


def drawn(seed, clients, width=6):
    rng = np.random.default_rng(seed)
    deltas = (rng.normal(size=(clients, width)) + 0.2 * rng.normal(size=width)).astype(np.float32)
    return rng, deltas.astype(np.float64)


def cases(clients):
    return [(seed, size) for size in clients for seed in range(4)]


# -------------------------------------------------------------------------------------- PPDG


@pytest.mark.parametrize(
    ("deltas", "hyper", "expected"),
    [
        (TWO, {"strength": 0.1}, [-0.04, 0.52]),
        (TWO, {"strength": 0.3}, [-0.6, 0.8]),
        ([[1, 0], [1, 1]], {"strength": 0.1}, [1, 0.5]),
        ([[1, 0], [1, 1]], {"strength": 0.1, "only_conflicts": False}, [1, 0.52]),
        (THREE, {"strength": 0.2}, [-0.3864, -0.4128]),
        (THREE, {"strength": 0.2, "reading": "algorithm1"}, [-0.2850666667, -0.3701333333]),
        (THREE, {"strength": 0.2, "reading": "eq5"}, [-0.3666666667, -0.1333333333]),
        (THREE, {"strength": 0.2, "reading": "pcgrad_style"}, [-0.2466666667, -0.0533333333]),
        (FOUR, {"strength": 0.1}, [0.6307584, 0.2725632, -0.8868352]),
        (FOUR, {"strength": 0.2}, [0.5623552, 0.1406656, -1.2641376]),
    ],
)
def test_ppdg_published_numbers(deltas, hyper, expected):
    assert step("ppdg", deltas, order="ascending", **hyper).tolist() == approx(expected)


def align(g, strength, reading, order, only_conflicts):
    """The four readings on the vectors themselves."""
    h = g.copy()
    for i in order:
        for j in (j for j in order if j != i):
            tested = {"eq5": (g[i], g[j]), "pcgrad_style": (h[i], g[j])}.get(reading, (h[i], h[j]))
            if tested[0] @ tested[1] < 0 or not only_conflicts:
                h[i] = {
                    "running": (1 - 2 * strength) * h[i] + 2 * strength * h[j],
                    "algorithm1": g[i] - 2 * strength * (h[i] - h[j]),
                    "eq5": g[i] - 2 * strength * (g[i] - g[j]),
                    "pcgrad_style": (1 - 2 * strength) * h[i] + 2 * strength * g[j],
                }[reading]
    return h


@pytest.mark.parametrize(("seed", "clients"), cases((2, 3, 6)))
@pytest.mark.parametrize("reading", READINGS)
def test_ppdg_equals_the_loop_on_vectors(reading, seed, clients):
    rng, g = drawn(seed, clients)
    sizes = rng.integers(1, 90, clients).tolist()
    p = np.array(sizes) / sum(sizes)
    for only_conflicts, weights in itertools.product((True, False), ("uniform", "samples")):
        h = align(g, 0.23, reading, range(clients), only_conflicts)
        found = step(
            "ppdg",
            g,
            sizes=sizes,
            strength=0.23,
            reading=reading,
            order="ascending",
            only_conflicts=only_conflicts,
            weights=weights,
        )
        factors = np.ones(clients) if weights == "uniform" else clients * p
        assert_near(found, (factors[:, None] * h).mean(axis=0))


@pytest.mark.parametrize("reading", READINGS)
def test_ppdg_by_tensor_is_the_rule_on_each_tensor(reading):
    _, g = drawn(7, 5)
    options = {"strength": 0.2, "reading": reading, "order": "ascending"}
    parts = [align(part, 0.2, reading, range(5), True).mean(0) for part in (g[:, :1], g[:, 1:])]
    by_tensor = step("ppdg", g, granularity="tensor", **options)
    assert_near(by_tensor, np.concatenate(parts))
    assert np.abs(by_tensor - step("ppdg", g, **options)).max() > 1e-3


def test_ppdg_visits_clients_in_an_order_drawn_for_each_round():
    """Two clients have two orders, whose results the paper's numbers tell apart."""
    by_order = {(0, 1): [-0.04, 0.52], (1, 0): [0.04, 0.48]}
    torch.manual_seed(0)
    found = [step("ppdg", TWO, strength=0.1, round=r).tolist() for r in range(1, 21)]
    assert all(any(f == approx(e) for e in by_order.values()) for f in found)
    first = [f == approx(by_order[0, 1]) for f in found]
    assert 3 < sum(first) < 17
    torch.manual_seed(1)
    assert [step("ppdg", TWO, strength=0.1, round=r).tolist() for r in range(1, 21)] == found
    others = [step("ppdg", TWO, strength=0.1, round=r, seed=1).tolist() for r in range(1, 21)]
    assert others != found


def test_ppdg_draws_whole_permutations_and_one_for_all_tensors():
    orders = list(itertools.permutations(range(4)))
    g = np.array(FOUR, dtype=float)
    whole = [align(g, 0.1, "running", order, True).mean(0) for order in orders]
    split = [
        np.concatenate(
            [align(part, 0.1, "running", order, True).mean(0) for part in (g[:, :1], g[:, 1:])]
        )
        for order in orders
    ]
    seen = set()
    for round in range(1, 30):
        found = step("ppdg", FOUR, strength=0.1, round=round)
        match = {i for i, row in enumerate(whole) if np.allclose(row, found, atol=1e-6)}
        by_tensor = step("ppdg", FOUR, strength=0.1, round=round, granularity="tensor")
        assert match & {i for i, row in enumerate(split) if np.allclose(row, by_tensor, atol=1e-6)}
        seen.add(frozenset(match))
    assert len(seen) > 5


@pytest.mark.parametrize("reading", READINGS)
def test_ppdg_of_one_client_and_of_updates_of_zero(reading):
    options = {"strength": 0.2, "reading": reading}
    assert step("ppdg", [[1.5, -2, 0.25]], w=[1, 2, 4], **options).tolist() == [1.5, -2, 0.25]
    still = step("ppdg", [[0, 0, 0]] * 3, w=[0.1, -7.3, 1e-9], **options)
    assert still.tolist() == [0, 0, 0]
    assert step("ppdg", [[1, -1], [0, 0]], **options).tolist() == approx([0.5, -0.5])


def test_ppdg_without_strength_keeps_the_two_kinds_of_shares_apart():
    """Trainable parameters by the method's weights, running statistics by the federation's."""
    server = serve([0, 0])
    replies = answer(server, TWO, [10, 30], [0.2, 0.6], [7, 9])
    new = build("ppdg", strength=0.0).aggregate(server, replies)
    assert list(new) == list(server.weights)
    assert (new["a"].item(), new["b"].item()) == (0, 0.5)
    assert new["running_mean"].item() == approx(0.5)
    assert new["num_batches_tracked"].item() == 9


def test_a_little_strength_moves_little():
    _, g = drawn(3, 5)
    assert_close(step("ppdg", g, strength=1e-9), g.mean(axis=0), rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------ PCGrad


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        (TWO, [0.25, 0.75]),
        (THREE, [-0.2333333333, -0.1333333333]),
        ([[1, 0], [-1, 0]], [0, 0]),
        ([[1, 0], [0, 0]], [0.5, 0]),
        (FOUR, [0.4545454545, -0.0254545455, -0.3236363636]),
    ],
)
def test_pcgrad_published_numbers(deltas, expected):
    assert step("pcgrad", deltas, order="ascending").tolist() == approx(expected)
    total = step("pcgrad", deltas, order="ascending", reduction="sum")
    assert total.tolist() == approx([len(deltas) * x for x in expected])


def project(g, order):
    """PCGrad on the vectors themselves."""
    h = g.copy()
    for i in range(len(g)):
        for j in (j for j in order if j != i):
            inner = h[i] @ g[j]
            if inner < 0:
                h[i] -= inner / (g[j] @ g[j]) * g[j]
    return h


@pytest.mark.parametrize(("seed", "clients"), cases((2, 3, 6)))
def test_pcgrad_equals_the_loop_on_vectors(seed, clients):
    _, g = drawn(seed, clients)
    h = project(g, range(clients))
    sizes = list(range(1, clients + 1))  # have no say
    assert_near(step("pcgrad", g, sizes=sizes, order="ascending"), h.mean(axis=0))
    assert_near(step("pcgrad", g, order="ascending", reduction="sum"), h.sum(axis=0))


def test_pcgrad_meets_the_others_in_an_order_drawn_for_each_round():
    g = np.array(FOUR, dtype=float)
    means = [project(g, order).mean(axis=0) for order in itertools.permutations(range(4))]
    found = [step("pcgrad", FOUR, round=r) for r in range(1, 30)]
    matches = [
        frozenset(i for i, mean in enumerate(means) if np.allclose(mean, f, atol=1e-6))
        for f in found
    ]
    assert all(matches)
    assert len(set(matches)) > 5
    again = [step("pcgrad", FOUR, round=r) for r in range(1, 30)]
    assert np.array_equal(found, again)


def test_pcgrad_of_one_client_and_of_updates_of_zero():
    assert step("pcgrad", [[1.5, -2, 0.25]], w=[1, 2, 4]).tolist() == [1.5, -2, 0.25]
    assert step("pcgrad", [[0, 0, 0]] * 3, w=[0.1, -7.3, 1e-9]).tolist() == [0, 0, 0]


def test_pcgrad_survives_an_update_whose_squared_norm_underflows():
    deltas = [[1.0, 1.0], [-1e-23, 0.0]]
    assert step("pcgrad", deltas, reduction="sum").tolist() == approx([1, 1])
    small = step("pcgrad", [[1.0, 1.0], [-1e-14, 0.0]], order="ascending", reduction="sum")
    assert small.tolist() == approx([0, 1])


# ------------------------------------------------------------------------------------ FedOMG


def matched_step(rows, kappa):
    """CAGrad on the vectors themselves, by autograd and PyTorch's own SGD."""
    d = torch.from_numpy(rows)
    scaled = d / ((d**2).sum(dim=1) + 1e-4).sqrt().mean()
    mean = scaled.mean(dim=0)
    c = kappa * (mean @ mean + 1e-4).sqrt()
    logits = torch.zeros(len(d), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=25, momentum=0.5)
    seen = []
    for _ in range(21):
        u = logits.softmax(0)
        combined = u @ scaled
        objective = combined @ mean + c * (combined @ combined + 1e-4).sqrt()
        seen.append((objective.item(), u.detach()))
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
    u = min(seen, key=lambda pair: pair[0])[1]
    ratio = c / (((u @ scaled) ** 2).sum().add(1e-4).sqrt() + 1e-4)
    return ((d.mean(dim=0) + ratio * (u @ d)) / (1 + kappa**2)).detach().numpy()


@pytest.mark.parametrize(("seed", "clients"), cases((1, 2, 3, 6)))
@pytest.mark.parametrize("kappa", [0.1, 0.5, 1.0])
def test_fedomg_equals_the_search_on_vectors(seed, clients, kappa):
    rng, g = drawn(seed, clients)
    g = (g * rng.uniform(0.05, 3)).astype(np.float32).astype(np.float64)
    sizes = rng.integers(1, 90, clients)
    p = sizes[:, None] / sizes.sum()
    options = {"sizes": sizes.tolist(), "kappa": kappa}
    assert_near(step("fedomg", g, **options), matched_step(clients * p * g, kappa))
    reference = step("fedomg", g, variant="reference", **options)
    assert_near(reference, matched_step(p * g, kappa))
    uniform = step("fedomg", g, federation={"weighting": "uniform"}, **options)
    assert_near(uniform, matched_step(g, kappa))


def dual(gram, u, kappa):
    """The function that the search makes least, for weights u (..., K), of updates as given."""
    norm = np.sqrt(np.einsum("...i,ij,...j->...", u, gram, u))
    return u @ gram.mean(axis=1) + kappa * np.sqrt(gram.mean()) * norm


def simplex(clients, parts=400):
    """Return a grid on the simplex, [n, K], for two or three clients."""
    if clients == 2:
        first = np.linspace(0, 1, 100 * parts + 1)
        return np.stack([first, 1 - first], axis=1)
    i, j = np.meshgrid(np.arange(parts + 1), np.arange(parts + 1))
    kept = i + j <= parts
    return np.stack([i[kept], j[kept], parts - i[kept] - j[kept]], axis=1) / parts


def weights_of(gram, kappa, **options):
    """Return u from the coefficients: 1 / K is in all, and the rest is in proportion to u."""
    rows = conflict_averse_coefficients(torch.from_numpy(gram), kappa=kappa, **options).numpy()
    rest = rows * (1 + kappa**2) - 1 / len(gram)
    return rest / rest.sum()


@pytest.mark.parametrize("clients", [2, 3])
def test_the_search_comes_near_the_least_value_on_a_grid(clients):
    """Of the way from equal weights to the best, 20 steps go nearly all."""
    grid = simplex(clients)
    ways = []
    for seed in range(20):
        _, g = drawn(seed, clients)
        gram = g @ g.T
        least = dual(gram, grid, 0.5).min()
        start = dual(gram, np.full(clients, 1 / clients), 0.5)
        found = dual(gram, weights_of(gram, 0.5), 0.5)
        assert found <= start + 1e-12
        assert found >= least - 1e-3 * start
        ways.append((start - found, start - least))
    assert sum(went for went, _ in ways) >= 0.98 * sum(whole for _, whole in ways)


def test_more_steps_search_better_among_many_clients():
    """Against the best of 4000 steps; 20 steps leave several percent of the way."""
    _, g = drawn(5, 20, width=40)
    gram = g @ g.T
    start = dual(gram, np.full(20, 0.05), 0.5)
    least = dual(gram, weights_of(gram, 0.5, steps=4000), 0.5)
    left = [
        (dual(gram, weights_of(gram, 0.5, steps=steps), 0.5) - least) / (start - least)
        for steps in (0, 20, 400)
    ]
    assert left[0] == pytest.approx(1)
    assert 0.01 < left[1] < 0.15
    assert left[2] < 0.01
    steps = [step("fedomg", g, steps=n) for n in (20, 400)]
    assert np.abs(steps[0] - steps[1]).max() > 1e-3


def test_fedomg_helps_the_worst_off():
    """In the mean the first client loses; the matched step is better for it, and no longer than
    1 + kappa times the mean."""
    g = np.array([[1.0, 0.0, 0.2], [-1.5, 1.0, 0.0], [-1.0, 1.2, 0.1]])
    mean = g.mean(axis=0)
    assert (g @ mean).min() < 0
    worst = [(g @ mean).min() / np.linalg.norm(mean)]
    for kappa in (0.2, 0.5, 0.9):
        found = step("fedomg", g, kappa=kappa) * (1 + kappa**2)
        assert np.linalg.norm(found) <= (1 + kappa) * np.linalg.norm(mean) * 1.01
        worst.append((g @ found).min() / np.linalg.norm(found))
    assert worst == sorted(worst)


def test_fedomg_by_hand():
    """Of two updates of one length at a right angle, equal weights are the best: the step is
    (1 + kappa) / (1 + kappa^2) times the mean."""
    found = step("fedomg", [[100, 0], [0, 100]])
    assert found == approx([60, 60], rel=1e-4)
    opposed = step("fedomg", [[100, 0], [-100, 0]])
    assert np.abs(opposed).max() < 1e-6


def test_fedomg_of_one_client_and_of_updates_of_zero():
    assert step("fedomg", [[100.0, -200.0]]) == approx([120, -240], rel=1e-3)
    for variant in ("paper", "reference"):
        still = step("fedomg", [[0, 0, 0]] * 3, w=[0.1, -7.3, 1e-9], variant=variant)
        assert still.tolist() == [0, 0, 0]


def test_fedomg_of_the_authors_code_is_shorter_by_the_number_of_clients():
    _, g = drawn(0, 4)
    paper, reference = (step("fedomg", 1e3 * g, variant=v) for v in ("paper", "reference"))
    assert_close(4 * reference, paper, rtol=1e-3, atol=1e-3)


def test_fedomg_with_a_small_radius_is_near_fedavg():
    _, g = drawn(1, 4)
    sizes = [1, 2, 3, 4]
    mean = np.average(g, axis=0, weights=sizes)
    found = step("fedomg", g, sizes=sizes, kappa=1e-6)
    assert_close(found, mean, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", NAMES)
def test_the_servers_learning_rate_scales_the_step(name):
    whole, half = (step(name, FOUR, federation={"server_lr": lr}) for lr in (1.0, 0.5))
    assert_near(half, whole / 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lr", [1.0, 0.5])
@pytest.mark.parametrize(("weighting", "mean"), [("samples", 0.20), ("uniform", 0.7 / 3)])
def test_running_statistics_take_the_plain_mean(name, lr, weighting, mean):
    server = serve([0, 0], server_lr=lr, weighting=weighting)
    replies = answer(server, THREE, [10, 30, 60], [0.2, 0.4, 0.1], [7, 9, 12])
    new = build(name).aggregate(server, replies)
    assert list(new) == list(server.weights)
    assert new["running_mean"].item() == approx(mean)
    assert new["num_batches_tracked"].item() == 12
    assert new["num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("name", NAMES)
def test_shapes_types_and_inputs_stay(name):
    server = serve([1, 2, 3])
    before = {n: tensor.clone() for n, tensor in server.weights.items()}
    new = build(name).aggregate(server, answer(server, FOUR))
    bitwise(server.weights, before)
    for n, tensor in new.items():
        assert (tensor.shape, tensor.dtype) == (before[n].shape, before[n].dtype)


@pytest.mark.parametrize("name", NAMES)
def test_no_reply_is_passed_on(name):
    def nobody():
        raise NoReplyError("fit")
        yield

    with pytest.raises(NoReplyError):
        build(name).aggregate(serve([0, 0]), nobody())


# --------------------------------------------------------------------- in a whole federation


def test_batch_normalisation_is_averaged_in_a_network(start_run, toy_federation, recorder):
    layers = {
        "backbone": {"name": "resnet18", "pretrained": False},
        "train": {"batch_size": 16},
        "federation": {"per_round": None},
    }
    run = start_run("ppdg", layers, federation=toy_federation, executor=recorder)
    run.rounds(1)
    share = np.array([9, 11, 12, 12]) / 44
    for n in ("backbone.net.bn1.running_var", "backbone.net.layer4.0.downsample.1.running_mean"):
        rows = np.stack([r.value.weights[n].double().numpy() for r in recorder.replies])
        np.testing.assert_allclose(run.server.weights[n].numpy(), share @ rows, rtol=1e-5)
    assert int(run.server.weights["backbone.net.bn1.num_batches_tracked"]) == 1


GENTLE = {"federation": {"per_round": None}, "train": {"optimizer": "sgd", "lr": 0.1}}
SLOW = {"federation": {"weighting": "samples", "server_lr": 0.7}}
SLOW_UNIFORM = {"federation": {"weighting": "uniform", "server_lr": 0.7}}


class TestPPDG(MethodTester):
    name = "ppdg"
    layer = {**GENTLE, "hyper": {"strength": 0.3}}
    twins = (
        Twin({"strength": 0.0, "weights": "samples"}, SLOW),
        Twin({"strength": 0.0, "weights": "uniform", "reading": "eq5"}, SLOW_UNIFORM),
        Twin({"strength": 0.0, "weights": "samples", "granularity": "tensor"}, SLOW),
    )
    base = {"strength": 0.0}
    apart = (
        *({"reading": reading} for reading in READINGS),
        {"only_conflicts": False},
        {"granularity": "tensor"},
        {"weights": "samples"},
        {"order": "ascending"},
    )
    wrong = tuple({"strength": strength} for strength in (-0.1, 0.5, 1.0, math.nan))
    models = (1, 1)


class TestPCGrad(MethodTester):
    name = "pcgrad"
    layer = GENTLE
    apart = ({"reduction": "sum"},)
    models = (1, 1)


class TestFedOMG(MethodTester):
    name = "fedomg"
    layer = GENTLE
    twins = (Twin({"kappa": 0.0}, SLOW), Twin({"kappa": 0.0}, SLOW_UNIFORM))
    apart = ({"kappa": 0.0}, {"variant": "reference", "kappa": 0.3})
    models = (1, 1)
