"""Batch normalisation, found by module type: names of its tensors, and how to freeze it.

A search for "bn" in names would miss 4 of ResNet-50's 53 layers (``downsample.1``) and all 121 of
DenseNet-121 (``norm``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norm_state(module: nn.Module) -> list[str]:
    """Return the state dict names of all batch normalisation tensors: affine and statistics."""
    return [name for prefix, layer in _layers(module) for name in layer.state_dict(prefix=prefix)]


def batch_norm_statistics(module: nn.Module) -> list[str]:
    """Return the state dict names of running means, running variances and batch counters."""
    return [prefix + name for prefix, layer in _layers(module) for name, _ in layer.named_buffers()]


def _layers(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield each batch normalisation layer with the prefix of its names in the state dict."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            yield f"{name}." if name else "", layer


class FrozenBatchNorm(_BatchNorm):
    """Batch normalisation that always uses its running statistics; its affine part is trained.

    Args:
        layer: The layer whose parameters and buffers this one takes over, as the same tensors.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [B, C, ...] normalised by the running statistics."""
        return F.batch_norm(
            values, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def freeze_batch_norm(module: nn.Module) -> None:
    """Replace every batch normalisation layer inside ``module`` by its `FrozenBatchNorm`.

    Names and tensors stay the same, so state dicts and optimisers notice nothing. As in
    FedDG_Benchmark and PARDON (Nguyen et al., ICDCS 2025): statistics of the initial weights,
    affine parameters trained. Freezing twice changes nothing.
    """
    for prefix, layer in list(_layers(module)):
        module.set_submodule(prefix.removesuffix("."), FrozenBatchNorm(layer))
