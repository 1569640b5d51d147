"""Small networks of the field, images [B, 3, H, W] to features [B, D]."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


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


class Grey(nn.Module):
    """Keep one of the three equal channels of grey images: [B, 3, H, W] to [B, 1, H, W]."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the first channel."""
        return images[:, :1]


def lenet() -> nn.Sequential:
    """Return LeNet-5 (LeCun et al., 1998) for grey images of 28 px: 60,856 parameters, 84 features.

    With ReLU and max pooling, as it is used today. PPDG names it without saying more.
    """
    return nn.Sequential(
        Grey(),
        nn.Conv2d(1, 6, kernel_size=5, padding=2),
        nn.MaxPool2d(2),  # before ReLU the same, to the bit, with a quarter of its work
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
