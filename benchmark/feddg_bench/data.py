"""What a data set is: images of classes in domains, listed once and checked against promises.

A plugin subclasses `DomainDataset`, `FileDataset` where every image is a file, or
`ImageFolderDataset` where these lie in folders named by domain and class. This module imports
neither torch nor an image library until an image is read.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.errors import DataError
from feddg_bench.locations import data_roots
from feddg_bench.mirrors import Download, HubDownload
from feddg_bench.parallel import in_threads

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})


@dataclass(frozen=True)
class Records:
    """The images of a data set, n of them, in the order of their indices.

    Attributes:
        paths: Unique relative names such as ``photo/dog/pic_001.jpg``: domain, class, file.
        labels: int64 [n], positions in the data set's ``classes``; or float32 [n], the targets of
            a regression.
        domains: int64 [n], positions in the data set's ``domains``.
        groups: int64 [n], positions in the data set's ``groups``, -1 for images in none; or
            nothing where the data set has no groups.
    """

    paths: tuple[str, ...]
    labels: NDArray[np.int64] | NDArray[np.float32]
    domains: NDArray[np.int64]
    groups: NDArray[np.int64] | None = None


class DomainDataset(ABC):
    """Images with a class and a domain each; the class attributes are its promises.

    Args:
        data_root: Folder given by the user; embedded data sets need none.
    """

    name: ClassVar[str]
    """As on the command line; also the name of the plugin's module."""
    title: ClassVar[str]
    """As in a table."""
    domains: ClassVar[tuple[str, ...]]
    """In the cycle order of leave-two-domains-out: one validates, the next one tests."""
    letters: ClassVar[Mapping[str, str]]
    """Code of each domain; the order here is that of letters in a scenario's canonical name."""
    classes: ClassVar[tuple[str, ...]]
    """Names of the classes; labels are positions in this tuple. Empty for a regression."""
    licence: ClassVar[str]
    source: ClassVar[str]
    """Where the images come from and how a user gets them."""
    version: ClassVar[int] = 1
    """Raised whenever the same files would give other images, labels or domains."""
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    """Images of each class in each domain, where they are known and so can be checked; of a
    regression one number a domain."""
    split_sizes: ClassVar[Mapping[str, int]] = {}
    """Images of each published split, where they are known; only `feddg_bench.doctor` compares."""
    task: ClassVar[str] = "classification"
    """Or ``regression``."""
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    """What is reported, out of accuracy, macro_f1, worst_group and pearson; the first one is the
    key metric, by which rounds are chosen."""
    groups: tuple[str, ...] = ()
    """Names of groups of images, over which the worst is measured."""
    group_title: ClassVar[str] = ""
    """What a group is, such as ``slide`` or ``region``."""
    channels: ClassVar[int] = 3
    """Of an image."""
    pixels: ClassVar[str] = "uint8"
    """Or ``float16``, for values that are normalised already."""
    bands: ClassVar[tuple[int, ...]] = (0, 1, 2)
    """Channels that a contact sheet shows as red, green and blue, where there are more."""
    official: Mapping[str, tuple[str, ...]] | Mapping[str, Mapping[str, tuple[str, ...]]] = {}
    """Domains by role (train, val, test) in the published splits, where these are over domains; if
    there are several, a name for each and this."""
    identity: Mapping[str, Sequence[str]] = {}
    """What tells a data set whose names are those on disk from others, in a run's key."""
    measured_by_domain: ClassVar[bool] = True
    """Whether every domain of a split is measured by itself, or the split as a whole."""
    archive_bytes: ClassVar[int | None] = None
    """Size of the published download, where it is known."""
    duplicates: ClassVar[int | None] = None
    """Images of the published set that equal an earlier one, where somebody has counted them."""
    downloads: ClassVar[tuple[Download | HubDownload, ...]] = ()
    """What ``data download`` fetches: only what the licence lets it, and what can be checked."""
    no_download: ClassVar[str] = "no server is known from which its licence lets us fetch it"
    """Why nothing is fetched, where `downloads` is empty: the rest of a sentence."""
    research_only: ClassVar[bool] = False
    """Whether the licence is for research alone, so that a download wants ``--accept-licence``."""
    default_recipe: ClassVar[str] = "pardon"
    """Recipe of a run that names none."""

    def __init__(self, data_root: Path | None = None) -> None:
        self.data_root = data_root

    @abstractmethod
    def scan(self) -> Records:
        """List the images, in an order that depends on nothing but their names."""

    def find(self) -> Path | None:
        """Return the folder that holds the images, or nothing for embedded ones; as fast as can be.

        Raises:
            DataError: If the data set is not on this machine.
        """
        self.records()
        return None

    def published_splits(self) -> NDArray[np.int64] | None:
        """Return the place in `feddg_bench.splits.SPLITS` of every image, where it is published."""
        return None

    def scenario_splits(self, scenario: str) -> NDArray[np.int64] | None:  # noqa: ARG002
        """Return what `published_splits` does, for one of several published ones by its name."""
        return self.published_splits()

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hexadecimal hash of all contents; may read every file."""

    @abstractmethod
    def stamp(self) -> str:
        """Return a hexadecimal hash that changes when files do, without reading them."""

    @abstractmethod
    def read(self, index: int, size: int) -> NDArray[np.uint8] | NDArray[np.float16]:
        """Return image ``index``: [size, size, ``channels``] of ``pixels``; uint8 RGB by default.

        Raises:
            DataError: If the file cannot be decoded.
        """

    def records(self) -> Records:
        """Return the images after checking the promises.

        Raises:
            DataError: If a domain or a class has no image, a count is not as promised, or a
                target of a regression is not finite.
        """
        return self._records

    def records_as_found(self) -> Records:
        """Return the images, and from now on let `records` do so, whatever promises they break.

        Raises:
            DataError: If the data set is not on this machine.
        """
        self.__dict__["_records"] = self.scan()  # the value of the cached property
        return self._records

    @cached_property
    def _records(self) -> Records:
        records = self.scan()
        found = self.count(records)
        if not np.isfinite(records.labels).all():
            first = int(np.flatnonzero(~np.isfinite(records.labels))[0])
            raise DataError(
                f"{self.title}{self._where()} has the target {records.labels[first]} for "
                f"{records.paths[first]}, expected a number: get it again ({self.source})"
            )
        for axis, kind, names in ((1, "domain", self.domains), (0, "class", self.classes)):
            totals = found.sum(axis=axis) if names else ()
            empty = [n for n, total in zip(names, totals, strict=True) if not total]
            if empty:
                raise DataError(
                    f"{self.title}{self._where()} has no image of the {kind} {', '.join(empty)}: "
                    f"get it again ({self.source})"
                )
        differences = [
            f"{place} holds {have:,} instead of {want:,} images ({have - want:+,})"
            for domain, wanted in self.counts.items()
            for place, have, want in zip(
                [f"{domain}/{name}" for name in self.classes] or [domain],
                found[self.domains.index(domain)].tolist(),
                wanted,
                strict=True,
            )
            if have != want
        ]
        if differences:
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            raise DataError(
                f"{self.title}{self._where()} differs from the published data set: "
                f"{', '.join(differences[:3])}{more}; get it again ({self.source})"
            )
        return records

    def count(self, records: Records) -> NDArray[np.int64]:
        """Return the images of each class in each domain, [D, C]; [D, 1] for a regression."""
        found = np.zeros((len(self.domains), len(self.classes) or 1), dtype=np.int64)
        labels = records.labels if self.classes else np.zeros(len(records.labels))
        np.add.at(found, (records.domains, labels.astype(np.int64)), 1)
        return found

    def _where(self) -> str:
        """Return `` in FOLDER`` for messages, or nothing for embedded data."""
        return ""


class FileDataset(DomainDataset):
    """Images that are one file each; their names and bytes are what is hashed."""

    @abstractmethod
    def file(self, index: int) -> Path:
        """Return the file of image ``index``."""

    def read(self, index: int, size: int) -> NDArray[np.uint8] | NDArray[np.float16]:
        """Decode one file; see `read_image`."""
        return read_image(self.file(index), size)

    def content(self, index: int) -> str:
        """Return a hash of one file's bytes, 128 hexadecimal digits.

        Raises:
            DataError: If the file cannot be read.
        """
        file = self.file(index)
        try:
            return hashlib.blake2b(file.read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(f"cannot read the image {file}: {error.strerror}") from error

    def combine(self, contents: Iterable[str]) -> str:
        """Return the fingerprint that the images' `content`, in the order of records, makes."""
        digest = hashlib.blake2b(digest_size=16)
        for path, content in zip(self.records().paths, contents, strict=True):
            digest.update(f"{path}\0{content}\n".encode())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Return a hash over every file's name and bytes."""
        return self.combine(in_threads(self.content, range(len(self.records().paths))))

    def stamp(self) -> str:
        """Return a hash over every file's name, size and time of change."""
        digest = hashlib.blake2b(digest_size=16)
        for index, path in enumerate(self.records().paths):
            status = self.file(index).stat()
            digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()


class ImageFolderDataset(FileDataset):
    """Images in folders ``<domain>/<class>/<image>``, below one of several folders of a root.

    Names of folders are compared without regard to case, blanks, hyphens and underscores. Hidden
    files, files that are not images by their suffix, and other folders are ignored.
    """

    layouts: ClassVar[tuple[str, ...]] = ("",)
    """Folders below a data root that may hold the domains, first wins."""
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Other names of domains' folders."""

    @cached_property
    def folder(self) -> Path:
        """The folder that holds the domains.

        Raises:
            DataError: If there is none, or one without all of the domains.
        """
        best = self._likely_folder()
        missing = [domain for domain in self.domains if domain not in self._domain_folders(best)]
        if missing:
            raise DataError(
                f"{self.title} in {best} lacks the folder {', '.join(missing)}: "
                f"get it again from {self.source}"
            )
        return best

    def find(self) -> Path:
        """Return the folder that holds the domains."""
        return self.folder

    def records_as_found(self) -> Records:
        """Return the images of the domains that are there; see `DomainDataset`."""
        self.__dict__["folder"] = self._likely_folder()  # the value of the cached property
        return super().records_as_found()

    def _likely_folder(self) -> Path:
        """Return the folder that holds most of the domains, the first one of equals."""
        roots = data_roots(self.data_root, self.name)
        candidates = [root / layout for root in roots for layout in self.layouts]
        found = {folder: self._domain_folders(folder) for folder in candidates}
        if not any(found.values()):
            looked = ", ".join(map(str, roots)) or "no folder, as none was given"
            raise DataError(
                f"{self.title} was not found (looked in {looked}): get it from {self.source} and "
                f"name the folder above {', '.join(self.domains)} with --data-root, the "
                f"environment variable FEDDG_DATA, or `feddg-bench data path {self.name} DIR`, "
                f"which notes it in the settings file"
            )
        return max(candidates, key=lambda folder: len(found[folder]))

    def scan(self) -> Records:
        """List the images by domain, class and file name."""
        paths = tuple(sorted(self._files))
        parts = [path.split("/") for path in paths]
        return Records(
            paths=paths,
            labels=np.array([self.classes.index(part[1]) for part in parts], dtype=np.int64),
            domains=np.array([self.domains.index(part[0]) for part in parts], dtype=np.int64),
        )

    def file(self, index: int) -> Path:
        """Return the file of image ``index``."""
        return self._files[self.records().paths[index]]

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The file of each record's path."""
        return {
            f"{domain}/{name}/{image.name}": image
            for domain, domain_folder in self._domain_folders(self.folder).items()
            for name, class_folder in match_folders(
                domain_folder, {name: (name,) for name in self.classes}
            ).items()
            for image in class_folder.iterdir()
            if is_image(image)
        }

    def _domain_folders(self, folder: Path) -> dict[str, Path]:
        names = {domain: (domain, *self.spellings.get(domain, ())) for domain in self.domains}
        return match_folders(folder, names)

    def _where(self) -> str:
        return f" in {self.folder}"


def is_image(path: Path) -> bool:
    """Tell by its name whether a file is an image."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def match_folders(folder: Path, names: Mapping[str, Sequence[str]]) -> dict[str, Path]:
    """Return the sub-folder of ``folder`` for each key of ``names`` that has one.

    Args:
        folder: May be missing: then there are none.
        names: Spellings of each key, the first that is there wins.

    Raises:
        DataError: If the folder may not be read.
    """
    try:
        children = {plain(path.name): path for path in sorted(folder.iterdir()) if path.is_dir()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}") from error
    return {
        key: next(children[plain(s)] for s in spellings if plain(s) in children)
        for key, spellings in names.items()
        if any(plain(s) in children for s in spellings)
    }


def plain(name: str) -> str:
    """Return a name as folders' are compared: no case, blanks, hyphens or underscores."""
    return name.casefold().translate(str.maketrans("", "", " _-"))


def read_image(path: Path, size: int) -> NDArray[np.uint8]:
    """Decode an image file to RGB and make it a `square`.

    Raises:
        DataError: If the file cannot be decoded.
    """
    from PIL.Image import open as open_image

    try:
        with open_image(path) as image:
            return square(image.convert("RGB"), size)
    except Exception as error:  # a damaged file makes decoders raise anything
        raise DataError(
            f"cannot decode the image {path} ({error}): replace it by a fresh copy"
        ) from error


def square(image: Image, size: int) -> NDArray[np.uint8]:
    """Squash an image to uint8 [size, size, C], bilinearly and with antialiasing.

    The same pixels as torchvision's ``Resize((size, size))`` gives on Pillow images.
    """
    from PIL.Image import Resampling

    return np.asarray(image.resize((size, size), Resampling.BILINEAR))
