"""FedDG-GA's weights as a function of gaps: NumPy oracles and edge cases, no published numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.common.errors import SettingsError
from feddg_methods.feddg_ga import adjusted_weights
from tests.helpers import refused

seeds = st.integers(0, 2**32 - 1)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def approx(values, tolerance=1e-9):
    return pytest.approx(values, abs=tolerance)


THIRDS = torch.full((3,), 1 / 3, dtype=torch.float64)
GAPS = {0: 0.2, 1: 0.1, 2: 0.4}
VARIANTS = ("default", "official", "paper", "pardon", "fedccrl")


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
    """Return the new weights by each variant's formula, as its source has it."""
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


def test_weights_stay_where_all_participants_would_fall_to_zero():
    weights = tensor(0.0, 0.0, 1.0)
    new = adjusted_weights(weights, {0: -1.0, 1: -1.0 - 1e-9}, round=0, rounds=10, step=0.0)
    assert torch.equal(new, weights)


def test_adjusted_weights_keep_single_precision():
    new = adjusted_weights(THIRDS.float(), GAPS, round=10, rounds=40, step=0.2)
    assert new.dtype == torch.float32
    assert new.tolist() == approx([0.3233333333, 0.2933333333, 0.3833333333], 1e-6)


def test_unknown_variant_is_refused():
    with refused(SettingsError, "did you mean 'official'"):
        adjusted_weights(THIRDS, GAPS, round=1, rounds=40, step=0.2, variant="offical")
