"""Published numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from feddg_bench.analysis.tables.columns import Shown
from feddg_bench.analysis.tables.describe import Description, Where
from feddg_bench.analysis.tables.grid import Kind
from feddg_bench.analysis.tables.rows import Row
from feddg_bench.records.published import Published, published_accuracy, published_number
from feddg_bench.records.record import ScenarioRecord

PUBLISHED: tuple[Kind, ...] = ("measured", "mean", "p_value")
"""Kinds of columns that papers print."""


def of_table(description: Description, row: Row, shown: Shown) -> Published | None:
    """Return the number that a table's paper prints in a cell, if there is one.

    Method, data set, split, domain and metric are those of row and column; the description says
    what is otherwise in the file of published numbers.

    Raises:
        SettingsError: If several numbers fit.
    """
    paper, table, told = description.paper, description.table, row.spec.published
    if paper is None or table is None or told is None or shown.kind not in PUBLISHED:
        return None
    first = shown.sources[0]
    guess: Where = {"method": row.method, "metric": first.metric, "split": first.split or ""}
    if isinstance(first.where.get("dataset"), str):
        guess = {**guess, "dataset": first.where["dataset"]}
    domain = first.where.get(first.split) if first.split else None
    if shown.kind == "mean":
        guess = {**guess, "domain": "AVG"}
    elif isinstance(domain, str):
        guess = {**guess, "domain": domain}
    if shown.kind == "p_value":
        guess = {**guess, "metric": "p_value"}
    where = {**guess, **told, **shown.published}
    return published_number(paper, table, {key: str(value) for key, value in where.items()})


def of_any_paper(rows: Sequence[Row], row: Row, shown: Shown) -> Published | None:
    """Return the number of any paper that a measured column's scenario has.

    Of a mean over columns it is the mean, if all of them have one.
    """
    if shown.kind not in ("measured", "mean"):
        return None
    found: list[Published] = []
    for column in shown.sources:
        runs = [other.runs[column.number][0] for other in rows if other.runs.get(column.number)]
        if not runs or column.split not in ("val", "test") or column.metric != "accuracy":
            return None
        run = runs[0]
        scenario = ScenarioRecord(
            name=run.scenario, train=tuple(run.train.split("+")), val=run.val, test=run.test
        )
        number = published_accuracy(row.method, run.dataset, run.protocol, scenario, column.split)
        if number is None:
            return None
        found.append(number)
    mean = sum(number.value for number in found) / len(found)
    return Published(mean, "; ".join(dict.fromkeys(number.source for number in found)))
