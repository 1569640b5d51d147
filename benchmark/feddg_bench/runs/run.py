"""One training run: build the parts, drive the loop, fill the record."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import feddg_bench
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.files import write_whole
from feddg_bench.common.streams import derive_seed
from feddg_bench.config.keys import canonical_settings, run_key
from feddg_bench.config.layers import Layer, merge, validate
from feddg_bench.config.schema import Resources, RunSettings
from feddg_bench.core.loop import RoundResult, federate
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.core.tasks import TASKS
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.federated import Federation
from feddg_bench.data.locations import cache_dir
from feddg_bench.data.partition import Partition, make_partition, validation_parts
from feddg_bench.data.protocols import Scenario
from feddg_bench.data.splits import Splits, published_splits, read_split_csv, split_by_domain
from feddg_bench.data.store import Progress, Store, known_fingerprint, open_store
from feddg_bench.engine.build import build_method
from feddg_bench.engine.compatibility import check_fit
from feddg_bench.engine.devices import find_device
from feddg_bench.engine.evaluation import evaluate
from feddg_bench.engine.executors import Executor
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.models.backbones import check_image_size
from feddg_bench.plugins import load_method
from feddg_bench.records.record import (
    WHOLE,
    Costs,
    DataRecord,
    EnvironmentRecord,
    PartitionRecord,
    RoundRecord,
    RunRecord,
    ScenarioRecord,
    TimeRecord,
)
from feddg_bench.records.store import ResultsStore
from feddg_bench.runs.checkpoints import load_checkpoint, save_checkpoint


class Report(Protocol):
    """Where a run's progress goes; the command line draws it."""

    def decoding(self, done: int, total: int) -> None:
        """So many of the data set's images are decoded into the store."""

    def begin(self, plan: Plan, done: int | None, record: RunRecord) -> None:
        """A run starts, or goes on from a checkpoint after ``done`` rounds.

        ``record`` holds the rounds that are over, and gets each that follows before `round`.
        """

    def round(self, plan: Plan, result: RoundResult, images: int) -> None:
        """A round ended that trained on ``images`` images."""

    def end(self, plan: Plan, record: RunRecord) -> None:
        """The run's record is saved."""


@dataclass(frozen=True)
class Plan:
    """A run that is settled down to its key.

    Attributes:
        settings: Resolved settings; ``hyper`` holds every value of the method.
        canonical: The same with files by content, as the record keeps them.
        scenario: Domains.
        recipe: Label of where the settings came from.
        version: The method's version.
        key: Name of the record.
    """

    settings: RunSettings
    canonical: Layer
    scenario: Scenario
    recipe: str
    version: int
    key: str


def make_plan(
    layers: list[Layer],
    user: list[Layer],
    scenario: Scenario,
    recipe: str,
    identity: Mapping[str, Sequence[str]] | None = None,
) -> Plan:
    """Merge settings, what the method needs and what the user says, and settle the run's key.

    Args:
        layers: Recipe and names.
        user: What the user says; wins over what the method needs.
        scenario: Domains by role.
        recipe: Label of where the settings came from.
        identity: Names that a data set has only on disk; they enter the key and the record.

    Raises:
        SettingsError: If a setting, one of the method's included, is unknown or out of range.
    """
    named = merge(*layers, *user)
    method = load_method(named["method"])
    merged = merge(*layers, method.needs, *user)
    if merged.get("partition", {}).get("kind") == "pooled":  # one client: there is no K to choose
        merged = merge(merged, {"federation": {"per_round": None}})
    settings = validate(RunSettings, merged)
    hyper = validate(method.Settings, settings.hyper, "hyper.")
    settings = settings.model_copy(update={"hyper": hyper.model_dump(mode="json")})
    canonical = canonical_settings(settings, method.Settings.files)
    if identity:
        canonical["data"]["names"] = {kind: list(names) for kind, names in identity.items()}
    key = run_key(canonical, method.version)
    return Plan(settings, canonical, scenario, recipe, method.version, key)


class RunData:
    """One data set, opened once for all runs of a command."""

    def __init__(self, dataset: DomainDataset, cache: Path | None) -> None:
        self.dataset = dataset
        self.cache = cache_dir(cache)
        self._stores: dict[int, Store] = {}

    def store(self, size: int, progress: Progress | None = None) -> Store:
        """Return the decoded images at a size."""
        if size not in self._stores:
            self._stores[size] = open_store(self.dataset, size, self.cache, progress)
        return self._stores[size]

    def check_same(self, record: RunRecord, where: Path) -> None:
        """Refuse a record or checkpoint that was made from other images than are here.

        The run key says what was computed, not from which copy of a data set.

        Raises:
            DataError: If the contents differ, or the data set cannot be found.
        """
        if known_fingerprint(self.dataset, self.cache) != record.data.fingerprint:
            raise DataError(
                f"{where} was made from other images than the {self.dataset.title} that is here; "
                f"move it away, or give another --results folder or the right --data-root"
            )


def run(
    plan: Plan, data: RunData, executor: Executor, resources: Resources, report: Report
) -> RunRecord:
    """Train, evaluate and record one run, from its checkpoint if there is one.

    Raises:
        FeddgError: If the data, a file or a setting cannot be used.
    """
    results = ResultsStore(resources.results)
    settings = plan.settings
    started = time.time()
    federation, record = open_federation(plan, data, results, report.decoding)
    method, server = open_server(plan, federation, executor, resources)
    checkpoint = results.checkpoint(plan.key)
    seconds_before = 0.0
    if checkpoint.exists():
        state = load_checkpoint(checkpoint)
        server.restore(state["server"])
        record = RunRecord.model_validate(state["record"])
        data.check_same(record, checkpoint)
        seconds_before = record.time.seconds
    record.environment = environment(resources, executor)
    report.begin(plan, server.round if checkpoint.exists() else None, record)

    def keep() -> None:
        record.time = TimeRecord(
            started=record.time.started or _stamp(started),
            finished=_stamp(time.time()),
            seconds=round(seconds_before + time.time() - started, 3),
            peak_memory_mib=executor.peak_memory_mib(),
        )

    for result in federate(
        method,
        server,
        lambda weights: evaluate(
            executor, federation, weights, chunk=settings.evaluation.batch_size
        ),
        rounds=settings.federation.rounds,
        per_round=settings.federation.per_round,
        every=settings.evaluation.every,
    ):
        if result.round == 0:
            record.once = Costs(**_costs(result))
        else:
            record.rounds.append(_entry(result))
        keep()
        last = result.round == settings.federation.rounds
        if not last and result.round % resources.checkpoint_every == 0:
            state = {"server": server.state(), "record": record.as_json()}
            state["plan"] = {"settings": settings.model_dump(mode="json"), "recipe": plan.recipe}
            state["data_root"] = str(resources.data_root) if resources.data_root else None
            save_checkpoint(checkpoint, state)
        if result.round:  # after the checkpoint: a round that was shown is not lost
            images = _images(federation, result.cohort)
            report.round(plan, result, images * settings.train.local_epochs)
    results.save(record)
    checkpoint.unlink(missing_ok=True)
    report.end(plan, record)
    return record


def open_federation(
    plan: Plan, data: RunData, results: ResultsStore, progress: Progress | None = None
) -> tuple[Federation, RunRecord]:
    """Spread the data over clients and splits, and return it with the head of the record."""
    settings, dataset = plan.settings, data.dataset
    method = load_method(settings.method)
    check_fit(settings, method, dataset)
    check_image_size(settings.backbone, settings.data.image_size)
    store = data.store(settings.data.image_size, progress)
    splits = _splits(plan, dataset, store)
    train = splits["train"]
    missing = set(range(len(dataset.classes))) - set(store.labels[train].tolist())
    # A regression has no classes, and published splits are as they are.
    if missing and settings.protocol != "wilds":
        absent = ", ".join(dataset.classes[i] for i in sorted(missing))
        raise DataError(
            f"scenario {plan.scenario.name} of {dataset.name} has no training image of class "
            f"{absent}; check the data folder and the split file"
        )
    seed = derive_seed(settings.seed, "partition")
    partition = make_partition(settings.partition, train, store.domains[train], seed=seed)
    _save_partition(partition, store, dataset, results)
    clients = {
        name: index
        for name, index in zip(partition.clients, partition.indices, strict=True)
        if len(index)
    }
    validation: dict[str, np.ndarray] = {}
    if method.client_validation:
        id_val = splits.get("id_val", np.empty(0, dtype=np.int64))
        clients, validation = validation_parts(
            settings.partition, partition, id_val, store.domains[id_val], seed=seed
        )
    per_round = settings.federation.per_round
    if per_round is not None and per_round > len(clients):
        raise SettingsError(
            f"federation.per_round is {per_round} but only {len(clients)} clients hold images; "
            f"lower --per-round"
        )
    federation = Federation(
        images=Path(str(store.images.filename)),
        size=settings.data.image_size,
        labels=store.labels,
        clients=clients,
        evaluation=_evaluation(splits, dataset, store),
        num_classes=TASKS[dataset.task].outputs(len(dataset.classes)),
        sources=plan.scenario.train,
        domain_ids=_source_ids(plan.scenario.train, dataset)[store.domains],
        validation=validation,
        task=dataset.task,
        metrics=dataset.metrics,
        groups=store.groups,
        group_names=dataset.groups,
        channels=dataset.channels,
        pixels=dataset.pixels,
    )
    sizes = partition.sizes
    record = RunRecord(
        key=plan.key,
        method=settings.method,
        method_version=plan.version,
        dataset=settings.dataset,
        protocol=settings.protocol,
        scenario=ScenarioRecord(
            name=plan.scenario.name,
            train=plan.scenario.train,
            val=plan.scenario.val,
            test=plan.scenario.test,
        ),
        seed=settings.seed,
        recipe=plan.recipe,
        labels={name: str(settings.hyper[name]) for name in method.Settings.labels},
        settings=plan.canonical,
        data=DataRecord(
            fingerprint=store.fingerprint,
            images=_counts(splits, dataset, store),
            task=dataset.task,
            metric=dataset.metrics[0],
        ),
        partition=PartitionRecord(
            hash=partition.digest(),
            clients=len(clients),
            sizes=[int(np.min(sizes)), int(np.median(sizes)), int(np.max(sizes))],
        ),
    )
    return federation, record


def open_server(
    plan: Plan, federation: Federation, executor: Executor, resources: Resources
) -> tuple[Method, Server]:
    """Build the plugin and its workers, and return it with a server that can ask the clients."""
    settings = plan.settings
    method = build_method(settings, federation)
    device = find_device(resources.device)
    executor.start(WorkerSpec(settings, federation, device, resources.threads), method)
    home = device if executor.workers == 1 else "cpu"  # other processes send to the CPU
    server = Server(
        {name: tensor.to(home) for name, tensor in method.state.federated_weights().items()},
        tuple(federation.clients),
        executor,
        seed=settings.seed,
        federation=settings.federation,
        uplink=method.uplink,
        downlink=method.downlink,
    )
    return method, server


def _splits(plan: Plan, dataset: DomainDataset, store: Store) -> Splits:
    settings = plan.settings.data
    wilds = plan.settings.protocol == "wilds"
    published = dataset.scenario_splits(plan.scenario.name) if wilds else dataset.published_splits()
    if wilds and published is not None:
        if settings.split_csv is not None:
            raise SettingsError(
                "protocol wilds takes the published splits and data.split_csv replaces them: "
                "leave --split-csv out, or give --protocol lodo or ltdo"
            )
        return published_splits(published)
    if settings.split_csv is not None:
        return read_split_csv(Path(settings.split_csv), plan.scenario, dataset)
    return split_by_domain(
        plan.scenario,
        store.domains,
        store.labels,
        dataset.domains,
        id_val_fraction=settings.id_val_fraction,
        id_test_fraction=settings.id_test_fraction,
        seed=plan.settings.seed,
        published=published,
    )


def _by_domain(
    splits: Splits, dataset: DomainDataset, store: Store
) -> list[tuple[str, str, np.ndarray]]:
    """Return every non-empty part of a split that lies in one domain, or whole splits as ``all``.

    Domains as small as a writer are not measured each by itself.
    """
    if not dataset.measured_by_domain:
        return [(split, WHOLE, index) for split, index in splits.items()]
    parts = []
    for split, index in splits.items():
        for number, domain in enumerate(dataset.domains):
            part = index[store.domains[index] == number]
            if len(part):
                parts.append((split, domain, part))
    return parts


def _evaluation(
    splits: Splits, dataset: DomainDataset, store: Store
) -> tuple[tuple[str, str, np.ndarray], ...]:
    return tuple(part for part in _by_domain(splits, dataset, store) if part[0] != "train")


def _counts(splits: Splits, dataset: DomainDataset, store: Store) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for split, domain, part in _by_domain(splits, dataset, store):
        counts.setdefault(split, {})[domain] = len(part)
    return counts


def _source_ids(sources: tuple[str, ...], dataset: DomainDataset) -> np.ndarray:
    """Return for each domain of the data set its place among the sources, -1 if it is none."""
    places = {name: place for place, name in enumerate(sources)}
    return np.array([places.get(name, -1) for name in dataset.domains], dtype=np.int64)


def _save_partition(
    partition: Partition, store: Store, dataset: DomainDataset, results: ResultsStore
) -> None:
    path = results.partitions / f"{partition.digest()[:16]}.json"
    if not path.exists():
        value = partition.as_json(store.domains, store.labels, dataset.domains)
        write_whole(path, json.dumps(value).encode())


def _images(federation: Federation, cohort: tuple[str, ...]) -> int:
    return sum(len(federation.clients[name]) for name in cohort)


def _costs(result: RoundResult) -> dict[str, Any]:
    """Return what a round cost, as the record keeps it."""
    ledger = result.ledger
    return {
        "bytes": dict(ledger.bytes),
        "dropped": list(ledger.dropped),
        "seconds": {phase: round(value, 6) for phase, value in ledger.seconds.items()},
    }


def _entry(result: RoundResult) -> RoundRecord:
    return RoundRecord(
        round=result.round,
        cohort=list(result.cohort),
        skipped=result.skipped,
        train=result.ledger.means(),
        evaluation=result.evaluation,
        **_costs(result),
    )


def environment(resources: Resources, executor: Executor) -> EnvironmentRecord:
    """Return what numbers may depend on in their last bits, and nothing that names a machine."""
    import lightning
    import torchvision

    device = find_device(resources.device)
    versions = {"python": platform.python_version(), "feddg_bench": feddg_bench.__version__}
    versions |= {m.__name__: str(m.__version__) for m in (torch, torchvision, lightning)}
    return EnvironmentRecord(
        versions=versions,
        system=f"{platform.system()} {platform.machine()}",
        device=torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
        threads=resources.threads,
        workers=executor.workers,
        commit=_commit(),
    )


def _commit() -> str | None:
    """Return the commit of the source tree this runs from, ``+`` if it is changed."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() or None


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
