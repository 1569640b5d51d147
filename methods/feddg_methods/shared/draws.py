"""Random draws that several methods share; all on the CPU, so that devices agree on them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from feddg_methods.shared.choices import choose


def draw_rows(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw ``size`` row numbers below ``count``, without replacement if there are enough.

    Args:
        count: Rows to choose from, at least 1.
        size: How many to draw.
        generator: On the CPU.

    Returns:
        int64 (size,).
    """
    if count >= size:
        return torch.randperm(count, generator=generator)[:size]
    return torch.randint(count, (size,), generator=generator)


def share_count(count: int, ratio: float, rounding: Literal["ceil", "floor"] = "ceil") -> int:
    """Return how many images make up the share ``ratio`` of ``count`` images.

    Args:
        count: At least 1.
        ratio: In (0, 1].
        rounding: ``ceil``, which gives at least 1, or ``floor``, which may give 0.

    >>> share_count(25, 0.1), share_count(25, 0.1, "floor")
    (3, 2)
    """
    exact = round(ratio * count, 9)  # 0.07 x 100 is a little more than 7
    rounded = choose("rounding", rounding, {"ceil": math.ceil, "floor": math.floor})(exact)
    return max(1, rounded) if rounding == "ceil" else rounded
