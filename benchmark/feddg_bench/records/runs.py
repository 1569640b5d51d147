"""Records as tables need them: the head of each file at once, numbers of rounds when asked for.

A record holds every round and may be 100 KB; ten thousand of them take a minute to read whole. What
the suite writes is JSON with one value a line, and a line break cannot stand inside a JSON string,
so parts can be found by the beginning of their lines. A file that is laid out otherwise is parsed
whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from feddg_bench.common.errors import DataError
from feddg_bench.records.metrics import METRICS, Metric, find_metric
from feddg_bench.records.record import Evaluation, RunRecord
from feddg_bench.records.rules import CHOOSING, RULES, Rule, best_round, choose
from feddg_bench.records.store import read_record

FORMAT = 1
END = 16384
"""Bytes at both ends of a record that are read at once: its head, and its last evaluation."""
_BEGIN, _END = b'{\n "format": ', b"\n}\n"
_ROUNDS, _SETTINGS = b'\n "rounds": [', b'\n "settings": {\n'
_EVALUATION, _EVALUATION_END = b'\n   "evaluation": {', b"\n   }"
_OWN = re.compile(rb'\n  "(?:method|dataset|protocol|scenario|seed)": [^\n]*')
"""The lines of `OWN`."""


@dataclass(frozen=True, eq=False)
class Run:
    """The head of a record.

    Attributes:
        path: The file.
        key: Run key.
        version: Version of the method.
        train: Training domains joined by ``+``, in alphabetical order.
        val: Validation domain, or ``None``.
        fingerprint: Hash of the images.
        settings: Settings by dotted key, such as ``train.lr``, without `OWN`; one
            object for all runs that agree in them.
        labels: Names of the method's settings that tell its variants apart.
        task: What was learnt, ``classification`` or ``regression``.
        metric: The data set's key metric.
    """

    path: Path
    key: str
    method: str
    version: int
    dataset: str
    protocol: str
    scenario: str
    train: str
    val: str | None
    test: str
    seed: int
    recipe: str
    fingerprint: str
    settings: Mapping[str, Any]
    labels: tuple[str, ...] = ()
    task: str = "classification"
    metric: Metric = METRICS["accuracy"]
    _chosen: dict[str, Evaluation | None] = field(default_factory=dict, repr=False)
    _last: bytes | None = field(default=None, repr=False)
    _costs: dict[str, float] = field(default_factory=dict, repr=False)

    def get(self, name: str) -> Any:
        """Return a field by name, or a setting by dotted key; ``None`` where there is none."""
        return getattr(self, name) if name in FIELDS else self.settings.get(name)

    def evaluation(self, rule: Rule) -> Evaluation | None:
        """Return what was measured in the round that a rule chooses, if it can choose.

        Raises:
            DataError: If the record is damaged.
        """
        if rule not in self._chosen:
            self._chosen[rule] = self._choose(rule)
        return self._chosen[rule]

    def _choose(self, rule: Rule) -> Evaluation | None:
        if rule == "last" and self._last is not None:
            last: Evaluation = _from_json(self._last, self.path)
            return last
        data = _read(self.path)
        if not _laid_out(data):
            rounds = _parse(data, self.path)["rounds"]
            return choose(
                [r["evaluation"] for r in rounds if r.get("evaluation")], rule, self.metric.name
            )
        start, end = data.index(_ROUNDS), len(data)
        if rule != "last":  # read of each round only the split that the rule looks at
            split = CHOOSING[rule]
            found = list(_parts(split).finditer(data, start))
            parts = b"[" + b",".join(match[1] for match in found) + b"]"
            evaluations = [{split: part} for part in _from_json(parts, self.path)]
            best = best_round(evaluations, split, self.metric.name)
            if best is None:
                return None
            end = found[best].start()
        block = _last_evaluation(data, start, end)
        chosen: Evaluation | None = None if block is None else _from_json(block, self.path)
        return chosen

    def record(self) -> RunRecord:
        """Return all that the record holds, and keep of it what tables ask for.

        Raises:
            DataError: If the record is damaged.
        """
        record = read_record(self.path)
        evaluations = [entry.evaluation for entry in record.rounds if entry.evaluation]
        name = self.metric.name
        self._chosen.update({rule: choose(evaluations, rule, name) for rule in RULES})
        self._costs.update(record.costs())
        return record

    def cost(self, metric: str) -> float | None:
        """Return what a run cost: seconds or megabytes, a round where not said otherwise.

        Args:
            metric: ``local_training_time`` (what the server waited for, by client asked),
                ``aggregation_time``, ``one_time_cost`` (before round 1), ``megabytes_up`` or
                ``megabytes_down``.

        Raises:
            DataError: If the record is damaged.
        """
        if not self._costs:
            self.record()
        return self._costs.get(metric)


OWN = ("method", "dataset", "protocol", "scenario", "seed")
"""Settings that are fields of a run, and stand in no `Run.settings`."""

FIELDS = (
    "method",
    "dataset",
    "protocol",
    "scenario",
    "train",
    "val",
    "test",
    "seed",
    "recipe",
    "version",
)
"""Fields of a run that a table may ask for, beside settings."""


def read_runs(results: Path) -> list[Run]:
    """Return the runs of a results folder in the order of their keys.

    Raises:
        DataError: If the folder is not there, or a record is cut short, damaged or misnamed.
    """
    if not results.is_dir():
        raise DataError(
            f"there is no results folder {results}: run something first, or give --results DIR"
        )
    folder = results / "runs"
    names = sorted(entry.name for entry in os.scandir(folder)) if folder.is_dir() else []
    known: dict[bytes, Mapping[str, Any]] = {}
    return [_read_run(folder / name, known) for name in names if name.endswith(".json")]


# ------------------------------------------------------------------------------- reading


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read record {path}: {error.strerror}") from error


def _ends(path: Path) -> tuple[bytes, bytes]:
    """Return the beginning and the end of a file, which overlap if it is short."""
    try:
        with path.open("rb", buffering=0) as file:
            head = file.read(END)
            if len(head) < END:
                return head, head
            file.seek(-END, os.SEEK_END)
            return head, file.read(END)
    except OSError as error:
        raise DataError(f"cannot read record {path}: {error.strerror}") from error


def damaged(path: Path, what: str) -> DataError:
    """Return the error of a record that lacks what every record has."""
    return DataError(
        f"record {path} is cut short or not a run record ({what}); delete it and run the same "
        f"command again to make it anew"
    )


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        value = from_json(data, cache_strings="keys")
    except ValueError as error:
        raise damaged(path, str(error)) from error
    if not isinstance(value, dict) or "rounds" not in value:
        raise damaged(path, "no rounds in it")
    return value


def _laid_out(data: bytes) -> bool:
    """Return whether a file is whole and laid out as `ResultsStore` does it."""
    return data.startswith(_BEGIN) and data.endswith(_END) and _ROUNDS in data


def _read_run(path: Path, known: dict[bytes, Mapping[str, Any]]) -> Run:
    begin, tail = _ends(path)
    last = None
    try:
        if begin.startswith(_BEGIN) and tail.endswith(_END) and _ROUNDS in begin:
            last = _last_evaluation(tail, tail.find(_ROUNDS) + 1, len(tail))
            data = begin[: begin.index(_ROUNDS)].rstrip(b",")
            start = data.index(_SETTINGS)
            end = data.index(b"\n },", start) + len(b"\n },")
            block = _OWN.sub(b"", data[start:end])
            settings = known.get(block)
            if settings is None:
                inner = from_json(b"{" + block.rstrip(b",") + b"}", cache_strings="keys")
                settings = known[block] = flatten(inner["settings"])
            head = from_json(data[:start] + data[end:] + b"}", cache_strings="keys")
        else:
            head = _parse(_read(path), path)
            settings = flatten(head["settings"])
        run = _run(path, head, settings, last)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    if head.get("format", FORMAT) != FORMAT:
        raise DataError(
            f"record {path} has format {head['format']}, and this version reads format {FORMAT}; "
            f"update feddg-bench, or move the record away"
        )
    if run.key != path.stem:
        raise DataError(
            f"record {path} holds the run {run.key}, so it should be named {run.key}.json; "
            f"rename it, or delete it if it is a copy"
        )
    return run


def _run(path: Path, head: dict[str, Any], settings: Mapping[str, Any], last: bytes | None) -> Run:
    scenario = head["scenario"]
    return Run(
        path=path,
        key=head["key"],
        method=head["method"],
        version=head["method_version"],
        dataset=head["dataset"],
        protocol=head["protocol"],
        scenario=scenario["name"],
        train="+".join(sorted(scenario["train"])),
        val=scenario["val"],
        test=scenario["test"],
        seed=head["seed"],
        recipe=head["recipe"],
        fingerprint=head["data"]["fingerprint"],
        settings=settings,
        labels=tuple(head.get("labels", ())),
        task=head["data"].get("task", "classification"),
        metric=find_metric(
            head["data"].get("metric", "accuracy"), head["data"].get("task", "classification")
        ),
        _last=last,
    )


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted key; files by the beginning of their hash, lists as text.

    >>> flatten({"train": {"lr": 0.1}, "backbone": {"weights": {"sha256": "0123456789abcdef"}}})
    {'train.lr': 0.1, 'backbone.weights': '01234567'}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if not prefix and key in OWN:
            continue
        if isinstance(value, dict) and set(value) == {"sha256"}:
            flat[name] = value["sha256"][:8]
        elif isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, list):
            flat[name] = ", ".join(
                v["sha256"][:8] if isinstance(v, dict) and set(v) == {"sha256"} else str(v)
                for v in value
            )
        else:
            flat[name] = value
    return flat


def _last_evaluation(data: bytes, start: int, end: int) -> bytes | None:
    """Return the text of the last evaluation that begins in a part of the data."""
    at = data.rfind(_EVALUATION, start, end)
    if at < 0:
        return None
    return data[at + len(_EVALUATION) - 1 : data.index(_EVALUATION_END, at) + len(_EVALUATION_END)]


@cache
def _parts(split: str) -> re.Pattern[bytes]:
    """Return what finds a split in evaluations: its domains' objects up to the split's end."""
    return re.compile(rb'\n    "%s": (\{(?:[^}]+\},?)+?\n    \})' % re.escape(split).encode())


def _from_json(block: bytes, path: Path) -> Any:
    try:
        return from_json(block, cache_strings="keys")
    except ValueError as error:
        raise damaged(path, str(error)) from error
