"""FedSR: a simple representation, small in norm and with little information beyond the class."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_methods.shared.passes import widened

MIN_STD = 1e-6
"""Smallest standard deviation inside a Gaussian divergence: softplus can underflow to 0."""


class FedSRSettings(MethodSettings):
    """Weights and variants of the regularisers, and prediction of test images."""

    labels: ClassVar[tuple[str, ...]] = ("variant", "test")

    variant: Literal["official", "bai", "pardon", "aggregated"] = "official"
    """``official``: the authors' code, the norm of z and a learned scale, reference at the client;
    ``bai``: FedDG_Benchmark's, the squared norm, no scale, reference means start at 1;
    ``pardon``: the same, but the reference is reset whenever a client is sampled;
    ``aggregated``: FedCCRL's, as ``official`` with reference and scale sent and averaged."""
    l2_weight: float = Field(0.01, ge=0)
    """a, the weight of the L2 regulariser: 0.01 in the authors' code, 0.001 in FedCCRL."""
    cmi_weight: float = Field(0.001, ge=0)
    """b, the weight of the conditional mutual information: 0.001 in the authors' instructions for
    PACS, 0.0005 by default in their code."""
    test: Literal["samples", "mean"] = "samples"
    """Average the probabilities of samples of z, or classify the mean of z."""
    test_samples: int = Field(20, ge=1)
    """Samples of z at test time: 20 in the authors' code, 1 in FedDG_Benchmark and FedCCRL."""


class FedSR(Method):
    """FedSR (Nguyen et al., NeurIPS 2022).

    The backbone gives the mean and standard deviation of a Gaussian over the representation z, and
    training draws one sample of it for each image. Clients minimise CE + a L2R + b CMI, where CMI
    is measured against a learned Gaussian of each class. The server is FedAvg's.

    The feature layer is twice as wide, 2 d_z: the backbone's projection if it has one (2048 to 4096
    for FedDG_Benchmark's ResNet-50), else a new linear layer on its D pooled features,
    with d_z = D. The Gaussians of classes that a client lacks get no gradient.
    """

    group = "alignment"
    title = "FedSR"
    citation = (
        "A. Tuan Nguyen, Philip Torr, Ser-Nam Lim: FedSR: A Simple and Effective Domain "
        "Generalization Method for Federated Learning, NeurIPS 2022, "
        "https://openreview.net/forum?id=mrt90D00aQX"
    )
    Settings = FedSRSettings
    settings: FedSRSettings
    local: ClassVar[tuple[str, ...]] = ("reference.",)
    frozen = ("test_noise",)
    test_noise: Tensor

    def build(self) -> None:
        s, backbone, d_z = self.settings, self.backbone, self.num_features
        narrow = backbone.projection
        width = narrow.in_features if isinstance(narrow, nn.Linear) else d_z
        backbone.projection = nn.Linear(width, 2 * d_z)
        backbone.num_features = 2 * d_z

        self.variant = VARIANTS[s.variant]
        r_mu = torch.full((self.num_classes, d_z), self.variant.start)
        self.reference = nn.ParameterDict({"mu": r_mu, "sigma": torch.ones_like(r_mu)})
        if self.variant.scaled:  # the logarithm, so that C = exp(log_scale) stays positive
            self.reference["log_scale"] = torch.zeros(())
        if self.variant.averaged:
            self.local = ()  # type: ignore[misc] # this variant sends it
        if s.test == "samples":
            # Drawn once: predictions depend neither on the rest of the batch nor on the worker.
            self.register_buffer("test_noise", torch.randn(s.test_samples, d_z))

    def distribution(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mu_z and sigma_z > 0, both [B, d_z], of images [B, 3, H, W]."""
        mu, sigma = widened(self.backbone(images)).chunk(2, dim=1)
        return mu, F.softplus(sigma)

    def features(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the means of their representations, [B, d_z]."""
        return self.distribution(images)[0]

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to scores [B, C] whose softmax is the prediction.

        In evaluation mode these are logarithms of the samples' mean probabilities, or the logits of
        the mean of z; in training mode the logits of one sample.
        """
        mu, sigma = self.distribution(images)
        if self.training or self.settings.test == "mean":
            logits: Tensor = self.classifier(draw(mu, sigma) if self.training else mu)
            return logits
        # One pass of the backbone; the samples differ in the classifier only.
        return mean_log_probabilities(
            torch.stack([self.classifier(mu + sigma * noise) for noise in self.test_noise])
        )

    def fit(self, client: Client) -> LocalUpdate:
        if self.variant.anew:
            for start in self.reference.values():
                nn.init.ones_(start)
        return super().fit(client)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        s = self.settings
        images, labels = batch
        mu, sigma = self.distribution(images)
        z = draw(mu, sigma)
        loss = F.cross_entropy(widened(self.classifier(z)), labels)
        if s.l2_weight:
            loss = loss + s.l2_weight * l2_regulariser(z, squared=self.variant.squared)
        if s.cmi_weight:
            r = self.reference
            scale = r["log_scale"].exp() if "log_scale" in r else 1.0
            cmi = conditional_mutual_information(
                mu, sigma, r["mu"], F.softplus(r["sigma"]), labels, scale=scale
            )
            loss = loss + s.cmi_weight * cmi
        return loss


def draw(mu: Tensor, sigma: Tensor) -> Tensor:
    """Draw one sample of N(mu, sigma^2) for each entry; gradients flow into both."""
    return mu + sigma * torch.randn_like(sigma)


def l2_regulariser(z: Tensor, *, squared: bool = False) -> Tensor:
    """Return the mean norm of the rows of z [B, d_z], or their mean squared norm: a scalar."""
    return z.square().sum(dim=1).mean() if squared else z.norm(dim=1).mean()


def mean_log_probabilities(logits: Tensor) -> Tensor:
    """Return the logarithm [B, C] of the mean softmax over S samples' logits [S, B, C]."""
    return widened(logits).log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(logits))


def conditional_mutual_information(
    mean: Tensor,
    std: Tensor,
    reference_mean: Tensor,
    reference_std: Tensor,
    labels: Tensor,
    *,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """Bound the information that a feature holds about its image beyond the class: CMI.

    The mean over images of KL(N(C mu_z, (C sigma_z)^2) || N(r_mu[y], r_sigma[y]^2)).

    In nats; C is ``scale``, r the reference of the image's class. Gradients flow into the features
    and into the reference.

    Source: FedSR (Nguyen et al., NeurIPS 2022), the CMI regulariser; ``scale`` is a learned
    positive number in the authors' code and 1 in FedDG_Benchmark's.

    Args:
        mean: Means of the features, [B, D].
        std: Their standard deviations, [B, D], taken as 1e-6 where smaller.
        reference_mean: Mean of each class's reference distribution, [C, D].
        reference_std: Its standard deviations, [C, D], taken as 1e-6 where smaller.
        labels: Class ids, [B], int64.
        scale: Factor on features, above 0.

    Returns:
        A scalar, 0 or more.
    """
    mean, std = scale * widened(mean), scale * widened(std).clamp(min=MIN_STD)
    target_mean = widened(reference_mean)[labels]  # [B, D]
    target_std = widened(reference_std).clamp(min=MIN_STD)[labels]
    square = std.square() + (mean - target_mean).square()
    divergence = (target_std / std).log() + square / (2 * target_std.square()) - 0.5
    return divergence.sum(dim=1).mean()


class Choices(NamedTuple):
    """Variants of published code.

    Attributes:
        squared: Whether L2R is the squared norm.
        scaled: Whether the scale C is learned; else it is 1.
        start: Initial value of the reference's means.
        anew: Whether the reference is reset to 1 in each of a client's tasks.
        averaged: Whether reference and scale are sent and averaged.
    """

    squared: bool = False
    scaled: bool = True
    start: float = 0.0
    anew: bool = False
    averaged: bool = False


VARIANTS = {
    "official": Choices(),
    "bai": Choices(squared=True, scaled=False, start=1.0),
    "pardon": Choices(squared=True, scaled=False, start=1.0, anew=True),
    "aggregated": Choices(averaged=True),
}
"""The code of the authors, FedDG_Benchmark, PARDON and FedCCRL."""


DEVIATIONS = (
    "The authors' code takes the norm of z; FedDG_Benchmark and PARDON take its square. We take "
    "the norm (`variant`).",
    "The authors' code learns a scale C of z inside the CMI; FedDG_Benchmark fixes it at 1. We "
    "learn its logarithm, so that it stays positive (`variant`).",
    "FedDG_Benchmark starts the reference means at 1, the authors' code at 0. So do we "
    "(`variant`).",
    "The authors' code keeps each client's reference, FedCCRL sends and averages it, PARDON "
    "starts it anew in every round. We keep it (`variant`).",
    "FedDG_Benchmark and FedCCRL predict from one random sample of z, the authors' code from the "
    "mean probability of 20. So do we, with the same noise for all images (`test_samples`).",
    "The authors' code trains the reference with a momentum of its own, 0.9. Ours shares the "
    "model's optimizer (`train.optimizer`).",
    "PARDON's settings ask for SGD with a learning rate of 0.002 and momentum, but its program "
    "replaces them by 3e-5 without momentum, the likeliest reason why its FedSR stays at chance "
    "level. We train FedSR like every other method (`train.lr`), but under `--recipe pardon`.",
)
"""Where published code differs from its paper, and what this module does."""
