"""The Python face: what ``import feddg_bench as fb`` offers, in one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import Resources
from feddg_bench.runs.request import Request, Words

if TYPE_CHECKING:
    from feddg_bench.records.record import RunRecord
    from feddg_bench.runs.observer import Observer


def run(
    method: Words = Request.method,
    *,
    protocol: Words = Request.protocol,
    dataset: str = Request.dataset,
    scenario: Words | None = None,
    recipe: str | None = None,
    seeds: str | int | Sequence[int] = Request.seeds,
    settings: Mapping[str, Any] | None = None,
    results: str | Path = Resources().results,
    keep: Sequence[str] = (),
    again: bool = False,
    quiet: bool = False,
    observers: Sequence[Observer] = (),
    **resources: Any,
) -> list[RunRecord]:
    """Make runs, or take their records where they are there, and return all records.

    Args:
        method: A method, several, or ``all``.
        protocol: ``ltdo``, ``lodo`` or ``wilds``, or several.
        dataset: Name of a data set.
        scenario: Scenarios, ``all``, or ``None`` for the protocol's own.
        recipe: A recipe's name or a YAML file; ``None`` for the data set's own.
        seeds: A number of seeds counts from 0; a list names them; a text such as ``"0-2"`` too.
        settings: By short, dotted or nested key, such as ``{"rounds": 1, "hyper.mu": 0.1}``.
        results: Folder of records and checkpoints.
        keep: Global models to keep beside the record: ``"last"``, ``"best"``.
        again: Repeat runs that are recorded; old records stay beside.
        quiet: Show no progress.
        observers: Who else looks in (`feddg_bench.Observer`).
        resources: Fields of `feddg_bench.Resources`, such as ``data_root`` or ``workers``.

    Raises:
        FeddgError: In one sentence, if something is unknown, missing or does not fit.
    """
    where = validate(Resources, {"workers": 1, **resources, "results": results})
    request = Request(method, protocol, dataset, scenario, recipe, seeds, settings or {}, where)
    plans = request.plan()

    from feddg_bench.cli.progress import ConsoleReport
    from feddg_bench.runs.run import execute_all

    if quiet:
        return list(execute_all(plans, where, *observers, keep=keep, again=again))
    with ConsoleReport(len(plans)) as report:
        return list(execute_all(plans, where, report, *observers, keep=keep, again=again))
