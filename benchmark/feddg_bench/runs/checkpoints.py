"""Checkpoints: all that a run needs to go on, in one file that is whole or absent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import plain_file, write_whole
from feddg_bench.config.schema import RunSettings
from feddg_bench.core.messages import Payload, decode, encode
from feddg_bench.core.server import checked_state
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore

_BEGINNING = b"feddg-bench checkpoint 2\n"
_DIGEST = 32
"""Length in bytes of the SHA-256 of everything after it."""


class Checkpoint(BaseModel):
    """What a checkpoint holds."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)

    server: dict[str, Any]  # what `feddg_bench.core.server.Server.state` returned
    record: RunRecord  # the record so far
    settings: dict[str, Any]  # the run's settled settings
    recipe: str  # label of where they came from
    data_root: str | None  # folder of the data
    keep: list[str] = []  # global models to keep beside the record

    @field_validator("settings")
    @classmethod
    def _whole(cls, settings: dict[str, Any]) -> dict[str, Any]:
        RunSettings.model_validate(settings)
        return settings


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint.

    Raises:
        DataError: If it cannot be written; the checkpoint of an earlier round stays.
    """
    state: Payload = dict(checkpoint) | {"record": checkpoint.record.as_json()}
    data = encode(state)
    write_whole(path, b"".join((_BEGINNING, hashlib.sha256(data).digest(), data)))


def load_checkpoint(path: Path) -> Checkpoint:
    """Return what `save_checkpoint` wrote.

    Raises:
        DataError: If the file is missing or damaged, or belongs to another run than its name says.
    """
    with going_on(path):
        plain_file(path)
        whole = path.read_bytes()
        if not whole.startswith(_BEGINNING):
            raise DataError("another version of feddg-bench wrote it, or something else")
        start = len(_BEGINNING) + _DIGEST
        digest, data = whole[len(_BEGINNING) : start], whole[start:]
        if hashlib.sha256(data).digest() != digest:
            raise DataError("its content is damaged, it has not the digest it was written with")
        state = decode(data)
        if not isinstance(state, dict):
            raise DataError("it holds no run")
        try:
            record = RunRecord.parse(json.dumps(state.get("record")), finished=False)
        except DataError as error:
            raise DataError(f"of its record {error}") from error
        try:
            checkpoint = Checkpoint.model_validate(state | {"record": record})
        except ValidationError as error:
            first = error.errors()[0]
            raise DataError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        rounds = [entry.round for entry in record.rounds]
        if record.key != path.stem:
            raise DataError(f"it is of the run {record.key}")
        if rounds != list(range(1, checked_state(checkpoint.server).round + 1)):
            raise DataError(f"its record does not end with its round {checkpoint.server['round']}")
    return checkpoint


@contextmanager
def going_on(path: Path) -> Iterator[None]:
    """Report an error in a block as the checkpoint's, and say how to go on."""
    try:
        yield
    except (DataError, OSError) as error:
        raise DataError(
            f"checkpoint {path} cannot be used: {error}; delete it, and the same command starts "
            f"this run from round 1"
        ) from error


def tidy(store: ResultsStore, *keys: str) -> None:
    """Remove the checkpoints and partial files that killed processes left of recorded runs."""
    left = [store.checkpoint(key) for key in keys]
    recorded = {*keys, ""}  # "" stands for `.writable`
    for folder in (store.runs, store.checkpoints):
        left += [part for part in folder.glob("*.part") if part.name.partition(".")[0] in recorded]
    for part in store.partitions.glob("*.part"):  # runs share these: if one is there, it is whole
        left += [part] if part.with_suffix("").with_suffix("").exists() else []
    for path in left:
        with suppress(OSError):
            path.unlink()
