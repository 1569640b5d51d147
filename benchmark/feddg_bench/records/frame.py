"""Records as a pandas table, one row per value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import full_key
from feddg_bench.records.runs import read_runs
from feddg_bench.records.sources import asked_folders

if TYPE_CHECKING:
    import pandas as pd

_OF_RUN = ("key", "method", "dataset", "protocol", "scenario", "seed", "recipe")


def load_records(
    results: str | Path | Sequence[str | Path] | None = None,
    settings: str | Sequence[str] | bool = (),
) -> pd.DataFrame:
    """Return everything that was measured in the runs of results folders, one row per value.

    Args:
        results: A folder, or several; ``runs`` if it is there, else ``results``.
        settings: Settings to show, one or several, by short or dotted key; ``True`` for all in
            which runs differ.

    Returns:
        Columns ``key``, ``method``, ``dataset``, ``protocol``, ``scenario``, ``seed``, ``recipe``,
        ``round``, ``split``, ``domain`` (``all`` is the whole split), ``metric`` and ``value``, and
        one by its dotted key for each setting, which is None where a run has no such setting.
        Shares are in [0, 1]; the metric ``images`` is how many images were measured.

    Raises:
        DataError: If a folder is not there.
        SettingsError: If there is no such setting.
    """
    import pandas as pd

    runs = read_runs(asked_folders(results))
    if isinstance(settings, bool):
        every = sorted({key for run in runs for key in run.settings}) if settings else []
        keys = [key for key in every if len({repr(run.settings.get(key)) for run in runs}) > 1]
    else:
        asked = [settings] if isinstance(settings, str) else settings
        if not isinstance(asked, Iterable) or not all(isinstance(key, str) for key in asked):
            raise SettingsError(f"settings: {settings!r} cannot be read; expected keys, or True")
        keys = [full_key(key) for key in asked]
    rows = [
        (
            *attrgetter(*_OF_RUN)(run),
            *(number, split, domain, metric, value),
            *map(run.settings.get, keys),
        )
        for run in runs
        for number, evaluation in run.measured
        for split, parts in evaluation.items()
        for domain, measured in parts.items()
        for metric, value in measured.items()
        if isinstance(value, int | float)
    ]
    columns = [*_OF_RUN, "round", "split", "domain", "metric", "value", *keys]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"seed": "int64", "round": "int64", "value": "float64"})
