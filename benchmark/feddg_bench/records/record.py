"""The record of a run: everything a table, a figure or a reader may ask for, with every round."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)
from pydantic_core import from_json

from feddg_bench.common.errors import DataError
from feddg_bench.config.keys import run_key
from feddg_bench.records.metrics import METRICS, Metric, find_metric

FORMAT: Final = 1
WHOLE = "all"
"""Name of the part of a split that holds all of its images."""

T = TypeVar("T")
Later = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
"""A field that the first records lack: ``name: Later[str] = None``. It is left out while it is
``None``, so that old records are written back as they were."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(lambda v: math.nan if v is None else v)]
"""A number, NaN if it is not finite: JSON has no such number, so a file holds null."""


def _measured(value: Any) -> dict[str, Any]:
    """Return what was measured on a part of a split; refuse impossible values."""
    if not isinstance(value, dict):
        raise ValueError("it must hold a value for each metric")  # noqa: TRY004 - for pydantic
    if "images" not in value:
        raise ValueError("it does not say of how many images")
    task = "regression" if "pearson" in value else "classification"
    return {name: _value(find_metric(name, task), number) for name, number in value.items()}


def _value(metric: Metric, value: Any) -> Any:
    if metric.name == "loss" and (value is None or value != value):  # it overflowed
        return math.nan
    if metric.name in METRICS:
        low, high = metric.range
        if type(value) not in (int, float) or not low <= value <= high or value > 1e300:
            raise ValueError(f"{metric.name} is {value!r}, not a number in [{low:g}, {high:g}]")
    elif metric.name == "images":
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"images is {value!r}, not a count")
    elif not (isinstance(value, str | float | None) or (type(value) is int and abs(value) < 2**63)):
        raise ValueError(f"{metric.name} is neither a number nor a text")
    return value


MetricValues = Annotated[
    dict[str, float],
    PlainValidator(_measured),
    PlainSerializer(lambda measured: measured, return_type=dict[str, Any]),
]
Evaluation = dict[str, dict[str, MetricValues]]
"""Split -> domain -> metric -> value, and ``images``, how many were measured. The part `WHOLE` of a
split is all of it. Shares are in [0, 1]; a loss that overflowed is NaN. ``worst_group_name`` is a
text, as is ``only_class``, where a model predicted one class alone (the first records lack it)."""


class NewerError(DataError):
    """A record whose format only a newer version knows."""


class RecordPart(BaseModel):
    """A part of a record; fields that a later version added are kept, and written back."""

    model_config = ConfigDict(extra="allow")


class ScenarioRecord(RecordPart):
    """Which domains trained, validated and tested."""

    model_config = ConfigDict(frozen=True)

    name: str
    train: tuple[str, ...]
    val: str | None
    test: str


class DataRecord(RecordPart):
    """The images of a run."""

    fingerprint: str  # hash of the data set's content
    images: dict[str, dict[str, Count]] = {}  # split -> domain -> number of images
    task: Later[str] = None  # what was learnt; the first records lack it and are classifications
    metric: Later[str] = None  # the data set's key metric; the first records lack it: accuracy
    # Images of the largest class over those of the smallest among the test images, where it is
    # above `feddg_bench.data.federated.BALANCED`, so that accuracy alone misleads.
    imbalance: Later[float] = None


class PartitionRecord(RecordPart):
    """The clients: hash of their index lists, number, and sizes [smallest, median, largest]."""

    hash: str
    clients: Count = 0
    sizes: list[Count] = []


class Traffic(RecordPart):
    """Bytes to the server and from it."""

    up: Count = 0
    down: Count = 0


class Dropped(RecordPart):
    """A client whose reply was not used, or ``server`` for its sum; the tensor at fault, and why.

    The first records lack the reason, which was always NaN or infinity.
    """

    client: str
    tensor: str
    reason: Later[str] = None


def rounded_up(epsilon: float) -> str:
    """Return an epsilon as text with two decimals, rounded up."""
    return f"{math.ceil(epsilon * 100) / 100:g}"


class PrivacyRecord(RecordPart):
    """What was done for privacy, and what is guaranteed where noise was added."""

    mechanism: str
    aggregation: str  # `plain` or `secure`
    protects: Later[str] = None  # what two neighbouring federations differ in
    epsilon: Later[float] = None
    delta: Later[float] = None
    accountant: Later[str] = None
    sampling: Later[str] = None  # of clients, as the accountant assumes it

    def words(self) -> str:
        """Return what is guaranteed, for a caption; epsilon is rounded up."""
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
    """What a round cost, and what went wrong in it."""

    bytes: Traffic = Traffic()  # sent and received by the server
    dropped: list[Dropped] = []  # clients whose replies were not used
    seconds: dict[str, Annotated[float, Field(ge=0, lt=1e15)]] = {}  # phase -> wall time
    protection: Later[Traffic] = None  # the part of `bytes` that secure sums cost


class _Round(RecordPart):
    round: Count  # its number, from 1
    cohort: list[str]  # clients that were asked
    skipped: bool  # whether every client was dropped, so that the model stayed as it was
    train: dict[str, Number]  # means over the clients, `loss` among them
    evaluation: Evaluation | None  # of the new model; `None` where this round was not evaluated


class RoundRecord(Costs, _Round):
    """One round: what it did, then what it cost."""


class EnvironmentRecord(RecordPart):
    """What the last bits of numbers may depend on; never the name of a machine."""

    versions: dict[str, str] = {}
    system: str = ""
    cpu: Later[str] = None  # its maker and widest instructions; the first records lack it
    portable: Later[bool] = None  # whether it used only what all CPUs with AVX2 compute alike
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
    flop: Later[float] = None  # floating point operations of all clients' work
    peak_flops: Later[float] = None  # operations a second of a large matrix product, all workers
    share_of_peak: Later[float] = None  # `flop` divided by (seconds of training times `peak_flops`)


class TunedRecord(RecordPart):
    """How `feddg-bench tune` chose a run's settings; not part of its key."""

    trials: Count  # how many there were
    settings: dict[str, bool | int | float | str] = {}  # chosen; empty: the recipe's own were best
    seeds: Later[Count] = None  # seeds of each trial; absent if there was one
    protocol: Later[str] = None  # that of the trials; absent if it is the run's
    scenario: Later[str] = None  # that of the trials; the first records lack it
    given: Later[list[str]] = None  # ``KEY=VALUE`` that trials had beside the recipe, if any

    @property
    def by_one_run(self) -> dict[str, bool | int | float | str]:
        """Settings that were chosen in place of the recipe's by a single run of each trial."""
        return {} if self.seeds else self.settings

    @property
    def words(self) -> str:
        """The number of trials and of their seeds, and what they were made with, for a sentence."""
        seeds = f"{self.seeds} seeds" if self.seeds else "one seed"
        said = f"{self.trials} trials of {seeds}"
        said += f" on {self.scenario}" if self.scenario else ""
        said += f" under {self.protocol}" if self.protocol else ""
        return said + (f" with {', '.join(self.given)}" if self.given else "")


class RunRecord(RecordPart):
    """Everything about one run; never a path, never a host name."""

    format: Literal[1] = FORMAT  # version of this form
    key: str = Field(pattern="^[0-9a-f]+$")  # hash of `settings` and `method_version`
    method: str
    method_version: Count
    dataset: str
    protocol: str
    scenario: ScenarioRecord
    seed: Count
    recipe: str  # the recipe the settings came from; not part of the key
    code: Later[str] = None  # digest of the method's source; the first records lack it
    labels: dict[str, str] = {}  # the method's settings that a caption must mention
    tuned: Later[TunedRecord] = None  # where settings were tuned
    settings: dict[str, Any]  # resolved; files by the hash of their content
    data: DataRecord
    partition: PartitionRecord
    privacy: Later[PrivacyRecord] = None  # what was done for privacy, if anything
    once: Costs = Costs()  # costs before round 1
    rounds: list[RoundRecord] = []
    environment: EnvironmentRecord = EnvironmentRecord()
    time: TimeRecord = TimeRecord()

    def numbers(self) -> dict[str, Any]:
        """Return the record without times and environment: what the same settings reproduce."""
        values = self.as_json()
        del values["environment"], values["time"]
        values.pop("tuned", None)  # where settings come from changes no number
        for entry in [values["once"], *values["rounds"]]:
            entry.pop("seconds", None)
        return values

    def as_json(self) -> dict[str, Any]:
        """Return the record as a file holds it: null for numbers that JSON lacks."""
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

    def costs(self) -> dict[str, float]:
        """Return what the run cost: means over its rounds, except for ``one_time_cost``.

        ``local_training_time`` (seconds that the server waited, per client asked),
        ``aggregation_time``, ``one_time_cost`` (seconds before round 1), ``megabytes_up`` and
        ``megabytes_down``.
        """
        rounds, n = self.rounds, max(len(self.rounds), 1)
        asked = max(sum(len(entry.cohort) for entry in rounds), 1)
        return {
            "local_training_time": sum(e.seconds.get("training", 0) for e in rounds) / asked,
            "aggregation_time": sum(e.seconds.get("aggregation", 0) for e in rounds) / n,
            "one_time_cost": float(sum(self.once.seconds.values())),
            "megabytes_up": sum(entry.bytes.up for entry in rounds) / n / 1e6,
            "megabytes_down": sum(entry.bytes.down for entry in rounds) / n / 1e6,
        }

    def lost(self) -> int | None:
        """Return the first round with a loss that is not finite, in training or evaluation."""
        for entry in self.rounds:
            parts = [part for split in (entry.evaluation or {}).values() for part in split.values()]
            losses = [*entry.train.values(), *(part.get("loss", 0.0) for part in parts)]
            if not all(map(math.isfinite, losses)):
                return entry.round
        return None

    @classmethod
    def parse(cls, data: str | bytes, key: str | None = None) -> Self:
        """Return the record in a file's text, after checking that it is consistent.

        Raises:
            NewerError: If its format is not known.
            DataError: If it is cut short or not a record, if a value is out of its range, if names
                or settings were changed, so that its key does not match, or if its key is not
                ``key``; the message is a part of a sentence.
        """
        try:
            record = cls.model_validate_json(data, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["loc"] == ("format",):
                raise NewerError(
                    f"its format needs a newer feddg-bench; this reads {FORMAT}"
                ) from error
            where = ".".join(str(part) for part in first["loc"])
            what = first["msg"].removeprefix("Value error, ")
            raise DataError(f"{where}: {what}" if where else what) from error
        said = {name: getattr(record, name) for name in ("method", "dataset", "protocol", "seed")}
        said["scenario"] = record.scenario.name
        for name, value in said.items():
            if record.settings.get(name) != value:
                raise DataError(
                    f"{name} is {value!r}, but {record.settings.get(name)!r} in its settings"
                )
        numbers = [entry.round for entry in record.rounds]
        if numbers != sorted(set(numbers)):
            raise DataError("rounds: they do not follow one another")
        true = run_key(record.settings, record.method_version)
        if record.key != true:
            raise DataError(f"its settings are those of the run {true}, not of {record.key}")
        if key not in (None, true):
            raise DataError(f"it holds the run {true}, not {key}")
        return record

    def unknown_fields(self) -> list[str]:
        """Return the names of fields that this version does not know."""
        parts: list[tuple[str, RecordPart]] = [("", self), ("data.", self.data)]
        parts += [("environment.", self.environment), *(("rounds.", e) for e in self.rounds[:1])]
        return [f"{at}{name}" for at, part in parts for name in part.model_extra or ()]
