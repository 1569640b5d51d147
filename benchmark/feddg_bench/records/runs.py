"""Runs for tables, figures and reports: a record's description and its numbers.

A record holds every round and can take 100 KB; thousands of them take long to parse. Values that
are needed repeatedly are cached in an `Index`.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import from_json, to_json

from feddg_bench.common.errors import DataError, printable
from feddg_bench.records.index import Content, Index
from feddg_bench.records.measured import Evaluation, Measured
from feddg_bench.records.metrics import (
    DERIVED,
    METRICS,
    PERSONAL,
    Metric,
    derived,
    find_metric,
    metrics_of,
)
from feddg_bench.records.record import PrivacyRecord, RunRecord, TunedRecord
from feddg_bench.records.rules import (
    UNSEEN,
    Rule,
    choose_evaluation,
    pooled_metric,
    split_metric,
)
from feddg_bench.records.sources import Source, find_records

logger = logging.getLogger(__name__)

OWN = ("method", "dataset", "protocol", "scenario", "seed")
"""Settings that are fields of a run, and are left out of `RecordedRun.settings`."""

FIELDS = (*OWN[:4], "label", "train", "val", "test", "seed", "recipe", "version")
"""Fields of a run that a table can use, in addition to settings."""

LONGEST = 300
"""Maximum number of characters in a notice that come from a file."""
WORTH_WRITING = 50
"""Number of newly parsed records from which the index is written again."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A record without its rounds, but with their measurements."""

    source: Source  # the file that holds the record
    line: int  # its line there, if the file holds several
    digest: str  # of its text
    key: str
    method: str
    version: int  # version of the method
    dataset: str
    protocol: str
    scenario: str
    train: str  # training domains joined by `+`, in alphabetical order
    val: str | None  # validation domain, or `None`
    test: str
    seed: int
    recipe: str
    fingerprint: str
    code: str | None  # digest of the method's source, if the record has it
    labels: Sequence[str]  # names of the method's settings that tell its variants apart
    task: str  # what was learnt, `classification` or `regression`
    rounds: int  # number of rounds
    skipped: int  # number of rounds in which every client was dropped
    lost: int | None  # the first round whose loss is not finite, or `None`
    costs: Mapping[str, float]  # see `RunRecord.counts`
    metric: Metric  # the data set's key metric
    # Settings by dotted key, such as `train.lr`, without `OWN`; one object shared by all runs with
    # equal settings.
    settings: Mapping[str, Any]
    nested: Mapping[str, Any]  # the same as in records: by section, files by their hash
    usage: Mapping[str, Any]  # see `RunRecord.counts`
    environment: Mapping[str, Any]  # see `EnvironmentRecord`
    tuned: TunedRecord | None
    privacy: PrivacyRecord | None
    imbalance: float | None  # see `DataRecord.imbalance`
    answers: Mapping[str, float] | None  # see `DataRecord.answers`
    label: str | None  # see `DataRecord.label`
    few: Mapping[str, int]  # see `DataRecord.few`
    personal: Mapping[str, Mapping[str, float]]  # see `RunRecord.personal`
    _frame: str = field(repr=False)  # see `Measured.packed`
    _numbers: bytes = field(repr=False)
    _chosen: dict[Rule, Evaluation | None] = field(default_factory=dict, repr=False)

    @property
    def images(self) -> str:
        """Identifier of a run's images for comparison; empty if its settings determine them."""
        return "" if self.answers else self.fingerprint[:8]

    @property
    def changed(self) -> bool:
        """Whether tuning chose other settings than the recipe's."""
        return bool(self.tuned and self.tuned.settings)

    @property
    def by_one_run(self) -> Mapping[str, Any]:
        """See `TunedRecord.by_one_run`."""
        return self.tuned.by_one_run if self.tuned else {}

    def get(self, name: str) -> Any:
        """Return a field by name, or a setting by dotted key; ``None`` where there is none."""
        return getattr(self, name) if name in FIELDS else self.settings.get(name)

    @cached_property
    def table(self) -> Measured:
        """Measurements of all evaluated rounds."""
        return Measured.unpacked(self._frame, self._numbers)

    @property
    def measured(self) -> list[tuple[int, Evaluation]]:
        """Each evaluated round with its measurements."""
        table = self.table
        return [(number, table.evaluation(at)) for at, number in enumerate(table.rounds)]

    def evaluation(self, rule: Rule) -> Evaluation | None:
        """Return the evaluation that a rule chooses, if it can choose."""
        if rule not in self._chosen:
            self._chosen[rule] = choose_evaluation(self.table, rule, self.metric.name)
        return self._chosen[rule]

    def text(self) -> bytes:
        """Return the record's JSON text."""
        return self.source.text(self.line)

    def record(self) -> RunRecord:
        """Return the whole record.

        Raises:
            DataError: If it can no longer be read.
        """
        try:
            return RunRecord.parse(self.text(), self.key)
        except (DataError, IndexError) as error:
            raise DataError(f"record {self.source.path} cannot be used: {error}") from error


def metric_of(
    run: RecordedRun, evaluation: Evaluation, split: str, metric: str, over: str = "images"
) -> float | None:
    """Return a metric on a split, measured or `derived`; ``None`` if there is none.

    Summaries over clients have no split; they are given for ``test``.
    """
    known = METRICS.get(metric)
    if known is not None and known.over is not None:
        personal = known.clients == PERSONAL
        parts = run.personal if personal else evaluation.get(known.clients, {})
        values = [part[metrics_of(run.task)[0]] for part in parts.values()]
        return float(known.over(np.array(values))) if values and split == "test" else None
    if metric not in DERIVED:
        return pooled_metric(evaluation, split, metric, over)
    accuracy = pooled_metric(evaluation, split, "accuracy", over)
    if split != "test" or accuracy is None or run.answers is None:
        return None
    return derived(metric, accuracy, run.answers)


def key_metric(run: RecordedRun, evaluation: Evaluation | None, split: str) -> float | None:
    """Return the key metric on a split, a share in percent; ``None`` if it was not measured.

    On `UNSEEN`, it is the mean over both held-out domains.
    """
    if split == UNSEEN:
        val, test = (key_metric(run, evaluation, part) for part in ("val", "test"))
        return None if val is None or test is None else (val + test) / 2
    value = None if evaluation is None else split_metric(evaluation, split, run.metric.name)
    return None if value is None else run.metric.display(value)


class Problem(NamedTuple):
    """A record that cannot be used, or only in part."""

    path: Path
    reason: str  # what is wrong with it
    skipped: bool  # whether it is left out; else it has parts unknown to this version


def read_runs(results: Path | Sequence[Path]) -> list[RecordedRun]:
    """Return the runs of results folders in the order of their keys.

    Unusable records are left out, with one warning for all. If several files hold the same key, the
    first folder takes precedence, and in a folder single files precede packed ones; a warning says
    if their contents differ.

    Raises:
        DataError: If a folder does not exist.
    """
    found: list[RecordedRun] = []
    problems: list[Problem] = []
    for root in [results] if isinstance(results, Path) else results:
        here, bad = read_folder(root)
        found += here
        problems += bad
    runs, doubles = first_of_each(found)
    for some, what in (
        ([p for p in problems if p.skipped], "skipped {} that cannot be used"),
        (
            [p for p in problems if not p.skipped],
            "{} hold what this version does not know, and it is left out of what is shown",
        ),
        (doubles, "left out {} of runs with other contents elsewhere"),
    ):
        if some:
            said = what.format(f"{len(some)} record{'s' * (len(some) > 1)}")
            more = f"; and {len(some) - 1} more, see `feddg-bench results check`" * (len(some) > 1)
            first = printable(f"{some[0].path}: {some[0].reason}")[:LONGEST]
            logger.warning("%s: %s%s", said, first, more)
    return [runs[key] for key in sorted(runs)]


def first_of_each(
    found: Iterable[RecordedRun],
) -> tuple[dict[str, RecordedRun], list[Problem]]:
    """Return the first run of each key, and later runs whose records differ from it."""
    runs: dict[str, RecordedRun] = {}
    doubles: list[Problem] = []
    for run in found:
        first = runs.setdefault(run.key, run)
        if first.digest != run.digest and (names := _differing(first, run)):
            reason = f"its run {run.key} differs from that in {first.source.path}: {names}"
            doubles.append(Problem(run.source.path, reason, skipped=False))
    return runs, doubles


def _differing(one: RecordedRun, other: RecordedRun) -> str:
    """Return the names of the fields in which two records of a run differ."""
    first, second = from_json(one.text()), from_json(other.text())
    # Tuning also adds its choice to existing records.
    names = {n for n in first | second if first.get(n) != second.get(n)} - {"tuned", "digest"}
    return ", ".join(sorted(names))


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the search for cycles, which takes a tenth of the time where all new objects stay.

    Objects without cycles are still freed as soon as nothing refers to them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@no_collection()
def read_folder(
    root: Path, *, packed: bool | None = None
) -> tuple[list[RecordedRun], list[Problem]]:
    """Return the runs in a results folder, and the records that cannot be used.

    If ``packed`` is given, only packed files are read (true), or only single ones (false).

    Raises:
        DataError: If the folder does not exist.
    """
    if not root.is_dir():
        raise DataError(
            f"there is no results folder {root}: run something first, or give --results DIR"
        )
    index, new = Index(root), list[str]()
    runs: list[RecordedRun] = []
    problems: list[Problem] = []
    parsed = 0
    files = find_records(root, packed=packed)
    for source in files:
        name = f"{source.folder.name}/{source.name}"
        content = index.get(name, source.stamp)
        if content is None:
            content = _read_file(source)
            index.put(name, source.stamp, content)
            new.append(name)
            parsed += len(content[0])
        at = 0
        for head in content[0]:
            if "problem" in head:
                problems.append(Problem(source.path, head["problem"], head["skipped"]))
            else:
                end = at + head["numbers"]
                runs.append(_run(source, head, content[1][at:end]))
                at = end
    if parsed >= WORTH_WRITING:
        there = {f"{source.folder.name}/{source.name}" for source in files}
        index.write(new, [] if packed is not None else sorted(index.files.keys() - there))
    return runs, problems


def _read_file(source: Source) -> Content:
    """Return the heads and problems of the records in a file, and the runs' numbers."""
    said: list[dict[str, Any]] = []
    numbers: list[bytes] = []
    try:
        texts = source.texts()
    except DataError as error:
        return [{"problem": str(error), "skipped": True}], b""
    for line, text in enumerate(texts):
        try:
            key = None if source.packed else source.path.stem
            record = RunRecord.parse(text, key)
        except DataError as error:
            where = f"line {line + 1}: " if source.packed else ""
            said.append({"problem": printable(f"{where}{error}")[:LONGEST], "skipped": True})
            continue
        if unknown := record.unknown_fields():
            said.append({"problem": printable(", ".join(unknown))[:LONGEST], "skipped": False})
        measured = record.measured()
        frame, values = measured.packed()
        numbers.append(values)
        head = _head(line, text, record) | record.counts(measured)
        said.append(head | {"frame": frame, "numbers": len(values)})
    return said, b"".join(numbers)


def _head(line: int, text: bytes, record: RunRecord) -> dict[str, Any]:
    """Return the fields of a `RecordedRun`; values shared by many runs as JSON text."""
    head = {name: getattr(record, name) for name in ("key", *OWN, "recipe", "task")}
    return head | {
        "line": line,
        "digest": hashlib.sha256(text).hexdigest()[:32],
        "version": record.method_version,
        "scenario": record.scenario.name,
        "train": "+".join(sorted(record.scenario.train)),
        "val": record.scenario.val,
        "test": record.scenario.test,
        "fingerprint": record.data.fingerprint,
        "code": record.code,
        "labels": list(record.labels),
        "tuned": None if record.tuned is None else record.tuned.model_dump(mode="json"),
        "imbalance": record.data.imbalance,
        "answers": record.data.answers,
        "label": record.data.label,
        "few": record.data.few,
        "personal": record.personal or {},
        "privacy": None if record.privacy is None else record.privacy.model_dump(mode="json"),
        "metric": record.metric.name,
        "nested": to_json({k: v for k, v in record.settings.items() if k not in OWN}).decode(),
        "environment": record.environment.model_dump_json(),
    }


@lru_cache(maxsize=10_000)
def _shared(text: str) -> Any:
    """Return the value of a JSON text: one object shared by all runs with this text."""
    return from_json(text, cache_strings="keys")


@lru_cache(maxsize=10_000)
def _flat(text: str) -> Mapping[str, Any]:
    """Return the settings of a JSON text by dotted key, also as one shared object."""
    return flatten(_shared(text))


def _run(source: Source, head: dict[str, Any], numbers: bytes) -> RecordedRun:
    """Return the run that a head describes."""
    fields = head.copy()
    del fields["numbers"]
    fields["metric"] = find_metric(fields["metric"], fields["task"])
    fields["settings"] = _flat(fields["nested"])
    fields["nested"] = _shared(fields["nested"])
    fields["environment"] = _shared(fields["environment"])
    fields["tuned"] = fields["tuned"] and TunedRecord(**fields["tuned"])
    fields["privacy"] = fields["privacy"] and PrivacyRecord(**fields["privacy"])
    return RecordedRun(source=source, _frame=fields.pop("frame"), _numbers=numbers, **fields)


def setting_items(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted key, except `OWN`, with their original types."""
    for key, value in settings.items():
        if not prefix and key in OWN:
            continue
        if isinstance(value, dict) and set(value) != {"sha256"}:
            yield from setting_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key; files as the beginning of their hash, lists as text.

    >>> flatten({"train": {"lr": 0.1}, "backbone": {"weights": {"sha256": "0123456789abcdef"}}})
    {'train.lr': 0.1, 'backbone.weights': '01234567'}
    """
    return {
        key: ", ".join(str(_short(v)) for v in value) if isinstance(value, list) else _short(value)
        for key, value in setting_items(settings)
    }


def _short(value: Any) -> Any:
    return str(value["sha256"])[:8] if isinstance(value, dict) and "sha256" in value else value
