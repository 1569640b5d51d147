"""The doctor: differences between the copy of a data set on this disk and the published one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.common.parallel import in_threads
from feddg_bench.data.dataset import (
    LARGE,
    DomainDataset,
    FileDataset,
    FileFacts,
    Listing,
    UnreadableError,
    image_facts,
    read_checked,
)
from feddg_bench.data.decoding import hashed_by_file, unreadable_images
from feddg_bench.data.federated import cautions
from feddg_bench.data.image_folders import ImageFolderDataset, is_image
from feddg_bench.data.image_store import check_stores
from feddg_bench.data.inspect.signatures import (
    SIDE,
    Signatures,
    compare_signatures,
    load_signatures,
    signature,
)
from feddg_bench.data.splits import SPLITS, read_split_csv

SHOWN = 5
"""Maximum number of files named in a message; the finding lists all of them."""


@dataclass(frozen=True)
class Finding:
    """A difference from the published data set."""

    # `domain`, `count`, `unreadable`, `picture`, `small`, `depth`, `duplicate`, `split` or `store`.
    kind: str
    text: str  # one sentence
    comparable: bool = False  # whether results stay comparable with those on the published data set
    files: tuple[str, ...] = ()  # relative names of the images concerned


@dataclass
class Diagnosis:
    """Report of the doctor."""

    dataset: str
    title: str  # as in tables
    folder: str | None  # where the data are, or `None` for embedded ones
    own: bool = False  # whether they are a user's own, so that there is no published copy
    layout: str = ""  # how the folders were recognised, in words
    compared: list[str] = field(default_factory=list)  # comparisons with published data, in words
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # domain -> class -> images
    published: dict[str, dict[str, int]] = field(default_factory=dict)  # published counts
    fingerprint: str | None = None  # of the contents; `None` if an image cannot be read
    findings: list[Finding] = field(default_factory=list)  # differences
    notes: list[str] = field(default_factory=list)  # remarks that are not findings

    @property
    def images(self) -> int:
        """Number of images found."""
        return sum(sum(classes.values()) for classes in self.counts.values())

    @property
    def comparable(self) -> bool:
        """Whether results on this copy are comparable with those on the published data set."""
        return all(finding.comparable for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the whole diagnosis as JSON values."""
        verdict = {"images": self.images, "clean": not self.findings, "comparable": self.comparable}
        return {**asdict(self), **verdict}

    def find(self, kind: str, text: str, files: Sequence[str] = ()) -> None:
        """Add a finding; ``{}`` in the text stands for the first files."""
        self.findings.append(Finding(kind, text.replace("{}", _some(files)), files=tuple(files)))


class _Look(NamedTuple):
    """One image: hash of its file, fault, hash of its pixels, signature, and facts of the file."""

    content: str = ""
    fault: str | None = None
    pixels: bytes = b""
    signature: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None
    one_colour: bool = False
    facts: FileFacts = FileFacts(0)


def examine(
    dataset: DomainDataset,
    split_csv: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    against: Path | None = None,
    cache_dir: Path | None = None,
) -> Diagnosis:
    """Examine every image of a data set.

    From then on, the data set's `records` are those found. A split file is checked against them,
    and stores in ``cache_dir`` against their checksums. ``against`` is a file with signatures of a
    clean copy, which replace those that come with the data set.

    Raises:
        DataError: If the data set is not on this machine, or cannot be listed, or ``against`` holds
            no signatures of it.
    """
    path = against or dataset.signatures
    published = None if path is None else load_signatures(path, dataset.name)
    records = dataset.records_as_found()
    folder = dataset.folder if isinstance(dataset, ImageFolderDataset) else dataset.find()
    where = None if folder is None else str(folder)
    diagnosis = Diagnosis(dataset.name, dataset.title, where, bool(dataset.identity))
    _count(dataset, records, diagnosis)
    if isinstance(dataset, ImageFolderDataset):
        _look_at_folders(dataset, diagnosis)
    looks = _look_at_all(dataset, progress)
    if faulty := _faulty(looks):
        diagnosis.find(
            "unreadable",
            unreadable_images(dataset, faulty),
            [records.paths[i] for i in faulty],
        )
    elif hashed_by_file(dataset):
        diagnosis.fingerprint = dataset.combine(look.content for look in looks)
    else:
        diagnosis.fingerprint = dataset.fingerprint()
    if published is not None:
        _compare(records, looks, published, diagnosis)
    _notice(dataset, records, looks, diagnosis)
    _duplicates(dataset, records, looks, diagnosis)
    if split_csv is not None:
        try:
            read_split_csv(split_csv, None, dataset)
        except DataError as error:
            diagnosis.find("split", str(error))
    if cache_dir is not None:
        for fault in check_stores(dataset, cache_dir):
            diagnosis.find("store", fault)
    return diagnosis


def sign(dataset: DomainDataset, progress: Callable[[int, int], None] | None = None) -> Signatures:
    """Return the signatures of the images in a copy of a data set that is known to be clean.

    Raises:
        DataError: If the copy is missing or differs from the published one, or if an image cannot
            be decoded or is not RGB.
    """
    if (dataset.channels, dataset.pixels) != (3, "uint8"):
        raise DataError(f"images of {dataset.title} are not RGB: signatures are of colours")
    records, looks = dataset.records(), _look_at_all(dataset, progress)
    if faulty := _faulty(looks):
        raise DataError(unreadable_images(dataset, faulty))
    sides = [look.facts.side for look in looks]
    return _signatures(records, looks, range(len(looks)), min(sides))


def _faulty(looks: Sequence[_Look]) -> dict[int, str]:
    return {i: look.fault for i, look in enumerate(looks) if look.fault is not None}


def _signatures(
    records: Listing, looks: Sequence[_Look], chosen: Sequence[int], side: int
) -> Signatures:
    pairs = [pair for i in chosen if (pair := looks[i].signature) is not None]
    hashes, colours = zip(*pairs, strict=True)
    names = tuple(_name(records.paths[i]) for i in chosen)
    return Signatures(names, np.stack(hashes), np.stack(colours), side)


def _name(path: str) -> str:
    """Return an image's name without the suffix of its file."""
    folder, slash, file = path.rpartition("/")
    return folder + slash + (file.rpartition(".")[0] or file)


# ------------------------------------------------------------------------ counts and folders


def _count(dataset: DomainDataset, records: Listing, diagnosis: Diagnosis) -> None:
    table = dataset.count(records)
    names = dataset.classes or ("images",)  # a regression has none
    for domain, row in zip(dataset.domains, table.tolist(), strict=True):
        diagnosis.counts[domain] = dict(zip(names, row, strict=True))
        if not sum(row):
            diagnosis.find("domain", f"the domain {domain} has no images{dataset.hint(domain)}")
        elif domain in dataset.counts:
            wanted = dataset.counts[domain]
            known = names if len(wanted) > 1 else ("images",)  # else only the total
            diagnosis.published[domain] = dict(zip(known, wanted, strict=True))
    for domain, name, text in dataset.differences(records):
        if domain in diagnosis.published:
            empty = name is not None and not diagnosis.counts[domain][name]
            diagnosis.find("count", text + (dataset.hint(domain, name) if empty else ""))
    for name, total in zip(names, table.sum(axis=0).tolist(), strict=True):
        if not total and not dataset.counts:
            diagnosis.find("count", f"no domain has an image of the class {name}")
    if not dataset.counts:
        diagnosis.notes += cautions(table, dataset.domains, dataset.classes, dataset.domains)
    if dataset.counts:
        each = any(len(wanted) > 1 for wanted in dataset.counts.values()) or not dataset.classes
        what = "every class in every domain" if each else "every domain"
        diagnosis.compared.append(f"the number of images of {what}")
    places = dataset.published_splits() if dataset.split_sizes else None
    if places is None:
        return
    diagnosis.compared.append("the number of images of every published split")
    for place, split in enumerate(SPLITS):
        have, want = int((places == place).sum()), dataset.split_sizes.get(split, 0)
        if have != want:
            text = f"the split {split} holds {have:,} images instead of {want:,} ({have - want:+,})"
            diagnosis.find("count", text)


def _look_at_folders(dataset: ImageFolderDataset, diagnosis: Diagnosis) -> None:
    """Record how the folders were recognised, and which files in them are not read."""
    folders = dataset._domain_folders(dataset.folder)
    others = [f"{path.name} is {name}" for name, path in folders.items() if path.name != name]
    diagnosis.layout = ", ".join(["<domain>/<class>/<image>", *others])
    if nested := dataset.nested():
        diagnosis.notes.append(nested)
    for images, why in (
        (True, "outside <domain>/<class>/"),
        (False, "not the ending of an image format that is read"),
    ):
        unread = [path for path in dataset.unread if is_image(path) == images]
        names = [path.relative_to(dataset.folder).as_posix() for path in unread]
        if names:
            many = f"{len(names):,} {'image' if images else 'file'}{'s' * (len(names) > 1)}"
            diagnosis.notes.append(f"{many} not read ({why}): {_some(names)}")


# ------------------------------------------------------------------------------- pictures


def _look_at_all(
    dataset: DomainDataset, progress: Callable[[int, int], None] | None
) -> list[_Look]:
    looks: list[_Look] = []
    total = len(dataset.records().paths)
    for look in in_threads(lambda index: _look(dataset, index), range(total)):
        looks.append(look)
        if progress is not None and (len(looks) % 256 == 0 or len(looks) == total):
            progress(len(looks), total)
    return looks


def _look(dataset: DomainDataset, index: int) -> _Look:
    rgb = (dataset.channels, dataset.pixels) == (3, "uint8")
    try:
        content, facts = "", FileFacts(SIDE)
        if isinstance(dataset, FileDataset):
            content = dataset.content(index)
            facts = image_facts(dataset.file(index)) if rgb else facts
        pixels: NDArray[Any] = np.ascontiguousarray(read_checked(dataset, index, SIDE))
    except UnreadableError as error:
        return _Look(fault=error.why)
    except DataError as error:
        return _Look(fault=str(error))
    digest = hashlib.blake2b(pixels.data, digest_size=16).digest()
    one_colour = bool((pixels == pixels[0, 0]).all())
    return _Look(content, None, digest, signature(pixels) if rgb else None, one_colour, facts)


def _compare(
    records: Listing, looks: Sequence[_Look], published: Signatures, diagnosis: Diagnosis
) -> None:
    """Compare every picture with the published one."""
    diagnosis.compared.append(
        f"every picture with the published one, by {SIDE} bits of how it looks and its mean colour"
    )
    chosen = [i for i, look in enumerate(looks) if look.signature is not None]
    if not chosen:
        return
    result = compare_signatures(_signatures(records, looks, chosen, 0), published)
    names = [records.paths[i] for i in chosen]
    moved = [f"{names[i]} is {was}" for i, was in result.moved.items()]
    strange, recoloured = ([names[i] for i in some] for some in (result.strange, result.recoloured))
    small = [names[k] for k, i in enumerate(chosen) if looks[i].facts.side < published.side / 2]
    for files, what in (
        (moved, "the published picture of another class or domain: {}"),
        (strange, "none of the published pictures: {}"),
        (recoloured, "the published picture in other colours: {}"),
    ):
        if files:
            diagnosis.find(
                "picture", f"{_images(files)} show{'' if files[1:] else 's'} {what}", files
            )
    if result.absent:
        text = f"{_images(result.absent)} of the published ones are shown by no file: {{}}"
        diagnosis.find("picture", text, result.absent)
    if small:
        text = f"{_images(small)} are less than half as large as the published ones: {{}}"
        diagnosis.find("small", text, small)


def _notice(
    dataset: DomainDataset, records: Listing, looks: Sequence[_Look], diagnosis: Diagnosis
) -> None:
    """Report unusual properties of files, whether or not the published ones are known."""
    deep = [records.paths[i] for i, look in enumerate(looks) if look.facts.sixteen_bits]
    if deep:
        text = f"{_images(deep)} of 16 bits a value, of which the upper eight are read: {{}}"
        diagnosis.find("depth", text, deep)
    clear = "composited onto white (data.background=white)"
    if dataset.background == "black":
        clear = "decoded as the colour below, mostly black (data.background=black)"
    turn = "followed (data.exif=true)" if dataset.exif else "not followed (data.exif=false)"
    facts = [look.facts for look in looks]
    for what, chosen in (
        ("of one colour all over", [look.one_colour for look in looks]),
        (f"with transparent pixels, which are {clear}", [f.transparent for f in facts]),
        (f"with a note to turn it (EXIF), which is {turn}", [f.turned for f in facts]),
        ("of several frames, of which the first is read", [f.frames for f in facts]),
        (
            f"above {LARGE // 10**6} megapixels, decoded at a reduced scale",
            [f.reduced for f in facts],
        ),
    ):
        names = [name for name, true in zip(records.paths, chosen, strict=True) if true]
        if names:
            diagnosis.notes.append(f"{_images(names)} {what}: {_some(names)}")


def _duplicates(
    dataset: DomainDataset, records: Listing, looks: Sequence[_Look], diagnosis: Diagnosis
) -> None:
    """Report images under several names, worst first: in several classes or domains."""
    same: dict[bytes, list[int]] = {}
    for index, look in enumerate(looks):
        if look.fault is None:
            same.setdefault(look.pixels, []).append(index)
    groups = [group for group in same.values() if len(group) > 1]
    number = sum(len(group) - 1 for group in groups)
    if dataset.duplicates is not None and number == dataset.duplicates:
        if number:
            twice = _images(range(number))
            diagnosis.notes.append(f"{twice} are there twice, as in the published data set")
        return
    classes_differ, same_class = "in different classes", "in the same domain and class"
    if not dataset.classes:
        classes_differ, same_class = "with different targets", "in the same domain"
    kinds: dict[str, list[list[int]]] = {classes_differ: [], "across domains": [], same_class: []}
    for group in groups:
        classes, domains = set(records.labels[group]), set(records.domains[group])
        same_label, across, beside = kinds.values()
        (same_label if len(classes) > 1 else across if len(domains) > 1 else beside).append(group)
    for where, chosen in kinds.items():
        if not chosen:
            continue
        pairs = [_some([records.paths[index] for index in group], " = ") for group in chosen]
        text = f"{_images(pairs)} under several names {where}: {_some(pairs)}"
        if dataset.duplicates is None and where == same_class:
            unknown = "; whether they are in the published data set is not known"
            diagnosis.notes.append(text + unknown * (not dataset.identity))
            continue
        files = tuple(records.paths[index] for group in chosen for index in group)
        diagnosis.findings.append(Finding("duplicate", text, files=files))


def _some(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return between.join(names[:SHOWN]) + more


def _images(some: Sized) -> str:
    return f"{len(some):,} image" + ("" if len(some) == 1 else "s")
