"""Setups: the runs that a table may put beside each other.

A setup is a recipe, with its own settings or with tuned ones. A table shows one setup, and in each
row the runs that depart least from what the recipe usually sets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feddg_bench.analysis.tables.frames import departing
from feddg_bench.records.runs import RecordedRun
from feddg_bench.records.variants import SignedRuns, signed


@dataclass(frozen=True)
class Setup:
    """Runs of one recipe."""

    recipe: str
    tuned: bool  # whether their settings were tuned
    runs: tuple[RecordedRun, ...]

    @property
    def label(self) -> str:
        """The recipe's name, with `, tuned` if its settings were tuned."""
        return self.recipe + ", tuned" * self.tuned


def setups(runs: Iterable[RecordedRun]) -> list[Setup]:
    """Return the setups among runs, by recipe.

    A run for which tuning chose the recipe's own settings may be in both of its recipe.
    """
    recipes: dict[str, list[RecordedRun]] = {}
    for run in runs:
        recipes.setdefault(run.recipe, []).append(run)
    found = []
    for recipe, members in sorted(recipes.items()):
        plain = tuple(run for run in members if not run.changed)
        if len(plain) == len(members) or not all(run.tuned for run in plain):
            found.append(Setup(recipe, False, plain))
        if len(plain) < len(members):
            found.append(Setup(recipe, True, tuple(run for run in members if run.tuned)))
    return found


def least_departing(
    runs: Sequence[RecordedRun], where: Mapping[str, Any], free: Collection[str] = ()
) -> list[RecordedRun]:
    """Return the runs of each data set that depart least from what their recipe usually sets.

    They agree in all settings but those of ``free``. Tuned settings and those that the row asks
    for, ``where``, are no departures. Of equal ones, the later version of a method is taken, then
    the one with more runs.
    """
    by_dataset: dict[str, list[RecordedRun]] = {}
    for run in runs:
        by_dataset.setdefault(run.dataset, []).append(run)

    def rank(entry: SignedRuns) -> tuple[int, int, int, str]:
        first = entry.runs[0]
        away = departing(first, {*where, *free})
        return len(away), -first.version, -len(entry.runs), repr(sorted(first.settings.items()))

    return [run for mine in by_dataset.values() for run in min(signed(mine, free), key=rank).runs]
