"""Metrics: values worked out by hand, undefined cases, and metrics of splits."""

from __future__ import annotations

import warnings
from typing import get_args

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.config.schema import EvaluationSettings
from feddg_bench.engine.evaluation import log_shares, measure, worst_group
from feddg_bench.models.tasks import TASKS
from feddg_bench.records.measured import tabulate
from feddg_bench.records.metrics import (
    METRICS,
    accuracy,
    auroc,
    balanced_accuracy,
    brier,
    calibration_error,
    find_metric,
    log_likelihood,
    macro_f1,
    metrics_of,
    pearson,
)
from feddg_bench.records.rules import (
    best_round,
    choose_evaluation,
    one_class_splits,
    pooled_metric,
    split_metric,
)

TRUTH = np.array([0, 0, 1, 1, 2])
PREDICTED = np.array([0, 1, 1, 1, 0])
GROUPS = np.array([0, 0, 1, 1, 1])
NOTHING = np.empty(0, dtype=np.int64)


def test_accuracy_is_one_whole_number_over_another():
    assert accuracy(TRUTH, PREDICTED) == 3 / 5
    assert accuracy(np.zeros(7, int), np.array([0] * 2 + [1] * 5)) == 2 / 7
    assert accuracy(NOTHING, NOTHING) == 0


def test_macro_f1_by_hand():
    """F1 is 1/2, 4/5 and 0; class 3 is predicted once in the second case but never true."""
    assert macro_f1(TRUTH, PREDICTED) == pytest.approx((0.5 + 0.8 + 0) / 3, abs=1e-15)
    assert macro_f1(TRUTH, np.array([0, 1, 1, 3, 2])) == pytest.approx((2 / 3 + 0.5 + 1) / 3)
    assert macro_f1(NOTHING, NOTHING) == 0


def test_macro_f1_leaves_out_classes_that_are_absent():
    few = np.array([7, 7, 150])
    assert macro_f1(few, few) == 1
    assert macro_f1(np.zeros(3, int), np.zeros(3, int)) == 1
    assert macro_f1(np.zeros(3, int), np.ones(3, int)) == 0


def test_the_worst_group_by_hand():
    assert worst_group(accuracy, TRUTH, PREDICTED, GROUPS) == (0.5, 0)
    assert worst_group(accuracy, TRUTH, PREDICTED, np.array([1, 1, 4, 4, 4])) == (0.5, 1)
    assert worst_group(accuracy, TRUTH, PREDICTED, np.array([-1, -1, 4, 4, 4])) == (2 / 3, 4)


def test_images_without_a_group_are_in_none():
    assert worst_group(accuracy, TRUTH, PREDICTED, np.full(5, -1)) is None
    assert worst_group(accuracy, TRUTH, PREDICTED, np.array([0, -1, 1, 1, -1])) == (1, 0)


def test_pearson_by_hand():
    """Centred: (-1, 0, 1) with (-1, 1, 0), so 1 / 2."""
    assert pearson(np.array([1.0, 2, 3]), np.array([1.0, 3, 2])) == pytest.approx(0.5, abs=1e-15)
    assert pearson(np.arange(5.0), -3 * np.arange(5.0) + 7) == pytest.approx(-1, abs=1e-15)


@pytest.mark.parametrize(
    "predictions",
    [[1.0, 1, 1], [np.nan, 1, 2], [np.inf, 1, 2]],
    ids=["constant", "nan", "infinite"],
)
def test_pearson_is_zero_where_it_is_not_defined(predictions):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pearson(np.arange(3.0), np.array(predictions)) == 0
        assert pearson(np.arange(1.0), np.arange(1.0)) == 0
        assert pearson(np.empty(0), np.empty(0)) == 0


def test_pearson_of_numbers_that_hardly_differ():
    """As at the start of training; torchmetrics alone warns and gives NaN."""
    truth = np.array([1.0, 2, 3, 4], dtype=np.float32)
    assert pearson(truth, 5 + 1e-9 * truth.astype(np.float64)) == pytest.approx(1, abs=1e-5)


def test_what_is_measured_of_classes():
    found = measure("classification", TRUTH, PREDICTED, 2.0, GROUPS, ("left", "right"))
    assert list(found)[:3] == ["accuracy", "loss", "images"]
    assert found == {
        "accuracy": 0.6,
        "loss": 0.4,
        "images": 5,
        "macro_f1": pytest.approx(1.3 / 3),
        "worst_group": 0.5,
        "worst_group_name": "left",
    }
    assert "worst_group" not in measure("classification", TRUTH, PREDICTED, 2.0, NOTHING, ())
    alone = np.full(5, -1)
    assert "worst_group" not in measure("classification", TRUTH, PREDICTED, 2.0, alone, ("a",))


def test_what_is_measured_of_a_regression():
    truth = np.array([0.0, 1, 2, 0, 1, 2], dtype=np.float32)
    predictions = np.array([0.0, 1, 2, 2, 1, 0], dtype=np.float32)
    groups = np.array([0, 0, 0, 1, 1, 1])
    found = measure("regression", truth, predictions, 8.0, groups, ("urban", "rural"))
    assert found == {
        "pearson": pytest.approx(0, abs=1e-15),
        "loss": pytest.approx(8 / 6),
        "images": 6,
        "worst_group": pytest.approx(-1),
        "worst_group_name": "rural",
    }


GUESSED = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.25, 0.7, 0.05], [0.9, 0.05, 0.05]])
TRUE = np.array([0, 1, 1, 0])


def test_metrics_of_probabilities_by_hand():
    """Confidences 0.5 and 0.7 and 0.9 are right, 0.8 is wrong: four bins of one image each."""
    logs = np.log(GUESSED)
    assert log_likelihood(TRUE, logs) == pytest.approx(-np.log(0.5 * 0.1 * 0.7 * 0.9) / 4)
    squares = [0.25 + 0.09 + 0.04, 0.01 + 0.81 + 0.64, 0.0625 + 0.09 + 0.0025, 0.01 + 0.005]
    assert brier(TRUE, logs) == pytest.approx(sum(squares) / 4)
    assert calibration_error(TRUE, logs) == pytest.approx((0.5 + 0.8 + 0.3 + 0.1) / 4)
    assert auroc(TRUE, logs) == (4 / 4 + 3 / 4) / 2  # class 2 does not occur
    assert balanced_accuracy(np.array([0, 0, 0, 1]), np.array([0, 0, 2, 1])) == (2 / 3 + 1) / 2
    assert calibration_error(np.array([0] * 4), np.log(np.full((4, 2), 0.5))) == 0.5  # one bin


def test_metrics_of_probabilities_where_they_are_not_defined():
    assert auroc(np.zeros(3, int), np.log(GUESSED[:3])) == 0.5
    logs = np.empty((0, 3))
    assert [f(NOTHING, logs) for f in (log_likelihood, brier, calibration_error)] == [0, 0, 0]
    assert balanced_accuracy(NOTHING, NOTHING) == 0


@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(5, 60))
def test_metrics_of_probabilities_are_those_of_scikit_learn(seed, classes, images):
    rng = np.random.default_rng(seed)
    outputs = rng.normal(0, 3, (images, classes)).astype(np.float32)
    truth = np.concatenate([np.arange(classes), rng.integers(0, classes, images - classes)])
    logs = log_shares(outputs)
    shares = np.exp(logs)
    assert log_likelihood(truth, logs) == pytest.approx(sklearn.metrics.log_loss(truth, shares))
    once = np.eye(classes)[truth]
    assert brier(truth, logs) == pytest.approx(((shares - once) ** 2).sum() / images)
    each = sklearn.metrics.roc_auc_score(once, shares, average="macro")
    assert auroc(truth, logs) == pytest.approx(each, abs=1e-6)
    guessed = shares.argmax(axis=1)
    expected = sklearn.metrics.balanced_accuracy_score(truth, guessed)
    assert balanced_accuracy(truth, guessed) == pytest.approx(expected)


def test_what_is_asked_for_is_measured_too():
    outputs = np.log(GUESSED).astype(np.float32) + 3
    plain = measure("classification", TRUE, GUESSED.argmax(1), 2.0, NOTHING, ())
    asked = [name for name, metric in METRICS.items() if metric.asked]
    found = measure(
        "classification", TRUE, GUESSED.argmax(1), 2.0, NOTHING, (), outputs=outputs, asked=asked
    )
    assert found == plain | {
        "nll": pytest.approx(log_likelihood(TRUE, np.log(GUESSED)), abs=1e-6),
        "ece": pytest.approx(0.425, abs=1e-6),
        "brier": pytest.approx(brier(TRUE, np.log(GUESSED)), abs=1e-6),
        "auroc": 0.875,
        "balanced_accuracy": 0.75,
    }
    assert set(asked) == set(
        get_args(get_args(EvaluationSettings.model_fields["metrics"].annotation)[0])
    )


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_outputs_that_overflowed_give_no_number(wrong):
    outputs = np.array([[0.0, 1.0], [wrong, 0.0]], dtype=np.float32)
    found = measure(
        "classification",
        np.array([0, 1]),
        np.array([1, 0]),
        2.0,
        NOTHING,
        (),
        outputs=outputs,
        asked=["nll", "ece", "balanced_accuracy"],
    )
    assert np.isnan([found["nll"], found["ece"]]).all()
    assert found["balanced_accuracy"] == 0
    table = tabulate([(1, {"test": {"ink": found | {"nll": None}}})])
    assert np.isnan(table.numbers[0, [c[2] in ("nll", "ece") for c in table.columns]]).all()


def test_summaries_over_clients_by_hand():
    values = np.array([0.9, 0.2, 0.5, 0.4, 1.0, 0.8, 0.7, 0.6, 0.3, 0.9, 0.8])
    found = {name: float(METRICS[f"client_{name}"].over(values)) for name in SUMMARIES}
    assert found == {
        "mean": pytest.approx(7.1 / 11),
        "std": pytest.approx(np.std(values)),
        "worst_tenth": 0.25,  # two of eleven
        "worst": 0.2,
    }
    assert METRICS["personal_worst_tenth"].over(values[:10]) == 0.2
    assert [METRICS[f"client_{name}"].lower for name in SUMMARIES] == [False, True, False, False]
    assert find_metric("client_mean").label == "accuracy, mean over clients (%)"
    assert find_metric("unseen_client_worst", "regression").label == (
        "Pearson's r, worst of unseen clients"
    )


SUMMARIES = ("mean", "std", "worst_tenth", "worst")


def test_tasks_name_their_metrics():
    for name, task in TASKS.items():
        assert task.name == name
        assert "worst_group" in metrics_of(name)
        assert metrics_of(name)[0] in METRICS


# ------------------------------------------------------------------------- reading a split

EVALUATION = {
    "test": {
        "a": {"accuracy": 0.5, "loss": 1.0, "images": 10, "macro_f1": 0.2},
        "b": {"accuracy": 1.0, "loss": 3.0, "images": 30, "macro_f1": 0.6},
    },
    "val": {"c": {"accuracy": 0.25, "loss": 2.0, "images": 4, "macro_f1": 0.1}},
    "id_val": {
        "a": {"pearson": 0.9, "loss": 1.0, "images": 10},
        "b": {"pearson": 0.7, "loss": 1.0, "images": 10},
        "all": {"pearson": 0.4, "loss": 1.0, "images": 20, "worst_group": 0.3},
    },
}


@pytest.mark.parametrize(
    ("split", "metric", "expected"),
    [
        ("test", "accuracy", (5 + 30) / 40),
        ("test", "loss", 2.5),
        ("test", "macro_f1", None),  # not the mean of its domains, and not measured
        ("val", "macro_f1", 0.1),
        ("id_val", "pearson", 0.4),
        ("id_val", "worst_group", 0.3),
        ("id_val", "accuracy", None),
        ("train", "accuracy", None),
    ],
)
def test_a_metric_of_a_split(split, metric, expected):
    assert split_metric(EVALUATION, split, metric) == expected
    assert pooled_metric(EVALUATION, split, metric) == expected


def test_a_metric_that_one_domain_lacks_is_no_metric_of_the_split():
    evaluation = {"test": {"a": {"loss": 1.0, "images": 1}, "b": EVALUATION["val"]["c"]}}
    assert split_metric(evaluation, "test", "macro_f1") is None


def test_the_whole_is_no_domain():
    assert pooled_metric(EVALUATION, "id_val", "pearson", "worst") == 0.7
    assert pooled_metric(EVALUATION, "id_val", "pearson", "domains") == pytest.approx(0.8)
    only = {"test": {"all": {"accuracy": 0.5, "images": 2}}}
    assert pooled_metric(only, "test", "accuracy", "worst") == 0.5


def test_rounds_are_chosen_by_the_key_metric():
    rounds = [
        {"val": {"c": {"accuracy": a, "macro_f1": f, "images": 4}}}
        for a, f in ((0.5, 0.1), (0.4, 0.3), (0.6, 0.3))
    ]
    assert best_round(rounds, "val", "accuracy") == 2
    assert best_round(rounds, "val", "macro_f1") == 1
    table = tabulate([*enumerate(rounds, 1)])
    assert choose_evaluation(table, "best_by_val", "macro_f1") == rounds[1]
    assert choose_evaluation(table, "best_by_val", "pearson") is None


def test_shares_are_shown_in_percent():
    assert find_metric("accuracy").text(0.5, 1) == "50.0"
    assert find_metric("worst_group").text(0.5, 1) == "50.0"
    assert find_metric("worst_group", "regression").text(0.5, 1) == "0.50"
    assert find_metric("pearson", "regression").text(0.4567, 2) == "0.457"
    assert not find_metric("loss").percent


NO_GROUP = np.full(6, -1)
LABELS = np.array([0, 0, 1, 1, 1, 2])


def part(predictions: list[int], truth: np.ndarray = LABELS) -> dict[str, float]:
    return measure("classification", truth, np.array(predictions), 6.0, NO_GROUP, ())


def test_one_class_alone_is_recorded_unless_it_is_the_only_label() -> None:
    assert part([1] * 6)["only_class"] == "1"
    assert part([7] * 6)["only_class"] == "7"
    assert "only_class" not in part([1, 1, 1, 1, 1, 2])
    assert "only_class" not in part([1] * 6, np.ones(6, int))


def test_a_model_of_one_class_is_known_by_its_numbers_too() -> None:
    """For older records, it follows from accuracy and macro F1 if all classes occur."""
    old = part([1] * 6)
    del old["only_class"]
    healthy = part([0, 0, 1, 1, 2, 2])
    evaluation = {"id_val": {"a": old, "b": part([2] * 6)}, "test": {"c": old, "d": healthy}}
    assert one_class_splits(evaluation, 3) == ["id_val"]
    for classes in (None, 1, 2, 4):  # not known, or not all occur
        assert one_class_splits({"test": {"c": old}}, classes) == []
    assert one_class_splits({"test": {"c": {"accuracy": 0.5, "images": 2}}}, 3) == []
    assert one_class_splits({"test": {}}, 3) == []


@given(
    st.integers(2, 5).flatmap(
        lambda classes: st.tuples(
            st.just(classes),
            st.lists(
                st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), max_size=12
            ),
        )
    )
)
def test_numbers_tell_of_one_class_only_where_it_is_so(
    drawn: tuple[int, list[tuple[int, int]]],
) -> None:
    """A false alarm needs a model that predicts one class for all images of the others."""
    classes, pairs = drawn
    truth = np.array([*range(classes), *(t for t, _ in pairs)])
    predictions = np.array([0] * classes + [p for _, p in pairs])
    found = {"accuracy": accuracy(truth, predictions), "macro_f1": macro_f1(truth, predictions)}
    said = bool(one_class_splits({"test": {"d": found}}, classes))
    assert said == (set(predictions[truth != 0]) == {0} and not any(truth[predictions != 0]))
