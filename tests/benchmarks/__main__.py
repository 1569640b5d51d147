"""Run benchmarks and write their page: ``python -m tests.benchmarks [--anew] [NAME ...]``.

Each part writes its rows to ``build/benchmarks`` at once; once all parts are there, the page
``results/benchmarks.md`` is made of them. Without names, the parts that have no rows run, so a
stopped command goes on; ``--anew`` first removes all. With names of benchmarks, or parts of names
of benchmarks or files, these run again.
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

from feddg_bench.common.portable import cpu_flags, describe_cpu
from feddg_bench.common.titles import counted
from tests.benchmarks.gpu import section
from tests.benchmarks.rows import ALL, Row

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "results" / "benchmarks.md"
MEASURED = ROOT / "build" / "benchmarks"
HEAD = """# Benchmarks of speed and memory

Written by `make bench`. CPU: {cpu}, one thread, PyTorch {torch}. Unless stated otherwise, numbers
are ratios of CPU time, measured alternately in one process on random images and weights; the
interval is that of the median, from order statistics. "PACS" is the setup of recipe `quick`:
MobileNetV2 with frozen batch normalisation, 128 px, batches of 32, 57 images per client.

## What a user waits for
"""
COLUMNS = "| measurement | target | measured | remark |\n| --- | --- | --- | --- |"

FIRST = ("start", "recipes", "encoding", "heads", "frozen_features", "tables_and_report")
"""Parts that the page shows first, and that run first."""
WIDE = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instructions that decide which kernels PyTorch takes."""


def main() -> None:
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        importlib.import_module(f"tests.benchmarks.{path.stem}")
    flags = {word for word in sys.argv[1:] if word.startswith("--")}
    asked = [word for word in sys.argv[1:] if word not in flags]
    if "--rows" in flags:
        print(json.dumps(list(ALL[asked[0]]())))
        return
    ordered = [*FIRST, *(name for name in ALL if name not in FIRST)]
    if "--anew" in flags:
        for file in MEASURED.glob("*.json"):
            if file.stem in ALL:
                file.unlink()
    chosen = [
        name
        for name in ordered
        if any(name == a if a in ALL else a in f"{ALL[name].__module__} {name}" for a in asked)
    ]
    if asked and not chosen:
        print(f"no benchmark has {' or '.join(asked)} in its name: {', '.join(ordered)}")
        sys.exit(2)
    if not asked:
        chosen = [name for name in ordered if not (MEASURED / f"{name}.json").exists()]
    for name in chosen:
        started = time.monotonic()
        command = [sys.executable, "-m", "tests.benchmarks", "--rows", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        MEASURED.mkdir(parents=True, exist_ok=True)
        found = {"load": os.getloadavg()[0], "rows": json.loads(done.stdout.splitlines()[-1])}
        (MEASURED / f"{name}.json").write_text(json.dumps(found))
        print(part(name), flush=True)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    if lacking := [name for name in ordered if not (MEASURED / f"{name}.json").exists()]:
        print(f"{TABLE.name} is not written yet: {', '.join(lacking)} not measured")
        return
    write_page(ordered)


def write_page(names: Sequence[str]) -> None:
    """Write the page."""
    import torch

    model = next(
        (line.partition(": ")[2] for line in _cpuinfo() if line.startswith("model name")),
        describe_cpu(),
    )
    cpu = f"{model} ({', '.join(f for f in WIDE if f in cpu_flags()) or describe_cpu()})"
    head = HEAD.format(cpu=cpu, torch=torch.__version__.partition("+")[0])
    first, rest = names[: len(FIRST)], names[len(FIRST) :]
    gpu = section(MEASURED / "gpu.json", TABLE)
    pages = [head, *map(part, first), gpu, "## Other measurements\n", *map(part, rest)]
    TABLE.write_text("\n".join(pages))


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def part(name: str) -> str:
    """Return the section of a benchmark: how it measures, beside which other work, its table."""
    found = json.loads((MEASURED / f"{name}.json").read_text())
    mine = [Row(*values) for values in found["rows"]]
    how = " ".join((ALL[name].__doc__ or "").split())
    if found["load"] > (cores := os.cpu_count() or 1) + 1:
        how += f" Other work ran: a load of {found['load']:.0f} on {counted(cores, 'core')}."
    return f"### {name.replace('_', ' ').capitalize()}\n\n{how}\n\n{table(mine)}\n"


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
