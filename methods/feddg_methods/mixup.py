"""Mixup: train on convex combinations of images of different domains."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, on_device
from feddg_methods.shared.domains import DomainBatches, parted


class MixupSettings(MethodSettings):
    """Strength of the mixing."""

    labels: ClassVar[tuple[str, ...]] = ("alpha",)

    alpha: float = Field(0.2, ge=0)
    """Both parameters of the Beta distribution of lambda: 0.1 to 0.4 in the paper, 0.2 in DomainBed
    and FedDG_Benchmark. 0 is FedAvg."""


class Mixup(DomainBatches):
    """Mixup between domains (Zhang et al., ICLR 2018, arXiv 1710.09412; Xu et al., AAAI 2020).

    Each image x_i of a batch is paired with a random image x_j of another domain in the batch. The
    client minimises lambda loss(f(x), y_i) + (1 - lambda) loss(f(x), y_j) at
    x = lambda x_i + (1 - lambda) x_j, with one lambda ~ Beta(alpha, alpha) for each batch. The
    server is FedAvg's.

    Partners come from the client's own images. If a batch has one domain, they come from this
    domain, as in the Mixup paper.
    """

    group = "local training"
    tasks = ("classification", "regression")
    title = "Mixup"
    citation = (
        "Zhang, Cisse, Dauphin and Lopez-Paz: mixup: Beyond Empirical Risk Minimization, ICLR "
        "2018, arXiv 1710.09412; Xu, Zhang, Ni, Li, Wang, Tian and Zhang: Adversarial Domain "
        "Adaptation with Domain Mixup, AAAI 2020, arXiv 1912.01805"
    )
    Settings = MixupSettings
    settings: MixupSettings

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels, domains = parted(batch)
        alpha = self.settings.alpha
        if not alpha:
            return self.task.loss(self(images), labels, "mean")
        lam = float(torch.distributions.Beta(alpha, alpha).sample())
        j = partners(domains, torch.rand(len(domains), len(domains)))
        (j,) = on_device([j], images.device)
        outputs = self(lam * images + (1 - lam) * images[j])
        own = self.task.loss(outputs, labels, "mean")
        return lam * own + (1 - lam) * self.task.loss(outputs, labels[j], "mean")


def partners(domains: Tensor, draws: Tensor) -> Tensor:
    """Return a random image of another domain for each image; of any domain if there is no other.

    Args:
        domains: Domain ids [B].
        draws: Independent uniform numbers in [0, 1), [B, B].

    Returns:
        Positions, int64 [B].
    """
    other = domains[:, None] != domains[None]
    return (other + draws).argmax(dim=1)


DEVIATIONS = (
    "The paper mixes any two images. DomainBed and FedDG_Benchmark mix images of two domains, and "
    "so do we where a batch has several.",
    "FedDG_Benchmark builds batches of two domains of equal size, and mixes each image once. Our "
    "batches are FedAvg's, so a rare domain's images meet many partners.",
)
"""Where published code differs from its paper, and what this module does."""
