"""Footnotes on rows: other setups, equal rows, results at chance, and those that may mislead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from feddg_bench.analysis.tables.rows import Row
from feddg_bench.analysis.tables.setups import BY_CLIENTS, FRAME, departing, is_frozen
from feddg_bench.analysis.tables.sheet import Sheet
from feddg_bench.common.errors import FeddgError
from feddg_bench.common.titles import WITHOUT_EFFECT
from feddg_bench.config.schema import LAYERS
from feddg_bench.plugins import acts_on, load_dataset
from feddg_bench.records.differences import (
    assignments,
    differences,
    setting_name,
    setting_text,
    values,
)
from feddg_bench.records.record import FEW
from feddg_bench.records.rules import one_class_splits
from feddg_bench.records.runs import RecordedRun

_RATE = "train.lr"
NEAR = 0.05
"""A row is at chance below this share of the range from guessing to perfect accuracy."""


def row_footnotes(sheet: Sheet, *, variants: bool) -> dict[Row, list[str]]:
    """Return the footnotes of each row; ``variants`` has rows for all differences of settings."""
    of_rows = (
        {} if variants else _mixed(sheet),
        _equal(sheet),
        _other_rates(sheet),
        by_one_run(sheet.rows)[0],
        _fewer_scenarios(sheet),
    )
    return {
        row: [
            *(said[row] for said in of_rows if row in said),
            *_caveats(row.members, sheet.accuracy(row)),
        ]
        for row in sheet.rows
    }


def _caveats(runs: Sequence[RecordedRun], accuracy: float | None) -> Iterator[str]:
    """Yield the caveats of a row.

    ``accuracy`` is its mean in percent, ``None`` if it is unknown or another metric is shown.
    """
    known = {classes(run.dataset) for run in runs}
    number = known.pop() if len(known) == 1 else None
    if accuracy is not None and number is not None:
        guess = 100 / number
        if accuracy < guess + NEAR * (100 - guess):
            yield f"at chance: guessing gives {guess:.2f}"
    yield from _some(runs, _one_class)
    yield from _some(
        runs, lambda run: f"{run.skipped} of {run.rounds} rounds skipped" if run.skipped else ""
    )
    yield from _some(
        runs, lambda run: f"loss not finite from round {run.lost}" if run.lost is not None else ""
    )


def few_images(counted: Iterable[Mapping[str, int]]) -> str:
    """Return a sentence about splits with few images (`DataRecord.few`) of runs; or nothing."""
    fewest: dict[str, int] = {}
    for split, number in ((s, n) for few in counted for s, n in few.items()):
        fewest[split] = min(number, fewest.get(split, number))
    if not fewest:
        return ""
    named = ", ".join(f"{split} ({number})" for split, number in sorted(fewest.items()))
    points = 100 / min(fewest.values())
    return (
        f"Fewer than {FEW} images in {named}: a single image changes the accuracy by up to "
        f"{points:.1f} points"
    )


@cache
def classes(dataset: str) -> int | None:
    """Return the number of a data set's classes; ``None`` if unknown."""
    try:
        found = load_dataset(dataset).classes
    except (FeddgError, AttributeError):
        return None
    return len(found) if isinstance(found, tuple) and found else None


@cache
def _one_class(run: RecordedRun) -> str:
    evaluation = run.evaluation("last")
    splits = one_class_splits(evaluation, classes(run.dataset)) if evaluation else ()
    return f"a single class predicted on {', '.join(splits)} after the last round" if splits else ""


def _some(runs: Sequence[RecordedRun], say: Callable[[RecordedRun], str]) -> Iterator[str]:
    """Yield the caveat of the first run that has one, and how many other runs have one."""
    found = [run for run in runs if say(run)]
    if found:
        first = min(found, key=lambda run: (run.scenario, run.seed))
        more = f", as {len(found) - 1} more of {len(runs)} runs have" if len(found) > 1 else ""
        where = f" ({first.scenario}, seed {first.seed})" if len(runs) > 1 else ""
        yield f"{say(first)}{where}{more}"


def _mixed(sheet: Sheet) -> dict[Row, str]:
    """Return the differences of rows with another setup, such as other rounds or networks.

    A value that a recipe or a method sets is not a difference, unless a run departs from it.
    """
    asked = {row: {*sheet.varied, *(row.where or {})} for row in sheet.rows}
    away = {key for row in sheet.rows for run in row.members for key in departing(run, asked[row])}
    found = {}
    for row in sheet.rows:
        tuned = {key for run in row.members if run.tuned for key in run.tuned.settings}
        keys = sorted((away & {*FRAME}) - asked[row] - tuned)
        other: dict[str, Any] = {}
        for run in row.members:
            pooled = BY_CLIENTS if run.get("partition.kind") == "pooled" else ()
            compared = [key for key in keys if key not in pooled]
            other |= values(differences(run.settings, sheet.usual[run.dataset], compared))
        if other:
            found[row] = f"with {', '.join(assignments(other))}"
    return found


def _equal(sheet: Sheet) -> dict[Row, str]:
    """Return a footnote for each row whose numbers all equal those of another row.

    These include numbers that the table does not show: the worst client can have 0 % in any run.
    The other one is the reference, or the first, if possible of a method that does not declare what
    it acts on.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in sheet.rows:
        if numbers := tuple(sorted(row.sample.items())):
            every = frozenset(run.table.numbers.tobytes() for run in row.members)
            found.setdefault((numbers, every), []).append(row)
    said = {}
    for equal in found.values():
        first = min(
            equal,
            key=lambda row: (
                row is not sheet.reference,
                any(acts_on(run.method) for run in row.members),
            ),
        )
        for row in equal:
            both = (*first.members, *row.members)
            acts = {acts_on(run.method) for run in both}
            why = " in every run"
            if "batch_norm" in acts or len({run.get("federation.bn") for run in both}) > 1:
                why = f": {WITHOUT_EFFECT['batch_norm']}"
            elif "features" in acts and not any(map(_trains_features, both)):
                why = f": {WITHOUT_EFFECT['features']}"
            if row is not first:
                said[row] = f"identical to {first.label}{why}"
    return said


def _trains_features(run: RecordedRun) -> bool:
    """Return whether a run trains layers below the classifier."""
    return not is_frozen(run.settings) or any(run.get(f"backbone.{layer}") for layer in LAYERS)


def _fewer_scenarios(sheet: Sheet) -> dict[Row, str]:
    """Return a footnote for each row that has only some of the scenarios of the reference."""
    reference = sheet.reference
    if reference is None or not sheet.comparisons:
        return {}
    theirs = {run.scenario for run in reference.members}
    both = {row: theirs & {run.scenario for run in row.members} for row in sheet.rows}
    return {
        row: f"difference over {len(common)} of {len(theirs)} scenarios"
        for row, common in both.items()
        if common and common != theirs
    }


def _other_rates(sheet: Sheet) -> dict[Row, str]:
    """Return a footnote for each row whose learning rate or optimiser is not the reference's.

    There is none where columns vary the rate, or the row's label names it.
    """
    reference = sheet.reference
    if reference is None or _RATE in sheet.varied:
        return {}
    theirs, said = _steps(reference), {}
    for row in sheet.rows:
        if all(acts_on(run.method) == "statistics" for run in row.members):
            continue
        told = {*row.variant.differences, *(row.where or {})}
        for dataset, (rates, by) in _steps(row).items():
            their_rates, their_by = theirs.get(dataset, (rates, by))
            if by != their_by and "train.optimizer" not in told:
                said[row] = (
                    f"with {by} at {rates}, {reference.label} with {their_by} at {their_rates}: "
                    f"the difference is one of optimisers, too"
                )
            elif rates != their_rates and _RATE not in told:
                said[row] = f"at {rates}, {reference.label} at {their_rates}"
    return said


def _steps(row: Row) -> dict[str, tuple[str, str]]:
    """Return the learning rates and the optimisers of a row's runs by data set."""
    found: dict[str, tuple[set[float], set[str]]] = {}
    for run in row.members:
        rates, by = found.setdefault(run.dataset, (set(), set()))
        rates.add(run.get(_RATE))
        by.add(setting_text(run.get("train.optimizer")))
    return {
        dataset: (f"lr={' and '.join(map(setting_text, sorted(rates)))}", " and ".join(sorted(by)))
        for dataset, (rates, by) in found.items()
    }


def by_one_run(rows: Sequence[Row]) -> tuple[dict[Row, str], str]:
    """Return footnotes on settings that one run chose; a single text if most rows have them.

    Such a setting may cause the difference between two rows.
    """
    keys = {row: {key for run in row.members for key in run.by_one_run} for row in rows}
    keys = {row: chosen for row, chosen in keys.items() if chosen}
    if 2 * len(keys) <= len(rows):
        return {row: _by_one_run(chosen) for row, chosen in keys.items()}, ""
    return {}, _by_one_run({key for chosen in keys.values() for key in chosen})


def _by_one_run(keys: Collection[str]) -> str:
    return f"{', '.join(sorted(map(setting_name, keys)))} chosen by one run"
