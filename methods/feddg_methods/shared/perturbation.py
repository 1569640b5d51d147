"""Noise on uploaded styles, as in FISC's Table 10, which follows FedPCL."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Client
from feddg_methods.shared.adain import EPSILON


class PerturbationSettings(MethodSettings):
    """Perturbation of uploaded styles; off by default."""

    perturb_shrink: float = Field(0.0, ge=0, le=1)
    """p: uploaded styles are multiplied by 1 - p (FISC, Table 10)."""
    perturb_noise: float = Field(0.0, ge=0)
    """s: standard deviation of the noise added to uploaded styles."""

    def perturbed(self, styles: Tensor, client: Client) -> Tensor:
        """Return styles [..., 2, C], perturbed for upload."""
        if not (self.perturb_shrink or self.perturb_noise):
            return styles
        noise = torch.randn(styles.shape, generator=client.generator("perturbation"))
        noise = noise.to(styles.device) * self.perturb_noise
        return perturb_style(styles, noise, shrink=self.perturb_shrink)


def perturb_style(style: Tensor, noise: Tensor, *, shrink: float) -> Tensor:
    """Return (1 - p) S_k + noise, with standard deviations clamped to at least sqrt(1e-5).

    This is FISC's protection of uploaded styles (Table 10), which follows FedPCL.

    Args:
        style: Means and standard deviations, [..., 2, C].
        noise: Of the same shape, drawn from N(0, s^2) by the caller.
        shrink: p in [0, 1]; it scales the style, not the noise.
    """
    mean, std = ((1 - shrink) * style + noise).unbind(-2)
    return torch.stack([mean, std.clamp(min=EPSILON**0.5)], dim=-2)
