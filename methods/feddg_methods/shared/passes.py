"""Helpers for views of a batch: features in one pass, widened half precision, bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from feddg_bench.core.method import Method


def features_of_each(method: Method, views: Sequence[Tensor]) -> list[Tensor]:
    """Return the features of each view; in one pass unless batch statistics would mix them.

    Args:
        method: The model.
        views: Images [B, 3, H, W] each; B can differ.

    Returns:
        Features [B, D] of each view.
    """
    if method.live_batch_norm:
        return [method.features(view) for view in views]
    return list(method.features(torch.cat(list(views))).split([len(view) for view in views]))


def widened(values: Tensor) -> Tensor:
    """Return half precision as float32, other types as they are.

    Distances and exponentials of similarities are unreliable in half precision.
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def to_bytes(images: Tensor, *, clamp: bool = True) -> Tensor:
    """Return images in [0, 1] as uint8, in their shape: rounded, and clamped to the range.

    Without ``clamp``, fractions are truncated and values wrap around: -5 becomes 251 and 300
    becomes 44. FedCCRL's code does this when it casts on a CPU; here it happens on every device.
    """
    pixels = images.detach().float() * 255
    if clamp:
        return pixels.clamp(0, 255).round().to(torch.uint8)
    return pixels.to(torch.int64).remainder(256).to(torch.uint8)
