"""Compare the numbers of all shipped tables and claims with those of an earlier commit.

A number is identified by its origin, not by its place: the runs, split, metric, selection rule,
kind of column and reference method. The layout of tables can thus change while numbers stay.
``python -m tests.golden`` compares, and exits with 1 if a number changed; ``--write`` stores the
current numbers in ``numbers.csv.xz``.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import lzma
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from feddg_bench.analysis.claims import claims
from feddg_bench.analysis.tables.describe import COMPARED
from feddg_bench.analysis.tables.grid import REFERENCE, Entry, Grid
from feddg_bench.analysis.tables.make import TableOptions, make_tables

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("numbers.csv.xz")
FOLDERS = {"results": ("all", "generic"), "results/projection": ("generic",)}
"""Folder of records -> tables made from it."""
ORIGIN = ("runs", "split", "metric", "select", "kind", "over", "against")
NUMBERS = ("value", "std", "low", "high")
AMONG_ROWS = ("rank", "p_value", "p_same")
"""Kinds of columns whose numbers depend on the other rows of the table."""

Origin = tuple[str, ...]
Numbers = tuple[str, ...]
Known = dict[Origin, dict[Numbers, str]]
"""Origin -> numbers -> place of one such cell. Bootstraps can differ between tables."""


def cells(grid: Grid) -> Iterator[tuple[Origin, Numbers, str]]:
    """Yield origin, numbers and place of each non-empty cell in the rows of our own runs."""
    ours = [line for line in grid.lines if line.kind == "ours"]
    for position, column in enumerate(grid.columns):
        filled = [(x, e) for x in ours if (e := x.entries[position]) is not None and e.keys]
        reference = next((pair for pair in filled if pair[1].text == REFERENCE), None)
        facts = column.facts()
        over = {source.spec.over for source in column.sources}
        for line, entry in filled:
            runs, against = set(entry.keys), ""
            if column.kind in COMPARED and reference is not None:
                runs.update(reference[1].keys)
                against = reference[0].facts.get("method", "")
            if column.kind in AMONG_ROWS:
                runs.update(key for _, other in filled for key in other.keys)
                runs.add(f"row {' '.join(sorted(entry.keys))}")
            origin = (
                digest(runs),
                *(facts[name] for name in ("split", "metric", "select")),
                column.kind,
                "+".join(sorted(over)),
                against,
            )
            yield origin, told(entry), f"{grid.name}: {line.row}: {column.group} {column.head}"


def told(entry: Entry) -> Numbers:
    """Return a cell's numbers, or its text if it has none, as for wins."""
    if entry.value is None:
        return (entry.text, "", "", "")
    return tuple("" if n is None else f"{n:.10g}" for n in (getattr(entry, k) for k in NUMBERS))


def digest(parts: Iterable[str]) -> str:
    """Return the digest of a set of keys: 16 hexadecimal digits."""
    return hashlib.sha256(" ".join(sorted(parts)).encode()).hexdigest()[:16]


def today() -> Known:
    """Return the numbers of all tables and claims under the current code."""
    found: Known = {}
    for folder, names in FOLDERS.items():
        made = make_tables(names, [ROOT / folder], TableOptions(variants=True))
        for grid in made.grids:
            for origin, numbers, place in cells(grid):
                found.setdefault(origin, {}).setdefault(numbers, f"{folder}: {place}")
        if "all" not in names:
            continue
        for claim in claims(made.runs):
            if (compared := claim.comparison) is None:
                continue
            said = f"{claim.source}, {claim.where}: {claim.better} above {claim.worse}"
            origin = (digest([said, claim.frame]), "", "", "", "claim", "", "")
            gap = compared.difference
            value, low, high = (f"{n:.10g}" for n in (gap.value, gap.low, gap.high))
            place = f"{said}, {claim.frame}"
            found[origin] = {(value, f"{compared.p_value:.10g}", low, high): place}
    return found


def read() -> tuple[str, Known]:
    """Return the commit of the stored numbers, and the numbers."""
    commit, _, text = lzma.decompress(FILE.read_bytes()).decode().partition("\n")
    found: Known = {}
    for row in csv.DictReader(io.StringIO(text)):
        origin = tuple(row[name] for name in ORIGIN)
        found.setdefault(origin, {})[tuple(row[name] for name in NUMBERS)] = row["place"]
    return commit, found


def write(known: Known) -> None:
    """Store numbers as those of the commit that is checked out."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    out = io.StringIO()
    out.write(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    table = csv.writer(out, lineterminator="\n")
    table.writerow([*ORIGIN, *NUMBERS, "place"])
    rows = ((*o, *n, place) for o, numbers in known.items() for n, place in numbers.items())
    table.writerows(sorted(rows))
    FILE.write_bytes(lzma.compress(out.getvalue().encode()))


def main() -> None:
    """Compare, or write."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep today's numbers")
    parser.add_argument("--show", type=int, default=20, help="most places to name of each kind")
    asked = parser.parse_args()
    now = today()
    if asked.write:
        write(now)
        print(f"{len(now)} numbers kept")
        return
    commit, then = read()
    both = then.keys() & now.keys()
    changed = [origin for origin in both if not now[origin].keys() <= then[origin].keys()]
    apart = {"changed": changed, "gone": then.keys() - now.keys(), "new": now.keys() - then.keys()}
    counts = ", ".join(f"{len(found)} {name}" for name, found in apart.items())
    print(f"against {commit[:8]}: {len(both) - len(changed)} numbers equal, {counts}")
    for name, found in apart.items():
        places = sorted(next(iter((now.get(o) or then[o]).values())) for o in found)
        for place in places[: asked.show]:
            print(f"  {name}: {place}")
    sys.exit(1 if changed else 0)


if __name__ == "__main__":
    main()
