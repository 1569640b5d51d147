"""The run key: a hash over all that decides a run's numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import Layer
from feddg_bench.config.schema import RunSettings, TrainSettings


def canonical_settings(settings: RunSettings, hyper_files: Iterable[str] = ()) -> Layer:
    """Return what decides the numbers as JSON values: files by their content, not their path.

    Args:
        settings: Resolved settings.
        hyper_files: Keys of ``hyper`` that name files.

    Raises:
        SettingsError: If a named file cannot be read.
    """
    values = settings.model_dump(mode="json")
    if settings.train.decay == TrainSettings.model_fields["decay"].default:
        del values["train"]["decay"]  # keys are as they were before there was one
    named = [("data", "split_csv"), ("backbone", "weights")]
    for section, key in [*named, *(("hyper", key) for key in hyper_files)]:
        given = values[section].get(key)
        if isinstance(given, str):
            values[section][key] = {"sha256": file_digest(Path(given))}
        elif given:
            values[section][key] = [{"sha256": file_digest(Path(path))} for path in given]
    return values


def run_key(canonical: Layer, method_version: int) -> str:
    """Return the run key: 16 hexadecimal digits over all that decides the numbers."""
    text = json.dumps([canonical, method_version], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        SettingsError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}; check the path") from error
