"""Getting a whole data set: its files fetched, checked, unpacked and put in place, noted beside."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.fetch.archives import Limits, unpack
from feddg_bench.data.fetch.download import Fetched, Progress, fetch
from feddg_bench.data.fetch.mirrors import RECEIPT, Download, HubDownload
from feddg_bench.data.fetch.partial import Wanted
from feddg_bench.data.fetch.web import check_url

WORK = ".download"
"""Folder inside the data set's where files stay until they are whole and checked."""

Show = Callable[[str, str], Progress]
"""Given a name and a unit (``bytes`` or another), returns what is told of the progress."""


class Place(NamedTuple):
    """Something that a download makes in the data set's folder, and the file it comes from."""

    path: Path
    source: str


def check_offer(dataset: type[DomainDataset], accepted: bool) -> None:
    """Refuse what cannot or must not be downloaded.

    Raises:
        SettingsError: If nothing is offered, or a licence for research alone was not accepted.
    """
    if not dataset.downloads:
        raise SettingsError(f"{dataset.title} is not downloaded: {dataset.no_download}")
    if dataset.research_only and not accepted:
        raise SettingsError(
            f"{dataset.title} may be used for research only ({dataset.licence}; {dataset.source}): "
            f"read its terms, and if you keep to them add --accept-licence"
        )


def obtain(
    dataset: type[DomainDataset],
    folder: Path,
    mirrors: Sequence[str] = (),
    show: Show = lambda _name, _unit: lambda _done, _total: None,
) -> list[str]:
    """Bring a data set into a folder; what an earlier call brought there is not fetched again.

    Args:
        dataset: Its ``downloads`` say what to fetch.
        folder: Where its files or folders go, beside whatever else is there.
        mirrors: Folders of servers (or Hugging Face endpoints) to use instead of the known ones.
        show: Told of progress.

    Returns:
        Sentences for the user: what came, and how it was checked.

    Raises:
        SettingsError: If something that is no earlier download stands in the way, or a mirror is no
            web address.
        DataError: If the data cannot be had, are not what they should be, or cannot be written.
    """
    for mirror in mirrors:
        check_url(mirror)
    receipt = _Receipt(dataset, folder)
    notes: list[str] = []
    try:
        for offer in dataset.downloads:
            if isinstance(offer, HubDownload):
                notes += _from_hub(dataset, offer, folder, mirrors, receipt, show)
            else:
                notes += _from_mirrors(offer, folder, mirrors, receipt, show)
        shutil.rmtree(folder / WORK, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder}: {error.strerror or error}; choose another folder with --to"
        ) from error
    return notes


def _from_mirrors(
    offer: Download, folder: Path, mirrors: Sequence[str], receipt: _Receipt, show: Show
) -> Iterator[str]:
    place = Place(folder / (offer.unpack or offer.name), offer.name)
    known = receipt.files.get(offer.name, {}).get("sha256")
    checksum = offer.checksum or (f"sha256:{known}" if known else None)
    wanted = Wanted(offer.size, checksum, offer.unzipped if offer.checksum else None)
    if place.path.is_file() and checksum:
        if wanted.fault(place.path) is None:
            yield f"{offer.name}: was here already"
            return
        if receipt.made(place):
            place.path.unlink()  # it came whole and has been spoilt since
    if not receipt.makes_way([place]):
        yield f"{offer.name}: was here already, as {place.path.name}"
        return
    work = folder / WORK / offer.name
    urls = [f"{mirror.rstrip('/')}/{offer.name}" for mirror in mirrors or offer.mirrors]
    fetched = fetch(urls, work, wanted, show(offer.name, "bytes"))
    how = "checksum as published" if offer.checksum else "checksum as noted before"
    if checksum is None:
        how = f"no published checksum; SHA-256 {fetched.sha256} noted in {RECEIPT}"
    if offer.unpack is None:
        receipt.note(offer.name, fetched, how, [place])
        work.replace(place.path)
    else:
        files = _unpack(
            offer, offer.unpack, work, lambda: receipt.note(offer.name, fetched, how, [place])
        )
        how = f"{how}; {files:,} files unpacked"
    yield f"{offer.name}: {fetched.size:,} bytes, {how}"


def _unpack(offer: Download, inside: str, archive: Path, before: Callable[[], None]) -> int:
    """Unpack an archive, move the folder that is wanted to its place, and drop the rest."""
    unpacked = archive.with_name(f"{archive.name}.unpacked")
    shutil.rmtree(unpacked, ignore_errors=True)
    try:
        files = unpack(archive, unpacked, Limits(bytes=offer.unpacked_bytes))
    except DataError as error:
        if getattr(error.__cause__, "errno", None) is None:  # the archive's fault, not the disk's
            archive.unlink()
        raise
    if not (unpacked / inside).is_dir():
        shutil.rmtree(unpacked)
        archive.unlink()
        raise DataError(f"{archive.name} holds no folder {inside}: it is not what it should be")
    before()
    (unpacked / inside).rename(archive.parents[1] / inside)
    shutil.rmtree(unpacked)
    archive.unlink()
    return files


def _from_hub(
    dataset: type[DomainDataset],
    offer: HubDownload,
    folder: Path,
    mirrors: Sequence[str],
    receipt: _Receipt,
    show: Show,
) -> Iterator[str]:
    from feddg_bench.data.fetch import hub

    places = [Place(folder / domain, offer.repository) for domain in dataset.domains]
    if not receipt.makes_way(places):
        yield f"{offer.repository}: was here already"
        return
    hub.check_extra()
    work = folder / WORK
    commit, tables = hub.tables(offer, mirrors)
    came = []
    for number, table in enumerate(tables, start=1):
        path = work / f"{number:03d}.parquet"
        wanted = Wanted(table.size, f"sha256:{table.sha256}")
        came.append((path, fetch(table.urls, path, wanted, show(table.name, "bytes"))))
    images = work / "images"
    shutil.rmtree(images, ignore_errors=True)
    try:
        count = hub.write_images(
            dataset, [path for path, _ in came], images, show("writing", "images")
        )
    except DataError:
        shutil.rmtree(images, ignore_errors=True)
        raise
    total = sum(fetched.size for _, fetched in came)
    how = f"checksums as the repository lists them at commit {commit[:12]}"
    whole = Fetched(tables[0].urls[0], total, "")
    hashes = {table.name: table.sha256 for table in tables}
    receipt.note(offer.repository, whole, how, places, revision=commit, sha256=hashes)
    for place in places:
        (images / place.path.name).rename(place.path)
    yield f"{offer.repository}: {total:,} bytes in {len(came)} tables, {how}; {count:,} images"


class _Receipt:
    """The file that says what was downloaded into a folder, and from where."""

    def __init__(self, dataset: type[DomainDataset], folder: Path) -> None:
        self.path, self.folder = folder / RECEIPT, folder
        self.about = {
            "dataset": dataset.name,
            "licence": dataset.licence,
            "source": dataset.source,
        }
        self.files: dict[str, dict[str, Any]] = {}
        try:
            content = json.loads(self.path.read_bytes())
            self.files = {str(name): dict(entry) for name, entry in content["files"].items()}
        except FileNotFoundError:
            pass
        except NotADirectoryError as error:
            raise SettingsError(f"{folder} is no folder: choose another one with --to") from error
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(
                f"{self.path} was not written by a download: move it away or choose another --to"
            ) from error

    def made(self, place: Place) -> bool:
        """Tell whether an earlier download put a thing in its place."""
        return place.path.name in self.files.get(place.source, {}).get("makes", ())

    def makes_way(self, places: Sequence[Place]) -> bool:
        """Tell whether something is to be fetched; remove what a stopped download left of it.

        Raises:
            SettingsError: If something that no download brought is in the way.
        """
        there = [place for place in places if place.path.exists()]
        for place in there:
            if not self.made(place):
                raise SettingsError(
                    f"{place.path} exists and is not what is to be downloaded: move it away or "
                    f"choose another folder with --to"
                )
        if len(there) == len(places):
            return False
        for place in there:
            shutil.rmtree(place.path)
        return True

    def note(
        self, name: str, fetched: Fetched, how: str, places: Sequence[Place], **more: object
    ) -> None:
        """Note a file that is about to be put in place."""
        self.files[name] = {
            "url": fetched.url or self.files.get(name, {}).get("url"),
            "bytes": fetched.size,
            **({"sha256": fetched.sha256} if fetched.sha256 else {}),
            "checked": how,
            "makes": [place.path.name for place in places],
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **more,
        }
        text = json.dumps({**self.about, "files": self.files}, indent=1, ensure_ascii=False)
        write_whole(self.path, f"{text}\n".encode())
