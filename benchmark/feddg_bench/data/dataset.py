"""What a data set is: images of classes in domains, listed once and checked against promises.

A plugin subclasses `DomainDataset`, `FileDataset` where every image is a file, or
`feddg_bench.data.image_folders.ImageFolderDataset` where these lie in folders named by domain and
class.
This module imports neither torch nor an image library until an image is read.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import plain_file
from feddg_bench.common.parallel import in_threads
from feddg_bench.data.fetch.mirrors import Download, HubDownload

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Listing:
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
    reference_domains: ClassVar[tuple[str, ...]] = ()
    """The domains in the order of their ids in FedDG_Benchmark, if that is another one: its
    partition hands out images domain by domain (``partition.rounding=reference``)."""
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
    """Images of each published split, where they are known; the doctor alone compares them."""
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
    signatures: ClassVar[Path | None] = None
    """File of signatures of the published images (`feddg_bench.data.inspect.signatures`)."""
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
    def scan(self) -> Listing:
        """List the images, in an order that depends on nothing but their names."""

    def find(self) -> Path | None:
        """Return the folder that holds the images, or nothing for embedded ones; as fast as can be.

        Raises:
            DataError: If the data set is not on this machine.
        """
        self.records()
        return None

    def not_found(self, what: str, looked_in: Iterable[Path], folder: str) -> DataError:
        """Return the error that something was in none of the folders, and how to mend it.

        Args:
            what: What was looked for, in the singular.
            looked_in: The roots of `feddg_bench.data.locations.data_roots`.
            folder: The folder that the user is to name.
        """
        looked = ", ".join(map(str, looked_in)) or "no folder, as none was given"
        if self.downloads:
            get = f"get it with `feddg-bench data download {self.name}`, or name"
        else:
            get = f"get it from {self.source} and name"
        return DataError(
            f"{what} was not found (looked in {looked}): {get} {folder} with --data-root, the "
            f"environment variable FEDDG_DATA, or `feddg-bench data path {self.name} DIR`, which "
            f"notes it in the settings file"
        )

    def published_splits(self) -> NDArray[np.int64] | None:
        """Return the place in `feddg_bench.data.splits.SPLITS` of every image, if published."""
        return None

    def scenario_splits(self, scenario: str) -> NDArray[np.int64] | None:
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

    def records(self) -> Listing:
        """Return the images after checking the promises.

        Raises:
            DataError: If a domain or a class has no image, a count is not as promised, or a
                target of a regression is not finite.
        """
        return self._records

    def records_as_found(self) -> Listing:
        """Return the images, and from now on let `records` do so, whatever promises they break.

        Raises:
            DataError: If the data set is not on this machine.
        """
        self.__dict__["_records"] = self.scan()  # the value of the cached property
        return self._records

    @cached_property
    def _records(self) -> Listing:
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
                hint = self.hint(empty[0]) if kind == "domain" else ""
                raise DataError(
                    f"{self.title}{self._where()} has no image of the {kind} {', '.join(empty)}"
                    f"{hint}: get it again ({self.source})"
                )
        differences = [text for _, _, text in self.differences(records)]
        if differences:
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            raise DataError(
                f"{self.title}{self._where()} differs from the published data set: "
                f"{', '.join(differences[:3])}{more}; get it again ({self.source})"
            )
        return records

    def differences(self, records: Listing) -> Iterator[tuple[str, str | None, str]]:
        """Yield domain, class if any, and how their number of images is not as published."""
        found = self.count(records)
        for domain, wanted in self.counts.items():
            have = found[self.domains.index(domain)].tolist()
            for name, mine, published in zip(self.classes or (None,), have, wanted, strict=True):
                if mine != published:
                    place = domain if name is None else f"{domain}/{name}"
                    text = f"{place} holds {mine:,} images instead of {published:,}"
                    yield domain, name, f"{text} ({mine - published:+,})"

    def hint(self, domain: str, name: str | None = None) -> str:
        """Return what may mend a domain, or its class, without images: the end of a sentence."""
        return ""

    def count(self, records: Listing) -> NDArray[np.int64]:
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
        plain_file(file)
        try:
            return hashlib.blake2b(file.read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(f"cannot read the image {file}: {error.strerror}") from error

    def combine(self, contents: Iterable[str]) -> str:
        """Return the fingerprint that the images' `content`, in the order of records, makes."""
        digest = hashlib.blake2b(digest_size=16)
        for path, content in zip(self.records().paths, contents, strict=True):
            digest.update(os.fsencode(f"{path}\0{content}\n"))
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Return a hash over every file's name and bytes."""
        return self.combine(in_threads(self.content, range(len(self.records().paths))))

    def stamp(self) -> str:
        """Return a hash over every file's name, size and time of change.

        Raises:
            DataError: If there is no such file.
        """
        digest = hashlib.blake2b(digest_size=16)
        for index, path in enumerate(self.records().paths):
            status = plain_file(self.file(index))
            digest.update(os.fsencode(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n"))
        return digest.hexdigest()


_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""Of images, whatever their suffix; Pillow would start programs to read some others."""
MOST_PIXELS = 2**26
"""Of an image: what claims to have more is not decoded."""


def read_image(path: Path, size: int) -> NDArray[np.uint8]:
    """Decode an image file to RGB and make it a `square`.

    Of 16 bits the upper eight are taken. Notes on how a camera was held (EXIF) are not followed.

    Raises:
        DataError: If the file cannot be decoded.
    """
    from PIL.Image import fromarray
    from PIL.Image import open as open_image

    plain_file(path)
    fault = f"it has more than {MOST_PIXELS:,} pixels"
    try:
        with open_image(path, formats=_FORMATS) as image:
            if image.width * image.height <= MOST_PIXELS:
                grey16 = image.mode.startswith("I")  # which `convert` would clip
                eight = fromarray((np.asarray(image) >> 8).astype(np.uint8)) if grey16 else image
                return square(eight.convert("RGB"), size)
    except Exception as error:  # a damaged file makes decoders raise anything
        fault = str(error)
    raise DataError(
        f"cannot decode the image {path} ({fault}): replace it by a fresh copy, as "
        f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
    )


def image_facts(path: Path) -> tuple[int, bool, bool]:
    """Return the shorter side of an image file, and whether it has 16 bits and a note to turn it.

    Raises:
        DataError: If it is no image file.
    """
    from PIL.Image import open as open_image

    plain_file(path)
    try:
        with open_image(path, formats=_FORMATS) as image:
            sixteen = image.mode.startswith("I") or ";16" in str(image.tile)
            return min(image.size), sixteen, image.getexif().get(_ORIENTATION, 1) != 1
    except Exception as error:  # a damaged file makes decoders raise anything
        raise DataError(f"cannot decode the image {path} ({error})") from error


_ORIENTATION = 0x0112


def square(image: Image, size: int) -> NDArray[np.uint8]:
    """Squash an image to uint8 [size, size, C], bilinearly and with antialiasing.

    The same pixels as torchvision's ``Resize((size, size))`` gives on Pillow images.
    """
    from PIL.Image import Resampling

    return np.asarray(image.resize((size, size), Resampling.BILINEAR))
