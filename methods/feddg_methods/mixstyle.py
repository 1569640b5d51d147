"""MixStyle: mix the channel statistics of feature maps of different images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, on_device
from feddg_methods.mixup import partners
from feddg_methods.shared.domains import DomainBatches, parted
from feddg_methods.shared.stages import changed, check_stages

EPSILON = 1e-6
"""Added to variances, as in the authors' code."""


class MixStyleSettings(MethodSettings):
    """Where, how often and how strongly styles are mixed."""

    labels: ClassVar[tuple[str, ...]] = ("partners",)

    p: float = Field(0.5, ge=0, le=1)
    """Probability that a batch is mixed; 0 is FedAvg."""
    alpha: float = Field(0.1, gt=0)
    """Both parameters of the Beta distribution of lambda; the paper uses 0.1 for classification."""
    stages: tuple[int, ...] = (1, 2)
    """Stages of the backbone whose output is mixed, from 1; the paper uses the first two or three
    of a ResNet's four."""
    partners: Literal["random", "domain"] = "random"
    """A random other image of the batch, or one of another domain, where the batch has one."""


class MixStyle(DomainBatches):
    """MixStyle (Zhou et al., ICLR 2021, arXiv 2104.02008, Section 3.2).

    A feature map x [C, H, W] has the style (mu, sigma), the mean and standard deviation of each
    channel over its positions. In training, x with a partner x' in the batch becomes
    gamma_mix (x - mu) / sigma + beta_mix, with gamma_mix = lambda sigma + (1 - lambda) sigma',
    beta_mix = lambda mu + (1 - lambda) mu' and lambda ~ Beta(alpha, alpha) for each image. No
    gradient flows through styles. A client mixes the styles of its own images; the server is
    FedAvg's.
    """

    group = "local training"
    tasks = ("classification", "regression")
    acts_on = "maps"
    title = "MixStyle"
    citation = (
        "Kaiyang Zhou, Yongxin Yang, Yu Qiao, Tao Xiang: Domain Generalization with MixStyle, "
        "ICLR 2021, arXiv 2104.02008"
    )
    Settings = MixStyleSettings
    settings: MixStyleSettings

    def build(self) -> None:
        check_stages(self.backbone, "stages", self.settings.stages)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels, domains = parted(batch)
        with self.mixing(domains):
            return self.task.loss(self(images), labels, "mean")

    @contextmanager
    def mixing(self, domains: Tensor) -> Iterator[None]:
        """Mix styles in the forward passes of the block; partners are drawn once.

        Args:
            domains: Domain ids of the batch, int64 [B], on the CPU.
        """
        s, b = self.settings, len(domains)
        if float(torch.rand(())) >= s.p or b < 2:
            yield
            return
        j = partners(domains, torch.rand(b, b)) if s.partners == "domain" else torch.randperm(b)
        with ExitStack() as stack:
            for number in s.stages:
                lam = torch.distributions.Beta(s.alpha, s.alpha).sample((b,))
                drawn = on_device([j, lam], self.device)
                change = partial(mixed_styles, partner=drawn[0], lam=drawn[1])
                stack.enter_context(changed(self.backbone.stages[number - 1], change))
            yield


def mixed_styles(maps: Tensor, partner: Tensor, lam: Tensor) -> Tensor:
    """Return feature maps with mixed styles, in their shape.

    Args:
        maps: x, [B, C, H, W].
        partner: Position of each map's partner in the batch, int64 [B].
        lam: lambda of each map in [0, 1], [B].
    """
    mu = maps.mean((2, 3), keepdim=True).detach()
    sigma = (maps.var((2, 3), keepdim=True) + EPSILON).sqrt().detach()
    lam = lam.to(maps.dtype).view(-1, 1, 1, 1)
    gamma = lam * sigma + (1 - lam) * sigma[partner]
    beta = lam * mu + (1 - lam) * mu[partner]
    return gamma * ((maps - mu) / sigma) + beta


DEVIATIONS = (
    "The paper mixes over batches of several domains. A client mixes over its own images, which "
    "may be of one domain; then `partners` has no effect on the choice.",
    "The authors' code draws new partners in each layer. We draw them once a batch, and lambda in "
    "each layer.",
    "For partners of another domain the authors' code swaps the halves of a batch that holds two "
    "domains. Our batches are FedAvg's, so partners are drawn image by image.",
)
"""Where published code differs from its paper, and what this module does."""
