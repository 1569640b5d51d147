"""Data sets whose files hold many small images each, such as MNIST's."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import file_state
from feddg_bench.data.dataset import DomainDataset, Listing, square
from feddg_bench.data.fetch.mirrors import Download
from feddg_bench.data.image_folders import candidate_folders, folders_inside
from feddg_bench.data.locations import data_roots


class Part(NamedTuple):
    """Images, uint8 [n, H, W] or [n, H, W, 3], and their labels, int64 [n]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def first(self, number: int) -> Part:
        """Return the first images."""
        return Part(self.images[:number], self.labels[:number])

    def with_more(self, other: Part) -> Part:
        """Return these images followed by those of ``other``."""
        return Part(
            np.concatenate([self.images, other.images]), np.concatenate([self.labels, other.labels])
        )


class ArrayDataset(DomainDataset):
    """Images that are read from a few files at once; by default, one `Part` for each domain."""

    needed: ClassVar[Mapping[str, Sequence[str]]]
    """Files, and the names that each can have."""
    layouts: ClassVar[tuple[str, ...]] = ("",)
    """Candidate folders below a data root; the files may be in several of them."""

    @abstractmethod
    def load(self) -> Iterator[Part]:
        """Read the `files`.

        Raises:
            DataError: If one cannot be read or holds something else.
        """

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each name in `needed`.

        Raises:
            DataError: If one is not found.
        """
        roots = data_roots(self.data_root, self.name)
        folders = candidate_folders(roots, self.layouts)
        found = self._found_in(folders)
        missing = [name for name in self.needed if name not in found]
        if missing:
            deeper = self._found_in(candidate_folders(folders_inside(folders), self.layouts))
            near = [deeper[name].parent for name in missing if {*missing} <= {*deeper}]
            beside = dict.fromkeys(path.parent for path in found.values())
            raise self.not_found(" or ".join(missing), beside or roots, "its folder", near)
        return {name: found[name] for name in self.needed}

    def _found_in(self, folders: Sequence[Path]) -> dict[str, Path]:
        return {
            name: path
            for name, spellings in self.needed.items()
            for path in [folder / s for folder in folders for s in spellings][::-1]
            if path.is_file()
        }

    def find(self) -> Path:
        """Return the folder of the first file."""
        return next(iter(self.files.values())).parent

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The images and labels, as `load` returns them."""
        return tuple(self.load())

    def scan(self) -> Listing:
        """List the images by domain, in the order of the files."""
        sizes = [len(part.labels) for part in self.parts]
        paths = tuple(
            f"{domain}/{self.classes[label]}/{index:05d}.png"
            for domain, part in zip(self.domains, self.parts, strict=True)
            for index, label in enumerate(part.labels)
        )
        labels = np.concatenate([part.labels for part in self.parts])
        return Listing(paths, labels, np.repeat(np.arange(len(sizes)), sizes))

    def read(self, index: int, size: int) -> NDArray[np.uint8]:
        """Return image ``index`` as RGB, resized."""
        from PIL import Image

        for part in self.parts:
            if index < len(part.labels):
                break
            index -= len(part.labels)
        return square(Image.fromarray(part.images[index]).convert("RGB"), size)

    def fingerprint(self) -> str:
        """Return a hash over images and labels, however they are stored, and `version`."""
        digest = hashlib.blake2b(f"{self.name} v{self.version}".encode(), digest_size=16)
        for part in self.parts:
            digest.update(part.images.tobytes())
            digest.update(part.labels.astype(np.uint8).tobytes())
        return digest.hexdigest()

    def stamp(self) -> str:
        """Return a hash over the files' names, sizes, times and inodes."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files.values():
            digest.update(f"{file.name}\0{file_state(file.stat())}\n".encode())
        return digest.hexdigest()

    def _where(self) -> str:
        return f" in {self.find()}"


# ---------------------------------------------------------------------------- MNIST

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)
MNIST_FILES = (
    (
        "train-images-idx3-ubyte.gz",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    (
        "train-labels-idx1-ubyte.gz",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    (
        "t10k-images-idx3-ubyte.gz",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    (
        "t10k-labels-idx1-ubyte.gz",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
"""MNIST's files: name, and size and SHA-256 of the unpacked content (their known MD5 agree)."""
MNIST_DOWNLOADS = tuple(
    Download(name, MIRRORS, checksum=f"sha256:{digits}", unzipped=unzipped)
    for name, unzipped, digits in MNIST_FILES
)
MNIST_NEEDED: Mapping[str, Sequence[str]] = {
    name: [name, name.replace("-idx", ".idx"), f"{name}.gz", f"{name.replace('-idx', '.idx')}.gz"]
    for name in (file.removesuffix(".gz") for file, _, _ in MNIST_FILES)
}
MNIST_LAYOUTS = ("", "mnist", "MNIST/raw", "raw")
MNIST_SIDE = 28


def read_mnist(images: Path, labels: Path) -> Part:
    """Read MNIST's digits of one part and their labels, [n, 28, 28] and [n].

    Raises:
        DataError: If a file is unreadable, or they do not fit.
    """
    digits = Part(read_idx(images, (MNIST_SIDE, MNIST_SIDE)), read_idx(labels, ()).astype(np.int64))
    if len(digits.images) != len(digits.labels):
        raise DataError(
            f"{images} holds {len(digits.images):,} images but {labels} "
            f"{len(digits.labels):,} labels: get both from {MIRRORS[0]}"
        )
    if digits.labels.max(initial=0) > 9:
        raise DataError(
            f"{labels} holds the label {digits.labels.max()}: expected digits from 0 to 9, "
            f"get MNIST's files from {MIRRORS[0]}"
        )
    return digits


def read_idx(path: Path, item: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an idx file of bytes, compressed or not (LeCun's format: magic, sizes, values).

    Args:
        path: The file.
        item: Expected shape of one item.

    Returns:
        uint8 [n, *item].

    Raises:
        DataError: If the file is unreadable, cut short, or holds something else.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path} ({error}): get the file again") from error
    dimensions = 1 + len(item)
    start = 4 + 4 * dimensions
    head = content[:start].ljust(start, b"\0")
    sizes = tuple(np.frombuffer(head, dtype=">u4", offset=4).tolist())
    if head[:4] != bytes((0, 0, 8, dimensions)) or sizes[1:] != item:
        raise DataError(
            f"{path} is not an idx file of {'x'.join(map(str, item)) or 'single'} bytes: "
            f"get MNIST's file again"
        )
    if len(content) - start != math.prod(sizes):
        raise DataError(
            f"{path} holds {len(content) - start:,} bytes of values instead of "
            f"{math.prod(sizes):,}: get the file again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(sizes)
