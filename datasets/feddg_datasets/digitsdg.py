"""Digits-DG: written, blended, photographed and synthetic digits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from feddg_bench.data.image_folders import ImageFolderDataset
from feddg_datasets.shared.digits import DIGIT_PROMPTS, DIGITS


class DigitsDG(ImageFolderDataset):
    """Digits-DG (Zhou et al., AAAI 2020): 24,000 images of 32 x 32 pixels.

    600 images of every digit from each of MNIST, MNIST-M, SVHN and SYN. The archive separates
    training and validation images, as ``mnist/train/0`` and ``mnist/val/0``; they are joined here,
    as Dassl joins those of the test domain (``dassl/data/datasets/dg/digits_dg.py``).
    """

    name = "digitsdg"
    title = "Digits-DG"
    domains = ("mnist", "mnist_m", "svhn", "syn")
    letters: ClassVar[Mapping[str, str]] = {
        "mnist": "mt",
        "mnist_m": "mm",
        "svhn": "sv",
        "syn": "sy",
    }
    classes = DIGITS
    prompts = DIGIT_PROMPTS
    licence = "none stated; SVHN: non-commercial use"
    source = "https://github.com/KaiyangZhou/Dassl.pytorch (DATASETS.md, Digits-DG)"
    no_download = (
        "SVHN is for non-commercial use, and its server is Google Drive, which gives no plain "
        "files; get it from " + source
    )
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = dict.fromkeys(domains, (600,) * 10)
    default_recipe = "handwritten"
    layouts = ("", "digits_dg")
    inside: ClassVar[Mapping[str, str]] = {"train": "train-", "val": "val-"}
