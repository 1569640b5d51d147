"""Failed runs: kept with their error beside the records, and not tried again unless asked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from feddg_bench.common.files import write_whole
from feddg_bench.sweeps.jobs import Job


class Failures:
    """The failed runs of a results folder, one file ``failed/KEY.json`` each."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "failed"

    def keys(self) -> set[str]:
        """Return the keys of all failures."""
        return {path.stem for path in self.folder.glob("*.json")}

    def path(self, key: str) -> Path:
        """Return the path of a key's failure."""
        return self.folder / f"{key}.json"

    def save(self, job: Job, error: str, details: str = "") -> None:
        """Keep a failure.

        ``details`` is the traceback, if the error is not the user's.
        """
        value = {"key": job.key, "run": list(job.pairs), "error": error, "details": details}
        write_whole(self.path(job.key), json.dumps(value, indent=1).encode() + b"\n")

    def forget(self, keys: Iterable[str]) -> None:
        """Remove the failures of some keys."""
        for key in keys:
            self.path(key).unlink(missing_ok=True)

    def error(self, key: str) -> str:
        """Return a failure's error sentence, or one that says that its file cannot be read."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            failure: dict[str, Any] = json.loads(self.path(key).read_bytes())
            return str(failure["error"])
        return f"{self.path(key)} cannot be read"
