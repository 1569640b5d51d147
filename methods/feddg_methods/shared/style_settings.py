"""Settings shared by all methods that restyle images by AdaIN."""

from __future__ import annotations

from typing import ClassVar, Literal

from feddg_bench.config.schema import MethodSettings
from feddg_methods.shared.style_transfer import StyleBackend, build_style_backend


class StyleSettings(MethodSettings):
    """Style back end, its input, and the layer of its styles.

    A subclass lists its presets in ``presets`` and restricts the type of ``preset`` to their names.
    """

    files: ClassVar[tuple[str, ...]] = ("style_weights",)
    """Settings that are paths."""
    toy: ClassVar = {"style": "pixel"}  # needs no weights

    preset: str = ""
    """Sets the defaults of the settings below; each can still be set individually."""
    style: Literal["vgg19", "vgg19_16x", "pixel"] = "vgg19"
    """Style back end: AdaIN's VGG-19, a small network distilled from it, or the image's colours."""
    style_weights: tuple[str, ...] = ()
    """Local file(s) of the VGG back ends: one .safetensors, or encoder and decoder; default: the
    download of `feddg-bench data download`."""
    adain_input: Literal["imagenet_norm", "unit"] = "imagenet_norm"
    """Input of ``vgg19``: normalised images as in the code, or [0, 1] as in its training."""
    style_layer: Literal["conv4_1", "relu4_1"] = "conv4_1"
    """Layer of the styles: before or after the last ReLU."""

    def build_backend(self) -> StyleBackend:
        """Return the style back end that these settings describe.

        Raises:
            SettingsError: If it needs weights and none are given.
            DataError: If its weights are missing, unreadable or belong to another network.
        """
        return build_style_backend(
            self.style,
            weights=self.style_weights or None,
            adain_input=self.adain_input,
            style_layer=self.style_layer,
        )
