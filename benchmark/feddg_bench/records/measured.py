"""Measurements of a run's evaluated rounds, as stored in records and as one array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json, to_json

from feddg_bench.records.metrics import METRICS, Metric, find_metric

Evaluation = dict[str, dict[str, dict[str, float]]]
"""Split -> domain -> metric -> value, and ``images``, the number of images. The part `WHOLE` of a
split is all of it. Shares are in [0, 1]; a loss that overflowed is NaN. ``worst_group_name`` is a
text, as is ``only_class``, present if a model predicted a single class (early records lack it)."""

MOST_NUMBERS = 2**22
"""Maximum numbers in a table: only a forged record has many columns filled in few rounds each."""
ABSENT = -math.inf
"""Value in `Measured.numbers` where a round lacks the column."""

_RANGES = {
    task: {
        name: (low, min(high, 1e300))
        for name in (metric.name for metric in METRICS.values() if task in metric.tasks)
        for low, high in (find_metric(name, task).range,)
    }
    | {"images": (0.0, 2.0**62)}
    for task in ("classification", "regression")
}


@dataclass(frozen=True, eq=False)
class Measured:
    """The evaluations of a run.

    Attributes:
        rounds: Numbers of the evaluated rounds, T.
        columns: Split, domain and metric of each column, M.
        numbers: The values, [T, M].
        texts: Values that are not numbers: position of the round, split, domain, name, text.
    """

    rounds: Sequence[int]
    columns: Sequence[tuple[str, str, str]]
    numbers: NDArray[np.float64]
    texts: Sequence[tuple[int, str, str, str, Any]]

    def packed(self) -> tuple[str, bytes]:
        """Return the table's structure as a JSON text, and the bytes of its numbers."""
        frame = to_json([self.rounds, self.columns, self.texts]).decode()
        return frame, self.numbers.tobytes()

    @classmethod
    def unpacked(cls, frame: str, numbers: bytes) -> Measured:
        """Return the table from the output of `packed`."""
        rounds, columns, texts = _frame(frame)
        values = np.frombuffer(numbers).reshape(len(rounds), len(columns))
        return cls(rounds, columns, values, texts)

    def evaluation(self, position: int) -> Evaluation:
        """Return the evaluation of a round by its position among the evaluated ones."""
        found = self._nested(self.numbers[position])
        for place, split, domain, name, text in self.texts:
            if place == position:
                found.setdefault(split, {}).setdefault(domain, {})[name] = text
        return found

    def mean(self, positions: Sequence[int]) -> Evaluation:
        """Return the mean of each number over some evaluations; all must be `alike`."""
        return self._nested(self.numbers[positions].sum(axis=0) / len(positions))

    def _nested(self, row: NDArray[np.float64]) -> dict[str, dict[str, dict[str, Any]]]:
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for (split, domain, metric), value in zip(self.columns, row.tolist(), strict=True):
            if value != ABSENT:
                part = found.setdefault(split, {}).setdefault(domain, {})
                part[metric] = int(value) if metric == "images" else value
        return found

    @cached_property
    def over_rounds(self) -> Any:
        """An `Evaluation` that holds arrays over the rounds, [T]; ``None`` if not `alike`."""
        if not self.alike:
            return None
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for (split, domain, metric), values in zip(self.columns, self.numbers.T, strict=True):
            part = found.setdefault(split, {}).setdefault(domain, {})
            part[metric] = int(values[0]) if metric == "images" else values
        return found

    @cached_property
    def alike(self) -> bool:
        """Whether all rounds have the same metrics, on the same numbers of images."""
        counts = self.numbers.take(_counts(tuple(self.columns)), axis=1)
        return bool((counts == counts[:1]).all() and (self.numbers != ABSENT).all())


@lru_cache(maxsize=1000)
def _counts(columns: Sequence[tuple[str, str, str]]) -> NDArray[np.intp]:
    """Return the places of the columns that count images."""
    return np.flatnonzero([name == "images" for *_, name in columns])


@lru_cache(maxsize=10_000)
def _frame(text: str) -> tuple[Any, Any, Any]:
    rounds, columns, texts = from_json(text, cache_strings="all")
    return rounds, [(*column,) for column in columns], texts


def tabulate(evaluations: Sequence[tuple[int, Evaluation]]) -> Measured:
    """Return evaluations, given with their round numbers, as a table, after checking each value.

    A loss, or a metric of probabilities, of ``None`` stands for an overflow, and becomes NaN, also
    in its evaluation.

    Raises:
        ValueError: If a value is invalid for its metric; the message is part of a sentence.
    """
    columns: dict[tuple[str, str, str], int] = {}
    rows: list[tuple[list[int], list[Any]]] = []
    texts: list[tuple[int, str, str, str, Any]] = []
    names: list[tuple[str, ...]] = []
    kinds: list[type] = []
    places: list[int] = []
    for position, (number, evaluation) in enumerate(evaluations):
        try:
            mine = [
                (split, domain, *measured)
                for split, inside in evaluation.items()
                for domain, measured in inside.items()
            ]
            row = [
                value
                for inside in evaluation.values()
                for measured in inside.values()
                for value in measured.values()
            ]
        except (AttributeError, TypeError):
            raise ValueError(f"round {number}: it holds no names with values") from None
        here = list(map(type, row))
        if mine != names or here != kinds:  # else the round has the form of the last checked one
            row = _check(number, evaluation)
            here = list(map(type, row))
            names, kinds = mine, here
            keys = [(split, domain, name) for split, domain, *metrics in mine for name in metrics]
            places = [
                columns.setdefault(key, len(columns))
                for key, kind in zip(keys, kinds, strict=True)
                if kind in (int, float)
            ]
        if len(places) < len(row):
            texts += [
                (position, *key, value)
                for key, value in zip(keys, row, strict=True)
                if value is None or isinstance(value, str)
            ]
            row = [value for value in row if isinstance(value, int | float)]
        rows.append((places, row))
    if len(rows) * len(columns) > MOST_NUMBERS:
        raise ValueError("rounds: they are measured by too many different metrics")
    table = np.full((len(rows), len(columns)), ABSENT)
    with suppress(OverflowError):  # then the range check below fails
        if all(one is places for one, _ in rows):
            table[:, places] = [row for _, row in rows]
        else:
            for position, (one, row) in enumerate(rows):
                table[position, one] = row
    low, high = _ranges(tuple(columns))
    if not ((table >= low) & (table <= high)).all():  # or a round lacks the column
        for number, evaluation in evaluations:
            _check(number, evaluation)
    return Measured([number for number, _ in evaluations], list(columns), table, texts)


@lru_cache(maxsize=1000)
def _ranges(columns: Sequence[tuple[str, str, str]]) -> NDArray[np.float64]:
    """Return the smallest and the largest value of each column, [2, M]."""
    regressions = {(split, domain) for split, domain, name in columns if name == "pearson"}
    ends = [
        _RANGES["regression" if (split, domain) in regressions else "classification"].get(
            name, (-math.inf, math.inf)
        )
        for split, domain, name in columns
    ]
    return np.array(ends).reshape(-1, 2).T


def _check(number: int, evaluation: Evaluation) -> list[Any]:
    """Return the values of an evaluation, after checking each of them."""
    row: list[Any] = []
    for split, inside in evaluation.items():
        for domain, measured in inside.items():
            where = f"round {number}: {split}.{domain}"
            if "images" not in measured:
                raise ValueError(f"{where}: it does not say of how many images")
            task = "regression" if "pearson" in measured else "classification"
            for name, value in measured.items():
                try:
                    measured[name] = _value(find_metric(name, task), value)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
            row += measured.values()
    return row


def _value(metric: Metric, value: Any) -> Any:
    if (metric.name == "loss" or metric.logs) and (value is None or value != value):
        # it overflowed
        return math.nan
    if metric.name in METRICS:
        low, high = metric.range
        if type(value) not in (int, float) or not low <= value <= high or value > 1e300:
            raise ValueError(f"{metric.name} is {value!r}, not a number in [{low:g}, {high:g}]")
    elif metric.name == "images":
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"images is {value!r}, not a count")
    elif not (isinstance(value, str | float | None) or (type(value) is int and abs(value) < 2**63)):
        raise ValueError(f"{metric.name} is neither a number nor a text")
    return value
