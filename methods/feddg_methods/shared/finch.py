"""FINCH: parameter-free clustering by first neighbours (Sarfraz et al., CVPR 2019).

A level links every row with its nearest other row; the connected components are the clusters. The
next level does the same with the means of the original rows in each cluster. A later level with a
single cluster is dropped. No distance threshold stops the merging.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from numpy.typing import ArrayLike
from torch import Tensor

TIE = 1e-12
"""Distances this close count as equal, and the first index wins. The bound is above the rounding of
float64 sums."""


def finch(
    rows: Tensor | ArrayLike, *, distance: Literal["cosine", "euclidean"] = "cosine"
) -> list[Tensor]:
    """Return FINCH's partitions of the rows, finest first.

    The package ``finch-clust`` does the merging. First neighbours are computed here in float64, so
    the finest partition is exact for any number of rows, even for nearly equal ones. The package
    keeps rows in float32, so coarser levels can break near-ties of relative distance 1e-7
    differently from `finch_gram`, which is exact at every level.

    Args:
        rows: [N, F] with N >= 1. The memory needed is 8 N^2 bytes.
        distance: ``cosine`` (a row of zeros is at distance 1 from every other) or ``euclidean``.

    Returns:
        Labels [N], int64, one tensor per level, numbered by first occurrence.
    """
    rows = torch.as_tensor(rows).detach()
    points = rows.to("cpu", torch.float64)
    if len(points) == 1:
        return [rows.new_zeros(1, dtype=torch.int64)]
    if distance == "cosine":
        distances = _cosine_distances(points @ points.T)
    else:
        # The default expands the square and loses half of the digits of small distances.
        distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    with warnings.catch_warnings():
        # The import warns that approximate neighbours are not installed; they are not needed.
        warnings.filterwarnings("ignore", message="pynndescent is not installed")
        from finch import FINCH
    levels, _, _ = FINCH(
        points.numpy(),
        initial_rank=_nearest(distances).numpy(),
        distance=distance,
        ensure_early_exit=False,
        ann_threshold=len(points),
    )
    return [_numbered(torch.from_numpy(level)).to(rows.device) for level in levels.T]


def finch_gram(gram: Tensor) -> list[Tensor]:
    """Return FINCH's partitions for the cosine distance, from inner products alone.

    Inner products between cluster means are block averages of the Gram matrix, so the rows are
    not needed. Runs in float64 on the matrix's device.

    Args:
        gram: [N, N], F F^T for rows F, with N >= 1.

    Returns:
        Labels [N], int64, one tensor per level, finest first, numbered by first occurrence.
    """
    gram = gram.detach().double()
    labels = torch.arange(len(gram), device=gram.device)
    partitions: list[Tensor] = []
    while len(labels.unique()) > 1 or not partitions:
        labels = _components(_nearest(_cosine_distances(_block_means(gram, labels))))[labels]
        partitions.append(labels)
    return partitions[: max(1, len(partitions) - 1)]


def _block_means(gram: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of ``gram`` over every pair of clusters, [J, J]."""
    counts = labels.bincount()
    sums = gram.new_zeros(len(counts), len(gram)).index_add_(0, labels, gram)
    sums = gram.new_zeros(len(counts), len(counts)).index_add_(1, labels, sums)
    return sums / counts.outer(counts)


def _cosine_distances(gram: Tensor) -> Tensor:
    """Return cosine distances [J, J] from inner products; 1 where a norm is zero."""
    norms = gram.diagonal().clamp(min=0).sqrt()
    norms = torch.where(norms > 0, norms, 1)
    return 1 - gram / norms.outer(norms)


def _nearest(distances: Tensor) -> Tensor:
    """Return the first index of the smallest distance to another row, int64 [J]."""
    others = distances.clone().fill_diagonal_(torch.inf)
    return (others <= others.amin(1, keepdim=True) + TIE).int().argmax(1)


def _components(nearest: Tensor) -> Tensor:
    """Return the connected components [J] of the undirected edges (i, nearest[i])."""
    lowest = rows = torch.arange(len(nearest), device=nearest.device)
    while True:
        # Take the smaller label over each edge in both directions, then that label's own label:
        # at the fixed point every row carries the smallest index of its component.
        spread = torch.minimum(lowest, lowest[nearest])
        offered = torch.where(nearest == rows[:, None], spread, len(rows))
        spread = torch.minimum(spread, offered.amin(1))
        spread = spread[spread]
        if torch.equal(spread, lowest):
            components: Tensor = lowest.unique(return_inverse=True)[1]
            return components
        lowest = spread


def _numbered(labels: Tensor) -> Tensor:
    """Return the labels [N] renumbered 0, 1, ... by first occurrence."""
    first = (labels == labels[:, None]).int().argmax(1)
    numbered: Tensor = first.unique(return_inverse=True)[1]
    return numbered
