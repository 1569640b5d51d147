"""Records of attacks: one file each under a results folder, named by its key, or packed."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError

from feddg_bench.common.errors import DataError, printable
from feddg_bench.common.files import file_name
from feddg_bench.records.record import Count, Hash, Positive, RecordPart, Several
from feddg_bench.records.sources import (
    ENDING,
    Packable,
    Source,
    find_sources,
    read_json,
    write_record,
)
from feddg_bench.records.statistics import Estimate

Attacker = Literal["server", "client", "eavesdropper"]
"""Who attacks: ``server`` sees every reply, ``client`` the messages to itself, ``eavesdropper`` all
messages in both directions."""
ATTACKERS: tuple[Attacker, ...] = get_args(Attacker)

PERCEPTUAL = ", trained on LPIPS"
"""Marks a result whose generator was trained on LPIPS, not on squared errors alone."""

logger = logging.getLogger(__name__)


class AttackPart(RecordPart):
    """A part of an attack's record: finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)


class Interval(AttackPart):
    """A figure with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """The figure and its interval with two decimals."""
        return Estimate(self.value, self.low, self.high).text(2)


def overall(intervals: Sequence[Interval]) -> Interval:
    """Return the mean of figures of several runs, with the range of their intervals."""
    return Interval(
        value=statistics.mean(i.value for i in intervals),
        low=min(i.low for i in intervals),
        high=max(i.high for i in intervals),
    )


class Control(AttackPart):
    """A control: what was measured, what was expected, and whether the two agree."""

    measured: Interval
    expected: str
    holds: bool


class AttackResult(AttackPart):
    """The result of an attack on one item of the messages."""

    item: str  # such as `style`
    about: str = ""  # what the attack asks, if there are several questions: `domains`, `classes`
    up: bool  # whether clients send it
    call: str  # the client function that it belongs to
    times: Count  # rounds in which it was seen
    messages: Count  # number of clients whose messages were attacked
    targets: Count  # number of attacked images or clients
    bytes: Count  # of one message
    no_leak: Control
    planted_leak: Control
    figures: dict[str, Interval]  # such as `auc`; empty if a control failed
    by_domain: dict[str, dict[str, Interval]] = Field(default_factory=dict)  # where it was measured

    @property
    def perceptual(self) -> bool:
        """Whether the generator was trained on LPIPS, too."""
        return self.about.endswith(PERCEPTUAL)

    @property
    def failed(self) -> str:
        """A sentence that names the failed control, or an empty text."""
        for name, control in (("no leak", self.no_leak), ("planted leak", self.planted_leak)):
            if not control.holds:
                m = control.measured
                asked = f"{self.item}, {self.about}" if self.about else self.item
                return (
                    f"{asked}: no result, because the control '{name}' is {m.value:.3f} "
                    f"[{m.low:.3f}, {m.high:.3f}] instead of {control.expected}"
                )
        return ""

    def withheld(self) -> AttackResult:
        """Return the result, without figures if a control failed."""
        return self.model_copy(update={"figures": {}}) if self.failed else self


class AttackRecord(AttackPart):
    """One attack on one run."""

    format: Literal[1] = 1
    key: Hash
    kind: str
    version: Count  # of the attack
    attacker: Attacker
    run_key: Hash  # of the run that was attacked; it need not be recorded
    method: str
    dataset: str
    protocol: str
    scenario: str
    seed: Count
    recipe: str
    labels: dict[str, str]  # settings of the method that a table shows
    settings: dict[str, Any]  # what is hashed into the run key
    clients: Count
    images: Count  # of the median client
    public: Count  # public images of the attacker
    rounds: Count
    measured: dict[str, float]  # key metric of the attacked run's last model, by split
    seconds: Positive
    pictures: Several[str] = Field(default_factory=list)  # files next to this one
    judges: dict[str, Hash] = Field(default_factory=dict)  # judge -> SHA-256 of its weights
    items: Several[str] = Field(default_factory=list)  # the only items attacked; empty if all were
    results: Several[AttackResult]

    def only(self, items: Set[str]) -> AttackRecord:
        """Return the record with the results of these items only; of all if none are given."""
        results = [r for r in self.results if not items or r.item.partition(".")[0] in items]
        return self.model_copy(update={"results": results})

    def has(self, items: Set[str]) -> bool:
        """Return whether these items were attacked; whether all were if none are given."""
        return not self.items or (bool(items) and items <= set(self.items))


def attack_key(kind: str, version: int, attacker: str, run_key: str) -> str:
    """Return the name of an attack's record: 16 hexadecimal digits."""
    text = json.dumps([kind, version, attacker, run_key])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def attack_path(root: Path, key: str) -> Path:
    """Return the path of an attack's record, which need not exist."""
    return root / "attacks" / f"{key}.json"


def save_attack(root: Path, record: AttackRecord) -> Path:
    """Write a record atomically, and return its path.

    Raises:
        DataError: If it cannot be written.
    """
    path = attack_path(root, record.key)
    write_record(path, record.model_dump(mode="json"))
    return path


def find_attack(root: Path, key: str) -> AttackRecord | None:
    """Return a finished attack's record; ``None`` if no usable one exists."""
    return next((record for *_, record in _read(root, key) if record.key == key), None)


def read_attacks(roots: Iterable[Path]) -> list[AttackRecord]:
    """Return the records of attacks in results folders, by key; broken ones only cause a warning.

    If a record is in two places, the first is used: folders in their order, single files first.
    """
    by_key: dict[str, AttackRecord] = {}
    for root in roots:
        for *_, record in _read(root):
            by_key.setdefault(record.key, record)
    return [by_key[key] for key in sorted(by_key)]


def packables(root: Path) -> tuple[list[Packable], dict[Path, str]]:
    """Return the records of attacks in a results folder, and packed files that cannot be read."""
    folder = root / "attacks"
    records = list(_read(root))
    packed = {source.path for source in find_sources(folder, ENDING, packed=True)}
    faults = packed - {source.path for source, *_ in records}
    return [
        Packable(
            source,
            record.key,
            (record.seed, record.key),
            attack_path(root, record.key),
            folder / f"{file_name(record.dataset, record.protocol, record.recipe)}{ENDING}",
            partial(source.text, line),
        )
        for source, line, record in records
    ], dict.fromkeys(faults, "it cannot be read")


def _read(root: Path, key: str = "") -> Iterator[tuple[Source, int, AttackRecord]]:
    """Yield each usable record with its file and line; single files first.

    With ``key``, single files of other records are not read.
    """
    folder = root / "attacks"
    files = find_sources(folder, f"{key}.json", packed=False) + find_sources(
        folder, ENDING, packed=True
    )
    for source in files:
        try:
            records = [AttackRecord.model_validate(read_json(text)) for text in source.texts()]
        except (DataError, ValidationError) as error:
            reason = printable(str(error).splitlines()[0])
            logger.warning("attack record %s is left out: %s", source.path, reason)
            continue
        for line, record in enumerate(records):
            if source.packed or record.key == source.path.stem:
                yield source, line, record
            else:
                logger.warning(
                    "attack record %s is left out: it is that of %s", source.path, record.key
                )
