"""``feddg-bench tables``, ``report`` and ``results``: tables, a page and files of records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from feddg_bench.cli import complete
from feddg_bench.cli.options import Filters, Folders, Shown, command, record_folders
from feddg_bench.common.errors import DataError, PluginError, SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.common.terminal import say, terminal
from feddg_bench.common.titles import counted
from feddg_bench.config.reading import listed, read_names
from feddg_bench.config.recipes import recipe_names
from feddg_bench.extensions import extensions
from feddg_bench.plugins import load_method, plugin_name
from feddg_bench.records import sources
from feddg_bench.records.checksums import SUMS, sums_faults
from feddg_bench.records.frame import read_frame
from feddg_bench.records.runs import first_of_each, no_collection, read_folder
from feddg_bench.records.store import pack_runs, unpack_runs
from feddg_bench.records.tuning import pack_ledgers, unpack_ledgers

if TYPE_CHECKING:
    from feddg_bench.records.rules import Rule

_DOCUMENTS = {name: text for each in extensions() for name, text in each.documents.items()}
TableNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...",
        help="`all` (default), `generic` (one for each data set, protocol and recipe with runs), "
        "a paper's table such as pardon-1, a YAML file that describes one, "
        f"{''.join(f'`{name}`: {text}, ' for name, text in _DOCUMENTS.items())}or `claims`: what "
        "papers claim, and whether it holds in these records.",
        autocompletion=complete.TABLE,
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder to write to; default RESULTS/tables.")]
_Formats = Annotated[str, typer.Option("--format", help="Comma-separated: md, tex, csv.")]
Rows = Annotated[
    str | None,
    typer.Option(
        metavar="METHODS",
        help="Make one table of these methods, comma-separated; default all.",
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD",
        help="Make one table with a column for each scenario, dataset, or value of a setting such "
        "as lambda, N or K.",
    ),
]
_APART = ("claims", *_DOCUMENTS)
"""Names that stand for more than a single table."""


_OF_TWO = ("results", "recipe", "filters", "select", "against")
"""Options of a comparison of two sets of runs."""
_FLAGS = {"tables": "name of a table", "formats": "--format"}
"""Other options than the names of their fields."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TablesCommand(Shown):
    """Make tables from records. Papers' tables show published numbers below measured ones.

    A table shows one setup, a recipe with its own or with tuned settings: the complete one of the
    highest rank, or else the one with the most runs. NAME.notes.md lists the runs behind the
    numbers, the varied settings, and commands that fill missing cells. With all, tables without a
    measured number are left out unless they are named. Of several setups, those with the most runs
    and with the highest accuracy on id_test have a leaderboard.
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
        from feddg_bench.cli.display import print_grid
        from feddg_bench.records.metrics import METRICS

        endings = read_names("format", self.formats, WRITERS)
        folders, sources = record_folders(self.results)
        asked = self.against or ""
        if "/" in asked or asked in recipe_names() or (asked and Path(asked).is_dir()):
            idle = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
            if idle := [_FLAGS.get(n, f"--{n}") for n in idle if n not in _OF_TWO]:
                raise SettingsError(
                    f"--against {asked} compares two sets of runs and takes no "
                    f"{' and no '.join(idle)}: choose the runs by --recipe, --filter and --select"
                )
            self._compare(folders, sources, asked)
            return
        if asked:
            try:
                plugin_name("method", asked)
            except SettingsError as error:
                raise SettingsError(
                    f"--against {asked} names no folder and no recipe, and it is an {error}"
                ) from error
        own = any(
            given is not None for given in (self.rows, self.columns, self.dataset, self.protocol)
        )
        if own and self.tables:
            raise SettingsError(
                f"--rows, --columns, --dataset and --protocol make a table of their own: leave "
                f"out {self.tables[0]!r}, or them, or write several --rows as fedavg,pardon"
            )
        names = [] if own else self.tables or ["all"]
        chosen = TableOptions.of(**{f.name: getattr(self, f.name) for f in fields(Shown)})
        with no_collection():
            if own:
                rows = listed(self.rows) if self.rows else []
                made = make_table(rows, self.columns or "scenario", folders, chosen)
            else:
                described = [name for name in names if name not in _APART]
                made = make_tables(described, folders, chosen, also=_APART)
            grids, runs, left, varied = made
            judged = claims(runs) if {"all", "claims"} & {*names} else None
        folder = self.out or folders[0] / "tables"
        wanted = [
            grid for grid in grids if "all" not in names or grid.filled()[0] or grid.name in names
        ]
        written = [grid.name for grid in wanted]
        empty = [grid.name for grid in grids if grid.name not in written]
        for grid in wanted:
            if few := len(wanted) <= _FEW:
                print_grid(grid, "method")
            filled, cells = grid.filled()
            title = "" if few else f"{grid.title}, "
            say(f"{grid.name}: {title}{filled} of {counted(cells, 'cell')} filled" + "\n" * few)
            for ending, write in (pair for form in endings for pair in WRITERS[form].items()):
                text = write(grid).encode()
                write_whole(folder / f"{grid.name}.{ending}", text, sync=False)
        if chosen.metric and len(runs) and not any(grid.filled()[0] for grid in grids):
            say(f"no run has measured {chosen.metric}{METRICS[chosen.metric].remedy}")
        if empty and len(runs):
            others = counted(len(empty), "other table" if written else "table")
            have = "has" if len(empty) == 1 else "have"
            say(f"{others} {have} no runs; see `feddg-bench tables {empty[0]}`")
        if left:
            say(
                f"not written, as other setups have more runs, and better trained ones: "
                f"{', '.join(left)} (tables generic)"
            )
        if varied:
            have = "has" if varied == 1 else "have"
            say(f"{counted(varied, 'run')} {have} other settings; --variants shows them, too")
        paths = []
        tested = judged and any(claim.comparison for claim in judged)
        if judged and len(runs) and ("claims" in names or tested):
            path = (self.out or folders[0]) / "claims.md"
            write_whole(path, claims_text(judged).encode(), sync=False)
            terminal().print(tally(judged), highlight=False)
            paths.append([f"{path}"])
        for extension in extensions():
            for name in [name for name in extension.documents if {"all", name} & {*names}]:
                document = extension.make_document(name, folders, runs, anyway=name in names)
                if document is not None:
                    for ending, content in document.texts.items():
                        if ending.rpartition(".")[2] in endings:
                            write_whole(folder / f"{name}.{ending}", content.encode(), sync=False)
                    paths.append(_files(folder, [name], endings))
                    say(document.summary)
        if written and "tex" in endings:
            there = [] if "all" in names else sorted(path.stem for path in folder.glob("*.tex"))
            whole = latex_document([*written, *(n for n in there if n not in {*written, "tables"})])
            write_whole(folder / "tables.tex", whole.encode(), sync=False)
        if written:
            paths.insert(0, _files(folder, written, endings))
        wrote = [path for some in paths for path in some] or ["no table"]
        if not len(runs) and not paths:
            raise DataError(
                f"no record in {sources} belongs in a table: run something first, or give another "
                f"--results folder or --filter"
            )
        between = " " if len(wrote) == 1 else "\n  "
        say(f"Read {counted(len(runs), 'run')} from {sources}. Wrote{between}{between.join(wrote)}")

    def _compare(self, folders: Sequence[Path], sources: str, against: str) -> None:
        """Print the differences to the runs of another folder, or of another recipe."""
        from feddg_bench.analysis.tables.compare import differences_between
        from feddg_bench.analysis.tables.make import TableOptions
        from feddg_bench.cli.display import print_grid

        options = {f.name: getattr(self, f.name) for f in fields(Shown)}
        chosen = TableOptions.of(**options | {"against": None})
        with no_collection():
            runs = chosen.runs(folders)
            one = f"recipe {chosen.recipe}" if chosen.recipe else sources
            if against in recipe_names():
                named = one, f"recipe {against}"
                others, runs = (
                    runs[runs["recipe"] == against],
                    runs[runs["recipe"] != against],
                )
            else:
                others, named = chosen.runs([Path(against)]), (one, f"{against.rstrip('/')}/")
            if chosen.recipe:
                runs = runs[runs["recipe"] == chosen.recipe]
            grids = list(
                differences_between(runs, others, named, cast("Rule", chosen.select or "last"))
            )
        for grid in grids:
            print_grid(grid, "method")
            terminal().print("\n".join([*grid.notes, ""]), highlight=False)


_FEW = 2
"""Maximum number of tables that are printed, and whose files are named."""


def _files(folder: Path, names: Sequence[str], endings: Sequence[str]) -> list[str]:
    """Return the files of tables as a shell writes them; of many, their number and folder."""
    if len(names) > _FEW:
        return [f"{len(names)} tables to {folder}/ as {', '.join(endings)}"]
    ending = endings[0] if len(endings) == 1 else f"{{{','.join(endings)}}}"
    return [f"{folder / name}.{ending}" for name in names]


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
        data = gather(read_frame(folders), where)
        shown = figures(folders[0] / "figures") if with_figures else []
        page = render(data, shown).encode()
    path = out or folders[0] / "report.html"
    write_whole(path, page)
    content = ((data["runs"], "run"), (data["tables"], "table"), (shown, "figure"))
    words = ", ".join(counted(len(things), word) for things, word in content)
    size = f"{max(1, round(len(page) / 1e3)):,} kB"
    say(f"Read records from {sources}. Wrote {path} ({words}, {size})")


results_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, check, pack, unpack.",
)
_Where = Annotated[Path, typer.Option("--results", help="Folder of records.")]


@results_app.command("list")
def _list_command(results: Folders = None) -> None:
    """List the records by table, and those that cannot be used."""
    folders, sources = record_folders(results)
    folders_read = [read_folder(root) for root in folders]
    say(f"Records in {sources}:")
    for runs, problems in folders_read:
        tables = Counter((run.dataset, run.protocol, run.recipe, run.source.packed) for run in runs)
        for (*names, packed), count in sorted(tables.items()):
            say(f"{' '.join(names)}: {count} {'packed' if packed else 'in files'}")
        for path, reason, skipped in problems:
            say(f"{path}: {'skipped' if skipped else 'holds unknown parts'}: {reason}")


@results_app.command("check")
def _check_command(results: Folders = None) -> None:
    """Check all records, and recompute their privacy guarantees.

    It names records that cannot be used, records of one run with different contents, packed files
    that are not those of SHA256SUMS, and epsilons that do not follow from the settings.

    Exit status: 0 if every record can be trusted, 1 if one cannot, 2 if there is nothing to check.
    """
    from feddg_bench.protection.guarantee import doubt

    folders, sources = record_folders(results)
    folders_read = [read_folder(root) for root in folders]
    runs = [run for here, _ in folders_read for run in here]
    wrong = 0
    for path, reason, skipped in [problem for _, problems in folders_read for problem in problems]:
        wrong += skipped
        say(f"{path}: {'cannot be used' if skipped else 'holds unknown parts'}: {reason}")
    for path, reason in chain(*map(sums_faults, folders)):
        wrong += 1
        say(f"{path}: {reason}")
    for path, reason, _ in first_of_each(runs)[1]:
        say(f"{path}: {reason}")
    private = [run for run in runs if run.privacy and run.privacy.epsilon is not None]
    for run in private:
        try:
            fault = doubt(run.record(), load_method(run.method))
        except (SettingsError, PluginError) as error:
            say(f"{run.source.path}: the epsilon of {run.key} cannot be computed: {error}")
            continue
        if fault:
            wrong += 1
            say(f"{run.source.path}: the guarantee of {run.key} is wrong: {fault}")
    if not runs and not wrong and not any(any(root.glob(f"*/{SUMS}")) for root in folders):
        raise DataError(f"there is nothing to check in {sources}: give another --results folder")
    checked = f"{counted(len(private), 'epsilon')} checked, {counted(wrong, 'fault')}"
    say(f"{counted(len(runs), 'record')} in {sources}: {checked}")
    if wrong:
        raise typer.Exit(1)


@results_app.command("pack")
def pack_command(results: _Where = Path("runs")) -> None:
    """Pack single records into few files for git. RESULTS/records/*.jsonl.xz, one per table.

    Records of attacks go to RESULTS/attacks/*.jsonl.xz, tuning ledgers to RESULTS/tuning/*.jsonl.
    SHA256SUMS in each of these folders lets `results check` and `sha256sum -c` find damage.

    All commands read packed records just as they read single ones.
    """
    others = (sources.pack(partial(each.packables, results)) for each in extensions())
    for path in (*pack_runs(results), *chain(*others), *pack_ledgers(results)):
        say(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")


@results_app.command("unpack")
def unpack_command(results: _Where = Path("runs")) -> None:
    """Move packed records into single JSON files. RESULTS/runs/KEY.json, easy to read."""
    others = (sources.unpack(partial(each.packables, results)) for each in extensions())
    for path in (*unpack_runs(results), *chain(*others), *unpack_ledgers(results)):
        say(f"{path} is unpacked")
