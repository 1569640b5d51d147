"""Office-Home: everyday objects as art, clip art, product pictures and photographs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from feddg_bench.data.fetch.mirrors import HubDownload
from feddg_bench.data.image_folders import ImageFolderDataset


class OfficeHome(ImageFolderDataset):
    """Office-Home (Venkateswara et al., CVPR 2017): 15,588 images of many sizes.

    Images are stored as squares, and crops are taken from these, also in the recipe ``pardon``;
    PARDON's code crops the original image.

    Four domains of 2,427 (art), 4,365 (clipart), 4,439 (product) and 4,357 (real_world) images, 65
    classes. Completeness is checked by the number of images of every class in every domain, taken
    from the image lists that the authors of CDAN and of ATDOC used (they agree).
    """

    name = "officehome"
    title = "Office-Home"
    domains = ("clipart", "art", "product", "real_world")
    letters: ClassVar[Mapping[str, str]] = {
        "art": "a",
        "clipart": "c",
        "product": "p",
        "real_world": "r",
    }
    # fmt: off
    classes = (
        "Alarm_Clock", "Backpack", "Batteries", "Bed", "Bike", "Bottle", "Bucket", "Calculator",
        "Calendar", "Candles", "Chair", "Clipboards", "Computer", "Couch", "Curtains", "Desk_Lamp",
        "Drill", "Eraser", "Exit_Sign", "Fan", "File_Cabinet", "Flipflops", "Flowers", "Folder",
        "Fork", "Glasses", "Hammer", "Helmet", "Kettle", "Keyboard", "Knives", "Lamp_Shade",
        "Laptop", "Marker", "Monitor", "Mop", "Mouse", "Mug", "Notebook", "Oven", "Pan",
        "Paper_Clip", "Pen", "Pencil", "Postit_Notes", "Printer", "Push_Pin", "Radio",
        "Refrigerator", "Ruler", "Scissors", "Screwdriver", "Shelf", "Sink", "Sneakers", "Soda",
        "Speaker", "Spoon", "TV", "Table", "Telephone", "ToothBrush", "Toys", "Trash_Can",
        "Webcam",
    )
    licence = "fair use notice of the authors; non-commercial research"
    source = (
        "https://www.hemanthdv.org/officeHomeDataset.html or, on Hugging Face, flwrlabs/office-home"
    )
    default_recipe = "pardon"
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "art": (
            74, 41, 27, 40, 75, 99, 40, 33, 20, 76, 69, 25, 44, 40, 40, 23, 15, 18, 21, 45, 22, 46,
            90, 20, 46, 40, 40, 79, 46, 18, 72, 49, 51, 20, 42, 32, 18, 49, 21, 20, 19, 19, 20, 26,
            19, 18, 24, 47, 49, 15, 20, 30, 42, 41, 46, 40, 20, 46, 40, 16, 44, 43, 20, 21, 16,
        ),
        "clipart": (
            60, 56, 64, 98, 99, 99, 73, 46, 78, 99, 99, 40, 99, 64, 42, 41, 48, 40, 41, 50, 40, 40,
            99, 99, 61, 52, 99, 69, 40, 99, 53, 40, 99, 71, 99, 40, 76, 99, 83, 40, 51, 40, 99, 99,
            41, 87, 40, 46, 40, 67, 99, 75, 42, 42, 43, 61, 90, 60, 99, 80, 99, 39, 99, 53, 40,
        ),
        "product": (
            79, 99, 62, 43, 44, 62, 47, 81, 81, 56, 99, 65, 96, 88, 75, 83, 67, 41, 67, 58, 71, 99,
            91, 90, 41, 67, 57, 90, 72, 99, 41, 54, 99, 56, 98, 72, 96, 41, 93, 68, 70, 47, 60, 40,
            38, 99, 43, 43, 59, 58, 99, 40, 49, 46, 99, 43, 99, 47, 76, 60, 58, 42, 45, 93, 98,
        ),
        "real_world": (
            86, 99, 64, 83, 99, 78, 80, 73, 68, 99, 96, 65, 64, 76, 73, 62, 51, 43, 81, 60, 58, 85,
            75, 57, 36, 60, 52, 60, 72, 75, 83, 78, 67, 23, 71, 46, 60, 58, 68, 64, 30, 68, 65, 59,
            67, 52, 53, 66, 75, 41, 77, 51, 66, 77, 88, 63, 81, 54, 53, 59, 82, 85, 67, 81, 49,
        ),
    }
    # fmt: on
    downloads = (HubDownload("flwrlabs/office-home"),)
    research_only = True
    layouts = (
        "",
        "OfficeHomeDataset_10072016",
        "office_home",
        "office_home_dg",
        "office_home_v1.0",
        "office-home/images",
    )
    inside: ClassVar[Mapping[str, str]] = {"": "", "train": "", "val": ""}  # the parts in Dassl's
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "clipart": ("clip art",),
        "product": ("products",),
        "real_world": ("real", "rw"),
    }
