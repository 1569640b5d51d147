"""Run the benchmarks and write their table: ``python -m tests.benchmarks [NAME ...]``.

Without names, all benchmarks run and ``results/benchmarks.md`` is written. With names, or parts of
names of benchmarks or files, rows are only printed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from feddg_bench.common.portable import describe_cpu
from tests.benchmarks.rows import ALL, Row

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "results" / "benchmarks.md"
HEAD = """# Benchmarks of speed and memory

Written by `make bench`. CPU: {cpu}, one thread, PyTorch {torch}. Unless stated otherwise, numbers
are ratios of CPU time, measured alternately in one process on random images and weights. "PACS" is
the setup of recipe `quick`: MobileNetV2 with frozen batch normalisation, 128 px, batches of 32, 57
images per client.

{first}

## All measurements
"""
COLUMNS = "| measurement | target | measured | remark |\n| --- | --- | --- | --- |"

FIRST = (
    "`run` with one round, over PyTorch's import",
    "a round of 50 x 5 small steps, over a plain PyTorch loop",
    "a round of 50 x 5 small steps, over pfl-research 0.6",
    "a round of Digits4 `quick`, over a plain loop",
    "training, folded",
    "a round of copa",
    "a sweep of PACS, recipe laptop",
    "memory of a worker, fedavg, folded",
    "memory of a run with two workers, pardon",
    "memory of 2,000 clients over that of 20",
)
"""Beginnings of the ten rows that the page shows first, in this order: start, rounds, a sweep,
memory and scale."""


def main() -> None:
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        importlib.import_module(f"tests.benchmarks.{path.stem}")
    if sys.argv[1:2] == ["--rows"]:
        print(json.dumps(list(ALL[sys.argv[2]]())))
        return
    asked = sys.argv[1:]
    chosen = [n for n in ALL if not asked or any(a in f"{ALL[n].__module__} {n}" for a in asked)]
    if not chosen:
        print(f"no benchmark has {' or '.join(asked)} in its name: {', '.join(ALL)}")
        sys.exit(2)
    rows: list[Row] = []
    parts: list[str] = []
    for name in chosen:
        started = time.monotonic()
        command = [sys.executable, "-m", "tests.benchmarks", "--rows", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        mine = [Row(*values) for values in json.loads(done.stdout.splitlines()[-1])]
        how = " ".join((ALL[name].__doc__ or "").split())
        parts.append(f"### {name.replace('_', ' ').capitalize()}\n\n{how}\n\n{table(mine)}\n")
        print(parts[-1], flush=True)
        rows += mine
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    if not asked:
        import torch

        version = torch.__version__.partition("+")[0]
        first = [next(row for row in rows if row.what.startswith(start)) for start in FIRST]
        head = HEAD.format(cpu=describe_cpu(), torch=version, first=table(first))
        TABLE.write_text("\n".join([head, *parts]))


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table."""
    return "\n".join([COLUMNS, *map(line, rows)])


def missed(row: Row) -> bool:
    """Return whether a number misses its target."""
    if isinstance(row.measured, str):
        return False
    above = row.most is not None and row.measured > row.most
    return above or (row.least is not None and row.measured < row.least)


def line(row: Row) -> str:
    """Return a row of the table; a missed target is marked."""
    target = "-"
    measured = row.measured if isinstance(row.measured, str) else f"{number(row.measured)}"
    for sign, bound in (("at most", row.most), ("at least", row.least)):
        if bound is not None:
            target = f"{sign} {number(bound)}{row.unit}"
            if isinstance(row.measured, float | int):
                measured += row.unit + (", missed" if missed(row) else "")
    if target == "-" and not isinstance(row.measured, str):
        measured += row.unit
    return f"| {row.what} | {target} | {measured} | {row.why} |"


def number(value: float) -> str:
    """Return a number with its meaningful digits."""
    return (
        f"{value:.3f}"
        if abs(value) < 10
        else f"{value:.1f}"
        if abs(value) < 100
        else f"{value:,.0f}"
    )


if __name__ == "__main__":
    main()
