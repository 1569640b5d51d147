"""Look up the value of a named option, or list the valid names in an error; check a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.core.method import Method

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


def check_linear(method: Method) -> None:
    """Refuse classifiers other than the plain linear one, whose weights a server half computes.

    Raises:
        SettingsError: If the classifier is of another kind.
    """
    if type(method.classifier) is not nn.Linear:
        raise SettingsError(
            f"{type(method).__name__} computes a linear classifier: set backbone.classifier=linear"
        )
