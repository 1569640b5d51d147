"""``python -m tests.attacks [GROUP]... [--all] [--full]``: run the attacks, print the outcomes.

The exit status is 1 if an attack succeeded. ``--all`` also prints the repelled attacks; ``--full``
tries large grids completely instead of a sample.
"""

from __future__ import annotations

import sys

from tests.attacks.groups import GROUPS, run


def main(arguments: list[str]) -> int:
    """Run the named groups, by default all, and print a table."""
    wanted = [name for name in arguments if not name.startswith("--")] or GROUPS
    unknown = set(wanted) - set(GROUPS)
    if unknown:
        print(f"unknown group {', '.join(unknown)}: expected {', '.join(GROUPS)}")
        return 2
    broken = total = 0
    for name in wanted:
        rows, cpu = run(name, full="--full" in arguments)
        held = sum(row.held for row in rows)
        failed = len(rows) - held
        total += len(rows)
        broken += failed
        counts = f"{len(rows)} tried, {held} held, {failed} failed"
        print(f"\n{name}: {counts}, {cpu:.1f} s CPU", flush=True)
        for row in rows:
            if not row.held or "--all" in arguments:
                verdict = "held " if row.held else "BROKE"
                print(f"  {verdict}  {row.attack[:70]:70}  {row.happened[:150]}")
    print(f"\nall: {total} tried, {total - broken} held, {broken} failed")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
