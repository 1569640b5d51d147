"""The doctor: what tells the copy of a data set on this disk from the published one."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from feddg_bench.common.errors import DataError
from feddg_bench.common.parallel import in_threads
from feddg_bench.data.dataset import DomainDataset, FileDataset, Records
from feddg_bench.data.decoding import hashed_by_file
from feddg_bench.data.fetch.mirrors import RECEIPT
from feddg_bench.data.image_folders import ImageFolderDataset, is_image, match_folders
from feddg_bench.data.splits import SPLITS, read_split_csv

CHECKED_SIZE = 64
"""Pixels a side at which images are decoded; equal ones there are called duplicates."""

SHOWN = 5
"""Files named in a sentence; all of them are in the finding."""


@dataclass(frozen=True)
class Finding:
    """Something that differs from the published data set.

    Attributes:
        kind: ``domain``, ``count``, ``unreadable``, ``duplicate`` or ``split``.
        text: One sentence.
        comparable: Whether results stay comparable with those on the published data set.
        files: Relative names of the images concerned.
    """

    kind: str
    text: str
    comparable: bool = False
    files: tuple[str, ...] = ()


@dataclass
class Diagnosis:
    """What the doctor saw.

    Attributes:
        dataset: Name.
        title: As in a table.
        folder: That of the data, or nothing for embedded ones.
        layout: How the folders were recognised, in words.
        counts: Domain -> class -> images found.
        published: The same as published; empty where no counts are known.
        fingerprint: Of the contents; nothing where an image cannot be read.
        findings: What differs.
        notes: What a reader may want to know and that changes nothing.
    """

    dataset: str
    title: str
    folder: str | None
    layout: str = ""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    published: dict[str, dict[str, int]] = field(default_factory=dict)
    fingerprint: str | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def images(self) -> int:
        """Images found."""
        return sum(sum(classes.values()) for classes in self.counts.values())

    @property
    def comparable(self) -> bool:
        """Whether results on this copy compare with those on the published data set."""
        return all(finding.comparable for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return all of it for a JSON document."""
        verdict = {"images": self.images, "clean": not self.findings, "comparable": self.comparable}
        return {**asdict(self), **verdict}


def examine(
    dataset: DomainDataset,
    split_csv: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Look at every image of a data set.

    Args:
        dataset: What to look at; from now on its `records` are those found.
        split_csv: A split file that is to be used with it.
        progress: Called with the number of images decoded and their total.

    Raises:
        DataError: If the data set is not on this machine, or cannot even be listed.
    """
    records = dataset.records_as_found()
    folder = dataset.folder if isinstance(dataset, ImageFolderDataset) else dataset.find()
    found = Diagnosis(dataset.name, dataset.title, None if folder is None else str(folder))
    _count(dataset, records, found)
    _count_splits(dataset, found)
    if isinstance(dataset, ImageFolderDataset):
        _look_at_folders(dataset, records, found)
    _decode(dataset, records, found, progress)
    if split_csv is not None:
        try:
            read_split_csv(split_csv, None, dataset)
        except DataError as error:
            found.findings.append(Finding("split", str(error)))
    return found


# ------------------------------------------------------------------------ counts and folders


def _count(dataset: DomainDataset, records: Records, found: Diagnosis) -> None:
    table = dataset.count(records)
    names = dataset.classes or ("images",)  # a regression has none
    for domain, row in zip(dataset.domains, table.tolist(), strict=True):
        found.counts[domain] = dict(zip(names, row, strict=True))
        if not sum(row):
            hint = _hint(dataset, domain)
            found.findings.append(Finding("domain", f"the domain {domain} has no images{hint}"))
            continue
        wanted = dataset.counts.get(domain)
        if wanted is None:
            continue
        found.published[domain] = dict(zip(names, wanted, strict=True))
        for name, have, want in zip(names, row, wanted, strict=True):
            if have != want:
                hint = "" if have else _hint(dataset, domain, name)
                place = f"{domain}/{name}" if dataset.classes else domain
                text = f"{place} holds {have:,} images instead of {want:,}"
                found.findings.append(Finding("count", f"{text} ({have - want:+,}){hint}"))
    for name, total in zip(names, table.sum(axis=0).tolist(), strict=True):
        if not total and not dataset.counts:
            found.findings.append(Finding("count", f"no domain has an image of the class {name}"))
    if not dataset.counts and not dataset.split_sizes:
        found.notes.append("the published numbers of images are not known here: not compared")


def _count_splits(dataset: DomainDataset, found: Diagnosis) -> None:
    """Compare the published splits with their published sizes, where these are known."""
    places = dataset.published_splits() if dataset.split_sizes else None
    if places is None:
        return
    before = len(found.findings)
    for place, split in enumerate(SPLITS):
        have, want = int((places == place).sum()), dataset.split_sizes.get(split, 0)
        if have != want:
            text = f"the split {split} holds {have:,} images instead of {want:,} ({have - want:+,})"
            found.findings.append(Finding("count", text))
    if len(found.findings) == before:
        found.notes.append("the published splits have the published sizes")


def _hint(dataset: DomainDataset, domain: str, name: str | None = None) -> str:
    """Ask whether a folder that nothing was recognised in is the missing domain or class."""
    if not isinstance(dataset, ImageFolderDataset):
        return ""
    domains = dataset._domain_folders(dataset.folder)
    classes = {name: (name,) for name in dataset.classes}
    if name is None:
        missing, inside, known = domain, dataset.folder, set(domains.values())
        strange = [path for path in _folders(inside, known) if match_folders(path, classes)]
    else:
        missing, inside = name, domains[domain]
        known = set(match_folders(inside, classes).values())
        strange = [path for path in _folders(inside, known) if any(map(is_image, path.iterdir()))]
    names = [path.name for path in strange]
    near = difflib.get_close_matches(missing, names, n=1) or names
    if len(near) != 1:
        return ""
    return f"; is it the folder {near[0]} in {inside}? Rename that to {missing}"


def _folders(folder: Path, known: set[Path]) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and path not in known]


def _look_at_folders(dataset: ImageFolderDataset, records: Records, found: Diagnosis) -> None:
    """Say how the folders were recognised, and what lies there that is not read."""
    folders = dataset._domain_folders(dataset.folder)
    others = [f"{path.name} is {name}" for name, path in folders.items() if path.name != name]
    found.layout = ", ".join(["<domain>/<class>/<image>", *others])
    used = {dataset.file(index) for index in range(len(records.paths))}
    used.add(dataset.folder / RECEIPT)
    extra = [path for path in _walk(dataset.folder) if path not in used]
    if extra:
        names = [path.relative_to(dataset.folder).as_posix() for path in extra]
        found.notes.append(f"{len(extra):,} other files are not read: {_some(names)}")


def _walk(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(where) / name for name in sorted(files))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# ------------------------------------------------------------------------------- contents


def _decode(
    dataset: DomainDataset,
    records: Records,
    found: Diagnosis,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Decode every image; find those that cannot be, and those that are the same."""
    total = len(records.paths)
    unreadable: list[str] = []
    same: dict[bytes, list[int]] = {}
    contents: list[str] = []
    for index, (content, pixels) in enumerate(in_threads(_look(dataset), range(total))):
        contents.append(content)
        if pixels is None:
            unreadable.append(records.paths[index])
        else:
            same.setdefault(pixels, []).append(index)
        if progress is not None and ((index + 1) % 256 == 0 or index + 1 == total):
            progress(index + 1, total)
    if unreadable:
        text = f"{_images(len(unreadable))} cannot be decoded: {_some(unreadable)}"
        found.findings.append(Finding("unreadable", text, files=tuple(unreadable)))
    else:
        found.fingerprint = (
            dataset.combine(contents) if hashed_by_file(dataset) else dataset.fingerprint()
        )
    _duplicates(dataset, records, [group for group in same.values() if len(group) > 1], found)


def _look(dataset: DomainDataset) -> Callable[[int], tuple[str, bytes | None]]:
    """Return a function that gives a hash of an image's file, and one of its pixels, if any."""

    def look(index: int) -> tuple[str, bytes | None]:
        try:
            content = dataset.content(index) if isinstance(dataset, FileDataset) else ""
            pixels = dataset.read(index, CHECKED_SIZE)
        except DataError:
            return "", None
        return content, hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16).digest()

    return look


def _duplicates(
    dataset: DomainDataset, records: Records, groups: list[list[int]], found: Diagnosis
) -> None:
    """Report the same image under several names, worst first: as several classes or domains."""
    number = sum(len(group) - 1 for group in groups)
    if dataset.duplicates is not None and number == dataset.duplicates:
        if number:
            found.notes.append(f"{_images(number)} are there twice, as in the published data set")
        return
    classes_differ, same_class = "in different classes", "in the same domain and class"
    if not dataset.classes:
        classes_differ, same_class = "with different targets", "in the same domain"
    kinds: dict[str, list[list[int]]] = {classes_differ: [], "across domains": [], same_class: []}
    for group in groups:
        classes, domains = set(records.labels[group]), set(records.domains[group])
        same, across, beside = kinds.values()
        (same if len(classes) > 1 else across if len(domains) > 1 else beside).append(group)
    for where, chosen in kinds.items():
        if not chosen:
            continue
        pairs = [_equal([records.paths[index] for index in group]) for group in chosen]
        text = f"{_images(len(pairs))} under several names {where}: {_some(pairs)}"
        if dataset.duplicates is None and where == same_class:
            found.notes.append(f"{text}; whether they are in the published data set is not known")
            continue
        files = tuple(records.paths[index] for group in chosen for index in group)
        found.findings.append(Finding("duplicate", text, files=files))


def _equal(names: Sequence[str]) -> str:
    more = f" = ... ({len(names):,} names)" if len(names) > SHOWN else ""
    return " = ".join(names[:SHOWN]) + more


def _images(number: int) -> str:
    return f"{number:,} image" + ("" if number == 1 else "s")
