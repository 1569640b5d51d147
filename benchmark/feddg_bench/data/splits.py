"""Splits into training, validation and test images, drawn here or published."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError, SettingsError, unknown
from feddg_bench.common.files import plain_file
from feddg_bench.common.streams import generator
from feddg_bench.config.reading import composed
from feddg_bench.data.image_folders import IMAGE_SUFFIXES
from feddg_bench.data.protocols import Scenario, scenarios

if TYPE_CHECKING:
    from feddg_bench.data.dataset import DomainDataset

SPLITS = ("train", "id_val", "id_test", "val", "test")
"""Names of the splits; the first three share the training domains."""
ROLES = dict(zip(SPLITS, ("train", "train", "train", "val", "test"), strict=True))
"""Split -> role of the domains of its images."""
REQUIRED_COLUMNS = ("split", "domain", "path")

Splits = dict[str, NDArray[np.int64]]
"""Split -> ascending data-set indices of its images; a split without images is left out."""


def split_by_domain(
    scenario: Scenario,
    domains: NDArray[np.integer],
    labels: NDArray[np.integer] | NDArray[np.floating],
    domain_names: Sequence[str],
    *,
    id_val_fraction: float,
    id_test_fraction: float,
    seed: int,
    published: NDArray[np.integer] | None = None,
) -> Splits:
    """Hold out images of the training domains; each held-out domain is one split.

    Of the n images of a training domain and class, ``id_test`` gets round(f n) and ``id_val``
    round(f (n - id_test)); halves are rounded to even. Every scenario has its own draw. For a
    regression, which has no classes, the draw is from each training domain as a whole.

    Args:
        scenario: Domains by role.
        domains: Domain id of every image of the data set.
        labels: Label of every image.
        domain_names: Names of the domain ids.
        id_val_fraction: In [0, 1), of the images that ``id_test`` leaves.
        id_test_fraction: In [0, 1).
        seed: Seed of the run.
        published: Position in `SPLITS` of every image in the authors' splits. Their ``id_test``
            images replace the draw, unless ``id_test_fraction`` is 0.

    Raises:
        DataError: If no image is left to train on.
    """
    kept = None if published is None else published == SPLITS.index("id_test")
    rng = generator(seed, "split", scenario.name)
    if np.issubdtype(labels.dtype, np.floating):
        labels = np.zeros(len(domains), dtype=np.int64)
    roles = _roles(scenario)
    split_of = np.full(len(domains), -1)
    for domain, name in enumerate(domain_names):
        inside = domains == domain
        split_of[inside] = SPLITS.index(roles[name])
        if roles[name] != "train":
            continue
        for label in np.unique(labels[inside]):
            members = rng.permutation(np.flatnonzero(inside & (labels == label)))
            num_test = round(id_test_fraction * len(members))
            if kept is not None and id_test_fraction:
                num_test = int(kept[members].sum())
                members = members[np.argsort(~kept[members], kind="stable")]
            num_val = round(id_val_fraction * (len(members) - num_test))
            split_of[members[:num_test]] = SPLITS.index("id_test")
            split_of[members[num_test : num_test + num_val]] = SPLITS.index("id_val")
    return _collect(split_of, "lower data.id_val_fraction and data.id_test_fraction")


def published_splits(places: NDArray[np.integer]) -> Splits:
    """Return the authors' splits, given the position in `SPLITS` of every image.

    Raises:
        DataError: If there are no training images.
    """
    return _collect(np.asarray(places, dtype=np.int64), "get the data set's split again")


def read_split_csv(
    path: Path, scenario: Scenario | None, dataset: DomainDataset, *, in_file_order: bool = False
) -> Splits:
    """Read a split file in the format of FedDG_Benchmark (Bai et al., ICLR 2024).

    Columns are found by name: split, domain and path are required, y and category are checked if
    present, others are ignored. Rows are matched to images by path, ``domain/category/file``, whose
    suffix may differ, since copies of a data set are stored as JPEG or PNG. Names are `composed`
    for the comparison. For a regression, neither y nor category is checked.

    Args:
        path: The CSV file, UTF-8.
        scenario: Domains by role, which the file must fit; ``None`` to take those of the file.
        dataset: The data set whose images the file lists.
        in_file_order: Return the images of a split in the order of the rows, not ascending.

    Raises:
        DataError: If the file is unreadable or does not describe this data set and scenario; the
            message gives the line.
    """
    records = dataset.records()
    roles = {} if scenario is None else _roles(scenario)
    exact = {name: image for image, name in enumerate(records.paths)}
    alike = {composed(name): image for name, image in exact.items()}
    stems = {_stem(name): image for name, image in alike.items()}
    split_of = np.full(len(exact), -1)
    lines: dict[int, int] = {}
    faults: dict[str, str] = {}  # the first of each kind, reported after the last line
    shifts = set()
    for line, cells in _read_cells(path):
        where, split, domain = f"{path}, line {line}: ", cells["split"], cells["domain"]
        if split not in SPLITS:
            raise DataError(where + unknown("split", split, SPLITS))
        name = str(PurePosixPath(cells["path"].replace("\\", "/")))
        same = composed(name)
        image = exact.get(name, alike.get(same, stems.get(_stem(same))))
        if image is None:
            raise DataError(
                f"{where}the data set has no image {cells['path']!r}; paths are relative to its "
                f"folder, such as {records.paths[0]}"
            )
        if image in lines:
            raise DataError(
                f"{where}image {name} is already in line {lines[image]}; list every image once"
            )
        lines[image] = line
        split_of[image] = SPLITS.index(split)
        mend = "; use the split file of this data set"
        truth = dataset.domains[records.domains[image]]
        if composed(domain) != composed(truth):
            raise DataError(f"{where}domain is {domain!r} but the image lies in {truth!r}{mend}")
        if scenario is not None and roles[truth] != ROLES[split]:
            faults.setdefault(
                "role",
                f"{where}{domain} is in split {split} but scenario {scenario.name} has it as "
                f"{roles[truth]} domain; leave --scenario out for that of the file",
            )
        if not dataset.classes:
            continue
        label = int(records.labels[image])
        category, y = cells.get("category"), cells.get("y", str(label))
        truth = dataset.classes[label]
        if category is not None and composed(category) != composed(truth):
            raise DataError(f"{where}category is {category!r} but the image's is {truth!r}{mend}")
        try:
            shifts.add(int(y) - label)
        except ValueError:
            raise DataError(f"{where}y is {y!r}, not a whole number{mend}") from None
        if int(y) != label:
            faults.setdefault("y", f"{where}y is {y} but the image's label is {label}{mend}")
    if "y" in faults and len(shifts) == 1:
        (shift,) = shifts
        raise DataError(
            f"{path}: labels differ by a constant {shift} from the data set's in all {len(lines)} "
            f"rows; subtract {shift} from column y, or leave the column out"
        )
    if "y" in faults:
        raise DataError(faults["y"])
    if len(lines) < len(exact):
        absent, first = len(exact) - len(lines), records.paths[int(np.argmin(split_of))]
        raise DataError(
            f"{path} lacks {absent} of the data set's {len(exact)} images, such as {first}; a "
            f"split file lists every image once"
        )
    if faults:
        raise DataError(faults["role"])
    if scenario is None:
        scenario_of(path, dataset)
    splits = _collect(split_of, f"mend the column split of {path}")
    if not in_file_order:
        return splits
    order = np.array(list(lines))
    return {split: order[split_of[order] == SPLITS.index(split)] for split in splits}


def scenario_of(path: Path, dataset: DomainDataset) -> Scenario:
    """Return the scenario of a split file, inferred from the domains in its splits.

    Raises:
        DataError: If the file cannot be read or fits no scenario.
    """
    cells = (cells for _, cells in _read_cells(path))
    roles = {(composed(row["domain"]), ROLES.get(row["split"], "")) for row in cells}
    for protocol in ("lodo", "ltdo"):
        with suppress(SettingsError):  # too few domains for it
            for scenario in scenarios(protocol, dataset.domains, dataset.letters, "all"):
                if {(composed(domain), role) for domain, role in _roles(scenario).items()} == roles:
                    return scenario
    raise DataError(
        f"{path} fits no scenario of {dataset.title}: expected every domain in the splits of one "
        f"role, training (train, id_val, id_test), val or test, and one test domain"
    )


def scenarios_with_files(
    path: Path, protocol: str, dataset: DomainDataset, select: str | None = None
) -> list[tuple[Scenario, Path]]:
    """Return the scenarios of split files, each with its file.

    Args:
        path: A split file, or a folder of split files, ``*.csv``, one for each scenario; duplicates
            and files for another protocol are skipped.
        protocol: A key of `feddg_bench.data.protocols.PROTOCOLS`.
        dataset: The data set whose domains the files name.
        select: Scenarios as in `feddg_bench.data.protocols.scenarios`. ``None`` for the protocol's
            default scenarios that have a file; if none has, for all that have one.

    Raises:
        SettingsError: If a scenario is unknown or has no file.
        DataError: If a file cannot be read or fits no scenario, or two fit the same.
    """
    told = protocol, dataset.domains, dataset.letters, select, dataset.official
    chosen = scenarios(*told)
    if protocol == "wilds":
        return [(scenario, path) for scenario in chosen]
    by_name: dict[str, tuple[Scenario, Path]] = {}
    others = []
    folder = os.path.isdir(path)  # noqa: PTH112 - `is_dir` fails for names that are too long
    for file in sorted(path.glob("*.csv")) if folder else [path]:
        scenario = scenario_of(file, dataset)
        if scenario.protocol != protocol:
            others.append(f"--protocol {scenario.protocol} --scenario {scenario.name}")
        elif scenario.name not in by_name:
            by_name[scenario.name] = scenario, file
        elif by_name[scenario.name][1].read_bytes() != file.read_bytes():
            raise DataError(
                f"{file} and {by_name[scenario.name][1]} are both for scenario {scenario.name}: "
                f"keep one of them in the folder"
            )
    chosen = scenarios(*told, offered=by_name)
    lacking = [one.name for one in chosen if one.name not in by_name] if select else []
    if lacking or not by_name:
        fits = ", ".join([*(f"--scenario {name}" for name in by_name), *others]) or "nothing"
        wanted = f"scenario {lacking[0]}" if lacking else f"protocol {protocol}"
        raise SettingsError(f"{path} holds no split of {wanted}; it fits {fits}")
    own = [by_name[one.name] for one in chosen if one.name in by_name]
    return own or list(by_name.values())


def _roles(scenario: Scenario) -> dict[str, str]:
    """Return the role of each domain."""
    roles = dict.fromkeys(scenario.train, "train")
    if scenario.val is not None:
        roles[scenario.val] = "val"
    return roles | {scenario.test: "test"}


def _collect(split_of: NDArray[np.int64], advice: str) -> Splits:
    splits = {split: np.flatnonzero(split_of == i) for i, split in enumerate(SPLITS)}
    if not len(splits["train"]):
        raise DataError(f"the training split has no images; {advice}")
    return {split: index for split, index in splits.items() if len(index)}


def _read_cells(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield line number and cells by column; missing cells of a short row are empty."""
    plain_file(path)  # a pipe or a device would be read for ever
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            missing = [c for c in REQUIRED_COLUMNS if c not in (reader.fieldnames or ())]
            if missing:
                raise DataError(
                    f"{path}, line 1: there is no column {missing[0]!r}; a split file needs the "
                    f"columns {', '.join(REQUIRED_COLUMNS)}"
                )
            for cells in reader:
                yield reader.line_num, cells
    except OSError as error:
        raise DataError(f"cannot read the split file {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8: {error}") from error


def _stem(name: str) -> str:
    path = PurePosixPath(name)
    return str(path.with_suffix("")) if path.suffix.lower() in IMAGE_SUFFIXES else name
