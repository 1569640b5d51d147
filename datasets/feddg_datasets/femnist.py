"""FEMNIST: handwritten digits and letters, one domain per writer."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import below
from feddg_bench.data.dataset import Listing
from feddg_bench.data.image_folders import ImageFolderDataset, candidate_folders
from feddg_bench.data.locations import data_roots
from feddg_bench.data.splits import ROLES, SPLITS
from feddg_datasets.shared.digits import DIGIT_PROMPTS

COLUMNS = ("path", "split", "domain_remapped", "y")


class FEMNIST(ImageFolderDataset):
    """FEMNIST (Caldas et al., 2018) as FedDG_Benchmark splits it (Bai et al., ICLR 2024).

    Grey digits and letters of 28 x 28 pixels from NIST Special Database 19, 62 classes; every
    writer is a domain. ``metadata.csv`` lists path, split, writer (``domain_remapped``) and label
    (``y``) of every image. Its splits form the protocol ``wilds``: writers of ``val`` and ``test``
    do not train. Published numbers of images and writers disagree (LEAF: 805,263 images), so none
    is required.

    The class itself has no domains; an object has the writers of its folder.

    Args:
        data_root: Folder given by the user.

    Raises:
        DataError: If ``metadata.csv`` is not found or does not fit.
    """

    name = "femnist"
    title = "FEMNIST"
    domains: ClassVar[tuple[str, ...]] = ()
    letters: ClassVar[Mapping[str, str]] = {}
    classes = (*digits, *ascii_uppercase, *ascii_lowercase)
    prompts: ClassVar[Mapping[str, str]] = {
        **DIGIT_PROMPTS,
        **{letter: f'a photo of the capital letter: "{letter}"' for letter in ascii_uppercase},
        **{letter: f'a photo of the small letter: "{letter}"' for letter in ascii_lowercase},
    }
    licence = "public domain (NIST SD19); LEAF: BSD-2-Clause"
    source = (
        "https://github.com/inouye-lab/FedDG_Benchmark (its README links to femnist_v1.0; "
        "metadata.csv is under resources)"
    )
    no_download = (
        "the archive of its splits is at worksheets.codalab.org, which does not answer, and no "
        "checksum of another copy is known; get it from " + source
    )
    default_recipe = "feddg_benchmark"
    measured_by_domain: ClassVar[bool] = False
    """A writer has too few images for an accuracy of its own."""
    layouts = ("", "femnist_v1.0", "femnist")

    def __init__(self, data_root: Path | None = None) -> None:
        super().__init__(data_root)
        writers = sorted({writer for _, _, writer, _ in self._rows})
        names = tuple(f"writer_{writer:04d}" for writer in writers)
        # Class attributes are for data sets that are the same everywhere.
        vars(self).update(
            domains=names,
            letters=dict(zip(names, map(str, writers), strict=True)),
            official=self._roles(),
        )

    @cached_property
    def folder(self) -> Path:
        """The folder of ``metadata.csv``.

        Raises:
            DataError: If it is not found.
        """
        return self._likely_folder()

    def _likely_folder(self) -> Path:
        roots = data_roots(self.data_root, self.name)
        for folder in candidate_folders(roots, self.layouts):
            if (folder / "metadata.csv").is_file():
                return folder
        what, above = f"{self.title}'s metadata.csv", "the folder above femnist_v1.0"
        raise self.not_found(what, roots, above)

    def published_splits(self) -> NDArray[np.int64]:
        """Return the position in `feddg_bench.data.splits.SPLITS` of every image."""
        split_of = {self._path(row): SPLITS.index(row[1]) for row in self._rows}
        return np.array([split_of[path] for path in self.records().paths], dtype=np.int64)

    def scan(self) -> Listing:
        """List the images by writer, class and path."""
        order = {name: number for number, name in enumerate(self.domains)}
        rows = sorted((self._path(row), row[2], row[3]) for row in self._rows)
        return Listing(
            paths=tuple(path for path, _, _ in rows),
            labels=np.array([label for _, _, label in rows], dtype=np.int64),
            domains=np.array([order[f"writer_{w:04d}"] for _, w, _ in rows], dtype=np.int64),
        )

    def _roles(self) -> dict[str, tuple[str, ...]]:
        """Return the writers by role in the published splits."""
        by_role: dict[str, set[int]] = {"train": set(), "val": set(), "test": set()}
        for _, split, writer, _ in self._rows:
            by_role[ROLES[split]].add(writer)
        return {
            role: tuple(f"writer_{writer:04d}" for writer in sorted(writers))
            for role, writers in by_role.items()
        }

    @cached_property
    def _files(self) -> dict[str, Path]:
        return {self._path(row): below(self.folder, row[0]) for row in self._rows}

    def _path(self, row: tuple[str, str, int, int]) -> str:
        path, _, writer, label = row
        return f"writer_{writer:04d}/{self.classes[label]}/{path}"

    @cached_property
    def _rows(self) -> list[tuple[str, str, int, int]]:
        """Path, split, writer and label of every image."""
        rows = list(self._read())
        if len({row[0] for row in rows}) < len(rows):
            raise DataError(f"{self.folder / 'metadata.csv'} lists a path twice; get it again")
        return rows

    def _read(self) -> Iterator[tuple[str, str, int, int]]:
        file = self.folder / "metadata.csv"
        try:
            with file.open(encoding="utf-8-sig", newline="") as lines:
                reader = csv.DictReader(lines, restval="")
                missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
                if missing:
                    raise DataError(
                        f"{file} has no column {missing[0]!r}; expected {', '.join(COLUMNS)}"
                    )
                for cells in reader:
                    yield self._row(f"{file}, line {reader.line_num}", cells)
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{file} is not a CSV file in UTF-8: {error}") from error

    def _row(self, where: str, cells: Mapping[str, str]) -> tuple[str, str, int, int]:
        if cells["split"] not in SPLITS:
            raise DataError(
                f"{where}: split is {cells['split']!r}; expected one of {', '.join(SPLITS)}"
            )
        numbers = []
        for column, end in (("domain_remapped", None), ("y", len(self.classes))):
            if not cells[column].isdecimal() or (end and int(cells[column]) >= end):
                limit = "" if end is None else f" below {end}"
                raise DataError(
                    f"{where}: {column} is {cells[column]!r}; expected a whole number{limit}"
                )
            numbers.append(int(cells[column]))
        return cells["path"], cells["split"], numbers[0], numbers[1]
