"""RotatedMNIST: every MNIST digit rotated by one of six angles."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import file_state
from feddg_bench.common.streams import derive_seed
from feddg_bench.data.dataset import DomainDataset, Listing, square
from feddg_bench.data.fetch.mirrors import Download
from feddg_bench.data.locations import data_roots

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)
FILES = (
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
SIDE = 28
PARTS = ("train", "t10k")
LAYOUTS = ("", "mnist", "MNIST", "MNIST/raw", "raw", "rmnist", "RotatedMNIST")


class RotatedMNIST(DomainDataset):
    """RotatedMNIST (Ghifary et al., ICCV 2015) as DomainBed builds it, with a fixed shuffle.

    The 70,000 digits of MNIST (LeCun et al., 1998), training images first, are shuffled and dealt
    in turn to the angles 0, 15, ..., 75 degrees, counter-clockwise: 11,667 digits for each of the
    first four and 11,666 for the last two. DomainBed (Gulrajani and Lopez-Paz, ICLR 2021) shuffles
    with PyTorch's global generator, so its digits change with the run; here they are the same in
    every run and on every machine. As in DomainBed, Pillow rotates images, bilinearly with black
    corners.
    """

    name = "rmnist"
    title = "RotatedMNIST"
    domains = ("0", "15", "30", "45", "60", "75")
    letters: ClassVar[Mapping[str, str]] = {angle: angle for angle in domains}
    classes = tuple("0123456789")
    licence = "CC BY-SA 3.0 (MNIST)"
    source = (
        "https://ossci-datasets.s3.amazonaws.com/mnist, the four files ending in -ubyte.gz, or "
        "torchvision.datasets.MNIST(DIR, download=True)"
    )
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "0": (1147, 1341, 1145, 1203, 1107, 1047, 1131, 1195, 1196, 1155),
        "15": (1134, 1291, 1140, 1216, 1139, 1040, 1180, 1231, 1141, 1155),
        "30": (1174, 1342, 1146, 1209, 1107, 1054, 1127, 1227, 1117, 1164),
        "45": (1184, 1315, 1185, 1179, 1177, 1088, 1101, 1178, 1134, 1126),
        "60": (1132, 1284, 1182, 1169, 1190, 1035, 1156, 1212, 1161, 1145),
        "75": (1132, 1304, 1192, 1165, 1104, 1049, 1181, 1250, 1076, 1213),
    }
    """Counts of the real MNIST under this shuffle."""
    archive_bytes = 11_594_722
    downloads = tuple(
        Download(name, MIRRORS, checksum=f"sha256:{digits}", unzipped=unzipped)
        for name, unzipped, digits in FILES
    )
    default_recipe = "ppdg"
    synthetic = True

    @cached_property
    def files(self) -> dict[str, Path]:
        """MNIST's four files by name, such as ``train-images``, compressed or not.

        Raises:
            DataError: If they are not found.
        """
        roots = data_roots(self.data_root, self.name)
        names = [f"{part}-{kind}" for part in PARTS for kind in ("images", "labels")]
        missing = names
        for folder in (root / layout for root in roots for layout in LAYOUTS):
            files = {name: file for name in names if (file := _find(folder, name))}
            if len(files) == len(names):
                return files
            if files:
                missing = [name for name in names if name not in files]
        what = f"MNIST's {' or '.join(missing)}"
        raise self.not_found(what, roots, "its folder")

    def find(self) -> Path:
        """Return the folder of MNIST's files."""
        return self.files["train-images"].parent

    def scan(self) -> Listing:
        """List the digits in MNIST's order, training images first."""
        _, labels = self._digits
        domains = deal_images(len(labels), len(self.domains))
        paths = tuple(
            f"{self.domains[domain]}/{label}/{index:05d}.png"
            for index, (domain, label) in enumerate(zip(domains, labels, strict=True))
        )
        return Listing(paths, labels, domains)

    def fingerprint(self) -> str:
        """Return a hash over the digits, however they are stored, and `version`."""
        images, labels = self._digits
        digest = hashlib.blake2b(f"rmnist v{self.version}".encode(), digest_size=16)
        digest.update(images.tobytes())
        digest.update(labels.astype(np.uint8).tobytes())
        return digest.hexdigest()

    def stamp(self) -> str:
        """Return a hash over the four files' names, sizes, times and inodes."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files.values():
            digest.update(f"{file.name}\0{file_state(file.stat())}\n".encode())
        return digest.hexdigest()

    def read(self, index: int, size: int) -> NDArray[np.uint8]:
        """Rotate digit ``index`` by its angle at 28 pixels, then resize it."""
        from PIL import Image

        images, _ = self._digits
        angle = int(self.domains[self.records().domains[index]])
        turned = Image.fromarray(images[index]).rotate(
            angle, resample=Image.Resampling.BILINEAR, fillcolor=0
        )
        return square(turned.convert("RGB"), size)

    @cached_property
    def _digits(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The digits [n, 28, 28] and their labels [n]."""
        images, labels = [], []
        for part in PARTS:
            images.append(read_idx(self.files[f"{part}-images"], (SIDE, SIDE)))
            labels.append(read_idx(self.files[f"{part}-labels"], ()))
            if len(images[-1]) != len(labels[-1]):
                raise DataError(
                    f"{self.files[f'{part}-images']} holds {len(images[-1]):,} images but "
                    f"{self.files[f'{part}-labels']} {len(labels[-1]):,} labels: "
                    f"get both from {self.source}"
                )
        digits = np.concatenate(labels).astype(np.int64)
        if digits.max(initial=0) > 9:
            raise DataError(
                f"{self.files['train-labels']} holds the label {digits.max()}: "
                f"expected digits from 0 to 9, get MNIST's files from {self.source}"
            )
        return np.concatenate(images), digits

    def _where(self) -> str:
        return f" in {self.find()}"


def deal_images(num_images: int, num_domains: int) -> NDArray[np.int64]:
    """Deal shuffled images to domains in turn, independently of the run's seed.

    The shuffle sorts PCG64's uniform numbers, which are the same in all versions of NumPy.

    Returns:
        int64 [n]: domains, whose sizes differ by at most one, the first ones larger.
    """
    keys = np.random.Generator(np.random.PCG64(derive_seed(0, "rmnist"))).random(num_images)
    domains = np.empty(num_images, dtype=np.int64)
    domains[np.argsort(keys, kind="stable")] = np.arange(num_images) % num_domains
    return domains


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


def _find(folder: Path, name: str) -> Path | None:
    """Return a file such as ``train-images-idx3-ubyte``, in any spelling, if there is one."""
    rank = "3" if name.endswith("images") else "1"
    for suffix in ("", ".gz"):
        for separator in ("-", "."):
            file = folder / f"{name}{separator}idx{rank}-ubyte{suffix}"
            if file.is_file():
                return file
    return None
