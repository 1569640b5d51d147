"""Commands that fill missing cells or repeat a run."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from feddg_bench.analysis.tables.columns import MeasuredColumn
from feddg_bench.analysis.tables.describe import Description
from feddg_bench.analysis.tables.rows import Row
from feddg_bench.analysis.tables.setups import FILES, is_shipped, unlike_recipe, usual_settings
from feddg_bench.common.errors import SettingsError
from feddg_bench.config.keys import DERIVED
from feddg_bench.config.reading import write_yaml
from feddg_bench.config.recipes import load_recipe
from feddg_bench.data.protocols import PROTOCOLS
from feddg_bench.plugins import names
from feddg_bench.records.differences import differences, setting_text, values
from feddg_bench.records.runs import FIELDS, RecordedRun, setting_items

FILE = "FILE"
"""Placeholder for the path of a file, since a record holds only its hash."""
_METHOD = re.compile(r"--method (\S+)")
_HERE = "--method ?"
SEEDS = (0, 1, 2)
"""Seeds to run if the table has none."""


def fill_commands(
    description: Description,
    row: Row,
    missing: Sequence[MeasuredColumn],
    scenarios: Mapping[int, Collection[str]],
    seeds: Collection[int],
) -> dict[int, str]:
    """Return the command that fills each missing column of a row.

    Columns that one command can fill share it. ``scenarios`` maps columns to the scenarios found in
    any row.
    """
    parts: dict[int, tuple[str, str, str]] = {}
    asked: dict[tuple[str, str, str], dict[str, None]] = {}
    for column in missing:
        where = {**(row.where or {}), **column.where}
        near = [r for r in row.members if r.dataset == where.get("dataset", r.dataset)]
        same = [r for r in near if r.protocol == where.get("protocol", r.protocol)]
        base = min(same or near, key=lambda run: run.key, default=None)  # a run to imitate
        if base is None:  # a run in the paper's setup
            where = {k: v for k, v in where.items() if k not in description.framed}
        recipe = base.recipe if base else description.recipe
        mark = parts[column.number] = (
            _head(base, recipe, where),
            _settings(row, base, where),
            _needs(where, recipe),
        )
        asked.setdefault(mark, {}).update(
            dict.fromkeys(_scenarios(where, scenarios[column.number]))
        )
    listed = f"--seeds {','.join(map(str, sorted(seeds) or SEEDS))}"
    found = {}
    for number, mark in parts.items():
        head, settings, needs = mark
        each = f"--scenario {shlex.quote(','.join(asked[mark]))}" if any(asked[mark]) else ""
        line = filter(None, ("feddg-bench run", head, each, listed, settings))
        found[number] = " ".join(line) + needs
    return found


def merged(commands: Iterable[str]) -> list[str]:
    """Return commands for several methods that are alike otherwise as one."""
    found: dict[str, list[str]] = {}
    for command in commands:
        method = _METHOD.search(command)
        if method is not None:
            found.setdefault(_METHOD.sub(_HERE, command, 1), []).append(method[1])
    return [
        command.replace(_HERE, f"--method {','.join(dict.fromkeys(methods))}")
        for command, methods in found.items()
    ]


def _head(base: RecordedRun | None, recipe: str | None, where: Mapping[str, Any]) -> str:
    """Return method, protocol, data set and recipe as flags."""
    parts = []
    for name in ("method", "protocol", "dataset"):
        value = where.get(name) or (getattr(base, name) if base else None)
        if isinstance(value, str):
            parts += [f"--{name}", value]
    if recipe is not None and (base is not None or is_shipped(recipe)):
        parts += ["--recipe", recipe if is_shipped(recipe) else f"{recipe}.yaml"]
    return shlex.join(parts)


def _settings(row: Row, base: RecordedRun | None, where: Mapping[str, Any]) -> str:
    """Return the settings in which the runs differ from their recipe, as ``KEY=VALUE``."""
    wanted = {} if base is None else {**overrides(base)}
    for source in (row.variant.differences, where):
        wanted |= {
            key: value
            for key, value in source.items()
            if key not in (*FIELDS, "recipe", "images") and not isinstance(value, list)
        }
    tuning, chosen = [], dict[str, Any]()
    if base is not None:
        wanted |= {k: v for k, v in unlike_recipe(base).items() if k not in wanted}
        if base.tuned is not None:
            chosen, under = base.tuned.settings, base.tuned.protocol or base.protocol
            own = under == where.get("protocol", base.protocol)
            tuning = [f"tuned={'true' if own else under}"]
    said = {key: "null" if v is None else setting_text(v) for key, v in wanted.items()}
    pairs = (
        f"{key}={FILE if key in FILES and wanted[key] is not None else said[key]}"
        for key in said
        if key not in chosen
    )
    return shlex.join([*tuning, *pairs])


@cache
def overrides(run: RecordedRun) -> Mapping[str, Any]:
    """Return the settings in which a run differs from its recipe, except the method's own."""
    recipe = usual_settings(run.recipe, run.dataset, run.method)
    if recipe is None:
        return {}
    keys = [key for key in run.settings if not key.startswith(("hyper.", *DERIVED))]
    return values(differences(run.settings, recipe, keys))


def _scenarios(where: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return a column's scenarios in the form that ``--scenario`` accepts."""
    if isinstance(where.get("scenario"), str):
        return [where["scenario"]]
    held = [where.get(role) for role in PROTOCOLS.get(str(where.get("protocol")), ())]
    if held and all(isinstance(domain, str) for domain in held):
        return ["-".join(map(str, held))]
    return sorted(known)


def _needs(where: Mapping[str, Any], recipe: str | None) -> str:
    """Return a command's unmet requirement as a trailing comment; empty if there is none."""
    for kind, name in (("data set", where.get("dataset")), ("method", where.get("method"))):
        if isinstance(name, str) and name not in names(kind):
            near = difflib.get_close_matches(name, names(kind), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"  # needs a {kind} {name}, which is not installed{hint}"
    dataset = where.get("dataset")
    if recipe and isinstance(dataset, str) and is_shipped(recipe) and not _covers(recipe, dataset):
        return f"  # needs settings for {dataset} in recipe {recipe}"
    return ""


@cache
def _covers(recipe: str, dataset: str) -> bool:
    try:
        load_recipe(recipe, dataset, "")
    except SettingsError:
        return False
    return True


def repeat_command(run: RecordedRun, settings: Mapping[str, Any], threads: int = 1) -> str:
    """Return the command that repeats a run, without its scenario and its seed.

    It names the recipe and every setting in which the run differs from it, or all settings if the
    recipe is not shipped. It gives all of the method's own settings, so that it does not depend on
    a version's defaults.
    """
    parts = ["feddg-bench", "run", "--method", run.method, "--protocol", run.protocol]
    parts += ["--dataset", run.dataset]
    differing = None
    if usual_settings(run.recipe, run.dataset, run.method):
        parts += ["--recipe", run.recipe]
        differing = overrides(run)
    if threads != 1:
        parts += ["--threads", str(threads)]
    for key, value in setting_items(settings):
        own = key.startswith("hyper.")
        if (own or differing is None or key in differing) and not key.startswith(DERIVED):
            parts.append(f"{key}={_yaml(value)}")
    return shlex.join(parts)


def _yaml(value: Any) -> str:
    """Return a value in ``KEY=VALUE`` syntax."""
    if isinstance(value, dict):
        return FILE
    if isinstance(value, list):
        value = [FILE if isinstance(one, dict) else one for one in value]
    return write_yaml(value) if isinstance(value, list) else _scalar(value)


@lru_cache(maxsize=10_000, typed=True)
def _scalar(value: Any) -> str:
    return write_yaml(value)
