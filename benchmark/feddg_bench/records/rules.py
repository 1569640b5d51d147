"""Selection rules: which round a table reports, and how its values are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, Literal, get_args

import numpy as np

from feddg_bench.records.measured import Evaluation, Measured
from feddg_bench.records.metrics import WHOLE, find_metric

Rule = Literal["last", "mean_last_5", "best_by_val", "best_by_id_val", "oracle"]
RULES: tuple[Rule, ...] = get_args(Rule)
"""Evaluated rounds that a table reports: the last; the mean of the last five, since single ones
fluctuate; or the one with the best key metric of the data set (accuracy by default) on the held-out
validation domain, on held-out images of the training domains, or (never by default) on the test
domain. Ties go to the earliest round."""
SPLITS = ("id_val", "id_test", "val", "test")
"""Splits that are measured, in the order of tables."""
LAST = 5
"""Number of evaluated rounds in ``mean_last_5``; all, if there are fewer."""

CHOOSING: Mapping[Rule, str] = {"best_by_val": "val", "best_by_id_val": "id_val", "oracle": "test"}
"""Split that a rule uses."""
UNSEEN = "unseen"
"""Stands for both held-out domains of a scenario: the mean over `val` and `test`."""


def unseen_splits(rule: Rule) -> tuple[str, ...]:
    """Return the held-out splits whose mean a rule reports: both, unless it uses one of them."""
    return ("test",) if CHOOSING.get(rule) in ("val", "test") else ("val", "test")


def split_metric(evaluation: Evaluation, split: str, metric: str) -> float | None:
    """Return a metric over all images of a split, or ``None`` if it was not measured.

    It is the value of the part `WHOLE` if there is one; else that of the only domain, or, for
    poolable metrics, the mean over domains weighted by images. A loss that overflowed is NaN.
    """
    parts = evaluation.get(split, {})
    whole = parts.get(WHOLE)
    known = [d for d in (parts.values() if whole is None else (whole,)) if metric in d]
    if len(known) == 1 and (whole is not None or len(parts) == 1):  # fast: tables read millions
        return known[0][metric] if known[0]["images"] else None
    images = sum(domain["images"] for domain in known)
    if not images or not find_metric(metric).poolable:
        return None
    return _total(domain[metric] * domain["images"] for domain in known) / images


def one_class_splits(evaluation: Evaluation, classes: int | None) -> list[str]:
    """Return the splits on which a model predicted only one class in each domain.

    Records without ``only_class`` show it by their numbers if all ``classes`` occur in a domain. At
    accuracy a, the predicted class has the F1 2a / (1 + a) and the others 0, the lowest possible
    macro F1. It is as low only if all images of the other classes were predicted as one.
    """

    def one_class(measured: Mapping[str, float]) -> bool:
        if "only_class" in measured:
            return True
        accuracy, f1 = measured.get("accuracy"), measured.get("macro_f1")
        if not accuracy or f1 is None or classes is None or classes < 2:
            return False
        return math.isclose(f1, 2 * accuracy / (1 + accuracy) / classes, rel_tol=1e-9)

    return [
        split
        for split, parts in evaluation.items()
        if parts and all(map(one_class, parts.values()))
    ]


def chosen_rounds(table: Measured, rule: Rule, metric: str) -> list[int]:
    """Return the positions of a run's rounds that a rule chooses; none if it cannot choose.

    If the rule uses the metric, higher is better.
    """
    if rule in CHOOSING:
        best = _best(curve(table, CHOOSING[rule], metric))
        return [] if best is None else [best]
    count = len(table.rounds)
    return list(range(max(0, count - (1 if rule == "last" else LAST)), count))


def choose_evaluation(table: Measured, rule: Rule, metric: str) -> Evaluation | None:
    """Return the evaluation that a rule chooses, ``None`` if there is none; see `chosen_rounds`."""
    places = chosen_rounds(table, rule, metric)
    return table.mean(places) if places else None


def curve(table: Measured, split: str, metric: str, over: str = "images") -> list[float | None]:
    """Return a metric of a split after each evaluated round; see `pooled_metric`."""
    count = len(table.rounds)
    if (whole := table.over_rounds) is None:
        every = map(table.evaluation, range(count))
        return [pooled_metric(evaluation, split, metric, over) for evaluation in every]
    values: Any = pooled_metric(whole, split, metric, over)
    return [None] * count if values is None else list(values.tolist())


def best_round(evaluations: Sequence[Evaluation], split: str, metric: str) -> int | None:
    """Return the position of the earliest evaluation with the highest metric on a split."""
    return _best([split_metric(evaluation, split, metric) for evaluation in evaluations])


def _best(values: Sequence[float | None]) -> int | None:
    """Return the position of the first highest value."""
    known = [value for value in values if value is not None]
    return values.index(max(known)) if known else None


def pooled_metric(
    evaluation: Evaluation, split: str, metric: str, over: str = "images"
) -> float | None:
    """Return a metric of a split: over all its images, or its mean or minimum over domains."""
    if over == "images":
        return split_metric(evaluation, split, metric)
    parts = evaluation.get(split, {})
    domains = [
        domain
        for name, domain in parts.items()
        if metric in domain and (name != WHOLE or len(parts) == 1)
    ]
    if not any(domain["images"] for domain in domains):
        return None
    values = [domain[metric] for domain in domains]
    lowest: Any = reduce(np.minimum, values)  # of arrays over rounds, too
    return lowest if over == "worst" else _total(values) / len(values)


def _total(values: Iterable[float]) -> float:
    """Return the sum of numbers, or of arrays over rounds, with the same bits for both.

    Since Python 3.12, the built-in ``sum`` compensates errors of numbers, but not of arrays.
    """
    return reduce(add, values)
