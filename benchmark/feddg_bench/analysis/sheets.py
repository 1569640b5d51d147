"""Write CSV: numbers stay numeric, and no cell starts a spreadsheet formula."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

FORMULA = frozenset("=+-@\t\r")
"""Characters that start a spreadsheet formula."""


def csv_lines(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV below a header line; floats are rounded to six decimals.

    >>> print(csv_lines(("name", "value"), [("=1+1", -0.5), ("-0.5", None)]), end="")
    name,value
    '=1+1,-0.5
    -0.5,
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([_cell(name) for name in head])
    writer.writerows(
        [v if type(v) is str and v[:1] not in FORMULA else _cell(v) for v in row] for row in rows
    )
    return file.getvalue()


def _cell(value: Any) -> Any:
    """Return a value as a cell; text that would be a formula is prefixed with ``'``."""
    if isinstance(value, float):
        return "" if value != value else round(value, 6)
    if not isinstance(value, str) or value[:1] not in FORMULA:
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
