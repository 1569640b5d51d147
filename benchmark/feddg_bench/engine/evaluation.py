"""Metrics of a global model for every split and domain, from the workers' predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from feddg_bench.core.messages import Weights
from feddg_bench.core.metrics import measure
from feddg_bench.data.federated import Federation
from feddg_bench.engine.executors import Executor
from feddg_bench.records.measured import Evaluation
from feddg_bench.records.metrics import WHOLE, find_metric


def evaluate(
    executor: Executor, federation: Federation, weights: Weights, *, chunk: int
) -> Evaluation:
    """Return the metrics of `feddg_bench.core.metrics.measure` by split and domain.

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
