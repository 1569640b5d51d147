"""The command ``feddg-bench report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddg_bench.cli.options import Filters, Folders, record_folders
from feddg_bench.common.files import write_whole
from feddg_bench.common.garbage import no_collection
from feddg_bench.common.terminal import say
from feddg_bench.records.runs import read_runs

_Out = Annotated[Path | None, typer.Option(help="File to write; default RESULTS/report.html.")]
Figures = Annotated[
    bool, typer.Option("--figures/--no-figures", help="Include the pictures of RESULTS/figures.")
]


def report_command(
    results: Folders = None, out: _Out = None, filters: Filters = None, with_figures: Figures = True
) -> None:
    """Make one HTML page of all records. It has leaderboards, runs, curves, tables and figures.

    The page opens in any browser, from disk or a server, and loads nothing from elsewhere.
    """
    from feddg_bench.analysis.report.gather import gather
    from feddg_bench.analysis.report.page import figures, render
    from feddg_bench.analysis.tables.describe import read_filter

    where = read_filter(filters or ())
    folders, sources = record_folders(results)
    with no_collection():
        data = gather(read_runs(folders), where)
    shown = figures(folders[0] / "figures") if with_figures else []
    page = render(data, shown).encode()
    path = out or folders[0] / "report.html"
    write_whole(path, page)
    say(
        f"{len(data['runs'])} runs, {len(data['tables'])} tables, {len(shown)} figures; "
        f"written to {path} ({len(page) / 1e6:.1f} MB), from {sources}"
    )
