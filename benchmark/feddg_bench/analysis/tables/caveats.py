"""Footnotes on rows: results at chance level, and results that may mislead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

from feddg_bench.common.errors import FeddgError
from feddg_bench.plugins import load_dataset
from feddg_bench.records.record import FEW
from feddg_bench.records.rules import one_class_splits
from feddg_bench.records.runs import RecordedRun

NEAR = 0.05
"""A row is at chance below this share of the range from guessing to perfect accuracy."""


def caveats(runs: Sequence[RecordedRun], accuracy: float | None) -> Iterator[str]:
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
