"""Print the run key of every method, recipe, data set and protocol, and of every shipped sweep.

``python -m tests.golden.plans > FILE`` on two states, and ``diff``, show whether a change moves a
key. A combination that is refused prints the reason. It takes a few minutes.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from itertools import product
from pathlib import Path

from feddg_bench.common.errors import FeddgError
from feddg_bench.config.recipes import recipe_names
from feddg_bench.config.schema import Resources
from feddg_bench.data.protocols import PROTOCOLS
from feddg_bench.plugins import names
from feddg_bench.runs.request import Datasets, Request
from feddg_bench.sweeps.definition import load_sweep
from feddg_bench.sweeps.search import open_search

SWEEPS = Path(__file__).parents[2] / "sweeps"


def main() -> None:
    """Print all keys, one a line."""
    logging.disable()
    datasets = Datasets()
    with tempfile.TemporaryDirectory() as empty:
        results = Path(empty)
        combinations = product(
            names("data set"), sorted(PROTOCOLS), recipe_names(), names("method")
        )
        for dataset, protocol, recipe, method in combinations:
            where = f"{dataset} {protocol} {recipe} {method}"
            try:
                plans = Request(
                    method, protocol, dataset, recipe=recipe, resources=Resources(results=results)
                ).plan(datasets, check=False)
                print(where, *(plan.key for plan in plans))
            except FeddgError as error:
                print(where, f"refused: {error}")
        for file in sorted([*SWEEPS.glob("*.yaml"), *SWEEPS.glob("tune/*.yaml")]):
            try:
                jobs = open_search(load_sweep(file), results).jobs()
                print(file.stem, *(job.key for job in jobs))
            except FeddgError as error:
                print(file.stem, f"refused: {error}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
