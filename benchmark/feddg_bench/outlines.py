"""Outlines of methods: the declarations of their classes, in a form that files can store.

Lists, plans and tables read outlines, because a method's module takes seconds to import PyTorch.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from feddg_bench.config.own import OwnSettings, own_settings_of
from feddg_bench.protection.possible import obstacles

if TYPE_CHECKING:
    from feddg_bench.core.method import Method


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
    own: OwnSettings
    version: int
    needs: dict[str, Any]
    uplink: dict[str, tuple[str, ...] | dict[str, Any]]
    downlink: tuple[str, ...]
    client_validation: bool
    tasks: tuple[str, ...]
    acts_on: str
    needs_text: bool
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
        "own": own_settings_of(method.Settings),
        "title": vars(method).get("title", ""),
        "deviations": getattr(sys.modules[method.__module__], "DEVIATIONS", None),
        "obstacles": obstacles(method),
    }
    declared = {f.name: getattr(method, f.name) for f in fields(Outline) if f.name not in known}
    return Outline(**known, **declared)


def write_outline(outline: Outline) -> dict[str, Any] | None:
    """Return an outline as JSON values; ``None`` if only the class knows its settings.

    For example, settings with their own validator need code that only their module can run.
    """
    if outline.own.coded:
        return None
    try:
        written: dict[str, Any] = _adapter().dump_python(
            outline, mode="json", exclude_defaults=True
        )
    except ValueError:  # values that JSON cannot represent
        return None
    return written


def read_outline(written: Any) -> Outline:
    """Return the outline that `write_outline` wrote.

    Raises:
        ValueError: If ``written`` is not an outline.
    """
    return _adapter().validate_python(written)
