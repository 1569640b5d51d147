"""Training augmentation in batches on the images' device, drawn separately for every image.

The operations are those of torchvision's ``RandomResizedCrop``, ``RandomHorizontalFlip``,
``ColorJitter`` and ``RandomGrayscale``, in this order. Every parameter is drawn on the CPU, so a
seed gives the same crops and colours on every device. Two things differ from torchvision. The four
colour adjustments of a batch share one random order; only their strengths are drawn for each image.
Crops are resized in 8 bits on the CPU, as in Pillow, but in float32 elsewhere, so devices agree to
within a grey level of 1/255 before colours are adjusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from feddg_bench.config.schema import AugmentSettings
from feddg_bench.core.client import on_device

CROP_TRIES = 10
"""Crops drawn for an image before it falls back to the largest central one, as in torchvision."""


PIECE_BYTES = 3 * 2**19
"""Bytes of the float32 images whose colours a CPU adjusts at a time."""


Images = Tensor | Sequence[Tensor]
"""Images of one size: uint8 [B, H, W, C], or a sequence of B of them, [1, H, W, C] each.

float16 pixels are already normalised and keep their values. Crops and flips work for any number of
channels, adjustments of colour only for RGB in [0, 1].
"""


def to_float(images: Tensor) -> Tensor:
    """Map uint8 images [B, H, W, C] to float32 [B, C, H, W] in [0, 1], channels last in memory.

    Floating-point images keep their values.
    """
    floats = images.permute(0, 3, 1, 2).float()
    return floats.div_(255) if images.dtype == torch.uint8 else floats


class Draws(NamedTuple):
    """Random parameters of the augmentation of B images.

    Attributes:
        tensors: Crops, int64 [B, 4]: top, left, height, width in pixels; whether an image is
            mirrored afterwards, bool [B]; strengths of the colour adjustments, float32 [A, B];
            indices of the images converted to greyscale, int64 [n].
        order: Indices of the A adjustments, in the order of application.
        whole: Whether no image is cropped or mirrored.
    """

    tensors: tuple[Tensor, ...]
    order: list[int]
    whole: bool


@dataclass(frozen=True)
class Augment:
    """Augmentation by ``settings``; with strengths of 0 and no crop, it changes nothing."""

    settings: AugmentSettings  # ranges and probabilities

    @property
    def nothing(self) -> bool:
        """Whether images are only converted to floats."""
        s = self.settings
        strengths = s.flip, s.brightness, s.contrast, s.saturation, s.hue, s.grayscale
        return s.crop_scale is None and not any(strengths)

    def __call__(self, images: Images, generator: torch.Generator) -> Tensor:
        """Return an augmented float32 copy [B, C, H, W] of images [B, H, W, C], see `to_float`.

        Its memory is channels last, or contiguous where colours are adjusted.

        Args:
            images: On any device; on a CPU, rows need not be contiguous, as in a mapped store.
            generator: Source of all random numbers, on the CPU.
        """
        height, width = images[0].shape[-3:-1]
        draws = self.draw(len(images), height, width, generator)
        moved = on_device(draws.tensors, images[0].device)
        return self.apply(images, draws._replace(tensors=tuple(moved)))

    def draw(self, batch: int, height: int, width: int, generator: torch.Generator) -> Draws:
        """Return the random parameters of a batch of images, on the CPU; see `__call__`."""
        settings = self.settings
        boxes = whole = torch.tensor([0, 0, height, width]).expand(batch, 4)
        if settings.crop_scale is not None:
            boxes = draw_boxes(
                batch, height, width, settings.crop_scale, settings.crop_ratio, generator
            )
        mirrored = torch.rand(batch, generator=generator) < settings.flip

        ranges = (
            (max(0.0, 1 - settings.brightness), 1 + settings.brightness),
            (max(0.0, 1 - settings.contrast), 1 + settings.contrast),
            (max(0.0, 1 - settings.saturation), 1 + settings.saturation),
            (-settings.hue, settings.hue),
        )
        uniform = torch.rand(len(ranges), batch, generator=generator)
        order = torch.randperm(len(ranges), generator=generator).tolist()
        effective = [i for i in order if ranges[i][0] < ranges[i][1]]
        lows = torch.tensor([low for low, _ in ranges])[:, None]
        widths = torch.tensor([high - low for low, high in ranges])[:, None]
        strengths = (uniform * widths + lows)[effective]

        grey = torch.empty(0, dtype=torch.int64)
        if settings.grayscale > 0:
            grey = (torch.rand(batch, generator=generator) < settings.grayscale).nonzero()[:, 0]
        kept = not mirrored.any() and torch.equal(boxes, whole)
        return Draws((boxes, mirrored, strengths, grey), effective, kept)

    def apply(self, images: Images, draws: Draws) -> Tensor:
        """Return images augmented as by `__call__`, given draws on the images' device."""
        boxes, mirrored, strengths, grey = draws.tensors
        # Colours are adjusted plane by plane, and on a CPU in pieces that fit its cache.
        layout = torch.contiguous_format if draws.order else torch.channels_last
        if draws.whole:
            augmented = left_whole(images, layout)
        else:
            augmented = crop_and_flip(images, boxes, mirrored, layout)
        height, width = augmented.shape[-2:]
        piece = max(1, PIECE_BYTES // (12 * height * width)) if augmented.is_cpu else len(augmented)
        for part, rows in zip(augmented.split(piece), strengths.split(piece, dim=1), strict=True):
            for i, strength in zip(draws.order, rows, strict=True):
                ADJUSTMENTS[i](part, strength)
        if len(grey):
            augmented[grey] = luminance(augmented[grey]).expand(-1, 3, -1, -1)
        return augmented


def draw_boxes(
    batch: int,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator,
) -> Tensor:
    """Draw one crop per image, as torchvision's ``RandomResizedCrop.get_params`` does.

    Area is uniform in ``scale`` (share of the image), width over height log-uniform in ``ratio``.
    A crop that does not fit is drawn again; after ten tries, it is the largest central crop whose
    ratio is as close to the image's as ``ratio`` allows.

    Returns:
        int64 [B, 4]: top, left, height, width in pixels.
    """
    size, shape = torch.rand(2, CROP_TRIES, batch, generator=generator)
    area = (scale[0] + (scale[1] - scale[0]) * size) * (height * width)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = (low + (high - low) * shape).exp()
    sides = torch.stack([(area / aspect).sqrt(), (area * aspect).sqrt()]).round()  # (2, tries, B)

    limits = torch.tensor([height, width]).view(2, 1)
    fits = ((sides > 0) & (sides <= limits[:, :, None])).all(dim=0)
    first = fits.int().argmax(dim=0)
    crop = sides[:, first, torch.arange(batch)].long()  # [2, B]: height, width
    corner = (torch.rand(2, batch, generator=generator) * (limits - crop + 1)).long()
    corner = torch.minimum(corner, limits - crop)  # a draw close to 1 can round up

    aspect_limit = min(max(width / height, ratio[0]), ratio[1])
    largest = limits.new_tensor(
        [[round(min(height, width / aspect_limit))], [round(min(width, height * aspect_limit))]]
    ).clamp_(min=1)
    found = fits.any(dim=0)
    crop = torch.where(found, crop, largest)
    corner = torch.where(found, corner, (limits - largest) // 2)
    return torch.cat([corner, crop]).T


def left_whole(images: Images, layout: torch.memory_format) -> Tensor:
    """Return the result of `crop_and_flip` for whole images without mirroring."""
    batch = images if isinstance(images, Tensor) else torch.cat(list(images))
    return to_float(batch).contiguous(memory_format=layout)


def crop_and_flip(
    images: Images,
    boxes: Tensor,
    mirrored: Tensor,
    layout: torch.memory_format = torch.channels_last,
) -> Tensor:
    """Resize a box of each image to the image's size, bilinearly, and mirror some.

    Args:
        images: [B, H, W, C], or B images [1, H, W, C] on the CPU.
        boxes: int64 [B, 4] on the same device: top, left, height, width.
        mirrored: bool [B] on the same device: flip left and right afterwards.
        layout: Memory format of the result.

    Returns:
        float32 [B, C, H, W], see `to_float`.
    """
    if isinstance(images, Tensor) and not images.is_cpu:
        return crop_and_flip_floats(images, boxes, mirrored, layout)
    return crop_and_flip_bytes(images, boxes, mirrored, layout)


def crop_and_flip_bytes(
    images: Images, boxes: Tensor, mirrored: Tensor, layout: torch.memory_format
) -> Tensor:
    """Do `crop_and_flip` in 8 bits, image by image: possible only on a CPU, and fastest there.

    Images that are not uint8 are resized in float32.
    """
    height, width, channels = images[0].shape[-3:]
    result = torch.empty((len(images), channels, height, width), memory_format=layout)
    for image, (top, left, rows, columns), mirror, target in zip(
        images.split(1) if isinstance(images, Tensor) else images,
        boxes.tolist(),
        mirrored.tolist(),
        result.split(1),
        strict=True,
    ):
        box = image[:, top : top + rows, left : left + columns].permute(0, 3, 1, 2)
        is_bytes = box.dtype == torch.uint8
        box = box if is_bytes else box.float()
        box = F.interpolate(box, size=(height, width), mode="bilinear", align_corners=False)
        box = box.flip(3) if mirror else box
        if is_bytes:
            torch.div(box, 255, out=target)
        else:
            target.copy_(box)
    return result


def crop_and_flip_floats(
    images: Tensor, boxes: Tensor, mirrored: Tensor, layout: torch.memory_format
) -> Tensor:
    """Do `crop_and_flip` in float32, the whole batch at once."""
    batch, height, width, _ = images.shape
    boxes, axes = boxes.float(), []
    for axis, size in enumerate((height, width)):
        first, length = boxes[:, axis, None], boxes[:, axis + 2, None]
        centres = (torch.arange(size, device=images.device) + 0.5) * (length / size)
        pixels = first + (centres - 0.5).clamp_(min=0).minimum(length - 1)  # (B, size)
        axes.append((2 * pixels + 1) / size - 1)  # grid_sample's coordinates
    rows, columns = axes
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    grid = torch.stack(
        [
            columns[:, None, :].expand(batch, height, width),
            rows[:, :, None].expand(batch, height, width),
        ],
        dim=-1,
    )
    crops = F.grid_sample(to_float(images), grid, padding_mode="border", align_corners=False)
    if images.dtype == torch.uint8:
        crops.clamp_(0, 1)
    return crops.contiguous(memory_format=layout)


# ------------------------------------------------------------------------------- colours
# These work in place on float32 [B, 3, H, W] in [0, 1] and return it, still in [0, 1]; the other
# argument holds one number per image.


def luminance(images: Tensor) -> Tensor:
    """Return the grey images [B, 1, H, W], weighted as in ITU-R 601-2."""
    red, green, blue = images.unbind(1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).unsqueeze(1)


def adjust_brightness_(images: Tensor, factor: Tensor) -> Tensor:
    """Scale images by ``factor`` [B], at least 0."""
    return images.mul_(factor.view(-1, 1, 1, 1)).clamp_(0, 1)


def adjust_contrast_(images: Tensor, factor: Tensor) -> Tensor:
    """Scale each image's distance from its own mean luminance by ``factor`` [B], at least 0."""
    mean = luminance(images.mean(dim=(2, 3), keepdim=True))
    return torch.lerp(mean, images, factor.view(-1, 1, 1, 1), out=images).clamp_(0, 1)


def adjust_saturation_(images: Tensor, factor: Tensor) -> Tensor:
    """Scale each pixel's distance from its grey by ``factor`` [B], at least 0."""
    grey = luminance(images)
    return torch.lerp(grey, images, factor.view(-1, 1, 1, 1), out=images).clamp_(0, 1)


def adjust_hue_(images: Tensor, shift: Tensor) -> Tensor:
    """Turn hues by ``shift`` [B] turns of the colour circle; value and saturation stay the same.

    This equals a shift of H in HSV, without a separate case for each sixth of the circle. Let h be
    the hue in sixths of a turn from red, in [-3, 3], low and high the smallest and largest channel,
    and c = high - low. Each channel is a trapezium, low + c clamp(2 - |x|, 0, 1), where x is the
    distance around the circle from the channel's own hue (0, 2 or 4). For |x| <= 6, this distance
    is 3 - ||x| - 3|. Conversely, |h| = (high - red + green - low + blue - low) / c, and h has the
    sign of green - blue.
    """
    red, green, blue = images.unbind(1)
    high, low = images.amax(dim=1), images.amin(dim=1)
    chroma = high - low
    hue = (green + blue).sub_(red).add_(high).sub_(low, alpha=2)
    hue = hue.div_(chroma.clamp_min(1e-12)).copysign_(green - blue)  # [B, H, W]
    channel_hues = torch.arange(0.0, 6.0, 2.0, device=images.device)
    turn = (6 * shift[:, None] - channel_hues + 3).remainder(6) - 3  # [B, 3] in [-3, 3)
    way = (hue[:, None] + turn[:, :, None, None]).abs_().sub_(3).abs_()  # 3 minus the distance
    return torch.addcmul(low[:, None], chroma[:, None], way.sub_(1).clamp_(0, 1), out=images)


ADJUSTMENTS = adjust_brightness_, adjust_contrast_, adjust_saturation_, adjust_hue_
"""In the order of `Augment.draw`."""
