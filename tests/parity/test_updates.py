"""FedGMA, AgrSum, AgrRand, PPDG, PCGrad and FedDG-GA: published numbers, NumPy oracles, edges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.common.errors import SettingsError
from feddg_methods.agrrand import agreement_random
from feddg_methods.agrsum import agreement_sum
from feddg_methods.feddg_ga import adjusted_weights
from feddg_methods.fedgma import agreement_mask, masked_update
from feddg_methods.pcgrad import project_coefficients, project_conflicts
from feddg_methods.ppdg import align, align_coefficients
from feddg_methods.shared.round_updates import gram_matrix
from tests.helpers import refused

seeds = st.integers(0, 2**32 - 1)
clients = st.integers(1, 6)
READINGS = ("running", "algorithm1", "eq5", "pcgrad_style")


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def drawn(seed, size, width=7):
    """Updates with exact zeros and agreeing signs among them."""
    rng = np.random.default_rng(seed)
    deltas = rng.normal(size=(size, width)) + rng.normal(size=width)
    deltas[rng.uniform(size=deltas.shape) < 0.2] = 0
    return rng, deltas


def approx(values, tolerance=1e-9):
    return pytest.approx(values, abs=tolerance)


# ------------------------------------------------------------------------------- FedGMA

GMA = tensor((1, 1, -1, 0, 2), (2, -1, -1, 0, 0), (3, 1, 1, 0, 0), (4, 1, -3, 0, -2))
SHARES = tensor(0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"threshold": 0.4}, [3, 0.6, -1.2, 0, 0]),
        ({"threshold": 0.6}, [3, 0.3, -0.6, 0, 0]),
        ({"threshold": 0.5}, [3, 0.6, -1.2, 0, 0]),
        ({"threshold": 0.5, "compare": "gt"}, [3, 0.3, -0.6, 0, 0]),
        ({"threshold": 0.6, "below": "zero"}, [3, 0, 0, 0, 0]),
        ({"threshold": 0.0}, [3, 0.6, -1.2, 0, -0.6]),
        ({"threshold": 0.4, "variant": "reference"}, [6, 0.9, -1.8, 0, 0]),
        ({"threshold": 0.6, "variant": "reference", "below": "score"}, [6, 0, 0, 0, 0]),
    ],
)
def test_masked_update_published_numbers(options, expected):
    assert masked_update(GMA, SHARES, **options).tolist() == approx(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 0.2, 0]),
        ({"below": "zero"}, [1, 1, 1, 0, 0]),
        ({"compare": "gt"}, [1, 1, 0.4, 0.2, 0]),
        ({"variant": "reference"}, [2, 1.6, 1.4, 0, 0]),
    ],
)
def test_agreement_mask_published_numbers(options, expected):
    agreement = tensor(1, 0.6, 0.4, 0.2, 0)
    assert agreement_mask(agreement, 0.4, **options).tolist() == approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", range(1, 31))
def test_agreement_at_the_threshold_is_equal_to_it_for_every_ratio(size, dtype):
    """Signs of n clients agree by k / n; neither 0.4 x 5 nor 0.7 x 10 may fall to rounding."""
    ups = torch.arange(size + 1)
    deltas = torch.where(torch.arange(size)[:, None] < ups, 1.0, -1.0).to(dtype)
    scores = (2 * ups - size).abs().tolist()
    shares = torch.full((size,), 1 / size, dtype=dtype)
    mean = shares @ deltas
    for k in set(scores):
        for compare, passes in (("ge", lambda s, k=k: s >= k), ("gt", lambda s, k=k: s > k)):
            update = masked_update(
                deltas, shares, threshold=k / size, below="zero", compare=compare
            )
            expected = mean * torch.tensor([float(passes(s)) for s in scores], dtype=dtype)
            assert torch.equal(update, expected)


@given(
    seed=seeds,
    size=clients,
    threshold=st.floats(0, 1),
    below=st.sampled_from(["score", "zero"]),
    compare=st.sampled_from(["ge", "gt"]),
    variant=st.sampled_from(["paper", "reference"]),
)
def test_masked_update_equals_its_definition(seed, size, threshold, below, compare, variant):
    rng, deltas = drawn(seed, size)
    shares = rng.dirichlet(np.ones(size))
    expected = []
    for column in deltas.T:
        signs = np.sign(column)
        score = abs(signs.mean())
        tie = abs(score - threshold) < 1e-5
        passes = compare == "ge" if tie else score > threshold
        if variant == "reference":
            factor = 1 + score if passes else 0
        else:
            factor = 1 if passes else (score if below == "score" else 0)
        # Within the tolerance of the comparison either answer is right.
        expected.append(np.nan if tie else factor * (shares @ column))
    update = masked_update(
        torch.from_numpy(deltas),
        torch.from_numpy(shares),
        threshold=threshold,
        below=below,
        compare=compare,
        variant=variant,
    )
    expected = np.array(expected)
    clear = ~np.isnan(expected)
    assert update.dtype == torch.float64
    np.testing.assert_allclose(update.numpy()[clear], expected[clear], rtol=1e-6, atol=1e-12)


@given(seed=seeds, size=clients, threshold=st.floats(0, 1))
def test_masked_update_invariants(seed, size, threshold):
    rng, array = drawn(seed, size)
    deltas, shares = torch.from_numpy(array), torch.from_numpy(rng.dirichlet(np.ones(size)))
    mean = shares @ deltas
    torch.testing.assert_close(masked_update(deltas, shares, threshold=0), mean)
    update = masked_update(deltas, shares, threshold=threshold)
    assert (update.abs() <= mean.abs() + 1e-15).all()
    assert (update * mean >= 0).all()
    order = rng.permutation(size)
    torch.testing.assert_close(
        masked_update(deltas[order], shares[order], threshold=threshold), update
    )
    mirrored = masked_update(-3 * deltas, shares, threshold=threshold)
    torch.testing.assert_close(mirrored, -3 * update)


@pytest.mark.parametrize("options", [{}, {"compare": "gt", "threshold": 0.9}, {"below": "zero"}])
def test_masked_update_of_one_client_is_its_update(options):
    delta = tensor((1, -2, 0))
    options = {"threshold": 0.4, **options}
    assert torch.equal(masked_update(delta, [1.0], **options), delta[0])


def test_masked_update_keeps_single_precision_and_takes_plain_shares():
    update = masked_update(GMA.float(), SHARES.tolist(), threshold=0.4)
    assert update.dtype == torch.float32
    assert update.tolist() == approx([3, 0.6, -1.2, 0, 0], 1e-6)


@pytest.mark.parametrize(
    "options",
    [{"below": "scor"}, {"compare": "get"}, {"variant": "papr"}],
)
def test_unknown_mask_options_are_refused(options):
    with refused(SettingsError, "did you mean"):
        masked_update(GMA, SHARES, threshold=0.4, **options)


# -------------------------------------------------------------------- AgrSum and AgrRand

AGREEMENT = tensor((1, -2, 0.5, 0), (2, 1, 0.25, 1), (0.5, -1, 0.25, 1))


def rng_of(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", [3.5, 0, 1, 0]), ("mean", [3.5 / 3, 0, 1 / 3, 0])]
)
def test_agreement_sum_published_numbers(reduction, expected):
    assert agreement_sum(AGREEMENT, reduction=reduction).tolist() == approx(expected)
    if reduction == "mean":
        assert torch.equal(agreement_sum(AGREEMENT), agreement_sum(AGREEMENT, reduction="mean"))


@pytest.mark.parametrize(("reduction", "sigma"), [("sum", 2.25), ("mean", 0.75)])
def test_agreement_random_published_scale(reduction, sigma):
    draws = torch.randn(2, generator=rng_of(5)).double()
    update = agreement_random(AGREEMENT, reduction=reduction, generator=rng_of(5))
    agreed = agreement_sum(AGREEMENT, reduction=reduction)
    assert update[[0, 2]].tolist() == approx(agreed[[0, 2]].tolist())
    assert update[[1, 3]].tolist() == approx((sigma * draws).tolist())


def test_agreement_random_published_numbers(monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.tensor([0.3, -1.2]))
    update = agreement_random(AGREEMENT, reduction="sum", generator=rng_of())
    assert update.tolist() == approx([3.5, 0.675, 1.0, -2.7], 1e-6)


@given(seed=seeds, size=clients, reduction=st.sampled_from(["mean", "sum"]))
def test_agreement_rules_equal_their_definitions(seed, size, reduction):
    _, deltas = drawn(seed, size)
    factor = 1 / size if reduction == "mean" else 1
    kept = np.zeros(deltas.shape[1])
    lost = []
    for j, column in enumerate(deltas.T):
        if (column > 0).all() or (column < 0).all():
            kept[j] = factor * column.sum()
        elif (column != 0).any():
            lost.append(j)
    update = agreement_sum(torch.from_numpy(deltas), reduction=reduction)
    np.testing.assert_allclose(update.numpy(), kept, rtol=1e-6, atol=1e-12)
    sigma = np.abs(kept[kept != 0]).mean() if (kept != 0).any() else 0
    kept[lost] = sigma * torch.randn(len(lost), generator=rng_of(seed)).numpy()
    noisy = agreement_random(torch.from_numpy(deltas), reduction=reduction, generator=rng_of(seed))
    np.testing.assert_allclose(noisy.numpy(), kept, rtol=1e-6, atol=1e-12)


def test_total_disagreement_gives_exactly_zero():
    deltas = tensor((1, -1, 2), (-1, 1, 0))
    for update in (agreement_sum(deltas), agreement_random(deltas, generator=rng_of())):
        assert torch.equal(update, torch.zeros(3, dtype=torch.float64))


def test_one_client_keeps_its_update():
    delta = tensor((1, -2, 0))
    assert torch.equal(agreement_sum(delta), delta[0])
    assert torch.equal(agreement_random(delta, generator=rng_of()), delta[0])


def test_coordinates_that_nobody_changed_get_no_noise():
    deltas = tensor((1, 0, 2, 0), (1, 0, -2, 0))
    update = agreement_random(deltas, generator=rng_of())
    assert update[[0, 1, 3]].tolist() == [1, 0, 0]
    assert update[2] != 0


def test_cancelled_updates_are_a_disagreement():
    """Their sum is 0 like that of unchanged coordinates, but they were changed."""
    update = agreement_random(tensor((1, 3), (1, -3)), generator=rng_of())
    assert update[1].item() == pytest.approx(torch.randn(1, generator=rng_of()).item(), rel=1e-6)


def test_noise_has_the_scale_of_the_agreed_coordinates():
    width = 10**6
    deltas = torch.ones(2, width + 2)
    deltas[1, 2:] = -1
    deltas[:, :2] = torch.tensor([0.5, 1.0])
    noise = agreement_random(deltas, generator=rng_of(1))[2:]
    assert noise.std().item() == pytest.approx(0.75, rel=0.01)
    assert abs(noise.mean().item()) < 4 * 0.75 / 1000


def test_agreement_rules_keep_single_precision():
    assert agreement_sum(AGREEMENT.float()).dtype == torch.float32
    single = agreement_random(AGREEMENT.float(), generator=rng_of(2))
    assert single.dtype == torch.float32
    double = agreement_random(AGREEMENT, generator=rng_of(2))
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=1e-7)


def test_unknown_reductions_are_refused():
    with refused(SettingsError, "did you mean 'mean'"):
        agreement_sum(AGREEMENT, reduction="means")
    with refused(SettingsError, "unknown reduction"):
        project_conflicts(AGREEMENT, reduction="median")


# --------------------------------------------------------------------------------- PPDG

TWO = tensor((1, 0), (-1, 1))
THREE = tensor((1, 0), (-1, 1), (-0.5, -1))
FOUR = tensor((2, 0, 1), (-1, 1, 0), (0, -2, 1), (1, 1, -3))


def align_oracle(deltas, strength, reading, order, only_conflicts):
    """The loop on the vectors themselves."""
    g = deltas
    h = deltas.copy()
    for i, j in itertools.product(order, order):
        if i == j:
            continue
        test = {"eq5": g[i] @ g[j], "pcgrad_style": h[i] @ g[j]}.get(reading, h[i] @ h[j])
        if only_conflicts and not test < 0:
            continue
        if reading == "running":
            h[i] = (1 - 2 * strength) * h[i] + 2 * strength * h[j]
        elif reading == "algorithm1":
            h[i] = g[i] - 2 * strength * (h[i] - h[j])
        elif reading == "eq5":
            h[i] = g[i] - 2 * strength * (g[i] - g[j])
        else:
            h[i] = (1 - 2 * strength) * h[i] + 2 * strength * g[j]
    return h


@pytest.mark.parametrize(
    ("deltas", "options", "rows", "expected"),
    [
        (TWO, {"strength": 0.1}, [[0.6, 0.2], [-0.68, 0.84]], [-0.04, 0.52]),
        (TWO, {"strength": 0.1, "order": (1, 0)}, [[0.68, 0.16], [-0.6, 0.8]], [0.04, 0.48]),
        (TWO, {"strength": 0.3}, [[-0.2, 0.6], [-1, 1]], [-0.6, 0.8]),
        (TWO, {"strength": 0.3, "order": (1, 0)}, None, [0.6, 0.2]),
        (tensor((1, 0), (1, 1)), {"strength": 0.1}, [[1, 0], [1, 1]], [1, 0.5]),
        (
            tensor((1, 0), (1, 1)),
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
        (
            THREE,
            {"strength": 0.2, "reading": "algorithm1"},
            None,
            [-0.2850666667, -0.3701333333],
        ),
        (THREE, {"strength": 0.2, "reading": "eq5"}, None, [-0.3666666667, -0.1333333333]),
        (
            THREE,
            {"strength": 0.2, "reading": "pcgrad_style"},
            None,
            [-0.2466666667, -0.0533333333],
        ),
        (FOUR, {"strength": 0.1}, None, [0.6307584, 0.2725632, -0.8868352]),
        (
            FOUR,
            {"strength": 0.1, "order": (3, 2, 1, 0)},
            None,
            [0.6609568, -0.0485856, 0.0888928],
        ),
        (FOUR, {"strength": 0.1, "order": (2, 0, 3, 1)}, None, [0.3088, 0.1744, -0.3792]),
        (FOUR, {"strength": 0.2}, None, [0.5623552, 0.1406656, -1.2641376]),
    ],
)
def test_align_published_numbers(deltas, options, rows, expected):
    assert align(deltas, **options).tolist() == approx(expected)
    if rows is not None:
        aligned = align_coefficients(deltas @ deltas.T, **options) @ deltas
        torch.testing.assert_close(aligned, tensor(*rows))


def test_align_published_coefficients():
    rows = align_coefficients(THREE @ THREE.T, strength=0.2)
    torch.testing.assert_close(
        rows, tensor((0.36, 0.24, 0.40), (0.0864, 0.4176, 0.4960), (0, 0, 1))
    )
    assert rows.mean(dim=0).tolist() == approx([0.1488, 0.2192, 0.6320])


@given(
    seed=seeds,
    size=clients,
    strength=st.floats(0, 0.499),
    reading=st.sampled_from(READINGS),
    only_conflicts=st.booleans(),
)
def test_align_equals_the_loop_on_vectors(seed, size, strength, reading, only_conflicts):
    rng, deltas = drawn(seed, size, width=4)
    order = rng.permutation(size)
    expected = align_oracle(deltas, strength, reading, order, only_conflicts)
    options = {
        "strength": strength,
        "reading": reading,
        "order": order.tolist(),
        "only_conflicts": only_conflicts,
    }
    rows = align_coefficients(torch.from_numpy(deltas @ deltas.T), **options)
    np.testing.assert_allclose(rows.numpy() @ deltas, expected, rtol=1e-6, atol=1e-9)
    update = align(torch.from_numpy(deltas), **options)
    np.testing.assert_allclose(update.numpy(), expected.mean(axis=0), rtol=1e-6, atol=1e-9)


@given(seed=seeds, size=clients, strength=st.floats(0, 0.499))
def test_running_alignment_stays_a_convex_combination(seed, size, strength):
    _, deltas = drawn(seed, size)
    rows = align_coefficients(torch.from_numpy(deltas @ deltas.T), strength=strength)
    assert (rows >= 0).all()
    torch.testing.assert_close(rows.sum(dim=1), torch.ones(size, dtype=torch.float64))


@pytest.mark.parametrize("reading", READINGS)
@given(seed=seeds, size=clients)
def test_align_invariants(reading, seed, size):
    rng, array = drawn(seed, size)
    deltas = torch.from_numpy(array)
    torch.testing.assert_close(align(deltas, strength=0, reading=reading), deltas.mean(dim=0))
    update = align(deltas, strength=0.2, reading=reading)
    # A power of two scales without rounding, so no inner product changes its sign.
    torch.testing.assert_close(align(8 * deltas, strength=0.2, reading=reading), 8 * update)
    order = rng.permutation(size)
    renumbered = align(deltas[order], strength=0.2, reading=reading, order=np.argsort(order))
    torch.testing.assert_close(renumbered, update, rtol=1e-6, atol=1e-9)
    agreeing = deltas.abs()
    torch.testing.assert_close(align(agreeing, strength=0.2, reading=reading), agreeing.mean(dim=0))


@given(seed=seeds, strength=st.floats(0.001, 0.499))
def test_readings_agree_for_two_clients(seed, strength):
    """The paper's proof covers two clients: the second meets the first as already modified."""
    _, array = drawn(seed, 2)
    deltas = torch.from_numpy(array)
    torch.testing.assert_close(
        align(deltas, strength=strength),
        align(deltas, strength=strength, reading="algorithm1"),
    )


@pytest.mark.parametrize("reading", READINGS)
def test_align_of_one_client_and_of_zero_updates(reading):
    one = tensor((1, -2, 0))
    assert torch.equal(align(one, strength=0.2, reading=reading), one[0])
    still = torch.zeros(3, 4)
    assert torch.equal(align(still, strength=0.2, reading=reading), still[0])
    beside = tensor((1, -1), (0, 0))
    assert torch.equal(align(beside, strength=0.2, reading=reading), beside.mean(dim=0))


@pytest.mark.parametrize("strength", [-0.1, 0.5, 1.0, math.nan])
def test_alignment_strength_out_of_range_is_refused(strength):
    with refused(SettingsError, "not in [0, 0.5)"):
        align(TWO, strength=strength)


def test_unknown_reading_is_refused():
    with refused(SettingsError, "did you mean 'algorithm1'"):
        align(TWO, strength=0.1, reading="algorithm")


@pytest.mark.parametrize("order", [(1, 2), (0,), (0, 0), (0, 1, 2)])
def test_order_that_is_no_permutation_is_refused(order):
    with refused(SettingsError, "permutation of 0 to 1"):
        align(TWO, strength=0.1, order=order)
    with refused(SettingsError, "permutation of 0 to 1"):
        project_conflicts(TWO, order=order)


def test_order_may_be_a_tensor():
    given_as_list = align(FOUR, strength=0.1, order=[2, 0, 3, 1])
    assert torch.equal(align(FOUR, strength=0.1, order=torch.tensor([2, 0, 3, 1])), given_as_list)


# ------------------------------------------------------------------------------- PCGrad


def project_oracle(deltas, order):
    rows = deltas.copy()
    for i in range(len(deltas)):
        for j in order:
            d = rows[i] @ deltas[j]
            if i != j and d < 0:
                rows[i] = rows[i] - d / (deltas[j] @ deltas[j]) * deltas[j]
    return rows


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
        (tensor((1, 0), (-1, 0)), None, [[0, 0], [0, 0]], [0, 0]),
        (tensor((1, 0), (0, 0)), None, [[1, 0], [0, 0]], [0.5, 0]),
        (FOUR, None, None, [0.4545454545, -0.0254545455, -0.3236363636]),
        (FOUR, (3, 2, 1, 0), None, [0.3918181818, 0.1863636364, -0.0563636364]),
        (FOUR, (2, 0, 3, 1), None, [0.0990909091, 0.2390909091, -0.3872727273]),
    ],
)
def test_project_published_numbers(deltas, order, rows, expected):
    mean = project_conflicts(deltas, order=order)
    assert mean.tolist() == approx(expected)
    total = project_conflicts(deltas, order=order, reduction="sum")
    torch.testing.assert_close(total, len(deltas) * mean)
    if rows is not None:
        projected = project_coefficients(deltas @ deltas.T, order=order) @ deltas
        torch.testing.assert_close(projected, tensor(*rows))


def test_project_published_coefficients():
    rows = project_coefficients(THREE @ THREE.T)
    torch.testing.assert_close(rows, tensor((1, 0.5, 0.6), (1, 1, 0.8), (0.5, 0.5, 1)))


@given(seed=seeds, size=clients)
def test_project_equals_the_loop_on_vectors(seed, size):
    rng, deltas = drawn(seed, size)
    order = rng.permutation(size)
    expected = project_oracle(deltas, order)
    rows = project_coefficients(torch.from_numpy(deltas @ deltas.T), order=order.tolist())
    np.testing.assert_allclose(rows.numpy() @ deltas, expected, rtol=1e-6, atol=1e-9)
    for reduction, update in (("mean", expected.mean(axis=0)), ("sum", expected.sum(axis=0))):
        ours = project_conflicts(
            torch.from_numpy(deltas), order=order.tolist(), reduction=reduction
        )
        np.testing.assert_allclose(ours.numpy(), update, rtol=1e-6, atol=1e-9)


@given(seed=seeds, size=clients)
def test_project_invariants(seed, size):
    rng, array = drawn(seed, size)
    deltas = torch.from_numpy(array)
    gram = deltas @ deltas.T
    rows = project_coefficients(gram)
    projected = rows @ deltas
    assert (projected @ deltas[-1] >= -1e-9)[:-1].all(), "the last one met leaves no conflict"
    assert (projected.norm(dim=1) <= deltas.norm(dim=1) + 1e-9).all()
    agreeing = deltas.abs()
    torch.testing.assert_close(project_conflicts(agreeing), agreeing.mean(dim=0))
    torch.testing.assert_close(project_conflicts(2 * deltas), 2 * project_conflicts(deltas))
    order = rng.permutation(size)
    torch.testing.assert_close(
        project_conflicts(deltas[order], order=np.argsort(order)), project_conflicts(deltas)
    )


def test_projection_skips_an_update_itself_even_where_it_was_turned_against_itself():
    """Two projections by 60 degrees each turn (1, 0) by 120; its own turn comes after them."""
    angles = torch.deg2rad(tensor(150, 210, 0))
    deltas = torch.stack([angles.cos(), angles.sin()], dim=1)
    turned = project_coefficients(deltas @ deltas.T)[2] @ deltas
    assert turned.tolist() == approx([-0.125, 0.125 * math.sqrt(3)])


def test_project_of_one_client_and_of_zero_updates():
    one = tensor((1, -2, 0))
    assert torch.equal(project_conflicts(one), one[0])
    assert torch.equal(project_conflicts(torch.zeros(3, 4)), torch.zeros(4))


def test_project_survives_norms_that_underflow_in_single_precision():
    """1e-23 squared is 0 in float32, and next to nothing in float64."""
    deltas = torch.tensor([[1.0, 1.0], [-1e-23, 0.0]])
    assert project_conflicts(deltas).isfinite().all()
    assert project_conflicts(deltas, reduction="sum").tolist() == approx([1, 1])
    small = torch.tensor([[1.0, 1.0], [-1e-14, 0.0]])
    torch.testing.assert_close(
        project_coefficients(gram_matrix(small))[0] @ small.double(), tensor(0, 1)
    )


def test_gram_matrix_is_double_and_does_not_depend_on_its_blocks():
    deltas = torch.randn(3, 2**20 + 5, generator=rng_of(4))
    gram = gram_matrix(deltas)
    assert gram.dtype == torch.float64
    torch.testing.assert_close(gram, deltas.double() @ deltas.double().T, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("rule", [lambda d: align(d, strength=0.2), project_conflicts])
def test_combined_updates_keep_single_precision(rule):
    single, double = rule(FOUR.float()), rule(FOUR)
    assert single.dtype == torch.float32
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------- FedDG-GA

THIRDS = torch.full((3,), 1 / 3, dtype=torch.float64)
GAPS = {0: 0.2, 1: 0.1, 2: 0.4}
VARIANTS = ("default", "official", "paper", "pardon", "fedccrl")


@pytest.mark.parametrize(
    ("gaps", "options", "expected"),
    [
        (
            GAPS,
            {"variant": "official", "round": 1},
            [0.3283582090, 0.3134328358, 0.3582089552],
        ),
        (
            # Accuracies rose by -0.05, -0.01 and 0.02: a fall is a positive gap.
            {0: 0.05, 1: 0.01, 2: -0.02},
            {"variant": "official", "round": 1},
            [0.3797468354, 0.3291139241, 0.2911392405],
        ),
        (GAPS, {"variant": "paper", "round": 10}, [0.3033333333, 0.2133333333, 0.4833333333]),
        (GAPS, {"round": 10}, [0.3233333333, 0.2933333333, 0.3833333333]),
    ],
)
def test_adjusted_weights_published_numbers(gaps, options, expected):
    weights = adjusted_weights(THIRDS, gaps, rounds=40, step=0.2, **options)
    assert weights.tolist() == approx(expected)


@pytest.mark.parametrize(
    ("round", "step"), [(0, 0.0683333333), (1, 0.0666666667), (40, 0.0016666667)]
)
def test_official_steps_published_numbers(round, step):
    """Of two clients with gaps 1 and 0, the ratio of weights gives the step away."""
    halves = tensor(0.5, 0.5)
    new = adjusted_weights(
        halves, {0: 1.0, 1: 0.0}, round=round, rounds=40, step=0.2, variant="official"
    )
    assert (0.5 * new[0] / new[1] - 0.5).item() == approx(step)


@pytest.mark.parametrize(
    ("options", "expected", "coefficients"),
    [
        ({"step": 0.2}, [0.2, 0.232, 0.2, 0.168, 0.2], [0.58, 0.42]),
        (
            {"step": 1 / 3, "variant": "pardon"},
            [0.1724137931, 0.4022988506, 0.1724137931, 0.0804597701, 0.1724137931],
            [0.8333333333, 0.1666666667],
        ),
    ],
)
def test_adjusted_weights_published_numbers_of_two_in_five(options, expected, coefficients):
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    new = adjusted_weights(weights, {1: 0.5, 3: -0.2}, round=10, rounds=50, **options)
    assert new.tolist() == approx(expected)
    assert (new[[1, 3]] / new[[1, 3]].sum()).tolist() == approx(coefficients)
    assert weights.tolist() == [0.2] * 5


def test_paper_weights_have_no_upper_bound_before_rescaling():
    weights, gaps = tensor(0.9, 0.05, 0.05), {0: 1.0, 1: 0.5, 2: 0.0}
    for variant, expected in (
        ("paper", [1.1 / 1.15, 0.05 / 1.15, 0]),
        ("pardon", [1 / 1.2, 0.15 / 1.2, 0.05 / 1.2]),
    ):
        new = adjusted_weights(weights, gaps, round=0, rounds=10, step=0.2, variant=variant)
        assert new.tolist() == approx(expected)


def test_fedccrl_step_is_a_third_of_a_thousandth():
    new = adjusted_weights(THIRDS, GAPS, round=10, rounds=40, step=0.001, variant="fedccrl")
    moves = 0.001 * 0.75 / 3 * np.array([-0.2, -0.8, 1.0])
    assert (new - THIRDS).tolist() == approx(moves.tolist(), 1e-12)


def test_fedccrl_weights_may_become_negative():
    new = adjusted_weights(
        tensor(0.1, 0.9), {0: -1.0, 1: 1.0}, round=0, rounds=10, step=3.0, variant="fedccrl"
    )
    assert new.tolist() == approx([-0.9, 1.9])


def adjusted_oracle(weights, gaps, round, rounds, step, variant):
    """Each version written out on its own, as its source has it."""
    a, n = weights.copy(), len(weights)
    s = sorted(gaps)
    g = np.array([gaps[i] for i in s])
    d = step * (1 - round / rounds)
    if variant == "default":
        x = g - g.mean()
        b = np.clip(a[s] + d / n * x / np.abs(x).max(), 0, 1)
        if b.sum() > 0:
            a[s] = b * a[s].sum() / b.sum()
        return a
    if variant == "official":
        a[s] += g / np.abs(g).max() * step * (1 - (round - 1) / rounds) / 3
        a = np.clip(a, 0, 1)
    elif variant == "paper":
        x = g - g.mean()
        a[s] += x * d / x.max()
        a = np.maximum(a, 0)
    elif variant == "pardon":
        whole = np.zeros(n)
        whole[s] = g
        a = np.clip(a + whole / np.abs(whole).max() * d, 0, 1)
    else:
        x = g - g.mean()
        a[s] += x * d / 3 / x.max()
    return a / a.sum() if a.sum() else weights.copy()


@given(seed=seeds, size=st.integers(2, 7), variant=st.sampled_from(VARIANTS))
def test_adjusted_weights_equal_their_definitions(seed, size, variant):
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(size))
    present = rng.choice(size, size=rng.integers(2, size + 1), replace=False)
    gaps = {int(i): float(rng.normal()) for i in present}
    rounds = int(rng.integers(1, 60))
    arguments = {
        "round": int(rng.integers(0, rounds + 1)),
        "rounds": rounds,
        "step": float(rng.uniform(0.01, 0.9)),
        "variant": variant,
    }
    expected = adjusted_oracle(weights, gaps, **arguments)
    new = adjusted_weights(torch.from_numpy(weights), gaps, **arguments)
    np.testing.assert_allclose(new.numpy(), expected, rtol=1e-6, atol=1e-12)


@given(seed=seeds, size=st.integers(1, 7), step=st.floats(0.01, 0.99), absent=st.booleans())
def test_default_weights_stay_in_the_simplex_and_absent_clients_keep_theirs(
    seed, size, step, absent
):
    rng = np.random.default_rng(seed)
    weights = torch.from_numpy(rng.dirichlet(0.3 * np.ones(size)))
    present = rng.choice(size, size=rng.integers(1, size + 1), replace=False)
    gaps = {int(i): float(rng.normal()) for i in present}
    reported = {**gaps, **{i: math.nan for i in range(size) if i not in gaps and absent}}
    new = adjusted_weights(weights, reported, round=3, rounds=10, step=step)
    assert (new >= 0).all()
    assert new.sum().item() == pytest.approx(1)
    others = [i for i in range(size) if i not in gaps]
    assert torch.equal(new[others], weights[others])
    order = rng.permutation(size)
    renumbered = {new_id: gaps[i] for new_id, i in enumerate(order.tolist()) if i in gaps}
    again = adjusted_weights(weights[order], renumbered, round=3, rounds=10, step=step)
    torch.testing.assert_close(again, new[order])
    moved = {i: 5 * g + 3 for i, g in gaps.items()}
    torch.testing.assert_close(
        adjusted_weights(weights, moved, round=3, rounds=10, step=step), new, atol=1e-9, rtol=1e-6
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gaps", [{}, {0: 0.0, 1: 0.0, 2: 0.0}, {1: math.nan, 2: math.inf}])
def test_weights_stay_without_gaps(variant, gaps):
    weights = tensor(0.5, 0.3, 0.2)
    new = adjusted_weights(weights, gaps, round=3, rounds=40, step=0.2, variant=variant)
    assert torch.equal(new, weights)
    assert new.data_ptr() != weights.data_ptr()


@pytest.mark.parametrize("variant", ["default", "paper", "fedccrl"])
@pytest.mark.parametrize("gaps", [{0: 0.7, 1: 0.7, 2: 0.7}, {1: -2.0}])
def test_equal_gaps_leave_the_weights_of_centred_variants(variant, gaps):
    weights = tensor(0.5, 0.3, 0.2)
    new = adjusted_weights(weights, gaps, round=3, rounds=40, step=0.2, variant=variant)
    assert torch.equal(new, weights)


def test_missing_gap_keeps_the_weight_and_the_others_share_theirs():
    with_nan = adjusted_weights(
        THIRDS, {0: 0.2, 1: math.nan, 2: 0.4}, round=10, rounds=40, step=0.2
    )
    without = adjusted_weights(THIRDS, {0: 0.2, 2: 0.4}, round=10, rounds=40, step=0.2)
    assert torch.equal(with_nan, without)
    assert with_nan.tolist() == approx([1 / 3 - 0.05, 1 / 3, 1 / 3 + 0.05])


def test_weights_stay_where_all_participants_would_fall_to_zero():
    weights = tensor(0.0, 0.0, 1.0)
    new = adjusted_weights(weights, {0: -1.0, 1: -1.0 - 1e-9}, round=0, rounds=10, step=0.0)
    assert torch.equal(new, weights)


def test_adjusted_weights_keep_single_precision():
    new = adjusted_weights(THIRDS.float(), GAPS, round=10, rounds=40, step=0.2)
    assert new.dtype == torch.float32
    assert new.tolist() == approx([0.3233333333, 0.2933333333, 0.3833333333], 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_updates_on_a_gpu_equal_those_on_the_cpu():
    rules = (
        lambda d: masked_update(d, SHARES.tolist(), threshold=0.4),
        lambda d: align(d, strength=0.2),
        project_conflicts,
        agreement_sum,
        lambda d: agreement_random(d, generator=rng_of(3)),
    )
    for rule in rules:
        update = rule(FOUR.cuda())
        assert update.is_cuda
        torch.testing.assert_close(update.cpu(), rule(FOUR))


def test_unknown_variant_is_refused():
    with refused(SettingsError, "did you mean 'official'"):
        adjusted_weights(THIRDS, GAPS, round=1, rounds=40, step=0.2, variant="offical")
