"""Messages on standard error; rich is not needed."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap

from feddg_bench.common.errors import printable


def tell(text: str) -> None:
    """Print a message on standard error."""
    print(wrapped(printable(text)), file=sys.stderr, flush=True)  # noqa: T201


def wrapped(line: str) -> str:
    """Return a message, in a terminal with line breaks between words; paths stay whole.

    Elsewhere, such as in a log, a message is one line.
    """
    if not sys.stderr.isatty():
        return line
    width = max(20, shutil.get_terminal_size().columns)
    return textwrap.fill(
        line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


class Notices(logging.Handler):
    """Prints warnings as messages."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning."""
        tell(record.getMessage())
