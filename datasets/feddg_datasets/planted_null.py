"""The planted world in which nothing can be gained."""

from __future__ import annotations

from feddg_datasets.planted_tint import PlantedTint
from feddg_datasets.shared.planted import PlantedSettings


class PlantedNull(PlantedTint):
    """The control: the tint is independent of the class, so no method can gain anything."""

    name = "planted_null"
    title = "Planted: null"
    Settings = PlantedSettings
