"""Look up the value of a named option, or list the valid names in an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor

from feddg_bench.common.errors import SettingsError, unknown

T = TypeVar("T")


def choose(kind: str, name: str, choices: Mapping[str, T]) -> T:
    """Return the value of ``name``.

    Args:
        kind: Kind of option, such as ``"reduction"``; used in the error only.
        name: The name given by the caller.
        choices: Value of each name.

    Raises:
        SettingsError: If ``name`` is unknown.

    >>> choose("reduction", "mean", {"mean": 1, "sum": 2})
    1
    """
    if name not in choices:
        raise SettingsError(unknown(kind, name, choices))
    return choices[name]


def reduced(rows: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
    """Return the mean or the sum [P] of rows [K, P].

    Raises:
        SettingsError: If ``reduction`` is unknown.
    """
    return choose("reduction", reduction, {"mean": torch.mean, "sum": torch.sum})(rows, dim=0)
