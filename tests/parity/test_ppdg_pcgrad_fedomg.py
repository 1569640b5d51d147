"""PPDG, PCGrad and FedOMG: published numbers, the rules written out on vectors, and edge cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from feddg_methods.fedomg import conflict_averse_coefficients
from feddg_methods.pcgrad import project_coefficients, project_conflicts
from feddg_methods.ppdg import align, align_coefficients
from feddg_methods.shared.round_updates import gram_matrix
from tests.rules import RuleTester, as_state, build, drawn, near, replies, serve, step
from tests.tester import MethodTester, Twin

READINGS = ("running", "algorithm1", "eq5", "pcgrad_style")
TWO = [[1, 0], [-1, 1]]
THREE = [[1, 0], [-1, 1], [-0.5, -1]]
FOUR = [[2, 0, 1], [-1, 1, 0], [0, -2, 1], [1, 1, -3]]
IN_ORDER = {"order": "ascending"}
seeds = st.integers(0, 2**32 - 1)


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def approx(values):
    return pytest.approx(values, rel=1e-6, abs=1e-6)


# -------------------------------------------------------------------------------------- PPDG


def aligned(g, strength, reading, order, only_conflicts=True):
    """Return the aligned vectors under each of the four values of ``reading``."""
    h = g.copy()
    for i, j in itertools.product(order, order):
        tested = {"eq5": (g[i], g[j]), "pcgrad_style": (h[i], g[j])}.get(reading, (h[i], h[j]))
        if i != j and (tested[0] @ tested[1] < 0 or not only_conflicts):
            h[i] = {
                "running": (1 - 2 * strength) * h[i] + 2 * strength * h[j],
                "algorithm1": g[i] - 2 * strength * (h[i] - h[j]),
                "eq5": g[i] - 2 * strength * (g[i] - g[j]),
                "pcgrad_style": (1 - 2 * strength) * h[i] + 2 * strength * g[j],
            }[reading]
    return h


class TestAlignment(RuleTester):
    name = "ppdg"
    usual = IN_ORDER
    alike = None
    rows = (
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
        ([[1.5, -2, 0.25]], {"strength": 0.2}, [1.5, -2, 0.25]),
        ([[1, -1], [0, 0]], {"strength": 0.2}, [0.5, -0.5]),
    )
    variants = tuple({"strength": 0.2, "reading": reading} for reading in READINGS)
    wrong = (
        *(({"strength": x}, "not in [0, 0.5)") for x in (-0.1, 0.5, 1.0, math.nan)),
        ({"strength": 0.1, "reading": "algorithm"}, "did you mean 'algorithm1'"),
        *(
            ({"strength": 0.1, "order": order}, "permutation of 0 to 1")
            for order in ((1, 2), (0,), (0, 0), (0, 1, 2))
        ),
    )

    @staticmethod
    def draw(rng, count):
        return {
            "strength": float(rng.uniform(0, 0.499)),
            "reading": str(rng.choice(READINGS)),
            "only_conflicts": bool(rng.integers(2)),
            "weights": str(rng.choice(["uniform", "samples"])),
        }

    @staticmethod
    def oracle(deltas, sizes, *, strength, reading, only_conflicts, weights, order):
        h = aligned(deltas, strength, reading, range(len(deltas)), only_conflicts)
        p = len(sizes) * np.array(sizes) / sum(sizes)
        return ((np.ones(len(sizes)) if weights == "uniform" else p)[:, None] * h).mean(axis=0)

    @staticmethod
    def function(deltas, sizes, *, order, weights="uniform", strength=0.2, **options):
        if weights == "samples":
            return None
        order = range(len(deltas)) if order == "ascending" else order
        return align(deltas, strength=strength, order=list(order), **options)


@pytest.mark.parametrize(
    ("deltas", "options", "rows", "expected"),
    [
        (TWO, {"strength": 0.1}, [[0.6, 0.2], [-0.68, 0.84]], [-0.04, 0.52]),
        (TWO, {"strength": 0.1, "order": (1, 0)}, [[0.68, 0.16], [-0.6, 0.8]], [0.04, 0.48]),
        (TWO, {"strength": 0.3}, [[-0.2, 0.6], [-1, 1]], [-0.6, 0.8]),
        (TWO, {"strength": 0.3, "order": (1, 0)}, None, [0.6, 0.2]),
        ([[1, 0], [1, 1]], {"strength": 0.1}, [[1, 0], [1, 1]], [1, 0.5]),
        (
            [[1, 0], [1, 1]],
            {"strength": 0.1, "only_conflicts": False},
            [[1, 0.2], [1, 0.84]],
            [1, 0.52],
        ),
        (
            THREE,
            {"strength": 0.2},
            [[-0.08, -0.16], [-0.5792, -0.0784], [-0.5, -1]],
            [-0.3864, -0.4128],
        ),
        (FOUR, {"strength": 0.1, "order": (3, 2, 1, 0)}, None, [0.6609568, -0.0485856, 0.0888928]),
        (
            FOUR,
            {"strength": 0.1, "order": torch.tensor([2, 0, 3, 1])},
            None,
            [0.3088, 0.1744, -0.3792],
        ),
    ],
)
def test_alignment_in_another_order_and_of_each_update(deltas, options, rows, expected):
    deltas = tensor(deltas)
    assert align(deltas, **options).tolist() == approx(expected)
    if rows is not None:
        found = align_coefficients(deltas @ deltas.T, **options) @ deltas
        assert_close(found, tensor(rows))


def test_published_coefficients_of_alignment():
    rows = align_coefficients(tensor(THREE) @ tensor(THREE).T, strength=0.2)
    assert_close(rows, tensor([[0.36, 0.24, 0.40], [0.0864, 0.4176, 0.4960], [0, 0, 1]]))
    assert rows.mean(dim=0).tolist() == approx([0.1488, 0.2192, 0.6320])


@given(seed=seeds, size=st.integers(1, 6), strength=st.floats(0, 0.499))
def test_running_alignment_stays_a_convex_combination(seed, size, strength):
    deltas = tensor(drawn(seed, size)[1])
    rows = align_coefficients(deltas @ deltas.T, strength=strength)
    assert (rows >= 0).all()
    assert_close(rows.sum(dim=1), torch.ones(size, dtype=torch.float64))


@pytest.mark.parametrize("reading", READINGS)
@given(seed=seeds, size=st.integers(1, 6))
def test_alignment_scales_renumbers_and_leaves_agreement_alone(reading, seed, size):
    rng, array = drawn(seed, size)
    deltas = tensor(array)
    assert_close(align(deltas, strength=0, reading=reading), deltas.mean(dim=0))
    update = align(deltas, strength=0.2, reading=reading)
    # A power of two scales without rounding, so no inner product changes its sign.
    assert_close(align(8 * deltas, strength=0.2, reading=reading), 8 * update)
    order = rng.permutation(size)
    renumbered = align(deltas[order], strength=0.2, reading=reading, order=np.argsort(order))
    assert_close(renumbered, update, rtol=1e-6, atol=1e-9)
    agreeing = deltas.abs()
    assert_close(align(agreeing, strength=0.2, reading=reading), agreeing.mean(dim=0))


@given(seed=seeds, strength=st.floats(0.001, 0.499))
def test_readings_agree_for_two_clients(seed, strength):
    """The paper's proof covers two clients: the second meets the first as already modified."""
    deltas = tensor(drawn(seed, 2)[1])
    running = align(deltas, strength=strength)
    assert_close(running, align(deltas, strength=strength, reading="algorithm1"))


@pytest.mark.parametrize("reading", READINGS)
def test_ppdg_by_tensor_is_the_rule_on_each_tensor(reading):
    _, g = drawn(7, 5)
    options = {"strength": 0.2, "reading": reading, **IN_ORDER}
    parts = [aligned(part, 0.2, reading, range(5)).mean(0) for part in (g[:, :1], g[:, 1:])]
    by_tensor = step("ppdg", g, granularity="tensor", **options)
    near(by_tensor, np.concatenate(parts))
    assert np.abs(by_tensor - step("ppdg", g, **options)).max() > 1e-3


def test_ppdg_visits_clients_in_an_order_drawn_for_each_round():
    """Two clients have two orders, which give different numbers in the paper."""
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
    whole = [aligned(g, 0.1, "running", order).mean(0) for order in orders]
    split = [
        np.concatenate(
            [aligned(part, 0.1, "running", order).mean(0) for part in (g[:, :1], g[:, 1:])]
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


def test_ppdg_without_strength_keeps_the_two_kinds_of_shares_apart():
    """Trainable parameters by the method's weights, running statistics by the federation's."""
    states = [as_state(row, *b) for row, b in zip(TWO, ((0.2, 7), (0.6, 9)), strict=True)]
    new = build("ppdg", strength=0.0).aggregate(serve([0, 0]), replies(states, [10, 30]))
    assert (new["a"].item(), new["b"].item()) == (0, 0.5)
    assert new["running_mean"].item() == approx(0.5)
    assert new["num_batches_tracked"].item() == 9


# ------------------------------------------------------------------------------------ PCGrad


def projected(g, order):
    """PCGrad on the vectors themselves."""
    h = g.copy()
    for i in range(len(g)):
        for j in (j for j in order if j != i):
            inner = h[i] @ g[j]
            if inner < 0:
                h[i] -= inner / (g[j] @ g[j]) * g[j]
    return h


class TestProjection(RuleTester):
    """Image counts have no effect."""

    name = "pcgrad"
    usual = IN_ORDER
    alike = None
    rows = tuple(
        (deltas, {"reduction": reduction}, [factor * x for x in expected])
        for deltas, expected in (
            (TWO, [0.25, 0.75]),
            (THREE, [-0.2333333333, -0.1333333333]),
            ([[1, 0], [-1, 0]], [0, 0]),
            ([[1, 0], [0, 0]], [0.5, 0]),
            (FOUR, [0.4545454545, -0.0254545455, -0.3236363636]),
            ([[1.5, -2, 0.25]], [1.5, -2, 0.25]),
        )
        for reduction, factor in (("mean", 1), ("sum", len(deltas)))
    )
    variants = ({}, {"reduction": "sum"})
    wrong = (
        ({"reduction": "median"}, "unknown reduction"),
        *(
            ({"order": order}, "permutation of 0 to 1")
            for order in ((1, 2), (0,), (0, 0), (0, 1, 2))
        ),
    )

    @staticmethod
    def draw(rng, count):
        return {"reduction": str(rng.choice(["mean", "sum"]))}

    @staticmethod
    def oracle(deltas, sizes, *, reduction, order):
        h = projected(deltas, range(len(deltas)))
        return h.mean(axis=0) if reduction == "mean" else h.sum(axis=0)

    @staticmethod
    def function(deltas, sizes, *, order, **options):
        order = range(len(deltas)) if order == "ascending" else order
        return project_conflicts(deltas, order=list(order), **options)


@pytest.mark.parametrize(
    ("deltas", "order", "rows", "expected"),
    [
        (TWO, None, [[0.5, 0.5], [0, 1]], [0.25, 0.75]),
        (
            THREE,
            None,
            [[0.2, -0.1], [-0.4, 0.2], [-0.5, -0.5]],
            [-0.2333333333, -0.1333333333],
        ),
        (THREE, (2, 1, 0), [[0.2, 0.2], [0, 0.6], [0, -0.75]], [0.0666666667, 0.0166666667]),
        ([[1, 0], [-1, 0]], None, [[0, 0], [0, 0]], [0, 0]),
        ([[1, 0], [0, 0]], None, [[1, 0], [0, 0]], [0.5, 0]),
        (FOUR, (3, 2, 1, 0), None, [0.3918181818, 0.1863636364, -0.0563636364]),
        (FOUR, (2, 0, 3, 1), None, [0.0990909091, 0.2390909091, -0.3872727273]),
    ],
)
def test_projection_in_another_order_and_of_each_update(deltas, order, rows, expected):
    deltas = tensor(deltas)
    assert project_conflicts(deltas, order=order).tolist() == approx(expected)
    if rows is not None:
        assert_close(project_coefficients(deltas @ deltas.T, order=order) @ deltas, tensor(rows))


def test_published_coefficients_of_projection():
    rows = project_coefficients(tensor(THREE) @ tensor(THREE).T)
    assert_close(rows, tensor([[1, 0.5, 0.6], [1, 1, 0.8], [0.5, 0.5, 1]]))


@given(seed=seeds, size=st.integers(1, 6))
def test_projection_ends_conflicts_scales_and_renumbers(seed, size):
    rng, array = drawn(seed, size)
    deltas = tensor(array)
    turned = project_coefficients(deltas @ deltas.T) @ deltas
    assert (turned @ deltas[-1] >= -1e-9)[:-1].all(), "the last one met leaves no conflict"
    assert (turned.norm(dim=1) <= deltas.norm(dim=1) + 1e-9).all()
    agreeing = deltas.abs()
    assert_close(project_conflicts(agreeing), agreeing.mean(dim=0))
    assert_close(project_conflicts(2 * deltas), 2 * project_conflicts(deltas))
    order = rng.permutation(size)
    renumbered = project_conflicts(deltas[order], order=np.argsort(order))
    assert_close(renumbered, project_conflicts(deltas))


def test_projection_skips_an_update_itself_even_where_it_was_turned_against_itself():
    """Two projections by 60 degrees each turn (1, 0) by 120; its own turn comes after them."""
    angles = torch.deg2rad(tensor([150, 210, 0]))
    deltas = torch.stack([angles.cos(), angles.sin()], dim=1)
    turned = project_coefficients(deltas @ deltas.T)[2] @ deltas
    assert turned.tolist() == approx([-0.125, 0.125 * math.sqrt(3)])


def test_pcgrad_meets_the_others_in_an_order_drawn_for_each_round():
    g = np.array(FOUR, dtype=float)
    means = [projected(g, order).mean(axis=0) for order in itertools.permutations(range(4))]
    found = [step("pcgrad", FOUR, round=r) for r in range(1, 30)]
    matches = [
        frozenset(i for i, mean in enumerate(means) if np.allclose(mean, f, atol=1e-6))
        for f in found
    ]
    assert all(matches)
    assert len(set(matches)) > 5
    again = [step("pcgrad", FOUR, round=r) for r in range(1, 30)]
    assert np.array_equal(found, again)


def test_projection_survives_norms_that_underflow_in_single_precision():
    """1e-23 squared is 0 in float32, and tiny in float64."""
    tiny, small = [[1.0, 1.0], [-1e-23, 0.0]], [[1.0, 1.0], [-1e-14, 0.0]]
    assert step("pcgrad", tiny, reduction="sum").tolist() == approx([1, 1])
    assert project_conflicts(torch.tensor(tiny), reduction="sum").tolist() == approx([1, 1])
    assert step("pcgrad", small, reduction="sum", **IN_ORDER).tolist() == approx([0, 1])
    rows = project_coefficients(gram_matrix(torch.tensor(small)))
    assert_close(rows[0] @ torch.tensor(small).double(), tensor([0, 1]))


def test_gram_matrix_is_double_and_does_not_depend_on_its_blocks():
    deltas = torch.randn(3, 2**20 + 5, generator=torch.Generator().manual_seed(4))
    gram = gram_matrix(deltas)
    assert gram.dtype == torch.float64
    assert_close(gram, deltas.double() @ deltas.double().T, rtol=1e-12, atol=1e-9)


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


class TestMatching(RuleTester):
    name = "fedomg"
    alike = None
    variants = ({}, {"variant": "reference"})

    @staticmethod
    def draw(rng, count):
        return {
            "kappa": float(rng.choice([0.1, 0.5, 1.0])),
            "variant": str(rng.choice(["paper", "reference"])),
            "federation": {"weighting": str(rng.choice(["samples", "uniform"]))},
        }

    @staticmethod
    def oracle(deltas, sizes, *, kappa, variant, federation):
        uniform = federation["weighting"] == "uniform"
        p = np.ones(len(sizes)) / len(sizes) if uniform else np.array(sizes) / sum(sizes)
        factor = len(sizes) if variant == "paper" else 1
        return matched_step(factor * p[:, None] * deltas, kappa)


def dual(gram, u, kappa):
    """Return the objective of the search, for weights u (..., K) and updates as given."""
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
    """Return u from the coefficients: all contain 1 / K, and the rest is proportional to u."""
    rows = conflict_averse_coefficients(torch.from_numpy(gram), kappa=kappa, **options).numpy()
    rest = rows * (1 + kappa**2) - 1 / len(gram)
    return rest / rest.sum()


@pytest.mark.parametrize("clients", [2, 3])
def test_the_search_comes_near_the_least_value_on_a_grid(clients):
    """20 steps cover nearly all of the way from equal weights to the best ones."""
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
    """Against the best of 4000 steps, 20 steps leave several percent of the way."""
    rng = np.random.default_rng(5)
    g = (rng.normal(size=(20, 40)) + 0.2 * rng.normal(size=40)).astype(np.float32)
    g = g.astype(np.float64)
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
    """The mean harms the first client; the matched step is better for it, and at most 1 + kappa
    times as long as the mean."""
    g = np.array([[1.0, 0.0, 0.2], [-1.5, 1.0, 0.0], [-1.0, 1.2, 0.1]])
    mean = g.mean(axis=0)
    assert (g @ mean).min() < 0
    worst = [(g @ mean).min() / np.linalg.norm(mean)]
    for kappa in (0.2, 0.5, 0.9):
        found = step("fedomg", g, kappa=kappa) * (1 + kappa**2)
        assert np.linalg.norm(found) <= (1 + kappa) * np.linalg.norm(mean) * 1.01
        worst.append((g @ found).min() / np.linalg.norm(found))
    assert worst == sorted(worst)


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        # For two orthogonal updates of equal length, equal weights are best: the step is
        # (1 + kappa) / (1 + kappa^2) times the mean.
        ([[100, 0], [0, 100]], [60, 60]),
        ([[100, 0], [-100, 0]], [0, 0]),
        ([[100, -200]], [120, -240]),
    ],
)
def test_fedomg_by_hand(deltas, expected):
    found = step("fedomg", deltas, kappa=0.5)
    assert found.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_fedomg_of_the_authors_code_is_shorter_by_the_number_of_clients():
    _, g = drawn(0, 4)
    paper, reference = (step("fedomg", 1e3 * g, variant=v) for v in ("paper", "reference"))
    assert_close(4 * reference, paper, rtol=1e-3, atol=1e-3)


def test_next_to_no_strength_or_radius_moves_as_the_mean():
    _, g = drawn(1, 4)
    sizes = [1, 2, 3, 4]
    near(step("ppdg", g, strength=1e-9), g.mean(axis=0))
    mean = np.average(g, axis=0, weights=sizes)
    assert_close(step("fedomg", g, sizes=sizes, kappa=1e-6), mean, rtol=1e-4, atol=1e-5)


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
