"""Extensions of the core by other packages: commands, figures, tables, card sections, records.

The core names no part of an extension. It queries every extension of the group
``feddg_bench.extensions``, including attacks (`feddg_attacks.extension`), and works without any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from feddg_bench.common.errors import PluginError, left_out
from feddg_bench.plugins import load_plugin, names

if TYPE_CHECKING:
    import pandas as pd

    from feddg_bench.outlines import Outline
    from feddg_bench.records.sources import Packable

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A finished table that is not a grid."""

    summary: str  # one line for the terminal
    texts: Mapping[str, str]  # text by file extension: `md`, `notes.md`, `csv`


class Extension:
    """The parts that a package adds; each is optional, and its names must not be taken.

    The help of every command loads the class, so import nothing slow at the top of its module.
    """

    figures: ClassVar[Mapping[str, str]] = {}
    """Figures of records for ``feddg-bench figures NAME``: name -> help."""
    grids: ClassVar[Sequence[str]] = ()
    """Names for ``feddg-bench tables NAME``; ``all`` includes them."""
    documents: ClassVar[Mapping[str, str]] = {}
    """The same for tables that are not grids: name -> short description."""
    commands: ClassVar[Mapping[str, str]] = {}
    """Further commands: name -> the first line of their help."""

    def command(self, name: str) -> Callable[..., None]:
        """Return one of `commands`, as Typer takes it; called when the user calls the command."""
        raise NotImplementedError

    def draw(self, figure: str, runs: pd.DataFrame, choice: Any) -> Iterable[Any]:
        """Yield the pictures of one of `figures`, or texts with the reason for a missing one.

        ``choice`` is an `analysis.figures.series.Selection`; each picture is an
        `analysis.figures.drawing.Picture`.
        """
        raise NotImplementedError

    def make_grids(self, wanted: Sequence[str], folders: Sequence[Path]) -> Sequence[Any]:
        """Return the wanted `grids`, made from results folders, as `analysis.tables.grid.Grid`."""
        raise NotImplementedError

    def make_document(
        self, name: str, folders: Sequence[Path], runs: pd.DataFrame, *, anyway: bool
    ) -> Document | None:
        """Return one of `documents`, or ``None`` if it has no records, unless ``anyway``."""
        raise NotImplementedError

    def card(self, name: str, method: Outline, folders: Sequence[Path]) -> str:
        """Return Markdown list items for *Privacy* in a method's card, or ``""``."""
        return ""

    def packables(self, root: Path) -> tuple[list[Packable], dict[Path, str]]:
        """Return the extension's own records in a results folder, and its broken packed files.

        They are the arguments of `records.sources.pack` and ``unpack``.
        """
        return [], {}


@cache
def extensions() -> tuple[Extension, ...]:
    """Return all extensions; one that cannot be imported is left out with a warning."""
    loaded: list[Extension] = []
    for name in names("extension"):
        try:
            loaded.append(load_plugin("extension", name, Extension)())
        except PluginError as error:
            logger.warning(left_out(f"the extension {name}", error))
    return tuple(loaded)
