"""Adapter for any image data set of ``wilds``, or with the same interface.

`from_wilds` wraps an object. A short plugin gives it a name on the command line:

    class CelebA(AdaptedWilds):
        name, title = "celeba", "CelebA"
        licence, source = "non-commercial research", "https://mmlab.ie.cuhk.edu.hk"
        domain_fields, group_fields = ("male",), ("male", "y")
        metrics = ("worst_group", "accuracy")

        def open(self, root):
            reader = wilds_class("celebA_dataset", "CelebADataset", self.title)
            return reader(root_dir=str(root), download=False)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError, PluginError
from feddg_bench.common.files import file_state
from feddg_bench.common.parallel import in_threads
from feddg_bench.data.dataset import DomainDataset, Listing, square
from feddg_bench.data.locations import data_roots
from feddg_datasets.shared.bands import resize_bands
from feddg_datasets.shared.wilds import IntArray, column, places, quiet, roles, wilds_class

__all__ = ["AdaptedWilds", "from_wilds", "wilds_class"]

_LOOKED_AT = 16
"""Number of images that a stamp hashes."""


class AdaptedWilds(DomainDataset):
    """A data set whose images, labels and splits come from an object of ``wilds``.

    Images are Pillow images, converted to RGB, or tensors and arrays of floating-point bands
    [C, H, W], kept as bands. Labels are classes, or one number for a regression. Domains and groups
    are values of metadata, or combinations of them, with the names in ``metadata_map``, if any.

    Args:
        data_root: Folder given by the user, for `open`.
        opened: The object; by default, that of `open`.

    Raises:
        DataError: If the object cannot be made.
        PluginError: If it has no such fields, several labels per image, or no images.
    """

    domain_fields: ClassVar[tuple[str, ...]]
    """Fields of the metadata whose values, combined, are domains."""
    group_fields: ClassVar[tuple[str, ...]] = ()
    """The same for the groups of the worst-group metric."""
    domains: ClassVar[tuple[str, ...]] = ()
    letters: ClassVar[Mapping[str, str]] = {}
    classes: ClassVar[tuple[str, ...]] = ()
    measured_by_domain: ClassVar[bool] = False

    def __init__(self, data_root: Path | None = None, *, opened: Any = None) -> None:
        super().__init__(data_root)
        self.opened = self._open() if opened is None else opened
        self._describe(self.domain_fields, self.group_fields)

    def open(self, root: Path) -> Any:
        """Return an object of ``wilds``, without downloading.

        Args:
            root: The first data folder that exists.
        """
        raise NotImplementedError

    def _open(self) -> Any:
        named = data_roots(self.data_root, self.name)
        roots = [root for root in named if root.is_dir()]  # wilds would create a missing one
        if not roots:
            raise self.not_found(self.title, named, "its folder")
        try:
            with quiet():
                return self.open(roots[0])
        except DataError:
            raise
        except Exception as error:  # any error of its code
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"the package wilds cannot read {self.title} in {roots[0]} ({what}): get it from "
                f"{self.source}"
            ) from error

    def _describe(self, domain_fields: Sequence[str], group_fields: Sequence[str]) -> None:
        """Set on this object what other data sets declare as class attributes."""
        opened = self.opened
        if opened.y_size != 1 or getattr(opened, "is_detection", False):
            raise PluginError(f"{self.title} has {opened.y_size} labels an image; expected one")
        for field in (*domain_fields, *group_fields):
            if field not in opened.metadata_fields:
                raise PluginError(
                    f"{self.title} has no metadata {field!r}; expected one of "
                    f"{', '.join(opened.metadata_fields)}"
                )
        self._domain_ids, domains = _combined(opened, domain_fields)
        codes = tuple("_".join(_words(name)) for name in domains)
        if len(set(codes)) < len(codes):
            raise PluginError(f"domains of {self.title} have the same name: {', '.join(domains)}")
        attributes: dict[str, Any] = {
            "domains": codes,
            "letters": dict(zip(codes, codes, strict=True)),
            "task": "classification" if opened.is_classification else "regression",
        }
        if group_fields:
            self._group_ids, attributes["groups"] = _combined(opened, group_fields)
        if opened.is_classification and not self.classes:
            attributes["classes"] = _classes(opened)
        if self.metrics is DomainDataset.metrics:  # none were chosen
            key = "accuracy" if opened.is_classification else "pearson"
            attributes["metrics"] = (key, *(("worst_group",) if group_fields else ()))
        attributes["identity"] = {
            "domains": codes,
            "classes": attributes.get("classes", self.classes),
        }
        image = self._image(0)
        if isinstance(image, np.ndarray):
            attributes.update(channels=len(image), pixels="float16")
        vars(self).update(attributes)

    # ------------------------------------------------------------- called by the core

    def find(self) -> Path | None:
        """Return the object's folder, if there is one."""
        folder = Path(self.opened.data_dir)
        return folder if folder.is_dir() else None

    def scan(self) -> Listing:
        """List the images of the splits by their numbers in ``wilds``."""
        rows = self.wilds_rows
        width = len(str(len(self.opened)))
        domains = self._domain_ids[rows]
        groups = getattr(self, "_group_ids", None)
        values = np.asarray(self.opened.y_array).reshape(len(self.opened))[rows]
        if not np.isfinite(values).all():
            row = int(rows[~np.isfinite(values)][0])
            raise DataError(f"image {row} of {self.title} has a target that is not a number")
        classes = self.task == "classification"
        return Listing(
            paths=tuple(
                f"{self.domains[domain]}/{row:0{width}d}"
                for domain, row in zip(domains.tolist(), rows.tolist(), strict=True)
            ),
            labels=values.astype(np.int64) if classes else values.astype(np.float32),
            domains=domains,
            groups=None if groups is None else groups[rows],
        )

    def _promised(self) -> Listing:
        return self.scan()

    @cached_property
    def wilds_rows(self) -> IntArray:
        """Index in ``wilds`` of every image of a split, int64 [n]."""
        return np.flatnonzero(places(self.opened) >= 0)

    def published_splits(self) -> IntArray:
        """Return the position in `feddg_bench.data.splits.SPLITS` of every image."""
        return places(self.opened)[self.wilds_rows]

    @cached_property
    def official(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Domains by role in the published splits."""
        return roles(self, self.published_splits())

    def read(self, index: int, size: int) -> NDArray[np.uint8] | NDArray[np.float16]:
        """Return image ``index``: uint8 RGB [size, size, 3], or float16 [size, size, C].

        Raises:
            DataError: If it cannot be read.
        """
        row = int(self.wilds_rows[index])
        try:
            image = self._image(row)
            if isinstance(image, np.ndarray):
                return resize_bands(image, size)
            return square(image.convert("RGB"), size)
        except PluginError:
            raise
        except Exception as error:  # a damaged file makes decoders raise anything
            raise DataError(
                f"cannot read image {row} of {self.title} ({' '.join(str(error).split())}): get it "
                f"again from {self.source}"
            ) from error

    def _image(self, row: int) -> Any:
        """Return a Pillow image, or an array of floating-point bands."""
        from PIL.Image import Image

        image = self.opened.get_input(row)
        if isinstance(image, Image):
            return image
        array = np.asarray(image)
        if array.ndim != 3 or array.dtype.kind != "f":
            raise PluginError(
                f"{self.title} gives {type(image).__name__} for image {row}; expected a Pillow "
                f"image, or floating-point bands [C, H, W]"
            )
        return array

    def fingerprint(self) -> str:
        """Return a hash over all images as given, and their labels, domains, groups and splits."""
        digest = hashlib.blake2b(self._facts(), digest_size=16)
        for content in in_threads(self._content, self.wilds_rows.tolist()):
            digest.update(content)
        return digest.hexdigest()

    def _content(self, row: int) -> bytes:
        image = self._image(row)
        kind = f"{image.shape}" if isinstance(image, np.ndarray) else f"{image.mode} {image.size}"
        return hashlib.blake2b(kind.encode() + image.tobytes()).digest()

    def stamp(self) -> str:
        """Return a hash over metadata, some images, and names, sizes, times and inodes.

        Images are hashed because an object can change what it reads, for example by a transform.
        """
        digest = hashlib.blake2b(self._facts(), digest_size=16)
        rows = self.wilds_rows
        for place in sorted({*np.linspace(0, len(rows) - 1, _LOOKED_AT).astype(int).tolist()}):
            digest.update(self._content(int(rows[place])))
        folder = self.find()
        for where, folders, files in os.walk(folder) if folder else ():
            folders.sort()
            for name in sorted(files):
                state = file_state((Path(where) / name).stat())
                digest.update(f"{name}\0{state}\n".encode())
        return digest.hexdigest()

    def _facts(self) -> bytes:
        records = self.records()
        facts = [records.labels, records.domains, self.published_splits()]
        facts += [] if records.groups is None else [records.groups]
        names = [*self.domains, *self.classes, *self.groups]
        return b"".join([*(np.ascontiguousarray(f).tobytes() for f in facts), repr(names).encode()])


def from_wilds(
    opened: Any,
    *,
    domain: str | Sequence[str],
    group: str | Sequence[str] = (),
    name: str | None = None,
    title: str | None = None,
    classes: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> AdaptedWilds:
    """Wrap an object of ``wilds``, such as one of its CelebA or RxRx1.

    Args:
        opened: A ``WILDSDataset`` of images.
        domain: Field of its metadata whose values are domains, or several to combine.
        group: The same for the groups of the worst-group metric; none if empty.
        name: Name in file names; default the object's own.
        title: Name in messages; default ``name``.
        classes: Names of the classes; default those in its ``metadata_map``, or numbers.
        metrics: Metrics to report, the key metric first; default accuracy, or Pearson's correlation
            for a regression, and that of the worst group if there are groups.

    Raises:
        PluginError: If it has no such fields, several labels per image, or no images.
    """
    own = str(opened.dataset_name)
    facts: dict[str, Any] = {
        "name": name or own,
        "title": title or name or own,
        "licence": "see its authors",
        "source": "the package wilds",
        "domain_fields": _fields(domain),
        "group_fields": _fields(group),
        "classes": tuple(classes),
    }
    return _Given(opened, facts | ({"metrics": tuple(metrics)} if metrics else {}))


class _Given(AdaptedWilds):
    """A wrapped object, with facts from the user in place of class attributes."""

    def __init__(self, opened: Any, facts: Mapping[str, Any]) -> None:
        vars(self).update(facts)
        super().__init__(opened=opened)


def _fields(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _combined(opened: Any, fields: Sequence[str]) -> tuple[IntArray, tuple[str, ...]]:
    """Return the index of each image's combination of values, and the combinations' names."""
    values = np.stack([column(opened, field).astype(np.int64) for field in fields], axis=1)
    combinations, ids = np.unique(values, axis=0, return_inverse=True)
    names = [
        " ".join(_name(opened, field, value) for field, value in zip(fields, row, strict=True))
        for row in combinations.tolist()
    ]
    return ids.reshape(-1).astype(np.int64), tuple(names)


def _name(opened: Any, field: str, value: int) -> str:
    """Return the name of a field's value: its own, or the field's name and the number."""
    names = (opened.metadata_map or {}).get(field, ())
    own = names[value] if 0 <= value < len(names) else value
    return own.strip() if isinstance(own, str) else f"{field} {own}"


def _classes(opened: Any) -> tuple[str, ...]:
    names = [str(name).strip() for name in (opened.metadata_map or {}).get("y", ())]
    if len(names) == opened.n_classes == len(set(names)):
        return tuple(names)
    return tuple(f"class_{number}" for number in range(opened.n_classes))


def _words(name: str) -> list[str]:
    """Return a name's parts between the characters that separate scenarios' names and paths."""
    return "".join(c if c.isalnum() or c in "._" else " " for c in name).split()
