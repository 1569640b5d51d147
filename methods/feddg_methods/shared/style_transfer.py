"""Style transfer back ends: encode images, restyle their maps by AdaIN, decode.

Input and output images are [B, 3, H, W] in [0, 1]; the backbone normalises afterwards. ``vgg19`` is
the network of AdaIN (Huang and Belongie, ICCV 2017), ``vgg19_16x`` its distillation to a sixteenth
of the size (Wang et al., Collaborative Distillation, CVPR 2020), ``pixel`` restyles the colours
themselves.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from torch import Tensor, nn

from feddg_bench.common.errors import SettingsError
from feddg_methods.shared.adain import adain
from feddg_methods.shared.vgg import ARCHITECTURES, load_pair

AdainInput = Literal["imagenet_norm", "unit"]
StyleLayer = Literal["conv4_1", "relu4_1"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SMALLEST_SIDE = 9
"""Minimum side in pixels. A smaller image has one position left after three poolings, and
reflection padding needs two."""


class StyleBackend(nn.Module):
    """Base of the style back ends: frozen, and always in evaluation mode.

    Attributes:
        channels: C of the maps, and hence of a style [2, C].
    """

    channels: int

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)

    def encode(self, images: Tensor) -> Tensor:
        """Return the content maps [B, C, h, w] of images [B, 3, H, W] in [0, 1]."""
        raise NotImplementedError

    def style_maps(self, images: Tensor) -> Tensor:
        """Return the maps [B, C, h, w] whose channel statistics are the style."""
        raise NotImplementedError

    def decode(self, maps: Tensor, size: tuple[int, int]) -> Tensor:
        """Return images [B, 3, H, W] of the given size [H, W] from maps [B, C, h, w]."""
        raise NotImplementedError

    @torch.no_grad()
    def transfer(self, images: Tensor, style: Tensor, strength: float) -> Tensor:
        """Return the images in the given style, without gradients.

        Args:
            images: [B, 3, H, W] in [0, 1].
            style: [2, C], or one for each image [B, 2, C].
            strength: alpha in [0, 1]; 0 gives the auto-encoder's reconstructions.
        """
        mean, std = style.unbind(-2)
        restyled = adain(self.encode(images), mean, std, strength)
        return self.decode(restyled, (images.shape[2], images.shape[3]))


class PixelBackend(StyleBackend):
    """The image itself is the map: transfer shifts and scales the three colours."""

    channels = 3

    def encode(self, images: Tensor) -> Tensor:
        return images

    def style_maps(self, images: Tensor) -> Tensor:
        return images

    def decode(self, maps: Tensor, size: tuple[int, int]) -> Tensor:
        return maps.clamp(0, 1)


class VGGBackend(StyleBackend):
    """An encoder up to relu4_1 and its decoder.

    Args:
        encoder: Ends with the ReLU after conv4_1.
        decoder: Returns images in the encoder's input range, with 8 times the side of its maps.
        imagenet_norm: Encode ImageNet-normalised images, undo the normalisation after decoding,
            and do not clamp, as in PARDON's code; otherwise encode [0, 1] and clamp to it.
        style_layer: Take the style after (``relu4_1``) or before (``conv4_1``) the last ReLU; the
            content is always relu4_1.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Sequential,
        decoder: nn.Sequential,
        *,
        channels: int,
        imagenet_norm: bool,
        style_layer: StyleLayer,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.encoder = encoder
        self.decoder = decoder
        self.imagenet_norm = imagenet_norm
        self.before_relu = style_layer == "conv4_1"
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if imagenet_norm else ((0.0,) * 3, (1.0,) * 3)
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    def encode(self, images: Tensor) -> Tensor:
        maps: Tensor = self.encoder[-1](self._last_convolution(images))
        return maps

    def style_maps(self, images: Tensor) -> Tensor:
        return self._last_convolution(images) if self.before_relu else self.encode(images)

    def decode(self, maps: Tensor, size: tuple[int, int]) -> Tensor:
        images: Tensor = self.decoder(maps) * self.std + self.mean
        # Pooling rounds up at the right and the bottom, so crop there.
        images = images[..., : size[0], : size[1]]
        return images if self.imagenet_norm else images.clamp(0, 1)

    def _last_convolution(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        if min(height, width) < SMALLEST_SIDE:
            raise SettingsError(
                f"this style back end needs images of at least {SMALLEST_SIDE} pixels a side, but "
                f"got {height} x {width}: raise data.image_size or use the back end pixel"
            )
        maps: Tensor = self.encoder[:-1]((images - self.mean) / self.std)
        return maps


def build_style_backend(
    name: str,
    *,
    weights: tuple[str, ...] | str | None,
    adain_input: AdainInput = "imagenet_norm",
    style_layer: StyleLayer = "conv4_1",
) -> StyleBackend:
    """Return the back end called ``name``, frozen, on the CPU.

    Args:
        name: ``vgg19``, ``vgg19_16x`` or ``pixel``.
        weights: One file with the tensors ``encoder.*`` and ``decoder.*``, or an encoder's and a
            decoder's file; unused by ``pixel``.
        adain_input: Input of ``vgg19``; ``vgg19_16x`` always takes [0, 1].
        style_layer: Layer of the style; unused by ``pixel``.

    Raises:
        SettingsError: No such back end, or no weights given.
        DataError: Weights that are missing, unreadable or from another network.
    """
    if name == "pixel":
        return PixelBackend()
    if name not in ARCHITECTURES:
        raise SettingsError(
            f"there is no style back end {name!r}: choose {', '.join(ARCHITECTURES)} or pixel"
        )
    if weights is None:
        raise SettingsError(
            f"the style back end {name} has no weights: get them with feddg-bench data download "
            f"{name}, or set hyper.style_weights to a file, or set hyper.style=pixel, which needs "
            f"none"
        )
    encoder, decoder = load_pair(name, weights)
    return VGGBackend(
        encoder,
        decoder,
        channels=ARCHITECTURES[name].widths[-1],
        imagenet_norm=name == "vgg19" and adain_input == "imagenet_norm",
        style_layer=style_layer,
    )
