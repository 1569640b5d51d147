"""Properties of the mean of any states with any shares."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from feddg_bench.core.aggregation import server_step, weighted_mean

NUMBERS = st.floats(-100, 100, width=32)


@st.composite
def federations(draw):
    """Return K states of a float and an integer tensor, and K positive image counts."""
    count = draw(st.integers(1, 6))
    size = draw(st.integers(1, 4))
    states = [
        {
            "w": torch.tensor(draw(st.lists(NUMBERS, min_size=size, max_size=size))),
            "n": torch.tensor(draw(st.integers(0, 1000))),
        }
        for _ in range(count)
    ]
    sizes = draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    return states, sizes


def close(actual, expected):
    assert_close(actual, expected, rtol=1e-6, atol=1e-4)  # values up to 100: 1e-6 of the range


@given(federations())
def test_the_mean_is_the_textbook_sum(federation):
    states, sizes = federation
    rows = torch.stack([state["w"] for state in states]).double()
    share = torch.tensor(sizes).double() / sum(sizes)
    close(weighted_mean(states, sizes)["w"], (share @ rows).float())


@given(federations())
def test_the_mean_lies_between_the_states(federation):
    states, sizes = federation
    rows = torch.stack([state["w"] for state in states])
    mean = weighted_mean(states, sizes)["w"]
    slack = 1e-4
    assert bool((mean >= rows.amin(0) - slack).all())
    assert bool((mean <= rows.amax(0) + slack).all())


@given(federations(), st.randoms())
def test_the_order_of_clients_does_not_matter(federation, random):
    states, sizes = federation
    order = list(range(len(states)))
    random.shuffle(order)
    shuffled = weighted_mean([states[i] for i in order], [sizes[i] for i in order])
    close(shuffled, weighted_mean(states, sizes))


@given(federations(), st.data())
def test_splitting_a_client_in_two_changes_nothing(federation, data):
    states, sizes = federation
    chosen = data.draw(st.integers(0, len(states) - 1))
    sizes[chosen] += 1  # so that there are two images to split
    part = data.draw(st.integers(1, sizes[chosen] - 1))
    halves = [*sizes, part]
    halves[chosen] -= part
    close(weighted_mean([*states, states[chosen]], halves), weighted_mean(states, sizes))


@given(federations(), st.floats(0.001, 1000))
def test_only_ratios_of_shares_matter(federation, factor):
    states, sizes = federation
    close(weighted_mean(states, [factor * n for n in sizes]), weighted_mean(states, sizes))


@given(federations(), st.data())
def test_clients_without_images_change_nothing_bit_for_bit(federation, data):
    states, sizes = federation
    where = data.draw(st.integers(0, len(states)))
    absent = {"w": torch.full_like(states[0]["w"], torch.nan), "n": torch.tensor(10**6)}
    more = weighted_mean(
        [*states[:where], absent, *states[where:]], [*sizes[:where], 0, *sizes[where:]]
    )
    assert_close(more, weighted_mean(states, sizes), rtol=0, atol=0)


@given(federations(), st.floats(0.125, 1.0))
def test_a_server_step_lies_on_the_way(federation, lr):
    states, sizes = federation
    old, new = states[0], weighted_mean(states, sizes)
    expected = (1 - lr) * old["w"] + lr * new["w"]
    close(server_step(old, dict(new), lr, ["w"])["w"], expected)
