"""Secure sums: shares, masks, dropouts, and what the server sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from feddg_bench.common.streams import byte_stream
from feddg_bench.protection.secure_sum import (
    STAGES,
    Collector,
    Participant,
    SecureSum,
    TooFewError,
    agree,
    from_ring,
    public_key,
    stream,
    to_ring,
    wrap,
)
from feddg_bench.protection.shamir import PRIME, join_shares, split_secret

pytest.importorskip("cryptography", reason="secure sums need the extra feddg-bench[privacy]")
few = settings(max_examples=25, deadline=None)


# ---------------------------------------------------------------------------------- shares


def test_the_field_is_the_least_prime_above_2_to_256():
    assert pow(3, PRIME - 1, PRIME) == 1  # Fermat; composites below fail it
    assert all(pow(3, n - 1, n) != 1 for n in range(2**256 + 1, PRIME, 2))


@few
@given(st.integers(0, PRIME - 1), st.integers(1, 9), st.data())
def test_any_t_shares_give_the_secret_back(secret, count, data):
    threshold = data.draw(st.integers(1, count))
    shares = split_secret(secret, range(1, count + 1), threshold, byte_stream(0, "shares"))
    chosen = data.draw(st.permutations(list(shares)))[:threshold]
    assert join_shares({place: shares[place] for place in chosen}) == secret


def test_shares_are_values_of_the_polynomial():
    # With bytes that say 5, then 7: f(x) = 42 + 5 x + 7 x^2.
    given_bytes = iter([5, 7])
    shares = split_secret(42, [1, 2, 3], 3, lambda n: next(given_bytes).to_bytes(n, "big"))
    assert shares == {1: 54, 2: 80, 3: 120}


def test_fewer_than_t_shares_fit_any_secret():
    shares = split_secret(42, [1, 2, 3], 3, byte_stream(0, "shares"))
    two = {place: shares[place] for place in (1, 2)}
    for secret in (0, 43, PRIME - 1):  # there is a third share that would have given it
        weights = {1: 3, 2: -3, 3: 1}  # of the values at 1, 2 and 3 in the value at 0
        third = (secret - sum(weights[place] * two[place] for place in two)) % PRIME
        assert join_shares({**two, 3: third}) == secret


def test_a_threshold_above_the_number_of_shares_is_refused():
    with pytest.raises(ValueError, match="3 of 2"):
        split_secret(1, [1, 2], 3, byte_stream(0, "shares"))


# -------------------------------------------------------------------------------- fixed point


def test_fixed_point_has_known_integers():
    values = np.array([1.0, -1.0, 0.25, 0.3, -0.3])
    numbers = to_ring(values, fraction=2, bits=8, terms=1)
    assert numbers.tolist() == [4, 252, 1, 1, 255]
    assert from_ring(numbers, fraction=2, bits=8).tolist() == [1.0, -1.0, 0.25, 0.25, -0.25]


@few
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


# --------------------------------------------------------------------------------------- keys


def test_two_clients_agree_on_a_key_and_a_third_on_another():
    a, b, c = (bytes([n]) * 32 for n in (1, 2, 3))
    assert agree(a, public_key(b), b"mask") == agree(b, public_key(a), b"mask")
    assert agree(a, public_key(b), b"mask") != agree(a, public_key(b), b"shares")
    assert agree(a, public_key(b), b"mask") != agree(a, public_key(c), b"mask")


# --------------------------------------------------------------------------------------- sums


def play(inputs, *, left=None, threshold=1, bits=64, seed=0):
    names = [f"client_{k}" for k in range(len(inputs))]
    session = SecureSum(
        names,
        len(inputs[0]),
        threshold=threshold,
        bits=bits,
        random={name: byte_stream(seed, "secure", name) for name in names},
        left=left,
    )
    for name, numbers in zip(names, inputs, strict=True):
        session.add(name, numbers)
    return session, *session.total()


@few
@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from([16, 32, 64]), st.data())
def test_the_sum_has_the_bits_of_the_plain_sum_whoever_drops_out(count, length, bits, data):
    draws = np.random.default_rng(data.draw(st.integers(0, 99)))
    inputs = [wrap(draws.integers(0, 2**64, length, np.uint64), bits) for _ in range(count)]
    left = {}
    for stage in STAGES:  # up to 30 % of those who are still there, at every stage
        there = [f"client_{k}" for k in range(count) if f"client_{k}" not in left]
        gone = data.draw(st.permutations(there))[: int(0.3 * len(there))]
        left |= dict.fromkeys(gone, stage)
    _, total, names = play(inputs, left=left, threshold=max(1, count // 3), bits=bits)
    summed = [k for k in range(count) if left.get(f"client_{k}") not in ("keys", "shares")]
    assert names == [f"client_{k}" for k in summed]
    assert total.tolist() == wrap(sum((inputs[k] for k in summed), np.uint64(0)), bits).tolist()


@pytest.mark.parametrize("stage", STAGES)
def test_thirty_percent_may_drop_out_at_a_stage(stage):
    inputs = [np.full(5, k, np.uint64) for k in range(10)]
    left = dict.fromkeys(("client_1", "client_4", "client_9"), stage)
    _, total, _ = play(inputs, left=left, threshold=7)
    assert total.tolist() == [45 if stage == "input" else 31] * 5


@pytest.mark.parametrize("stage", STAGES)
def test_too_few_are_no_sum(stage):
    with pytest.raises(TooFewError):
        play(
            [np.zeros(2, np.uint64)] * 3,
            left={"client_0": stage, "client_2": stage},
            threshold=2,
        )


def test_a_client_that_sends_nothing_is_recovered_too():
    names = ["a", "b", "c"]
    session = SecureSum(
        names, 1, threshold=2, bits=64, random={n: byte_stream(0, n) for n in names}
    )
    session.add("a", np.array([1], np.uint64))
    session.add("c", np.array([2], np.uint64))
    total, summed = session.total()
    assert (total.tolist(), summed) == ([3], ["a", "c"])


def test_bytes_are_those_of_the_messages():
    session, *_ = play([np.zeros(100, np.uint64)] * 4, bits=32, threshold=3)
    keys, boxes, inputs, reveals = 4 * 64, 4 * 3 * (2 * 33 + 16), 4 * 400, 4 * 4 * 33
    assert session.up == keys + boxes + inputs + reveals
    assert session.down == 4 * keys + boxes + 4 * 1


# --------------------------------------------------------------------- what the server sees


def uniform(numbers):
    """Return the p-value of a chi-square test on the bytes of numbers."""
    counts = np.bincount(np.ascontiguousarray(numbers).view(np.uint8), minlength=256)
    return chisquare(counts).pvalue


def test_what_the_server_sees_is_uniform():
    """Every input is 0, so that nothing but the mask can make a masked input look random."""
    places = (1, 2, 3)
    players = {p: Participant(p, byte_stream(7, "secure", p), 64) for p in places}
    keys = {p: player.advertise() for p, player in players.items()}
    boxes = {p: player.share(keys, 2) for p, player in players.items()}
    seen = Collector(keys, places, 2, 50_000, 64)
    masked = {
        p: player.masked(np.zeros(50_000, np.uint64), {q: boxes[q][p] for q in places if q != p})
        for p, player in players.items()
    }
    for place, numbers in masked.items():
        assert 0.001 < uniform(numbers) < 0.999, place
        seen.add(place, numbers)
    # So is the sum until the seeds are revealed, and the sum of any two: no pair cancels.
    assert 0.001 < uniform(seen.total) < 0.999
    assert 0.001 < uniform(masked[1] + masked[2]) < 0.999
    assert uniform(np.zeros(50_000, np.uint64)) == 0  # the test can fail
    assert seen.unmask({p: players[p].reveal(seen.sent) for p in (1, 3)}).tolist() == [0] * 50_000


def test_the_server_holds_no_seed_of_a_client_that_dropped_out():
    """Of a client either the seed is revealed or the key, never both: else its input were bare."""
    places = (1, 2, 3)
    players = {p: Participant(p, byte_stream(7, "secure", p), 64) for p in places}
    keys = {p: player.advertise() for p, player in players.items()}
    boxes = {p: player.share(keys, 2) for p, player in players.items()}
    zeros = np.zeros(3, np.uint64)
    masked = {
        p: players[p].masked(zeros, {q: boxes[q][p] for q in places if q != p}) for p in places
    }
    revealed = {p: players[p].reveal([1, 3]) for p in (1, 3)}  # the input of 2 came too late
    seed = join_shares({p: shares[2] for p, shares in revealed.items()}).to_bytes(32, "big")
    assert (masked[2] - stream(seed, 3, 64)).tolist() != [0, 0, 0]
    assert public_key(seed) == keys[2].mask


def test_masks_are_the_stream_of_rfc_7539_and_differ_by_seed():
    # ChaCha20 with a key and a nonce of zeros, counter 0: RFC 7539, appendix A.1, first vector.
    assert stream(bytes(32), 1, 64).tobytes().hex() == "76b8e0ada0f13d90"
    assert stream(bytes([1]) * 32, 1, 64) != stream(bytes(32), 1, 64)
