"""What the clients of a plan hold, spread exactly as in a run."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from feddg_bench.analysis.figures.drawing import Picture
from feddg_bench.analysis.figures.partition import By, Spread, heat_maps
from feddg_bench.common.errors import SettingsError
from feddg_bench.records.store import ResultsStore
from feddg_bench.runs.run import Plan, RunData, open_federation

RULE_SETTINGS = {
    "heterogeneous": ("heterogeneity", "\N{GREEK SMALL LETTER LAMDA}"),
    "dirichlet": ("alpha", "\N{GREEK SMALL LETTER ALPHA}"),
}
"""Kind of partition -> the setting that a panel names, and how."""


def partition_picture(plans: Sequence[Plan], data: RunData, by: By) -> Picture:
    """Draw the partitions of plans that differ in nothing but the partition.

    Raises:
        DataError: If the data set is not here or not whole.
        SettingsError: If the images cannot be spread so, or have no classes to be counted by.
    """
    if by == "label" and data.dataset.task != "classification":
        raise SettingsError(f"{data.dataset.title} has no classes: use --by domain")
    spreads, rows = [], tuple[str, ...]()
    first = plans[0]
    with tempfile.TemporaryDirectory() as scratch:  # a run would keep its index lists
        for plan in plans:
            federation, _ = open_federation(plan, data, ResultsStore(Path(scratch)))
            values = federation.domain_ids if by == "domain" else federation.labels
            rows = federation.sources if by == "domain" else data.dataset.classes
            counts = [
                np.bincount(values[index], minlength=len(rows))
                for index in federation.clients.values()
            ]
            spreads.append(Spread(_label(plan), np.stack(counts, axis=1)))
    s = first.settings
    n = max(spread.counts.shape[1] for spread in spreads)
    name = f"partition-{s.dataset}-{s.protocol}-{first.scenario.name}-{s.partition.kind}-{n}"
    title = (
        f"{data.dataset.title}, {s.protocol}, scenario {first.scenario.name}, seed {s.seed}\n"
        f"training images of {n} clients, partition {s.partition.kind}"
    )
    name += "-by_label" if by == "label" else ""
    return heat_maps(re.sub(r"[^A-Za-z0-9._+-]+", "_", name), title, rows, spreads, by)


def _label(plan: Plan) -> str:
    partition = plan.settings.partition
    if partition.kind not in RULE_SETTINGS:
        return partition.kind
    key, letter = RULE_SETTINGS[partition.kind]
    return f"{letter} = {getattr(partition, key):g}"
