"""The command, run in the test's process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from feddg_bench import cli


class Outcome(NamedTuple):
    """Exit status, standard output, standard error."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of decoded images that the tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def feddg(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    cache: Path,
) -> Callable[..., Outcome]:
    """Return the command: arguments to `Outcome`; it runs in ``tmp_path``, whatever the user has.

    A module that always calls one subcommand, or wants a cache of its own, overrides this fixture
    by one of the same name that asks for it.
    """
    monkeypatch.setenv("FEDDG_CACHE", str(cache))
    for name in [n for n in os.environ if n.startswith("WANDB_")] + ["FEDDG_DATA", "FEDDG_CONFIG"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)  # leave pytest its Ctrl-C
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
