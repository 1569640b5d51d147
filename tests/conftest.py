"""A toy federation: 4 clients, 3 classes, 16-px images of 2 colours; milliseconds a round."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from feddg_bench.federation import Federation
from feddg_bench.settings import RunSettings, merge

TOY = {
    "method": "fedavg",
    "dataset": "digits4",
    "scenario": "toy",
    "data": {"image_size": 16},
    "backbone": {"name": "small_cnn", "pretrained": False},
    "partition": {"clients": 4},
    "federation": {"rounds": 3, "per_round": 2},
    "train": {"lr": 0.01, "batch_size": 8},
}


@pytest.fixture
def toy_settings() -> Callable[..., RunSettings]:
    """Return a maker of toy settings; layers given win."""

    def make(*layers: dict[str, object]) -> RunSettings:
        return RunSettings.model_validate(merge(TOY, *layers))

    return make


@pytest.fixture
def toy_federation() -> Federation:
    """Two domains (dark, bright) of three classes (which third of the image is lit)."""
    rng = np.random.default_rng(0)
    count = 60
    labels = np.arange(count) % 3
    domains = np.arange(count) % 2
    images = rng.integers(0, 60, (count, 16, 16, 3), dtype=np.uint8)
    for i in range(count):
        images[i, :, 5 * labels[i] : 5 * labels[i] + 5] += np.uint8(120 if domains[i] else 60)
    order = rng.permutation(count)
    parts = np.array_split(order[:44], [9, 20, 32])
    clients = {f"client_{i}": part for i, part in enumerate(parts)}
    held_out = order[44:]
    evaluation = (
        ("id_val", "dark", held_out[domains[held_out] == 0]),
        ("test", "bright", held_out[domains[held_out] == 1]),
    )
    return Federation(images, 16, labels.astype(np.int64), clients, evaluation, 3)


@pytest.fixture
def test_data() -> Path:
    """Return the folder with real data (pacs/, mnist/, weights/), or skip."""
    root = os.environ.get("FEDDG_TEST_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("needs real data: set FEDDG_TEST_DATA to a folder with pacs/ and weights/")
    return Path(root)
