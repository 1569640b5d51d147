"""Clipping and noise of differential privacy, on vectors of float64."""

from __future__ import annotations

import math

import numpy as np

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.streams import generator
from feddg_bench.protection.vectors import Vector


def clipped(vector: Vector, norm: float) -> tuple[Vector, bool]:
    """Return a vector cut to at most an L2 norm, and whether it was no longer than that."""
    length = float(np.sqrt(np.square(vector).sum()))
    return (vector, True) if length <= norm else (vector * (norm / length), False)


def gaussian(size: int, scale: float, seed: int, *names: str | int) -> Vector:
    """Return draws [size] from N(0, scale^2) of the named random stream."""
    return generator(seed, "privacy", *names).normal(0.0, scale, size)


def update_noise(noise_multiplier: float, count_noise: float) -> float:
    """Return the noise multiplier of the updates where a noisy count is released beside them.

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
        share: b, the noisy share of updates that were no longer than it.
        quantile: gamma, the share that is aimed at.
        rate: eta, by how much a round may change the norm.
    """
    return norm * math.exp(-rate * (share - quantile))
