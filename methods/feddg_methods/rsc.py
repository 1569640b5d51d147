"""RSC: mute the features that the prediction relies on most."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch
from feddg_bench.core.method import Method


class RSCSettings(MethodSettings):
    """Muted fractions."""

    labels: ClassVar[tuple[str, ...]] = ("features", "images")

    features: float = Field(1 / 3, ge=0, lt=1)
    """p, the fraction of an image's features that are muted; the paper uses 33.3 % with ResNet-18
    and a third is DomainBed's default. 0 is FedAvg."""
    images: float = Field(1 / 3, ge=0, le=1)
    """Fraction of a batch whose features are muted: the images whose prediction suffers most."""


class RSC(Method):
    """Representation self-challenging (Huang et al., ECCV 2020, arXiv 2007.02454, Algorithm 1).

    With features z and logits h(z), g = d(h(z) . y) / dz is the gradient of the true class's logit
    (Equation 1). Features whose gradient is at least the (1 - p) quantile of the image are set to 0
    (Equations 2 and 3). This is done for the images whose probability of the true class falls most
    by it (Equation 4). The client minimises the loss of the muted features; the server is FedAvg's.
    """

    group = "local training"
    title = "RSC"
    citation = (
        "Zeyi Huang, Haohan Wang, Eric P. Xing, Dong Huang: Self-Challenging Improves Cross-Domain "
        "Generalization, ECCV 2020, arXiv 2007.02454"
    )
    Settings = RSCSettings
    settings: RSCSettings

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        z = self.features(images)
        if self.settings.features and self.settings.images:
            z = z * self.mask(z.detach(), labels)
        return self.task.loss(self.classifier(z), labels, "mean")

    def mask(self, z: Tensor, labels: Tensor) -> Tensor:
        """Return 0 where a feature is muted and 1 elsewhere.

        Args:
            z: Features [B, D], without gradient.
            labels: int64 [B].
        """
        with torch.enable_grad():
            leaf = z.clone().requires_grad_()
            logits = self.classifier(leaf)
            own = logits.gather(1, labels[:, None])
            (g,) = torch.autograd.grad(own.sum(), leaf)
        with torch.no_grad():
            kept = unmuted(g, self.settings.features)
            before = logits.softmax(1).gather(1, labels[:, None])
            after = self.classifier(z * kept).softmax(1).gather(1, labels[:, None])
            spared = unmuted((before - after).T, self.settings.images).T
            return torch.maximum(kept, spared)


def unmuted(values: Tensor, fraction: float) -> Tensor:
    """Return 1 where a value lies below its row's (1 - fraction) quantile, else 0.

    Args:
        values: [R, D].
        fraction: Muted fraction of each row, in [0, 1]; 1 mutes everything.

    Returns:
        The shape and type of ``values``.
    """
    ordered = values.sort(dim=1).values
    rank = math.ceil((1 - fraction) * (values.shape[1] - 1) - TIE)
    return (values < ordered[:, rank, None]).to(values.dtype)


TIE = 1e-6
"""A rank this close above an integer is that integer: (1 - 1/3) 3 is 2 but for rounding."""


DEVIATIONS = (
    "The paper challenges the feature map before pooling, by channel or by position at random. As "
    "DomainBed does, we challenge the pooled features, so that any backbone works.",
    "The authors' code raises the muted fraction of a batch during training. We keep it, as the "
    "paper and DomainBed do.",
)
"""Where published code differs from its paper, and what this module does."""
