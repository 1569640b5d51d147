"""Declared forms of the clients' payloads, and a check of declarations; needs no PyTorch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from feddg_bench.common.errors import PluginError

Form = str | Mapping[str, str]
"""The form that a client's payload must have.

For a dict of model tensors: ``model``, ``model without PREFIX`` or ``model within PREFIX`` (names
then lack the prefix), with ``part of`` before it if tensors may be missing. Otherwise: the
`feddg_bench.core.flaws.form_of` a number, or of every tensor in the payload, or several forms
separated by `` | ``. In place of a size, a capital letter stands for a number that all clients
share, and a small letter for one that is the same throughout one reply. "" allows everything. A
mapping gives a form to each key of a dict, and all keys must be present.
"""

MODEL = re.compile(r"(part of )?model(?: (within|without) (.+))?")

_TYPE = r"(?:bool|u?int(?:8|16|32|64)|b?float16|float(?:32|64)|float8_\w+|complex(?:32|64|128))"
_SIZE = r"(?:\d+|[A-Za-z])"
_LEAF = re.compile(rf"bool|int|float|str|NoneType|{_TYPE} \[(?:{_SIZE}(?:, {_SIZE})*)?\]")


def check_uplink(method: str, uplink: Any) -> None:
    """Check that a method's ``uplink`` is well-formed.

    Raises:
        PluginError: If a client function has neither names nor forms, or a form cannot be read, so
            that no reply could match it.
    """
    if not isinstance(uplink, Mapping):
        raise PluginError(
            f"uplink of the method {method} is {uplink!r}; expected what each client function "
            f"sends, such as {{'fit': ('weights',)}}"
        )
    for call, declared in uplink.items():
        if isinstance(declared, Mapping):
            _check_forms(f"uplink[{call!r}] of the method {method}", declared)
        elif not isinstance(declared, (tuple, list)):
            raise PluginError(
                f"uplink[{call!r}] of the method {method} is {declared!r}; expected a tuple of "
                f"names, such as ('weights',), or forms by name"
            )


def _check_forms(where: str, forms: Mapping[str, Any]) -> None:
    for name, form in forms.items():
        if isinstance(form, Mapping):
            _check_forms(f"{where}, in {name!r},", form)
        elif not isinstance(form, str) or not (
            form == "" or MODEL.fullmatch(form) or all(map(_LEAF.fullmatch, form.split(" | ")))
        ):
            raise PluginError(
                f"{where} gives {name!r} the form {form!r}, which cannot be read; expected one "
                f"such as 'float32 [2, C]', 'int', 'model' or '' for any"
            )
