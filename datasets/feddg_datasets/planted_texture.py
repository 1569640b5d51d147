"""The planted world whose spurious cue is a frequency band."""

from __future__ import annotations

import numpy as np

from feddg_datasets.shared.planted import Array, Cued, Planted


class PlantedTexture(Planted):
    """The spurious cue is the frequency band of a grain: blocks of 1, 2, 4 or 8 pixels of 16."""

    name = "planted_texture"
    title = "Planted: texture"
    Settings = Cued

    def draw(self, picture: Array, h: int, domain: int, rng: np.random.Generator) -> Array:
        """Lay a grain over the picture."""
        side, blocks = len(picture), 16 >> h
        cells = np.arange(side) * blocks // side
        grain = np.where(rng.random((blocks, blocks)) < 0.5, -1.0, 1.0)[cells][:, cells]
        lit: Array = picture + 0.2 * grain[..., None]
        return lit
