"""Fixtures that wrap the toy federation of `feddg_bench.testing`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddg_bench import testing
from feddg_bench.federation import Federation
from feddg_bench.settings import RunSettings


@pytest.fixture
def toy_settings() -> Callable[..., RunSettings]:
    """Return a maker of toy settings; layers given win."""
    return testing.toy_settings


@pytest.fixture
def toy_federation() -> Federation:
    """Return two domains (dark, bright) of three classes, spread over 4 clients."""
    return testing.toy_federation()


@pytest.fixture
def test_data() -> Path:
    """Return the folder with real data (pacs/, mnist/, weights/), or skip."""
    root = os.environ.get("FEDDG_TEST_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("needs real data: set FEDDG_TEST_DATA to a folder with pacs/ and weights/")
    return Path(root)


@pytest.fixture
def start_run() -> Callable[..., testing.ToyRun]:
    """Return a maker of runs: a method's name, layers of settings, and parts to put in."""
    return testing.start_toy_run


@pytest.fixture
def recorder() -> testing.Recorder:
    """Return an executor that remembers all tasks and replies."""
    return testing.Recorder()


@pytest.fixture
def large_federation(toy_federation: Federation) -> Federation:
    """The toy federation at 32 px, the least that a ResNet makes something of."""
    images = toy_federation.images
    assert isinstance(images, np.ndarray)
    return replace(toy_federation, images=images.repeat(2, axis=1).repeat(2, axis=2), size=32)


class Counted:
    """Makes dictionaries, and counts how many of them are alive."""

    def __init__(self) -> None:
        self.alive = 0
        self.most = 0

    def __call__(self, items: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dictionary that counts until it is freed."""
        counter = self

        class One(dict[str, Any]):
            def __init__(self) -> None:
                super().__init__(items)
                counter.alive += 1
                counter.most = max(counter.most, counter.alive)

            def __del__(self) -> None:
                counter.alive -= 1

        return One()


@pytest.fixture
def counted() -> Counted:
    """Return a maker of dictionaries that tells how many were alive at once (``most``)."""
    return Counted()


collect_ignore = ["example_plugin"]  # a package of its own, installed and run by a test
