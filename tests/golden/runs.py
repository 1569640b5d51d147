"""Print a digest of a tiny run of each method: ``python -m tests.golden.runs [METHOD ...]``.

Two states, numbers of workers or ways to stop and resume that give equal bits print equal lines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import feddg_bench
from feddg_bench.plugins import names

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "clients": 4,
    "per_round": 3,
    "data.image_size": 16,
    "data.id_test_fraction": 0.5,
    "data.id_val_fraction": 0.3,
    "train.local_epochs": 1,
}
MEASURED = ("evaluation", "bytes", "metrics", "cohort", "skipped", "dropped")


class Stop(feddg_bench.Observer):
    """Stops a run after its first round, as Ctrl-C does."""

    def round(self, run: feddg_bench.Run, result: Any) -> None:
        """Stop after round 1."""
        if result.round == 1:
            raise KeyboardInterrupt


def digest(method: str, results: Path, *, workers: int = 1, stop: bool = False) -> str:
    """Run a method, stopped and resumed if asked, and return the digest of what it measured."""
    given: dict[str, Any] = {
        "scenario": "ip-o-c",
        "settings": SETTINGS,
        "results": results,
        "workers": workers,
        "quiet": True,
        "checkpoint_every": 1,
    }
    if stop:
        try:
            feddg_bench.run(method, **given, observers=[Stop()])
        except KeyboardInterrupt:
            pass
        else:
            raise RuntimeError("the run was not stopped")
    (record,) = feddg_bench.run(method, **given)
    rounds = record.numbers()["rounds"]
    found = [{name: value for name, value in r.items() if name in MEASURED} for r in rounds]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def main() -> None:
    """Print a line for each method."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.runs", description=__doc__)
    parser.add_argument("methods", nargs="*", help="all by default")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="stop after round 1, and resume")
    asked = parser.parse_args()
    logging.disable()
    for method in asked.methods or names("method"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = digest(method, Path(folder), workers=asked.workers, stop=asked.stop)
            except feddg_bench.FeddgError as error:
                found = f"refused: {error}"
        print(method, found, flush=True)


if __name__ == "__main__":
    main()
