"""The check of a record's key against its settings, and the rounds that settings evaluate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from feddg_bench.config.keys import run_key


def is_evaluated(number: int, *, rounds: int, every: int, start: int) -> bool:
    """Return whether a round of a run is evaluated: every n-th from ``start`` on, and the last.

    >>> [n for n in range(1, 9) if is_evaluated(n, rounds=8, every=3, start=4)]
    [6, 8]
    """
    return number == rounds or (number >= start and number % every == 0)


def fault_of_key(
    settings: Mapping[str, Any], version: int, key: str, names: Mapping[str, Any]
) -> str:
    """Return why a key is not that of settings, as part of a sentence; empty if it is.

    Args:
        settings: Settings of the record.
        version: Version of the method.
        key: Key of the record.
        names: Fields of the record that repeat a setting, by its name.
    """
    for name, value in names.items():
        if (own := settings.get(name)) != value:
            return f"{name} is {value!r}, but {own!r} in its settings"
    for digest in _digests(settings):
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            return f"settings: {digest!r} is no SHA-256"
    true = run_key(dict(settings), version)
    return "" if key == true else f"its settings are those of the run {true}, not of {key}"


def _digests(value: Mapping[str, Any] | Sequence[Any]) -> Iterator[Any]:
    """Yield the digests that stand for files in settings."""
    if len(value) == 1 and "sha256" in value and isinstance(value, dict):
        yield value["sha256"]
    else:
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, dict | list):
                yield from _digests(inner)
