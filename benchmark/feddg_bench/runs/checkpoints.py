"""Checkpoints: all that is needed to resume a run, in files that are complete or absent.

The file named after the run holds the record, the server's state, and the SHA-256 of each client's
state. Clients' states are files in a separate folder, named after their SHA-256, so that only
changed ones are written. They are written before the file that lists them, and removed after no
file lists them: at any time, a checkpoint and all files that it lists exist.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from feddg_bench.common.errors import DataError, printable
from feddg_bench.common.files import plain_file, write_whole
from feddg_bench.config.schema import RunSettings
from feddg_bench.core.messages import Payload, decode, encode
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore
from feddg_bench.records.unfinished import BEGINNING, DIGEST

SECONDS = 30.0
"""Seconds between checkpoints if no number of rounds is given."""

Known = dict[str, tuple[Payload, str]]
"""States of clients whose SHA-256 has been computed; a state is never changed in place."""


class Checkpoint(BaseModel):
    """Content of a checkpoint."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)

    server: dict[str, Any]  # output of `feddg_bench.core.server.Server.state`
    record: RunRecord  # the record so far
    settings: dict[str, Any]  # the run's resolved settings
    recipe: str  # label of their origin
    data_root: str | None  # folder of the data
    keep: list[str] = []  # global models to keep with the record

    @field_validator("settings")
    @classmethod
    def _whole(cls, settings: dict[str, Any]) -> dict[str, Any]:
        RunSettings.model_validate(settings)
        return settings


def save_checkpoint(path: Path, checkpoint: Checkpoint, known: Known | None = None) -> None:
    """Write a checkpoint: the states of clients that are not on disk yet, and everything else.

    Args:
        path: Path of the checkpoint.
        checkpoint: Its content.
        known: Digests of clients' states from an earlier call; updated in place.

    Raises:
        DataError: If it cannot be written; the checkpoint of an earlier round stays.
    """
    known = {} if known is None else known
    folder, clients = states_folder(path), checkpoint.server["clients"]
    for _ in range(2):  # again if a process that ended the same run just removed the files
        there, digests = set(_files(folder)), {}
        for name, state in clients.items():
            held, digest = known.get(name, (None, ""))
            if state and (held is not state or digest not in there):
                digest = _save_state(folder, state, there)
                known[name] = state, digest
            digests[name] = digest if state else ""  # most clients keep nothing
        server = checkpoint.server | {"clients": digests}
        record = checkpoint.record.as_json()
        data = encode(dict(checkpoint) | {"server": server, "record": record})
        write_whole(path, b"".join((BEGINNING, hashlib.sha256(data).digest(), data)))
        left = _files(folder)
        if left.keys() >= {*digests.values()} - {""}:
            break
    for digest in left.keys() - set(digests.values()):
        left[digest].unlink(missing_ok=True)


def states_folder(path: Path) -> Path:
    """Return the folder of the clients' states that belong to a checkpoint."""
    return path.with_suffix(".clients")


def _files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by name, none if there is no folder."""
    return {file.name: file for file in folder.iterdir()} if folder.is_dir() else {}


def _save_state(folder: Path, state: Payload, there: set[str]) -> str:
    """Write a client's state unless it is in the folder, and return its digest."""
    data = encode(state)
    digest = hashlib.sha256(data).hexdigest()
    if digest not in there:
        write_whole(folder / digest, data)
        there.add(digest)
    return digest


def _load_states(path: Path, digests: Any) -> dict[str, Payload]:
    """Return the clients' states that a checkpoint lists by their digests.

    Raises:
        DataError: If one is missing or damaged.
    """
    there = _files(states_folder(path))
    states: dict[str, Payload] = {}
    for name, digest in digests.items() if isinstance(digests, Mapping) else ():
        if digest == "":
            states[name] = {}
            continue
        file = there.get(digest) if isinstance(digest, str) else None
        if file is None:  # no path is made from the content of a file
            raise DataError(f"the state of client {printable(name)} is missing")
        plain_file(file)
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise DataError(f"the state of client {printable(name)} is damaged")
        states[name] = decode(data)
    return states


class CheckpointWriter:
    """Writes a run's checkpoints in a thread, one at a time.

    Args:
        path: Path of the checkpoint.
        every: Rounds between checkpoints; ``None`` for `SECONDS` between them.
    """

    def __init__(self, path: Path, every: int | None) -> None:
        self._path, self._every = path, every
        self._known: Known = {}
        self._latest: Callable[[], Checkpoint] | None = None
        self._began = -SECONDS
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def offer(self, number: int, make: Callable[[], Checkpoint]) -> None:
        """Write the state after a round if that is due; otherwise keep it for `finish`.

        Args:
            number: Number of the round.
            make: Returns the state; called later, in another thread.

        Raises:
            DataError: If this or the previous checkpoint cannot be written.
        """
        self._latest = make
        if self._every is not None:
            due = number % self._every == 0
        else:
            written = self._written is None or self._written.done()
            due = written and time.monotonic() - self._began >= SECONDS
        if due:
            self.wait()
            self._began = time.monotonic()
            self._latest = None
            self._written = self._thread.submit(self._write, make)

    def _write(self, make: Callable[[], Checkpoint]) -> None:
        save_checkpoint(self._path, make(), self._known)

    def wait(self) -> None:
        """Wait until a checkpoint that was begun is written.

        Raises:
            DataError: If it could not be written.
        """
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def finish(self, *, write: bool) -> None:
        """Write the latest state that was offered, if wanted, and end the thread.

        Raises:
            DataError: If it cannot be written.
        """
        try:
            self.wait()
        finally:
            if write and self._latest is not None:
                self._write(self._latest)
            self._thread.shutdown()


def load_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint that `save_checkpoint` wrote.

    Raises:
        DataError: If a file is missing or damaged, or belongs to another run than its name says.
    """
    with going_on(path):
        plain_file(path)
        whole = path.read_bytes()
        if not whole.startswith(BEGINNING):
            raise DataError("another version of feddg-bench wrote it, or something else")
        start = len(BEGINNING) + DIGEST
        digest, data = whole[len(BEGINNING) : start], whole[start:]
        if hashlib.sha256(data).digest() != digest:
            raise DataError("its content is damaged, it has not the digest it was written with")
        state = decode(data)
        if not isinstance(state, dict):
            raise DataError("it holds no run")
        try:
            record = RunRecord.parse(json.dumps(state.get("record")))
        except DataError as error:
            raise DataError(f"of its record {error}") from error
        if record.key != path.stem:
            raise DataError(f"it is of the run {record.key}")
        if isinstance(state.get("server"), dict):
            states = _load_states(path, state["server"].get("clients"))
            state["server"] = state["server"] | {"clients": states}
        try:
            checkpoint = Checkpoint.model_validate(state | {"record": record})
        except ValidationError as error:
            first = error.errors()[0]
            raise DataError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        rounds = [entry.round for entry in record.rounds]
        if rounds != list(range(1, checkpoint.server["round"] + 1)):
            raise DataError(f"its record does not end with its round {checkpoint.server['round']}")
    return checkpoint


@contextmanager
def going_on(path: Path) -> Iterator[None]:
    """Report an error in a block as the checkpoint's, with a remedy."""
    try:
        yield
    except (DataError, OSError) as error:
        raise DataError(
            f"checkpoint {path} cannot be used: {error}; delete it, and the same command starts "
            f"this run from round 1"
        ) from error


def tidy(store: ResultsStore, *keys: str) -> None:
    """Remove checkpoints and partial files of recorded runs, left by killed processes."""
    left = [store.checkpoint(key) for key in keys]
    recorded = {*keys, ""}  # "" stands for `.writable`
    for folder in (store.runs, store.checkpoints):
        left += [part for part in folder.glob("*.part") if part.name.partition(".")[0] in recorded]
    for part in store.partitions.glob("*.part"):  # shared by runs: an existing file is complete
        left += [part] if part.with_suffix("").with_suffix("").exists() else []
    for path in left:
        with suppress(OSError):
            path.unlink()
    for key in keys:
        shutil.rmtree(states_folder(store.checkpoint(key)), ignore_errors=True)
