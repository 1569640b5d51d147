"""Numbers read from the papers' tables, one a row."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import shipped
from feddg_bench.records.record import ScenarioRecord

PAPERS = ("pardon", "fisc", "fedccrl", "ppdg")
"""Files of published numbers, the later version of a paper first."""

COLUMNS = (
    "paper",
    "table",
    "dataset",
    "protocol",
    "train_domains",
    "split",
    "domain",
    "method",
    "setting",
    "metric",
    "unit",
    "value",
)


@dataclass(frozen=True)
class Published:
    """One published number.

    Attributes:
        value: In the paper's unit, mostly percent.
        source: Paper and table, such as ``pardon, table 1``.
        wrong_mean: Where this is an average: the mean of the columns it should be the average of,
            if that is another number.
    """

    value: float
    source: str
    wrong_mean: float | None = None


@dataclass(frozen=True)
class WrongAverage:
    """A published average that is not the mean of its published columns.

    Attributes:
        row: The row of the average in the file of published numbers.
        printed: The published average.
        mean: The mean of the published columns.
    """

    row: Mapping[str, str]
    printed: float
    mean: float

    def __str__(self) -> str:
        row = self.row
        where = ", ".join(
            row[name] for name in ("dataset", "split", "method", "setting") if row[name]
        )
        return f"{row['paper']}, table {row['table']}: {where}: {self.printed}, not {self.mean:.2f}"


@cache
def _main_results() -> dict[tuple[str, str, str], list[dict[str, str]]]:
    """Return the accuracies of main tables by method, data set and protocol."""
    found: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in _rows():  # FedCCRL's main table names its six clients
        if row["setting"] in ("", "N=6") and row["metric"] == "accuracy":
            found.setdefault((row["method"], row["dataset"], row["protocol"]), []).append(row)
    return found


@cache
def _rows() -> tuple[dict[str, str], ...]:
    rows: list[dict[str, str]] = []
    for name in PAPERS:
        path = shipped("results/published") / f"{name}.csv"
        with path.open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    return tuple(rows)


def published_accuracy(
    method: str, dataset: str, protocol: str, scenario: ScenarioRecord, split: str
) -> Published | None:
    """Return the published accuracy of a split's held-out domain, in percent, if there is one.

    Only main results count: rows of ablations and sweeps carry a setting.
    """
    domain = scenario.val if split == "val" else scenario.test
    train = set(scenario.train)
    for row in _main_results().get((method, dataset, protocol), ()):
        if (row["split"], row["domain"]) == (split, domain) and (
            not row["train_domains"] or set(row["train_domains"].split("+")) == train
        ):
            return Published(float(row["value"]), _source(row))
    return None


def published_number(paper: str, table: str, where: Mapping[str, str]) -> Published | None:
    """Return the number of a paper's table, if there is one.

    Args:
        paper: One of `PAPERS`.
        table: The table's number.
        where: Columns of the file -> the text that they must hold.

    Raises:
        SettingsError: If a column is unknown, or several numbers fit.
    """
    strange = sorted(set(where) - set(COLUMNS))
    if strange:
        raise SettingsError(
            f"published numbers have no column {strange[0]!r}; they have {', '.join(COLUMNS)}"
        )
    found = [
        row
        for row in _tables().get((paper, table), ())
        if all(row[name] == text for name, text in where.items())
    ]
    if not found:
        return None
    if len(found) > 1:
        raise SettingsError(
            f"{len(found)} numbers of {paper}, table {table} fit "
            f"{', '.join(f'{k} {v!r}' for k, v in where.items())}; say more under `published`"
        )
    row = found[0]
    return Published(float(row["value"]), _source(row), _wrong_means().get(id(row)))


@cache
def _tables() -> dict[tuple[str, str], list[dict[str, str]]]:
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in _rows():
        found.setdefault((row["paper"], row["table"]), []).append(row)
    return found


@cache
def _wrong_means() -> dict[int, float]:
    return {id(error.row): error.mean for error in wrong_averages()}


@cache
def wrong_averages() -> tuple[WrongAverage, ...]:
    """Return the published averages that are not the mean of their columns, beyond rounding.

    An average is a row whose domain is ``AVG``, whose split is ``average``, or whose setting ends
    in ``=AVG``; its columns agree with it in all else. Rounding of the columns and of the average
    may add up to one unit of the last digit.
    """
    columns: dict[tuple[str, ...], list[float]] = {}
    digits: dict[tuple[str, str], int] = {}
    for row in _rows():
        table = (row["paper"], row["table"])
        digits[table] = max(digits.get(table, 0), len(row["value"].partition(".")[2]))
        if _average(row) is None:
            for name in ("domain", "split", "setting"):
                columns.setdefault(_others(row, name), []).append(float(row["value"]))
    errors = []
    for row in _rows():
        over = _average(row)
        values = columns.get(_others(row, over), []) if over else []
        if not values:
            continue
        printed, mean = float(row["value"]), sum(values) / len(values)
        if abs(printed - mean) > 10.0 ** -digits[row["paper"], row["table"]] + 1e-9:
            errors.append(WrongAverage(row, printed, mean))
    return tuple(errors)


def _average(row: Mapping[str, str]) -> str | None:
    """Return over which column of the file a row is an average, if it is one."""
    if row["domain"] == "AVG":
        return "domain"
    if row["split"] == "average":
        return "split"
    return "setting" if row["setting"].endswith("=AVG") else None


def _others(row: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return what an average over a column of the file has in common with what it averages."""
    free = {name, "train_domains", "value"}
    return (name, *(row[column] for column in COLUMNS if column not in free))


def _source(row: Mapping[str, str]) -> str:
    return f"{row['paper']}, table {row['table']}"
