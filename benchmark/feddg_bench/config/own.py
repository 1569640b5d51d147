"""Own settings of methods as plain data: what a class declares, without the class."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import Field, FieldInfo
from pydantic_core import to_jsonable_python

from feddg_bench.config.layers import Layer, bounds_of, limited, paragraph, words_of
from feddg_bench.config.schema import MethodSettings

_PLAIN = {"number": (float, int), "int": (int,), "true or false": (bool,)}
"""Kind of a setting -> types of values that its class takes as they are, numbers as floats."""

_EXACT = 2**53
"""Floats represent every whole number below."""


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        default: As a JSON value; ``None`` also if there is none.
        kind: The type of its values in words, such as ``number`` or ``mean | sum``.
        meaning: In one line.
        bounds: Limits of a number by Pydantic's name, such as ``{"ge": 0}``.
    """

    default: Any
    kind: str
    meaning: str
    bounds: dict[str, Any] = field(default_factory=dict)

    @property
    def accepts(self) -> str:
        """Description of the values that it accepts."""
        return limited(self.kind, self.bounds)

    def takes(self, value: Any) -> bool:
        """Return whether a value is valid for certain; only the class can tell of others."""
        kind, null, _ = self.kind.partition(" or null")
        if value is None:
            return bool(null)
        if isinstance(value, str):
            return value in kind.split(" | ") and " | " in kind
        if isinstance(value, list):
            return bool(value == [] == self.default)
        within = (getattr(operator, name)(value, limit) for name, limit in self.bounds.items())
        return type(value) in _PLAIN.get(kind, ()) and abs(value) < _EXACT and all(within)


@dataclass(frozen=True)
class OwnSettings:
    """The declarations of a subclass of `MethodSettings`.

    Attributes:
        settings: By name.
        coded: Whether the class has validators or types of its own: only it knows its values.
    """

    settings: dict[str, Setting] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    presets: dict[str, dict[str, Any]] = field(default_factory=dict)
    preset_of: str = MethodSettings.preset_of
    impossible: tuple[tuple[dict[str, Any], str], ...] = ()
    coded: bool = False

    def values(self, given: Mapping[str, Any]) -> Layer | None:
        """Return every value as JSON values, ``None`` if only the class can tell.

        The class is needed for its message if a name or a value is wrong, and for values that it
        converts, such as ``"0.1"`` for a number.
        """
        given = {**self.presets.get(str(given.get(self.preset_of)), {}), **given}
        known = given.keys() <= self.settings.keys()
        if self.coded or not known or not all(self.settings[n].takes(v) for n, v in given.items()):
            return None
        values = {name: given.get(name, one.default) for name, one in self.settings.items()}
        for name, value in values.items():
            if type(value) is int and self.settings[name].kind.startswith("number"):
                values[name] = float(value)
            elif value == 0.0 and type(value) is float:
                values[name] = 0.0  # in place of -0.0
        for combination, _ in self.impossible:
            if all(values[name] == value for name, value in combination.items()):
                return None
        return values


def own_settings_of(model: type[MethodSettings]) -> OwnSettings:
    """Return the declarations of a class."""
    defaults = model.model_construct().model_dump(mode="json", warnings=False)
    return OwnSettings(
        {name: setting_of(each, defaults.get(name)) for name, each in model.model_fields.items()},
        model.files,
        model.labels,
        model.added,
        to_jsonable_python(model.presets),
        model.preset_of,
        tuple((to_jsonable_python(values), why) for values, why in model.impossible),
        _has_code(model),
    )


def setting_of(field: FieldInfo, default: Any) -> Setting:
    """Return the declarations of a field."""
    words, meaning = words_of(field.annotation), paragraph(field.description)
    return Setting(default, words, meaning, bounds_of(field))


def _has_code(model: type[MethodSettings]) -> bool:
    """Return whether a class is more than fields with a default and bounds."""
    ours, theirs = MethodSettings.__pydantic_decorators__, model.__pydantic_decorators__
    kinds = ("field_validators", "model_validators", "field_serializers", "model_serializers")
    same = all(getattr(ours, kind).keys() == getattr(theirs, kind).keys() for kind in kinds)
    same &= model.model_post_init is MethodSettings.model_post_init
    return not same or not all(map(_is_plain, model.model_fields.values()))


def _is_plain(field: FieldInfo) -> bool:
    again: Any = Field(field.default, description=field.description, **bounds_of(field))
    annotation: Any = field.annotation
    same = repr(FieldInfo.from_annotated_attribute(annotation, again)) == repr(field)
    return same and all(isinstance(choice, str) for choice in _choices(field.annotation))


def _choices(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [*inner]
    return [choice for part in inner for choice in _choices(part)]
