"""V-REx: penalise the variance of the risks over domains."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.core.client import Batch, on_device
from feddg_methods.shared.domains import AnnealedSettings, DomainBatches, members, parted


class VRExSettings(AnnealedSettings):
    """Strength of the penalty."""

    beta: float = Field(10.0, ge=0)
    """beta in the paper, which tunes it: 10 in DomainBed, 10,000 on Colored MNIST. 0 is FedAvg."""


class VREx(DomainBatches):
    """V-REx, risk extrapolation (Krueger et al., ICML 2021, arXiv 2003.00688, Equation 8).

    Each client minimises sum_e p_e R_e + beta Var({R_e}) over the domains e of a batch, with R_e
    the mean loss of the domain's images, p_e = n_e/B their share of the batch and Var the variance
    weighted by p_e. The server is FedAvg's.

    The variance is taken between the domains of one client: a client whose batch has one domain has
    no penalty, and with one domain for each client the method is FedAvg. With pooled data
    (``partition.kind=pooled``) it is the paper's.
    """

    group = "alignment"
    tasks = ("classification", "regression")
    title = "V-REx"
    citation = (
        "Krueger, Caballero, Jacobsen, Zhang, Binas, Zhang, Le Priol and Courville: "
        "Out-of-Distribution Generalization via Risk Extrapolation (REx), ICML 2021, "
        "arXiv 2003.00688"
    )
    Settings = VRExSettings
    settings: VRExSettings

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels, domains = parted(batch)
        outputs = self(images)
        risk = self.task.loss(outputs, labels, "mean")
        counts = domains.unique(return_counts=True)[1]
        if len(counts) == 1:
            return risk
        losses = self.task.loss(outputs, labels, "none")
        *environments, counts = on_device([*members(domains), counts], losses.device)
        risks = torch.stack([losses[e].mean() for e in environments])
        beta = self.settings.annealed(self.settings.beta, self.state.client)
        return risk + beta * risk_variance(risks, counts)


def risk_variance(risks: Tensor, counts: Tensor) -> Tensor:
    """Return the variance of domains' risks, weighted by their numbers of images: a scalar.

    Args:
        risks: R_e [E].
        counts: n_e [E], positive.
    """
    p = counts / counts.sum()
    return p.to(risks) @ (risks - p.to(risks) @ risks).square()


DEVIATIONS = (
    "The paper weights domains equally. Ours count by their images, as in FedAvg: a few images of "
    "a domain give a noisy risk.",
    "The default weight suits Adam, with which both benchmarks use it. Plain SGD can diverge.",
    "The authors' code divides the whole loss by beta above 1. We do not; a step of Adam does not "
    "depend on it.",
    "FedDG_Benchmark penalises the variance of single images' losses within each domain of a "
    "batch, and then sets the weight of the penalty to 0. We penalise the variance over domains.",
)
"""Where published code differs from its paper, and what this module does."""
