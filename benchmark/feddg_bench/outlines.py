"""Outlines of methods: the declarations of their classes, in a form that files can store.

Lists, plans and tables read outlines, because a method's module takes seconds to import PyTorch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter, create_model

from feddg_bench.config.schema import MethodSettings
from feddg_bench.protection.possible import obstacles

if TYPE_CHECKING:
    from feddg_bench.core.method import Method

_DECLARED = ("files", "labels", "added", "presets", "preset_of", "impossible")
"""Declarations of a settings class other than its fields."""
_BOUNDS = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}
"""Name of a bound in a JSON schema -> its name in Pydantic."""
_KINDS = {"boolean": bool, "integer": int, "number": float, "string": str, "null": None}


def _written(settings: type[MethodSettings]) -> dict[str, Any]:
    """Return a class of settings as JSON values."""
    schema = settings.model_json_schema()
    own = {name: getattr(settings, name) for name in _DECLARED}
    return {"name": settings.__name__, "fields": schema.get("properties", {}), **own}


def _read(written: Any) -> type[MethodSettings]:
    """Return the class of settings that `_written` wrote; a class is returned unchanged."""
    if isinstance(written, type):
        return written
    own = {name: _tuples(written[name]) for name in _DECLARED}
    own["model_config"] = {"use_attribute_docstrings": False}  # there is no source to read
    base = type("Declared", (MethodSettings,), own)
    made: dict[str, Any] = {}
    for name, schema in written["fields"].items():
        parts = (schema, *schema.get("anyOf", ()))
        bounds = {word: part[key] for part in parts for key, word in _BOUNDS.items() if key in part}
        default = _tuples(schema.get("default", ...))
        about = schema.get("description")
        made[name] = (_kind(schema), Field(default, description=about, **bounds))
    return create_model(written["name"], __base__=base, **made)


def _kind(schema: Mapping[str, Any]) -> Any:
    """Return the type that a JSON schema of a setting describes."""
    if "const" in schema or "enum" in schema:
        return Literal[tuple(schema.get("enum", (schema.get("const"),)))]
    if "anyOf" in schema:
        return Union[tuple(map(_kind, schema["anyOf"]))]  # noqa: UP007 - the members are computed
    if schema["type"] == "array":
        return GenericAlias(tuple, (_kind(schema["items"]), ...))
    return _KINDS[schema["type"]]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _meaning(settings: type[MethodSettings]) -> list[Any]:
    """Return everything that determines how a class of settings checks and converts values."""
    code = settings.__pydantic_decorators__
    named = {*code.field_validators, *code.model_validators, *code.field_serializers}
    return [named, settings.model_post_init, *map(repr, settings.model_fields.items())]


@dataclass(frozen=True)
class Outline:
    """The declarations of a method's class (see `Method`), and facts derived from them.

    Attributes:
        doc: Docstring of the class.
        title: Title of the class, "" if it has none.
        deviations: ``DEVIATIONS`` of its module, ``None`` if it declares none.
        obstacles: Reason why each protection is impossible, see `obstacles`.
    """

    doc: str
    Settings: Annotated[type[MethodSettings], PlainSerializer(_written), BeforeValidator(_read)]
    version: int
    needs: dict[str, Any]
    uplink: dict[str, tuple[str, ...] | dict[str, Any]]
    downlink: tuple[str, ...]
    client_validation: bool
    tasks: tuple[str, ...]
    rgb_only: bool
    title: str
    citation: str
    group: str
    deviations: tuple[str, ...] | None
    obstacles: dict[str, str]


@cache
def _adapter() -> TypeAdapter[Outline]:
    return TypeAdapter(Outline)


def outline_of(method: type[Method]) -> Outline:
    """Return the outline of a method's class."""
    known = {
        "doc": inspect.cleandoc(method.__doc__ or ""),
        "title": vars(method).get("title", ""),
        "deviations": getattr(sys.modules[method.__module__], "DEVIATIONS", None),
        "obstacles": obstacles(method),
    }
    declared = {f.name: getattr(method, f.name) for f in fields(Outline) if f.name not in known}
    return Outline(**known, **declared)


def write_outline(outline: Outline) -> dict[str, Any] | None:
    """Return an outline as JSON values; ``None`` if its settings are more than fields with bounds.

    For example, settings with their own validator need code that only their module can run.
    """
    try:
        written: dict[str, Any] = _adapter().dump_python(outline, mode="json")
        same = _meaning(read_outline(written).Settings) == _meaning(outline.Settings)
    except Exception:  # values that JSON cannot represent
        return None
    return written if same else None


def read_outline(written: Any) -> Outline:
    """Return the outline that `write_outline` wrote.

    Raises:
        ValueError: If ``written`` is not an outline.
    """
    return _adapter().validate_python(written)
