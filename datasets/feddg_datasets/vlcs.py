"""VLCS: photographs of five kinds of objects in four collections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from feddg_bench.data.image_folders import ImageFolderDataset


class VLCS(ImageFolderDataset):
    """VLCS (Fang et al., ICCV 2013) in DomainBed's layout: 10,729 photographs.

    Four collections of 1,415 (Caltech101), 2,656 (LabelMe), 3,282 (SUN09) and 3,376 (VOC2007)
    images, five classes. The numbers are those of JigenDG's image lists (``data/txt_lists``);
    they are not known to hold for the classes of DomainBed's archive, so only those of whole
    collections are required. Folders are those of DomainBed's ``domainbed/datasets.py``.
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
        "Caltech101": (1415,),
        "LabelMe": (2656,),
        "SUN09": (3282,),
        "VOC2007": (3376,),
    }
    default_recipe = "laptop"
    layouts = ("", "VLCS", "vlcs")
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Caltech101": ("Caltech",),
        "SUN09": ("SUN",),
        "VOC2007": ("PASCAL", "VOC"),
    }
