"""Setup of a run from its plan: images, clients, splits, the module, the server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import cache_dir
from feddg_bench.common.portable import cpu_flags
from feddg_bench.common.titles import counted
from feddg_bench.config.schema import DataSettings, Resources, RunSettings
from feddg_bench.core.loop import RoundResult
from feddg_bench.core.messages import Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.data.dataset import DECODING, DomainDataset
from feddg_bench.data.feature_store import Encoding, FeatureStore, open_features
from feddg_bench.data.federated import Federation, count_images, imbalance, make_federation, spread
from feddg_bench.data.image_store import OnDecoded, Store, known_fingerprint, open_store
from feddg_bench.engine.compatibility import check_image_size, check_start
from feddg_bench.engine.construction import build_run_method
from feddg_bench.engine.devices import find_devices
from feddg_bench.engine.executors import Executor
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.plugins import check_outline, given_method, load_method
from feddg_bench.protection.guarantee import guarantee, open_protection
from feddg_bench.records.record import DataRecord, PartitionRecord, RunRecord, ScenarioRecord
from feddg_bench.runs.request import Plan, other_images

logger = logging.getLogger(__name__)


class RunData:
    """Decoded images, each data set opened once for all runs of a command."""

    def __init__(self, cache: Path | None) -> None:
        self.cache = cache_dir(cache)
        self._stores: dict[tuple[Any, ...], Store] = {}
        self._features: dict[tuple[Any, ...], FeatureStore] = {}

    def store(
        self, dataset: DomainDataset, data: DataSettings, progress: OnDecoded | None = None
    ) -> Store:
        """Return a data set's images decoded as settings say."""
        how = dataset.name, dataset.settings, data.image_size, *(getattr(data, x) for x in DECODING)
        if how not in self._stores:
            decoded = dataset.decoded(data)
            self._stores[how] = store = open_store(decoded, data.image_size, self.cache, progress)
            if len(store.unreadable):
                paths = dataset.records().paths
                logger.warning(
                    f"{dataset.title}: cannot decode {len(store.unreadable):,} of "
                    f"{counted(len(paths), 'image')}, which data.skip_unreadable leaves out, such "
                    f"as {paths[store.unreadable[0]]}"
                )
        return self._stores[how]

    def features(self, dataset: DomainDataset, encoding: Encoding) -> FeatureStore:
        """Return the features that a run uses instead of a data set's images."""
        how = dataset.name, dataset.settings, encoding
        if how not in self._features:
            path = encoding.find(dataset, self.cache)
            self._features[how] = open_features(
                path, len(dataset.records().paths), skipped=encoding.data.skip_unreadable
            )
        return self._features[how]

    def check_same(
        self, dataset: DomainDataset, encoding: Encoding | None, record: RunRecord, where: Path
    ) -> None:
        """Refuse a record or checkpoint that was made from other images than those here.

        The run key identifies the computation, not the copy of a data set.

        Raises:
            DataError: If the contents differ, or the data set cannot be found.
        """
        if encoding is None:
            here = known_fingerprint(dataset, self.cache)
        else:
            here = self.features(dataset, encoding).fingerprint
        if here != record.data.fingerprint:
            raise other_images(where, dataset, "features" if encoding else "images")


@dataclass
class Run:
    """A run in progress, as the driver and its observers see it.

    Attributes:
        plan: Plan of the run.
        federation: Images, clients and splits.
        method: The module; its server half runs in this process.
        server: Global model and clients.
        executor: Executor of the clients' tasks.
        spec: Specification that a worker is built from.
        private: Private state of a client that has not trained yet.
        record: The run's record so far; ``None`` for a run on synthetic images.
        partition: Returns the data of each client as JSON values.
        done: Rounds completed before the run was resumed from a checkpoint; ``None`` if it is new.
    """

    plan: Plan
    federation: Federation
    method: Method
    server: Server
    executor: Executor
    spec: WorkerSpec
    private: Weights
    record: RunRecord | None = None
    partition: Callable[[], dict[str, Any]] = dict
    done: int | None = None

    def images(self, result: RoundResult) -> int:
        """Return the number of images that a round's clients trained on, over all local epochs."""
        once = sum(len(self.federation.clients[name]) for name in result.cohort)
        return once * self.plan.settings.train.local_epochs


def open_run(
    plan: Plan,
    data: RunData,
    executor: Executor,
    resources: Resources,
    progress: OnDecoded | None = None,
) -> Run:
    """Decode images if needed, partition them over clients, and build the module."""
    federation, record, partition = open_federation(plan, data, progress)
    run = start(plan, federation, executor, resources)
    check_outline(plan.settings.method, type(run.method))
    record.privacy = guarantee(plan.settings, type(run.method), len(federation.clients))
    run.record, run.partition = record, partition
    return run


def start(plan: Plan, federation: Federation, executor: Executor, resources: Resources) -> Run:
    """Build a run's module and workers, and a server that can reach the clients."""
    settings = plan.settings
    method = build_run_method(settings, federation)
    check_start(settings, method, len(federation.clients))
    # A Ray cluster has devices of its own, which its executor knows.
    device = "cpu" if resources.engine == "ray" else find_devices(resources.device)[0]
    if device == "cpu" and settings.train.precision == "bf16-mixed" and resources.engine != "ray":
        warn_of_slow_bf16(frozenset(cpu_flags()), settings.portable)
    plugin = given_method(settings.method)
    spec = WorkerSpec(settings, federation, device, resources.threads, plugin=plugin)
    executor.start(spec, method)
    home = device if executor.workers == 1 else "cpu"  # other processes send to the CPU
    server = open_server(settings, federation, method, executor, home)
    private = method.state.private_weights()
    return Run(plan, federation, method, server, executor, spec, private)


@cache
def warn_of_slow_bf16(flags: frozenset[str], portable: bool) -> None:
    """Warn, once per process, if a CPU with these instructions computes bf16 slowly.

    Without AVX512-BF16 or AMX an evaluation took 7 to 24 times as long as in float32. If the
    instructions are not known, there is no warning.
    """
    lacks = "--portable does without" if portable else "this CPU has neither"
    if portable or (flags and not flags & {"avx512_bf16", "amx_bf16"}):
        logger.warning(
            "%s AVX512-BF16 %s AMX: train.precision=bf16-mixed is several times slower here than "
            "train.precision=32-true",
            *(lacks, "and" if portable else "nor"),
        )


def open_server(
    settings: RunSettings, federation: Federation, method: Method, executor: Executor, device: str
) -> Server:
    """Return a server that can reach all clients, with the module's weights on a device."""
    return Server(
        {name: tensor.to(device) for name, tensor in method.state.federated_weights().items()},
        tuple(federation.clients),
        executor,
        seed=settings.seed,
        federation=settings.federation,
        uplink=method.sends(method.settings),
        downlink=method.downlink,
        protection=open_protection(settings, method, len(federation.clients)),
    )


def open_federation(
    plan: Plan, data: RunData, progress: OnDecoded | None = None
) -> tuple[Federation, RunRecord, Callable[[], dict[str, Any]]]:
    """Return a plan's data spread over clients and splits, and `Run.record` and `Run.partition`."""
    settings, dataset = plan.settings, plan.dataset
    check_image_size(settings.backbone, settings.data.image_size)
    method = load_method(settings.method)
    features = None
    if encoding := Encoding.of(settings):
        features = data.features(dataset, encoding)
        if method.needs_text and not len(features.text):
            raise SettingsError(
                f"{settings.method} needs features of the classes' names, which {features.path} "
                f"lacks: encode with open_clip:ARCH/TAG, or import a file with the tensor text"
            )
    store = features or data.store(dataset, settings.data, progress)
    parts = spread(
        settings,
        dataset,
        plan.scenario,
        validation=method.client_validation,
        without=store.unreadable,
    )
    federation = make_federation(
        store.path,
        settings.side,
        dataset,
        plan.scenario,
        parts,
        settings.evaluation.splits,
        settings.evaluation.metrics,
    )
    if features:
        federation = features.replacing_images(federation)
    partition = parts.partition
    sizes = partition.sizes
    record = RunRecord(
        key=plan.key,
        method=settings.method,
        method_version=plan.version,
        dataset=settings.dataset,
        protocol=settings.protocol,
        scenario=ScenarioRecord.model_validate(plan.scenario, from_attributes=True),
        seed=settings.seed,
        recipe=plan.recipe,
        labels={name: str(settings.hyper[name]) for name in method.Settings.labels},
        tuned=plan.tuned,
        settings=plan.canonical,
        data=DataRecord(
            fingerprint=store.fingerprint,
            images=count_images(parts.splits, dataset)
            | {
                split: {name: len(index) for name, index in held.items()}
                for split, held in parts.of_clients.items()
            },
            task=dataset.task,
            metric=dataset.metrics[0],
            label=dataset.label or None,
            unreadable=len(store.unreadable) or None,
            imbalance=imbalance(parts.splits.get("test", np.empty(0, np.int64)), dataset),
            answers=dataset.answers(plan.scenario.train, plan.scenario.test) or None,
            encoder=features.weights if features else None,
        ),
        partition=PartitionRecord(
            hash=partition.digest(),
            clients=len(parts.clients),
            sizes=[int(np.min(sizes)), int(np.median(sizes)), int(np.max(sizes))],
        ),
    )

    def who_holds_what() -> dict[str, Any]:
        listed = dataset.records()
        return partition.as_json(listed.domains, listed.labels, dataset.domains)

    return federation, record, who_holds_what
