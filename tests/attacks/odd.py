"""Odd values for every setting, through every entry point: each is taken or refused in a line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddg_bench.common.errors import FeddgError, printable
from feddg_bench.config.layers import dotted_keys, nested
from feddg_bench.runs.request import Datasets, Request, check_data, check_weights
from feddg_bench.sweeps.definition import load_sweep
from feddg_bench.sweeps.jobs import jobs
from tests.attacks.lab import HangError, Lab, in_time
from tests.attacks.pictures import few as few_images

LIMIT = 20.0
"""Time limit for one value, in seconds."""
LONGEST = 6500
"""Maximum length of a message in characters; the longest repeats names twice."""
THROUGH_OTHERS = 200
"""Number of values through each entry point except the command line."""

HIDDEN = ("010", "-010", "0_7", "00", "1:30", "1:3", "-1:30", "190:20:30.15", "!!int '017'")
"""Octal and base-60 numbers, whose value differs from their appearance."""
TEXTS = (
    *HIDDEN,
    *("", "null", "true", "off", "nan", "None", "auto", "0", "-1", "2", "1.5", "0.5", "1e-3"),
    *("1_000", "0x10", "1e400", "9223372036854775808", ".inf", "1,5", "1/2", "50%", "2020-01-01"),
    *("[]", "{}", "[1, 0]", "[.nan, 1]", "{a: 1}", "x", "a,b", "../x", "~nobody9/x", "<b>"),
)
"""Values in YAML notation, right for some settings and wrong for others."""

OBJECTS: tuple[Callable[[], Any], ...] = (
    lambda: math.nan,
    lambda: {"a": 1},
    lambda: np.float32(0.5),
    lambda: np.int64(3),
    lambda: np.bool_(True),
    lambda: np.array([0.5, 1.0]),
    lambda: (0.5, 1.0),
    lambda: {0.5, 1.0},
    lambda: range(2),
    lambda: Path("x"),
)
"""Makers of values that exist only in Python."""

KEYS = tuple(dotted_keys())


def spread_over(count: int, total: int) -> list[int]:
    """Return ``count`` different numbers below ``total``, spread evenly over rows and columns."""
    stride = next(s for s in range(int(total * 0.618), total) if math.gcd(s, total) == 1)
    return sorted(i * stride % total for i in range(min(count, total)))


def grid(count: int | None, values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return all pairs of a setting and a value, or ``count`` of them."""
    every = [(key, value) for key in KEYS for value in values]
    return every if count is None else [every[i] for i in spread_over(count, len(every))]


class Entries:
    """The ways in which a setting reaches a run; each plans the requested runs."""

    def __init__(self, lab: Lab) -> None:
        self.folder = lab.folder()
        self.datasets = Datasets()

    def _plan(self, request: Request) -> None:
        plans = request.plan(self.datasets, check=False)
        check_data(plans)
        check_weights(plan for plan in plans if plan.settings.backbone.weights)  # no download

    def command(self, key: str, text: str) -> None:
        """Pass a value as ``KEY=VALUE``."""
        self._plan(Request.read(pairs=["scenario=ip-o-c", f"{key}={text}"]))

    def file(self, key: str, text: str) -> None:
        """Pass a value in a ``--config`` file."""
        path = self.folder / "config.yaml"
        path.write_text(f"{_block(key, text)}\n")
        self._plan(Request.read(config=[path]))

    def recipe(self, key: str, text: str) -> None:
        """Pass a value in a recipe."""
        path = self.folder / "recipe.yaml"
        inside = _block(key, text).replace("\n", "\n  ")
        path.write_text(f"datasets: {{digits4: {{}}}}\nsettings:\n  {inside}\n")
        self._plan(Request(scenario="ip-o-c", recipe=str(path)))

    def sweep(self, key: str, text: str) -> None:
        """Pass a value in a sweep file."""
        path = self.folder / "sweep.yaml"
        head = 'program: feddg-bench\ncommand: [feddg-bench, run, "${args_no_hyphens}"]'
        path.write_text(
            f"{head}\nmethod: grid\nparameters:\n  {key}:\n    values: [0.5, {text or 'null'}]\n"
        )
        sweep = load_sweep(path)
        for point in sweep.points():
            jobs(sweep.pairs(point), self.datasets)

    def python(self, key: str, make: Callable[[], Any]) -> None:
        """Pass an object from Python, by dotted key and nested."""
        for form in (lambda value: {key: value}, lambda value: nested(key, value)):
            self._plan(Request(scenario="ip-o-c", settings=form(make())))


def _block(key: str, text: str) -> str:
    section, dot, name = key.rpartition(".")
    return f"{section}:\n  {name}: {text}" if dot else f"{key}: {text}"


def verdict(enter: Callable[[str, Any], None], key: str, value: Any) -> tuple[str, bool]:
    """Return the outcome for a value, and whether it is right."""
    try:
        with in_time(LIMIT):
            enter(key, value)
    except FeddgError as error:
        said = printable(str(error))  # as the command prints it
        return f"refused: {said}", len(said) < LONGEST
    except HangError:
        return f"no answer in {LIMIT:.0f} s", False
    except Exception as error:
        return f"traceback: {type(error).__name__}: {error!r:.80}", False
    return "taken", value not in HIDDEN if isinstance(value, str) else True


def extremes(lab: Lab) -> None:
    """Train with values at the ends of the allowed ranges."""
    for pair in (
        "train.batch_size=1000000",
        "evaluation.batch_size=1000000",
        "backbone.projection=65536",
        "evaluation.every=1000000",
        f"seed={2**63 - 1}",
        "augment.crop_scale=[1e-9, 1e-9]",
        "augment.brightness=1e300",
        "partition.alpha=1e-300 partition.kind=dirichlet partition.min_client_size=0",
        "partition.alpha=1e300 partition.kind=dirichlet",
        "train.weight_decay=1e300",
        "train.eps=1e300",
        "federation.server_lr=1e300",
        "train.optimizer=sgd train.lr=1e30",
    ):
        out = lab.folder()
        outcome = lab.feddg(
            "run", *few_images(lab), "--rounds", 2, "--results", out, *pair.split(" ")
        )
        what = outcome.sentence if outcome.code else "a record"
        lab.add(f"train with {pair}", what, outcome.code == 0 or outcome.refused)


def attack(lab: Lab) -> None:
    """Pass odd values: all of them on the command line if the lab is full, else a sample."""
    entries = Entries(lab)
    count = None if lab.full else THROUGH_OTHERS
    few = THROUGH_OTHERS if lab.full else THROUGH_OTHERS // 4
    ways: Iterator[tuple[str, Any, Any]] = iter(
        (
            ("command", entries.command, grid(count, TEXTS)),
            ("file", entries.file, grid(few, TEXTS)),
            ("recipe", entries.recipe, grid(few, TEXTS)),
            ("sweep", entries.sweep, grid(few, TEXTS)),
            ("Python", entries.python, grid(few, OBJECTS)),
        )
    )
    for way, enter, pairs in ways:
        for key, value in pairs:
            said, right = verdict(enter, key, value)
            shown = value if isinstance(value, str) else OBJECTS.index(value)
            lab.add(f"{way}: {key}={shown!r:.60}", said, right)
    extremes(lab)
