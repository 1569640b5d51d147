"""Measurements of a run's evaluated rounds, as stored in records and as one array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json, to_json

Evaluation = dict[str, dict[str, dict[str, float]]]
"""Split -> domain -> metric -> value, and ``images``, the number of images. The part `WHOLE` of a
split is all of it. Shares are in [0, 1]; a loss that overflowed is NaN. ``worst_group_name`` is a
text, as is ``only_class``, present if a model predicted a single class (early records lack it)."""

ABSENT = -math.inf
"""Value in `Measured.numbers` where a round lacks the column."""


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
        """Return the mean of each number that some evaluations have, and the last count of images.

        A single one keeps its texts.
        """
        if len(positions) == 1:
            return self.evaluation(positions[0])
        numbers, counts = self.numbers[positions], _counts(tuple(self.columns))
        means = numbers.sum(axis=0) / len(positions)  # `ABSENT` where one lacks the column
        means[counts] = numbers[-1, counts]
        return self._nested(means)

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
    """Return evaluations, given with their round numbers, as a table."""
    columns: dict[tuple[str, str, str], int] = {}
    rows: list[dict[tuple[str, str, str], float]] = []
    texts: list[tuple[int, str, str, str, Any]] = []
    for position, (_, evaluation) in enumerate(evaluations):
        row = {
            (split, domain, name): value
            for split, parts in evaluation.items()
            for domain, measured in parts.items()
            for name, value in measured.items()
        }
        texts += [(position, *key, value) for key, value in row.items() if isinstance(value, str)]
        rows.append({key: value for key, value in row.items() if not isinstance(value, str)})
        for key in rows[-1]:
            columns.setdefault(key, len(columns))
    table = np.full((len(rows), len(columns)), ABSENT)
    for values, row in zip(table, rows, strict=True):
        values[[columns[key] for key in row]] = [*row.values()]
    return Measured([number for number, _ in evaluations], list(columns), table, texts)
