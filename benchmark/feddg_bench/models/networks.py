"""Small networks of the field, images [B, 3, H, W] to features [B, D]."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def small_cnn() -> nn.Sequential:
    """Return a network for small images on a CPU: 97,680 parameters, 128 features.

    Groups of channels are normalised within each image, not over the batch: clients with a
    handful of images train as well as others, and nothing is left to average but parameters.
    Strides instead of max pooling keep it cheap, and deterministic on every device.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((3, 16, 32, 64, 128)):
        layers += [
            nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(values.clamp_(0, 6))
        ctx.save_for_backward(values)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        before: torch.Tensor = torch.ops.aten.hardtanh_backward(gradient, values, 0, 6)
        return before


class InPlaceReLU6(nn.ReLU6):
    """ReLU6 that overwrites its input and keeps only its result for the backward pass.

    PyTorch's also keeps the input, besides the result that the next layer keeps. That is a third of
    what MobileNetV2 keeps, and costs a twentieth of its time. The bits are the same.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` clamped to [0, 6], in place."""
        if torch._C._are_functorch_transforms_active():  # these cannot work in place
            return F.relu6(values)
        clipped: torch.Tensor = _Clip.apply(values)
        return clipped


class Grey(nn.Module):
    """Keep one of the three equal channels of grey images: [B, 3, H, W] to [B, 1, H, W]."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the first channel."""
        return images[:, :1]


def lenet() -> nn.Sequential:
    """Return LeNet-5 (LeCun et al., 1998) for grey images of 28 px: 60,856 parameters, 84 features.

    With ReLU and max pooling, as it is used today. PPDG names it without details.
    """
    return nn.Sequential(
        Grey(),
        nn.Conv2d(1, 6, kernel_size=5, padding=2),
        nn.MaxPool2d(2),  # pooled before ReLU: the same bits, a quarter of the work
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(inplace=True),
        nn.Linear(120, 84),
        nn.ReLU(inplace=True),
    )


def domainbed_mnist() -> nn.Sequential:
    """Return DomainBed's network for grey digits: 370,560 parameters, 128 features.

    Gulrajani and Lopez-Paz, ICLR 2021: four convolutions, each followed by ReLU and then by group
    normalisation, and the mean over all positions.
    """
    layers: list[nn.Module] = [Grey()]
    for inputs, outputs, stride in ((1, 64, 1), (64, 128, 2), (128, 128, 1), (128, 128, 1)):
        layers += [
            nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1),
            nn.ReLU(inplace=True),
            nn.GroupNorm(8, outputs),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def femnist_cnn() -> nn.Sequential:
    """Return FedDG_Benchmark's network for grey images of 28 px: 512 features.

    Bai et al., ICLR 2024: two convolutions with max pooling and one hidden layer, 1,632,224
    parameters.
    """
    layers: list[nn.Module] = [Grey()]
    for inputs, outputs in pairwise((1, 16, 64)):
        layers += [
            nn.Conv2d(inputs, outputs, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ]
    layers += [nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


LITE0 = (
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 5, 40, 2, 2),
    (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)
"""Stages of EfficientNet-Lite0: expansion, kernel, channels, blocks, stride of the first block."""


class Residual(nn.Sequential):
    """Add the input to the output of the layers."""

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps of the same shape, [B, C, H, W]."""
        made = maps
        for layer in self:
            made = layer(made)
        return maps + made


def efficientnet_lite0() -> nn.Sequential:
    """Return EfficientNet-Lite0 (Google, 2020): 4,652,008 parameters, 1,280 features, 1,000 scores.

    EfficientNet-B0 (Tan and Le, ICML 2019) with ReLU6 and without squeeze and excitation. Its
    tensors are in the order of timm's ``tf_efficientnet_lite0``; it pads as TensorFlow does.
    """
    from torchvision.ops import Conv2dNormActivation

    norm = partial(nn.BatchNorm2d, eps=1e-3)
    layer = partial(Conv2dNormActivation, norm_layer=norm, activation_layer=nn.ReLU6)
    layers = [layer(3, 32, 3, 2)]
    inputs = 32
    for expansion, kernel, outputs, blocks, first in LITE0:
        for stride in (first, *[1] * (blocks - 1)):
            wide = inputs * expansion
            block = [layer(inputs, wide, 1)] if expansion > 1 else []
            block.append(layer(wide, wide, kernel, stride, groups=wide))
            block.append(layer(wide, outputs, 1, activation_layer=None))
            kind = Residual if stride == 1 and inputs == outputs else nn.Sequential
            layers.append(kind(*block))
            inputs = outputs
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    features = nn.Sequential(*layers, layer(inputs, 1280, 1), *pool)
    pad_like_tensorflow(features)
    return nn.Sequential(OrderedDict(features=features, classifier=nn.Linear(1280, 1000)))


def pad_like_tensorflow(net: nn.Module) -> None:
    """Pad square convolutions of stride 2 as TensorFlow's "same" does, in place."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2):
            layer.padding = (0, 0)
            layer.register_forward_pre_hook(_pad_same)


def _pad_same(layer: nn.Conv2d, inputs: tuple[Tensor]) -> Tensor:
    """Pad so that half the positions come out, rounded up; an odd pixel goes right and bottom."""
    (left, right), (top, bottom) = (
        (total // 2, total - total // 2)
        for total in (
            max(0, layer.kernel_size[0] - 2 + side % 2) for side in inputs[0].shape[:1:-1]
        )
    )
    return F.pad(inputs[0], (left, right, top, bottom))
