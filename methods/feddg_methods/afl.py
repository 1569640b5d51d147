"""AFL: minimise the loss of the worst mixture of the source domains."""

from __future__ import annotations

import torch
from torch import Tensor

from feddg_methods.shared.domain_weights import DomainWeighted


class AFL(DomainWeighted):
    """AFL (Mohri et al., ICML 2019, arXiv 1902.00146, Algorithm 1, Stochastic-AFL).

    Agnostic federated learning minimises max over lambda of L(w, lambda) = sum_k lambda_k L_k(w),
    lambda in the simplex. In each round clients descend L in w, and the server ascends it in
    lambda: lambda <- Pi(lambda + gamma_lambda grad_lambda L), where grad_lambda L is the vector of
    losses of the received model and Pi the projection onto the simplex. The components k are source
    domains. An image of domain k has the weight lambda_k / p_k, with p_k the domain's share of all
    images. If a client has one domain, lambda acts by its weight in the server's mean. A client
    sends S losses and S image shares in addition to its weights. It measures the losses of the
    received model in a pass of its own over its training images before it trains.
    """

    group = "aggregation"
    title = "AFL"
    citation = "Mohri, Sivek and Suresh: Agnostic Federated Learning, ICML 2019, arXiv 1902.00146"

    def moved(self, weights: Tensor, losses: Tensor) -> Tensor:
        return simplex_projection(weights + self.settings.step * losses)


def simplex_projection(point: Tensor) -> Tensor:
    """Return the nearest point of the simplex: max(v - tau, 0) with the tau that gives sum 1.

    Args:
        point: v, float [S].

    Source: Duchi, Shalev-Shwartz, Singer and Chandra, ICML 2008, Figure 1.
    """
    ordered = point.sort(descending=True).values
    taus = (ordered.cumsum(0) - 1) / torch.arange(1, len(point) + 1, device=point.device)
    tau = taus[ordered > taus][-1]
    return (point - tau).clamp(min=0)


DEVIATIONS = (
    "In the paper a client is a component of the mixture, and a round is one step of stochastic "
    "gradient descent. Components are source domains here, as in FedDG_Benchmark, and clients "
    "train for `train.local_epochs` with lambda fixed.",
    "FedDG_Benchmark measures losses on the new global model, in an exchange of its own. We take "
    "both gradients at the received model, as Algorithm 1 does.",
    "FedDG_Benchmark gives loss 0 to a domain without images in the round, so its weight falls. "
    "Ours takes the mean of the other losses.",
    "FedDG_Benchmark weights a domain's images by lambda_d alone, so a larger domain counts more. "
    "We divide by the domain's share of all images.",
    "Algorithm 1 estimates the losses on a batch. A client here measures them in a further epoch "
    "without training, on augmented images in a new order, as in training.",
    "The paper tunes the step. 0.1 is FedDG_Benchmark's on PACS (`step`).",
)
"""Where published code differs from its paper, and what this module does."""
