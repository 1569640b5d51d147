"""Whether a split file fits the images of a data set, whatever scenario it is for."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from feddg_bench.common.errors import DataError
from feddg_bench.data.dataset import DomainDataset, Records
from feddg_bench.data.protocols import Scenario
from feddg_bench.data.splits import ROLES, read_split_csv


def split_error(path: Path, dataset: DomainDataset, records: Records) -> str | None:
    """Return what does not fit: paths, domains, labels and their base, roles of domains.

    Raises:
        DataError: If there is no such file.
    """
    if not path.is_file():
        raise DataError(f"there is no split file {path}: give another --split-csv")
    try:
        read_split_csv(
            path,
            _scenario(path, dataset.domains),
            records.paths,
            records.domains,
            records.labels,
            dataset.domains,
            dataset.classes,
        )
    except DataError as error:
        return str(error)
    return None


def _scenario(path: Path, domains: Sequence[str]) -> Scenario:
    """Return the scenario that a split file is for; any at all where it fits none."""
    roles: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = {(row.get("split"), row.get("domain")) for row in csv.DictReader(file)}
    except (OSError, UnicodeDecodeError, csv.Error):
        rows = set()  # told when it is read again
    for domain in domains:
        for role in {ROLES[split] for split, name in rows if name == domain and split in ROLES}:
            roles[role].append(domain)
    val, test = (roles[role][0] if roles[role] else None for role in ("val", "test"))
    test = test or domains[-1]
    train = tuple(domain for domain in domains if domain not in (val, test))
    return Scenario(path.stem, "ltdo" if val else "lodo", train, val, test)
