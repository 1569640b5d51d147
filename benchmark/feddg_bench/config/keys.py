"""The run key: a hash of everything that determines a run's results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import plain_file
from feddg_bench.config.layers import Layer
from feddg_bench.config.own import OwnSettings
from feddg_bench.config.schema import DatasetSettings, RunSettings, Section

_FIRST: dict[str, Any] = json.loads(Path(__file__).with_name("first_settings.json").read_bytes())
"""Settings that existed when keys were fixed: by section, and by method under ``hyper``."""


def canonical_settings(
    settings: RunSettings,
    hyper: OwnSettings | None = None,
    world: type[DatasetSettings] = DatasetSettings,
) -> Layer:
    """Return the settings that are hashed into the run key, as JSON values.

    Files are represented by their content, not by their path. A setting that was added after keys
    were fixed is left out while it has its default, so that no record is orphaned by a new setting.
    ``hyper`` declares ``settings.hyper``, and the class ``world`` checks ``settings.world``.

    Raises:
        SettingsError: If a named file cannot be read.
    """
    hyper = hyper or OwnSettings()
    values = settings.model_dump(mode="json")
    _leave_out_new(values, _defaults(type(settings)), _FIRST["run"])
    for name, value in settings:
        if name in values and isinstance(value, Section):
            _leave_out_new(values[name], _defaults(type(value)), _FIRST.get(name, ()))
    own = {name: setting.default for name, setting in hyper.settings.items()}
    first = _FIRST["hyper"].get(settings.method, {*own} - {*hyper.added})
    _leave_out_new(values["hyper"], own, first)
    if "world" in values:
        _leave_out_new(values["world"], _defaults(world), {*world.model_fields} - {*world.added})
    named = [("data", "split_csv"), ("backbone", "weights")]
    for section, key in [*named, *(("hyper", key) for key in hyper.files)]:
        given = values[section].get(key)
        if isinstance(given, str):
            values[section][key] = {"sha256": file_digest(Path(given))}
        elif given:
            values[section][key] = [{"sha256": file_digest(Path(path))} for path in given]
    return values


@cache
def _defaults(model: type[Section]) -> Layer:
    return model.model_construct().model_dump(mode="json")


def _leave_out_new(values: Layer, defaults: Layer, first: Iterable[str]) -> None:
    """Remove the settings that are not in ``first`` and have their default."""
    for name in defaults.keys() - {*first} & values.keys():
        if values[name] == defaults[name]:
            del values[name]


DERIVED = ("data.names", "partition.order", "train.float32")
"""Beginnings of names in the key that planning derives from other settings: no command has them."""


def run_key(canonical: Layer, method_version: int) -> str:
    """Return the run key: 16 hexadecimal digits of a hash of all that determines the results."""
    text = json.dumps([canonical, method_version], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        SettingsError: If it cannot be read.
        DataError: If it is missing or not a regular file.
    """
    plain_file(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}; check the path") from error
