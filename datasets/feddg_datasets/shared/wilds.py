"""Data sets of WILDS (Koh et al., ICML 2021), read through the classes of the package ``wilds``.

The package defines images, labels, metadata and official splits. This module finds the folder,
checks the tables before the package reads them, and keeps it off the network. Importing it takes
seconds, so this is deferred until the images are listed.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import below, file_state
from feddg_bench.data.dataset import DomainDataset, FileDataset, Listing
from feddg_bench.data.locations import data_roots
from feddg_bench.data.splits import ROLES, SPLITS

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class _Listing:
    """The images of the official splits, in the order of records.

    Attributes:
        rows: Their indices in ``wilds``, int64 [n].
        files: Their files, relative to the folder of the tables.
        splits: Positions of their splits in `SPLITS`, int64 [n].
        records: Listing for the core.
    """

    rows: IntArray
    files: tuple[str, ...]
    splits: IntArray
    records: Listing


class WildsDataset(FileDataset):
    """A data set defined by a class of ``wilds``, with one file per image of the official splits.

    A subclass names the class of ``wilds`` and its tables, and defines which column of its metadata
    is the domain. Images outside the official splits are left out. The number of images is only
    compared by ``feddg-bench data check``, so a smaller copy can be used.
    """

    module: ClassVar[str]
    """Module of the class, below ``wilds.datasets``."""
    reader: ClassVar[str]
    """The class's name."""
    release: ClassVar[str]
    """Version of the data set, as in the name of its folder."""
    tables: ClassVar[tuple[str, ...]] = ("metadata.csv",)
    """Files that the class reads; the folder is found by the first one."""

    # ------------------------------------------------------------- defined by subclasses

    @abstractmethod
    def check(self) -> None:
        """Check the tables.

        Raises:
            DataError: If the class of ``wilds`` could not read them, or would misread them.
        """

    @abstractmethod
    def files(self, source: Any) -> Sequence[str]:
        """Return the file of each of ``source``'s images, relative to `folder`."""

    @abstractmethod
    def domain_of(self, source: Any) -> IntArray:
        """Return the position in `domains` of each of ``source``'s images."""

    def group_of(self, source: Any) -> IntArray | None:
        """Return the position in ``groups`` of each image, -1 for none; ``None`` without groups."""
        return None

    # ------------------------------------------------------------- location

    @cached_property
    def folder(self) -> Path:
        """The folder of the tables.

        Raises:
            DataError: If it is not found.
        """
        roots = data_roots(self.data_root, self.name)
        own = f"{self.name}_v{self.release}"
        for folder in (root / name for root in roots for name in (own, self.name, "")):
            if (folder / self.tables[0]).is_file():
                self._check_release(folder)
                return folder
        what, above = f"{self.title}'s {self.tables[0]}", f"the folder above {own}"
        raise self.not_found(what, roots, above)

    def _check_release(self, folder: Path) -> None:
        notes = sorted(path.name for path in folder.glob("RELEASE_v*.txt"))
        if notes and f"RELEASE_v{self.release}.txt" not in notes:
            raise DataError(
                f"{folder} holds {notes[0]}, another version of {self.title} than the expected "
                f"{self.release}: get that from {self.source}"
            )

    def find(self) -> Path:
        """Return the folder of the tables; nothing is read."""
        return self.folder

    def _where(self) -> str:
        return f" in {self.folder}"

    # ------------------------------------------------------------- contents

    def open(self, **options: Any) -> Any:
        """Return an object of the class of ``wilds``, which reads the tables.

        Args:
            options: Arguments of that class.

        Raises:
            DataError: If the package is missing, or cannot read the tables.
        """
        folder = self.folder
        reader = wilds_class(self.module, self.reader, self.title)
        # Use this folder, whatever its name and with or without a release note; the original class
        # looks for both, and would download otherwise.
        local = type(reader.__name__, (reader,), {"initialize_data_dir": lambda *_: str(folder)})
        try:
            with quiet(), self.amended(sys.modules[reader.__module__]):
                return local(root_dir=str(folder.parent), download=False, **options)
        except Exception as error:  # any error of its own code
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"the package wilds cannot read {self.title} in {folder} ({what}): get "
                f"{', '.join(self.tables)} again from {self.source}"
            ) from error

    @contextmanager
    def amended(self, module: Any) -> Iterator[None]:
        """Patch the class's module while it reads, if its code needs that."""
        yield

    @cached_property
    def _listing(self) -> _Listing:
        wilds_class(self.module, self.reader, self.title)  # its error says how to install it
        for table in self.tables:
            if not (self.folder / table).is_file():
                raise DataError(
                    f"{self.title} in {self.folder} lacks {table}: get it again from {self.source}"
                )
        self.check()
        source = self.open()
        labels = np.asarray(source.y_array).reshape(len(source))
        labels = labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64)
        domains, groups, files = self.domain_of(source), self.group_of(source), self.files(source)
        splits = places(source)
        rows = np.flatnonzero(splits >= 0).tolist()
        paths = {row: self._path(files[row], int(domains[row]), labels[row]) for row in rows}
        if len({files[row] for row in rows}) < len(rows):
            raise DataError(f"{self.folder / self.tables[0]} lists an image twice; get it again")
        order = sorted(rows, key=paths.__getitem__)
        return _Listing(
            rows=np.array(order, dtype=np.int64),
            files=tuple(files[row] for row in order),
            splits=splits[order],
            records=Listing(
                paths=tuple(paths[row] for row in order),
                labels=labels[order],
                domains=domains[order],
                groups=None if groups is None else groups[order],
            ),
        )

    def _path(self, file: str, domain: int, label: float) -> str:
        """Return domain, class and file; class names are those of the type, not of the object."""
        classes = type(self).classes
        return "/".join([self.domains[domain], *([classes[int(label)]] if classes else []), file])

    def scan(self) -> Listing:
        """List the images of the official splits by domain, class and file."""
        return self._listing.records

    def _promised(self) -> Listing:
        # A copy that lacks a domain can be used, and `data check` reports it. Only wrong cells are
        # errors here.
        return self.scan()

    def published_splits(self) -> IntArray:
        """Return the position in `feddg_bench.data.splits.SPLITS` of every image."""
        return self._listing.splits

    @property
    def wilds_rows(self) -> IntArray:
        """Index in ``wilds`` of every image, int64 [n]."""
        return self._listing.rows

    @cached_property
    def official(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Domains by role in the published splits."""
        return roles(self, self.published_splits())

    # ------------------------------------------------------------- files

    def file(self, index: int) -> Path:
        """Return the file of image ``index``."""
        return below(self.folder, self._listing.files[index])

    def stamp(self) -> str:
        """Return a hash over the names, sizes, times and inodes of images and tables.

        Raises:
            DataError: If an image is missing.
        """
        digest = hashlib.blake2b(super().stamp().encode(), digest_size=16)
        for table in self.tables:
            digest.update(f"{table}\0{file_state((self.folder / table).stat())}\n".encode())
        return digest.hexdigest()

    def check_absent(self, absent: Sequence[int]) -> None:
        """Refuse an archive that was not unpacked to its end, before hours of decoding."""
        if absent:
            first = self.file(absent[0]).relative_to(self.folder)
            raise DataError(
                f"{self.folder} lacks {len(absent):,} of the {len(self.records().paths):,} images "
                f"that {self.tables[0]} lists, such as {first}: unpack the archive there again "
                f"({self.source})"
            )

    def combine(self, contents: Iterable[str]) -> str:
        """Return the fingerprint of the images and of their facts in the tables."""
        digest = hashlib.blake2b(super().combine(contents).encode(), digest_size=16)
        for values in self._facts():
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()

    def _facts(self) -> Iterator[NDArray[Any]]:
        """Yield facts that are in the tables but not in the paths: labels, groups and splits."""
        records = self.records()
        yield records.labels
        if records.groups is not None:
            yield records.groups
        yield self.published_splits()


# --------------------------------------------------------------------------- the package


def places(source: Any) -> IntArray:
    """Return the position in `SPLITS` of each image of an object of ``wilds``, -1 for none."""
    positions = np.full(len(source), -1, dtype=np.int64)
    split_of = np.asarray(source.split_array)
    for split, number in source.split_dict.items():
        if split in SPLITS:
            positions[split_of == number] = SPLITS.index(split)
    return positions


def roles(dataset: DomainDataset, splits: IntArray) -> dict[str, tuple[str, ...]]:
    """Return a data set's domains by role, given the position in `SPLITS` of every image."""
    domains = dataset.records().domains
    by_role: dict[str, set[int]] = {"train": set(), "val": set(), "test": set()}
    for place, split in enumerate(SPLITS):
        by_role[ROLES[split]] |= set(domains[splits == place].tolist())
    return {role: tuple(dataset.domains[d] for d in sorted(ids)) for role, ids in by_role.items()}


def column(source: Any, field: str) -> NDArray[Any]:
    """Return a column of the metadata of an object of ``wilds``, [n]."""
    values: NDArray[Any] = np.asarray(source.metadata_array[:, source.metadata_fields.index(field)])
    return values


def wilds_class(module: str, name: str, title: str) -> Any:
    """Import a class of ``wilds`` without the package's version check over the network.

    Args:
        module: Module of the class, below ``wilds.datasets``.
        name: Name of the class.
        title: Title of the data set, for the message.

    Raises:
        DataError: If the package cannot be imported.
    """
    try:
        with quiet():
            return getattr(importlib.import_module(f"wilds.datasets.{module}"), name)
    except ImportError as error:
        raise DataError(
            f"{title} is read by the package wilds, which cannot be imported ({error}): "
            f"pip install 'wilds>=2'"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, and keep wilds and ogb from asking PyPI for newer versions of themselves.

    On import, each starts a thread that does so if the module ``outdated`` exists, and sets an
    environment variable for it.
    """
    hidden = {name: sys.modules[name] for name in ("outdated",) if name in sys.modules}
    ignore = os.environ.get("OUTDATED_IGNORE")
    sys.modules["outdated"] = None  # type: ignore[assignment]  # importing it fails at once
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        del sys.modules["outdated"]
        sys.modules.update(hidden)
        if ignore is None:
            os.environ.pop("OUTDATED_IGNORE", None)
