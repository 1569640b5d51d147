"""Checks of metadata tables, before other code reads them, so that errors name the wrong cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from feddg_bench.common.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

Fits = Callable[["pd.Series[str]"], "pd.Series[bool]"]
"""The cells of a column as text -> which of them fit."""


@dataclass(frozen=True)
class CheckedColumn:
    """A column that a table needs.

    Attributes:
        name: Its name in the table's first line.
        expected: What a cell holds, in words.
        fits: Returns which cells fit.
        without_gaps: Whether all numbers from 0 to the largest must occur in it.
    """

    name: str
    expected: str
    fits: Fits
    without_gaps: bool = False


def whole(name: str, below: int | None = None, *, without_gaps: bool = False) -> CheckedColumn:
    """Return a column of whole numbers from 0."""
    import pandas as pd

    def fits(cells: pd.Series[str]) -> pd.Series[bool]:
        decimal = cells.str.fullmatch("[0-9]{1,15}")
        small = pd.to_numeric(cells.where(decimal)) < (below or float("inf"))
        return decimal & small

    limit = "" if below is None else f" below {below}"
    return CheckedColumn(name, f"a whole number{limit}", fits, without_gaps)


def one_of(name: str, values: Sequence[str]) -> CheckedColumn:
    """Return a column of a few known values."""
    shown = ", ".join(values) if len(values) <= 12 else f"{', '.join(values[:3])} and so on"
    return CheckedColumn(name, f"one of {shown}", lambda cells: cells.isin(values))


def matching(name: str, pattern: str, expected: str) -> CheckedColumn:
    """Return a column of text that a regular expression matches in full."""
    return CheckedColumn(name, expected, lambda cells: cells.str.fullmatch(pattern))


def time(name: str, pattern: str, form: str, expected: str) -> CheckedColumn:
    """Return a column of times.

    Args:
        name: Its name in the table's first line.
        pattern: Regular expression for the whole text.
        form: Format for ``pandas.to_datetime``, which rejects days that do not exist.
        expected: What a cell holds, in words.
    """
    import pandas as pd

    def fits(cells: pd.Series[str]) -> pd.Series[bool]:
        written = cells.str.fullmatch(pattern)
        times = pd.to_datetime(cells.where(written), format=form, errors="coerce", utc=True)
        return written & times.notna()

    return CheckedColumn(name, expected, fits)


def read_table(file: Path) -> pd.DataFrame:
    """Return the cells of a CSV file as text, including empty ones.

    Args:
        file: The table, UTF-8.

    Raises:
        DataError: If it cannot be read, or has no line after the first.
    """
    import pandas as pd

    try:
        table = pd.read_csv(file, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, pd.errors.ParserError) as error:
        what = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{file} is not a CSV file in UTF-8 ({what}); get it again") from error
    if table.empty:
        raise DataError(f"{file} has no line below its first; get it again")
    return table


def check_columns(file: Path, table: pd.DataFrame, columns: Sequence[CheckedColumn]) -> None:
    """Check that a table has the columns and that their cells fit.

    Args:
        file: File of the table, for messages.
        table: All or some of its rows, as text.
        columns: The columns that it needs; others are ignored.

    Raises:
        DataError: If not; the message names the first line and column that do not fit.
    """
    names = [column.name for column in columns]
    for name in names:
        if name not in table.columns:
            raise DataError(f"{file} has no column {name!r}; expected {', '.join(names)}")
    for column in columns:
        cells = table[column.name]
        wrong = ~column.fits(cells).fillna(value=False).astype(bool)
        if wrong.any():
            row = wrong.idxmax()
            raise DataError(
                f"{file}, line {row + 2}: {column.name} is {cells[row]!r}; "
                f"expected {column.expected}"
            )
        if column.without_gaps:
            values = {int(cell) for cell in cells.unique()}
            absent = sorted(set(range(max(values) + 1)) - values)
            if absent:
                raise DataError(
                    f"{file}: no line has {absent[0]} in the column {column.name}; expected every "
                    f"number from 0 to {max(values)}"
                )
