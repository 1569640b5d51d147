"""Batch-instance normalisation: every channel learns how much of an image's style to keep."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BatchInstanceNorm(nn.Module):
    """A mixture of batch and instance normalisation: rho BN(x) + (1 - rho) IN(x).

    Both share the affine part of the batch normalisation. rho has one entry a channel and starts at
    1, so that a network computes at first what it computed before, bit for bit. Maps of a single
    pixel have no statistics of their own: their instance normalisation is the affine bias.

    Source: Nam & Kim, NeurIPS 2018, arXiv 1805.07925. As there, rho stays in [0, 1] because it is
    clipped after every optimizer step (`clip_rho`).

    The batch normalisation remains a layer of its own, so that code which looks for layers of that
    type still finds it. To freeze it is to freeze its statistics only; to keep it with a client
    leaves rho shared.

    Attributes:
        batch: The batch normalisation.
        rho: Share of batch normalisation, (C,), in [0, 1].

    Args:
        layer: The batch normalisation that this layer takes over.
    """

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        super().__init__()
        self.batch = layer
        like = layer.running_mean if layer.weight is None else layer.weight
        device = None if like is None else like.device
        self.rho = nn.Parameter(torch.ones(layer.num_features, device=device))

    def forward(self, maps: Tensor) -> Tensor:
        """Return normalised maps of the shape of ``maps``, [B, C, H, W]."""
        layer = self.batch
        together: Tensor = layer(maps)
        # One group a channel; `F.instance_norm` would refuse maps of one pixel.
        alone = torch.group_norm(maps, layer.num_features, layer.weight, layer.bias, layer.eps)
        # Not in half precision, which cannot tell the steps of rho near 1 apart.
        rho = self.rho[:, None, None]
        mixed = torch.lerp(alone.to(rho.dtype), together.to(rho.dtype), rho)
        return mixed.to(together.dtype)


def mix_batch_norm(module: nn.Module) -> None:
    """Replace every ``BatchNorm2d`` inside ``module`` by a `BatchInstanceNorm` that holds it.

    Doing it twice changes nothing, and neither does it where there is no such layer.
    """
    for parent in list(module.modules()):
        if isinstance(parent, BatchInstanceNorm):
            continue
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, BatchInstanceNorm(child))


@torch.no_grad()
def clip_rho(module: nn.Module) -> None:
    """Clip every rho inside ``module`` to [0, 1], in place."""
    shares: list[Tensor] = [
        layer.rho for layer in module.modules() if isinstance(layer, BatchInstanceNorm)
    ]
    if shares:
        torch._foreach_clamp_min_(shares, 0.0)
        torch._foreach_clamp_max_(shares, 1.0)
