"""Channel styles: statistics, clusters and transfer by AdaIN.

A style is a tensor [2, C] in float32: the mean and the standard deviation of each channel. AdaIN is
by Huang and Belongie, ICCV 2017; the client and server styles are those of PARDON (Nguyen et al.,
ICDCS 2025) and its earlier version FISC.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-5
"""Added to every variance before its square root."""

Sigma = Literal["mixture", "mean"]


def image_styles(maps: Tensor) -> Tensor:
    """Return the style of each image, as AdaIN measures content.

    Args:
        maps: [B, C, H, W]; half precision is measured in float32.

    Returns:
        [B, 2, C]: mean and sqrt(variance + 1e-5), the variance unbiased over the positions, or
        biased (hence 0) for a single position.
    """
    positions = maps.to(torch.promote_types(maps.dtype, torch.float32)).flatten(2)
    variance, mean = torch.var_mean(positions, 2, correction=min(1, positions.shape[2] - 1))
    return torch.stack([mean, (variance + EPSILON).sqrt()], 1)


def adain(content: Tensor, mean: Tensor, std: Tensor, strength: float = 1.0) -> Tensor:
    """Give content maps the channel statistics of a style (AdaIN, Eq. 8 and 14).

    Args:
        content: [B, C, H, W].
        mean: The style's mean [C], or one for each image [B, C].
        std: The style's standard deviation, in the same shape, positive.
        strength: alpha in [0, 1]: 0 returns the content, 1 the fully restyled maps.

    Returns:
        [B, C, H, W] in the content's dtype; computed in float32 at least.
    """
    own = image_styles(content)[..., None, None]  # [B, 2, C, 1, 1]
    maps, mean, std = content.to(own.dtype), mean[..., None, None], std[..., None, None]
    restyled = (maps - own[:, 0]) / own[:, 1] * std.to(own) + mean.to(own)
    return torch.lerp(maps, restyled, strength).to(content.dtype)


# ------------------------------------------------------------------------- client styles


def image_moments(maps: Tensor) -> Tensor:
    """Return E[f] and E[f^2] of every image over its positions.

    Args:
        maps: [N, C, H, W].

    Returns:
        [N, 2, C], float64: E[f^2] - E[f]^2 suffers cancellation in lower precision.
    """
    positions = maps.double().flatten(2)
    return torch.stack([positions.mean(2), positions.square().mean(2)], 1)


def style_from_moments(moments: Tensor, labels: Tensor, *, sigma: Sigma = "mixture") -> Tensor:
    """Return a client's style from the moments of its images; clusters have equal weight.

    Args:
        moments: [N, 2, C] from `image_moments`, of maps of the same size.
        labels: Clusters of the images [N], 0, 1, ... without gaps.
        sigma: ``mixture``: std of the equal-weight mixture of the clusters, as in PARDON's code;
            ``mean``: mean of the clusters' stds, as in its paper.

    Returns:
        [2, C], float32; biased variances.
    """
    labels = labels.to(moments.device)
    counts = labels.bincount()
    sums = moments.new_zeros(len(counts), *moments.shape[1:]).index_add_(0, labels, moments)
    clusters = sums / counts[:, None, None]  # [J, 2, C]
    centre = clusters.mean(0)
    std = _std(centre) if sigma == "mixture" else _std(clusters).mean(0)
    return torch.stack([centre[0], std]).float()


def pooled_style(moments: Tensor) -> Tensor:
    """Return the style [2, C] of all positions of all images together.

    This is CCST's overall style, and PARDON's client style without clusters (ablation v1).
    """
    return style_from_moments(moments, torch.zeros(len(moments), dtype=torch.int64))


def _std(moments: Tensor) -> Tensor:
    """Return sqrt(E[f^2] - E[f]^2 + 1e-5) of moments [..., 2, C]."""
    first, second = moments.unbind(-2)
    return ((second - first.square()).clamp(min=0) + EPSILON).sqrt()
