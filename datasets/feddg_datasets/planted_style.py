"""The planted world of styles."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from feddg_datasets.shared.planted import Array, Planted, PlantedSettings, Share

GAIN = np.array([0.5, 0.35, 0.2])
BIAS = np.array([0.1, 0.5, 0.75])
"""The full style: channels x become gain x + bias."""


class Styled(PlantedSettings):
    """Settings of `PlantedStyle`."""

    q: float = Field(1.0, gt=0.25, le=1)
    style: tuple[Share, Share, Share, Share] = (0.1, 0.4, 0.0, 1.0)
    """Strength of each domain's style, from 0 (none) to 1."""


class PlantedStyle(Planted):
    """Each domain maps each channel x to gain x + bias, independently of the class.

    Scenario ``hf-o-t`` tests between the styles of the training domains, the default one outside.
    """

    name = "planted_style"
    title = "Planted: style"
    Settings = Styled

    def draw(self, picture: Array, h: int, domain: int, rng: np.random.Generator) -> Array:
        """Map the channels."""
        assert isinstance(self.settings, Styled)  # noqa: S101 - by `Settings`
        strength = self.settings.style[domain]
        return (1 + strength * (GAIN - 1)) * picture + strength * BIAS
