"""Metrics of a global model for every split and domain, from the workers' predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddg_bench.core.messages import Weights
from feddg_bench.data.federated import Federation
from feddg_bench.engine.executors import Executor
from feddg_bench.records.measured import Evaluation
from feddg_bench.records.metrics import METRICS, WHOLE, find_metric, metrics_of

Values = NDArray[Any]


def evaluate(
    executor: Executor, federation: Federation, weights: Weights, *, chunk: int
) -> Evaluation:
    """Return the metrics of `measure` by split and domain.

    Images are evaluated in chunks of fixed size whose results are joined in order, so the numbers
    do not depend on how many workers share them. If a metric of the data set over a whole split is
    not the mean over its domains, the whole split is measured too, as ``all``.
    """
    jobs = list(_chunks(federation, chunk))
    results = executor.evaluate(weights, [index for _, _, index in jobs])
    parts: dict[str, dict[str, _Part]] = {}
    for (split, domain, index), (predictions, loss) in zip(jobs, results, strict=True):
        parts.setdefault(split, {}).setdefault(domain, _Part()).add(index, predictions, loss)
    if not all(find_metric(name).poolable for name in federation.metrics):
        for domains in parts.values():
            if WHOLE not in domains:
                domains[WHOLE] = _Part.together(domains.values())
    return {
        split: {domain: part.measure(federation) for domain, part in domains.items()}
        for split, domains in parts.items()
    }


class _Part:
    """Images that are measured together."""

    def __init__(self) -> None:
        self.indices: list[np.ndarray] = []
        self.predictions: list[np.ndarray] = []
        self.loss = 0.0

    def add(self, index: np.ndarray, predictions: np.ndarray, loss: float) -> None:
        """Add images with their predictions and the sum of their losses."""
        self.indices.append(index)
        self.predictions.append(predictions)
        self.loss += loss

    @classmethod
    def together(cls, parts: Iterable[_Part]) -> _Part:
        """Return several parts joined into one."""
        whole = cls()
        for part in parts:
            whole.add(np.concatenate(part.indices), np.concatenate(part.predictions), part.loss)
        return whole

    def measure(self, federation: Federation) -> dict[str, Any]:
        """Return the metrics of these images."""
        index = np.concatenate(self.indices)
        groups = federation.groups[index] if len(federation.groups) else np.full(len(index), -1)
        return measure(
            federation.task,
            federation.labels[index],
            np.concatenate(self.predictions),
            self.loss,
            groups,
            federation.group_names,
        )


def _chunks(federation: Federation, size: int) -> Iterator[tuple[str, str, np.ndarray]]:
    for split, domain, index in federation.evaluation:
        for start in range(0, len(index), size):
            yield split, domain, index[start : start + size]


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
        task: ``classification`` or ``regression``, which determines the metrics.
        truth: Labels of n images, n at least 1.
        predictions: Predictions for the same images.
        loss: Sum of their losses.
        groups: Group of each image, as a position in ``names``, -1 for none.
        names: Names of the groups; empty if the data set has none.

    Returns:
        The task's main metric, ``loss`` (the mean; NaN if it overflowed), ``images``, the other
        metrics, and with groups ``worst_group`` and ``worst_group_name``. If all predictions are
        one class, but the labels are of several, ``only_class`` is its number as a string.
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
