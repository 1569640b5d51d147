"""Numbers read from the papers' tables, one a row."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache

from feddg_bench.registry import shipped
from feddg_bench.results import ScenarioRecord


@dataclass(frozen=True)
class Published:
    """One published number.

    Attributes:
        value: In the paper's unit, mostly percent.
        source: Paper and table, such as ``pardon, table 1``.
    """

    value: float
    source: str


@cache
def _rows() -> tuple[dict[str, str], ...]:
    rows: list[dict[str, str]] = []
    for name in ("pardon", "fisc", "fedccrl", "ppdg"):  # the later version of a paper first
        path = shipped("published", "results/published") / f"{name}.csv"
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
    for row in _rows():
        if (
            (row["method"], row["dataset"], row["protocol"]) == (method, dataset, protocol)
            and (row["split"], row["domain"], row["metric"]) == (split, domain, "accuracy")
            and (not row["train_domains"] or set(row["train_domains"].split("+")) == train)
            and row["setting"] in ("", "N=6")  # FedCCRL's main table names its six clients
        ):
            return Published(float(row["value"]), f"{row['paper']}, table {row['table']}")
    return None
