"""Splits and clients of a run, made from settings, labels and domains; no pixel is read.

This module also counts images and warns about the counts.

It needs no PyTorch, so that unsuitable settings are rejected before any decoding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.streams import derive_seed, generator
from feddg_bench.config.schema import RunSettings
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.partition import Partition, make_partition, validation_parts
from feddg_bench.data.protocols import Scenario
from feddg_bench.data.splits import Splits, published_splits, read_split_csv, split_by_domain
from feddg_bench.records.metrics import CLIENT_SPLITS, METRICS, WHOLE, metrics_of


class ImageFacts(Protocol):
    """Properties of images that both a data set and a federation declare."""

    @property
    def task(self) -> str:
        """``classification`` or ``regression``."""

    @property
    def channels(self) -> int:
        """Channels of an image."""

    @property
    def pixels(self) -> str:
        """Type of the stored pixels: ``uint8`` or ``float16``."""


class Images(NamedTuple):
    """Properties that a method needs of images that belong to no data set."""

    task: str
    channels: int
    pixels: str = "uint8"


class Spread(NamedTuple):
    """The images of a data set by split and by client, as data-set indices."""

    splits: Splits  # split -> its images
    partition: Partition  # the training images of all clients, empty ones included
    clients: dict[str, np.ndarray]  # name -> training images of every client that holds any
    validation: dict[str, np.ndarray]  # the same for validation images, if the method needs them
    # One of `CLIENT_SPLITS` -> client -> images on which it is evaluated.
    of_clients: dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Federation:
    """Location of the images and their clients; small enough to send to every process."""

    images: Path | np.ndarray  # a store's file to map, or [N, size, size, channels] of `pixels`
    size: int  # side of the images in pixels
    labels: np.ndarray  # class ids, int64 [N], or targets of a regression, float32 [N]
    clients: dict[str, np.ndarray]  # client name to the indices of its training images
    evaluation: tuple[tuple[str, str, np.ndarray], ...]  # split, domain and indices of each part
    num_classes: int  # C, or 1 for a regression: the number of a model's outputs
    sources: tuple[str, ...] = ()  # names of the training domains
    # Domain of each image, int64 [N]: an index into `sources`, -1 for others.
    domain_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    validation: dict[str, np.ndarray] = field(default_factory=dict)  # if the method needs it
    of_clients: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  # see `Spread`
    task: str = "classification"  # `classification` or `regression`
    metrics: tuple[str, ...] = ("accuracy",)  # to measure, the first is the key metric
    # Group of each image, int64 [N]: index into `group_names`, -1 for none; empty without groups.
    groups: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    group_names: tuple[str, ...] = ()  # names of the groups
    channels: int = 3  # of an image
    pixels: str = "uint8"  # `uint8`, or `float16` for values that are normalised already
    views: int = 0  # V, if `images` is a file of features [N, V, D]: then `size` is 1, `channels` D
    offset: int = 0  # bytes before the images in their file
    # Text features of the classes [C, D], and the scale of cosines; empty without a text encoder.
    text: np.ndarray = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))
    logit_scale: float = 1.0

    def domains_of(self, client: str) -> np.ndarray:
        """Return the domain id of each of a client's training images, in the client's order."""
        index = self.clients[client]
        return self.domain_ids[index] if len(self.domain_ids) else np.full(len(index), -1)

    def main_metric(self, index: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
        """Return the task's main metric of predictions for some images, and ``images``."""
        metric = METRICS[metrics_of(self.task)[0]]
        assert metric.function is not None  # noqa: S101 - a main metric is measured
        return {
            metric.name: metric.function(self.labels[index], predictions),
            "images": len(index),
        }


def spread(
    settings: RunSettings,
    dataset: DomainDataset,
    scenario: Scenario,
    *,
    validation: bool = False,
    without: NDArray[np.int64] | tuple[()] = (),
) -> Spread:
    """Spread a data set over splits and clients.

    The data set is only listed, not read. With ``validation``, clients keep validation images
    (`feddg_bench.core.method.Method.client_validation`). The images ``without`` are left out.

    Raises:
        SettingsError: If the settings ask for more clients than there are images for.
        DataError: If the split file does not fit, or a class has no training image.
    """
    records = dataset.records()
    splits = _splits(settings, dataset, scenario)
    if len(without):
        splits = {name: index[~np.isin(index, without)] for name, index in splits.items()}
    held = [name for name, index in splits.items() if name != "train" and len(index)]
    if lacking := [name for name in settings.evaluation.splits if name not in held]:
        raise SettingsError(
            f"evaluation.splits names {', '.join(lacking)}, but scenario {scenario.name} of "
            f"{dataset.name} has no such images; there are: {', '.join(held)}"
        )
    if settings.evaluation.metrics and dataset.task != "classification":
        raise SettingsError(
            f"evaluation.metrics names {', '.join(settings.evaluation.metrics)}, but "
            f"{dataset.title} is a {dataset.task}, which has no classes: leave it out"
        )
    train = splits["train"]
    missing = set(range(len(dataset.classes))) - set(records.labels[train].tolist())
    # A regression has no classes, and published splits are taken as they are.
    if missing and settings.protocol != "wilds":
        absent = ", ".join(dataset.classes[label] for label in sorted(missing))
        raise DataError(
            f"scenario {scenario.name} of {dataset.name} has no training image of class "
            f"{absent}; check the data folder and the split file"
        )
    seed = settings.partition.seed
    if seed is None:
        seed = derive_seed(settings.seed, "partition")
    ids = records.domains
    if settings.partition.rounding == "reference" and dataset.reference_domains:
        places = [dataset.reference_domains.index(name) for name in dataset.domains]
        ids = np.array(places)[records.domains]
    partition = make_partition(
        settings.partition, train, ids[train], records.labels[train], seed=seed
    )
    pairs = zip(partition.clients, partition.indices, strict=True)
    clients = {name: index for name, index in pairs if len(index)}
    of_clients: dict[str, dict[str, np.ndarray]] = {}
    if settings.federation.unseen_clients or settings.data.client_test_fraction:
        clients, of_clients = _of_clients(settings, clients)
        left = train[np.isin(train, np.concatenate([*clients.values()]))]
        asked = {
            "data.client_test_fraction": settings.data.client_test_fraction,
            "federation.unseen_clients": settings.federation.unseen_clients,
        }
        why = [f"{name}={value:g}" for name, value in asked.items() if value]
        for names, each in ((dataset.domains, ids), (dataset.classes, records.labels)):
            if names and (lost := {*each[train].tolist()} - {*each[left].tolist()}):
                raise SettingsError(
                    f"no training image of {', '.join(names[n] for n in sorted(lost))} is left "
                    f"with {' and '.join(why)}: lower {'both' if why[1:] else 'it'}"
                )
        splits = {**splits, "train": left}
        none = np.empty(0, dtype=np.int64)
        own = tuple(clients.get(name, none) for name in partition.clients)
    held_out: dict[str, np.ndarray] = {}
    if validation:
        id_val = splits.get("id_val", np.empty(0, dtype=np.int64))
        shown = replace(partition, indices=own) if of_clients else partition
        clients, held_out = validation_parts(
            settings.partition, shown, id_val, ids[id_val], seed=seed
        )
    per_round = settings.federation.per_round
    if per_round is not None and per_round > len(clients):
        raise SettingsError(
            f"federation.per_round is {per_round}, more than the clients that "
            f"{'train' if of_clients else 'hold images'} ({len(clients)}); lower --per-round"
        )
    return Spread(splits, partition, clients, held_out, of_clients)


def _of_clients(
    settings: RunSettings, clients: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Return the training images of the clients that train, and `Spread.of_clients`."""
    names, share = [*clients], settings.data.client_test_fraction
    count = settings.federation.unseen_clients
    if count >= len(names):
        raise SettingsError(
            f"federation.unseen_clients is {count}, but of the clients that hold images "
            f"({len(names)}) at least one must train; lower it"
        )
    draws = generator(settings.seed, "unseen clients")
    apart = {names[n] for n in draws.choice(len(names), count, replace=False)}
    unseen = {name: index for name, index in clients.items() if name in apart}
    training, tests = {}, {}
    for name, index in clients.items():
        if name in apart:
            continue
        order = generator(settings.seed, "client test", name).permutation(len(index))
        held = min(max(1, round(share * len(index))), len(index) - 1) if share else 0
        training[name] = index[np.sort(order[held:])]
        if held:
            tests[name] = index[np.sort(order[:held])]
    found = zip(CLIENT_SPLITS, (tests, unseen), strict=True)
    return training, {split: parts for split, parts in found if parts}


def _splits(settings: RunSettings, dataset: DomainDataset, scenario: Scenario) -> Splits:
    records = dataset.records()
    wilds = settings.protocol == "wilds"
    published = dataset.scenario_splits(scenario.name) if wilds else dataset.published_splits()
    split_csv = settings.data.split_csv
    if wilds and published is not None:
        if split_csv is not None:
            raise SettingsError(
                "protocol wilds takes the published splits and data.split_csv replaces them: "
                "leave --split-csv out, or give --protocol lodo or ltdo"
            )
        return published_splits(published)
    if split_csv is not None:
        reference = settings.partition.rounding == "reference"  # deals images in file order
        return read_split_csv(Path(split_csv), scenario, dataset, in_file_order=reference)
    return split_by_domain(
        scenario,
        records.domains,
        records.labels,
        dataset.domains,
        id_val_fraction=settings.data.id_val_fraction,
        id_test_fraction=settings.data.id_test_fraction,
        seed=settings.seed,
        published=published,
    )


def measured_parts(splits: Splits, dataset: DomainDataset) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield split, domain and images of every separately measured part, training included.

    A part is the non-empty set of a split's images in one domain. If domains are as small as single
    writers, it is the whole split instead, and its domain is `WHOLE`.
    """
    domains = dataset.records().domains
    for split, index in splits.items():
        if not dataset.measured_by_domain:
            yield split, WHOLE, index
            continue
        for number, name in enumerate(dataset.domains):
            part = index[domains[index] == number]
            if len(part):
                yield split, name, part


def count_images(splits: Splits, dataset: DomainDataset) -> dict[str, dict[str, int]]:
    """Return the number of images in every measured part, by split and domain."""
    counts: dict[str, dict[str, int]] = {}
    for split, domain, part in measured_parts(splits, dataset):
        counts.setdefault(split, {})[domain] = len(part)
    return counts


BALANCED = 10
"""Largest ratio of images of the largest to the smallest class that counts as balanced. Above it,
macro F1 is shown next to accuracy."""


def imbalance(index: np.ndarray, dataset: DomainDataset) -> float | None:
    """Return the ratio of images of the largest class to the smallest non-empty class.

    ``None`` up to `BALANCED`, and for a regression.
    """
    if not dataset.classes:
        return None
    counts = np.bincount(dataset.records().labels[index].astype(np.int64))
    counts = counts[counts > 0]
    ratio = float(counts.max() / counts.min()) if len(counts) else 1.0
    return ratio if ratio > BALANCED else None


FEW = 50
"""Test domains with fewer images give a warning: one image changes accuracy by over 2 points."""
RATIO = 100
"""Largest ratio of two classes' image counts without a warning."""
_SHOWN = 5


def cautions(
    counts: NDArray[np.int64],
    domains: Sequence[str],
    classes: Sequence[str],
    tested: Collection[str],
) -> Iterator[str]:
    """Yield one warning each about tiny test domains, missing classes and imbalanced classes.

    Args:
        counts: Images of each class in each domain, [D, C].
        domains: Names of the domains.
        classes: Names of the classes; empty for a regression.
        tested: Names of the test domains.
    """
    totals = dict(zip(domains, counts.sum(axis=1).tolist(), strict=True))
    tiny = {name: total for name, total in totals.items() if name in tested and 0 < total < FEW}
    if tiny:
        named = _some([f"{name} ({total})" for name, total in tiny.items()])
        points = 100 / min(tiny.values())
        yield (
            f"test domains with fewer than {FEW} images: {named}; a single image changes "
            f"accuracy by up to {points:.1f} points"
        )
    if not classes:
        return
    lacking = {
        name: [kind for kind, count in zip(classes, row, strict=True) if not count]
        for name, row in zip(domains, counts.tolist(), strict=True)
    }
    missing = [
        f"{name} has no {', no '.join(kinds[:_SHOWN])}" for name, kinds in lacking.items() if kinds
    ]
    if missing:
        yield f"classes missing from a domain: {_some(missing, '; ')}"
    most, least, where = max(
        (
            _extremes(row, place)
            for place, row in [("", counts.sum(axis=0)), *zip(domains, counts, strict=True)]
        ),
        key=lambda case: case[0][1] / case[1][1],
    )
    if most[1] > RATIO * least[1]:
        inside = f" in domain {where}" if where else ""
        yield (
            f"classes are imbalanced {most[1] / least[1]:,.0f}:1{inside} "
            f"({classes[most[0]]} {most[1]:,} images, {classes[least[0]]} {least[1]:,}): "
            f"accuracy favours the large ones, so compare macro F1"
        )


def _extremes(row: NDArray[np.int64], where: str) -> tuple[tuple[int, int], tuple[int, int], str]:
    """Return (class, images) of the largest and smallest non-empty class, and ``where``."""
    present = np.flatnonzero(row)
    if not len(present):
        return (0, 1), (0, 1), where
    most, least = int(present[row[present].argmax()]), int(present[row[present].argmin()])
    return (most, int(row[most])), (least, int(row[least])), where


def _some(texts: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else ""
    return between.join(texts[:_SHOWN]) + more


def make_federation(
    images: Path | np.ndarray,
    size: int,
    dataset: DomainDataset,
    scenario: Scenario,
    parts: Spread,
    measured: Collection[str] = (),
    metrics: Collection[str] = (),
) -> Federation:
    """Return the federation that the workers receive.

    ``images`` is the store's file, or its array; ``measured`` names the splits to evaluate, all but
    ``train`` if it is empty, and ``metrics`` those to measure beside the data set's.
    """
    records = dataset.records()
    places = {name: place for place, name in enumerate(scenario.train)}
    source_ids = np.array([places.get(name, -1) for name in dataset.domains], dtype=np.int64)
    measured = measured or [name for name in parts.splits if name != "train"]
    return Federation(
        images=images,
        size=size,
        labels=records.labels,
        clients=parts.clients,
        evaluation=tuple(p for p in measured_parts(parts.splits, dataset) if p[0] in measured),
        num_classes=1 if dataset.task == "regression" else len(dataset.classes),
        sources=scenario.train,
        domain_ids=source_ids[records.domains],
        validation=parts.validation,
        of_clients=parts.of_clients,
        task=dataset.task,
        metrics=tuple(dict.fromkeys((*dataset.metrics, *metrics))),
        groups=np.empty(0, dtype=np.int64) if records.groups is None else records.groups,
        group_names=dataset.groups,
        channels=dataset.channels,
        pixels=dataset.pixels,
    )


def synthetic_federation(
    clients: int,
    per_client: int,
    size: int,
    num_classes: int,
    *,
    like: ImageFacts | None = None,
) -> Federation:
    """Return equal-sized clients with random images, only for measurements; nothing is held out.

    ``size`` is in pixels. Task, channels and pixel type are those of ``like``; by default, RGB
    images are classified.
    """
    task, channels, pixels = "classification", 3, "uint8"
    if like is not None:
        task, channels, pixels = like.task, like.channels, like.pixels
    rng = np.random.default_rng(0)
    count = clients * per_client
    shape = (count, size, size, channels)
    images = (
        rng.integers(0, 256, shape, dtype=np.uint8)
        if pixels == "uint8"
        else rng.standard_normal(shape, dtype=np.float32).astype(pixels)
    )
    labels = (
        rng.integers(0, num_classes, count)
        if task == "classification"
        else rng.standard_normal(count, dtype=np.float32)
    )
    width = len(str(clients - 1))
    parts = np.arange(count).reshape(clients, per_client)
    names = {f"client_{i:0{width}}": part for i, part in enumerate(parts)}
    return Federation(
        images,
        size,
        labels,
        names,
        (),
        1 if task == "regression" else num_classes,
        sources=("synthetic",),
        domain_ids=np.zeros(count, dtype=np.int64),
        validation={name: part[: max(1, per_client // 10)] for name, part in names.items()},
        task=task,
        channels=channels,
        pixels=pixels,
        views=int(size == 1),  # of features: no image is so small
    )


def measured_federation(
    settings: RunSettings, clients: int, per_client: int, num_classes: int, like: ImageFacts
) -> Federation:
    """Return a `synthetic_federation` of what a run reads: images or features of usual width."""
    if settings.features.encoder:
        like = Images(like.task, 1024, "float16")
    return synthetic_federation(clients, per_client, settings.side, num_classes, like=like)
