"""The command ``feddg-bench tables``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from feddg_bench.cli.options import Filters, Folders, Shown, command, record_folders
from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.common.garbage import no_collection
from feddg_bench.common.terminal import say
from feddg_bench.config.reading import listed, read_names
from feddg_bench.extensions import extensions
from feddg_bench.records.runs import read_runs

_DOCUMENTS = {name: text for each in extensions() for name, text in each.documents.items()}
TableNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...",
        help="`all` (default), `generic` (one for each data set, protocol and recipe with runs), "
        "a paper's table such as pardon-1, a YAML file that describes one, "
        f"{''.join(f'`{name}`: {text}, ' for name, text in _DOCUMENTS.items())}or `claims`: what "
        "papers claim, and whether it holds in these records.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder to write to; default RESULTS/tables.")]
_Formats = Annotated[str, typer.Option("--format", help="Comma-separated: md, tex, csv.")]
Rows = Annotated[
    str | None,
    typer.Option(
        metavar="METHODS",
        help="Make one table of these methods, separated by commas, in place of named ones.",
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD",
        help="With --rows: a column for each scenario (default), dataset, or value of a setting "
        "such as lambda, N or K.",
    ),
]
_APART = ("claims", *_DOCUMENTS)
"""Names that stand for more than a table."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TablesCommand(Shown):
    """Make tables from records. Papers' tables have published numbers under ours.

    A table shows one setup, a recipe with its own or with tuned settings: the paper's, or else the
    one with the most runs. NAME.notes.md says which runs its numbers come from, what was varied,
    and which command would fill what is missing. With all, tables without a number of ours are left
    out, and so are the leaderboards of all but one setup; naming one writes it all the same.
    """

    tables: TableNames = None
    results: Folders = None
    out: Out = None
    formats: _Formats = "md,tex,csv"
    rows: Rows = None
    columns: Columns = None

    def __call__(self) -> None:
        """Run the command."""
        from feddg_bench.analysis.claims import claims, claims_text, tally
        from feddg_bench.analysis.tables.make import TableOptions, make_table, make_tables
        from feddg_bench.analysis.tables.writers import WRITERS, latex_document

        endings = read_names("format", self.formats, WRITERS)
        folders, sources = record_folders(self.results)
        own = any(
            given is not None for given in (self.rows, self.columns, self.dataset, self.protocol)
        )
        if own and self.tables:
            raise SettingsError(
                f"--rows, --columns, --dataset and --protocol make a table of their own; leave "
                f"out {self.tables[0]!r}, or them"
            )
        names = [] if own else self.tables or ["all"]
        chosen = TableOptions.of(**{f.name: getattr(self, f.name) for f in fields(Shown)})
        with no_collection():
            if own:
                made = make_table(
                    listed(self.rows or ""), self.columns or "scenario", folders, chosen
                )
            else:
                described = [name for name in names if name not in _APART]
                made = make_tables(described, folders, chosen, also=_APART)
            grids, runs, left = made
            judged = list(claims(runs)) if {"all", "claims"} & {*names} else None
        folder = self.out or folders[0] / "tables"
        written: list[str] = []
        for grid in grids:
            filled, cells = grid.filled()
            wanted = filled or "all" not in names or grid.name in names
            note = "" if wanted else f": no file; `tables {grid.name}` lists the runs to make"
            say(f"{grid.name}: {grid.title} ({filled} of {cells} cells filled{note})")
            if wanted:
                written.append(grid.name)
                for ending, write in (pair for form in endings for pair in WRITERS[form].items()):
                    text = write(grid).encode()
                    write_whole(folder / f"{grid.name}.{ending}", text, sync=False)
        if own:
            say(WRITERS["md"]["md"](grids[0]))
        if left:
            say(f"not written, as another setup has more runs: {', '.join(left)} (tables generic)")
        if judged is not None:
            write_whole(
                (self.out or folders[0]) / "claims.md", claims_text(judged).encode(), sync=False
            )
            say(f"claims: {tally(judged)}")
        for extension in extensions():
            for name in [name for name in extension.documents if {"all", name} & {*names}]:
                document = extension.make_document(name, folders, runs, anyway=name in names)
                if document is not None:
                    for ending, content in document.texts.items():
                        if ending.rpartition(".")[2] in endings:
                            write_whole(folder / f"{name}.{ending}", content.encode(), sync=False)
                    say(document.summary)
        if written and "tex" in endings:
            there = [] if "all" in names else sorted(path.stem for path in folder.glob("*.tex"))
            whole = latex_document([*written, *(n for n in there if n not in {*written, "tables"})])
            write_whole(folder / "tables.tex", whole.encode(), sync=False)
        where = f"written to {folder}: {', '.join(endings)}" if written else "no table has a run"
        if {*names} == {"claims"}:
            where = f"written to {(self.out or folders[0]) / 'claims.md'}"
        elif not written and (apart := [name for name in _DOCUMENTS if name in names]):
            where = f"written to {folder / apart[0]}: md, csv"
        say(f"{len(runs)} runs of {sources}; {where}")


tables_command = command(TablesCommand)


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
