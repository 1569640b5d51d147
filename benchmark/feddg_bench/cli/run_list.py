"""``feddg-bench runs``: every run of a results folder, finished or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from feddg_bench.cli.options import Folders, Json, Which, command, print_json, record_folders
from feddg_bench.common.errors import DataError, FeddgError, SettingsError
from feddg_bench.common.terminal import say, terminal, text_table
from feddg_bench.common.titles import counted
from feddg_bench.config.layers import dotted, parse_override
from feddg_bench.config.reading import listed, plain_name
from feddg_bench.config.schema import KEEP
from feddg_bench.data.protocols import scenarios
from feddg_bench.plugins import dataset_title, load_dataset, method_title
from feddg_bench.records.differences import assignments, varying
from feddg_bench.records.metrics import find_metric
from feddg_bench.records.rules import split_metric
from feddg_bench.records.runs import flatten, no_collection, read_runs
from feddg_bench.records.store import open_results
from feddg_bench.records.unfinished import begun_record
from feddg_bench.runs.request import NAMES, read_seeds
from feddg_bench.sweeps.jobs import Failures

FEWEST = 8
"""Minimum number of a key's letters that are shown."""


@dataclass(frozen=True)
class Listed:
    """A run in the list; names are empty where a file does not tell them."""

    key: str
    results: str  # the results folder
    state: str  # `done`, `interrupted` or `failed`
    method: str = ""
    dataset: str = ""
    label: str = ""  # name of a user's own data set
    protocol: str = ""
    scenario: str = ""
    domain: str = ""  # the scenario's test domain
    recipe: str = ""
    seed: int | None = None
    round: int | None = None  # the last finished round
    rounds: int | None = None  # all rounds
    metric: str = ""  # the data set's key metric
    test: float | None = None  # its value on test, after the last evaluated round; shares in [0, 1]
    models: tuple[str, ...] = ()  # kept models: `last`, `best`
    error: str = ""  # of a failed run


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunsCommand(Which):
    """List runs: finished, interrupted and failed ones.

    Other commands accept the first letters of a key: `resume`, `predict`, and `load_model` in
    Python. Options take several names, comma-separated.
    """

    results: Folders = None
    json_: Json = False

    def __call__(self) -> None:
        """Run the command."""
        folders, sources = record_folders(self.results)
        with no_collection():
            found = list(_found(folders))
        runs = [(run, settings) for run, settings in found if self._wants(run)]
        runs.sort(key=lambda pair: _place(pair[0]))
        if self.json_:
            print_json([asdict(run) for run, _ in runs])
            return
        if found and not runs:
            raise SettingsError(self._nothing([run for run, _ in found], sources))
        keys = [run.key for run, _ in runs]
        shown = next(n for n in range(FEWEST, 17) if len({key[:n] for key in keys}) == len({*keys}))
        for _, some in groupby(runs, lambda pair: _place(pair[0])[:3]):
            _draw(list(some), shown)
        states = [run.state for run, _ in runs]
        counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
        say(f"{counted(len(runs), 'run')} in {sources}" + ": " * bool(runs) + ", ".join(counts))

    def _asked(self) -> dict[str, set[Any]]:
        """Return the values that the options ask for, by field of `Listed`."""
        given = {f.name: getattr(self, f.name) for f in fields(Which)}
        seeds = given.pop("seeds")
        asked: dict[str, set[Any]] = {
            name: {spelt(word) for word in listed(words) for spelt in (str.lower, plain_name)}
            for name, words in given.items()
            if words and "all" not in listed(words)
        }
        return asked if seeds is None else asked | {"seed": {*read_seeds(seeds)}}

    def _wants(self, run: Listed) -> bool:
        return all(_values(run, name) & values for name, values in self._asked().items())

    def _nothing(self, found: Sequence[Listed], sources: str) -> str:
        for name, values in self._asked().items():
            if not any(_values(run, name) & values for run in found):
                there = sorted({getattr(run, name) for run in found} - {None, ""})
                given: str = getattr(self, "seeds" if name == "seed" else name)
                wanted = ", ".join(listed(given))
                known = ", ".join(map(str, there))
                return f"no run in {sources} has {name} {wanted}: there are {known}"
        return f"no run in {sources} has all of these: {', '.join(self._asked())}"


runs_command = command(RunsCommand)


def _values(run: Listed, name: str) -> set[Any]:
    """Return the values of an option that a run fits, as `RunsCommand._asked` spells them."""
    value = getattr(run, name)
    if name == "scenario":  # ip-o-c and ipo-c are two; the test domain alone stands for either
        return {value.lower(), plain_name(run.domain)}
    return {plain_name(value) if isinstance(value, str) else value}


def _place(run: Listed) -> tuple[Any, ...]:
    seed = -1 if run.seed is None else run.seed
    return run.dataset, run.label, run.recipe, run.protocol, run.method, run.scenario, seed, run.key


def _found(folders: Sequence[Path]) -> Iterator[tuple[Listed, dict[str, Any]]]:
    """Yield runs with their settings by dotted key."""
    seen: set[str] = set()
    for root in folders:
        store, failures = open_results(root), Failures(root)
        for run in read_runs(root):
            if run.key in seen:
                continue
            seen.add(run.key)
            last = run.evaluation("last")
            yield (
                Listed(
                    **{name: getattr(run, name) for name in _NAMES},
                    label=run.label or "",
                    domain=run.test,
                    results=str(root),
                    state="done",
                    round=run.rounds,
                    rounds=run.rounds,
                    metric=run.metric.name,
                    test=None if last is None else split_metric(last, "test", run.metric.name),
                    models=tuple(w for w in KEEP if store.model(run.key, w).exists()),
                ),
                dict(run.settings),
            )
        for path in sorted(store.checkpoints.glob("[!.]*.safetensors")):
            if path.stem not in seen:
                seen.add(path.stem)
                yield _interrupted(path, str(root))
        for key in sorted(failures.keys() - seen):
            seen.add(key)
            yield _failed(failures, key, str(root))


_NAMES = ("key", "method", "dataset", "protocol", "scenario", "recipe", "seed")


def _interrupted(path: Path, results: str) -> tuple[Listed, dict[str, Any]]:
    try:
        record = begun_record(path)
    except DataError:  # `resume` says what is wrong with it
        return Listed(path.stem, results, "interrupted"), {}
    names = {name: getattr(record, name) for name in _NAMES if name != "scenario"}
    return (
        Listed(
            **names,
            scenario=record.scenario.name,
            domain=record.scenario.test,
            label=record.data.label or "",
            results=results,
            state="interrupted",
            round=len(record.rounds),
            rounds=record.settings["federation"]["rounds"],
            metric=record.metric.name,
            test=record.score(),
        ),
        flatten(record.settings),
    )


def _failed(failures: Failures, key: str, results: str) -> tuple[Listed, dict[str, Any]]:
    given: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, SettingsError):
        for pair in json.loads(failures.path(key).read_bytes())["run"]:
            given |= dotted(parse_override(pair, NAMES))
    names: dict[str, Any] = {name: str(given.pop(name, "")) for name in _NAMES[1:-1]}
    with suppress(FeddgError):  # not installed here, or of domains that only its folder tells
        kind = load_dataset(names["dataset"])
        names["recipe"] = names["recipe"] or kind.default_recipe
        official = kind.official if isinstance(kind.official, Mapping) else {}
        asked = names["protocol"], kind.domains, kind.letters, names["scenario"], official
        names["domain"] = scenarios(*asked)[0].test
    seed = given.pop("seed", None)
    return (
        Listed(
            key,
            results,
            "failed",
            **names,
            seed=seed if isinstance(seed, int) else None,
            error=failures.error(key),
        ),
        given,
    )


def _draw(runs: Sequence[tuple[Listed, dict[str, Any]]], shown: int) -> None:
    """Print the runs of one data set and recipe."""
    first = runs[0][0]
    varied: dict[str, list[str]] = {}
    for method in {run.method for run, _ in runs}:
        varied[method] = varying(
            s for run, s in runs if run.method == method and s and run.state != "failed"
        )
    own = [
        ",\n".join(assignments({k: s[k] for k in varied[run.method] if k in s})) for run, s in runs
    ]
    metric = next((run.metric for run, _ in runs if run.metric), "accuracy")
    rows = []
    for (run, _), settings in zip(runs, own, strict=True):
        state = run.state
        if state == "interrupted" and run.round is not None:
            state = f"interrupted, {run.round}/{run.rounds}"
        row = [
            run.key[:shown],
            method_title(run.method) if run.method else "?",
            f"{run.protocol} {run.scenario}".strip(),
            "" if run.seed is None else str(run.seed),
            _text(run),
            state if not run.models else f"{state}, {' '.join(run.models)}",
        ]
        rows.append(row[:2] + [settings] * any(own) + row[2:])
    heads = ["key", "method", *["settings"] * any(own), "scenario", "seed", metric]
    title = dataset_title(first.dataset, first.label) if first.dataset else "unknown data set"
    title += f", recipe {first.recipe}" * bool(first.recipe)
    title += f"; {find_metric(metric).label} on test, last round"
    numbers = ("seed", metric)
    columns = [*heads, "state"]
    whole = ("key", "settings", *numbers)
    terminal().print(text_table(title, columns, rows, right=numbers, whole=whole), highlight=False)


def _text(run: Listed) -> str:
    return "" if run.test is None else find_metric(run.metric).text(run.test, 2)
