"""Forward passes over several views of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from feddg_bench.core.method import Method


def features_of_each(method: Method, views: Sequence[Tensor]) -> list[Tensor]:
    """Return the features of each view; in one pass unless batch statistics would mix them.

    Args:
        method: The model.
        views: Images (B, 3, H, W) each; B may differ.

    Returns:
        Features (B, D) of each view.
    """
    if method.live_batch_norm:
        return [method.features(view) for view in views]
    return list(method.features(torch.cat(list(views))).split([len(view) for view in views]))
