"""The planted world of class frequencies."""

from __future__ import annotations

from pydantic import Field

from feddg_datasets.shared.planted import Array, Planted, PlantedSettings, Share, named


class Shifted(PlantedSettings):
    """Settings of `PlantedLabel`."""

    q: float = Field(0.6, gt=0.25, le=1)
    share: tuple[Share, Share, Share, Share] = (0.85, 0.8, 0.75, 0.9)
    """Share of a domain's own class: the first class in the first domain, and so on."""


class PlantedLabel(Planted):
    """Class frequencies differ by domain; the grating is the only cue."""

    name = "planted_label"
    title = "Planted: label"
    Settings = Shifted

    def prior(self, domain: int) -> Array:
        """Return p(y) of a domain, [4]."""
        assert isinstance(self.settings, Shifted)  # noqa: S101 - by `Settings`
        prior: Array = named(self.settings.share[domain])[domain]
        return prior
