"""VLCS: photographs of five kinds of objects in four collections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from feddg_bench.data.image_folders import ImageFolderDataset


class VLCS(ImageFolderDataset):
    """VLCS (Fang et al., ICCV 2013): 10,729 photographs.

    Four collections of 1,415 (Caltech101), 2,656 (LabelMe), 3,282 (SUN09) and 3,376 (VOC2007)
    images, five classes. Numbers of images are those of DomainBed's list of files
    (``domainbed/misc/vlcs_files.txt``) and of JigenDG's image lists (``data/txt_lists``), which
    agree. Folders are DomainBed's, such as ``VLCS/Caltech101/bird``, or those of JigenDG and Dassl,
    such as ``VLCS/CALTECH/full/0``. Files have other names there, which gives other splits.
    """

    name = "vlcs"
    title = "VLCS"
    domains = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
    letters: ClassVar[Mapping[str, str]] = {
        "Caltech101": "c",
        "LabelMe": "l",
        "SUN09": "s",
        "VOC2007": "v",
    }
    classes = ("bird", "car", "chair", "dog", "person")
    licence = "none stated; research use"
    source = (
        "https://github.com/facebookresearch/DomainBed (domainbed/scripts/download.py names the "
        "archive VLCS.tar.gz)"
    )
    no_download = (
        "no licence is stated, and its server is Google Drive, which gives no plain files; get it "
        "from " + source
    )
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "Caltech101": (237, 123, 118, 67, 870),
        "LabelMe": (80, 1209, 88, 42, 1237),
        "SUN09": (20, 932, 1036, 30, 1264),
        "VOC2007": (330, 699, 428, 420, 1499),
    }
    default_recipe = "laptop"
    layouts = ("", "VLCS")
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Caltech101": ("Caltech",),
        "SUN09": ("SUN",),
        "VOC2007": ("PASCAL", "VOC"),
        **{name: (str(number),) for number, name in enumerate(classes)},
    }
    inside: ClassVar[Mapping[str, str]] = {"": "", "full": ""}
