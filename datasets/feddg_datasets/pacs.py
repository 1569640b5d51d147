"""PACS: photographs, art paintings, cartoons and sketches of seven kinds of objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from feddg_bench.data.fetch.mirrors import HubDownload
from feddg_bench.data.image_folders import ImageFolderDataset


class PACS(ImageFolderDataset):
    """PACS (Li et al., ICCV 2017, arXiv 1710.03077): 9,991 images of 227 x 227 pixels.

    Four domains of 1,670 (photo), 2,048 (art_painting), 2,344 (cartoon) and 3,929 (sketch) images,
    seven classes. The licence is not stated; the images are for research. Completeness is checked
    by the number of images of every class in every domain; `feddg-bench data check` compares every
    picture with its published signature.
    """

    name = "pacs"
    title = "PACS"
    domains = ("art_painting", "photo", "sketch", "cartoon")
    letters: ClassVar[Mapping[str, str]] = {
        "photo": "p",
        "art_painting": "a",
        "cartoon": "c",
        "sketch": "s",
    }
    reference_domains = ("photo", "art_painting", "cartoon", "sketch")
    classes = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    licence = "none stated; research use"
    source = (
        "https://www.eecs.qmul.ac.uk/~dl307/project_iccv2017 or, on Hugging Face, flwrlabs/pacs"
    )
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "art_painting": (379, 255, 285, 184, 201, 295, 449),
        "photo": (189, 202, 182, 186, 199, 280, 432),
        "sketch": (772, 740, 753, 608, 816, 80, 160),
        "cartoon": (389, 457, 346, 135, 324, 288, 405),
    }
    archive_bytes = 174_167_459
    default_recipe = "laptop"
    downloads = (HubDownload("flwrlabs/pacs"),)
    research_only = True
    duplicates = 0
    signatures = Path(__file__).with_name("pacs.signatures.xz")
    layouts = ("", "pacs", "kfold", "pacs_v1.0", "PACS/kfold", "pacs/images")
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "art_painting": ("art", "painting"),
        "photo": ("photos",),
        "sketch": ("sketches",),
        "cartoon": ("cartoons",),
    }
