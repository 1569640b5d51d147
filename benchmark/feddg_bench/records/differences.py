"""Differences between settings of runs, and their names in texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from feddg_bench.config.names import SYMBOLS

NAMES: Mapping[str, str] = {
    **{key: symbol for symbol, key in SYMBOLS.items()},
    "backbone.name": "backbone",
    "select": "selection rule",  # not a setting, but a recipe can say that a paper leaves it open
}
"""Setting -> its name in texts; by default the last part of its key."""


class Difference(NamedTuple):
    """Two values of a setting; ``None`` where it is absent."""

    ours: Any
    reference: Any


def differences(
    settings: Mapping[str, Any], reference: Mapping[str, Any], keys: Iterable[str] | None = None
) -> dict[str, Difference]:
    """Return how settings, by dotted key, differ from a reference.

    Args:
        settings: Settings of a run.
        reference: Settings of a recipe, of most runs, or of another run.
        keys: Keys to compare; by default those of ``settings``.

    >>> differences({"train.lr": 0.1, "train.optimizer": "sgd"}, {"train.lr": 0.2})
    {'train.lr': Difference(ours=0.1, reference=0.2), \
'train.optimizer': Difference(ours='sgd', reference=None)}
    """
    return {
        key: Difference(ours, theirs)
        for key in (settings if keys is None else keys)
        if (ours := settings.get(key)) != (theirs := reference.get(key))
    }


def values(found: Mapping[str, Difference]) -> dict[str, Any]:
    """Return the value ``ours`` of each difference."""
    return {key: pair.ours for key, pair in found.items()}


def varying(several: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between mappings, or that a mapping lacks."""
    mappings = list(several)
    return [
        key
        for key in dict.fromkeys(key for one in mappings for key in one)
        if len({repr(one[key]) if key in one else "" for one in mappings}) > 1
    ]


def telling(several: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the `varying` keys, without the hash of the images if the others tell all apart.

    >>> telling([{"world.classes": 3, "images": "f1"}, {"world.classes": 4, "images": "a2"}])
    ['world.classes']
    >>> telling([{"world.classes": 3, "images": "f1"}, {"world.classes": 3, "images": "a2"}])
    ['images']
    """
    mappings = list(several)
    keys = varying(mappings)
    named = [key for key in keys if key != "images"]
    distinct = {repr([one.get(key, "") for key in named]) for one in mappings}
    wanted = {repr([one.get(key, "") for key in keys]) for one in mappings}
    return named if len(distinct) == len(wanted) else keys


def setting_name(key: str) -> str:
    """Return a setting's short name."""
    return NAMES.get(key) or key.rpartition(".")[2]


def setting_key(name: str) -> str:
    """Return the key of a short name such as ``lambda``; other names are returned unchanged."""
    return {short: key for key, short in NAMES.items()}.get(name, name)


def setting_text(value: Any) -> str:
    """Return a setting's value as human-readable text.

    >>> [setting_text(value) for value in (True, None, 0.5, 1.0, "sgd")]
    ['true', 'none', '0.5', '1', 'sgd']
    """
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def assignments(values: Mapping[str, Any]) -> list[str]:
    """Return ``name=value`` of each setting, with its shortest unambiguous name.

    A `Difference` also shows the reference: ``name=value for value``.
    """
    shared = Counter(map(setting_name, values))
    said = []
    for key, value in values.items():
        name = setting_name(key) if shared[setting_name(key)] == 1 else key
        pair = value if isinstance(value, Difference) else (value,)
        said.append(f"{name}={' for '.join(map(setting_text, pair))}")
    return said


def label(values: Mapping[str, Any], most: int = 3) -> str:
    """Return the first settings as a label, and the number of the others.

    >>> label({"partition.heterogeneity": 0.5, "hyper.mu": 0.1})
    'lambda=0.5, mu=0.1'
    """
    said = assignments(values)
    rest = len(said) - most
    return ", ".join(said[:most]) + (f", +{rest} more" if rest > 0 else "")


def natural(value: str) -> list[tuple[int, float, str]]:
    """Return a sort key that orders numbers in a text by their size."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", value)
    return [(0, float(p), "") if n % 2 else (1, 0.0, p) for n, p in enumerate(parts)]
