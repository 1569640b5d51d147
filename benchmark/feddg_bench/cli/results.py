"""The commands ``feddg-bench results``: what records there are, and how they are kept."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from feddg_bench.cli.options import Folders, record_folders
from feddg_bench.common.errors import PluginError, SettingsError
from feddg_bench.common.terminal import say
from feddg_bench.extensions import extensions
from feddg_bench.plugins import load_method
from feddg_bench.records import sources
from feddg_bench.records.runs import first_of_each, read_folder
from feddg_bench.records.store import pack_runs, unpack_runs
from feddg_bench.records.tuning import pack_ledgers, unpack_ledgers

results_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, check, pack, unpack.",
)
_Where = Annotated[Path, typer.Option("--results", help="Folder of records.")]


@results_app.command("list")
def _list_command(results: Folders = None) -> None:
    """List the records by table, and what cannot be used."""
    folders, sources = record_folders(results)
    folders_read = [read_folder(root) for root in folders]
    say(f"records of {sources}:")
    for runs, problems in folders_read:
        tables = Counter((run.dataset, run.protocol, run.recipe, run.source.packed) for run in runs)
        for (*names, packed), count in sorted(tables.items()):
            say(f"{' '.join(names)}: {count} {'packed' if packed else 'in files'}")
        for path, reason, skipped in problems:
            say(f"{path}: {'skipped' if skipped else 'holds unknown parts'}: {reason}")


@results_app.command("check")
def _check_command(results: Folders = None) -> None:
    """Check all records, and compute their guarantees of privacy again.

    It names records that cannot be used, records of one run with different contents, and epsilons
    that do not follow from the settings.

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
    say(f"{len(runs)} records of {sources}: {len(private)} epsilons checked, {wrong} faults")
    if wrong:
        raise typer.Exit(1)


@results_app.command("pack")
def pack_command(results: _Where = Path("runs")) -> None:
    """Move single records into packed files. RESULTS/records/*.jsonl.xz, one a table, few for git.

    Those of attacks go to RESULTS/attacks/*.jsonl.xz, ledgers of tuning to RESULTS/tuning/*.jsonl.

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
