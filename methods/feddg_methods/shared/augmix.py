"""AugMix in batches, driven by a generator.

Hendrycks et al., ICLR 2020; operations, strengths and mixing are torchvision's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms import v2

from feddg_bench.common.streams import torch_stream

MOST_CHAINS = 3
"""Chains at most where their number is drawn."""


class _AugMix(v2.AugMix):  # type: ignore[misc]  # torchvision has no types
    """Draws the mixing weights on the CPU, where torchvision draws everything else."""

    def _sample_dirichlet(self, params: Tensor) -> Tensor:
        return torch._sample_dirichlet(params.cpu()).to(params.device)


def augmix(
    images: Tensor,
    generator: torch.Generator,
    *,
    chains: int | None = 3,
    per_image: bool = False,
) -> Tensor:
    """Return AugMix of images: a mixture of each with itself after chains of random operations.

    Chains are 1 to 3 operations long, out of 13 at severity 3; mixing weights come from a flat
    Dirichlet distribution over chains and a flat Beta distribution between the mixture and the
    image. The weights are drawn for every image by itself, the operations for the whole batch
    unless ``per_image``: no slower on a CPU, but a GPU then works on one image at a time.

    Args:
        images: uint8 (B, 3, H, W), on any device.
        generator: On the CPU; it advances by one number, whatever is drawn.
        chains: Number of chains; ``None`` draws 1, 2 or 3 each time operations are drawn.
        per_image: Draw operations, their order and strengths for every image by itself.

    Returns:
        uint8 (B, 3, H, W).
    """
    seed = int(torch.randint(2**62, (), generator=generator))
    groups = images.split(1) if per_image else (images,)
    # torchvision draws from the global generator, and autocast would round its pixel coordinates.
    with torch_stream(seed, "augmix"), torch.autocast(images.device.type, enabled=False):
        return torch.cat([_mixed(group, chains) for group in groups])


def _mixed(images: Tensor, chains: int | None) -> Tensor:
    width = int(torch.randint(1, MOST_CHAINS + 1, ())) if chains is None else chains
    mixed: Tensor = _AugMix(mixture_width=width)(images)
    return mixed
