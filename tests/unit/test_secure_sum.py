"""Secure sums: fixed point, dropouts, and the bytes of the simulated protocol."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.protection.secure_sum import (
    STAGES,
    SecureSum,
    TooFewError,
    from_ring,
    to_ring,
    wrap,
)

# -------------------------------------------------------------------------------- fixed point


def test_fixed_point_has_known_integers():
    values = np.array([1.0, -1.0, 0.25, 0.3, -0.3])
    numbers = to_ring(values, fraction=2, bits=8, terms=1)
    assert numbers.tolist() == [4, 252, 1, 1, 255]
    assert from_ring(numbers, fraction=2, bits=8).tolist() == [1.0, -1.0, 0.25, 0.25, -0.25]


@given(
    st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5),
    st.integers(1, 50),
    st.sampled_from([16, 32, 48, 64]),
)
def test_a_sum_is_right_or_refused(values, terms, bits):
    limit = 2.0 ** (bits - 1 - 8)
    largest = max(map(abs, values)) * terms
    try:
        numbers = to_ring(np.array(values), fraction=8, bits=bits, terms=terms)
    except OverflowError:
        assert largest > limit / 2
        return
    assert largest <= limit + terms
    total = from_ring(wrap(numbers * np.uint64(terms), bits), fraction=8, bits=bits)
    for value, found in zip(values, total, strict=True):
        assert found == pytest.approx(value * terms, rel=1e-12, abs=terms * 2.0**-8)


# --------------------------------------------------------------------------------------- sums


def play(inputs, *, left=None, threshold=1, bits=64):
    names = [f"client_{k}" for k in range(len(inputs))]
    session = SecureSum(names, len(inputs[0]), threshold=threshold, bits=bits, left=left)
    for name, numbers in zip(names, inputs, strict=True):
        session.add(name, numbers)
    return session


def multiples(count, length, bits):
    """Return for client k the first multiples of k + 1 times an odd number, modulo 2^bits."""
    ramp = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return [wrap(ramp * np.uint64(k + 1), bits) for k in range(count)]


# Sums, members and bytes of the protocol itself: X25519, ChaCha20-Poly1305 and Shamir's shares.
PLAYED = [
    (3, 3, 16, 2, {}, [59518, 53500, 47482], 999, 1071),
    (5, 2, 32, 3, {1: "keys"}, [1992838417, 3985676834], 2192, 2588),
    (5, 2, 48, 3, {0: "shares", 4: "input"}, [184876700715302, 88278424719948], 2503, 3243),
    (
        *(9, 2, 64, 5, {2: "keys", 3: "shares", 8: "input"}),
        *([8952049438961855262, 17904098877923710524], 7520, 9788),
    ),
    (1, 2, 64, 1, {}, [11400714819323198485, 4354685564936845354], 113, 65),
]
REFUSED = [
    (4, 100, 17, 3, {1: "keys", 2: "input"}, 1831, 1518),
    (4, 3, 64, 3, {0: "shares", 3: "shares"}, 1552, 2010),
]


@pytest.mark.parametrize(
    ("count", "length", "bits", "threshold", "gone", "expected", "up", "down"), PLAYED
)
def test_sums_and_bytes_are_those_of_the_protocol(
    count, length, bits, threshold, gone, expected, up, down
):
    left = {f"client_{k}": stage for k, stage in gone.items()}
    session = play(multiples(count, length, bits), left=left, threshold=threshold, bits=bits)
    total, names = session.total()
    assert total.tolist() == expected
    summed = [k for k in range(count) if gone.get(k) not in ("keys", "shares")]
    assert names == [f"client_{k}" for k in summed]
    assert (session.up, session.down) == (up, down)


@pytest.mark.parametrize(("count", "length", "bits", "threshold", "gone", "up", "down"), REFUSED)
def test_too_few_are_no_sum(count, length, bits, threshold, gone, up, down):
    left = {f"client_{k}": stage for k, stage in gone.items()}
    session = play(multiples(count, length, bits), left=left, threshold=threshold, bits=bits)
    with pytest.raises(TooFewError, match="2 clients are left, 3 are needed"):
        session.total()
    assert (session.up, session.down) == (up, down)  # bytes sent in vain


def test_a_threshold_above_the_number_of_clients_is_refused():
    with pytest.raises(ValueError, match="3 of 2"):
        SecureSum(["a", "b"], 1, threshold=3, bits=64)


@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from([16, 32, 64]), st.data())
def test_the_sum_has_the_bits_of_the_plain_sum_whoever_drops_out(count, length, bits, data):
    draws = np.random.default_rng(data.draw(st.integers(0, 99)))
    inputs = [wrap(draws.integers(0, 2**64, length, np.uint64), bits) for _ in range(count)]
    left = {}
    for stage in STAGES:  # up to 30 % of the remaining clients, at every stage
        there = [f"client_{k}" for k in range(count) if f"client_{k}" not in left]
        gone = data.draw(st.permutations(there))[: int(0.3 * len(there))]
        left |= dict.fromkeys(gone, stage)
    session = play(inputs, left=left, threshold=max(1, count // 3), bits=bits)
    total, names = session.total()
    summed = [k for k in range(count) if left.get(f"client_{k}") not in ("keys", "shares")]
    assert names == [f"client_{k}" for k in summed]
    assert total.tolist() == wrap(sum((inputs[k] for k in summed), np.uint64(0)), bits).tolist()


def test_a_client_that_sends_nothing_is_left_out():
    session = SecureSum(["a", "b", "c"], 1, threshold=2, bits=64)
    session.add("a", np.array([1], np.uint64))
    session.add("c", np.array([2], np.uint64))
    total, summed = session.total()
    assert (total.tolist(), summed) == ([3], ["a", "c"])


def test_bytes_are_those_of_the_messages():
    session = play([np.zeros(100, np.uint64)] * 4, bits=32, threshold=3)
    session.total()
    keys, boxes, inputs, reveals = 4 * 64, 4 * 3 * (2 * 33 + 16), 4 * 400, 4 * 4 * 33
    assert session.up == keys + boxes + inputs + reveals
    assert session.down == 4 * keys + boxes + 4 * 1
