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
KEYS = {
    "mnist_data.mat": (("train_32", "label_train"), ("test_32", "label_test")),
    "mnistm_with_label.mat": (("train", "label_train"), ("test", "label_test")),
    "svhn_train_32x32.mat": (("X", "y"),),
    "svhn_test_32x32.mat": (("X", "y"),),
    "syn_number.mat": (("train_data", "train_label"), ("test_data", "test_label")),
    "usps_28x28.mat": (("dataset", "dataset"),) * 2,
}
"""Arrays of images and labels in each of Digit-Five's files: training part, test part."""


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
    needed: ClassVar = {
        name: [name, name.removeprefix("svhn_")] if "svhn" in name else [name] for name in KEYS
    }
    layouts = ("", "Digit-Five", "digit5", "digit5/Digit-Five", "digits5", "DigitFive")

    def load(self) -> Iterator[Part]:
        """Read the first training and test images of each collection."""
        parts = {name: list(read_matlab(name, path)) for name, path in self.files.items()}
        training_svhn, test_svhn = parts.pop("svhn_train_32x32.mat"), parts["svhn_test_32x32.mat"]
        parts["svhn_test_32x32.mat"] = [*training_svhn, *test_svhn]
        for training, test in parts.values():
            yield training.first(TRAINING).with_more(test.first(TEST))


def read_matlab(name: str, path: Path) -> Iterator[Part]:
    """Yield the parts of one of Digit-Five's files.

    Args:
        name: Its name in `KEYS`.
        path: The file, of MATLAB 5.

    Raises:
        DataError: If the file is unreadable or holds something else.
    """
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        content = loadmat(path)
        for place, (images_key, labels_key) in enumerate(KEYS[name]):
            images, labels = content[images_key], content[labels_key]
            if name.startswith("usps"):  # a cell for each part, values from 0 to 1
                images, labels = images[place]
                images = (255 * images.reshape(-1, 28, 28)).astype(np.uint8)
            if name.startswith("svhn"):  # [H, W, 3, n]
                images = images.transpose(3, 0, 1, 2)
            yield _part(images, labels)
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
    if images.dtype != np.uint8 or len(images) != len(numbers) or numbers.max(initial=0) > 9:
        raise ValueError(f"{images.dtype} {list(images.shape)} for {len(numbers):,} labels")
    return Part(images, numbers.astype(np.int64))
