"""Pictures of what was found: the best, the median and the worst case, never the best alone."""

from __future__ import annotations

from io import BytesIO

import torch
from torch import Tensor

SIDE = 128
"""Of an image in a picture, at least, in pixels."""
GAP = 8


def cases(quality: Tensor) -> list[int]:
    """Return the places of the best, the median and the worst of some qualities [n].

    >>> cases(torch.tensor([3.0, 9.0, 1.0, 4.0, 2.0]))
    [1, 0, 2]
    """
    order = quality.argsort(descending=True).tolist()
    return [order[0], order[len(order) // 2], order[-1]]


def sheet(truth: Tensor, found: Tensor, quality: Tensor) -> bytes:
    """Return a PNG file: from left to right best, median and worst, the true images above.

    Args:
        truth: [n, 3, H, W] in [0, 1].
        found: What was made of them, likewise.
        quality: By which cases are chosen, [n].
    """
    from PIL.Image import fromarray

    times = max(1, -(-SIDE // truth.shape[-1]))
    chosen = cases(quality)
    rows = []
    for images in (truth, found):
        big = images[chosen].clamp(0, 1).repeat_interleave(times, 2).repeat_interleave(times, 3)
        gap = torch.ones(*big.shape[1:3], GAP)
        row = [part for image in big for part in (image, gap)][:-1]
        rows.append(torch.cat(row, 2))
    line = torch.ones(rows[0].shape[0], GAP, rows[0].shape[2])
    pixels = (torch.cat([rows[0], line, rows[1]], 1) * 255).round().to(torch.uint8)
    file = BytesIO()
    fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "PNG")
    return file.getvalue()
