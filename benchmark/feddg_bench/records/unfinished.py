"""The record inside a checkpoint, read without the tensors beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from feddg_bench.common.errors import DataError
from feddg_bench.records.record import RunRecord
from feddg_bench.records.sources import LARGEST

BEGINNING: Final = b"feddg-bench checkpoint 3\n"
DIGEST: Final = 32
"""Length in bytes of the SHA-256 of everything after it."""


def begun_record(path: Path) -> RunRecord:
    """Return the record so far of an interrupted run; the states in the checkpoint stay unchecked.

    Raises:
        DataError: If the file cannot be read, or holds no record; the message is part of a
            sentence.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(BEGINNING)) != BEGINNING:
                raise DataError("another version of feddg-bench wrote it, or something else")
            file.seek(DIGEST, 1)
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, LARGEST)))
        tree = json.loads(header["__metadata__"]["tree"])
        return RunRecord.parse(json.dumps(_plain(tree["record"])), path.stem)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError("it cannot be read") from error


def _plain(tree: Any) -> Any:
    """Return JSON values without the mark that `feddg_bench.core.messages` puts before strings."""
    if isinstance(tree, str):
        return tree[1:]
    if isinstance(tree, list):
        return [*map(_plain, tree)]
    return {k: _plain(v) for k, v in tree.items()} if isinstance(tree, dict) else tree
