"""Data sets whose images are named by lists next to the folders of their domains."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.data.dataset import Listing
from feddg_bench.data.image_folders import ImageFolderDataset

LISTS = ("train", "test")


class ListedFolders(ImageFolderDataset):
    """Images in two lists for each domain, ``<domain>_train.txt`` and ``<domain>_test.txt``.

    A line such as ``clipart/umbrella/clipart_318_000001.jpg 0`` names an image and a label. Labels
    are positions in ``classes``; the numbers in the lists are only checked for consistency, one
    number per class.
    """

    list_folders: ClassVar[tuple[str, ...]]
    """Candidate folders of the lists, next to the domains; the first one is named in messages."""
    without_lists: ClassVar[bool] = False
    """Whether the images of the folders are used if there are no lists."""

    def scan(self) -> Listing:
        """List the images of the lists by domain, class and file name.

        Raises:
            DataError: If a list or an image is missing, or a line does not fit.
        """
        if self.list_folder is None:
            return super().scan()
        paths = tuple(sorted(self._listed))
        parts = [path.split("/") for path in paths]
        labels = {name: label for label, name in enumerate(self.classes)}
        return Listing(
            paths=paths,
            labels=np.array([labels[part[1]] for part in parts], dtype=np.int64),
            domains=np.array([self.domains.index(part[0]) for part in parts], dtype=np.int64),
        )

    def published_splits(self) -> NDArray[np.int64] | None:
        """Return the position in `feddg_bench.data.splits.SPLITS` of every image, by its list.

        The test lists are ``id_test``: FedCCRL joins both lists of a domain; others train on
        one and test on the other. ``None`` without lists.
        """
        if self.list_folder is None:
            return None
        places = {"train": 0, "test": 2}
        return np.array([places[self._listed[p]] for p in self.records().paths], dtype=np.int64)

    def _promised(self) -> Listing:
        records = super()._promised()
        if self.total is not None and len(records.paths) != self.total:
            raise DataError(
                f"the lists in {self.list_folder} name {len(records.paths):,} images instead of "
                f"{self.total:,}: get them again from {self.source}"
            )
        return records

    @cached_property
    def list_folder(self) -> Path | None:
        """The folder of the lists; ``None`` if there are none and none are needed."""
        for name in self.list_folders:
            if (self.folder / name / f"{self.domains[0]}_train.txt").is_file():
                return self.folder / name
        if self.without_lists:
            return None
        raise DataError(
            f"{self.title} in {self.folder} lacks the lists {self.list_folders[0]}/"
            f"{self.domains[0]}_train.txt and so on: get them from {self.source}"
        )

    @cached_property
    def _listed(self) -> dict[str, str]:
        """The list, ``train`` or ``test``, of each image."""
        listed: dict[str, str] = {}
        numbers: dict[str, str] = {}
        names: dict[str, str] = {}
        for kind in LISTS:
            for domain in self.domains:
                for where, path, label in self._lines(domain, kind):
                    name = path.split("/")[1]
                    if path in listed:
                        raise DataError(f"{where}: {path} is in the lists twice; list it once")
                    known = numbers.setdefault(name, label), names.setdefault(label, name)
                    if known != (label, name):
                        raise DataError(
                            f"{where}: {name} has the label {label}, but before {name} had "
                            f"{known[0]} and {label} was {known[1]}; get the lists again"
                        )
                    listed[path] = kind
        return listed

    def _lines(self, domain: str, kind: str) -> Iterator[tuple[str, str, str]]:
        """Yield the line (for messages), path and label of each image in a list."""
        classes = frozenset(self.classes)
        file = self.folder / (self.list_folder or "") / f"{domain}_{kind}.txt"
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"cannot read the list {file}: {why}; get it again") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            path, _, label = line.strip().rpartition(" ")
            parts = path.split("/")
            where = f"{file}, line {number}"
            if len(parts) != 3 or parts[0] != domain or not label.isdecimal():
                raise DataError(
                    f"{where} is {line!r}: expected a line such as "
                    f"{domain}/umbrella/{domain}_318_000001.jpg 0"
                )
            if parts[1] not in classes:
                raise DataError(
                    f"{where}: {parts[1]!r} is none of the {len(self.classes)} classes; "
                    f"use the lists of {self.title}"
                )
            yield where, path, label

    @cached_property
    def _files(self) -> dict[str, Path]:
        if self.list_folder is None:
            return super()._files
        folders = {
            (domain, name): class_folder
            for domain, domain_folder in self._domain_folders(self.folder).items()
            for name, class_folder in self._class_folders(domain_folder).items()
        }
        by_name = {
            f"{domain}/{name}/{file.name}": file
            for (domain, name), class_folder in folders.items()
            for file in class_folder.iterdir()
        }
        missing = [path for path in self._listed if path not in by_name]
        if missing:
            raise DataError(
                f"{len(missing):,} of the {len(self._listed):,} images of the lists are not in "
                f"{self.folder}, such as {missing[0]}: get DomainNet again from {self.source}"
            )
        return {path: by_name[path] for path in self._listed}
