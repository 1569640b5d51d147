"""Records as a table of pandas: one row a value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddg_bench.records.runs import read_runs
from feddg_bench.records.sources import default_folders

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    *("key", "method", "dataset", "protocol", "scenario", "seed", "recipe"),
    *("round", "split", "domain", "metric", "value"),
)


def load_records(results: str | Path | Sequence[str | Path] | None = None) -> pd.DataFrame:
    """Return everything that was measured in the runs of results folders, one row a value.

    Args:
        results: A folder, or several; ``runs`` if it is there, else ``results``.

    Returns:
        A table with the columns `COLUMNS`: of every evaluated round, split and domain each metric,
        shares in [0, 1], and ``images``, how many there were. The domain ``all`` is a whole split.

    Raises:
        DataError: If a folder is not there.
    """
    import pandas as pd

    folders = [results] if isinstance(results, str | Path) else results or default_folders()
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for run in read_runs([Path(folder) for folder in folders]):
        places = [
            (number, split, domain, metric, value)
            for number, evaluation in run.measured
            for split, parts in evaluation.items()
            for domain, measured in parts.items()
            for metric, value in measured.items()
        ]
        for name in COLUMNS[:7]:
            columns[name] += [getattr(run, name)] * len(places)
        for name, values in zip(COLUMNS[7:], zip(*places, strict=True), strict=False):
            columns[name] += values
    return pd.DataFrame(columns).astype({"seed": "int64", "round": "int64", "value": "float64"})
