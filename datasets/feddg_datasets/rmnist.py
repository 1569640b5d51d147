"""RotatedMNIST: every MNIST digit rotated by one of six angles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.streams import derive_seed
from feddg_bench.data.dataset import Listing, square
from feddg_datasets.shared.arrays import (
    MNIST_DOWNLOADS,
    MNIST_LAYOUTS,
    MNIST_NEEDED,
    ArrayDataset,
    Part,
    read_mnist,
)
from feddg_datasets.shared.digits import DIGIT_PROMPTS, DIGITS


class RotatedMNIST(ArrayDataset):
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
    classes = DIGITS
    prompts = DIGIT_PROMPTS
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
    downloads = MNIST_DOWNLOADS
    needed = MNIST_NEEDED
    layouts = (*MNIST_LAYOUTS, "rmnist", "RotatedMNIST")
    default_recipe = "ppdg"
    synthetic = True

    def load(self) -> Iterator[Part]:
        """Read MNIST's digits, training images first."""
        files = list(self.files.values())
        yield read_mnist(*files[:2]).with_more(read_mnist(*files[2:]))

    def scan(self) -> Listing:
        """List the digits in MNIST's order, training images first."""
        ((_, labels),) = self.parts
        domains = deal_images(len(labels), len(self.domains))
        paths = tuple(
            f"{self.domains[domain]}/{label}/{index:05d}.png"
            for index, (domain, label) in enumerate(zip(domains, labels, strict=True))
        )
        return Listing(paths, labels, domains)

    def read(self, index: int, size: int) -> NDArray[np.uint8]:
        """Rotate digit ``index`` by its angle at 28 pixels, then resize it."""
        from PIL import Image

        ((images, _),) = self.parts
        angle = int(self.domains[self.records().domains[index]])
        turned = Image.fromarray(images[index]).rotate(
            angle, resample=Image.Resampling.BILINEAR, fillcolor=0
        )
        return square(turned.convert("RGB"), size)


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
