"""The planted world whose invariant cue is faint."""

from __future__ import annotations

from pydantic import Field

from feddg_datasets.planted_tint import PlantedTint
from feddg_datasets.shared.planted import Cued


class Weak(Cued):
    """Settings of `PlantedHard`."""

    contrast: float = Field(0.12, gt=0, le=0.4)


class PlantedHard(PlantedTint):
    """A tint over a faint grating: the invariant cue is harder to see than the spurious one."""

    name = "planted_hard"
    title = "Planted: hard"
    Settings = Weak
