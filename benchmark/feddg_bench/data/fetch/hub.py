"""Images from parquet tables on Hugging Face, written to folders that the data sets read.

Needs the extra ``hub``: huggingface_hub fetches the files of a commit, pyarrow reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.config.reading import plain_name
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.fetch.mirrors import HubDownload
from feddg_bench.data.fetch.transfer import OnBytes
from feddg_bench.data.image_folders import IMAGE_SUFFIXES, ImageFolderDataset

ENDPOINT = "https://huggingface.co"
BATCH = 64
"""Rows in memory at a time."""
MAGIC = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png"}


class Tables(NamedTuple):
    """The downloaded parquet files of a commit, and the endpoint that served them."""

    endpoint: str
    commit: str
    files: list[Path]
    sha256: dict[str, str]


def check_hub() -> None:
    """Check that the optional packages are installed.

    Raises:
        SettingsError: If one is not installed.
    """
    missing = [name for name in ("huggingface_hub", "pyarrow") if find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"downloads from Hugging Face need {' and '.join(missing)}: "
            f"pip install 'feddg-bench[hub]'"
        )


def fetch_tables(
    offer: HubDownload, endpoints: Sequence[str], folder: Path, progress: OnBytes
) -> Tables:
    """Fetch the tables of one commit from the first endpoint that serves all of them.

    The default endpoint is ``$HF_ENDPOINT`` or huggingface.co. Files that are already in the folder
    are not fetched again.

    Raises:
        DataError: If no endpoint does, or a file's hash differs from that in the repository.
    """
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    reasons = []
    for endpoint in endpoints or [os.environ.get("HF_ENDPOINT") or ENDPOINT]:
        try:
            return _from_endpoint(offer, endpoint.rstrip("/"), folder, progress)
        except DataError:
            raise
        except Exception as error:  # the library's own errors, and those of its HTTP client
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reasons.append(f"{endpoint}: {lines[0]}")
    raise DataError(f"cannot fetch {offer.repository} from Hugging Face ({'; '.join(reasons)})")


def _from_endpoint(offer: HubDownload, endpoint: str, folder: Path, progress: OnBytes) -> Tables:
    from huggingface_hub import HfApi, RepoFile, hf_hub_download

    hub, kind = HfApi(endpoint=endpoint), "dataset"
    # all files of one commit, even if the branch moves on meanwhile
    commit = str(hub.dataset_info(offer.repository, revision=offer.revision).sha)
    listed = hub.list_repo_tree(offer.repository, offer.folder, revision=commit, repo_type=kind)
    hashes = {
        file.path: str(file.lfs.sha256)
        for file in sorted(listed, key=lambda file: file.path)
        if isinstance(file, RepoFile) and file.lfs and file.path.endswith(".parquet")
    }
    if not hashes:
        raise ValueError(f"{offer.folder} holds no parquet files")
    files: list[Path] = []
    for path, sha256 in hashes.items():
        progress(len(files), len(hashes))
        fetched = hf_hub_download(
            offer.repository,
            path,
            repo_type=kind,
            revision=commit,
            endpoint=endpoint,
            local_dir=folder / commit,
        )
        files.append(Path(fetched))
        with files[-1].open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            files[-1].unlink()
            raise DataError(f"{path} has the SHA-256 {digest} instead of {sha256}: get it again")
    return Tables(endpoint, commit, files, hashes)


def write_images(
    dataset: type[DomainDataset], files: Sequence[Path], folder: Path, progress: OnBytes
) -> int:
    """Write the images of tables as ``<folder>/<domain>/<class>/<image>``.

    Labels are mapped by the class names in each table's metadata. A file keeps its name in the
    table, with the suffix that matches its bytes; if it has no usable name, or the name is taken,
    it is named after its row. The folder must not exist.

    Returns:
        Number of images.

    Raises:
        DataError: If the tables do not hold the images of this data set.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    domains = _domain_names(dataset)
    counts = np.zeros((len(dataset.domains), len(dataset.classes)), dtype=np.int64)
    taken: set[tuple[int, int, str]] = set()
    row = 0
    try:
        opened = [ParquetFile(path) for path in files]
        total = sum(table.metadata.num_rows for table in opened)
        for table, path in zip(opened, files, strict=True):
            labels = _labels(dataset, table.schema_arrow, path)
            for image, domain_text, label in _rows(table):
                domain = domains.get(plain_name(str(domain_text)))
                if domain is None:
                    raise DataError(f"{path}: unknown domain {domain_text!r} in row {row}")
                if not isinstance(label, int) or not 0 <= label < len(labels):
                    raise DataError(f"{path}: unknown label {label!r} in row {row}")
                data, name = _image(image, row, path)
                kind = domain, labels[label]
                if (*kind, name.casefold()) in taken:
                    name = f"row{row:06d}{Path(name).suffix}"
                taken.add((*kind, name.casefold()))
                target = folder / dataset.domains[kind[0]] / dataset.classes[kind[1]] / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                counts[kind] += 1
                row += 1
                if row % BATCH == 0 or row == total:
                    progress(row, total)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's, not pyarrow's
        reason = str(error).splitlines()[0]
        raise DataError(f"cannot read the tables ({reason}): get them again") from error
    _check_counts(dataset, counts)
    return row


def _rows(table: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield image, domain and label of every row."""
    for batch in table.iter_batches(batch_size=BATCH, columns=["image", "domain", "label"]):
        columns = (batch.column(name).to_pylist() for name in ("image", "domain", "label"))
        yield from zip(*columns, strict=True)


def _domain_names(dataset: type[DomainDataset]) -> dict[str, int]:
    """Return the position of each domain under every spelling of its name."""
    others: Mapping[str, Sequence[str]] = (
        dataset.spellings if issubclass(dataset, ImageFolderDataset) else {}
    )
    return {
        plain_name(spelling): place
        for place, domain in enumerate(dataset.domains)
        for spelling in (domain, *others.get(domain, ()))
    }


def _labels(dataset: type[DomainDataset], schema: Any, path: Path) -> list[int]:
    """Return the data set's label for each label of the table, by class names in its metadata."""
    missing = [name for name in ("image", "domain", "label") if name not in schema.names]
    if missing:
        raise DataError(f"{path} has no column {missing[0]}")
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])
        names = [str(name) for name in about["info"]["features"]["label"]["names"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} does not say which classes its labels stand for") from error
    places = {plain_name(name): place for place, name in enumerate(dataset.classes)}
    if sorted(map(plain_name, names)) != sorted(places):
        raise DataError(
            f"{path} has other classes than {dataset.title}: {', '.join(names[:5])}... instead of "
            f"{', '.join(dataset.classes[:5])}..."
        )
    return [places[plain_name(name)] for name in names]


def _image(value: Any, row: int, path: Path) -> tuple[bytes, str]:
    """Return an image's bytes, and a file name that cannot lead out of a folder."""
    data = value.get("bytes") if isinstance(value, dict) else None
    suffix = None
    if isinstance(data, bytes):
        suffix = next((end for magic, end in MAGIC.items() if data.startswith(magic)), None)
    if not isinstance(data, bytes) or suffix is None:
        raise DataError(f"{path}: the image in row {row} is neither JPEG nor PNG")
    given = PurePosixPath(str(value.get("path") or ""))
    usable = given.name.isascii() and given.name.isprintable() and not given.name.startswith(".")
    if not usable or "\\" in given.name or given.suffix.lower() not in IMAGE_SUFFIXES:
        return data, f"row{row:06d}{suffix}"
    same = {given.suffix.lower(), suffix} <= {".jpg", ".jpeg"} or given.suffix.lower() == suffix
    return data, given.name if same else given.stem + suffix


def _check_counts(dataset: type[DomainDataset], counts: Any) -> None:
    for domain, wanted in dataset.counts.items():
        have = counts[dataset.domains.index(domain)].tolist()
        for name, number, published in zip(dataset.classes, have, wanted, strict=True):
            if number != published:
                raise DataError(
                    f"the tables of {dataset.title} hold {number:,} images of {domain}/{name} "
                    f"instead of the published {published:,}: nothing was put in place"
                )
    empty = [d for d, n in zip(dataset.domains, counts.sum(axis=1), strict=True) if not n]
    if empty:
        raise DataError(f"the tables of {dataset.title} hold no image of {', '.join(empty)}")
