"""Metrics of a global model for every split and domain, from counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from feddg_bench.executors import Executor
from feddg_bench.federation import Federation
from feddg_bench.loop import Evaluation
from feddg_bench.messages import Weights


def evaluate(
    executor: Executor, federation: Federation, weights: Weights, *, chunk: int
) -> Evaluation:
    """Return accuracy in [0, 1], mean cross-entropy and image count by split and domain.

    Images are measured in chunks of fixed size, summed in order, so that the numbers do not
    depend on how many workers share them.
    """
    jobs = list(_chunks(federation, chunk))
    results = executor.evaluate(weights, [index for _, _, index in jobs])
    counts: dict[tuple[str, str], np.ndarray] = {}
    losses: dict[tuple[str, str], float] = {}
    for (split, domain, _), (confusion, loss) in zip(jobs, results, strict=True):
        key = (split, domain)
        counts[key] = counts.get(key, np.zeros_like(confusion)) + confusion
        losses[key] = losses.get(key, 0.0) + loss
    evaluation: Evaluation = {}
    for (split, domain), confusion in counts.items():
        evaluation.setdefault(split, {})[domain] = {
            "accuracy": accuracy(confusion),
            "loss": losses[split, domain] / int(confusion.sum()),
            "images": int(confusion.sum()),
        }
    return evaluation


def accuracy(confusion: np.ndarray) -> float:
    """Return the share of hits in confusion counts (C, C); 0 where there is no image."""
    total = int(confusion.sum())
    return int(np.trace(confusion)) / total if total else 0.0


def _chunks(federation: Federation, size: int) -> Iterator[tuple[str, str, np.ndarray]]:
    for split, domain, index in federation.evaluation:
        for start in range(0, len(index), size):
            yield split, domain, index[start : start + size]
