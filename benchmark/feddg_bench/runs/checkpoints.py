"""Checkpoints: all a run needs to go on, in one file that is whole or absent."""

from __future__ import annotations

from pathlib import Path

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import write_whole
from feddg_bench.core.messages import Payload, decode, encode


def save_checkpoint(path: Path, state: Payload) -> None:
    """Write a checkpoint: server state, the record so far, and how to start the run again.

    Raises:
        DataError: If it cannot be written; the checkpoint of an earlier round stays.
    """
    write_whole(path, encode(state))


def load_checkpoint(path: Path) -> Payload:
    """Return what `save_checkpoint` wrote.

    Raises:
        DataError: If the file is missing, cut short or something else.
    """
    try:
        state: Payload = decode(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read checkpoint {path}: {error.strerror}") from error
    except DataError as error:
        raise DataError(
            f"checkpoint {path} cannot be used: {error}; delete it to start this run from round 1"
        ) from error
    if not isinstance(state, dict) or not {"server", "record"} <= set(state):
        raise DataError(f"{path} is not a checkpoint of feddg-bench; delete it or choose another")
    return state
