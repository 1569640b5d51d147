"""Office-31: office objects from a shop, a camera and a webcam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from feddg_bench.data.image_folders import ImageFolderDataset


class Office31(ImageFolderDataset):
    """Office-31 (Saenko et al., ECCV 2010): 4,110 images.

    Three domains of 2,817 (amazon), 498 (dslr) and 795 (webcam) images, 31 classes. The published
    archive has a folder ``images`` in each domain; copies without it give the same records. Numbers
    of images are those of the image lists of CDAN and its successors (``data/office``).
    """

    name = "office31"
    title = "Office-31"
    domains = ("amazon", "dslr", "webcam")
    letters: ClassVar[Mapping[str, str]] = {"amazon": "a", "dslr": "d", "webcam": "w"}
    # fmt: off
    classes = (
        "back_pack", "bike", "bike_helmet", "bookcase", "bottle", "calculator", "desk_chair",
        "desk_lamp", "desktop_computer", "file_cabinet", "headphones", "keyboard",
        "laptop_computer", "letter_tray", "mobile_phone", "monitor", "mouse", "mug",
        "paper_notebook", "pen", "phone", "printer", "projector", "punchers", "ring_binder",
        "ruler", "scissors", "speaker", "stapler", "tape_dispenser", "trash_can",
    )
    licence = "none stated; research use"
    source = "https://people.eecs.berkeley.edu/~jhoffman/domainadapt (domain_adaptation_images)"
    no_download = (
        "no licence is stated, and no checksum of its archive is published; get it from " + source
    )
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "amazon": (
            92, 82, 72, 82, 36, 94, 91, 97, 97, 81, 99, 100, 100, 98, 100, 99, 100, 94, 96, 95, 93,
            100, 98, 98, 90, 75, 100, 99, 99, 96, 64,
        ),
        "dslr": (
            12, 21, 24, 12, 16, 12, 13, 14, 15, 15, 13, 10, 24, 16, 31, 22, 12, 8, 10, 10, 13, 15,
            23, 18, 10, 7, 18, 26, 21, 22, 15,
        ),
        "webcam": (
            29, 21, 28, 12, 16, 31, 40, 18, 21, 19, 27, 27, 30, 19, 30, 43, 30, 27, 28, 32, 16, 20,
            30, 27, 40, 11, 25, 30, 24, 23, 21,
        ),
    }
    # fmt: on
    default_protocol = "lodo"
    default_recipe = "laptop"
    layouts = ("", "office31", "office", "domain_adaptation_images", "Original_images")
    inside: ClassVar[Mapping[str, str]] = {"": "", "images": ""}
