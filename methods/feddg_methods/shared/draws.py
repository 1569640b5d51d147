"""Random draws shared by several methods, on the CPU so that all devices get the same."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from feddg_methods.shared.choices import choose


def draw_rows(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw ``size`` row indices below ``count``, without replacement if there are enough rows.

    Args:
        count: Rows to choose from, at least 1.
        size: Number of indices to draw.
        generator: On the CPU.

    Returns:
        int64 (size,).
    """
    if count >= size:
        return torch.randperm(count, generator=generator)[:size]
    return torch.randint(count, (size,), generator=generator)


def share_count(count: int, ratio: float, rounding: Literal["ceil", "floor"] = "ceil") -> int:
    """Return the number of images in the share ``ratio`` of ``count`` images.

    Args:
        count: At least 1.
        ratio: In (0, 1].
        rounding: ``ceil``, which gives at least 1, or ``floor``, which can give 0.

    >>> share_count(25, 0.1), share_count(25, 0.1, "floor")
    (3, 2)
    """
    exact = round(ratio * count, 9)  # in floating point 0.07 x 100 is slightly above 7
    rounded = choose("rounding", rounding, {"ceil": math.ceil, "floor": math.floor})(exact)
    return max(1, rounded) if rounding == "ceil" else rounded
