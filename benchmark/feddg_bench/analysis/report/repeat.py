"""The command that repeats a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from feddg_bench.analysis.tables.commands import is_shipped, overrides, recipe_settings
from feddg_bench.records.runs import OWN, Run

FILE = "FILE"
"""Stands for the path of a file, of which a record holds the hash alone."""


def repeat_command(run: Run, settings: Mapping[str, Any], threads: int = 1) -> str:
    """Return the command that repeats a run, but for its scenario and its seed.

    It names the recipe and all in which the run differs from it, or every setting where the recipe
    is not one of ours. The method's own settings are all there: so the command does not depend on
    the defaults of a version. (A setting that its method needs and that was overruled with the
    recipe's own value is not seen here; the run's key would tell.)

    Args:
        run: The run.
        settings: Its settings as recorded, in sections.
        threads: CPU threads of a worker, on which the last bits depend.
    """
    parts = ["feddg-bench", "run", "--method", run.method, "--protocol", run.protocol]
    parts += ["--dataset", run.dataset]
    differing = None
    if is_shipped(run.recipe) and recipe_settings(run.recipe, run.dataset, run.method):
        parts += ["--recipe", run.recipe]
        differing = overrides(run)
    if threads != 1:
        parts += ["--threads", str(threads)]
    for key, value in _dotted(settings):
        own = key.startswith("hyper.")
        if (own or differing is None or key in differing) and not key.startswith("data.names"):
            parts.append(f"{key}={_yaml(value)}")
    return shlex.join(parts)


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted key, with their own types."""
    for key, value in settings.items():
        if not prefix and key in OWN:
            continue
        if isinstance(value, dict) and set(value) != {"sha256"}:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _yaml(value: Any) -> str:
    """Return a value as ``KEY=VALUE`` reads it."""
    if isinstance(value, dict):
        return FILE
    if isinstance(value, list):
        value = [FILE if isinstance(one, dict) else one for one in value]
    said: str = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return said.strip().removesuffix("...").strip()
