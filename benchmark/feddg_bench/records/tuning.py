"""Ledgers of equal tuning: a method's trials, their values and costs, and the chosen trial."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.files import file_name, from_here, shipped
from feddg_bench.records.metrics import METRICS
from feddg_bench.records.record import Hash, Later, Positive, RunRecord
from feddg_bench.records.rules import split_metric
from feddg_bench.records.sources import (
    FOLDERS,
    Packable,
    find_sources,
    pack,
    read_json,
    read_record,
    unpack,
    write_record,
)
from feddg_bench.records.statistics import FEWEST as FEWEST_SEEDS
from feddg_bench.records.statistics import clear_leads, mean_and_std, most_losses

logger = logging.getLogger(__name__)

FOLDER = "tuning"
"""Subfolder of a results folder that holds ledgers and the trials' records."""
Rule = Literal["mean_last_fifth", "paired", "paired_contenders", "raced"]
"""Rule that chooses a trial. A trial's value is the mean over the last fifth of the evaluated
rounds, at least `FEWEST`, of the key metric on held-out images of the training domains: single
rounds fluctuate, and tables show the last. ``mean_last_fifth``, the first rule, chooses the largest
mean over seeds. ``paired_contenders`` chooses the first trial, which is the recipe's, unless
another is significantly better over at least three seeds (see `clear_leads`); its noise is that of
the contenders, the trials that are better with at least one seed. ``paired``, the second rule, took
the noise of all trials, so that of two alternatives a diverging one hid the other. ``raced``
compares the trials seed by seed, and stops one when it has lost too many seeds to lead clearly (see
`is_out`); its contenders are the trials that were not stopped."""
RULE: Rule = "paired_contenders"
"""Rule of new ledgers without a race."""
FEWEST = 3
"""Minimum number of evaluated rounds in that mean, if there are so many."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Setting = Annotated[str, Field(pattern=r"^(train|federation|hyper)\.[a-z0-9_]+$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _several(values: Any, one: str, several: str) -> Any:
    """Convert values from the first format of ledgers, which had one seed."""
    if not isinstance(values, dict) or one not in values:
        return values
    return {name: v for name, v in values.items() if name != one} | {several: [values[one]]}


class Trial(_Part):
    """One trial."""

    settings: dict[Setting, bool | int | float | str]  # by dotted key; empty for the recipe's own
    keys: tuple[Hash, ...]  # of its runs, one per seed; the first ones if a race stopped it
    id_val: Finite | None  # see `Rule`: the mean over seeds; `None` if a run failed
    values: Later[tuple[Finite, ...]] = None  # the same per seed; absent if a run failed
    lead: Later[Finite] = None  # mean difference of `values` from the first trial's
    standard_error: Later[Positive] = None  # of `lead`, over seeds
    seconds: Positive | None  # total of its runs
    error: str | None = None  # reason why a run failed

    @model_validator(mode="before")
    @classmethod
    def _one_seed(cls, values: Any) -> Any:
        return _several(values, "key", "keys")


class TuningLedger(_Part):
    """The trials of one method in one setup, and the chosen trial."""

    format: Literal[1, 2] = 2
    method: str
    dataset: str
    protocol: str
    recipe: str
    scenario: str
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]  # of all trials, unless stopped
    given: tuple[str, ...]  # ``KEY=VALUE`` of all trials, in addition to the recipe
    metric: str  # the data set's key metric
    rule: Rule = "mean_last_fifth"
    trials: tuple[Trial, ...]
    chosen: int | None  # position of the chosen trial; `None` if all failed

    @model_validator(mode="before")
    @classmethod
    def _one_seed(cls, values: Any) -> Any:
        return _several(values, "seed", "seeds")

    @model_validator(mode="after")
    def _won(self) -> TuningLedger:
        low, high = METRICS[self.metric].range if self.metric in METRICS else (-math.inf, math.inf)
        for number, trial in enumerate(self.trials):
            if trial.id_val is not None and not low <= trial.id_val <= high:
                raise ValueError(f"id_val of trial {number} is {trial.id_val}, no {self.metric}")
        found = winners(self.trials, self.rule)
        if self.chosen not in (found or (None,)):
            raise ValueError(f"chosen is {self.chosen}, but trial {found[:1]} won")
        return self

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """Settings of the chosen trial."""
        return {} if self.chosen is None else dict(self.trials[self.chosen].settings)

    def save(self, root: Path) -> Path:
        """Write the ledger to a results folder atomically, and return its path."""
        path = ledger_path(root, self.dataset, self.protocol, self.recipe, self.method)
        write_record(path, self.model_dump(mode="json"))
        return path


def worth(record: RunRecord) -> float | None:
    """Return the value by which trials are compared, see `Rule`; ``None`` if not measured."""
    evaluations = [entry.evaluation for entry in record.rounds if entry.evaluation]
    last = evaluations[-max(FEWEST, len(evaluations) // 5) :]
    values = [split_metric(evaluation, "id_val", record.metric.name) for evaluation in last]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if values and len(known) == len(values) else None


def is_out(differences: Sequence[float], alternatives: int, seeds: int) -> bool:
    """Return whether a race stops a trial, which then cannot lead clearly any more.

    Args:
        differences: From the first trial, of the seeds so far; NaN counts as a loss.
        alternatives: Number of trials beside the first.
        seeds: Number of seeds of a whole trial.
    """
    wins = sum(difference > 0 for difference in differences)
    return len(differences) - wins > most_losses(alternatives, seeds)


def with_leads(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return trials with their leads over the first, where both have values of a seed."""
    first = trials[0].values
    found = [trials[0]]
    for trial in trials[1:]:
        lead: dict[str, float | None] = {}
        if first is not None and trial.values is not None:
            pairs = list(zip(trial.values, first, strict=False))  # a race may stop either first
            mean, std = mean_and_std([a - b for a, b in pairs])
            error = None if std is None else std / math.sqrt(len(pairs))
            lead = {"lead": mean, "standard_error": error}
        found.append(trial.model_copy(update=lead))
    return tuple(found)


def winners(trials: Sequence[Trial], rule: Rule) -> tuple[int, ...]:
    """Return the positions of the trials that a rule can choose, in order.

    There are several if they are tied, and none if all trials failed. If the first trial failed, no
    other can be compared with it, and all rules choose the largest mean over the most seeds.
    """
    means = {i: trial.id_val for i, trial in enumerate(trials) if trial.id_val is not None}
    most = max((len(trials[i].keys) for i in means), default=0)
    means = {i: mean for i, mean in means.items() if len(trials[i].keys) == most}
    if rule != "mean_last_fifth" and 0 in means:
        means = {i: means[i] for i in _ahead(trials, rule)} or {0: means[0]}
    highest = max(means.values(), default=0)
    # Values that differ only by rounding are tied, such as means of the same counts of images
    # summed in another order.
    return tuple(i for i, value in means.items() if math.isclose(value, highest, rel_tol=1e-12))


def _ahead(trials: Sequence[Trial], rule: Rule) -> list[int]:
    """Return the positions of the trials that are significantly better than the first."""
    first, *others = (None if trial.values is None else np.array(trial.values) for trial in trials)
    rivals = {i: values for i, values in enumerate(others, 1) if values is not None}
    if first is None or not rivals or len(first) < FEWEST_SEEDS:
        return []
    seeds = len(first)
    differences = np.full((len(rivals), seeds), np.nan)  # a trial without all seeds was stopped
    for row, values in zip(differences, rivals.values(), strict=True):
        if len(values) == seeds:
            row[:] = values - first
    contenders: NDArray[np.bool_] | None = None
    if rule == "paired_contenders":
        contenders = np.asarray((differences > 0).any(axis=1))
    elif rule == "raced":
        contenders = np.array([not is_out(row.tolist(), len(others), seeds) for row in differences])
    clear = clear_leads(differences, contenders)
    return [i for i, ahead in zip(rivals, clear, strict=True) if ahead]


def ledger_path(root: Path, dataset: str, protocol: str, recipe: str, method: str) -> Path:
    """Return the path of a method's ledger in a results folder, unless it is packed."""
    frame = file_name(dataset, protocol, recipe)
    return root / FOLDER / frame / f"{file_name(method)}.json"


def find_ledger(
    root: Path, dataset: str, protocol: str, recipe: str, method: str
) -> tuple[Path, TuningLedger] | None:
    """Return a method's ledger in a results folder and its file, single or packed, if it exists.

    Raises:
        DataError: If its file cannot be read.
    """
    single = ledger_path(root, dataset, protocol, recipe, method)
    path = single if single.exists() else _packed(single)
    for ledger in _read(path) if path.exists() else ():
        if ledger.method == method:
            names = ledger.dataset, ledger.protocol, ledger.recipe
            if names != (dataset, protocol, recipe):
                raise DataError(f"{path} is the ledger of {', '.join(names)}: move it there")
            return path, ledger
        if path == single:
            raise DataError(f"{path} is the ledger of {ledger.method}: move it there")
    return None


def load_ledger(root: Path, dataset: str, protocol: str, recipe: str, method: str) -> TuningLedger:
    """Return a method's ledger from a results folder, else from those that come with the suite.

    ``recipe`` is a name or the path of a file.

    Raises:
        SettingsError: If there is no ledger, or all its trials failed.
        DataError: If its file cannot be read.
    """
    name = Path(recipe).stem
    for folder in (root, FOLDERS[-1], shipped("results")):
        if there := find_ledger(folder, dataset, protocol, name, method):
            path, ledger = there
            if ledger.chosen is None:
                raise SettingsError(
                    f"every trial of {method} failed, see {path}: it has no tuned settings"
                )
            return ledger
    raise SettingsError(
        f"{method} was not tuned on {dataset}, {protocol}, recipe {name}: there is no "
        f"{from_here(ledger_path(root, dataset, protocol, name, method))}; run feddg-bench tune "
        f"--methods {method} --dataset {dataset} --protocol {protocol} --recipe {recipe} "
        f"--results {from_here(root)} first, or take another protocol's with tuned=PROTOCOL"
    )


def _packables(root: Path) -> tuple[list[Packable], dict[Path, str]]:
    found, faults = list[Packable](), dict[Path, str]()
    singles = sorted({path.parent for path in (root / FOLDER).glob("*-*-*/*.json")})
    files = [s for folder in singles for s in find_sources(folder, ".json", packed=False)]
    for source in files + find_sources(root / FOLDER, ".jsonl", packed=True):
        try:
            ledgers = _read(source.path)
        except DataError as error:
            logger.warning("%s", error)
            faults |= {source.path: "it is no ledger"} if source.packed else {}
            continue
        for line, ledger in enumerate(ledgers):
            names = ledger.dataset, ledger.protocol, ledger.recipe, ledger.method
            single = ledger_path(root, *names) if source.packed else source.path
            packed = source.path if source.packed else _packed(source.path)
            key = f"{packed.name}: {ledger.method}"
            text = partial(source.text, line)
            found.append(Packable(source, key, (ledger.method,), single, packed, text))
    return found, faults


def pack_ledgers(root: Path) -> list[Path]:
    """Move single ledgers into packed files, one per data set, protocol and recipe; see `pack`."""
    packed = pack(partial(_packables, root))
    for path in packed:
        with suppress(OSError):  # it holds something else
            path.with_suffix("").rmdir()
    return packed


def unpack_ledgers(root: Path) -> list[Path]:
    """Move packed ledgers into single files; see `sources.unpack`."""
    return unpack(partial(_packables, root))


def _packed(single: Path) -> Path:
    """Return the packed file, one per setup, that a single ledger belongs to."""
    return single.parent.with_name(f"{single.parent.name}.jsonl")


def _read(path: Path) -> list[TuningLedger]:
    """Return the ledgers of a file, single or packed."""
    try:
        text = read_record(path)
        parts = text.splitlines() if path.suffix == ".jsonl" else [text]
        return [TuningLedger.model_validate(read_json(part)) for part in parts]
    except (OSError, DataError, ValidationError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise DataError(
            f"{path} is no ledger of tuning ({first.removeprefix('Value error, ')}); delete it and "
            f"run feddg-bench tune again, which makes it from the trials' records"
        ) from error
