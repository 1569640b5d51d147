"""The metrics of the predictions for one part of a split."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddg_bench.records.metrics import METRICS, metrics_of

Values = NDArray[Any]


def worst_group(
    function: Callable[[Values, Values], float],
    truth: Values,
    predictions: Values,
    groups: NDArray[np.int64],
) -> tuple[float, int] | None:
    """Return the smallest value of a metric over the groups that have images, and its group.

    Args:
        function: The function of a `Metric`.
        truth: Labels of n images.
        predictions: Predictions for the same images.
        groups: Group of each image, -1 for none, int64 [n].

    Returns:
        Value and group, the first group if several are equal; ``None`` if no image is in a group.
    """
    values = [
        (function(truth[groups == group], predictions[groups == group]), group)
        for group in np.unique(groups[groups >= 0]).tolist()
    ]
    return min(values, default=None)


def measure(
    task: str,
    truth: Values,
    predictions: Values,
    loss: float,
    groups: NDArray[np.int64],
    names: Sequence[str],
) -> dict[str, Any]:
    """Return all metrics of a part of a split.

    Args:
        task: ``classification`` or ``regression``; decides which metrics there are.
        truth: Labels of n images, n at least 1.
        predictions: Predictions for the same images.
        loss: Sum of their losses.
        groups: Group of each image, as a position in ``names``, -1 for none.
        names: Names of the groups; empty if the data set has none.

    Returns:
        The task's main metric, ``loss`` (the mean; NaN if it overflowed), ``images``, the other
        metrics, and with groups ``worst_group`` and ``worst_group_name``. If all predictions are
        one class, though the labels are of several, ``only_class`` is its number as a text.
    """
    functions = [(name, f) for name in metrics_of(task) if (f := METRICS[name].function)]
    (main, of_main), *others = functions
    mean = loss / len(truth)
    found: dict[str, Any] = {
        main: of_main(truth, predictions),
        "loss": mean if math.isfinite(mean) else math.nan,
        "images": len(truth),
        **{name: function(truth, predictions) for name, function in others},
    }
    if task == "classification" and len(np.unique(predictions)) == 1 < len(np.unique(truth)):
        found["only_class"] = str(predictions[0])
    worst = worst_group(of_main, truth, predictions, groups) if names else None
    if worst is not None:
        found["worst_group"], found["worst_group_name"] = worst[0], names[worst[1]]
    return found
