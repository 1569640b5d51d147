"""Images with floating-point bands, such as those of satellites."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def resize_bands(bands: NDArray[Any], size: int) -> NDArray[np.float16]:
    """Squash each band separately to a square, bilinearly and with antialiasing.

    Args:
        bands: Floating-point numbers [C, H, W]; not resized if H and W are ``size``.
        size: Pixels a side.

    Returns:
        float16 [size, size, C].

    Raises:
        ValueError: If a value is not finite, or beyond the range of float16.
    """
    from PIL import Image

    if bands.shape[1:] != (size, size):
        images = [Image.fromarray(np.ascontiguousarray(band, dtype=np.float32)) for band in bands]
        resized = [image.resize((size, size), Image.Resampling.BILINEAR) for image in images]
        bands = np.stack([np.asarray(image) for image in resized])
    with np.errstate(over="ignore", invalid="ignore"):
        image = np.ascontiguousarray(bands.transpose(1, 2, 0).astype(np.float16))
    if not np.isfinite(image).all():
        raise ValueError("a value is not a number, or beyond 65,504")
    return image
