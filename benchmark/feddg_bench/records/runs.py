"""Runs as tables, figures and reports read them: a record's description and its numbers.

A record holds every round and may take 100 KB; thousands of them take long to parse. What is needed
again and again is kept in one file beside them, ``.index``, and read from there as long as the
size, times and inode of a record's file are unchanged. The index may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from feddg_bench.common.errors import DataError, printable
from feddg_bench.common.files import write_whole
from feddg_bench.records.metrics import Metric, find_metric
from feddg_bench.records.record import Evaluation, PrivacyRecord, RunRecord, TunedRecord
from feddg_bench.records.rules import Rule, choose_evaluation, split_metric
from feddg_bench.records.sources import Source, sources

logger = logging.getLogger(__name__)

OWN = ("method", "dataset", "protocol", "scenario", "seed")
"""Settings that are fields of a run, and are left out of `RecordedRun.settings`."""

FIELDS = (*OWN[:4], "train", "val", "test", "seed", "recipe", "version")
"""Fields of a run that a table may ask for, beside settings."""

LONGEST = 300
"""Most letters of a notice that come from a file."""
WORTH_WRITING = 50
"""Records that must have been parsed anew before the index is written again."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A record without its rounds, but with what was measured in them."""

    source: Source  # the file that holds the record
    line: int  # its line there, where the file holds several
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
    code: str | None  # digest of the method's source, where the record has it
    labels: Sequence[str]  # names of the method's settings that tell its variants apart
    task: str  # what was learnt, `classification` or `regression`
    rounds: int  # how many there were
    skipped: int  # in how many of them every client was dropped
    lost: int | None  # the first round whose loss is not finite, or `None`
    costs: Mapping[str, float]  # see `RunRecord.costs`
    metric: Metric  # the data set's key metric
    # Settings by dotted key, such as `train.lr`, without `OWN`; one object for all runs that agree
    # in them.
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]  # see `EnvironmentRecord`
    tuned: TunedRecord | None
    privacy: PrivacyRecord | None
    imbalance: float | None  # see `DataRecord.imbalance`
    _last: bytes = field(repr=False)
    _all: bytes = field(repr=False)
    _chosen: dict[Rule, Evaluation | None] = field(default_factory=dict, repr=False)

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

    @property
    def measured(self) -> list[tuple[int, Evaluation]]:
        """Every evaluated round, and what was measured after it."""
        found: list[tuple[int, Evaluation]] = from_json(self._all, cache_strings="keys")
        return found

    def evaluation(self, rule: Rule) -> Evaluation | None:
        """Return what was measured in the round that a rule chooses, if it can choose."""
        if rule not in self._chosen:
            found = from_json(self._last, cache_strings="keys") if rule == "last" else self.measured
            values = [evaluation for _, evaluation in found]
            self._chosen[rule] = choose_evaluation(values, rule, self.metric.name)
        return self._chosen[rule]

    def text(self) -> bytes:
        """Return the record's JSON text."""
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


def key_metric(run: RecordedRun, evaluation: Evaluation | None, split: str) -> float | None:
    """Return the key metric on a split, a share in percent; ``None`` if it was not measured."""
    value = None if evaluation is None else split_metric(evaluation, split, run.metric.name)
    return None if value is None else run.metric.display(value)


class Problem(NamedTuple):
    """A record that cannot be used, or only in part."""

    path: Path
    reason: str  # what is wrong with it
    skipped: bool  # whether it is left out; else it has parts that this version does not know


def read_runs(results: Path | Sequence[Path]) -> list[RecordedRun]:
    """Return the runs of results folders in the order of their keys.

    Records that cannot be used are left out, with one warning for all. If several files hold a key,
    the first folder wins, and in it single files win over packed ones; a warning says if their
    contents differ.

    Raises:
        DataError: If a folder is not there.
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
    """Return the first run of each key, and the later ones whose records hold something else."""
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
    # How settings were chosen is noted in records that were there before.
    names = [n for n in first | second if first.get(n) != second.get(n) and n != "tuned"]
    return ", ".join(sorted(names))


def read_folder(
    root: Path, *, packed: bool | None = None
) -> tuple[list[RecordedRun], list[Problem]]:
    """Return the runs in a results folder, and the records that cannot be used.

    If ``packed`` is given, only packed files are read (true), or only single ones (false).

    Raises:
        DataError: If the folder is not there.
    """
    if not root.is_dir():
        raise DataError(
            f"there is no results folder {root}: run something first, or give --results DIR"
        )
    index = _Index(root / ".index")
    runs: list[RecordedRun] = []
    problems: list[Problem] = []
    for source in sources(root, packed=packed):
        heads, bad = index.entry(source)
        runs += [index.run(source, head) for head in heads]
        problems += [Problem(source.path, reason, skipped) for reason, skipped in bad]
    index.write(keep_others=packed is not None)
    return runs, problems


# --------------------------------------------------------------------------------- the index

_Head = dict[str, Any]
"""The fields of a `RecordedRun`. ``settings`` and ``environment`` are positions in
`_Index.shared`; ``measured`` is the index's line for the last evaluation, and the next line holds
all of them."""


class _Index:
    """The index of a results folder; it is valid only while the code of this package is the same.

    Its lines: which code made it, a checksum of the rest, heads by file, and what was measured.
    """

    def __init__(self, path: Path) -> None:
        code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
        self.about = b"feddg-bench index %d" % zlib.crc32(code)
        self.path = path
        self.files: dict[str, tuple[list[int], list[_Head], list[tuple[str, bool]]]] = {}
        self.used: set[str] = set()
        self.shared: list[Any] = []
        self.lines: list[bytes] = []
        self.places: dict[str, int] = {}
        self.fresh = 0
        with suppress(OSError, ValueError):  # then it is made anew
            about, check, rest = path.read_bytes().split(b"\n", 2)
            if about == self.about and int(check) == zlib.crc32(rest):
                head, *self.lines = rest.split(b"\n")
                self.files, self.shared = from_json(head, cache_strings="keys")

    def entry(self, source: Source) -> tuple[list[_Head], list[tuple[str, bool]]]:
        """Return a file's heads and its problems; the file is parsed again only if it changed."""
        name = f"{source.folder.name}/{source.name}"
        self.used.add(name)
        stamp, heads, problems = self.files.get(name, ((), [], []))
        if not source.stamp or tuple(stamp) != source.stamp:
            heads, problems = [], []
            self.files[name] = list(source.stamp), heads, problems
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
                heads.append(self._head(line, text, record))
        return heads, problems

    def _head(self, line: int, text: bytes, record: RunRecord) -> _Head:
        self.fresh += 1
        measured = [(entry.round, entry.evaluation) for entry in record.rounds if entry.evaluation]
        self.lines += [to_json(found) for found in (measured[-1:], measured)]
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
            "rounds": len(record.rounds),
            "tuned": None if record.tuned is None else record.tuned.model_dump(mode="json"),
            "imbalance": record.data.imbalance,
            "privacy": None if record.privacy is None else record.privacy.model_dump(mode="json"),
            "skipped": sum(entry.skipped for entry in record.rounds),
            "lost": record.lost(),
            "costs": record.costs(),
            "metric": record.metric.name,
            "settings": self._share(flatten(record.settings)),
            "environment": self._share(record.environment.model_dump(mode="json")),
            "measured": len(self.lines) - 2,
        }

    def _share(self, value: Any) -> int:
        """Return a value's position in `shared`, to which heads refer; add it if it is new."""
        if len(self.places) < len(self.shared):
            marks = (json.dumps(known, sort_keys=True) for known in self.shared)
            self.places = {mark: place for place, mark in enumerate(marks)}
        place = self.places.setdefault(json.dumps(value, sort_keys=True), len(self.shared))
        if place == len(self.shared):
            self.shared.append(value)
        return place

    def run(self, source: Source, head: _Head) -> RecordedRun:
        """Return the run that a head describes."""
        fields = head.copy()
        at = fields.pop("measured")
        fields["metric"] = find_metric(fields["metric"], fields["task"])
        fields["settings"] = self.shared[fields["settings"]]
        fields["environment"] = self.shared[fields["environment"]]
        fields["tuned"] = fields["tuned"] and TunedRecord(**fields["tuned"])
        fields["privacy"] = fields["privacy"] and PrivacyRecord(**fields["privacy"])
        return RecordedRun(source=source, _last=self.lines[at], _all=self.lines[at + 1], **fields)

    def write(self, *, keep_others: bool) -> None:
        """Write the index, if that saves more time than it takes."""
        if self.fresh < WORTH_WRITING:
            return
        files = {n: entry for n, entry in self.files.items() if keep_others or n in self.used}
        lines: list[bytes] = []
        for _, heads, _ in files.values():  # lines that no head refers to any more are left out
            for head in heads:
                at, head["measured"] = head["measured"], len(lines)
                lines += self.lines[at : at + 2]
        self.lines = lines
        rest = b"\n".join([json.dumps([files, self.shared]).encode(), *lines])
        with suppress(DataError):  # a folder that cannot be written to is read without an index
            text = b"%s\n%d\n%s" % (self.about, zlib.crc32(rest), rest)
            write_whole(self.path, text, sync=False)


def setting_items(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted key, except `OWN`, with their own types."""
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
