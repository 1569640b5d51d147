"""Own settings of methods as plain data: what a class declares, without the class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import GenericAlias
from typing import Any, Literal

from pydantic import ValidationError, create_model
from pydantic.fields import Field, FieldInfo
from pydantic_core import to_jsonable_python

from feddg_bench.config.layers import Layer, bounds_of, limited, paragraph, words_of
from feddg_bench.config.schema import MethodSettings

_TYPES: dict[str, Any] = {"number": float, "int": int, "true or false": bool, "text": str}
"""Types of settings by their words."""


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

        The class is needed for its message if a name or a value is wrong.
        """
        if self.coded:
            return None
        try:
            return self._model.model_validate(given).model_dump(mode="json", warnings=False)
        except ValidationError:
            return None

    @cached_property
    def _model(self) -> type[MethodSettings]:
        """A class with the same fields, by which Pydantic decides as by the method's own."""
        fields: dict[str, Any] = {
            name: (_type_of(one.kind), Field(one.default, **one.bounds))
            for name, one in self.settings.items()
        }
        model = create_model("Own", __base__=MethodSettings, **fields)
        model.presets, model.preset_of = self.presets, self.preset_of
        model.impossible = self.impossible
        return model


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
    return same and bool(_type_of(words_of(annotation)) == annotation)


def _type_of(words: str) -> Any:
    """Return the type that `words_of` describes, ``None`` for any but the usual ones."""
    kind, null, _ = words.partition(" or null")
    each = _TYPES.get(kind.removeprefix("list of "))
    if " | " in kind:
        each = Literal[tuple(kind.split(" | "))]
    elif each and kind.startswith("list of "):
        each = GenericAlias(tuple, (each, ...))
    return each | None if each and null else each
