"""Records as pandas tables: `read_frame` with a row per run, `load_records` with one per value.

Tables, claims, figures and the report read the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import full_key
from feddg_bench.records.measured import ABSENT
from feddg_bench.records.runs import RecordedRun, read_runs
from feddg_bench.records.sources import asked_folders

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "key": "of settings and version; no two rows share it",
    "method": "its name",
    "version": "version of the method",
    "dataset": "name of the data set",
    "label": "name of a user's own data set; empty for any other",
    "protocol": "its name",
    "scenario": "its name",
    "train": "training domains joined by `+`, in alphabetical order: the unit of replication",
    "val": "second unseen domain, `None` if there is none",
    "test": "test domain",
    "seed": "seed",
    "recipe": "name of the recipe",
    "changed": "whether tuning chose other settings than the recipe's",
    "run": "the run with its settings and measurements, a `RecordedRun`",
}
"""Columns of `run_frame` and their content."""
_OF_RUN = ("key", "method", "dataset", "protocol", "scenario", "seed", "recipe")


def load_records(
    results: str | Path | Sequence[str | Path] | None = None,
    settings: str | Sequence[str] | bool = (),
    *,
    rounds: Literal["all", "last"] = "all",
) -> pd.DataFrame:
    """Return all measurements of the runs in results folders, one row per value.

    Args:
        results: One or several folders; by default ``runs`` if it exists, else ``results``.
        settings: Settings to show, one or several, by short or dotted key; ``True`` for all in
            which runs differ.
        rounds: ``all`` evaluated rounds, or the ``last`` one of each run.

    Returns:
        Columns ``key``, ``method``, ``dataset``, ``protocol``, ``scenario``, ``seed``, ``recipe``,
        ``round``, ``split``, ``domain`` (``all`` is the whole split; in splits of clients, it is a
        client), ``metric`` and ``value``, and
        one per setting, named by its dotted key, with missing values for runs that lack it. Shares
        are in [0, 1]; the metric ``images`` is the number of images measured. Texts are
        categorical, ``seed`` and ``round`` int64, ``value`` float64, settings that are numbers
        int64 or float64. ``groupby`` and ``pivot_table`` return only combinations that occur, as
        with ``observed=True``.

    Raises:
        DataError: If a folder does not exist.
        SettingsError: If a setting does not exist, or ``rounds`` has another value.
    """
    import pandas as pd

    if rounds not in ("all", "last"):
        raise SettingsError(f"rounds: {rounds!r} cannot be read; expected 'all' or 'last'")
    runs = read_runs(asked_folders(results))
    frame = _with_settings(runs, settings)
    columns: dict[tuple[str, str, str], int] = {}
    parts = []
    for position in reversed(range(len(runs))):
        table = runs.pop().table  # frees the run's memory
        first = len(table.rounds) - 1 if rounds == "last" else 0
        numbers = table.numbers[first:]
        places = np.array([columns.setdefault(c, len(columns)) for c in table.columns], np.int32)
        there = numbers != ABSENT
        at, column = np.nonzero(there)
        parts.append(
            (
                np.full(len(at), position, np.int32),
                np.array(table.rounds[first:], np.int64)[at],
                places[column],
                numbers[there],
            )
        )
    empty = [np.empty(0, dtype) for dtype in (np.int32, np.int64, np.int32, np.float64)]
    run_of, round_of, column_of, values = map(
        np.concatenate, zip(empty, *reversed(parts), strict=True)
    )
    del parts
    whole = frame.take(run_of)
    whole.index = pd.RangeIndex(len(whole))
    names = pd.DataFrame(list(columns), columns=["split", "domain", "metric"]).astype("category")
    measured = {
        "round": round_of,
        **{name: names[name].array.take(column_of) for name in names},
        "value": values,
    }
    for place, (name, value) in enumerate(measured.items(), len(_OF_RUN)):
        whole.insert(place, name, value)
    return whole


def read_frame(results: Path | Sequence[Path]) -> pd.DataFrame:
    """Return the runs of results folders as `run_frame` does, in the order of their keys.

    Raises:
        DataError: If a folder does not exist.
    """
    return run_frame(read_runs(results))


def run_frame(runs: Sequence[RecordedRun]) -> pd.DataFrame:
    """Return one row per run with the columns of `COLUMNS`."""
    import pandas as pd

    values = {name: [getattr(run, name) for run in runs] for name in COLUMNS if name != "run"}
    values["label"] = [name or "" for name in values["label"]]
    frame = pd.DataFrame({**values, "run": runs}, columns=[*COLUMNS], dtype=object)
    return frame.astype({"version": "int64", "seed": "int64", "changed": bool})


def runs_where(frame: pd.DataFrame, wanted: Callable[[RecordedRun], bool]) -> pd.DataFrame:
    """Return the rows of a `run_frame` whose runs are wanted."""
    return frame[np.array([wanted(run) for run in frame["run"]], bool)]


def _with_settings(
    runs: Sequence[RecordedRun], settings: str | Sequence[str] | bool = ()
) -> pd.DataFrame:
    """Return one row per run: the columns of `load_records` that are constant within a run.

    Raises:
        SettingsError: If a setting does not exist.
    """
    if isinstance(settings, bool):
        every = sorted({key for run in runs for key in run.settings}) if settings else []
        keys = [key for key in every if len({repr(run.settings.get(key)) for run in runs}) > 1]
    else:
        asked = [settings] if isinstance(settings, str) else settings
        if not isinstance(asked, Iterable) or not all(isinstance(key, str) for key in asked):
            raise SettingsError(f"settings: {settings!r} cannot be read; expected keys, or True")
        keys = [full_key(key) for key in asked]
    rows = [(*attrgetter(*_OF_RUN)(run), *map(run.settings.get, keys)) for run in runs]
    frame = _table()(rows, columns=[*_OF_RUN, *keys]).astype({"seed": "int64"})
    texts = frame.select_dtypes(exclude=["number", "bool"]).columns
    return frame.astype(dict.fromkeys(texts, "category"))


@cache
def _table() -> type[pd.DataFrame]:
    """Return a class of tables without the combinations of categories that do not occur.

    pandas before 3.0 shows all of them, which are billions for several columns.
    """
    import pandas as pd

    class Records(pd.DataFrame):  # type: ignore[misc]
        @property
        def _constructor(self) -> type[pd.DataFrame]:
            return Records

        def groupby(self, *args: Any, observed: bool = True, **more: Any) -> Any:
            return super().groupby(*args, observed=observed, **more)

        def pivot_table(self, *args: Any, observed: bool = True, **more: Any) -> Any:
            return super().pivot_table(*args, observed=observed, **more)

    return Records
