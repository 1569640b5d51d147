"""The planted world whose spurious cue is a place."""

from __future__ import annotations

import numpy as np

from feddg_datasets.shared.planted import Array, Cued, Planted


class PlantedPlace(Planted):
    """The spurious cue is the corner with a light square."""

    name = "planted_place"
    title = "Planted: place"
    Settings = Cued

    def draw(self, picture: Array, h: int, domain: int, rng: np.random.Generator) -> Array:
        """Light a corner."""
        lit, quarter = picture.copy(), len(picture) // 4
        near, far = slice(quarter), slice(-quarter, None)
        lit[far if h >= 2 else near, far if h % 2 else near] = 0.95
        return lit
