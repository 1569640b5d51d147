"""Digits-5: written, blended, photographed, synthetic and posted digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_datasets.shared.arrays import ArrayDataset, Part
from feddg_datasets.shared.digits import DIGIT_PROMPTS, DIGITS

TRAINING, TEST = 25_000, 9_000
"""Images in use of the training and test part of each file."""
PARTS: tuple[tuple[str, tuple[str | int, ...]], ...] = (
    ("mnist_data.mat", ("train_32", "label_train")),
    ("mnist_data.mat", ("test_32", "label_test")),
    ("mnistm_with_label.mat", ("train", "label_train")),
    ("mnistm_with_label.mat", ("test", "label_test")),
    ("svhn_train_32x32.mat", ("X", "y")),
    ("svhn_test_32x32.mat", ("X", "y")),
    ("syn_number.mat", ("train_data", "train_label")),
    ("syn_number.mat", ("test_data", "test_label")),
    ("usps_28x28.mat", (0,)),
    ("usps_28x28.mat", (1,)),
)
"""Training and test part of each domain: a file of Digit-Five, and its arrays of images and labels,
or the row of its cells that holds both."""


class Digits5(ArrayDataset):
    """Digits-5, also Digit-Five (Peng et al., ICCV 2019): 145,298 images of 28 or 32 pixels.

    As in that paper and in Dassl (``dassl/data/datasets/da/digit5.py``), 25,000 training and 9,000
    test images of MNIST, MNIST-M, SVHN and SYN are used, and all 9,298 of USPS. They draw them at
    random; here they are the first ones, the same in every run. MNIST-M shows MNIST's digits on
    photographs, so these two domains are not independent. The files are those of the authors'
    archive Digit-Five, whose MNIST-M differs from the original one.
    """

    name = "digits5"
    title = "Digits-5"
    domains = ("mnist", "mnist_m", "svhn", "syn", "usps")
    letters: ClassVar[Mapping[str, str]] = {
        "mnist": "mt",
        "mnist_m": "mm",
        "svhn": "sv",
        "syn": "sy",
        "usps": "up",
    }
    classes = DIGITS
    prompts = DIGIT_PROMPTS
    licence = "none stated; SVHN: non-commercial use"
    source = (
        "https://github.com/VisionLearningGroup/VisionLearningGroup.github.io (M3SDA/"
        "code_MSDA_digit, Digit-Five Download)"
    )
    no_download = (
        "SVHN is for non-commercial use, and its server is Google Drive, which gives no plain "
        "files; get it from " + source
    )
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "mnist": (34_000,),
        "mnist_m": (34_000,),
        "svhn": (34_000,),
        "syn": (34_000,),
        "usps": (9_298,),
    }
    default_protocol = "lodo"
    default_recipe = "handwritten"
    needed: ClassVar = {name: [name, name.removeprefix("svhn_")] for name, _ in PARTS}
    layouts = ("", "Digit-Five", "digit5", "digit5/Digit-Five", "digits5")

    def load(self) -> Iterator[Part]:
        """Read the first training and test images of each collection, one file at a time."""
        for training, test in zip(PARTS[::2], PARTS[1::2], strict=True):
            yield self._read(*training, TRAINING).with_more(self._read(*test, TEST))

    def _read(self, name: str, keys: tuple[str | int, ...], number: int) -> Part:
        images, labels = read_matlab(self.files[name], keys)
        return Part(images[:number].copy(), labels[:number])  # releases the rest: SYN has 480,000


def read_matlab(path: Path, keys: tuple[str | int, ...]) -> Part:
    """Return a part of one of Digit-Five's files.

    Args:
        path: The file, of MATLAB 5.
        keys: As in `PARTS`.

    Raises:
        DataError: If the file is unreadable or holds something else.
    """
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        if len(keys) == 1:  # values from 0 to 1
            images, labels = loadmat(path)["dataset"][keys[0]]
            return _part((255 * images.reshape(-1, 28, 28)).astype(np.uint8), labels)
        content = loadmat(path, variable_names=keys)
        images, labels = (content[key] for key in keys)
        return _part(images.transpose(3, 0, 1, 2) if keys[0] == "X" else images, labels)
    except Exception as error:  # a damaged file makes SciPy raise anything
        fault = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"cannot read {path} ({fault}): get the file again") from error


def _part(images: NDArray[Any], labels: NDArray[Any]) -> Part:
    """Return images and labels; one number per image, or one column per digit."""
    numbers = labels.argmax(axis=1) if labels.shape[-1] == 10 else labels.reshape(-1) % 10
    if images.ndim == 4 and images.shape[-1] == 1:
        images = images[..., 0]
    elif images.ndim == 2:
        images = images.reshape(len(images), 32, 32)
    pixels = images.astype(np.uint8, copy=False)
    fits = len(pixels) == len(numbers) and numbers.max(initial=0) < 10
    if not fits or not (pixels is images or np.array_equal(pixels, images)):
        raise ValueError(f"{images.dtype} {list(images.shape)} for {len(numbers):,} labels")
    return Part(pixels, numbers.astype(np.int64))
