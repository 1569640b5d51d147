"""Numbers read from the papers' tables, one per row."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import shipped

PAPERS = ("pardon", "fisc", "fedccrl", "ppdg")
"""Files of published numbers, the later version of a paper first."""


@dataclass(frozen=True)
class Published:
    """One published number."""

    value: float  # in the paper's unit, mostly percent
    source: str  # paper and table, such as `pardon, table 1`
    # For an average that differs from the mean of its columns: that mean.
    wrong_mean: float | None = None
    # the row in the paper's file, by column
    row: Mapping[str, str] = field(default_factory=dict, repr=False)


@cache
def published_numbers() -> tuple[Published, ...]:
    """Return all numbers, in the order of `PAPERS` and of their files.

    An average is a row whose domain is ``AVG``, whose split is ``average``, or whose setting ends
    in ``=AVG``; its columns are the rows that agree with it otherwise. It is wrong if it differs
    from their mean by more than the rounding of both explains, one unit of the last digit.
    """
    rows: list[dict[str, str]] = []
    for name in PAPERS:
        path = shipped("results/published") / f"{name}.csv"
        with path.open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    columns: dict[tuple[str, ...], list[float]] = {}
    digits: dict[tuple[str, str], int] = {}
    for row in rows:
        table = (row["paper"], row["table"])
        digits[table] = max(digits.get(table, 0), len(row["value"].partition(".")[2]))
        if _average(row) is None:
            for name in ("domain", "split", "setting"):
                columns.setdefault(_others(row, name), []).append(float(row["value"]))
    found = []
    for row in rows:
        over = _average(row)
        value, source = float(row["value"]), f"{row['paper']}, table {row['table']}"
        values = columns.get(_others(row, over), [value]) if over else [value]
        mean = fmean(values)
        wrong = abs(value - mean) > 10.0 ** -digits[row["paper"], row["table"]] + 1e-9
        found.append(Published(value, source, mean if wrong else None, row))
    return tuple(found)


def _average(row: Mapping[str, str]) -> str | None:
    """Return the column of the file that a row averages over, if it is an average."""
    if row["domain"] == "AVG":
        return "domain"
    if row["split"] == "average":
        return "split"
    return "setting" if row["setting"].endswith("=AVG") else None


def _others(row: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the values that an average over the column ``name`` shares with its rows."""
    free = {name, "train_domains", "value"}
    return (name, *(value for column, value in row.items() if column not in free))


@cache
def _by(*columns: str) -> dict[tuple[str, ...], list[Published]]:
    found: dict[tuple[str, ...], list[Published]] = {}
    for number in published_numbers():
        found.setdefault(tuple(number.row[name] for name in columns), []).append(number)
    return found


def published_accuracy(
    method: str,
    dataset: str,
    protocol: str,
    train: Collection[str],
    domain: str | None,
    split: str,
) -> Published | None:
    """Return the published accuracy on a split's held-out domain, in percent, if there is one.

    Only main results count: rows of ablations and sweeps carry a setting.
    """
    wanted = (split, domain, "accuracy")
    for number in _by("method", "dataset", "protocol").get((method, dataset, protocol), ()):
        row, trained = number.row, number.row["train_domains"]
        if (
            (row["split"], row["domain"], row["metric"]) == wanted
            and row["setting"] in ("", "N=6")  # FedCCRL's main table names its six clients
            and (not trained or {*trained.split("+")} == {*train})
        ):
            return number
    return None


def published_number(paper: str, table: str, where: Mapping[str, str]) -> Published | None:
    """Return a number from a paper's table, if there is one.

    The paper is one of `PAPERS`; ``where`` maps columns of the file to their required text.

    Raises:
        SettingsError: If a column is unknown, or several numbers fit.
    """
    columns = published_numbers()[0].row
    if strange := sorted(set(where) - set(columns)):
        raise SettingsError(
            f"published numbers have no column {strange[0]!r}; they have {', '.join(columns)}"
        )
    numbers = _by("paper", "table").get((paper, table), ())
    found = [n for n in numbers if all(n.row[name] == text for name, text in where.items())]
    if len(found) > 1:
        raise SettingsError(
            f"{len(found)} numbers of {paper}, table {table} fit "
            f"{', '.join(f'{k} {v!r}' for k, v in where.items())}; say more under `published`"
        )
    return found[0] if found else None
