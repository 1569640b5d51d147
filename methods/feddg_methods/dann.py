"""DANN: features from which a discriminator cannot tell the domain."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, on_device
from feddg_methods.shared.domains import DomainBatches, parted


class DANNSettings(MethodSettings):
    """The discriminator, and the weight of its gradient."""

    hidden: int = Field(256, ge=1)
    """Width of the discriminator's hidden layer; DomainBed's default."""
    weight: float = Field(1.0, ge=0)
    """Largest weight of the reversed gradient; lambda rises from 0 to it as in the paper."""
    gamma: float = Field(10.0, ge=0)
    """Speed of this rise; the paper's is 10."""


class DANN(DomainBatches):
    """Domain-adversarial training (Ganin et al., JMLR 2016, arXiv 1505.07818, Section 4.2).

    A discriminator with one hidden layer predicts from the features which source domain an image is
    from. Clients minimise the loss of the labels plus that of the domains; between features and
    discriminator a layer multiplies the gradient by -lambda, so that features become worse for the
    discriminator while it learns. lambda = weight (2 / (1 + exp(-gamma p)) - 1), with p the
    fraction of the run that is done. The discriminator is part of the model that is averaged.

    A client's discriminator sees the client's domains only. If it has one domain, its gradient
    hides this domain from the averaged discriminator, which knows the others.
    """

    acts_on = "features"
    group = "alignment"
    tasks = ("classification", "regression")
    title = "DANN"
    citation = (
        "Ganin, Ustinova, Ajakan, Germain, Larochelle, Laviolette, Marchand and Lempitsky: "
        "Domain-Adversarial Training of Neural Networks, JMLR 2016, arXiv 1505.07818"
    )
    Settings = DANNSettings
    settings: DANNSettings

    def build(self) -> None:
        self.discriminator = nn.Sequential(
            nn.Linear(self.num_features, self.settings.hidden),
            nn.ReLU(),
            nn.Linear(self.settings.hidden, max(len(self.sources), 1)),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels, domains = parted(batch)
        features = self.features(images)
        loss = self.task.loss(self.classifier(features), labels, "mean")
        if self.alone:
            return loss
        (domains,) = on_device([domains], images.device)
        reversed_features = Reversed.apply(features, self.strength())
        return loss + F.cross_entropy(self.discriminator(reversed_features).float(), domains)

    def strength(self) -> float:
        """Return lambda of the client's round, in [0, ``weight``]."""
        client, s = self.client, self.settings
        return s.weight * rise((client.round - 1) / max(client.rounds - 1, 1), s.gamma)


def rise(p: float, gamma: float) -> float:
    """Return 2 / (1 + exp(-gamma p)) - 1, which rises from 0 at p = 0 towards 1 (Section 5.2.2)."""
    return 2 / (1 + math.exp(-gamma * p)) - 1


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is multiplied by -lambda."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lam: float) -> Tensor:
        ctx.lam = lam
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.lam * gradient, None


DEVIATIONS = (
    "The paper adapts one labelled source to one unlabelled target. As in DomainBed, domains are "
    "the source domains, and all images are labelled.",
    "DomainBed updates discriminator and features in turn, with a penalty on the discriminator's "
    "gradient. We follow the paper: one step with a reversed gradient.",
    "The paper computes p from steps. We take rounds, so lambda is constant within one.",
)
"""Where published code differs from its paper, and what this module does."""
