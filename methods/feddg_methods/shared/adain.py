"""Channel styles: their statistics, their clusters and the transfer by AdaIN.

A style is a tensor [2, C] in float32: the mean and the standard deviation of each channel. AdaIN is
Huang and Belongie, ICCV 2017; the client and server styles are PARDON's (Nguyen et al., ICDCS 2025)
and those of its earlier version FISC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from feddg_methods.shared.finch import finch

EPSILON = 1e-5
"""Added to every variance before its square root."""

Sigma = Literal["mixture", "mean"]
Preset = Literal["released", "paper", "artefact"]


def image_styles(maps: Tensor) -> Tensor:
    """Return the style of every image by itself, as AdaIN measures content.

    Args:
        maps: [B, C, H, W]; half precision is measured in float32.

    Returns:
        [B, 2, C]: mean and sqrt(variance + 1e-5), the variance unbiased over the positions, or
        biased (that is 0) where there is only one.
    """
    positions = maps.to(torch.promote_types(maps.dtype, torch.float32)).flatten(2)
    variance, mean = torch.var_mean(positions, 2, correction=min(1, positions.shape[2] - 1))
    return torch.stack([mean, (variance + EPSILON).sqrt()], 1)


def adain(content: Tensor, mean: Tensor, std: Tensor, strength: float = 1.0) -> Tensor:
    """Give content maps the channel statistics of a style (AdaIN, Eq. 8 and 14).

    Args:
        content: [B, C, H, W].
        mean: The style's [C], or one for each image [B, C].
        std: The style's, in the same shape, positive.
        strength: alpha in [0, 1]: 0 returns the content, 1 the fully restyled maps.

    Returns:
        [B, C, H, W] in the content's dtype; computed in float32 at least.
    """
    own = image_styles(content)[..., None, None]  # (B, 2, C, 1, 1)
    maps, mean, std = content.to(own.dtype), mean[..., None, None], std[..., None, None]
    restyled = (maps - own[:, 0]) / own[:, 1] * std.to(own) + mean.to(own)
    return torch.lerp(maps, restyled, strength).to(content.dtype)


# ------------------------------------------------------------------------- client styles


def image_moments(maps: Tensor) -> Tensor:
    """Return E[f] and E[f^2] of every image over its positions.

    Args:
        maps: [N, C, H, W].

    Returns:
        [N, 2, C], float64: the difference E[f^2] - E[f]^2 cancels in lower precision.
    """
    positions = maps.double().flatten(2)
    return torch.stack([positions.mean(2), positions.square().mean(2)], 1)


def gram_and_moments(
    encode_batches: Callable[[], Iterable[Tensor]], *, budget_bytes: int = 2**30
) -> tuple[Tensor, Tensor]:
    """Return what a client's style needs of its maps, without holding more than a budget of them.

    The maps of the first batches that fit are held in float64 and multiplied with those of all
    later batches; then the batches are encoded again for the next group, ceil(total / budget)
    times in all. The result does not depend on the budget.

    Args:
        encode_batches: Returns maps [B, C, H, W] batch by batch, the same at every call.
        budget_bytes: Size of the maps to hold, 8 bytes a number; one batch is held in any case
            and one more passes by.

    Returns:
        The Gram matrix [N, N] of the flattened maps and `image_moments` [N, 2, C], both float64
        and in the order of the images.
    """
    moments: list[Tensor] = []
    blocks: dict[tuple[int, int], Tensor] = {}
    start = 0  # first batch of the group that is held in this pass
    while True:
        held: list[Tensor] = []
        held_bytes = 0
        for index, maps in enumerate(encode_batches()):
            if start == 0:
                moments.append(image_moments(maps))
            if index < start:
                continue
            rows = maps.double().flatten(1)
            fits = not held or held_bytes + rows.nbytes <= budget_bytes
            if fits and index == start + len(held):
                held.append(rows)
                held_bytes += rows.nbytes
            for column, other in enumerate(held, start):
                blocks[index, column] = rows @ other.T
        start += len(held)
        if start == len(moments):
            break
    batches = range(len(moments))
    lower = {(j, i): block.T for (i, j), block in blocks.items()}
    blocks = lower | blocks
    gram = torch.cat([torch.cat([blocks[i, j] for j in batches], 1) for i in batches])
    return gram, torch.cat(moments)


def style_from_moments(moments: Tensor, labels: Tensor, *, sigma: Sigma = "mixture") -> Tensor:
    """Return a client's style from the moments of its images; clusters count equally.

    Args:
        moments: [N, 2, C] from `image_moments`, of maps of one size.
        labels: Clusters of the images [N], 0, 1, ... without gaps.
        sigma: ``mixture``: std of the equal-weight mixture of the clusters, as in PARDON's code;
            ``mean``: mean of the clusters' stds, as in its paper.

    Returns:
        [2, C], float32; biased variances.
    """
    labels = labels.to(moments.device)
    counts = labels.bincount()
    sums = moments.new_zeros(len(counts), *moments.shape[1:]).index_add_(0, labels, moments)
    clusters = sums / counts[:, None, None]  # (J, 2, C)
    centre = clusters.mean(0)
    std = _std(centre) if sigma == "mixture" else _std(clusters).mean(0)
    return torch.stack([centre[0], std]).float()


def cluster_style(maps: Tensor, labels: Tensor, *, sigma: Sigma = "mixture") -> Tensor:
    """Return a client's style [2, C] from its maps [N, C, H, W]; see `style_from_moments`."""
    return style_from_moments(image_moments(maps), labels, sigma=sigma)


def pooled_style(moments: Tensor) -> Tensor:
    """Return the style [2, C] of all positions of all images together.

    CCST's overall style, and PARDON without clusters at the client (ablation v1).
    """
    return style_from_moments(moments, torch.zeros(len(moments), dtype=torch.int64))


def perturb_style(style: Tensor, noise: Tensor, *, shrink: float) -> Tensor:
    """Return (1 - shrink) style + noise, with standard deviations kept at least sqrt(1e-5).

    The protection of uploaded styles in FISC (Table 10), which follows FedPCL.

    Args:
        style: [2, C].
        noise: [2, C], drawn from N(0, s^2) by the caller.
        shrink: p in [0, 1]; it scales the style, not the noise.
    """
    mean, std = (1 - shrink) * style + noise
    return torch.stack([mean, std.clamp(min=EPSILON**0.5)])


# -------------------------------------------------------------------------- server style


def interpolation_style(
    styles: Tensor, *, preset: Preset = "released", median: Literal["lower", "average"] = "lower"
) -> Tensor:
    """Return the style that the server broadcasts: the median of FINCH's finest clusters.

    Every coordinate takes its own median, so mean and std may come from different clusters.

    Args:
        styles: Of the clients [K, 2, C], K >= 1; not weighted.
        preset: ``released`` and ``paper``: cosine distance, mean inside a cluster; ``artefact``:
            Euclidean distance, median inside a cluster (the average of the middle two of an even
            number), which reproduces the files shipped with PARDON's code.
        median: Over an even number of clusters, the lower of the middle two or their average.

    Returns:
        [2, C].
    """
    rows = styles.flatten(1)
    if preset == "artefact":
        labels = finch(rows, distance="euclidean")[0]
        centres = [_average_median(cluster) for cluster in _clusters(rows, labels)]
    else:
        labels = finch(rows, distance="cosine")[0]
        centres = [cluster.mean(0) for cluster in _clusters(rows, labels)]
    stacked = torch.stack(centres)  # (J, 2 C)
    centre = stacked.median(0).values if median == "lower" else _average_median(stacked)
    return centre.view_as(styles[0])


def mean_style(styles: Tensor) -> Tensor:
    """Return the plain mean [2, C] of the clients' styles [K, 2, C] (PARDON's ablation v2)."""
    return styles.mean(0)


def _std(moments: Tensor) -> Tensor:
    """Return sqrt(E[f^2] - E[f]^2 + 1e-5) of moments [..., 2, C]."""
    first, second = moments.unbind(-2)
    return ((second - first.square()).clamp(min=0) + EPSILON).sqrt()


def _clusters(rows: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the rows of each cluster."""
    return [rows[labels == cluster] for cluster in range(int(labels.max()) + 1)]


def _average_median(rows: Tensor) -> Tensor:
    """Return the median over rows [J, F]; of an even number, the mean of the middle two."""
    middle = rows.sort(0).values
    count = len(rows)
    return (middle[(count - 1) // 2] + middle[count // 2]) / 2
