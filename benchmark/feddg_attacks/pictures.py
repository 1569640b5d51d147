"""Pictures of results: the best, the median and the worst case, never the best alone."""

from __future__ import annotations

from io import BytesIO

import torch
from torch import Tensor

SIDE = 128
"""Least side of an image in a picture, in pixels."""
GAP = 8
LEFT, TOP = 64, 28
"""Margins for names, in pixels."""


def cases(quality: Tensor) -> list[int]:
    """Return the indices of the best, the median and the worst of the qualities [n].

    >>> cases(torch.tensor([3.0, 9.0, 1.0, 4.0, 2.0]))
    [1, 0, 2]
    """
    order = quality.argsort(descending=True).tolist()
    return [order[0], order[len(order) // 2], order[-1]]


def sheet(truth: Tensor, guesses: Tensor, quality: Tensor) -> bytes:
    """Return a PNG file: from left to right best, median and worst, with the true images above.

    Args:
        truth: [n, 3, H, W] in [0, 1].
        guesses: Their reconstructions by the attack, likewise.
        quality: Quality in dB by which cases are chosen, [n].
    """
    from PIL import Image, ImageDraw, ImageFont

    times = max(1, -(-SIDE // truth.shape[-1]))
    height, width = (times * side for side in truth.shape[-2:])
    chosen = cases(quality)
    whole = LEFT + 3 * (width + GAP), TOP + 2 * (height + GAP)
    picture = Image.new("RGB", whole, "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size=14)
    for row, (name, images) in enumerate((("true", truth), ("found", guesses))):
        y = TOP + row * (height + GAP)
        pen.text((LEFT - GAP, y + height // 2), name, "black", font, anchor="rm")
        for column, place in enumerate(chosen):
            pixels = (images[place].clamp(0, 1) * 255).round().to(torch.uint8)
            one = Image.fromarray(pixels.permute(1, 2, 0).numpy())
            big = one.resize((width, height), Image.Resampling.NEAREST)
            picture.paste(big, (LEFT + column * (width + GAP), y))
    for column, (case, place) in enumerate(zip(("best", "median", "worst"), chosen, strict=True)):
        middle = LEFT + column * (width + GAP) + width // 2
        text = f"{case}, {quality[place]:.1f} dB"
        pen.text((middle, TOP // 2), text, "black", font, anchor="mm")
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
