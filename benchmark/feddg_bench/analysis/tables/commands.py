"""Commands that would fill missing cells."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from feddg_bench.analysis.tables.columns import Measured
from feddg_bench.analysis.tables.describe import Description
from feddg_bench.analysis.tables.rows import Row
from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import merge, validate
from feddg_bench.config.recipes import load_recipe, recipe_names
from feddg_bench.config.schema import RunSettings
from feddg_bench.data.protocols import PROTOCOLS
from feddg_bench.plugins import names
from feddg_bench.records.runs import FIELDS, Run, flatten
from feddg_bench.records.variants import text

FLAGS = {
    "federation.rounds": "--rounds",
    "partition.clients": "--clients",
    "federation.per_round": "--per-round",
    "partition.heterogeneity": "--lambda",
}
"""Settings that have a flag, in the order in which a command gives them."""

FILES = ("data.split_csv", "backbone.weights")
"""Settings whose record holds a hash, not the path that a command needs."""

SEEDS = (0, 1, 2)
"""Seeds to run where the table has none."""


def fill_commands(
    description: Description,
    row: Row,
    missing: Sequence[Measured],
    scenarios: Mapping[int, Collection[str]],
    seeds: Collection[int],
) -> dict[int, str]:
    """Return the command that fills each missing column of a row.

    Columns that one command can fill share it.

    Args:
        description: The table's.
        row: The row.
        missing: Its columns without a number.
        scenarios: Column -> scenarios that other rows have.
        seeds: Seeds of the table.
    """
    together: dict[tuple[str, ...], list[str]] = {}
    belongs: dict[int, tuple[str, ...]] = {}
    for column in missing:
        where = {**(row.where or {}), **column.where}
        base = _base(row, where)
        head = _head(description, base, where)
        settings = _settings(row, base, where)
        mark = (*head, "|", *settings)
        belongs[column.number] = mark
        asked = together.setdefault(mark, [])
        asked += [s for s in _scenarios(where, scenarios[column.number]) if s not in asked]
    commands = {}
    for mark, asked in together.items():
        cut = mark.index("|")
        parts = [*mark[:cut]]
        if asked:
            parts += ["--scenario", ",".join(asked)]
        parts += ["--seeds", ",".join(map(str, sorted(seeds) or SEEDS))]
        commands[mark] = shlex.join(["feddg-bench", "run", *parts, *mark[cut + 1 :]])
    return {
        column.number: commands[belongs[column.number]]
        + _needs({**(row.where or {}), **column.where}, belongs[column.number])
        for column in missing
    }


def _base(row: Row, where: Mapping[str, Any]) -> Run | None:
    """Return a run of the row to be like: of the same data set and protocol if there is one."""
    runs = row.variant.runs if row.variant else ()
    near = [r for r in runs if r.dataset == where.get("dataset", r.dataset)]
    same = [r for r in near if r.protocol == where.get("protocol", r.protocol)]
    return min(same or near, key=lambda run: run.key, default=None)


def _head(description: Description, base: Run | None, where: Mapping[str, Any]) -> list[str]:
    """Return method, protocol, data set and recipe as flags."""
    parts = []
    for name in ("method", "protocol", "dataset"):
        value = where.get(name) or (getattr(base, name) if base else None)
        if isinstance(value, str):
            parts += [f"--{name}", value]
    recipe = base.recipe if base else description.recipe
    if recipe is not None and is_shipped(recipe):
        return [*parts, "--recipe", recipe]
    return [*parts, "--recipe", f"{recipe}.yaml"] if base and recipe else parts


def _settings(row: Row, base: Run | None, where: Mapping[str, Any]) -> list[str]:
    """Return the settings in which the runs differ from their recipe, as flags and pairs."""
    wanted: dict[str, Any] = {}
    if base is not None:
        wanted |= overrides(base)
    differences = row.variant.differences if row.variant else {}
    for source in (differences, where):
        wanted |= {
            key: value
            for key, value in source.items()
            if key not in (*FIELDS, "recipe", "images") and not isinstance(value, list)
        }
    parts: list[str] = []
    for key, flag in FLAGS.items():
        if wanted.get(key) is not None:
            parts += [flag, text(wanted[key])]
    for key, value in wanted.items():
        if key in FILES and value is not None:
            parts.append(f"{key}=FILE")
        elif key not in FLAGS or value is None:
            parts.append(f"{key}={'null' if value is None else text(value)}")
    return parts


def overrides(run: Run) -> dict[str, Any]:
    """Return the settings, the method's own aside, in which a run differs from its recipe."""
    recipe = recipe_settings(run.recipe, run.dataset, run.method)
    if recipe is None:
        return {}
    return {
        key: value
        for key, value in run.settings.items()
        if not key.startswith("hyper.") and recipe.get(key) != value
    }


@cache
def is_shipped(recipe: str) -> bool:
    """Return whether a recipe comes with the package."""
    return recipe in recipe_names()


@cache
def recipe_settings(recipe: str, dataset: str, method: str) -> Mapping[str, Any] | None:
    """Return a shipped recipe's settings by dotted key; ``None`` if it cannot be read."""
    if not is_shipped(recipe):
        return None
    named = {"method": method, "dataset": dataset, "scenario": ""}
    try:
        settings = validate(RunSettings, merge(load_recipe(recipe, dataset, method), named))
    except SettingsError:
        return None
    return flatten(settings.model_dump(mode="json"))


def _scenarios(where: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return the scenarios of a column as ``--scenario`` takes them."""
    if isinstance(where.get("scenario"), str):
        return [where["scenario"]]
    held = [where.get(role) for role in PROTOCOLS.get(str(where.get("protocol")), ())]
    if held and all(isinstance(domain, str) for domain in held):
        return ["-".join(map(str, held))]
    return sorted(known)


def _needs(where: Mapping[str, Any], parts: Sequence[str]) -> str:
    """Return what has to be there before a command works, as a comment behind it."""
    for kind, name in (("data set", where.get("dataset")), ("method", where.get("method"))):
        if isinstance(name, str) and name not in names(kind):
            return f"  # needs a {kind} {name}, which is not installed"
    if "--recipe" in parts and isinstance(where.get("dataset"), str):
        recipe = parts[parts.index("--recipe") + 1]
        if is_shipped(recipe) and not _covers(recipe, where["dataset"]):
            return f"  # needs settings for {where['dataset']} in recipe {recipe}"
    return ""


@cache
def _covers(recipe: str, dataset: str) -> bool:
    try:
        load_recipe(recipe, dataset, "")
    except SettingsError:
        return False
    return True
