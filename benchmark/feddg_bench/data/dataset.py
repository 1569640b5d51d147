"""Base classes of data sets: images with class and domain, listed once and checked.

A plugin subclasses `DomainDataset`, `FileDataset` if every image is a file, or
`feddg_bench.data.image_folders.ImageFolderDataset` if the files lie in folders named by domain and
class.
This module imports neither torch nor an image library until an image is read.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import (
    DataError,
    FeddgError,
    PluginError,
    SettingsError,
    in_a_line,
)
from feddg_bench.common.files import file_state, plain_file
from feddg_bench.common.parallel import in_threads
from feddg_bench.common.titles import counted
from feddg_bench.config.layers import validate
from feddg_bench.config.reading import composed
from feddg_bench.config.schema import DatasetSettings
from feddg_bench.data.fetch.mirrors import Download, HubDownload
from feddg_bench.data.locations import check_root

if TYPE_CHECKING:
    from PIL.Image import Image, Transpose
    from PIL.ImageFile import ImageFile
    from PIL.PngImagePlugin import PngInfo

    from feddg_bench.config.schema import DataSettings


DECODING = ("background", "exif", "skip_unreadable")
"""Settings of ``data`` that decide how image files are decoded; a `DomainDataset` holds them."""


@dataclass(frozen=True)
class Listing:
    """The n images of a data set, in the order of their indices.

    Attributes:
        paths: Unique relative names such as ``photo/dog/pic_001.jpg``: domain, class, file.
        labels: int64 [n], positions in the data set's ``classes``; or float32 [n], the targets of
            a regression.
        domains: int64 [n], positions in the data set's ``domains``.
        groups: int64 [n], positions in the data set's ``groups``, -1 for images in none; or
            ``None`` if the data set has no groups.
    """

    paths: tuple[str, ...]
    labels: NDArray[np.int64] | NDArray[np.float32]
    domains: NDArray[np.int64]
    groups: NDArray[np.int64] | None = None


class DomainDataset(ABC):
    """Images, each with a class and a domain; the class attributes declare what is expected.

    Args:
        data_root: Folder given by the user; embedded data sets need none.

    Raises:
        SettingsError: If there is no such folder.
    """

    name: ClassVar[str]
    """Name on the command line, and of the plugin's module."""
    title: ClassVar[str]
    """Name shown in tables."""
    domains: ClassVar[tuple[str, ...]]
    """Names in the cycle order of leave-two-domains-out: one validates, the next one tests."""
    letters: ClassVar[Mapping[str, str]] = {}
    """Code of each domain, in the order of a scenario's canonical name; default `short_codes`."""
    reference_domains: ClassVar[tuple[str, ...]] = ()
    """Domains in the order of their ids in FedDG_Benchmark, if not that of `domains`: its
    partition deals out images domain by domain (``partition.rounding=reference``)."""
    classes: ClassVar[tuple[str, ...]]
    """Names of the classes; labels are positions in this tuple. Empty for a regression."""
    licence: ClassVar[str] = "not stated"
    source: ClassVar[str] = "its authors"
    """Where the images come from and how a user gets them."""
    version: ClassVar[int] = 1
    """Incremented whenever the same files would give different images, labels or domains."""
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    """Number of images of each class in each domain, if known, to be checked. One number per domain
    for a regression, or if only the total is known."""
    total: ClassVar[int | None] = None
    """Number of all images, if only that is known."""
    split_sizes: ClassVar[Mapping[str, int]] = {}
    """Number of images in each published split, if known; only the doctor compares them."""
    task: ClassVar[str] = "classification"
    """``classification`` or ``regression``."""
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    """Reported metrics, out of accuracy, macro_f1, worst_group and pearson, and those of
    ``evaluation.metrics``; the first is the key metric, which selects the round."""
    prompts: ClassVar[Mapping[str, str]] = {}
    """Text of each class for a text encoder, where a name such as ``03`` says nothing; by default
    `prompt`."""
    groups: tuple[str, ...] = ()
    """Names of the groups of images for the worst-group metric."""
    channels: ClassVar[int] = 3
    """Channels of an image."""
    pixels: ClassVar[str] = "uint8"
    """Type of the pixels: ``uint8``, or ``float16`` for values that are already normalised."""
    bands: ClassVar[tuple[int, ...]] = (0, 1, 2)
    """Channels that a contact sheet shows as red, green and blue, if there are three or more."""
    official: Mapping[str, tuple[str, ...]] | Mapping[str, Mapping[str, tuple[str, ...]]] = {}
    """Domains by role (train, val, test) in the published splits, if these separate domains; with
    several sets of splits, such a mapping for each, by name."""
    Settings: ClassVar[type[DatasetSettings]] = DatasetSettings
    """The data set's own settings (``world.*``), if it computes its images."""
    settings: DatasetSettings
    """Values of these settings; `adjusted` sets those of a run."""
    default_scenario: ClassVar[Mapping[str, str]] = {}
    """Protocol -> scenario of a request that names none; other protocols use their defaults."""
    label: str = ""
    """Name in tables of a data set that differs between users, instead of ``title``."""
    identity: Mapping[str, Sequence[str]] = {}
    """Part of the run key: identifies a data set whose domains and classes are found on disk."""
    measured_by_domain: ClassVar[bool] = True
    """Whether each domain of a split is measured separately, or the split as a whole."""
    archive_bytes: ClassVar[int | None] = None
    """Size of the published download, if known."""
    duplicates: ClassVar[int | None] = None
    """Number of published images that equal an earlier one, if known."""
    signatures: ClassVar[Path | None] = None
    """File of signatures of the published images (`feddg_bench.data.inspect.signatures`)."""
    downloads: ClassVar[tuple[Download | HubDownload, ...]] = ()
    """Files for ``data download``: only those that the licence allows and that can be checked."""
    no_download: ClassVar[str] = "no server is known from which its licence lets us fetch it"
    """Reason why nothing is fetched if `downloads` is empty, as the end of a sentence."""
    research_only: ClassVar[bool] = False
    """Whether the licence allows research only, so that a download needs ``--accept-licence``."""
    default_protocol: ClassVar[str] = "ltdo"
    """Protocol of a run that names none."""
    default_recipe: ClassVar[str] = "quick"
    """Recipe of a run that names none."""
    synthetic: ClassVar[bool] = False
    """Whether its domains are computed; the report shows real images first."""
    background: str = "black"
    """Value of ``data.background`` for decoding image files (`decoded`)."""
    exif: bool = False
    """Value of ``data.exif`` for decoding image files (`decoded`)."""
    skip_unreadable: bool = False
    """Value of ``data.skip_unreadable`` for decoding image files (`decoded`)."""
    _listing_kept: Listing | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        own = vars(cls)
        if "letters" not in own and names_only(domains := own.get("domains")):
            cls.letters = cls.letters if {*cls.letters} == {*domains} else short_codes(domains)

    def __init__(self, data_root: Path | None = None) -> None:
        check_root(data_root)
        self.data_root = data_root
        self.settings = self.Settings()

    @abstractmethod
    def scan(self) -> Listing:
        """List the images, in an order that depends only on their names."""

    def find(self) -> Path | None:
        """Return the folder of the images, or ``None`` for embedded ones, as quickly as possible.

        Raises:
            DataError: If the data set is not on this machine.
        """
        self.records()
        return None

    def not_found(
        self, what: str, looked_in: Iterable[Path], folder: str, near: Sequence[Path] = ()
    ) -> DataError:
        """Return an error that says what was missing, where it was looked for and how to get it.

        Args:
            what: What was looked for, in the singular.
            looked_in: The roots of `feddg_bench.data.locations.data_roots`.
            folder: Description of the folder that the user should name.
            near: Deeper folders that hold it.
        """
        looked = ", ".join(map(str, looked_in)) or "no folder, as none was given"
        if near:
            return DataError(
                f"{what} was not found in {looked}, but in {near[0]}: give --data-root {near[0]}"
            )
        if self.downloads:
            get = f"get it with `feddg-bench data download {self.name}`, or name"
        else:
            get = f"get it from {self.source} and name"
        return DataError(
            f"{what} was not found (looked in {looked}): {get} {folder} with --data-root, the "
            f"environment variable FEDDG_DATA, or `feddg-bench data path {self.name} DIR`, which "
            f"stores the path"
        )

    def published_splits(self) -> NDArray[np.int64] | None:
        """Return each image's position in `feddg_bench.data.splits.SPLITS`.

        ``None`` if no splits are published.
        """
        return None

    def scenario_splits(self, scenario: str) -> NDArray[np.int64] | None:
        """Return the same as `published_splits`, for the set of splits named ``scenario``."""
        return self.published_splits()

    def answers(self, train: Sequence[str], test: str) -> Mapping[str, float]:
        """Return the known accuracies on domain ``test``, from 0 to 1, by name of the rule.

        ``invariant`` and ``erm`` are the rules that `recovered` compares; real images have none.
        ``train`` are the training domains.
        """
        return {}

    def adjusted(self, own: Mapping[str, Any]) -> Self:
        """Return the data set with other values of its own settings.

        Raises:
            SettingsError: If one is unknown or out of range.
        """
        settings = validate(self.Settings, own, "world.")
        if settings == self.settings:
            return self
        other = type(self)(self.data_root)
        other.settings = settings
        return other

    def decoded(self, data: DataSettings) -> Self:
        """Return the data set, decoding image files by the settings in `DECODING`.

        Raises:
            SettingsError: If they are set but `read_image` does not decode the images.
        """
        chosen = {name: getattr(data, name) for name in DECODING}
        if chosen == {name: getattr(self, name) for name in DECODING}:
            return self
        possible: bool = decodes_files(self)
        if not possible:
            raise SettingsError(
                f"{', '.join(f'data.{name}' for name in DECODING)} are for data sets of image "
                f"files such as PNG, and {self.name} makes its images otherwise: leave them out"
            )
        other = copy.copy(self)
        for name, value in chosen.items():
            setattr(other, name, value)
        return other

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hexadecimal hash of all contents; may read every file."""

    @abstractmethod
    def stamp(self) -> str:
        """Return a hexadecimal hash that changes when files do, without reading them."""

    @abstractmethod
    def read(self, index: int, size: int) -> NDArray[np.uint8] | NDArray[np.float16]:
        """Return image ``index``, [size, size, ``channels``] of type ``pixels``; default uint8 RGB.

        Raises:
            DataError: If the file cannot be decoded.
        """

    def records(self) -> Listing:
        """Return the images, checked against the class attributes.

        Raises:
            DataError: If the images cannot be listed, there is only one class, a domain or a class
                has no image, a count differs from `counts`, or a target of a regression is not
                finite.
            PluginError: If the lengths in the listing differ, or a label or a domain is out of
                range.
        """
        if self._listing_kept is None:
            self._listing_kept = self._promised()
        return self._listing_kept

    def records_as_found(self) -> Listing:
        """Return the images found, even if incomplete; from then on, `records` returns the same.

        Raises:
            DataError: If the data set is not on this machine, or the images cannot be listed.
            PluginError: If the lengths in the listing differ, or a label or a domain is out of
                range.
        """
        self._listing_kept = self._scanned()
        return self._listing_kept

    def _scanned(self) -> Listing:
        try:
            records = self.scan()
        except FeddgError:
            raise
        except Exception as error:
            raise DataError(
                f"the images of {self.title} cannot be listed: {in_a_line(error)}"
            ) from error
        lengths = {len(records.paths), len(records.labels), len(records.domains)}
        if len(lengths) > 1:
            raise PluginError(
                f"{type(self).__name__}.scan gave {len(records.paths)} paths, "
                f"{len(records.labels)} labels and {len(records.domains)} domains; expected one "
                f"of each for every image"
            )
        positions: list[tuple[str, NDArray[Any], Sequence[str]]]
        positions = [("domain", records.domains, self.domains)]
        if self.classes:
            positions.append(("label", records.labels, self.classes))
        for kind, places, names in positions:
            wrong = np.flatnonzero((places < 0) | (places >= len(names)))
            if len(wrong):
                raise PluginError(
                    f"{type(self).__name__}.scan gave {records.paths[wrong[0]]} the {kind} "
                    f"{places[wrong[0]]}; expected a position among {len(names)}, from 0 to "
                    f"{len(names) - 1}"
                )
        return records

    def _promised(self) -> Listing:
        """Scan the images again and return them checked, as `records` does."""
        records = self._scanned()
        counts = self.count(records)
        if not np.isfinite(records.labels).all():
            first = int(np.flatnonzero(~np.isfinite(records.labels))[0])
            raise DataError(
                f"{self.title}{self._where()} has the target {records.labels[first]} for "
                f"{records.paths[first]}, expected a number: get it again ({self.source})"
            )
        for axis, kind, names in ((1, "domain", self.domains), (0, "class", self.classes)):
            totals = counts.sum(axis=axis) if names else ()
            empty = [n for n, total in zip(names, totals, strict=True) if not total]
            if empty:
                hint = self.hint(empty[0]) if kind == "domain" else ""
                raise DataError(
                    f"{self.title}{self._where()} has no image of the {kind} {', '.join(empty)}"
                    f"{hint or f': get it again ({self.source})'}"
                )
        if len(self.classes) == 1:
            raise DataError(
                f"{self.title}{self._where()} has only the class {self.classes[0]}: a run needs two"
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
        """Yield domain, class (``None`` for a regression) and message for each unexpected count."""
        counts = self.count(records)
        for domain, wanted in self.counts.items():
            have = counts[self.domains.index(domain)].tolist()
            names: Sequence[str | None] = self.classes or (None,)
            if len(wanted) == 1:  # the total
                have, names = [sum(have)], (None,)
            for name, number, published in zip(names, have, wanted, strict=True):
                if number != published:
                    place = domain if name is None else f"{domain}/{name}"
                    text = f"{place} holds {counted(number, 'image')} instead of {published:,}"
                    yield domain, name, f"{text} ({number - published:+,})"

    def prompt(self, name: str) -> str:
        """Return the text of a class for a text encoder, such as ``a photo of a living room``."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", " ", name).lower().strip()
        article = "" if words.startswith("the ") else "a "
        return self.prompts.get(name, f"a photo of {article}{words}")

    def hint(self, domain: str, name: str | None = None) -> str:
        """Return advice for a domain or class without images, as the end of a sentence."""
        return ""

    def count(self, records: Listing) -> NDArray[np.int64]:
        """Return the number of images per domain and class, [D, C]; [D, 1] for a regression."""
        counts = np.zeros((len(self.domains), len(self.classes) or 1), dtype=np.int64)
        labels = records.labels if self.classes else np.zeros(len(records.labels))
        np.add.at(counts, (records.domains, labels.astype(np.int64)), 1)
        return counts

    def _where(self) -> str:
        """Return `` in FOLDER`` for messages, or an empty string for embedded data."""
        return ""


def names_only(value: object) -> TypeGuard[tuple[str, ...]]:
    """Return whether a value is a tuple of texts."""
    return isinstance(value, tuple) and all(isinstance(each, str) for each in value)


def short_codes(domains: Sequence[str]) -> dict[str, str]:
    """Return a short code for each domain: its first letters, as many as set it apart.

    Only letters and digits count, without regard to case. Words with which all names begin are left
    out.

    >>> short_codes(("photo", "Clip art", "cartoon"))
    {'photo': 'p', 'Clip art': 'cl', 'cartoon': 'ca'}
    >>> short_codes(("hospital_1", "hospital_2"))
    {'hospital_1': '1', 'hospital_2': '2'}
    """
    words = [re.findall(r"[^\W_]+", composed(domain).casefold()) for domain in domains]
    while len(words) > 1 and all(each[1:] and each[0] == words[0][0] for each in words):
        words = [each[1:] for each in words]
    names = ["".join(each) for each in words]
    codes = {}
    for number, (domain, name) in enumerate(zip(domains, names, strict=True)):
        others = [*names[:number], *names[number + 1 :]]
        lengths = range(1, len(name) + 1)
        codes[domain] = next(
            (name[:n] for n in lengths if not any(o.startswith(name[:n]) for o in others)), name
        )
    return codes


def read_checked(
    dataset: DomainDataset, index: int, size: int
) -> NDArray[np.uint8] | NDArray[np.float16]:
    """Return the image that `DomainDataset.read` returns, after checking its shape and type.

    Raises:
        DataError: If the image cannot be read; the message names data set, image and fault.
        PluginError: If its shape or type is wrong.
    """
    try:
        image = dataset.read(index, size)
    except FeddgError:
        raise
    except Exception as error:
        raise DataError(
            f"cannot read the image {dataset.records().paths[index]} of {dataset.title}: "
            f"{in_a_line(error)}"
        ) from error
    shape = (size, size, dataset.channels)
    if image.shape != shape or image.dtype != np.dtype(dataset.pixels):
        raise PluginError(
            f"{type(dataset).__name__}.read gave {image.dtype} {list(image.shape)} for image "
            f"{index}; expected {dataset.pixels} {list(shape)}"
        )
    return image


class FileDataset(DomainDataset):
    """Data set with one file per image; the fingerprint hashes the files' names and bytes."""

    @abstractmethod
    def file(self, index: int) -> Path:
        """Return the file of image ``index``."""

    def read(self, index: int, size: int) -> NDArray[np.uint8] | NDArray[np.float16]:
        """Decode one file; see `read_image`."""
        return read_image(self.file(index), size, background=self.background, exif=self.exif)

    def content(self, index: int) -> str:
        """Return a hash of one file's bytes, 128 hexadecimal digits.

        They are 0 if there is no plain file that can be read: decoding says so, for all at once.
        """
        file = self.file(index)
        try:
            plain_file(file)
            return hashlib.blake2b(file.read_bytes()).hexdigest()
        except (DataError, OSError):
            return "0" * 128

    def combine(self, contents: Iterable[str]) -> str:
        """Return the fingerprint, given the images' `content` in the order of `records`."""
        digest = hashlib.blake2b(digest_size=16)
        for path, content in zip(self.records().paths, contents, strict=True):
            digest.update(os.fsencode(f"{path}\0{content}\n"))
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Return a hash over every file's name and bytes."""
        return self.combine(in_threads(self.content, range(len(self.records().paths))))

    def stamp(self) -> str:
        """Return a hash over every file's name, size, times and inode (`file_state`)."""
        digest, absent = hashlib.blake2b(digest_size=16), []
        for index, path in enumerate(self.records().paths):
            status = image_status(self.file(index))
            if status is None:
                absent.append(index)
            state = None if status is None else file_state(status)
            digest.update(os.fsencode(f"{path}\0{state}\n"))
        self.check_absent(absent)
        return digest.hexdigest()

    def check_absent(self, absent: Sequence[int]) -> None:
        """Raise an error if images that are missing are no single ones; decoding names single ones.

        Args:
            absent: Positions of images that are no plain files.
        """


def image_status(path: Path) -> os.stat_result | None:
    """Return the status of an image's file; ``None`` if it is no plain file, as decoding says."""
    try:
        return plain_file(path)
    except DataError:
        return None


def decodes_files(dataset: DomainDataset) -> TypeGuard[FileDataset]:
    """Return whether the data set's images are files that `read_image` decodes."""
    return isinstance(dataset, FileDataset) and type(dataset).read is FileDataset.read


FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP", "TIFF", "PPM", "AVIF")
"""Image formats that are read, whatever the suffix; for some others, Pillow starts programs."""
MOST_PIXELS = 2**28
"""Maximum number of pixels of an image, above those of any camera; others are not decoded."""
LARGE = 2**26
"""Number of pixels above which a JPEG is decoded at a fraction of its size, to save memory."""
_SOFTWARE = "feddg-bench"


class UnreadableError(DataError):
    """An image that cannot be decoded; ``why`` ends with the remedy and does not name the file."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot decode the image {path}: {why}")
        self.path, self.why = path, why

    def __reduce__(self) -> tuple[type[UnreadableError], tuple[Path, str]]:
        return type(self), (self.path, self.why)


def read_image(
    path: Path, size: int, *, background: str = "black", exif: bool = False
) -> NDArray[np.uint8]:
    """Decode the first frame of an image file to RGB and make it a `square`.

    16-bit values keep their upper eight bits. A JPEG that lacks only its end marker is read.

    Args:
        path: The file.
        size: Side of the square in pixels.
        background: ``black``: drop transparency and keep the colours of transparent pixels, mostly
            black; ``white``: composite onto white.
        exif: Whether to apply the EXIF orientation. For a TIFF, it is always applied.

    Raises:
        UnreadableError: If it is no plain file, or cannot be decoded, or the range of its values is
            unknown.
    """
    _check_plain(path)

    def decode(source: Path | BytesIO) -> NDArray[np.uint8]:
        with _open(source) as image:
            if image.info.get("Software") == _SOFTWARE:
                raise UnreadableError(path, "feddg-bench drew it: move it out of the data set")
            if _is_reduced(image):
                image.draft(None, (4 * size, 4 * size))
            return square(_rgb(image, background, exif), size)

    try:
        return decode(path)
    except UnreadableError:
        raise
    except Exception as error:  # a damaged file makes decoders raise anything
        with suppress(Exception):
            if (ended := _with_end(path)) is not None:
                return decode(ended)
        raise UnreadableError(path, _why(path, error)) from error


def _is_reduced(image: ImageFile) -> bool:
    """Return whether an image is decoded at a reduced scale."""
    return image.format == "JPEG" and image.width * image.height > LARGE


def _check_plain(path: Path) -> None:
    if image_status(path) is None:
        what = "a folder, pipe or device" if path.exists() else "missing, or a link to nothing"
        raise UnreadableError(path, f"it is {what}: restore it, or remove it from the data set")


def drawn_by_us() -> PngInfo:
    """Return the text of PNG files that the suite draws, by which `read_image` refuses them."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("Software", _SOFTWARE)
    return info


def _open(source: Path | BytesIO) -> ImageFile:
    """Open an image file that does not claim more than `MOST_PIXELS`."""
    from PIL import Image, PngImagePlugin

    Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2  # Pillow refuses twice as many, and warns in between
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY  # texts of image editors
    _ignore_warnings()
    return Image.open(source, formats=FORMATS)


@cache
def _ignore_warnings() -> None:
    """Silence Pillow's warnings of large images and of EXIF and other data beside the pixels."""
    from PIL.Image import DecompressionBombWarning

    warnings.filterwarnings("ignore", category=DecompressionBombWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


def _why(path: Path, error: Exception) -> str:
    """Return why an image cannot be decoded, and the remedy."""
    from PIL.Image import DecompressionBombError

    if isinstance(error, DecompressionBombError):
        return f"it has more than {MOST_PIXELS:,} pixels: resize it"
    with suppress(OSError), path.open("rb") as file:
        if file.read(30).startswith(b"version https://git-lfs"):
            return "it is a pointer of Git LFS and not the image: run `git lfs pull` in its folder"
    fault = " ".join(str(error).split()).replace(f" {str(path)!r}", "") or type(error).__name__
    return f"{fault}; replace it with an intact copy, as JPEG or PNG"


def _with_end(path: Path) -> BytesIO | None:
    """Return a JPEG with its end marker, if all its pixels are there but the marker is not.

    Bytes between the image's data and the end marker are skipped; they change pixels only if data
    are missing.
    """
    data = path.read_bytes().rstrip(b"\xff")
    if not data.startswith(b"\xff\xd8"):
        return None
    files = [BytesIO(data + more + b"\xff\xd9") for more in (b"", bytes(64), b"\xaa" * 64)]
    first, *others = (np.asarray(_open(file)) for file in files)
    return files[0] if all(np.array_equal(first, other) for other in others) else None


def _rgb(image: Image, background: str, exif: bool) -> Image:
    """Return an image as RGB; see `read_image`.

    Raises:
        ValueError: If the range of its values is unknown.
    """
    from PIL.Image import alpha_composite, fromarray, new

    tiff, tile = image.format == "TIFF", str(getattr(image, "tile", ""))
    if image.mode == "F" or (tiff and (image.mode == "I" or ";12" in tile)):
        raise ValueError("its values are neither 8 nor 16 bits, so that their range is unknown")
    if tiff and image.mode.startswith("I") and image.tag_v2.get(_PHOTOMETRIC) == 0:  # type: ignore[attr-defined]
        raise ValueError("it has 16 bits, of which 0 is white")
    image.load()  # applies the orientation of a TIFF
    turn = _turn(image) if exif else None
    flat = image
    if image.mode.startswith("I"):  # 16 bits, which `convert` would clip
        flat = fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if background == "white" and flat.has_transparency_data:
        layer = flat.convert("RGBA")
        flat = alpha_composite(new("RGBA", layer.size, "white"), layer)
    if "transparency" in flat.info:  # Pillow would warn that it is lost
        flat = flat.copy()
        del flat.info["transparency"]
    flat = flat.convert("RGB")
    return flat if turn is None else flat.transpose(turn)


_ORIENTATION, _PHOTOMETRIC = 0x0112, 0x0106


def _turn(image: Image) -> Transpose | None:
    """Return the transposition that an image's EXIF orientation asks for, if any.

    Pillow's ``exif_transpose`` also rewrites the EXIF data, which fails for some cameras' images.
    """
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    with suppress(Exception):  # damaged EXIF data do not make the pixels unreadable
        return turns.get(image.getexif().get(_ORIENTATION, 1))
    return None


class FileFacts(NamedTuple):
    """Properties of an image file."""

    side: int  # the shorter one, in pixels
    sixteen_bits: bool = False  # whether values have 16 bits
    turned: bool = False  # whether the EXIF orientation turns the image
    transparent: bool = False  # whether a pixel is not opaque
    frames: bool = False  # whether it has several frames
    reduced: bool = False  # whether it is decoded at a reduced scale


def image_facts(path: Path) -> FileFacts:
    """Return the properties of an image file.

    Raises:
        UnreadableError: If it is not an image file.
    """
    _check_plain(path)
    try:
        with _open(path) as image:
            side, sixteen = min(image.size), image.mode.startswith("I") or ";16" in str(image.tile)
            turned = image.format != "TIFF" and _turn(image) is not None
            frames, reduced = _animated(image), _is_reduced(image)
            clear = image.has_transparency_data and not image.mode.startswith("I")
            if clear:
                clear = image.convert("RGBA").getchannel("A").getextrema()[0] != 255
            return FileFacts(side, sixteen, turned, clear, frames, reduced)
    except Exception as error:  # a damaged file makes decoders raise anything
        raise UnreadableError(path, _why(path, error)) from error


def _animated(image: ImageFile) -> bool:
    with suppress(Exception):  # a damaged second frame does not make the first unreadable
        return bool(getattr(image, "is_animated", False))
    return False


def pixels_of(
    image: Any, size: int, *, background: str = "black", exif: bool = False
) -> NDArray[np.uint8]:
    """Return an image converted like a data set's files: uint8 RGB [``size``, ``size``, 3].

    Args:
        image: A file's path, a Pillow image, or a uint8 array [H, W, 3] or [H, W].
        size: Side of the square in pixels.
        background: As in `read_image`.
        exif: As in `read_image`.

    Raises:
        DataError: If ``image`` is of another type, or cannot be decoded.
    """
    from PIL.Image import Image, fromarray

    if isinstance(image, str | os.PathLike):
        return read_image(Path(image), size, background=background, exif=exif)
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or not (image.ndim == 2 or image.shape[2:] == (3,)):
            raise DataError(
                f"an image is an array {image.dtype} {list(image.shape)}: expected uint8 "
                f"[H, W, 3] or [H, W]"
            )
        image = fromarray(image)
    if not isinstance(image, Image):
        raise DataError(
            f"an image is a {type(image).__name__}: expected a file's path, a Pillow image or a "
            f"uint8 array [H, W, 3]"
        )
    try:
        return square(_rgb(image, background, exif), size)
    except Exception as error:  # a damaged file that was opened makes decoders raise anything
        raise DataError(f"an image cannot be decoded ({error})") from error


def square(image: Image, size: int) -> NDArray[np.uint8]:
    """Squash an image to uint8 [size, size, C], bilinearly and with antialiasing.

    The pixels equal those of torchvision's ``Resize((size, size))`` on Pillow images.
    """
    from PIL.Image import Resampling

    return np.asarray(image.resize((size, size), Resampling.BILINEAR))
