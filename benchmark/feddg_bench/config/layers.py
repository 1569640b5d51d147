"""Layers of settings; later ones take precedence.

Their order: defaults, the recipe, the method's needs, the recipe's entry for the method, tuned
settings, ``--config`` files, flags, ``KEY=VALUE``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from feddg_bench.common.errors import SettingsError, short, unknown
from feddg_bench.config.names import SYMBOLS, meant
from feddg_bench.config.reading import MAX_DEPTH, MAX_LENGTH, read_yaml
from feddg_bench.config.schema import MANY, RunSettings

S = TypeVar("S", bound=BaseModel)
Layer = dict[str, Any]
"""Nested settings, as in a YAML file."""


def merge(*layers: Mapping[str, Any]) -> Layer:
    """Return the merged layers; later ones take precedence, key by key.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    merged: Layer = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge(merged[key], value) if both else value
    return merged


def dotted(layer: Mapping[str, Any], prefix: str = "") -> Layer:
    """Return a layer's settings by dotted key.

    >>> dotted({"train": {"lr": 0.1}, "seed": 0})
    {'train.lr': 0.1, 'seed': 0}
    """
    flat: Layer = {}
    for key, value in layer.items():
        inner = isinstance(value, Mapping) and prefix.count(".") < MAX_DEPTH  # it may be circular
        flat |= dotted(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def dotted_fields(
    model: type[BaseModel] = RunSettings, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every settable key of ``model``, such as ``train.lr``, with its field."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from dotted_fields(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


@cache
def dotted_keys(model: type[BaseModel] = RunSettings, prefix: str = "") -> tuple[str, ...]:
    """Return every settable key of ``model``, such as ``train.lr``."""
    return tuple(key for key, _ in dotted_fields(model, prefix))


def kind_of(field: FieldInfo) -> str:
    """Return a description of the values that a setting accepts.

    >>> kind_of(RunSettings.model_fields["seed"])
    'int >= 0'
    """
    return limited(words_of(field.annotation), bounds_of(field))


def bounds_of(field: FieldInfo) -> dict[str, Any]:
    """Return the limits of a number by Pydantic's name, such as ``{"ge": 0}``."""
    names = ("ge", "gt", "le", "lt")
    return {n: getattr(limit, n) for limit in field.metadata for n in names if hasattr(limit, n)}


def limited(words: str, bounds: Mapping[str, Any]) -> str:
    """Return a description of the values of a type, given by `words_of`, within limits."""
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if high is not None and high < MANY:
        left, right = "[" if "ge" in bounds else "(", "]" if "le" in bounds else ")"
        limits = f" in {left}{low:g}, {high:g}{right}"
    else:
        limits = "" if low is None else f" {'>=' if 'ge' in bounds else '>'} {low:g}"
    first, null, _ = words.partition(" or null")
    return f"{first}{limits}{null}"


def words_of(annotation: Any) -> str:
    """Return a description of a type of settings."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, inner))
    if get_origin(annotation) is tuple:
        return f"list of {words_of(inner[0])}" if inner[-1] is ... else f"{len(inner)} numbers"
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(words_of, inner))
    names = {str: "text", float: "number", bool: "true or false", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def paragraph(text: str | None) -> str:
    """Return the text of a docstring before its sections, as one line of plain text."""
    return " ".join((text or "").partition("Args:")[0].replace("``", "").split())


def parse_override(text: str, known: Iterable[str] = ()) -> Layer:
    """Return ``KEY=VALUE`` as a nested layer; the value is read as YAML.

    A key may be given by its last part alone if only one known key ends in it, or by a symbol.

    Raises:
        SettingsError: If there is no ``=``, or the key is unknown or ambiguous.

    >>> parse_override("train.lr=0.01")
    {'train': {'lr': 0.01}}
    >>> parse_override("lr=0.01")
    {'train': {'lr': 0.01}}
    >>> parse_override("lambda=0.5")
    {'partition': {'heterogeneity': 0.5}}
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise SettingsError(f"cannot read {text!r}: expected KEY=VALUE, such as train.lr=0.001")
    value = read_yaml(raw, f"the value of {short(text)}")
    return nested(full_key(key, known), value)


def full_key(key: str, known: Iterable[str] = ()) -> str:
    """Return the dotted key for ``key``, given in full, by its last part or by a symbol.

    Keys of ``engine`` have no short form: changes of how a run is computed must be explicit.

    Raises:
        SettingsError: If no setting ends in it, or several do.
    """
    keys = [*dotted_keys(), *known]
    if key in keys or key.startswith(("hyper.", "world.")):
        return key
    if key in SYMBOLS:
        return SYMBOLS[key]
    if "." not in key:
        keys = [k for k in keys if not k.startswith("engine.")]
    ends = [k for k in keys if k.endswith(f".{key}")]
    if len(ends) > 1:
        raise SettingsError(f"setting {key!r} is ambiguous: give one of {', '.join(ends)}")
    if not ends:
        message = unknown("setting", key, keys, meant(key, keys))
        own = "." not in key and "did you mean" not in message
        raise SettingsError(message + f"; if it is the method's own, write hyper.{key}" * own)
    return ends[0]


def nested(key: str, value: Any) -> Layer:
    """Return a layer with one setting, given by dotted key.

    >>> nested("train.lr", 0.1)
    {'train': {'lr': 0.1}}
    """
    for part in reversed(key.split(".", MAX_DEPTH)):
        value = {part: value}
    layer: Layer = value
    return layer


def read_settings(values: Mapping[str, Any]) -> Layer:
    """Return one layer of settings that are given by short, dotted or nested key.

    Raises:
        SettingsError: If a key is unknown or ambiguous, a setting is given twice, or a section
            is not a mapping.

    >>> read_settings({"rounds": 1, "train": {"lr": 0.1}, "hyper.mu": 2})
    {'federation': {'rounds': 1}, 'train': {'lr': 0.1}, 'hyper': {'mu': 2}}
    """
    sections = RunSettings.model_fields
    for key in values:
        if not isinstance(key, str):
            raise SettingsError(
                f"the key {key!r} of settings is no text: expected such as 'rounds'"
            )
    layers = [
        {key: value} if key in sections else nested(full_key(key), value)
        for key, value in values.items()
    ]
    for key, value in values.items():
        if key in sections and not isinstance(value, Mapping) and (inner := _inner(key)):
            raise SettingsError(f"setting {key}: {short(value)} is not valid: {inner}")
    counts = Counter(key for layer in layers for key in dotted(layer))
    if twice := [key for key, times in counts.items() if times > 1]:
        raise SettingsError(f"setting {twice[0]} is given twice, by two names: leave one out")
    return merge(*layers)


def load_layer(path: Path, what: str = "settings file") -> Layer:
    """Read one YAML file of settings.

    Raises:
        SettingsError: If it is missing, not YAML or not a mapping.
    """
    try:
        with path.open(encoding="utf-8") as file:  # with a limit: it may be /dev/zero
            layer = read_yaml(file.read(MAX_LENGTH + 1), f"{what} {path}")
    except OSError as error:
        raise SettingsError(f"cannot read {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{what} {path} is not YAML: it is not text in UTF-8") from error
    if layer is None:
        return {}
    if not isinstance(layer, dict):
        raise SettingsError(
            f"{what} {path} must hold KEY: VALUE lines, not a {type(layer).__name__}"
        )
    return layer


_EXPECTED = {
    "tuple_type": "expected a list, such as [a, b]",
    "list_type": "expected a list, such as [a, b]",
    "dict_type": "expected KEY: VALUE lines",
    "path_type": "expected a path",
}
"""Pydantic's error type -> the expected value, in terms of YAML rather than Python."""


def validate(model: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    """Build ``model``, or raise an error of one sentence about the first fault.

    Raises:
        SettingsError: With the key, the given value and the expected value.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        errors = error.errors()  # a misspelt key is also reported as missing
        first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
        key = prefix + ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            keys = [prefix + k for k in dotted_keys(model)]
            raise SettingsError(unknown("setting", key, keys, meant(key, keys))) from error
        if first["type"] == "value_error":
            where = f"{key}: " if key and key.rstrip(".") != prefix.rstrip(".") else ""
            raise SettingsError(where + str(first["ctx"]["error"])) from error
        expected = _EXPECTED.get(first["type"], first["msg"])
        if first["type"] == "model_type":
            expected = _inner(key, model, prefix) or f"expected settings by name, such as {key}"
        if first["type"] == "missing":
            raise SettingsError(f"setting {key} is missing") from error
        given = f"{short(first['input'])} is not valid"
        raise SettingsError(
            f"setting {key}: {given}: {expected[:1].lower()}{expected[1:]}"
        ) from error


def _inner(key: str, model: type[BaseModel] = RunSettings, prefix: str = "") -> str:
    """Return the expected content of a group of settings; ``""`` for a single setting."""
    keys = [*dotted_keys(model, prefix), "hyper.NAME"]
    inner = next((k for k in keys if k.startswith(f"{key}.")), "")
    return inner and f"expected settings by name, such as {inner}"
