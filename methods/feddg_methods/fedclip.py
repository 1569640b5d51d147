"""FedCLIP: train and average an attention adapter between frozen image and text features."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch
from feddg_bench.core.method import Method


class FedCLIPSettings(MethodSettings):
    """Loss."""

    labels: ClassVar[tuple[str, ...]] = ("loss",)

    loss: Literal["classes", "batch"] = "classes"
    """``classes``: cross-entropy over the text features of all classes. ``batch`` (authors' code):
    contrast of each image with the texts of the batch's images, and the reverse; two images of one
    class then count as a wrong pair."""


class FedCLIP(Method):
    """FedCLIP (Lu et al., 2023): only an adapter of the image features is trained and sent.

    With the image feature I of the frozen encoder, the adapter multiplies it by attention:

        I* = att(I) I,   att(I) = softmax(W_2 tanh(W_1 I + b_1) + b_2)

    The logits are the cosines of I* and the text features, times the encoder's scale. The server
    averages adapters as FedAvg does.
    """

    Settings = FedCLIPSettings
    settings: FedCLIPSettings
    needs_text = True
    group = "local training"
    title = "FedCLIP"
    citation = (
        "Wang Lu, Xixu Hu, Jindong Wang, Xing Xie: FedCLIP: Fast Generalization and "
        "Personalization for CLIP in Federated Learning, ICLR Workshop on Trustworthy and "
        "Reliable Large-Scale Machine Learning Models 2023, arXiv 2302.13485"
    )

    def build(self) -> None:
        width = self.num_features
        self.attention = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Softmax(dim=1)
        )

    def features(self, images: Tensor) -> Tensor:
        """Map images to adapted features I*, [B, D]."""
        z = super().features(images)
        adapted: Tensor = self.attention(z) * z
        return adapted

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        if self.settings.loss == "classes":
            return F.cross_entropy(self(images), labels)
        return pair_loss(self(images), labels)


def pair_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the symmetric contrast of the images of a batch with their texts: a scalar.

    Args:
        logits: Scores of each image for each class, [B, C].
        labels: Classes of the images, [B].
    """
    pairs = logits[:, labels]  # [B, B]: image i with the text of image j
    own = torch.arange(len(labels), device=labels.device)
    return (F.cross_entropy(pairs, own) + F.cross_entropy(pairs.T, own)) / 2


DEVIATIONS = (
    "The authors' code takes the texts of a batch's images for classes, so that two images of one "
    "class are a wrong pair. We take the classes (`loss`).",
)
"""Where published code differs from its paper, and what this module does."""
