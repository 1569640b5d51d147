"""The results folder: one immutable record per run, named by its key, or packed with others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path

from feddg_bench.common.errors import DataError, SettingsError, printable
from feddg_bench.common.files import check_writable, file_name
from feddg_bench.records import sources
from feddg_bench.records.record import NewerError, RunRecord, TunedRecord
from feddg_bench.records.runs import LONGEST, RecordedRun, read_folder, read_runs
from feddg_bench.records.sources import (
    ENDING,
    Packable,
    Source,
    find_records,
    read_record,
    write_record,
)

logger = logging.getLogger(__name__)


class ResultsStore:
    """The records of a results folder.

    Args:
        root: The folder; records are under ``runs/``, one per file, or packed under ``records/``;
            checkpoints of unfinished runs under ``checkpoints/``, partitions under ``partitions/``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = root / "runs"
        self.checkpoints = root / "checkpoints"
        self.partitions = root / "partitions"
        self._packed: tuple[list[Source], dict[str, RecordedRun]] = ([], {})
        self._sound: dict[Source, bool] = {}

    def check_writable(self) -> None:
        """Raise `DataError` with a one-sentence message if records cannot be written here."""
        check_writable(self.runs)

    def path(self, key: str) -> Path:
        """Return the path of a key's record, whether or not it exists."""
        path = self.runs / f"{key}.json"
        packed = None if path.exists() else self.packed().get(key)
        return packed.source.path if packed else path

    def checkpoint(self, key: str) -> Path:
        """Return the path of a key's checkpoint."""
        return self.checkpoints / f"{key}.safetensors"

    def model(self, key: str, which: str) -> Path:
        """Return the path of a kept model of a run, ``last`` or ``best``."""
        return self.runs / f"{key}.{which}.safetensors"

    def has_models(self, key: str, keep: Collection[str]) -> bool:
        """Return whether all models to keep of a run exist."""
        return all(self.model(key, which).exists() for which in keep)

    def state(self, key: str, keep: Collection[str] = ()) -> str:
        """Return ``done``, ``begun`` or ``pending``; ``done`` needs all models to ``keep``."""
        if self.has_models(key, keep) and self.holds(key):
            return "done"
        return "begun" if self.checkpoint(key).exists() else "pending"

    def keys(self) -> set[str]:
        """Return the keys of all records that can be read."""
        single = find_records(self.root, packed=False)
        self._sound = {s: self._sound[s] if s in self._sound else _is_sound(s) for s in single}
        return {s.path.stem for s in single if self._sound[s]} | set(self.packed())

    def find(self, given: str, among: Iterable[str]) -> str | None:
        """Return the only one of some keys that begins with the given letters, ``None`` if none.

        Raises:
            SettingsError: If several do.
        """
        found = sorted({key for key in among if given and key.startswith(given)})
        if len(found) > 1 and given not in found:
            raise SettingsError(
                f"{given!r} is ambiguous in {self.root}: it begins {' and '.join(found[:4])}"
                + f" and {len(found) - 4} more" * (len(found) > 4)
            )
        return given if given in found else next(iter(found), None)

    def packed(self) -> dict[str, RecordedRun]:
        """Return the runs in packed files by key."""
        there = find_records(self.root, packed=True)
        if there != self._packed[0]:
            found, _ = read_folder(self.root, packed=True)
            self._packed = there, {run.key: run for run in reversed(found)}  # the first is used
        return self._packed[1]

    def holds(self, key: str) -> bool:
        """Return whether the record of a key exists and can be read; it is not set aside."""
        try:
            RunRecord.parse(read_record(self.runs / f"{key}.json"), key)
        except (OSError, DataError):
            return key in self.packed()
        return True

    def load(self, key: str) -> RunRecord | None:
        """Return a finished run's record, or ``None``.

        A file that does not hold this record is set aside as ``KEY.json.broken``, with a warning,
        so that the run is repeated.

        Raises:
            DataError: If a newer version wrote it, or it cannot be read or set aside.
        """
        single = self.single(key) if (self.runs / f"{key}.json").is_file() else None
        packed = None if single else self.packed().get(key)
        return packed.record() if packed else single

    def single(self, key: str) -> RunRecord | None:
        """Return the record in its own file, as `load` does."""
        path = self.runs / f"{key}.json"
        try:
            return RunRecord.parse(read_record(path), key)
        except OSError as error:
            raise DataError(f"cannot read record {path}: {error.strerror}") from error
        except NewerError as error:
            raise DataError(f"record {path} cannot be used: {error}") from error
        except DataError as error:
            name, reason = self.set_aside(key, ".broken"), printable(str(error))[:LONGEST]
            logger.warning("record %s is set aside as %s: %s", path, name, reason)
            return None

    def set_aside(self, key: str, ending: str = "") -> str:
        """Rename a record, so that a new one can take its place, and return its new name.

        A packed record stays where it is; a single file takes precedence over it.
        """
        return sources.set_aside(self.runs / f"{key}.json", ending)

    def save(self, record: RunRecord) -> Path:
        """Write a record atomically, and return its path."""
        path = self.runs / f"{record.key}.json"
        write_record(path, record.as_json())
        return path

    def note_tuned(self, record: RunRecord, tuned: TunedRecord | None) -> RunRecord:
        """Add the result of tuning to an existing record, and return the record."""
        if tuned is None or record.tuned == tuned:
            return record
        record = record.model_copy(update={"tuned": tuned}).sealed()
        self.save(record)
        return record

    def __iter__(self) -> Iterator[RunRecord]:
        for run in read_runs(self.root) if self.root.is_dir() else ():
            yield run.record()


@lru_cache(maxsize=8)
def open_results(root: Path) -> ResultsStore:
    """Return the store of a results folder, shared by all callers so that files are read once.

    It lists the folder on every call, so that files can come and go.
    """
    return ResultsStore(root)


def _is_sound(source: Source) -> bool:
    try:
        return RunRecord.parse(source.text(0), source.path.stem).key == source.path.stem
    except DataError:
        return False


def _packables(root: Path) -> tuple[list[Packable], dict[Path, str]]:
    runs, problems = read_folder(root)
    return [
        Packable(
            run.source,
            run.key,
            (run.seed, run.key),
            root / "runs" / f"{run.key}.json",
            root / "records" / f"{file_name(run.dataset, run.protocol, run.recipe)}{ENDING}",
            run.text,
        )
        for run in runs
    ], {p.path: p.reason for p in problems if p.skipped and p.path.parent.name == "records"}


def pack_runs(root: Path) -> list[Path]:
    """Move the single records of a results folder into packed files; see `sources.pack`.

    There is one for each data set, protocol and recipe, or several if there are many records.
    """
    return sources.pack(partial(_packables, root))


def unpack_runs(root: Path) -> list[Path]:
    """Move packed records of a results folder into single files; see `sources.unpack`."""
    return sources.unpack(partial(_packables, root))
