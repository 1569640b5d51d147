"""Look up what a named option stands for, or say which names there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor

from feddg_bench.common.errors import SettingsError, unknown

T = TypeVar("T")


def choose(kind: str, name: str, choices: Mapping[str, T]) -> T:
    """Return what ``name`` stands for.

    Args:
        kind: What is being chosen, such as ``"reduction"``; used in the error only.
        name: The name given by the caller.
        choices: Meaning of each name.

    Raises:
        SettingsError: If there is no such name.

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
