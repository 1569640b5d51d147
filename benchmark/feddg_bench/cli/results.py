"""The commands ``feddg-bench results``: what records there are, and how they are kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from feddg_bench.cli.options import Folders, record_folders
from feddg_bench.common.errors import printable
from feddg_bench.records.attacks import pack_attacks, unpack_attacks
from feddg_bench.records.runs import read_folder
from feddg_bench.records.store import pack, unpack
from feddg_bench.records.tuning import pack_ledgers, unpack_ledgers

results_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List records, pack them, unpack them."
)
_Where = Annotated[Path, typer.Option("--results", help="Folder of records.")]


@results_app.command("list")
def _list_command(results: Folders = None) -> None:
    """List the records by table, and what cannot be used."""
    folders, said = record_folders(results)
    found = [read_folder(root) for root in folders]
    _say(f"records of {said}:")
    for runs, problems in found:
        tables = Counter((run.dataset, run.protocol, run.recipe, run.source.packed) for run in runs)
        for (*names, packed), count in sorted(tables.items()):
            _say(f"{' '.join(names)}: {count} {'packed' if packed else 'in files'}")
        for path, reason, skipped in problems:
            _say(f"{path}: {'skipped' if skipped else 'holds unknown parts'}: {reason}")


@results_app.command("pack")
def pack_command(results: _Where = Path("runs")) -> None:
    """Move single records into packed files. RESULTS/records/*.jsonl.xz, one a table, few for git.

    Those of attacks go to RESULTS/attacks/*.jsonl.xz, ledgers of tuning to RESULTS/tuning/*.jsonl.

    All commands read packed records just as they read single ones.
    """
    for path in (*pack(results), *pack_attacks(results), *pack_ledgers(results)):
        _say(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")


@results_app.command("unpack")
def unpack_command(results: _Where = Path("runs")) -> None:
    """Move packed records into single JSON files. RESULTS/runs/KEY.json, easy to read."""
    for path in (*unpack(results), *unpack_attacks(results), *unpack_ledgers(results)):
        _say(f"{path} is unpacked")


def _say(line: str) -> None:
    print(printable(line))
