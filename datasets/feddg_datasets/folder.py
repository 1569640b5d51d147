"""Any images in folders ``<domain>/<class>/<image>``: domains and classes are those on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from feddg_bench.common.errors import DataError, printable
from feddg_bench.config.reading import composed, plain_name
from feddg_bench.data.dataset import image_status
from feddg_bench.data.image_folders import (
    ImageFolderDataset,
    entries,
    images_below,
    is_image,
    subfolders,
)
from feddg_bench.data.locations import data_roots


class Folder(ImageFolderDataset):
    """Your own data set: ``--dataset folder --data-root DIR`` reads ``DIR/<domain>/<class>/``.

    Domains and classes are the names found, in alphabetical order; a domain may lack a class.
    System folders are left out (`is_system`). The names determine labels and scenarios, and thus
    the results. A domain's code is its whole name. The names and a hash of all files' names and
    sizes (``identity``) are part of a run's key and record.

    The class itself has neither domains nor classes; an object has those of its folder.

    Args:
        data_root: The folder of the domains; by default the first one named by the environment or
            the settings file.

    Raises:
        DataError: If there is no such folder, it holds no domain or only one class, the folders
            are splits, or two names differ only in case, blanks, hyphens or underscores.
    """

    name = "folder"
    title = "Folder"
    domains: ClassVar[tuple[str, ...]] = ()
    letters: ClassVar[Mapping[str, str]] = {}
    classes: ClassVar[tuple[str, ...]] = ()
    licence = "your own"
    source = "a folder of yours with images in <domain>/<class>/"
    no_download = "it is a folder of yours; name it with --data-root"
    default_protocol = "lodo"
    default_recipe = "quick"

    def __init__(self, data_root: Path | None = None) -> None:
        super().__init__(data_root)
        classes = {
            domain.name: [name.name for name in subfolders(domain) if any(images_below(name))]
            for domain in subfolders(self.folder)
        }
        domains = tuple(sorted(name for name, inside in classes.items() if inside))
        for inside in (domains, *classes.values()):
            _check_names(inside, self.folder)
        labels = _merge(name for domain in domains for name in sorted(classes[domain]))
        if why := self._wrong_level(domains, labels):
            raise DataError(f"{self.folder} {why}")
        codes = {domain: _code(domain) for domain in domains}
        if len({*map(composed, codes.values())} - {""}) < len(codes):
            raise DataError(
                f"{self.folder}: the names of the domains {', '.join(domains)} do not differ "
                f"without blanks, commas, hyphens and plus signs; rename one"
            )
        # Class attributes are for data sets that are the same everywhere.
        name = printable(composed(self.folder.resolve().name))
        named = {"label": name, "title": name or self.title}
        vars(self).update(domains=domains, letters=codes, classes=labels, **named)

    @cached_property
    def identity(self) -> Mapping[str, Sequence[str]]:  # type: ignore[override]
        """Names on disk, and a hash to distinguish folders with the same names; reads no image."""
        digest = hashlib.blake2b(digest_size=16)
        for path, file in sorted(self._files.items()):
            status = image_status(file)
            size = None if status is None else status.st_size
            digest.update(os.fsencode(f"{path}\0{size}\n"))
        return {"domains": self.domains, "classes": self.classes, "files": (digest.hexdigest(),)}

    @cached_property
    def folder(self) -> Path:
        """The folder of the domains.

        Raises:
            DataError: If none is named, or it does not exist.
        """
        return self._likely_folder()

    def _where(self) -> str:
        return ""  # the title is its name

    def _likely_folder(self) -> Path:
        roots = data_roots(self.data_root, self.name)
        if not roots:
            raise DataError(
                "data set folder needs --data-root DIR, a folder with images in "
                "<domain>/<class>/<image>"
            )
        if not roots[0].is_dir():
            raise DataError(f"there is no folder {roots[0]}: give another --data-root")
        return roots[0]

    def _wrong_level(self, domains: Sequence[str], classes: Sequence[str]) -> str:
        """Return why the folders cannot be domains and classes, with advice; empty if they can."""
        if not domains:
            return f"has no images in folders <domain>/<class>/<image>{self._hint()}"
        for kind, names in (("domains", domains), ("classes", classes)):
            if {name.lower() for name in names} <= SPLIT_NAMES:
                return (
                    f"has splits ({', '.join(names)}) in place of {kind}: move the images to "
                    f"<domain>/<class>/<split>/; the suite ignores the last level and draws splits"
                )
        if len(classes) > 1:
            return self._below(domains) if len(domains) == 1 else ""
        folders = [self.folder / domain / name for domain in domains for name in classes]
        if all(len(subfolders(folder)) > 1 for folder in folders if folder.is_dir()):
            return (
                f"has only the class {classes[0]}: if the folders in it are the classes, move them "
                f"up, to {self.folder / domains[0]}"
            )
        return (
            f"has only the class {classes[0]}, and a run needs two: the images must lie in "
            f"<domain>/<class>/ below --data-root, so give the folder above, or add a class"
        )

    def _below(self, domains: Sequence[str]) -> str:
        """Return advice to use the folder of the only domain, if it holds domains itself."""
        child = self.folder / domains[0]
        with suppress(DataError):
            if len(Folder(child).domains) > 1:
                return f"has the single folder {child.name}: give --data-root {child}"
        return ""

    def _hint(self) -> str:
        if any(_has_image(child) for child in subfolders(self.folder)):
            return ": its folders hold images themselves; give the folder above"
        files = [path for path in self.folder.glob("*/*/*") if path.is_file()]
        endings = {path.suffix.lower() for path in files}
        if endings - {""}:
            some = ", ".join(sorted(endings - {""}))
            return f": files {some} are not read; convert images to PNG"
        if endings:
            return ": its files have no ending; rename them to end in .jpg or .png, as they are"
        return ": give the folder above the domains with --data-root"


SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
"""Names of folders, in lower case, that are splits and neither domains nor classes."""


def _has_image(folder: Path) -> bool:
    return any(map(is_image, entries(folder)))


def _check_names(names: Iterable[str], folder: Path) -> None:
    seen: dict[str, str] = {}
    for name in names:
        if not name.isprintable():
            raise DataError(f"{folder} has a folder {name!r}: rename it, in letters that show")
        other = seen.setdefault(plain_name(name), name)
        if other != name:
            raise DataError(
                f"{folder} has both {other!r} and {name!r}, which are taken for the same: "
                f"rename one or put them together"
            )


def _merge(names: Iterable[str]) -> tuple[str, ...]:
    """Return the classes of all domains in order; of two spellings, the first is used."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(plain_name(name), name)
    return tuple(sorted(first.values()))


def _code(domain: str) -> str:
    """Return a domain's name without the characters that separate scenarios' names."""
    return "_".join("".join(" " if c in "-+," else c for c in domain).split())
