"""Fixtures: the command, in the test's process, and the toy federation of `feddg_bench.testing`.

Nothing here imports PyTorch before a test needs it; the process that distributes tests never does.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings

from feddg_bench import cli
from feddg_bench.config.schema import RunSettings

if TYPE_CHECKING:
    from feddg_bench import testing
    from feddg_bench.data.federated import Federation


# `make nightly` selects the second profile.
settings.register_profile("daily", max_examples=10, deadline=None)
settings.register_profile("nightly", max_examples=60, deadline=None)
settings.load_profile("daily")

# Processes share two cores; threads of one matrix product would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ["FEDDG_QUICK_START"] = "1"  # as the command does

# FEDDG_TEST_DATA is the only setting that tests take from the user's environment.
for own in ("FEDDG_DATA", "FEDDG_CONFIG"):
    os.environ.pop(own, None)

# Half a million loaded objects are never freed: scan all of them rarely.
gc.set_threshold(7000, 10, 1000)


_sum: Callable[..., Any] = builtins.sum


def _same_sum(iterable: Iterable[Any], /, start: Any = 0) -> Any:
    """Sum, but not floats in our code: Python 3.12 and later round such sums otherwise."""
    values = list(iterable)  # named as in the built-in, which PyTorch's compiler compares
    ours = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0::2]
    if ours[0] in ("feddg_bench", "feddg_attacks") and not ours[1].startswith("cli."):
        assert not any(type(value) is float for value in values), "use math.fsum or fmean"
    return _sum(values, start)


builtins.sum = _same_sum


class Outcome(NamedTuple):
    """Exit status, standard output, standard error."""

    code: int
    out: str
    err: str


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that none is left running alone at the end.

    Run tests with the stand-in for GPUs last: a process cannot unload it.
    """
    items.sort(key=lambda i: ("standin" in i.path.parts, i.get_closest_marker("nightly") is None))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of decoded images that the tests of all processes share."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def feddg(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    cache: Path,
) -> Callable[..., Outcome]:
    """Return the command: arguments to `Outcome`; it runs in ``tmp_path`` without user settings.

    A module that always calls one subcommand, or needs its own cache, overrides this fixture by one
    of the same name that requests it.
    """
    monkeypatch.setenv("FEDDG_CACHE", str(cache))
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)  # pytest keeps its Ctrl-C handler
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["feddg-bench", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function that clears cached plugins, as is done before and after the test.

    Otherwise later tests in the process would find the plugin that this test found under a name.
    """
    from feddg_bench import extensions, plugins

    def forget() -> None:
        for cached in (*vars(plugins).values(), extensions.extensions):
            getattr(cached, "cache_clear", lambda: None)()

    forget()
    yield forget
    monkeypatch.undo()
    forget()


@pytest.fixture
def toy_settings() -> Callable[..., RunSettings]:
    """Return a maker of toy settings; the given layers take precedence."""
    from feddg_bench.testing import toy_settings

    return toy_settings


@pytest.fixture
def toy_federation() -> Federation:
    """Return two domains (dark, bright) of three classes, spread over 4 clients."""
    from feddg_bench.testing import toy_federation

    return toy_federation()


@pytest.fixture
def test_data() -> Path:
    """Return the folder with real data (pacs/, mnist/, weights/), or skip."""
    root = os.environ.get("FEDDG_TEST_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("needs real data: set FEDDG_TEST_DATA to a folder with pacs/ and weights/")
    return Path(root)


@pytest.fixture
def start_run() -> Callable[..., testing.ToyRun]:
    """Return a maker of runs: a method's name, layers of settings, and parts to replace."""
    from feddg_bench.testing import start_toy_run

    return start_toy_run


@pytest.fixture
def recorder() -> testing.TaskRecorder:
    """Return an executor that records all tasks and replies."""
    from feddg_bench.testing import TaskRecorder

    return TaskRecorder()


@pytest.fixture
def large_federation(toy_federation: Federation) -> Federation:
    """The toy federation at 32 px, the smallest size that suits a ResNet."""
    images = toy_federation.images
    assert isinstance(images, np.ndarray)
    return replace(toy_federation, images=images.repeat(2, axis=1).repeat(2, axis=2), size=32)


class Counted:
    """Makes dictionaries, and counts how many of them are alive."""

    def __init__(self) -> None:
        self.alive = 0
        self.most = 0

    def __call__(self, items: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dictionary that is counted until it is freed."""
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
    """Return a maker of dictionaries that records how many were alive at once (``most``)."""
    return Counted()


collect_ignore = ["example_plugin"]  # a separate package, which a test installs and runs
