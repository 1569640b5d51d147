"""ColoredMNIST: MNIST's digits in a colour that predicts the label, in one domain the wrong way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.streams import derive_seed
from feddg_datasets.shared.arrays import (
    MNIST_DOWNLOADS,
    MNIST_LAYOUTS,
    MNIST_NEEDED,
    ArrayDataset,
    Part,
    read_mnist,
)

NOISE = 0.25
"""Probability of a label that contradicts the digit."""
FLIPPED = {"p90": 0.1, "p80": 0.2, "n90": 0.9}
"""Probability, in each domain, of a colour that contradicts the label."""


class ColoredMNIST(ArrayDataset):
    """ColoredMNIST (Arjovsky et al., 2019) as DomainBed builds it, drawn once for all runs.

    The 70,000 digits of MNIST are shuffled and dealt in turn to three domains, DomainBed's +90%,
    +80% and -90%. A label says whether the digit is less than 5, and is wrong with probability
    0.25. A digit is red or green: in the domains, the colour of the other label has probability
    0.1, 0.2 and 0.9. The digit's shape alone predicts 75 % of the labels; colour predicts more
    where clients train, and misleads in ``n90``.

    DomainBed (``domainbed/datasets.py``) draws with PyTorch's global generator, so its data set
    changes with the run, and its images lack the blue channel, which is 0 here.
    """

    name = "coloredmnist"
    title = "ColoredMNIST"
    domains = tuple(FLIPPED)
    letters: ClassVar[Mapping[str, str]] = {domain: domain for domain in domains}
    classes = ("5_to_9", "0_to_4")
    prompts: ClassVar[Mapping[str, str]] = {
        "5_to_9": "a photo of a number from 5 to 9",
        "0_to_4": "a photo of a number from 0 to 4",
    }
    licence = "CC BY-SA 3.0 (MNIST)"
    source = (
        "https://ossci-datasets.s3.amazonaws.com/mnist, the four files ending in -ubyte.gz, or "
        "torchvision.datasets.MNIST(DIR, download=True)"
    )
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "p90": (11510, 11824),
        "p80": (11460, 11873),
        "n90": (11614, 11719),
    }
    archive_bytes = 11_594_722
    downloads = MNIST_DOWNLOADS
    needed = MNIST_NEEDED
    layouts = (*MNIST_LAYOUTS, "coloredmnist", "rmnist")
    default_protocol = "lodo"
    default_scenario: ClassVar[Mapping[str, str]] = {"lodo": "p90+p80-n90"}
    default_recipe = "handwritten"
    synthetic = True

    def load(self) -> Iterator[Part]:
        """Colour the digits of each domain, in the order of the shuffle."""
        files = list(self.files.values())
        images, digits = read_mnist(*files[:2]).with_more(read_mnist(*files[2:]))
        # PCG64's uniform numbers are the same in all versions of NumPy.
        stream = np.random.Generator(np.random.PCG64(derive_seed(0, self.name)))
        keys, label_draws, colour_draws = stream.random((3, len(digits)))
        order = np.argsort(keys, kind="stable")
        for place, flipped in enumerate(FLIPPED.values()):
            own = order[place :: len(FLIPPED)]
            labels = (digits[own] < 5) ^ (label_draws[own] < NOISE)
            colours = labels ^ (colour_draws[own] < flipped)
            yield Part(coloured(images[own], colours), labels.astype(np.int64))


def coloured(images: NDArray[np.uint8], green: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return grey images [n, H, W] in red or green, [n, H, W, 3]."""
    pixels = np.zeros((*images.shape, 3), dtype=np.uint8)
    pixels[np.arange(len(images)), :, :, green.astype(np.int64)] = images
    return pixels
