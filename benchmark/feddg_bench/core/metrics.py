"""Metrics of predictions, as wilds (Koh et al., ICML 2021) defines them; from torchmetrics.

All take the truth and the predictions of n images, shape (n,), and give a float in double
precision. Of no image every metric is 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.functional.classification import multiclass_stat_scores
from torchmetrics.functional.regression import pearson_corrcoef

from feddg_bench.core.tasks import LearningTask

Values = NDArray[Any]
Metric = Callable[[Values, Values], float]


def accuracy(truth: Values, predictions: Values) -> float:
    """Return the share of hits, in [0, 1]: one whole number over another."""
    if not len(truth):
        return 0.0
    return int(_stat_scores(truth, predictions)[:, 0].sum()) / len(truth)


def macro_f1(truth: Values, predictions: Values) -> float:
    """Return the mean F1 over the classes that occur in the truth, in [0, 1].

    Predictions of other classes cost recall but are no classes of the mean, as in wilds. The mean
    over all classes of a data set would be lower wherever a part lacks some.
    """
    if not len(truth):
        return 0.0
    hits, false_alarms, _, misses, support = _stat_scores(truth, predictions).double().unbind(1)
    f1 = 2 * hits / (2 * hits + false_alarms + misses)
    return float(f1[support > 0].mean())


def _stat_scores(truth: Values, predictions: Values) -> Tensor:
    """Return hits, false alarms, correct rejections, misses and support of each class: (C, 5)."""
    # One more class than there are, since torchmetrics drops the axis where there is but one.
    num_classes = int(max(truth.max(), predictions.max())) + 2
    scores: Tensor = multiclass_stat_scores(
        torch.from_numpy(predictions),
        torch.from_numpy(truth),
        num_classes=num_classes,
        average=None,
        validate_args=False,
    )
    return scores


def pearson(truth: Values, predictions: Values) -> float:
    """Return Pearson's correlation coefficient, in [-1, 1]; 0 where it is not defined.

    It is not defined for fewer than two images, constant values, or any that is not finite.
    """
    x, y = _unit_range(predictions), _unit_range(truth)
    if x is None or y is None:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a variance is small, hence NaN
        found = float(pearson_corrcoef(x, y))
    return found if np.isfinite(found) else 0.0


def _unit_range(values: Values) -> Tensor | None:
    """Return values moved and scaled to [0, 1], which a correlation does not see, or nothing.

    torchmetrics gives up on a variance that is small in absolute terms.
    """
    exact = values.astype(np.float64)
    if len(exact) < 2 or not np.isfinite(exact).all() or np.ptp(exact) == 0:
        return None
    return torch.from_numpy((exact - exact.min()) / np.ptp(exact))


def worst_group(
    metric: Metric,
    truth: Values,
    predictions: Values,
    groups: NDArray[np.int64],
) -> tuple[float, int] | None:
    """Return the smallest value of a metric over the groups that have images, and which that is.

    Args:
        metric: `accuracy` or another of this form.
        truth: Of n images.
        predictions: Of n images.
        groups: Group of each image, -1 for none, int64 (n,).

    Returns:
        Value and group, the first of several that are equal; ``None`` if no image is in a group.
    """
    values = [
        (metric(truth[groups == group], predictions[groups == group]), group)
        for group in np.unique(groups[groups >= 0]).tolist()
    ]
    return min(values, default=None)


METRICS: dict[str, Metric] = {"accuracy": accuracy, "macro_f1": macro_f1, "pearson": pearson}
"""Those of a part as a whole, by name."""


def measure(
    task: LearningTask,
    truth: Values,
    predictions: Values,
    loss: float,
    groups: NDArray[np.int64],
    names: Sequence[str],
) -> dict[str, Any]:
    """Return everything that is measured on a part of a split.

    Args:
        task: Says which metrics there are.
        truth: Labels of n images, n at least 1.
        predictions: Of the same images.
        loss: Sum of their losses.
        groups: Group of each, as a position in ``names``, -1 for none.
        names: Of the groups; empty where the data set has none.

    Returns:
        The task's main metric, ``loss`` (the mean), ``images``, the other metrics, and with groups
        ``worst_group`` and ``worst_group_name``.
    """
    main, *others = (name for name in task.metrics if name in METRICS)
    found: dict[str, Any] = {
        main: METRICS[main](truth, predictions),
        "loss": loss / len(truth),
        "images": len(truth),
        **{name: METRICS[name](truth, predictions) for name in others},
    }
    worst = worst_group(METRICS[main], truth, predictions, groups) if names else None
    if worst is not None:
        found["worst_group"], found["worst_group_name"] = worst[0], names[worst[1]]
    return found
