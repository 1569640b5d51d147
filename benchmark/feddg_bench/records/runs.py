"""Runs as tables, figures and reports read them: what a record says of itself, and its numbers.

A record holds every round and may have 100 KB; thousands of them take long to parse. What is asked
for again and again is kept in one file beside them, ``.index``, and read from there as long as a
record's file has the size, the times and the inode that it had. The index may be deleted at any
time.
"""

from __future__ import annotations

import json
import logging
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from feddg_bench.common.errors import DataError, printable
from feddg_bench.common.files import write_whole
from feddg_bench.records.metrics import Metric, find_metric
from feddg_bench.records.record import Evaluation, RunRecord
from feddg_bench.records.rules import Rule, choose
from feddg_bench.records.sources import Source, sources

logger = logging.getLogger(__name__)

OWN = ("method", "dataset", "protocol", "scenario", "seed")
"""Settings that are fields of a run, and stand in no `Run.settings`."""

FIELDS = (*OWN[:4], "train", "val", "test", "seed", "recipe", "version")
"""Fields of a run that a table may ask for, beside settings."""

LONGEST = 300
"""Letters of a notice that come from a file."""
WORTH_WRITING = 50
"""So many records must have been parsed anew before the index is written again."""

Shape = list[tuple[str, str, list[str]]]
"""Splits and domains of an evaluation, and the names of what was measured there."""


@dataclass(frozen=True, eq=False)
class Run:
    """A record without its rounds, and with what was measured in them.

    Attributes:
        source: The file that holds the record.
        line: Its line there, where the file holds several.
        key: Run key.
        version: Version of the method.
        train: Training domains joined by ``+``, in alphabetical order.
        val: Validation domain, or ``None``.
        fingerprint: Hash of the images.
        labels: Names of the method's settings that tell its variants apart.
        task: What was learnt, ``classification`` or ``regression``.
        rounds: How many there were.
        skipped: In how many of them every client was dropped.
        lost: The first round whose loss is not finite, or ``None``.
        costs: See `RunRecord.costs`.
        metric: The data set's key metric.
        settings: Settings by dotted key, such as ``train.lr``, without `OWN`; one object for all
            runs that agree in them.
        environment: See `EnvironmentRecord`.
        measured: Every evaluated round and what was measured after it.
    """

    source: Source
    line: int
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
    labels: Sequence[str]
    task: str
    rounds: int
    skipped: int
    lost: int | None
    costs: Mapping[str, float]
    metric: Metric
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    measured: Measured = field(repr=False)
    _chosen: dict[Rule, Evaluation | None] = field(default_factory=dict, repr=False)

    def get(self, name: str) -> Any:
        """Return a field by name, or a setting by dotted key; ``None`` where there is none."""
        return getattr(self, name) if name in FIELDS else self.settings.get(name)

    def evaluation(self, rule: Rule) -> Evaluation | None:
        """Return what was measured in the round that a rule chooses, if it can choose."""
        if rule not in self._chosen:
            found = self.measured.last() if rule == "last" else self.measured
            values = [evaluation for _, evaluation in found]
            self._chosen[rule] = choose(values, rule, self.metric.name)
        return self._chosen[rule]

    def cost(self, metric: str) -> float | None:
        """Return what the run cost (see `RunRecord.costs`); ``None`` where it was not measured."""
        return self.costs.get(metric)

    def text(self) -> bytes:
        """Return the text of the record, JSON."""
        return self.source.text(self.line)

    def record(self) -> RunRecord:
        """Return the whole record.

        Raises:
            DataError: If it cannot be read any more.
        """
        try:
            return RunRecord.parse(self.text(), self.key)
        except (DataError, IndexError) as error:
            raise DataError(f"record {self.source.path} cannot be used: {error}") from error


@dataclass(frozen=True, eq=False)
class Measured:
    """Evaluations by round, kept as numbers in a row: iterate to get them.

    Attributes:
        rounds: Number of each round, and what was measured after it.
        values: All values.
    """

    rounds: Sequence[tuple[int, Shape]]
    values: memoryview[float]

    def __iter__(self) -> Iterator[tuple[int, Evaluation]]:
        numbers = iter(self.values.tolist())
        for number, shape in self.rounds:
            yield number, _evaluation(shape, numbers)

    def last(self) -> list[tuple[int, Evaluation]]:
        """Return the last one, if there is one."""
        count = sum(len(names) for _, shape in self.rounds[-1:] for *_, names in shape)
        numbers = iter(self.values[len(self.values) - count :].tolist())
        return [(number, _evaluation(shape, numbers)) for number, shape in self.rounds[-1:]]


def _evaluation(shape: Shape, numbers: Iterator[float]) -> Evaluation:
    found: Evaluation = {}
    for split, domain, names in shape:
        found.setdefault(split, {})[domain] = dict(zip(names, numbers, strict=False))
    return found


class Problem(NamedTuple):
    """A record that cannot be used, or only in part.

    Attributes:
        path: Its file.
        reason: What is wrong with it.
        skipped: Whether it is left out; else it has parts that this version does not know.
    """

    path: Path
    reason: str
    skipped: bool


def read_runs(results: Path | Sequence[Path]) -> list[Run]:
    """Return the runs of results folders in the order of their keys.

    Records that cannot be used are left out, with one warning for all. Where several files hold a
    key, the first folder wins, and in it a single file; a warning says if numbers differ.

    Raises:
        DataError: If a folder is not there.
    """
    runs: dict[str, Run] = {}
    problems: list[Problem] = []
    for root in [results] if isinstance(results, Path) else results:
        found, bad = read_folder(root)
        problems += bad
        for run in found:
            first = runs.setdefault(run.key, run)
            if first.measured.values.tobytes() != run.measured.values.tobytes():
                reason = f"its run {run.key} has other numbers than in {first.source.path}"
                problems.append(Problem(run.source.path, reason, skipped=True))
    for skipped, what in (
        (True, "skipped {} that cannot be used"),
        (False, "{} hold what this version does not know, and it is left out of what is shown"),
    ):
        paths = [f"{p.path}: {p.reason}" for p in problems if p.skipped is skipped]
        if paths:
            more = f"; and {len(paths) - 1} more, see `feddg-bench results list`" * (len(paths) > 1)
            count = f"{len(paths)} record{'s' * (len(paths) > 1)}"
            logger.warning("%s", f"{what.format(count)}: {printable(paths[0])[:LONGEST]}{more}")
    return [runs[key] for key in sorted(runs)]


def read_folder(root: Path, *, packed: bool | None = None) -> tuple[list[Run], list[Problem]]:
    """Return the runs in a results folder, and the records that cannot be used.

    Args:
        root: The folder.
        packed: Only of packed files, or only of single ones.

    Raises:
        DataError: If the folder is not there.
    """
    if not root.is_dir():
        raise DataError(
            f"there is no results folder {root}: run something first, or give --results DIR"
        )
    index = _Index(root)
    runs: list[Run] = []
    problems: list[Problem] = []
    for source in sources(root, packed=packed):
        entry = index.entry(source)
        runs += index.runs(source, entry)
        problems += [Problem(source.path, why, skipped) for why, skipped in entry.problems]
    index.write(keep_others=packed is not None)
    return runs, problems


# --------------------------------------------------------------------------------- the index


@dataclass
class _Entry:
    """What the index holds of a file: `_head` of each record, and the values of all."""

    stamp: tuple[int, ...]
    problems: list[tuple[str, bool]]
    heads: list[dict[str, Any]]
    values: memoryview[float]


class _Index:
    """The index of a results folder, which counts for as long as this package's code is the same.

    ``shared`` are values that several heads refer to.
    """

    def __init__(self, root: Path) -> None:
        code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
        self.about = f"feddg-bench index {zlib.crc32(code)} {sys.byteorder}"
        self.path = root / ".index"
        self.old: dict[str, _Entry] = {}
        self.used: dict[str, _Entry] = {}
        self.shared: list[Any] = []
        self._places: dict[str, int] = {}
        self.fresh = 0
        with suppress(OSError, ValueError, KeyError, TypeError):  # else it is made anew
            about, length, check, rest = self.path.read_bytes().split(b"\n", 3)
            if about.decode() == self.about and int(check) == zlib.crc32(rest):
                head = from_json(rest[: int(length)], cache_strings="keys")
                values, at = memoryview(rest)[int(length) :].cast("d"), 0
                for name, stamp, problems, heads, count in head["files"]:
                    part = values[at : at + count]
                    self.old[name] = _Entry(tuple(stamp), problems, heads, part)
                    at += count
                self.shared = head["shared"]

    def entry(self, source: Source) -> _Entry:
        """Return what a file holds, parsed anew unless it is as it was."""
        name = f"{source.folder.name}/{source.name}"
        entry = self.old.get(name)
        if entry is None or entry.stamp != source.stamp or not source.stamp:
            entry = self._examine(source)
        self.used[name] = entry
        return entry

    def _examine(self, source: Source) -> _Entry:
        problems: list[tuple[str, bool]] = []
        heads, values = [], array("d")
        try:
            texts = source.texts()
        except DataError as error:
            texts = ()
            problems.append((str(error), True))
        for line, text in enumerate(texts):
            try:
                record = RunRecord.parse(text, None if source.packed else source.path.stem)
            except DataError as error:
                where = f"line {line + 1}: " if source.packed else ""
                problems.append((printable(f"{where}{error}")[:LONGEST], True))
                continue
            if unknown := record.unknown_fields():
                problems.append((printable(", ".join(unknown))[:LONGEST], False))
            heads.append(self._head(line, record, values))
            self.fresh += 1
        numbers = memoryview(values).cast("B").cast("d")
        return _Entry(source.stamp, problems, heads, numbers)

    def _head(self, line: int, record: RunRecord, values: array[float]) -> dict[str, Any]:
        """Return the fields of a `Run`, what runs share by its place, and add its values."""
        rounds, before, lost = [], len(values), None
        for entry in record.rounds:
            shape: Shape = []
            start = len(values)
            for split, parts in (entry.evaluation or {}).items():
                for domain, measured in parts.items():
                    known = {n: v for n, v in measured.items() if isinstance(v, int | float)}
                    shape.append((split, domain, list(known)))
                    values.extend(known.values())
            if entry.evaluation is not None:
                rounds.append((entry.round, self._share(shape)))
            if lost is None and not all(map(isfinite, (*entry.train.values(), *values[start:]))):
                lost = entry.round
        return {
            "line": line,
            "key": record.key,
            "method": record.method,
            "version": record.method_version,
            "dataset": record.dataset,
            "protocol": record.protocol,
            "scenario": record.scenario.name,
            "train": "+".join(sorted(record.scenario.train)),
            "val": record.scenario.val,
            "test": record.scenario.test,
            "seed": record.seed,
            "recipe": record.recipe,
            "fingerprint": record.data.fingerprint,
            "labels": list(record.labels),
            "task": record.task,
            "rounds": len(record.rounds),
            "skipped": sum(entry.skipped for entry in record.rounds),
            "lost": lost,
            "costs": record.costs(),
            "metric": record.metric.name,
            "settings": self._share(flatten(record.settings)),
            "environment": self._share(record.environment.model_dump(mode="json")),
            "measured": [rounds, before, len(values)],
        }

    def _share(self, value: Any) -> int:
        """Return the place of a value among those that heads refer to."""
        if len(self._places) < len(self.shared):
            marks = (json.dumps(known, sort_keys=True) for known in self.shared)
            self._places = {mark: place for place, mark in enumerate(marks)}
        place = self._places.setdefault(json.dumps(value, sort_keys=True), len(self.shared))
        if place == len(self.shared):
            self.shared.append(value)
        return place

    def runs(self, source: Source, entry: _Entry) -> Iterator[Run]:
        """Yield the runs of a file."""
        shared = self.shared
        for head in entry.heads:
            rounds, start, end = head["measured"]
            shapes = [(number, shared[shape]) for number, shape in rounds]
            own = {
                "metric": find_metric(head["metric"], head["task"]),
                "settings": shared[head["settings"]],
                "environment": shared[head["environment"]],
                "measured": Measured(shapes, entry.values[start:end]),
            }
            yield Run(source=source, **{**head, **own})

    def write(self, *, keep_others: bool) -> None:
        """Write the index, if that saves more time than it takes.

        Args:
            keep_others: Whether files that were not looked at keep their entries.
        """
        entries = {**self.old, **self.used} if keep_others else self.used
        if self.fresh < WORTH_WRITING:
            return
        files = [(n, e.stamp, e.problems, e.heads, len(e.values)) for n, e in entries.items()]
        head = json.dumps({"files": files, "shared": self.shared}).encode()
        head += b" " * (-len(head) % 8)
        rest = b"".join([head, *(entry.values.tobytes() for entry in entries.values())])
        about = f"{self.about}\n{len(head)}\n{zlib.crc32(rest)}\n".encode()
        with suppress(DataError):  # a folder that cannot be written to is read without
            write_whole(self.path, about + rest, sync=False)


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
        if isinstance(value, dict) and set(value) != {"sha256"}:
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, list):
            flat[name] = ", ".join(str(_short(one)) for one in value)
        else:
            flat[name] = _short(value)
    return flat


def _short(value: Any) -> Any:
    return str(value["sha256"])[:8] if isinstance(value, dict) and "sha256" in value else value
