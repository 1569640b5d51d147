"""The difference at equal `id_test`, and simulations of the tables' tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.records.robustness import at_equal_id, excess, within_reach
from feddg_bench.records.statistics import Sample, t_test
from tests import simulations

SLOPE, INTERCEPT = 0.7, -0.9


def line(percent: float) -> float:
    """Return the reference's `test` accuracy at an `id_test` accuracy."""
    logit = INTERCEPT + SLOPE * math.log(percent / (100 - percent))
    return 100 / (1 + math.exp(-logit))


def sample(values: list[list[float]]) -> Sample:
    """Return a sample from values [scenarios, seeds]."""
    return {
        ((0, str(scenario)), seed): value
        for scenario, seeds in enumerate(values)
        for seed, value in enumerate(seeds)
    }


def both(ids: float, tests: float, scenarios: int = 4) -> tuple[Sample, Sample]:
    return sample([[ids] * 3] * scenarios), sample([[tests] * 3] * scenarios)


CURVE = [both(ids, line(ids)) for ids in (50.0, 65.0, 75.0, 80.0)]


@pytest.mark.parametrize("ids", [60.0, 70.0, 80.0, 85.0])
@pytest.mark.parametrize("better", [0.0, 2.5, -4.0])
def test_the_vertical_distance_to_the_reference_s_line(ids: float, better: float) -> None:
    found = at_equal_id(both(ids, line(ids) + better), CURVE[-1], CURVE)
    assert found is not None
    assert found.value == pytest.approx(better, abs=1e-9)
    assert (found.low, found.high) == pytest.approx((better, better), abs=1e-6)


def test_equal_id_test_leaves_the_plain_difference() -> None:
    ids, tests = sample([[80.0, 80.0]] * 3), sample([[50.0, 54.0], [60.0, 60.0], [40.0, 46.0]])
    reference = ids, sample([[48.0, 50.0], [60.0, 60.0], [42.0, 42.0]])
    curve = [(sample([[x, x]] * 3), reference[1]) for x in (60.0, 70.0)] + [reference]
    found = at_equal_id((ids, tests), reference, curve)
    assert found is not None
    assert found.value == pytest.approx((3 + 0 + 1) / 3)
    assert found.low < found.value < found.high


def test_seeds_and_scenarios_that_all_share_count() -> None:
    row = both(70.0, line(70.0) + 3)
    more = {**row[1], ((0, "9"), 0): 0.0, ((0, "0"), 7): 0.0}
    assert at_equal_id((row[0], more), CURVE[-1], CURVE) == at_equal_id(row, CURVE[-1], CURVE)


def test_none_beyond_the_range_that_was_measured() -> None:
    late = CURVE[2:]
    assert at_equal_id(both(74.9, 50.0), late[-1], late) is None
    assert at_equal_id(both(75.1, 50.0), late[-1], late) is not None
    assert at_equal_id(both(84.5, 50.0), late[-1], late) is None
    assert at_equal_id(both(80.0, 50.0), late[-1], late[-1:]) is None
    assert at_equal_id(({}, {}), late[-1], late) is None
    assert at_equal_id(both(78.0, 50.0, 2), late[-1], late) is None


@given(
    st.lists(st.tuples(st.floats(5, 95), st.floats(5, 95)), min_size=3, max_size=6),
    st.lists(st.floats(5, 95), min_size=2, max_size=2, unique=True),
)
def test_the_reference_has_no_excess(ends: list[tuple[float, float]], ids: list[float]) -> None:
    end = np.array(ends)
    curve = np.stack([np.column_stack([np.full(len(end), x), end[:, 1]]) for x in ids], axis=1)
    assert within_reach(end, end, curve)
    assert float(excess(end, end, curve)) == pytest.approx(0, abs=1e-9)


def test_the_simulations_use_the_tables_test() -> None:
    means = np.random.default_rng(0).normal(1, 1, (200, 4))
    expected = [t_test(row) < 0.05 for row in means]
    assert simulations.rejected(means).tolist() == expected
    assert 0 < sum(expected) < 200


@pytest.mark.nightly
def test_the_published_simulations() -> None:
    assert simulations.FILE.read_text() == simulations.text()
