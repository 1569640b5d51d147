"""The results folder: one immutable record a run, named by its key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import write_whole
from feddg_bench.records.record import RunRecord


class ResultsStore:
    """The records of a results folder.

    Args:
        root: The folder; records are under ``runs/``, checkpoints of unfinished runs under
            ``checkpoints/``, partitions under ``partitions/``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = root / "runs"
        self.checkpoints = root / "checkpoints"
        self.partitions = root / "partitions"

    def check_writable(self) -> None:
        """Raise `DataError` in one sentence if records could not be written here."""
        probe = self.runs / ".writable"
        write_whole(probe, b"")
        probe.unlink()

    def path(self, key: str) -> Path:
        """Return where the record of a key is."""
        return self.runs / f"{key}.json"

    def checkpoint(self, key: str) -> Path:
        """Return where the checkpoint of a key is."""
        return self.checkpoints / f"{key}.safetensors"

    def load(self, key: str) -> RunRecord | None:
        """Return a finished run's record, or ``None``.

        Raises:
            DataError: If the file is there but cut short or not a record.
        """
        path = self.path(key)
        return read_record(path) if path.exists() else None

    def keys(self) -> set[str]:
        """Return the keys of all records."""
        return {path.stem for path in self.runs.glob("*.json")}

    def set_aside(self, key: str) -> None:
        """Rename a record, if it is there, so that a new one can take its place."""
        path = self.path(key)
        if path.exists():
            number = 1
            while (beside := path.with_name(f"{path.name}.{number}")).exists():
                number += 1
            path.rename(beside)

    def save(self, record: RunRecord) -> Path:
        """Write a record in one rename, and return its path."""
        text = json.dumps(record.as_json(), indent=1, ensure_ascii=False)
        write_whole(self.path(record.key), text.encode() + b"\n")
        return self.path(record.key)

    def __iter__(self) -> Iterator[RunRecord]:
        for path in sorted(self.runs.glob("*.json")):
            yield read_record(path)


def read_record(path: Path) -> RunRecord:
    """Return the record in a file.

    Raises:
        DataError: If it is cut short, not JSON, or not a record.
    """
    try:
        return RunRecord.parse(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read record {path}: {error.strerror}") from error
    except DataError as error:
        raise DataError(f"record {path} cannot be used: {error}") from error
