"""Conversion of payloads to float64 vectors and back, and clipping and noise of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddg_bench.common.errors import PluginError, SettingsError
from feddg_bench.common.streams import generator
from feddg_bench.core.flaws import form_of
from feddg_bench.core.messages import leaves

Vector = NDArray[np.float64]
"""Numbers in float64, [d]."""


def to_vector(payload: Any) -> Vector:
    """Return the tensors and numbers of a payload, one after the other.

    Raises:
        PluginError: If it holds anything else.
    """
    parts = [np.zeros(0)]
    for name, leaf in leaves(payload):
        if isinstance(leaf, Tensor):
            parts.append(leaf.detach().cpu().reshape(-1).double().numpy())
        elif isinstance(leaf, int | float):
            parts.append(np.array([leaf], np.float64))
        else:
            raise PluginError(f"{name} is a {type(leaf).__name__}, of which there is no sum")
    return np.concatenate(parts)


def from_vector(vector: Vector, like: Any, home: torch.device | None = None) -> Any:
    """Return a payload of the same form as ``like``, with the numbers of a vector.

    Integers in tensors are rounded; single numbers are floats. Tensors lie on ``home``, or where
    those of ``like`` do.
    """
    taken = 0

    def filled(item: Any) -> Any:
        nonlocal taken
        if isinstance(item, Mapping):
            return {key: filled(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [filled(inner) for inner in item]
        start, taken = taken, taken + (item.numel() if isinstance(item, Tensor) else 1)
        if not isinstance(item, Tensor):
            return float(vector[start])
        part = torch.from_numpy(vector[start:taken].reshape(item.shape))
        part = part if item.is_floating_point() else part.round()
        return part.to(home or item.device, item.dtype)

    return filled(like)


def form(payload: Any) -> Any:
    """Return the payload with its tensors replaced by zeros that take no memory."""
    if isinstance(payload, Tensor):
        return torch.zeros((), dtype=payload.dtype).expand(payload.shape)
    if isinstance(payload, Mapping):
        return {key: form(inner) for key, inner in payload.items()}
    return [form(inner) for inner in payload] if isinstance(payload, list) else payload


def forms_of(payload: Any) -> list[tuple[str, str]]:
    """Return the path and the form of each tensor and number of a payload."""
    return [(path, form_of(leaf)) for path, leaf in leaves(payload)]


def length(payload: Any) -> int:
    """Return the number of values that `to_vector` returns for a payload."""
    return sum(leaf.numel() if isinstance(leaf, Tensor) else 1 for _, leaf in leaves(payload))


def clipped(vector: Vector, norm: float) -> tuple[Vector, bool]:
    """Return a vector clipped to an L2 norm, and whether it was already no longer than that."""
    length = float(np.sqrt(np.square(vector).sum()))
    return (vector, True) if length <= norm else (vector * (norm / length), False)


def gaussian(size: int, scale: float, seed: int, *names: str | int) -> Vector:
    """Return draws [size] from N(0, scale^2) of the named random stream."""
    return generator(seed, "privacy", *names).normal(0.0, scale, size)


def update_noise(noise_multiplier: float, count_noise: float) -> float:
    """Return the noise multiplier of the updates if a noisy count is released with them.

    Both together have the guarantee of ``noise_multiplier`` alone (Andrew et al., NeurIPS 2021,
    Theorem 1).

    Args:
        noise_multiplier: z of both together, above 0.
        count_noise: Standard deviation of the noise on the count, sigma_b; a client changes the
            count by 1/2.

    Raises:
        SettingsError: If the count's noise is too small for ``noise_multiplier``.
    """
    rest = noise_multiplier**-2 - (2 * count_noise) ** -2
    if rest <= 0:
        raise SettingsError(
            f"adaptive clipping counts clients with noise of {count_noise:g}, which tells more "
            f"than privacy.noise_multiplier={noise_multiplier:g} allows: set privacy.count_noise "
            f"above {noise_multiplier / 2:g}"
        )
    return 1 / math.sqrt(rest)


def adapted_norm(norm: float, share: float, *, quantile: float, rate: float) -> float:
    """Return the next clip norm, C exp(-eta (b - gamma)).

    Source: Andrew et al., NeurIPS 2021, arXiv 1905.03871, Algorithm 1.

    Args:
        norm: C, of this round.
        share: b, the noisy share of updates that were no longer than C.
        quantile: gamma, the target share.
        rate: eta, by how much a round may change the norm.
    """
    return norm * math.exp(-rate * (share - quantile))
