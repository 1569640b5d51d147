"""Download of a data set: files are fetched, checked, unpacked, put in place and recorded."""

from __future__ import annotations

import json
import shutil
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.fetch.mirrors import RECEIPT, Download, HubDownload
from feddg_bench.data.fetch.transfer import OnBytes, check_url, fetch

WORK = ".download"
"""Sub-folder of the data set's folder for files that are incomplete or not yet checked."""

Show = Callable[[str, str], OnBytes]
"""Takes a name and a unit, such as ``bytes``, and returns the function that shows progress."""


def check_offer(dataset: type[DomainDataset], accepted: bool) -> None:
    """Refuse a data set that cannot or must not be downloaded.

    Raises:
        SettingsError: If nothing is offered, or a research-only licence was not accepted.
    """
    if not dataset.downloads:
        raise SettingsError(f"{dataset.title} is not downloaded: {dataset.no_download}")
    if dataset.research_only and not accepted:
        raise SettingsError(
            f"{dataset.title} may be used for research only (licence: {dataset.licence}; "
            f"{dataset.source}): read its terms, and if you keep to them add --accept-licence"
        )


def obtain(
    dataset: type[DomainDataset],
    folder: Path,
    mirrors: Sequence[str] = (),
    show: Show = lambda _name, _unit: lambda _done, _total: None,
) -> list[str]:
    """Download a data set into a folder; files from an earlier call are not fetched again.

    Other contents of the folder are kept. ``mirrors`` (folders of servers, or Hugging Face
    endpoints) are used instead of the known ones.

    Returns:
        Messages for the user: what was fetched, and how it was checked.

    Raises:
        SettingsError: If something other than an earlier download is in the way, or a mirror is not
            a web address.
        DataError: If the data cannot be fetched, fail their checks, or cannot be written.
    """
    about = {"dataset": dataset.name, "licence": dataset.licence, "source": dataset.source}
    receipt = Receipt(about, folder)
    notes: list[str] = []
    with work_folder(folder, mirrors):
        for offer in dataset.downloads:
            if isinstance(offer, HubDownload):
                notes += _from_hub(dataset, offer, folder, mirrors, receipt, show)
            else:
                notes += _from_mirrors(offer, folder, mirrors, receipt, show)
    return notes


@contextmanager
def work_folder(folder: Path, mirrors: Sequence[str]) -> Iterator[Path]:
    """Yield the folder for unfinished files; it is removed unless the block fails or is stopped.

    Raises:
        SettingsError: If a mirror is not a web address.
        DataError: If files cannot be written.
    """
    for mirror in mirrors:
        check_url(mirror)
    try:
        yield folder / WORK
        shutil.rmtree(folder / WORK, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder}: {error.strerror or error}; choose another folder with --to"
        ) from error


def _from_mirrors(
    offer: Download, folder: Path, mirrors: Sequence[str], receipt: Receipt, show: Show
) -> Iterator[str]:
    place = folder / (offer.unpack or offer.name)
    if place.is_file() and offer.unpack is None:
        if offer.fault(place) is None:
            yield f"{offer.name}: was here already"
            return
        if receipt.made(offer.name, place):
            place.unlink()  # it was intact once and damaged since
    if not receipt.makes_way(offer.name, [place]):
        yield f"{offer.name}: was here already, as {place.name}"
        return
    work = folder / WORK / offer.name
    url = fetch(offer.urls(mirrors), work, offer, show(offer.name, "bytes"))
    note = {"url": url, "bytes": work.stat().st_size, "checksum": offer.checksum}
    files, whole = "", work
    if offer.unpack is not None:
        whole = work.with_name(f"{work.name}.unpacked") / offer.unpack
        files = f"; {unpack_archive(work, whole.parent, offer.unpacked_bytes):,} files unpacked"
        if not whole.is_dir():
            raise DataError(f"{offer.name} holds no folder {offer.unpack}: it is not what it was")
    receipt.note(offer.name, [place], note)
    whole.rename(place)
    checked = "checksum as published" if offer.content is None else "its images are the right ones"
    yield f"{offer.name}: {note['bytes']:,} bytes, {checked}{files}"


def _from_hub(
    dataset: type[DomainDataset],
    offer: HubDownload,
    folder: Path,
    mirrors: Sequence[str],
    receipt: Receipt,
    show: Show,
) -> Iterator[str]:
    from feddg_bench.data.fetch import hub

    places = [folder / domain for domain in dataset.domains]
    if not receipt.makes_way(offer.repository, places):
        yield f"{offer.repository}: was here already"
        return
    hub.check_hub()
    tables = hub.fetch_tables(offer, mirrors, folder / WORK, show("tables", "tables"))
    images = folder / WORK / "images"
    shutil.rmtree(images, ignore_errors=True)
    count = hub.write_images(dataset, tables.files, images, show("writing", "images"))
    total = sum(file.stat().st_size for file in tables.files)
    note = {"url": tables.endpoint, "revision": tables.commit, "bytes": total}
    receipt.note(offer.repository, places, {**note, "sha256": tables.sha256})
    for place in places:
        (images / place.name).rename(place)
    yield (
        f"{offer.repository}: {total:,} bytes in {len(tables.files)} tables, checksums as the "
        f"repository lists them at commit {tables.commit[:12]}; {count:,} images"
    )


class Receipt:
    """File that records what was downloaded into a folder, and from where."""

    def __init__(self, about: Mapping[str, str], folder: Path) -> None:
        self.path = folder / RECEIPT
        self.about = about
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

    def made(self, source: str, place: Path) -> bool:
        """Return whether an earlier download of ``source`` made ``place``."""
        return place.name in self.files.get(source, {}).get("makes", ())

    def makes_way(self, source: str, places: Sequence[Path]) -> bool:
        """Return whether ``source`` has to be fetched; remove leftovers of a stopped download.

        Raises:
            SettingsError: If something that was not downloaded is in the way.
        """
        existing = [place for place in places if place.exists()]
        for place in existing:
            if not self.made(source, place):
                raise SettingsError(
                    f"{place} exists and is not what is to be downloaded: move it away or choose "
                    f"another folder with --to"
                )
        if len(existing) == len(places):
            return False
        for place in existing:
            shutil.rmtree(place)
        return True

    def note(self, source: str, places: Sequence[Path], about: dict[str, Any]) -> None:
        """Record a download whose files are about to be put in place."""
        self.files[source] = {
            **about,
            "makes": [place.name for place in places],
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        text = json.dumps({**self.about, "files": self.files}, indent=1, ensure_ascii=False)
        write_whole(self.path, f"{text}\n".encode())


def unpack_archive(archive: Path, folder: Path, most_bytes: int) -> int:
    """Unpack a tar file, compressed or not, into a new folder that appears once it is complete.

    Files of an earlier call in the folder are replaced. An archive is rejected if its files have
    more than ``most_bytes`` in total.

    Returns:
        Number of files.

    Raises:
        DataError: If the archive is damaged or too large, if a member would lie outside the folder
            or is a link or a device, or if the disk is full. No files remain then.
    """
    shutil.rmtree(folder, ignore_errors=True)
    unfinished = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    files = size = 0
    try:
        unfinished.mkdir(parents=True)
        with tarfile.open(archive, "r|*") as opened:  # read as a stream, so unpacked only once
            for member in opened:
                if not (member.isreg() or member.isdir()):
                    raise DataError(f"{archive} is not unpacked: {member.name!r} is no plain file")
                files, size = files + member.isreg(), size + member.size
                if size > most_bytes:
                    raise DataError(f"{archive} is not unpacked: more than {most_bytes:,} bytes")
                opened.extract(member, unfinished, filter="data")
        unfinished.replace(folder)
    except tarfile.FilterError as error:
        raise DataError(f"{archive} is not unpacked: {error}") from error
    except (tarfile.TarError, zlib.error, EOFError, ValueError) as error:
        raise DataError(f"{archive} is damaged ({error}): get it again") from error
    except OSError as error:  # gzip's or the disk's
        text = error.strerror or error
        raise DataError(f"cannot unpack {archive}: {text}; make room or get it again") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return files
