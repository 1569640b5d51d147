"""Means of model states and the server's step, with numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from feddg_bench.core.aggregation import server_step, weighted_mean
from tests.helpers import bitwise

OLD = {"w": torch.tensor([1.0, 2.0, -1.0])}
STATES = [{"w": torch.tensor(w)} for w in ([2.0, 2.0, 0.0], [0.0, 3.0, -3.0], [1.0, 1.0, 1.0])]
SIZES = [10, 30, 60]


def close(actual, *expected):
    assert_close(actual, torch.tensor(expected), rtol=0, atol=1e-6)


# Equal shares, and shares in proportion to sizes (.1, .3, .6).


def test_mean_by_sizes():
    close(weighted_mean(STATES, SIZES)["w"], 0.8, 1.7, -0.3)


def test_mean_by_equal_shares():
    close(weighted_mean(STATES, [1, 1, 1])["w"], 1.0, 2.0, -2 / 3)


def test_shares_need_not_sum_to_one():
    bitwise(weighted_mean(STATES, SIZES), weighted_mean(STATES, [0.1, 0.3, 0.6]))


def test_half_a_server_step():
    new = server_step(OLD, weighted_mean(STATES, SIZES), 0.5, ["w"])
    close(new["w"], 0.9, 1.85, -0.65)


def test_a_whole_server_step_is_the_mean_bit_for_bit():
    old = {"w": torch.tensor([0.1, 1e8, -3.3])}
    bitwise(
        server_step(old, weighted_mean(STATES, SIZES), 1.0, ["w"]), weighted_mean(STATES, SIZES)
    )


def test_the_server_step_moves_named_tensors_only():
    new = {"w": torch.tensor([2.0]), "running_var": torch.tensor([0.4])}
    moved = server_step({"w": torch.zeros(1), "running_var": torch.ones(1)}, new, 2.0, ["w"])
    close(moved["w"], 4.0)
    close(moved["running_var"], 0.4)


def test_the_server_step_changes_no_tensor_of_either_model():
    new = {"w": torch.tensor([2.0])}
    before = new["w"]
    server_step({"w": torch.zeros(1)}, new, 0.5, ["w"])
    close(before, 2.0)


def test_batch_norm_buffers():
    """Running means get the convex mean, counters the maximum (a mean would be 10)."""
    states = [
        {"running_mean": torch.tensor([mean]), "num_batches_tracked": torch.tensor(count)}
        for mean, count in ((0.2, 7), (0.4, 9), (0.1, 12))
    ]
    mean = weighted_mean(states, SIZES)
    close(mean["running_mean"], 0.20)
    assert mean["num_batches_tracked"].dtype == torch.int64
    assert int(mean["num_batches_tracked"]) == 12
    assert int(weighted_mean(reversed(states), SIZES)["num_batches_tracked"]) == 12


@pytest.mark.parametrize("share", [1e-9, 0.3, 1, 17])
def test_one_state_is_its_own_mean_bit_for_bit(share):
    state = {
        "w": torch.randn(100, generator=torch.Generator().manual_seed(0)),
        "tiny": torch.tensor([1e-45, -0.0, 3.4e38]),
        "count": torch.tensor(5),
    }
    mean = weighted_mean([state], [share])
    bitwise(mean, state)
    assert torch.equal(mean["tiny"].signbit(), state["tiny"].signbit())


def test_equal_states_are_their_own_mean_bit_for_bit():
    state = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    bitwise(weighted_mean([state] * 7, [3, 1, 4, 1, 5, 9, 2]), state)


def test_states_of_counters_only():
    states = [{"n": torch.tensor([7, 1])}, {"n": torch.tensor([3, 9])}]
    assert weighted_mean(states, [1, 1])["n"].tolist() == [7, 9]


def test_types_and_shapes_stay():
    states = [
        {"a": torch.ones(2, 3).double(), "b": torch.ones(4).bfloat16(), "c": torch.tensor(1.0)}
        for _ in range(3)
    ]
    bitwise(weighted_mean(states, [1, 2, 3]), states[0])


def test_memory_layouts_may_differ():
    plain = torch.arange(120.0).view(2, 3, 4, 5)
    last = (plain + 1).to(memory_format=torch.channels_last)
    bitwise(weighted_mean([{"w": plain}, {"w": last}], [1, 1])["w"], plain + 0.5)
    bitwise(weighted_mean([{"w": last}, {"w": plain}], [1, 1])["w"], plain + 0.5)


def test_inputs_are_not_changed_and_not_shared():
    states = [{"w": torch.ones(3), "n": torch.tensor([1])} for _ in range(2)]
    states[1]["w"] += 1
    mean = weighted_mean(states, [1, 1])
    mean["w"].zero_()
    mean["n"].zero_()
    assert [s["w"].tolist() for s in states] == [[1, 1, 1], [2, 2, 2]]
    assert [s["n"].tolist() for s in states] == [[1], [1]]


def test_only_one_state_is_alive_at_a_time(counted):
    weighted_mean((counted({"w": torch.full((2,), float(i))}) for i in range(20)), [1] * 20)
    assert counted.most <= 2


def test_nothing_to_average_is_an_error():
    with pytest.raises(ValueError, match="no state with a positive share"):
        weighted_mean([], [])
    with pytest.raises(ValueError, match="no state with a positive share"):
        weighted_mean(STATES, [0, 0, 0])


def test_every_state_needs_a_share():
    with pytest.raises(ValueError, match="zip"):
        weighted_mean(STATES, [1, 2])
