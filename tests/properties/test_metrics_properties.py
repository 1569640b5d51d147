"""Metrics equal those of scikit-learn, SciPy and wilds for any predictions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, f1_score

from feddg_bench.engine.evaluation import worst_group
from feddg_bench.records.metrics import accuracy, macro_f1, pearson

labels = st.integers(0, 5)
pairs = st.lists(st.tuples(labels, labels), min_size=1, max_size=40).map(np.array)
numbers = st.integers(-1000, 1000).map(lambda n: n / 64)
number_pairs = (
    st.lists(st.tuples(numbers, numbers), min_size=2, max_size=40)
    .map(np.array)
    .filter(lambda array: np.ptp(array, axis=0).min() > 0)
)


@given(pairs)
def test_accuracy_is_that_of_scikit_learn(pair):
    truth, predicted = pair.T.copy()
    hits = int((truth == predicted).sum())
    assert accuracy(truth, predicted) == hits / len(truth)
    assert accuracy(truth, predicted) == pytest.approx(accuracy_score(truth, predicted))


@given(pairs)
def test_macro_f1_is_that_over_the_true_labels(pair):
    truth, predicted = pair.T.copy()
    expected = f1_score(truth, predicted, average="macro", labels=np.unique(truth), zero_division=0)
    assert macro_f1(truth, predicted) == pytest.approx(expected, abs=1e-12)


@given(number_pairs)
def test_pearson_is_that_of_scipy(pair):
    truth, predicted = pair.T
    assert pearson(truth, predicted) == pytest.approx(pearsonr(truth, predicted)[0], abs=1e-9)


@given(number_pairs, st.integers(-20, 20), st.integers(-3, 3))
def test_pearson_knows_neither_scale_nor_offset(pair, power, offset):
    truth, predicted = pair.T
    moved = predicted * 2.0**power + offset
    assert pearson(truth, moved) == pytest.approx(pearson(truth, predicted), abs=1e-6)


@given(pairs, st.data())
def test_no_group_is_worse_than_the_worst(pair, data):
    truth, predicted = pair.T.copy()
    size = len(truth)
    groups = np.array(data.draw(st.lists(st.integers(-1, 3), min_size=size, max_size=size)))
    values = {
        g: float((truth[groups == g] == predicted[groups == g]).mean())
        for g in range(4)
        if (groups == g).any()
    }
    found = worst_group(accuracy, truth, predicted, groups)
    if not values:
        assert found is None
        return
    value, group = found
    assert value == pytest.approx(min(values.values()))
    assert values[group] == pytest.approx(value)


@pytest.fixture(scope="module")
def wilds():
    """The metrics of wilds, as its data sets use them."""
    return pytest.importorskip(
        "wilds.common.metrics.all_metrics", reason="wilds is not installed", exc_type=ImportError
    )


@pytest.mark.nightly
@given(pairs, number_pairs)
def test_metrics_are_those_of_wilds(wilds, pair, number_pair):
    truth, predicted = map(torch.from_numpy, pair.T.copy())
    for metric, ours in (
        (wilds.Accuracy(prediction_fn=None), accuracy),
        (wilds.F1(prediction_fn=None, average="macro"), macro_f1),
    ):
        theirs = metric.compute(predicted, truth)[metric.agg_metric_field]
        assert ours(truth.numpy(), predicted.numpy()) == pytest.approx(theirs, abs=1e-6)
    metric = wilds.PearsonCorrelation()
    truth, predicted = map(torch.from_numpy, number_pair.T.copy())
    theirs = metric.compute(predicted, truth)[metric.agg_metric_field]
    assert pearson(truth.numpy(), predicted.numpy()) == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.nightly
def test_the_worst_group_is_that_of_wilds(wilds):
    rng = np.random.default_rng(0)
    truth, predicted = torch.from_numpy(rng.integers(0, 3, (2, 60)))
    groups = torch.from_numpy(rng.integers(0, 4, 60))
    metric = wilds.Accuracy(prediction_fn=None)
    try:
        found = metric.compute_group_wise(predicted, truth, groups, 5)
    except (ImportError, NameError):
        pytest.skip("wilds needs the compiled package torch_scatter for groups")
    ours = worst_group(accuracy, truth.numpy(), predicted.numpy(), groups.numpy())
    assert ours[0] == pytest.approx(float(found[metric.worst_group_metric_field]), abs=1e-6)


@pytest.mark.nightly
def test_the_worst_correlation_is_that_of_wilds(wilds):
    rng = np.random.default_rng(0)
    truth, predicted = torch.from_numpy(rng.standard_normal((2, 60)))
    groups = torch.from_numpy(rng.integers(0, 2, 60))
    metric = wilds.PearsonCorrelation()
    _, _, theirs = metric.compute_group_wise(predicted, truth, groups, 2, return_dict=False)
    ours = worst_group(pearson, truth.numpy(), predicted.numpy(), groups.numpy())
    assert ours[0] == pytest.approx(float(theirs), abs=1e-6)
