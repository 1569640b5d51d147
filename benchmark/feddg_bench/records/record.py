"""Run records: one immutable JSON file a run, named by its key, with every round in it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from feddg_bench.common.errors import DataError
from feddg_bench.common.files import write_whole


class ScenarioRecord(BaseModel):
    """Which domains trained, validated and tested."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    train: tuple[str, ...]
    val: str | None
    test: str


class RunRecord(BaseModel):
    """Everything about one run that a table may ask for; never a path, never a host name.

    Attributes:
        format: Version of this form.
        key: Hash of ``settings`` and ``method_version``.
        recipe: The recipe the settings came from; not part of the key.
        labels: The method's settings that a caption must say.
        settings: Resolved settings; files by the hash of their content.
        data: Fingerprint of the images, image counts by split and domain, and the data set's task
            and key metric.
        partition: Hash and sizes of the clients' index lists.
        once: Bytes and seconds of what happens before round 1.
        rounds: One entry a round: loss, bytes, dropped clients, seconds, evaluation.
        environment: Versions, device, threads, workers, git commit.
        time: Start, end, total seconds, peak memory.
    """

    model_config = ConfigDict(extra="forbid")

    format: int = 1
    key: str
    method: str
    method_version: int
    dataset: str
    protocol: str
    scenario: ScenarioRecord
    seed: int
    recipe: str
    labels: dict[str, str] = {}
    settings: dict[str, Any]
    data: dict[str, Any]
    partition: dict[str, Any]
    once: dict[str, Any] = {}
    rounds: list[dict[str, Any]] = []
    environment: dict[str, Any] = {}
    time: dict[str, Any] = {}

    def numbers(self) -> dict[str, Any]:
        """Return the record without times and environment: what the same settings repeat."""
        values = self.model_dump(mode="json", exclude={"environment", "time"})
        for entry in [values["once"], *values["rounds"]]:
            entry.pop("seconds", None)
        return values

    @property
    def task(self) -> str:
        """What was learnt: ``classification`` or ``regression``."""
        return str(self.data.get("task", "classification"))

    @property
    def metric(self) -> str:
        """The data set's key metric."""
        return str(self.data.get("metric", "accuracy"))

    def evaluation(self) -> dict[str, Any]:
        """Return the last evaluation: split -> domain -> metric -> value.

        Raises:
            DataError: If no round was evaluated.
        """
        for entry in reversed(self.rounds):
            if entry["evaluation"] is not None:
                evaluation: dict[str, Any] = entry["evaluation"]
                return evaluation
        raise DataError(f"record {self.key} holds no evaluated round")


WHOLE = "all"
"""Name of the part of a split that holds all of its images."""

POOLABLE = frozenset({"accuracy", "loss"})
"""Metrics whose value over a split is the mean over its domains, weighted by their images."""


def split_metric(evaluation: Mapping[str, Any], split: str, metric: str) -> float | None:
    """Return a metric over all images of a split, or ``None`` if it was not measured.

    That of the part `WHOLE` if there is one; else of the only domain, or the mean over domains by
    images for metrics that are such a mean. It is NaN where a loss overflowed, null on disk.
    """
    parts: Mapping[str, Any] = evaluation.get(split, {})
    whole = parts.get(WHOLE)
    known = [d for d in (parts.values() if whole is None else (whole,)) if metric in d]
    if len(known) == 1 and (whole is not None or len(parts) == 1):  # quick: tables read millions
        value: float | None = known[0][metric]
        if value is None:
            return math.nan
        return value if known[0]["images"] else None
    if any(domain[metric] is None for domain in known):
        return math.nan
    images: int = sum(domain["images"] for domain in known)
    if not images or metric not in POOLABLE:
        return None
    total: float = sum(domain[metric] * domain["images"] for domain in known)
    return total / images


def metric_name(metric: str) -> str:
    """Return a metric as people write it, such as ``macro F1``."""
    return {"macro_f1": "macro F1", "pearson": "Pearson's r"}.get(metric, metric.replace("_", " "))


def in_percent(metric: str, task: str) -> bool:
    """Tell whether a metric is a share that people read in percent."""
    return metric in ("accuracy", "macro_f1") or (
        metric == "worst_group" and task == "classification"
    )


def shown(value: float, metric: str, task: str, decimals: int) -> str:
    """Return a metric as people read it: a share in percent, else with one digit more."""
    if in_percent(metric, task):
        return f"{100 * value:.{decimals}f}"
    return f"{value:.{decimals + 1}f}"


def mean_and_std(values: list[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation; ``None`` for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


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

    def save(self, record: RunRecord) -> Path:
        """Write a record in one rename, and return its path."""
        text = json.dumps(record.model_dump(mode="json"), indent=1, ensure_ascii=False)
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
        return RunRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read record {path}: {error.strerror}") from error
    except ValidationError as error:
        what = error.errors()[0]["msg"]
        raise DataError(
            f"record {path} is cut short or not a run record ({what}); "
            f"delete it and run the same command again to make it anew"
        ) from error
