"""Shared helpers: exact comparison, layers of settings, made-up records."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from feddg_bench import cli
from feddg_bench.common.errors import FeddgError, printable
from feddg_bench.config.keys import canonical_settings, run_key
from feddg_bench.config.layers import merge
from feddg_bench.config.schema import RunSettings
from feddg_bench.core.loop import RoundResult
from feddg_bench.core.messages import encode
from feddg_bench.core.method import Method
from feddg_bench.engine.executors import Executor
from feddg_bench.plugins import load_method, names
from feddg_bench.records.checks import is_evaluated
from feddg_bench.records.record import RunRecord, ScenarioRecord
from feddg_bench.testing import start_toy_run

bitwise = partial(assert_close, rtol=0, atol=0)
"""Equal tensors, or trees of them, bit for bit."""

ALL = {"federation": {"per_round": None}}
"""Every client takes part in every round."""

UNIFORM = {"federation": {"weighting": "uniform"}}
"""All clients have the same weight."""

PLAIN = {
    "augment": {
        "crop_scale": None,
        "flip": 0.0,
        "brightness": 0.0,
        "contrast": 0.0,
        "saturation": 0.0,
        "hue": 0.0,
        "grayscale": 0.0,
    }
}
"""Images without augmentation."""


class Features(nn.Module):
    """A backbone that reads an image's features from its first pixels."""

    def __init__(self, width=2):
        super().__init__()
        self.num_features = width

    def forward(self, images):
        return images[:, 0, 0, : self.num_features]


def as_images(features):
    """Return images from which `Features` reads these features, up to four."""
    images = features.new_zeros(len(features), 3, 4, 4)
    images[:, 0, 0, : features.shape[1]] = features
    return images


class Pixels(nn.Module):
    """A backbone whose features are an image's four values."""

    num_features = 4

    def forward(self, images):
        return images.flatten(1)


def run_cell(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> dict[str, Any]:
    """Execute text as a cell of a notebook, in a module without a file, and return its variables.

    IPython keeps the text in `linecache`, where `inspect` finds it.
    """
    module = sys.modules.get(name) or ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    file = f"<cell {hash(text)}>"
    lines = text.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, file, (len(text), None, lines, file))
    exec(compile(text, file, "exec", dont_inherit=True), vars(module))  # noqa: S102
    return vars(module)


@contextmanager
def refused(error: type[FeddgError], *words: str) -> Iterator[pytest.ExceptionInfo[FeddgError]]:
    """Expect an error with these words, in one line that any terminal can show."""
    with pytest.raises(error) as caught:
        yield caught
    said = str(caught.value)
    assert said == printable(said)
    assert [word for word in words if word not in said] == [], said


def one_sentence(outcome: Any, *words: str) -> None:
    """Assert that a command was refused: status 2, no output, one sentence with the words.

    Args:
        outcome: Exit status, standard output and standard error.
        words: Parts of the sentence.
    """
    code, out, err = outcome
    assert (code, out) == (2, ""), outcome
    before = ("decoded ", "estimate: ", "loading ", "planning ", "setup: ", "[1/")
    (line,) = [x for x in err.strip().splitlines() if not x.startswith(before)]
    assert line.startswith("feddg-bench: error: ")
    assert [word for word in words if word not in line] == [], line


def hyper(**values: Any) -> dict[str, Any]:
    """Return a layer of a method's own settings."""
    return {"hyper": values}


def rng(seed: int = 0) -> torch.Generator:
    """Return a generator that starts at a seed."""
    return torch.Generator().manual_seed(seed)


def no_file(name: str) -> dict[str, Any]:
    """Return a layer under which a method needs no file of weights."""
    return pixel() if "style" in load_method(name).Settings.model_fields else hyper()


pixel = partial(hyper, style="pixel")
"""A layer of a method's own settings with styles of raw pixels, which need no weights."""

SCENARIOS = {
    "ip-o-c": (("ink", "poster"), "outline", "chalk"),
    "oc-i-p": (("outline", "chalk"), "ink", "poster"),
    "ic-p-o": (("ink", "chalk"), "poster", "outline"),
    "po-c-i": (("poster", "outline"), "chalk", "ink"),
}
"""Scenarios of digits4 under LTDO: training domains, validation domain, test domain."""


def numbers(results: Iterable[RoundResult]) -> list[Any]:
    """Return the parts of the rounds' results that must repeat exactly."""
    return [
        (r.round, r.cohort, r.skipped, r.evaluation, r.ledger.bytes, r.ledger.means())
        for r in results
    ]


def same_on(executor: Executor, method: str, *layers: Any, rounds: int = 2) -> bool:
    """Run in this process and on an executor; return whether all results are the same."""
    here, away = start_toy_run(method, *layers), start_toy_run(method, *layers, executor=executor)
    same = numbers(away.rounds(rounds)) == numbers(here.rounds(rounds))
    on_cpu = {tensor.device.type for tensor in away.server.weights.values()} == {"cpu"}
    return same and on_cpu and encode(away.server.state()) == encode(here.server.state())


def measured(accuracy: float, *domains: str, images: int = 10) -> dict[str, dict[str, float]]:
    """Return a split of an evaluation: the same accuracy on every domain."""
    return {d: {"accuracy": accuracy, "loss": 1.0, "images": images} for d in domains}


def entry(number: int, evaluation: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """Return a record's entry of one round; changes take precedence."""
    return {
        "round": number,
        "cohort": ["client_0", "client_1"],
        "skipped": False,
        "train": {"loss": 0.5},
        "evaluation": evaluation,
        "bytes": {"up": 2_000_000, "down": 1_000_000},
        "dropped": [],
        "seconds": {"training": 3.0, "aggregation": 0.25},
        **changes,
    }


def make_record(
    layer: dict[str, Any] | None = None,
    *,
    domains: tuple[tuple[str, ...], str | None, str] | None = None,
    **fields: Any,
) -> RunRecord:
    """Return a record whose key, names and settings agree.

    Args:
        layer: Settings, names included, that differ from FedAvg on digits4, ``ip-o-c``.
        domains: Training domains, validation domain, test domain; by default those of `SCENARIOS`.
        fields: Fields of the record; they take precedence.
    """
    names = {"method": "fedavg", "dataset": "digits4", "protocol": "ltdo", "scenario": "ip-o-c"}
    rounds = [r if isinstance(r, dict) else r.model_dump() for r in fields.pop("rounds", [])]
    fitting = {} if "settings" in fields else settings_of(rounds)
    settings = RunSettings.model_validate(merge(names, fitting, layer or {}))
    canonical = fields.get("settings", canonical_settings(settings))
    version = fields.get("method_version", 1)
    train, val, test = domains or SCENARIOS[settings.scenario]
    values = {name: getattr(settings, name) for name in ("method", "dataset", "protocol", "seed")}
    scenario = ScenarioRecord(name=settings.scenario, train=train, val=val, test=test)
    rounds = stretched(rounds, canonical)
    data = {"fingerprint": "f" * 32, "images": images_of(rounds, scenario)}
    fields["data"] = data | fields.get("data", {})
    values |= {
        "key": run_key(canonical, version),
        "method_version": version,
        "scenario": scenario,
        "recipe": "quick",
        "settings": canonical,
        "partition": {"hash": "0a", "clients": 4, "sizes": [1, 1, 1]},
        "once": {
            "bytes": {"up": 5000, "down": 0},
            "dropped": [],
            "seconds": {"training": 1.5, "aggregation": 0.5},
        },
        "rounds": rounds,
    }
    return RunRecord(**{**values, **fields})


def settings_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return settings under which a run has these rounds and evaluates them in the same way."""
    evaluated = [one["round"] for one in rounds if one["evaluation"] is not None]
    found: dict[str, Any] = {"federation": {"rounds": len(rounds)}} if rounds else {}
    if len(evaluated) < len(rounds) and evaluated:
        found["evaluation"] = {"every": evaluated[0]}
    splits = {split for one in rounds for split in one["evaluation"] or ()}
    if splits and not splits >= {"test", "val"}:
        found.setdefault("evaluation", {})["splits"] = sorted(splits)
    return found


def stretched(rounds: list[Any], settings: Mapping[str, Any]) -> list[Any]:
    """Return the rounds, with the last one repeated up to the number in the settings."""
    asked = settings.get("federation", {}).get("rounds", len(rounds))
    every = settings.get("evaluation", {}).get("every", 1)
    start = settings.get("evaluation", {}).get("start", 1)
    if not rounds or len(rounds) >= asked:
        return rounds
    shown = [one["evaluation"] for one in rounds]
    more = [{**rounds[-1], "round": n} for n in range(len(rounds) + 1, asked + 1)]
    for one in (rounds := [*rounds, *more]):
        due = is_evaluated(one["round"], rounds=asked, every=every, start=start)
        one["evaluation"] = shown[min(one["round"], len(shown)) - 1] if due else None
    return rounds


def images_of(rounds: Sequence[Any], scenario: ScenarioRecord) -> dict[str, dict[str, int]]:
    """Return the number of images of each part that is measured in made-up rounds."""
    images: dict[str, dict[str, int]] = {"train": dict.fromkeys(scenario.train, 100)}
    images["test"] = {scenario.test: 10}
    if scenario.val is not None:
        images["val"] = {scenario.val: 10}
    for one in rounds:
        for split, parts in (one["evaluation"] or {}).items():
            images[split] = {domain: measured["images"] for domain, measured in parts.items()}
    return images


def start(
    arguments: Iterable[object], log: Path, program: Callable[[], object] = cli.main
) -> BaseProcess:
    """Start the command, or another program, in a process and process group of its own.

    It is forked from the fork server of the engine's processes, so that it need not import
    PyTorch; processes that it starts must import it.

    Args:
        arguments: Arguments of the program.
        log: Where its standard output and standard error go.
        program: Reads its arguments from ``sys.argv``.
    """
    server = get_context("forkserver")
    server.set_forkserver_preload(["feddg_bench.engine.executors"])
    given = program, [*map(str, arguments)], log, dict(os.environ), Path.cwd()
    process = server.Process(target=_begin, args=given)
    process.start()
    return process


def _begin(
    program: Callable[[], object],
    arguments: list[str],
    log: Path,
    environment: Mapping[str, str],
    folder: Path,
) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup makes its children ignore
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(folder)
    sys.argv = ["feddg-bench", *arguments]
    program()


def wait_until(
    here: Callable[[], object], process: BaseProcess, log: Path, patience: float = 120.0
) -> None:
    """Wait for an effect of a running process; fail if the process ends first."""
    deadline = time.monotonic() + patience
    while not here():
        assert process.is_alive(), log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ended(process: BaseProcess, patience: float = 60.0) -> int | None:
    """Wait for a process to end and return its exit status; ``None`` if it does not end."""
    process.join(patience)
    return process.exitcode


def children(process: int) -> list[int]:
    """Return the child processes of a process (Linux)."""
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


UNTRAINED = ("ncm", "ridge", "zeroshot")
"""Methods without a training step."""


def methods_apart(members: Sequence[str], without: Sequence[str] = ()) -> list[Any]:
    """Return all methods as parameters; those that share ``members`` with FedAvg are nightly."""

    def alike(name: str) -> bool:
        return name != "fedavg" and all(
            getattr(load_method(name), each) is getattr(Method, each) for each in members
        )

    return [
        pytest.param(name, marks=pytest.mark.nightly if alike(name) else ())
        for name in sorted({*names("method")} - {*without})
    ]
