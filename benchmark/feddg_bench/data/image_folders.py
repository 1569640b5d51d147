"""Data sets whose images lie in folders named by domain and class."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import file_state
from feddg_bench.config.reading import plain_name
from feddg_bench.data.dataset import FileDataset, Listing
from feddg_bench.data.fetch.mirrors import RECEIPT
from feddg_bench.data.locations import data_roots

IMAGE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif"),
        *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm"),
    }
)
"""Suffixes of the files that are read; `feddg_bench.data.dataset.FORMATS` are their formats."""
SYSTEM_FOLDERS = frozenset(
    {
        "lost+found",  # of an ext4 file system
        "$recycle.bin",  # of Windows, like the next three
        "recycler",
        "recycled",
        "system volume information",
        "@eadir",  # of Synology, like the next three
        "#recycle",
        "#snapshot",
        "@tmp",
        "@recycle",  # of QNAP, like the next one
        "@recently-snapshot",
    }
)
"""Folders created by operating and storage systems, in lower case."""
OUTPUTS = frozenset(
    {
        *("runs", "records", "partitions", "checkpoints", "tuning", "attacks", "wandb"),
        *("figures", "tables"),
    }
)
"""Folders that runs, figures and tables write in a results folder."""
SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", RECEIPT})
"""Files that systems and downloads leave behind, in lower case."""
_ENDINGS = 8
"""Maximum number of suffixes of skipped files that a message counts separately."""


class ImageFolderDataset(FileDataset):
    """Images in folders ``<domain>/<class>/<image>``, below one of several folders of a root.

    Folders inside a class folder, and links to folders, are searched as by torchvision's
    ``ImageFolder``, except the suite's own `outputs`. Names of folders are compared without regard
    to Unicode form, case, blanks, hyphens and underscores. Hidden files, files without the suffix
    of an image, and other folders are ignored.
    """

    layouts: ClassVar[tuple[str, ...]] = ("",)
    """Candidate folders below a data root; the first one with the most domains is used."""
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Alternative names of the folder of a domain or class."""
    inside: ClassVar[Mapping[str, str]] = {"": ""}
    """Folders of a domain that may hold its classes, such as ``train``, and what each puts before
    the names of its images, such as ``train-``."""

    @cached_property
    def folder(self) -> Path:
        """The folder that holds the domains.

        Raises:
            DataError: If there is none, or it lacks a domain.
        """
        best = self._likely_folder()
        missing = [domain for domain in self.domains if domain not in self._domain_folders(best)]
        if missing:
            advice = self.hint(missing[0]) or f": get it again from {self.source}"
            raise DataError(f"{self.title} in {best} lacks the folder {', '.join(missing)}{advice}")
        return best

    def find(self) -> Path:
        """Return the folder that holds the domains."""
        return self.folder

    def records_as_found(self) -> Listing:
        """Return the images of the domains found; see `DomainDataset`."""
        self.folder = self._likely_folder()
        return super().records_as_found()

    def _likely_folder(self) -> Path:
        """Return the first folder with the most domains."""
        roots = data_roots(self.data_root, self.name)
        candidates = candidate_folders(roots, self.layouts)
        domains = {folder: self._domain_folders(folder) for folder in candidates}
        if not any(domains.values()):
            deeper = candidate_folders(folders_inside(candidates), self.layouts)
            near = [path for path in deeper if len(self._domain_folders(path)) > 1]
            above = f"the folder above {', '.join(self.domains)}"
            raise self.not_found(self.title, roots, above, near)
        return max(candidates, key=lambda folder: len(domains[folder]))

    def scan(self) -> Listing:
        """List the images by domain, class and file name."""
        paths = tuple(sorted(self._files))
        parts = [path.split("/") for path in paths]
        return Listing(
            paths=paths,
            labels=np.array([self.classes.index(part[1]) for part in parts], dtype=np.int64),
            domains=np.array([self.domains.index(part[0]) for part in parts], dtype=np.int64),
        )

    def file(self, index: int) -> Path:
        """Return the file of image ``index``."""
        return self._files[self.records().paths[index]]

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The file of each record's path."""
        return {
            f"{domain}/{name}/{prefix}{_inside(class_folder, image)}": image
            for domain, domain_folder in self._domain_folders(self.folder).items()
            for place, prefix in self.inside.items()
            for name, class_folder in self._class_folders(domain_folder / place).items()
            for image in images_below(class_folder)
        }

    def nested(self) -> str:
        """Return a sentence about images in folders inside class folders; empty without any."""
        deep = [path for path in sorted(self._files) if path.count("/") > 2]
        if not deep:
            return ""
        if len(deep) == len(self._files):
            return (
                f"every image lies in a folder inside <domain>/<class>/, such as {deep[0]}: is "
                f"--data-root the folder that holds the domains?"
            )
        return (
            f"images in folders inside <domain>/<class>/: {len(deep):,} of {len(self._files):,}, "
            f"such as {deep[0]}"
        )

    @cached_property
    def unread(self) -> tuple[Path, ...]:
        """Files below the folder that are not used as images, except system files (`is_system`)."""
        return tuple(other_files(self.folder, {*self._files.values()}))

    def skipped(self) -> str:
        """Return a sentence that counts the `unread` files by suffix; empty if there are none."""
        image = {path for path in self.unread if is_image(path)}
        counts = Counter(
            path.suffix.lower() or "no ending" for path in self.unread if path not in image
        )
        parts = [f"{number:,} {ending}" for ending, number in counts.most_common(_ENDINGS)]
        if (rest := len(counts) - _ENDINGS) > 0:
            parts.append(f"{rest} more endings")
        if image:
            parts.append(f"{len(image):,} image{'s' * (len(image) > 1)} outside <domain>/<class>/")
        if not parts:
            return ""
        total = len(self.unread)
        root = f" --data-root {shlex.quote(str(self.data_root))}" if self.data_root else ""
        return (
            f"{total:,} file{'s are' if total > 1 else ' is'} not read: {', '.join(parts)}; "
            f"`feddg-bench data check {self.name}{root}` names them"
        )

    def _domain_folders(self, folder: Path) -> dict[str, Path]:
        return match_folders(folder, self._spelt(self.domains))

    def _class_folders(self, folder: Path) -> dict[str, Path]:
        return match_folders(folder, self._spelt(self.classes))

    def _spelt(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        return {name: (name, *self.spellings.get(name, ())) for name in names}

    def hint(self, domain: str, name: str | None = None) -> str:
        """Return advice, such as an unrecognised folder that may be the domain or class."""
        inside = self._likely_folder()
        folders = self._domain_folders(inside)
        if name is not None:
            inside = folders[domain]
        elif domain in folders:
            below = [path for path in entries(folders[domain]) if self._class_folders(path)]
            return f"; the classes lie in {below[0]}: move them a folder up" if below else ""
        known = {*folders.values(), *self._class_folders(inside).values()}
        strange = [path for path in subfolders(inside) if path not in known]
        missing = name or domain
        near = difflib.get_close_matches(missing, [path.name for path in strange], n=1)
        if not near:  # a folder in another language, with the expected number of images
            wanted = self.counts.get(domain, ())
            by_class = dict(zip(self.classes, wanted if len(wanted) > 1 else (), strict=False))
            number = sum(wanted) if name is None else by_class.get(name, 0)
            pattern = "*" if name else "*/*"
            near = [p.name for p in strange if number == sum(map(is_image, p.glob(pattern)))][:1]
        if not near:
            return ""
        return f"; is it the folder {near[0]} in {inside}? Rename that to {missing}"

    def _where(self) -> str:
        return f" in {self.folder}"


def is_image(path: Path) -> bool:
    """Return whether a file is an image, by its name."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def _inside(folder: Path, path: Path) -> str:
    """Return ``path.relative_to(folder).as_posix()``, which would take half of a scan."""
    return str(path)[len(str(folder)) :].replace(os.sep, "/").lstrip("/")


def images_below(folder: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Yield the images in a folder and in the folders below it, in order of their names.

    Links to folders are followed, except to a folder that contains the link. System folders
    (`is_system`) and the suite's `outputs` are left out. ``above`` identifies the folders that
    contain this one, if they are known.

    Raises:
        DataError: If a folder cannot be read.
    """
    found = entries(folder)
    yield from filter(is_image, found)
    inside = _folders(folder, [path for path in found if not is_image(path)])
    if not inside:
        return
    above = above or frozenset(map(_identity, folder.resolve().parents))
    above |= {_identity(folder)}
    for path in inside:
        if _identity(path) not in above:  # else a link leads back
            yield from images_below(path, above)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def candidate_folders(roots: Iterable[Path], layouts: Sequence[str]) -> list[Path]:
    """Return the folder of each layout below each root, such as ``raw`` or ``PACS/kfold``.

    A folder that is there in another spelling, compared as `match_folders` does, is preferred to
    one that is not there.

    Raises:
        DataError: If a folder cannot be read.
    """
    found = []
    for root in roots:
        for layout in layouts:
            folder = root
            for part in Path(layout).parts:
                exact = folder / part
                known = match_folders(folder, {part: (part,)})
                folder = known.get(part, exact) if exact not in subfolders(folder) else exact
            found.append(folder)
    return list(dict.fromkeys(found))


def folders_inside(folders: Iterable[Path]) -> list[Path]:
    """Return the sub-folders of all folders."""
    return [path for folder in folders for path in subfolders(folder)]


def match_folders(folder: Path, names: Mapping[str, Sequence[str]]) -> dict[str, Path]:
    """Return the sub-folder of ``folder`` for each key of ``names`` that has one.

    The first spelling that exists is used. A missing ``folder`` has no sub-folders.

    Raises:
        DataError: If the folder cannot be read.
    """
    children = {plain_name(path.name): path for path in subfolders(folder)}
    return {
        key: next(children[plain_name(s)] for s in spellings if plain_name(s) in children)
        for key, spellings in names.items()
        if any(plain_name(s) in children for s in spellings)
    }


_LISTED: dict[Path, tuple[tuple[int, ...], list[str]]] = {}
"""State and sorted names of folders that this process has listed."""
_SETTLED = 2 * 10**9
"""Nanoseconds without a change after which the next one certainly gives a folder another time."""


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder sorted by name; none if there is no such folder.

    A folder is listed once in a process unless it changes: a script can call ``run`` many times.

    Raises:
        DataError: If it cannot be read.
    """
    try:
        state = file_state(status := folder.stat())
        known, names = _LISTED.get(folder, ((), []))
        if known != state:
            names = sorted(path.name for path in folder.iterdir())
            if time.time_ns() - status.st_ctime_ns > _SETTLED:
                _LISTED[folder] = state, names
        return [folder / name for name in names]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _locked(folder, error) from error


def subfolders(folder: Path) -> list[Path]:
    """Return the sub-folders of a folder sorted by name, without system folders and `outputs`.

    Raises:
        DataError: If the folder cannot be read.
    """
    return _folders(folder, entries(folder))


def _folders(folder: Path, found: Sequence[Path]) -> list[Path]:
    own = outputs(folder, {path.name for path in found})
    try:
        return [p for p in found if not is_system(p.name) and p.name not in own and p.is_dir()]
    except OSError as error:  # a folder can be listed without permission to enter it
        raise _locked(folder, error) from error


def _locked(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read the folder {folder}: {error.strerror}; change its permissions, or move it "
        f"out of the data set"
    )


def is_system(name: str) -> bool:
    """Return whether a file or folder is hidden, or left behind by a system or an archive."""
    return name.startswith((".", "__")) or name.lower() in SYSTEM_FOLDERS | SYSTEM_FILES


def outputs(folder: Path, names: Collection[str]) -> frozenset[str]:
    """Return the names of the suite's own output in a folder, given the names of its entries.

    They are `OUTPUTS` if the folder holds a record or a partition, which are named by a hash.
    """
    for name in ("runs", "partitions", "checkpoints", "records"):
        if name in names:
            for path in (folder / name).glob("*"):
                if re.fullmatch(r"[0-9a-f]{16}\..+|.+\.jsonl\.xz", path.name):
                    return OUTPUTS
    return frozenset()


def other_files(folder: Path, used: Collection[Path]) -> Iterator[Path]:
    """Yield the files below a folder that are not ``used``, without system files and `outputs`."""
    for where, folders, files in os.walk(folder):
        own = outputs(Path(where), folders)
        folders[:] = sorted(name for name in folders if not is_system(name) and name not in own)
        paths = (Path(where) / name for name in sorted(files) if not is_system(name))
        yield from (path for path in paths if path not in used)
