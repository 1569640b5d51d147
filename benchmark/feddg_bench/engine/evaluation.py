"""Metrics of a global model for every split and domain, from the workers' predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddg_bench.core.messages import Weights
from feddg_bench.data.federated import Federation
from feddg_bench.engine.executors import Executor
from feddg_bench.engine.worker import Predictions
from feddg_bench.records.measured import Evaluation
from feddg_bench.records.metrics import METRICS, WHOLE, find_metric, metrics_of

Values = NDArray[Any]


def evaluate(
    executor: Executor, federation: Federation, weights: Weights, *, chunk: int
) -> Evaluation:
    """Return the metrics of `measure` by split and domain.

    Images are evaluated in chunks of fixed size whose results are joined in order, so the numbers
    do not depend on how many workers share them. If a metric of the data set over a whole split is
    not the mean over its domains, the whole split is measured too, as ``all``. Of clients, only
    the main metric is measured.
    """
    jobs = list(_chunks(federation, chunk))
    results = executor.evaluate(weights, [index for _, _, index in jobs])
    parts: dict[str, dict[str, _Part]] = {}
    for (split, domain, index), found in zip(jobs, results, strict=True):
        parts.setdefault(split, {}).setdefault(domain, _Part()).add(index, found)
    if not all(find_metric(name).poolable for name in federation.metrics):
        for domains in parts.values():
            if WHOLE not in domains:
                domains[WHOLE] = _Part.together(domains.values())
    return {
        split: _by_client(federation, split, domains[WHOLE])
        if split in federation.of_clients
        else {domain: part.measure(federation) for domain, part in domains.items()}
        for split, domains in parts.items()
    }


def _by_client(federation: Federation, split: str, whole: _Part) -> dict[str, dict[str, float]]:
    """Return the main metric of each client, given all images of a split of clients."""
    held = federation.of_clients[split]
    ends = np.cumsum([len(index) for index in held.values()])[:-1]
    each = np.split(whole.joined().predictions, ends)
    return {
        name: federation.main_metric(index, predictions)
        for (name, index), predictions in zip(held.items(), each, strict=True)
    }


class _Part:
    """Images that are measured together."""

    def __init__(self) -> None:
        self.indices: list[np.ndarray] = []
        self.found: list[Predictions] = []

    def add(self, index: np.ndarray, found: Predictions) -> None:
        """Add images with their predictions."""
        self.indices.append(index)
        self.found.append(found)

    @classmethod
    def together(cls, parts: Iterable[_Part]) -> _Part:
        """Return several parts joined into one."""
        whole = cls()
        for part in parts:
            whole.add(np.concatenate(part.indices), part.joined())
        return whole

    def joined(self) -> Predictions:
        """Return the predictions for all images, and the sum of their losses."""
        loss = 0.0
        for found in self.found:
            loss += found.loss
        outputs = [found.outputs for found in self.found if found.outputs is not None]
        return Predictions(
            np.concatenate([found.predictions for found in self.found]),
            loss,
            np.concatenate(outputs) if outputs else None,
        )

    def measure(self, federation: Federation) -> dict[str, Any]:
        """Return the metrics of these images."""
        index = np.concatenate(self.indices)
        groups = federation.groups[index] if len(federation.groups) else np.full(len(index), -1)
        found = self.joined()
        return measure(
            federation.task,
            federation.labels[index],
            found.predictions,
            found.loss,
            groups,
            federation.group_names,
            outputs=found.outputs,
            asked=[name for name in federation.metrics if find_metric(name).asked],
        )


def _chunks(federation: Federation, size: int) -> Iterator[tuple[str, str, np.ndarray]]:
    of_clients = (
        (split, WHOLE, np.concatenate([*held.values()]))
        for split, held in federation.of_clients.items()
    )
    for split, domain, index in chain(federation.evaluation, of_clients):
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
    *,
    outputs: Values | None = None,
    asked: Sequence[str] = (),
) -> dict[str, Any]:
    """Return all metrics of a part of a split.

    Args:
        task: ``classification`` or ``regression``, which determines the metrics.
        truth: Labels of n images, n at least 1.
        predictions: Predictions for the same images.
        loss: Sum of their losses.
        groups: Group of each image, as a position in ``names``, -1 for none.
        names: Names of the groups; empty if the data set has none.
        outputs: Logits, [n, C], for metrics of probabilities.
        asked: Metrics to measure in addition to those of the task.

    Returns:
        The task's main metric, ``loss`` (the mean; NaN if it overflowed), ``images``, the other
        metrics (NaN for those of probabilities if outputs overflowed), and with groups
        ``worst_group`` and ``worst_group_name``. If all predictions are one class, but the labels
        are of several, ``only_class`` is its number as a string.
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
    logs = None if outputs is None else log_shares(outputs)
    for metric in map(find_metric, asked):
        assert metric.function is not None  # noqa: S101 - only measured metrics can be asked for
        if not metric.logs:
            found[metric.name] = metric.function(truth, predictions)
        elif logs is not None:
            finite = np.isfinite(logs).all()
            found[metric.name] = metric.function(truth, logs) if finite else math.nan
    return found


def log_shares(outputs: Values) -> NDArray[np.float64]:
    """Return the logarithms of the probabilities for logits, [n, C], in double precision."""
    with np.errstate(invalid="ignore"):
        logits = outputs.astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logs: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logs
