"""The images of a data set as PyTorch's `Dataset`, by domain or by split and domain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import Resources
from feddg_bench.data.augment import to_float
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.federated import measured_parts, spread
from feddg_bench.data.image_store import Store
from feddg_bench.runs.request import Datasets, Plan, Request
from feddg_bench.runs.setup import RunData

Item = tuple[Tensor, int | float]


class DomainImages(Dataset[Item]):
    """Images of one domain, or of one split in it.

    An item is an image, float32 [C, S, S] in [0, 1] for RGB, and its class id, or the target of a
    regression. Images are already decoded and read from a file shared by processes.

    Attributes:
        classes: Names of the classes.
        paths: Name of each image, such as ``photo/dog/pic_001.jpg``.
        labels: Class id or target of each image, [n].
    """

    def __init__(self, dataset: DomainDataset, store: Store, index: NDArray[np.int64]) -> None:
        records = dataset.records()
        self.classes = dataset.classes
        self.paths = tuple(records.paths[i] for i in index.tolist())
        self.labels = records.labels[index]
        self._images, self._index = store.images, index

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, place: int) -> Item:
        pixels = torch.from_numpy(self._images[self._index[place]][None].copy())
        label: int | float = self.labels[place].item()
        return to_float(pixels)[0], label


def open_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    protocol: str | None = None,
    scenario: str | None = None,
    seed: int | None = None,
    recipe: str | None = None,
    settings: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
) -> dict[str, DomainImages] | dict[str, dict[str, DomainImages]]:
    """Return the images of a data set by domain; with a scenario and a seed, by split and domain.

    Args:
        name: A data set; see ``feddg-bench datasets``.
        root: Folder of the data; else that of ``feddg-bench data path``, or ``$FEDDG_DATA``.
        protocol: ``ltdo``, ``lodo`` or ``wilds``, for the splits; else the data set's default.
        scenario: Scenario, such as ``ac-p-s``: gives the splits of a run, together with ``seed``.
        seed: Seed of the run.
        recipe: Recipe that gives image size and splits; else the data set's default.
        settings: Settings that override the recipe's, by key as in `run`: ``{"image_size": 64}``.
        cache_dir: Folder of decoded images; else ``$FEDDG_CACHE`` or ``~/.cache``.

    Raises:
        FeddgError: With a one-sentence message, if something is unknown, missing or does not fit.
    """
    if (scenario is None) != (seed is None):
        raise SettingsError("splits need a scenario and a seed: give both, or neither")
    resources = Resources(
        data_root=None if root is None else Path(root),
        cache_dir=None if cache_dir is None else Path(cache_dir),
    )
    request = Request(
        dataset=name,
        protocol=protocol,
        scenario=scenario,
        recipe=recipe,
        seeds=[seed or 0],
        settings=settings or {},
        resources=resources,
    )
    datasets = Datasets(resources.data_root)
    (plan,) = request.one_scenario(datasets).plan(datasets, check=False)
    dataset = plan.dataset
    store = RunData(resources.cache_dir).store(dataset, plan.settings.data)
    if scenario is None:
        domains = dataset.records().domains
        return {
            domain: DomainImages(
                dataset, store, np.setdiff1d(np.flatnonzero(domains == number), store.unreadable)
            )
            for number, domain in enumerate(dataset.domains)
        }
    return _by_split(plan, store)


def _by_split(plan: Plan, store: Store) -> dict[str, dict[str, DomainImages]]:
    parts = spread(plan.settings, plan.dataset, plan.scenario, without=store.unreadable)
    by_split: dict[str, dict[str, DomainImages]] = {}
    for split, domain, index in measured_parts(parts.splits, plan.dataset):
        by_split.setdefault(split, {})[domain] = DomainImages(plan.dataset, store, index)
    return by_split
