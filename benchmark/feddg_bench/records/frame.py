"""Records as a pandas table, one row per value."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from feddg_bench.records.runs import read_runs
from feddg_bench.records.sources import default_folders

if TYPE_CHECKING:
    import pandas as pd

_OF_RUN = ("key", "method", "dataset", "protocol", "scenario", "seed", "recipe")


def load_records(results: str | Path | Sequence[str | Path] | None = None) -> pd.DataFrame:
    """Return everything that was measured in the runs of results folders, one row per value.

    Args:
        results: A folder, or several; ``runs`` if it is there, else ``results``.

    Returns:
        Columns ``key``, ``method``, ``dataset``, ``protocol``, ``scenario``, ``seed``, ``recipe``,
        ``round``, ``split``, ``domain`` (``all`` is the whole split), ``metric`` and ``value``.
        Shares are in [0, 1]; the metric ``images`` is how many images were measured.

    Raises:
        DataError: If a folder is not there.
    """
    import pandas as pd

    folders = [results] if isinstance(results, str | Path) else results or default_folders()
    rows = [
        (*attrgetter(*_OF_RUN)(run), number, split, domain, metric, value)
        for run in read_runs([Path(folder) for folder in folders])
        for number, evaluation in run.measured
        for split, parts in evaluation.items()
        for domain, measured in parts.items()
        for metric, value in measured.items()
        if isinstance(value, int | float)
    ]
    columns = [*_OF_RUN, "round", "split", "domain", "metric", "value"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"seed": "int64", "round": "int64", "value": "float64"})
