"""Penalties on the difference between the features of two domains of a client."""

from __future__ import annotations

from itertools import combinations

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, on_device
from feddg_methods.shared.domains import DomainBatches, members, parted
from feddg_methods.shared.passes import widened


class AlignmentSettings(MethodSettings):
    """Strength of the alignment."""

    weight: float = Field(1.0, ge=0)
    """Weight of the penalty, 1 in DomainBed and on PACS in FedDG_Benchmark; 0 is FedAvg."""


class PairwiseAligned(DomainBatches):
    """Adds the mean penalty over all pairs of domains of a batch to the loss.

    Only domains of the same client are compared, so no features are sent. A domain with one image
    in the batch is left out; if fewer than two domains have two images, the step is FedAvg's. With
    one domain per client, the method is FedAvg.
    """

    group = "alignment"
    tasks = ("classification", "regression")
    Settings = AlignmentSettings
    settings: AlignmentSettings

    def difference(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the penalty of two domains' features [n, D] and [m, D]: a scalar."""
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels, domains = parted(batch)
        z = self.features(images)
        loss = self.task.loss(self.classifier(z), labels, "mean")
        parts = on_device(members(domains, least=2), z.device) if self.settings.weight else []
        pairs = [*combinations(parts, 2)]
        if not pairs:
            return loss
        z = widened(z)
        penalty = torch.stack([self.difference(z[e], z[f]) for e, f in pairs]).mean()
        return loss + self.settings.weight * penalty
