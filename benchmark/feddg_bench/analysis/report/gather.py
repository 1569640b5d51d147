"""Gather the data of a report as one JSON value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from feddg_bench import __version__
from feddg_bench.analysis.report.run_details import REPORTED_SPLITS, Details
from feddg_bench.analysis.report.views import table_view
from feddg_bench.analysis.tables.captions import RULE_SENTENCES
from feddg_bench.analysis.tables.describe import RunFilter, filtered, no_run
from feddg_bench.analysis.tables.generic import Frame, leaderboards, trained, varied
from feddg_bench.common.errors import DataError, FeddgError
from feddg_bench.data.protocols import TITLES
from feddg_bench.plugins import dataset_title, load_dataset, method_title
from feddg_bench.records.metrics import METRICS
from feddg_bench.records.rules import RULES
from feddg_bench.records.runs import RecordedRun

if TYPE_CHECKING:
    import pandas as pd


def gather(runs: pd.DataFrame, where: RunFilter | None = None) -> dict[str, Any]:
    """Return the data of the report's page; the same runs give the same data.

    Raises:
        DataError: If no run matches, or a record is damaged.
    """
    chosen = filtered(runs, where or {})
    shown: list[RecordedRun] = [*chosen["run"]]
    if not shown:
        if not len(runs):
            raise DataError(
                "there is no record to report: run something first, or give --results DIR"
            )
        raise DataError(no_run([*runs["run"]], where or {}))
    details = Details()
    tables = [table_view(table, details) for table in in_order(leaderboards(chosen))]
    told = {run for table in tables for row in table["rows"] for run in row["runs"]}
    keys = {details.runs[place]["key"] for place in told}
    others = (table for table in varied(chosen) if any(run.key not in keys for run in table.runs))
    measured = {view["metric"] for table in tables for view in table["views"] if view["splits"]}
    named: dict[str, set[str | None]] = {}
    for run in shown:
        named.setdefault(run.dataset, set()).add(run.label)
    labels = {dataset: len(of) == 1 for dataset, of in named.items()}  # whether all share it
    return {
        "version": __version__,
        "order": ORDER,
        "splits": list(REPORTED_SPLITS),
        "measured": [metric for metric in (*METRICS, "cost") if metric in measured],
        "names": {name: metric.title for name, metric in METRICS.items()}
        | {"cost": "bytes and seconds"},
        "rules": [[rule, RULE_SENTENCES[rule]] for rule in RULES],
        "titles": {
            "dataset": {
                run.dataset: dataset_title(run.dataset, run.label if labels[run.dataset] else None)
                for run in shown
            },
            "protocol": {run.protocol: TITLES.get(run.protocol, run.protocol) for run in shown},
            "method": {run.method: method_title(run.method) for run in shown},
        },
        "tables": tables,
        "varied": [table_view(table, details, keys) for table in others],
        "runs": details.runs,
        "setups": details.setups,
    }


ORDER = (
    "Tables come in this order: real images before synthetic ones; then the recipe whose runs have "
    "the highest mean on id_test; then the most runs."
)


def in_order(tables: Sequence[Frame]) -> list[Frame]:
    """Return leaderboards in the order that `ORDER` declares; data sets that are gone are real."""
    by_recipe: dict[tuple[str, str], list[RecordedRun]] = {}
    for table in tables:
        by_recipe.setdefault((table.runs[0].dataset, table.recipe), []).extend(table.runs)
    far = {key: trained(runs) for key, runs in by_recipe.items()}

    def place(table: Frame) -> tuple[bool, float, int]:
        dataset = table.runs[0].dataset
        return _synthetic(dataset), -far[dataset, table.recipe], -len(table.runs)

    return sorted(tables, key=place)


@cache
def _synthetic(dataset: str) -> bool:
    try:
        return load_dataset(dataset).synthetic
    except FeddgError:
        return False
