"""IRM: penalise features for which each domain would scale the classifier differently."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddg_bench.core.client import Batch, on_device
from feddg_methods.shared.domains import AnnealedSettings, DomainBatches, members, parted
from feddg_methods.shared.passes import widened


class IRMSettings(AnnealedSettings):
    """Strength of the penalty."""

    toy: ClassVar = {"penalty": 1.0}  # three rounds are too few for 100

    penalty: float = Field(100.0, ge=0)
    """lambda in the paper, which tunes it: 100 in DomainBed, 1000 on PACS in FedDG_Benchmark. 0 is
    FedAvg."""


class IRM(DomainBatches):
    """IRMv1 (Arjovsky et al., 2019, arXiv 1907.02893, Equation IRMv1 and Section 3.2).

    Each client minimises sum_e n_e/B (R^e + lambda ||grad_{w | w = 1} R^e(w Phi)||^2) over the
    environments e of a batch of B images: its domains, n_e images each. w multiplies the logits.
    The squared norm is estimated without bias, as the product of the gradients on the two halves of
    the n_e images at even and at odd positions in the batch, so it can be negative; a domain with
    one image in the batch has no penalty.

    The penalty of a domain needs no other domain. The total is a sum over environments, which
    FedAvg's mean distributes over clients, so a client with one domain contributes its own term.
    Between two rounds, however, each client moves towards the optimum of its own domains.
    """

    group = "alignment"
    title = "IRM"
    citation = (
        "Arjovsky, Bottou, Gulrajani and Lopez-Paz: Invariant Risk Minimization, 2019, "
        "arXiv 1907.02893"
    )
    Settings = IRMSettings
    settings: IRMSettings

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels, domains = parted(batch)
        logits = self(images)
        risk = self.task.loss(logits, labels, "mean")
        weight = self.settings.annealed(self.settings.penalty, self.state.client)
        if not weight:
            return risk
        slopes = risk_slopes(widened(logits), labels)
        environments = on_device(members(domains, least=2), slopes.device)
        penalties = [len(e) * invariance_penalty(slopes[e]) for e in environments]
        return risk + weight * sum(penalties) / len(labels)


def risk_slopes(logits: Tensor, labels: Tensor) -> Tensor:
    """Return d/dw of each image's cross-entropy of w logits at w = 1: sum_c (p_c - y_c) logit_c.

    Args:
        logits: [B, C].
        labels: Class ids [B], int64.

    Returns:
        [B].
    """
    errors = logits.softmax(dim=1) - F.one_hot(labels, logits.shape[1])
    return (errors * logits).sum(dim=1)


def invariance_penalty(slopes: Tensor) -> Tensor:
    """Return an unbiased estimate of the squared mean slope of a domain: a scalar.

    Args:
        slopes: `risk_slopes` of the domain's images, [n], n at least 2.
    """
    return slopes[0::2].mean() * slopes[1::2].mean()


DEVIATIONS = (
    "The paper weights environments equally. Ours count by their images, as in FedAvg.",
    "The default weight suits Adam, with which both benchmarks use it. Plain SGD can diverge.",
    "The authors' code divides the whole loss by lambda above 1. We do not; a step of Adam does "
    "not depend on it.",
    "DomainBed and FedDG_Benchmark start Adam anew where the penalty takes its full weight. Our "
    "clients start it anew in every round anyway, unless told otherwise (`train.optimizer_state`).",
    "FedDG_Benchmark sets the weight of the penalty to 0 just before it is used, so its IRM is "
    "FedAvg on batches of two domains. We use the penalty (`penalty`).",
)
"""Where published code differs from its paper, and what this module does."""
