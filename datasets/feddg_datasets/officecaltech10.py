"""Office-Caltech10: ten classes that Office-31 and Caltech-256 have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from feddg_bench.data.image_folders import ImageFolderDataset


class OfficeCaltech10(ImageFolderDataset):
    """Office-Caltech10 (Gong et al., CVPR 2012): 2,533 images.

    Four domains of 958 (amazon), 1,123 (caltech), 157 (dslr) and 295 (webcam) images, ten classes.
    Three domains are parts of Office-31: results on these two data sets are not independent.
    Numbers of images are those of TransDA's image lists (``data/office-caltech``).
    """

    name = "officecaltech10"
    title = "Office-Caltech10"
    domains = ("amazon", "caltech", "dslr", "webcam")
    letters: ClassVar[Mapping[str, str]] = {
        "amazon": "a",
        "caltech": "c",
        "dslr": "d",
        "webcam": "w",
    }
    classes = (
        "back_pack",
        "bike",
        "calculator",
        "headphones",
        "keyboard",
        "laptop_computer",
        "monitor",
        "mouse",
        "mug",
        "projector",
    )
    licence = "none stated; research use"
    source = (
        "https://people.eecs.berkeley.edu/~jhoffman/domainadapt (Office-Caltech), or the archive "
        "office_caltech_10 that https://github.com/med-air/FedBN names"
    )
    no_download = (
        "no licence is stated, and no checksum of its archive is published; get it from " + source
    )
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "amazon": (92, 82, 94, 99, 100, 100, 99, 100, 94, 98),
        "caltech": (151, 110, 100, 138, 85, 128, 133, 94, 87, 97),
        "dslr": (12, 21, 12, 13, 10, 24, 22, 12, 8, 23),
        "webcam": (29, 21, 31, 27, 27, 30, 43, 30, 27, 30),
    }
    default_recipe = "laptop"
    layouts = ("", "office_caltech_10", "office-caltech")
    inside: ClassVar[Mapping[str, str]] = {"": "", "images": ""}
