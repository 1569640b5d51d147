"""The planted world whose spurious cue is a tint."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from feddg_datasets.shared.planted import Array, Cued, Planted, PlantedSettings

TINTS = np.array([[1.0, 0.4, 0.4], [0.4, 1.0, 0.4], [0.4, 0.4, 1.0], [0.9, 0.9, 0.3]])
"""Factors of the channels, by spurious cue."""


class PlantedTint(Planted):
    """The spurious cue is the colour of the whole image."""

    name = "planted_tint"
    title = "Planted: tint"
    Settings: ClassVar[type[PlantedSettings]] = Cued

    def draw(self, picture: Array, h: int, domain: int, rng: np.random.Generator) -> Array:
        """Tint the picture."""
        tinted: Array = picture * TINTS[h]
        return tinted
