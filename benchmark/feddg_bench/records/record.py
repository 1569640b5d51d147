"""Record of a run: all data for tables, figures and readers, with every round."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import compress
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    ValidationError,
)
from pydantic_core import from_json

from feddg_bench.common.errors import DataError
from feddg_bench.common.titles import counted
from feddg_bench.records.checks import fault_of_key
from feddg_bench.records.measured import Evaluation as Evaluation
from feddg_bench.records.measured import Measured, tabulate
from feddg_bench.records.metrics import METRICS, Metric, find_metric
from feddg_bench.records.rules import SPLITS, split_metric
from feddg_bench.records.sources import read_json

FORMAT: Final = 1

FEW = 20
"""Splits with fewer images are named below tables: one image changes accuracy by over 5 points."""

T = TypeVar("T")
Later = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
"""A field that early records lack: ``name: Later[str] = None``. It is omitted while it is ``None``,
so that old records are written back unchanged."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(lambda v: math.nan if v is None else v)]
"""A number; NaN if it is not finite, for which files hold null because JSON has no such number."""
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]+$")]


def _numbers(evaluation: Evaluation) -> Evaluation:
    """Return an evaluation, with NaN for null, which stands for a number that overflowed."""
    for split, parts in evaluation.items():
        for domain, measured in parts.items():
            if type(measured.get("images")) is not int:
                raise ValueError(f"{split}.{domain}: it does not say of how many images")
            if {*map(type, measured.values())} <= {int, float}:
                continue
            for name, value in measured.items():
                if isinstance(value, str) and name in METRICS:
                    raise ValueError(f"{split}.{domain}: {name} is {value!r}, not a number")
                measured[name] = math.nan if value is None else value
    return evaluation


_Whole = Annotated[int, Field(gt=-(2**63), lt=2**63)]
_Part = dict[str, _Whole | float | str | None]
Measurements = Annotated[
    Evaluation,
    GetPydanticSchema(lambda _, schema: schema(dict[str, dict[str, _Part]])),
    AfterValidator(_numbers),
    PlainSerializer(lambda evaluation: evaluation, return_type=dict[str, Any]),
]
Several = Annotated[list[T], Field(fail_fast=True)]  # a million errors are reported as one


Named = dict[str, T]


class NewerError(DataError):
    """A record whose format only a newer version can read."""


class RecordPart(BaseModel):
    """A part of a record; unknown fields of later versions are kept and written back."""

    model_config = ConfigDict(extra="allow")


class ScenarioRecord(RecordPart):
    """Training, validation and test domains."""

    model_config = ConfigDict(frozen=True)

    name: str  # such as ip-o-c
    train: Annotated[tuple[str, ...], BeforeValidator(lambda v: tuple(v) if type(v) is list else v)]
    val: str | None
    test: str


class DataRecord(RecordPart):
    """The images of a run."""

    fingerprint: Hash  # of the data set's content, or of its features
    images: dict[str, Named[Count]] = {}  # split -> domain -> number of images
    task: Later[str] = None  # what was learnt; early records lack it and are classifications
    metric: Later[str] = None  # the data set's key metric; early records lack it: accuracy
    # Test images of the largest class divided by those of the smallest, where the ratio is above
    # `feddg_bench.data.federated.BALANCED`, so that accuracy alone misleads.
    imbalance: Later[float] = None
    # Name of a user's own data set in tables; early records lack it.
    label: Later[str] = None
    # Number of images that cannot be decoded, which the setting data.skip_unreadable leaves out.
    unreadable: Later[Count] = None
    # Known accuracies on the test domain of a computed data set, by name of the rule.
    answers: Later[Named[Annotated[float, Field(ge=0, le=1)]]] = None
    # SHA-256 of the weights of the encoder whose features replaced the images.
    encoder: Later[str] = None

    @property
    def few(self) -> dict[str, int]:
        """Number of images of each measured split with fewer than `FEW`."""
        totals = {split: sum(of.values()) for split, of in self.images.items() if split != "train"}
        return {split: total for split, total in totals.items() if 0 < total < FEW}


class PartitionRecord(RecordPart):
    """The clients: hash of their index lists, number, and sizes [smallest, median, largest]."""

    hash: Hash
    clients: Count = 0
    sizes: Several[Count] = []


class Traffic(RecordPart):
    """Bytes to and from the server."""

    up: Count = 0
    down: Count = 0


class Dropped(RecordPart):
    """A discarded reply: its client, or ``server`` for the sum, the faulty tensor and the reason.

    Early records lack the reason, which was always NaN or infinity.
    """

    client: str
    tensor: str
    reason: Later[str] = None


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record's fields without its digest, as JSON in the order of names.

    It finds accidents, such as a search and replace in a folder; anybody can compute a new one.
    """
    content = {name: value for name, value in values.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def rounded_up(epsilon: float) -> str:
    """Return an epsilon as text with two decimals, rounded up."""
    return f"{math.ceil(epsilon * 100) / 100:g}"


class PrivacyRecord(RecordPart):
    """Privacy mechanism of a run, and its guarantee where noise was added."""

    mechanism: str
    aggregation: str  # `plain` or `secure`
    protects: Later[str] = None  # difference between two neighbouring federations
    epsilon: Later[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = None
    delta: Later[Annotated[float, Field(gt=0, lt=1)]] = None
    accountant: Later[str] = None
    sampling: Later[str] = None  # of clients, as assumed by the accountant

    def words(self) -> str:
        """Return the guarantee for a caption; epsilon is rounded up."""
        said = []
        if self.epsilon is not None:
            how = [self.mechanism, f"{self.accountant} accountant"]
            how += [f"{self.sampling} sampling of clients"] if self.sampling else []
            said.append(
                f"epsilon {rounded_up(self.epsilon)} at delta {self.delta:g} in each "
                f"run for {self.protects} ({', '.join(how)})"
            )
        if self.aggregation == "secure":
            said.append("the server sees sums alone (secure aggregation)")
        return "; ".join(said)


class Costs(RecordPart):
    """Cost and faults of one round."""

    bytes: Traffic = Traffic()  # sent and received by the server
    dropped: Several[Dropped] = []  # clients whose replies were not used
    seconds: Named[Annotated[float, Field(ge=0, lt=1e15)]] = {}  # phase -> wall time
    protection: Later[Traffic] = None  # the part of `bytes` due to secure sums


class _Round(RecordPart):
    round: Count  # its number, from 1; 0 in a run without rounds
    cohort: Several[str]  # clients that were asked
    skipped: bool  # whether every client was dropped, so that the model stayed as it was
    train: Named[Number]  # means over the clients, `loss` among them
    evaluation: Measurements | None  # of the new model; `None` where this round was not evaluated


class RoundRecord(Costs, _Round):
    """One round: results, then costs."""


class EnvironmentRecord(RecordPart):
    """Environment that can affect rounding; never the name of a machine."""

    versions: Named[str] = {}
    system: str = ""
    cpu: Later[str] = None  # its maker and widest instructions; early records lack it
    portable: Later[bool] = None  # whether only operations equal on all CPUs with AVX2 were used
    device: str = ""
    threads: Count = 1
    workers: Count = 1
    commit: str | None = None


class TimeRecord(RecordPart):
    """When a run took place, in UTC, and the resources it used, including interrupted parts."""

    started: str | None = None
    finished: str | None = None
    seconds: Number = math.nan  # in total
    peak_memory_mib: Number = math.nan
    flop: Later[Positive] = None  # floating point operations of all clients' work
    # Of some earlier records: operations per second of a matrix product, and `flop` over (seconds
    # of training times this rate). On a busy machine, both are too low, and unequally so.
    peak_flops: Later[Positive] = None
    share_of_peak: Later[Positive] = None


class TunedRecord(RecordPart):
    """How `feddg-bench tune` chose a run's settings; not part of its key."""

    trials: Count  # number of trials
    settings: Named[bool | int | float | str] = {}  # chosen; empty if the recipe's were best
    seeds: Later[Count] = None  # seeds of each trial; absent if there was one
    raced: Later[bool] = None  # whether trials were stopped that could not lead any more
    protocol: Later[str] = None  # protocol of the trials; absent if it is the run's
    scenario: Later[str] = None  # scenario of the trials; early records lack it
    given: Later[Several[str]] = None  # ``KEY=VALUE`` of the trials in addition to the recipe

    @property
    def by_one_run(self) -> dict[str, bool | int | float | str]:
        """Settings chosen instead of the recipe's by trials of a single run each."""
        return {} if self.seeds else self.settings

    @property
    def words(self) -> str:
        """Number of trials and of their seeds, and their conditions, as part of a sentence."""
        seeds = counted(self.seeds, "seed") if self.seeds else "one seed"
        said = f"{counted(self.trials, 'trial')} of {'at most ' if self.raced else ''}{seeds}"
        said += f" on {self.scenario}" if self.scenario else ""
        said += f" under {self.protocol}" if self.protocol else ""
        return said + (f" with {', '.join(self.given)}" if self.given else "")


class RunRecord(RecordPart):
    """Everything about one run; never a path, never a host name."""

    format: Literal[1] = FORMAT  # version of the format
    key: Hash  # of `settings` and `method_version`
    method: str  # its name on the command line, as for the data set
    method_version: Count  # raised with every change that can alter results
    dataset: str
    protocol: str  # which domains are held out: ltdo, lodo or wilds
    scenario: ScenarioRecord
    seed: Count  # of all random draws
    recipe: str  # the recipe the settings came from; not part of the key
    code: Later[Hash] = None  # digest of the method's source; early records lack it
    labels: Named[str] = {}  # the method's settings that a caption must mention
    tuned: Later[TunedRecord] = None  # where settings were tuned
    settings: dict[str, Any]  # resolved; files by the hash of their content
    data: DataRecord
    partition: PartitionRecord
    privacy: Later[PrivacyRecord] = None  # privacy mechanism, if any
    once: Costs = Costs()  # costs before round 1
    rounds: Several[RoundRecord] = []
    # Client -> main metric and images of its personal model after its last training, on its
    # ``client_test``, where a method has such models and this split has images.
    personal: Later[Named[_Part]] = None
    environment: EnvironmentRecord = EnvironmentRecord()
    time: TimeRecord = TimeRecord()
    digest: Later[Hash] = None  # SHA-256 of the other fields (`digest_of`); early records lack it

    def sealed(self) -> Self:
        """Return the record with the digest of its content."""
        return self.model_copy(update={"digest": digest_of(self.as_json())})

    def numbers(self) -> dict[str, Any]:
        """Return what the same settings reproduce: all but times, environment and tuning."""
        values = self.as_json()
        del values["environment"], values["time"]
        for name in ("tuned", "digest"):  # the origin of settings changes no number
            values.pop(name, None)
        for entry in [values["once"], *values["rounds"]]:
            entry.pop("seconds", None)
        return values

    def as_json(self) -> dict[str, Any]:
        """Return the record as files hold it: null for numbers that JSON lacks."""
        values: dict[str, Any] = from_json(self.model_dump_json())
        return values

    @property
    def task(self) -> str:
        """What was learnt: ``classification`` or ``regression``."""
        return self.data.task or "classification"

    @property
    def metric(self) -> Metric:
        """The data set's key metric."""
        return find_metric(self.data.metric or "accuracy", self.task)

    def evaluation(self) -> Evaluation:
        """Return the last evaluation.

        Raises:
            DataError: If no round was evaluated.
        """
        for entry in reversed(self.rounds):
            if entry.evaluation is not None:
                return entry.evaluation
        raise DataError(f"record {self.key} holds no evaluated round")

    def score(self, split: str = "test") -> float | None:
        """Return the key metric on a split after the last evaluated round.

        It covers all images of the split; a share is in [0, 1]. ``None`` if it was not measured.
        """
        for entry in reversed(self.rounds):
            if entry.evaluation is not None:
                return split_metric(entry.evaluation, split, self.metric.name)
        return None

    def __repr__(self) -> str:
        """Return three lines: what was run, the key metric by split, where and how long."""
        scores = {split: self.score(split) for split in SPLITS}
        shown = [f"{k} {self.metric.text(v, 2)}" for k, v in scores.items() if v is not None]
        rounds, e = self.settings.get("federation", {}).get("rounds"), self.environment
        last = max((entry.round for entry in self.rounds), default=0)
        return "\n".join(
            (
                f"{self.method} on {self.dataset}, {self.protocol} {self.scenario.name}, seed "
                f"{self.seed}, recipe {self.recipe}: run {self.key}",
                f"{self.metric.label}, round {last} of {rounds}: "
                + (", ".join(shown) or "not measured"),
                f"{e.device or 'unknown device'}, {counted(e.workers, 'worker')}, "
                f"{self.time.seconds:.1f} s, started {self.time.started or 'at an unknown time'}",
            )
        )

    __str__ = __repr__

    @classmethod
    def parse(cls, data: str | bytes, key: str | None = None) -> Self:
        """Return the record in a file's text.

        Its fields must have the right types, its key must be that of its settings, and its digest
        that of its content.

        Raises:
            NewerError: If its format is not known.
            DataError: If it is truncated or not a record, if it changed after it was written, or if
                its key is not ``key``; the message is part of a sentence.
        """
        values = read_json(data)
        try:
            record = cls.model_validate(values, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["loc"] == ("format",):
                raise NewerError(
                    f"its format needs a newer feddg-bench; this reads {FORMAT}"
                ) from error
            where = ".".join(str(part) for part in first["loc"])
            what = first["msg"].removeprefix("Value error, ")
            raise DataError(f"{where}: {what}" if where else what) from error
        if record.digest not in (None, digest_of(values)):
            raise DataError(
                "it changed after it was written, because its digest is not that of its content: "
                "restore the file, or run it again"
            )
        names = {name: getattr(record, name) for name in ("method", "dataset", "protocol", "seed")}
        names["scenario"] = record.scenario.name
        if fault := fault_of_key(record.settings, record.method_version, record.key, names):
            raise DataError(fault)
        if key not in (None, record.key):
            raise DataError(f"it holds the run {record.key}, not {key}")
        return record

    def measured(self) -> Measured:
        """Return the evaluations as a table."""
        return tabulate([(e.round, e.evaluation) for e in self.rounds if e.evaluation is not None])

    def counts(self, table: Measured) -> dict[str, Any]:
        """Return numbers of the run and its rounds, by field of `RecordedRun`.

        ``costs`` are means over rounds, except for ``one_time_cost``: ``local_training_time``
        (seconds that the server waited, per client asked), ``aggregation_time``, ``one_time_cost``
        (seconds before round 1), ``megabytes_up`` and ``megabytes_down``. ``teraflop`` are all
        operations of the run except those of evaluation; early records do not count them.

        ``usage`` is for display: ``started``, ``seconds`` and ``memory`` (MiB) are for the whole
        run. ``dropped`` lists clients as [round, client, tensor], with 0 before round 1. ``bytes``
        is [up per round, down per round, up before round 1, down before round 1], ``phases`` lists
        [phase, seconds per round, seconds before round 1].

        ``lost`` is the first round with a loss that is not finite, in training or evaluation.
        """
        once, n = self.once, max(len(self.rounds), 1)
        asked = skipped = up = down = 0
        seconds: dict[str, float] = defaultdict(float)
        dropped = [(0, drop) for drop in once.dropped]
        overflowed: Any = np.isnan(table.numbers).any(axis=1)
        lost = list(compress(table.rounds, overflowed))
        for entry in self.rounds:
            asked += len(entry.cohort)
            skipped += entry.skipped
            for name, value in entry.seconds.items():
                seconds[name] += value
            dropped += [(entry.round, drop) for drop in entry.dropped]
            up += entry.bytes.up
            down += entry.bytes.down
            if not all(map(math.isfinite, entry.train.values())):
                lost.append(entry.round)
        return {
            "rounds": len(self.rounds),
            "skipped": skipped,
            "lost": min(lost, default=None),
            "costs": {
                "local_training_time": seconds.get("training", 0) / max(asked, 1),
                "aggregation_time": seconds.get("aggregation", 0) / n,
                "one_time_cost": math.fsum(once.seconds.values()),
                "megabytes_up": up / n / 1e6,
                "megabytes_down": down / n / 1e6,
            }
            | ({} if self.time.flop is None else {"teraflop": self.time.flop / 1e12}),
            "usage": {
                "scenario": self.scenario.model_dump(mode="json"),
                "clients": self.partition.clients,
                "started": self.time.started,
                "seconds": self.time.seconds,
                "memory": self.time.peak_memory_mib,
                "dropped": [[number, drop.client, drop.tensor] for number, drop in dropped],
                "bytes": [round(up / n), round(down / n), once.bytes.up, once.bytes.down],
                "phases": [
                    [name, seconds.get(name, 0.0) / n, once.seconds.get(name, 0.0)]
                    for name in sorted({*seconds, *once.seconds})
                ],
            },
        }

    def unknown_fields(self) -> list[str]:
        """Return the names of fields that this version does not know."""
        parts: list[tuple[str, RecordPart]] = [("", self), ("data.", self.data)]
        parts += [("environment.", self.environment)]
        parts += [("rounds.", entry) for entry in self.rounds[:1]]
        return [f"{at}{name}" for at, part in parts for name in part.model_extra or ()]
