"""Styles in pixel space: the mean and standard deviation of each colour channel of an image."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6
"""Added to each variance before the root, so that a constant image can be divided by its std."""


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of every channel of every image.

    Args:
        images: (B, C, H, W), any affine scale of pixel values.

    Returns:
        Mean and standard deviation, (B, C) each. The variance is the unbiased one, and the biased
        one, 0, for images of a single pixel, which have no unbiased variance.
    """
    several = images.shape[-2] * images.shape[-1] > 1
    variance = images.var(dim=(-2, -1), correction=int(several))
    return images.mean(dim=(-2, -1)), (variance + EPS).sqrt()


def restyle(images: Tensor, mean: Tensor, std: Tensor, mix: Tensor) -> Tensor:
    """Move every image towards a foreign style: cross-client domain transfer of FedCCRL.

    An image is standardised per channel by its own statistics, which are constants to autograd,
    and given mixed ones: ``mix`` parts its own, ``1 - mix`` parts foreign. The map commutes with a
    normalisation of the channels as long as the foreign statistics are on the scale of the images.
    Nothing is clamped: the result may leave the range of the images.

    FedCCRL (Wang et al., 2024) writes the weight on the foreign pair; for its symmetric Beta
    distribution the two readings are the same.

    Args:
        images: (B, 3, H, W).
        mean: Foreign mean of each image and channel, (B, 3).
        std: Foreign standard deviation, (B, 3), not negative.
        mix: Weight of the image's own statistics, (B,), in [0, 1].

    Returns:
        Images, (B, 3, H, W).
    """
    own_mean, own_std = (s.detach()[..., None, None] for s in channel_statistics(images))
    mix = mix[:, None, None, None]
    new_mean = mix * own_mean + (1 - mix) * mean[..., None, None]
    new_std = mix * own_std + (1 - mix) * std[..., None, None]
    return new_std * (images - own_mean) / own_std + new_mean


def to_bytes(images: Tensor, *, clamp: bool = True) -> Tensor:
    """Return images in [0, 1] as uint8, in their shape: rounded, and clamped to the range.

    Without ``clamp`` fractions are cut off and values wrap around: -5 becomes 251 and 300 becomes
    44, as where FedCCRL's code casts on a CPU; here on every device.
    """
    pixels = images.detach().float() * 255
    if clamp:
        return pixels.clamp(0, 255).round().to(torch.uint8)
    return pixels.to(torch.int64).remainder(256).to(torch.uint8)
