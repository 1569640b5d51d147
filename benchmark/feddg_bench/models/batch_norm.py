"""Batch normalisation, found by module type: names of its tensors, freezing and folding.

A search for "bn" in names would miss 4 of ResNet-50's 53 layers (``downsample.1``) and all 121 of
DenseNet-121 (``norm``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg_bench.common.errors import SettingsError


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


def _only_normalises(layer: nn.Module) -> bool:
    return type(layer).forward in (_BatchNorm.forward, FrozenBatchNorm.forward)


def freeze_batch_norm(module: nn.Module) -> None:
    """Replace every batch normalisation layer inside ``module`` by its `FrozenBatchNorm`.

    A layer that does more than normalise, such as timm's, which also applies the activation, is
    not replaced but put into evaluation mode permanently.

    Names and tensors stay the same, so state dicts and optimisers are not affected. As in
    FedDG_Benchmark and PARDON (Nguyen et al., ICDCS 2025), the statistics stay those of the initial
    weights and the affine parameters are trained. Freezing twice changes nothing.
    """
    for prefix, layer in list(_layers(module)):
        if _only_normalises(layer):
            module.set_submodule(prefix.removesuffix("."), FrozenBatchNorm(layer))
        else:
            layer.train = partial(_evaluate, layer)  # type: ignore[method-assign, assignment]
            layer.eval()


def _evaluate(layer: nn.Module, mode: bool = True) -> nn.Module:  # noqa: ARG001 - that of `train`
    return nn.Module.train(layer, False)


Pair = tuple[nn.Conv2d, _BatchNorm]
"""A convolution, and the batch normalisation that reads its output."""


@torch.no_grad()
def foldable(module: nn.Module, images: torch.Tensor) -> list[Pair]:
    """Return each convolution with the batch normalisation that directly reads its output.

    Pairs are found from the tensors that flow through ``module`` in evaluation mode, not from names
    or order.

    Args:
        module: Left in evaluation mode.
        images: [B, C, H, W], valid inputs of ``module``.

    Raises:
        SettingsError: If folding changes the module's output, for example because another layer
            also reads a convolution's output.
    """
    if not any(True for _ in _layers(module)):
        return []
    results: list[tuple[torch.Tensor, int, nn.Conv2d]] = []
    pairs: list[Pair] = []

    def note(layer: nn.Module, _: object, result: torch.Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            results.append((result, result._version, layer))

    def look(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if not isinstance(layer, _BatchNorm) or not _only_normalises(layer):
            return
        if layer.affine and layer.track_running_stats:
            pairs.extend(
                (conv, layer)
                for result, version, conv in results
                if result is inputs[0] and result._version == version
            )

    hooks = [layer.register_forward_hook(note) for layer in module.modules()]
    hooks += [layer.register_forward_pre_hook(look) for layer in module.modules()]
    before = module.eval()(images)
    for hook in hooks:
        hook.remove()
    with folded(pairs, fold_all(pairs)):
        after = module(images)
    if float((after - before).abs().max()) > 1e-3 * float(before.abs().max()):
        raise SettingsError(
            "this network's batch normalisation cannot be folded into its convolutions: "
            "set train.fold_batch_norm=false evaluation.fuse_batch_norm=false"
        )
    return pairs


Fold = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias of a convolution that includes the batch normalisation after it."""


def fold_all(pairs: Sequence[Pair]) -> list[Fold]:
    """Fold the current weights of all pairs, for `folded`."""
    return [_fold(*pair) for pair in pairs]


@contextmanager
def folded(pairs: Sequence[Pair], folds: Sequence[Fold] | None = None) -> Iterator[None]:
    """Fold batch normalisation into the convolutions before it, within a block.

    The function and its parameters stay the same; only the arithmetic differs. Batch normalisation
    must use its running statistics throughout.

    Args:
        pairs: See `foldable`.
        folds: Result of `fold_all`; ``None`` folds again in each forward pass, so that
            gradients reach all parameters.
    """
    for number, (conv, norm) in enumerate(pairs):
        forward: Callable[[torch.Tensor], torch.Tensor] = partial(_convolve, conv, norm)
        if folds is not None:
            weight, bias = folds[number]
            forward = partial(conv._conv_forward, weight=weight, bias=bias)
        conv.forward = forward  # type: ignore[method-assign, assignment]
        norm.forward = _unchanged  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layer in {layer for pair in pairs for layer in pair}:
            del layer.forward


def _fold(conv: nn.Conv2d, norm: _BatchNorm) -> Fold:
    buffers = dict(norm.named_buffers())
    scale = norm.weight * torch.rsqrt(buffers["running_var"] + norm.eps)
    mean = buffers["running_mean"] - (0 if conv.bias is None else conv.bias)
    return conv.weight * scale[:, None, None, None], norm.bias - mean * scale


def _convolve(conv: nn.Conv2d, norm: _BatchNorm, values: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = conv._conv_forward(values, *_fold(conv, norm))
    return result


def _unchanged(values: torch.Tensor) -> torch.Tensor:
    return values
