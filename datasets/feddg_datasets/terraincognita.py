"""TerraIncognita: animals in camera traps at four locations, as selected by DomainBed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from feddg_bench.common.errors import DataError
from feddg_bench.data.fetch.mirrors import Download
from feddg_bench.data.image_folders import ImageFolderDataset, candidate_folders
from feddg_bench.data.locations import data_roots

ANNOTATIONS = "eccv_18_annotation_files"
FILES = ("cis_test", "cis_val", "train", "trans_test", "trans_val")
MIRRORS = (
    "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps",
    "https://lilawildlife.blob.core.windows.net/lila-wildlife/caltechcameratraps",
    "https://us-west-2.opendata.source.coop/agentmorris/lila-wildlife/caltechcameratraps",
)
"""LILA's folders at three hosts."""
IMAGE_FOLDERS = ("eccv_18_all_images_sm", "eccv_18_all_images")


class TerraIncognita(ImageFolderDataset):
    """TerraIncognita (Beery et al., ECCV 2018), DomainBed's part of Caltech Camera Traps.

    Four locations (38, 43, 46, 100) and ten classes. The images are read from the authors' archives
    (five annotation files, joined with the images by identifier) or from the folders
    ``location_38/bird/...`` that DomainBed's script makes of them; both give the same records. An
    image with animals of two classes is listed twice, once with each label, as in DomainBed.

    DomainBed's paper counts 24,788 images; its current script is known to give 24,330
    (`totals`), so no number is required.
    """

    name = "terraincognita"
    title = "TerraIncognita"
    domains = ("L100", "L38", "L43", "L46")
    letters: ClassVar[Mapping[str, str]] = {"L38": "38", "L43": "43", "L46": "46", "L100": "100"}
    classes = (
        "bird",
        "bobcat",
        "cat",
        "coyote",
        "dog",
        "empty",
        "opossum",
        "rabbit",
        "raccoon",
        "squirrel",
    )
    prompts: ClassVar[Mapping[str, str]] = {"empty": "a photo of a landscape without animals"}
    licence = "CDLA-Permissive-1.0"
    source = (
        "https://lila.science/datasets/caltech-camera-traps (eccv_18_all_images_sm.tar.gz and "
        "eccv_18_annotations.tar.gz)"
    )
    totals: ClassVar[Mapping[str, int]] = {"L100": 4741, "L38": 9736, "L43": 3970, "L46": 5883}
    """Images of each domain, as commonly reported for DomainBed's script."""
    archive_bytes = 6_495_612_672
    downloads = (
        Download(
            "eccv_18_annotations.tar.gz",
            MIRRORS,
            checksum="md5:66a1f481b44aa1edadf75c9cfbd27aba",
            unpack=ANNOTATIONS,
        ),
        Download(
            "eccv_18_all_images_sm.tar.gz",
            MIRRORS,
            checksum="md5:8143c17aa2a12872b66f284ff211531f",
            unpack=IMAGE_FOLDERS[0],
            unpacked_bytes=16 * 2**30,
        ),
    )
    """The MD5 are from DeepMind's NEVIS'22 (caltech_camera_traps.py)."""
    default_recipe = "ppdg"
    layouts = ("", "terra_incognita", "terrainc", "caltechcameratraps")
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        domain: (f"location_{domain[1:]}", domain[1:]) for domain in domains
    }

    @cached_property
    def folder(self) -> Path:
        """The folder of the archives' contents, or of the four locations."""
        best = self._likely_folder()
        return best if (best / ANNOTATIONS).is_dir() else super().folder

    def _likely_folder(self) -> Path:
        for folder in candidate_folders(data_roots(self.data_root, self.name), self.layouts):
            if (folder / ANNOTATIONS).is_dir():
                return folder
        return super()._likely_folder()

    @cached_property
    def _files(self) -> dict[str, Path]:
        if not (self.folder / ANNOTATIONS).is_dir():
            return super()._files
        images = next((self.folder / n for n in IMAGE_FOLDERS if (self.folder / n).is_dir()), None)
        if images is None:
            raise DataError(
                f"{self.folder} holds {ANNOTATIONS} but no folder {IMAGE_FOLDERS[0]}: "
                f"unpack both archives there ({self.source})"
            )
        by_name = {file.name: file for file in images.iterdir()}
        files: dict[str, Path] = {}
        missing: list[str] = []
        for place, name, image in self._annotated():
            if image in by_name:
                files[f"L{place}/{name}/{image}"] = by_name[image]
            else:
                missing.append(image)
        if missing:
            raise DataError(
                f"{len(missing):,} annotated images are not in {images}, such as {missing[0]}: "
                f"get them again ({self.source})"
            )
        return files

    def _annotated(self) -> Iterator[tuple[str, str, str]]:
        """Yield location, class and file name of every annotation of these locations and classes.

        The images are looked up by identifier, whereas DomainBed's script compares every image with
        every annotation.
        """
        contents = [self._load(self.folder / ANNOTATIONS / f"{n}_annotations.json") for n in FILES]
        categories = {c["id"]: c["name"] for content in contents for c in content["categories"]}
        places = {domain[1:] for domain in self.domains}
        images = {
            image["id"]: (str(image["location"]), Path(image["file_name"]).name)
            for content in contents
            for image in content["images"]
            if str(image["location"]) in places
        }
        known = set(self.classes)
        for content in contents:
            for annotation in content["annotations"]:
                name = categories[annotation["category_id"]]
                if name in known and (image := images.get(annotation["image_id"])) is not None:
                    yield image[0], name, image[1]

    def _load(self, path: Path) -> dict[str, list[dict[str, Any]]]:
        """Return an annotation file's lists of images, annotations and categories.

        Raises:
            DataError: If it is missing, not JSON, or lacks a needed list or field.
        """
        needed = {
            "images": ("id", "location", "file_name"),
            "annotations": ("image_id", "category_id"),
            "categories": ("id", "name"),
        }
        try:
            content: dict[str, list[dict[str, Any]]] = json.loads(path.read_bytes())
        except OSError as error:
            raise DataError(
                f"cannot read {path}: {error.strerror}; get it again ({self.source})"
            ) from error
        except ValueError as error:
            raise DataError(f"{path} is not JSON ({error}); get it again") from error
        for key, fields in needed.items():
            entries = content.get(key) if isinstance(content, dict) else None
            if not isinstance(entries, list):
                raise DataError(f"{path} has no list {key!r}; get it again ({self.source})")
            for field in fields:
                if any(field not in entry for entry in entries):
                    raise DataError(f"{path}: an entry of {key!r} has no {field!r}; get it again")
        known = {category["id"] for category in content["categories"]}
        for annotation in content["annotations"]:
            if annotation["category_id"] not in known:
                raise DataError(
                    f"{path}: the category {annotation['category_id']!r} of an annotation is not "
                    f"in 'categories'; get it again"
                )
        return content
