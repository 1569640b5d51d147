"""GroupDRO: minimise the loss on the worst source domain."""

from __future__ import annotations

from torch import Tensor

from feddg_methods.shared.domain_weights import DomainWeighted


class GroupDRO(DomainWeighted):
    """GroupDRO (Sagawa et al., ICLR 2020, arXiv 1911.08731, Algorithm 1), with domains as groups.

    The server keeps weights q of the source domains and multiplies each by exp(eta_q L_g) after
    every round, L_g being the loss of the received model on domain g; clients minimise
    sum_g q_g L_g. An image of domain g has the weight q_g / p_g, with p_g the domain's share of all
    images. If a client has one domain, q acts by its weight in the server's mean. A client sends S
    losses and S image shares in addition to its weights. It measures the losses of the received
    model in a pass of its own over its training images before it trains.
    """

    group = "aggregation"
    title = "GroupDRO"
    citation = (
        "Shiori Sagawa, Pang Wei Koh, Tatsunori B. Hashimoto and Percy Liang: "
        "Distributionally Robust Neural Networks for Group Shifts: On the Importance of "
        "Regularization for Worst-Case Generalization, ICLR 2020, arXiv 1911.08731"
    )

    def moved(self, weights: Tensor, losses: Tensor) -> Tensor:
        return exponentiated(weights, losses, step=self.settings.step)


def exponentiated(weights: Tensor, losses: Tensor, *, step: float) -> Tensor:
    """Return q_g exp(eta_q L_g), normalised to sum 1 (Algorithm 1).

    Args:
        weights: q, float [S], of sum 1.
        losses: L, float [S].
        step: eta_q, 0 or more.
    """
    # The largest exponent becomes 0: the factor cancels, and nothing overflows.
    q = weights * (step * (losses - losses.max())).exp()
    return q / q.sum()


DEVIATIONS = (
    "Algorithm 1 moves one group's weight in every step, by eta_q = 0.01. Ours moves all weights "
    "once in every round, so its default step is 0.1, a value of ours.",
    "Algorithm 1 takes the losses of the batch that it trains on. A client here measures them in a "
    "further epoch without training, on augmented images in a new order, as in training.",
    "FedDG_Benchmark keeps q at the client and moves it in every batch, where domains that the "
    "batch lacks have loss 0. Each client thus has weights of its own. We keep q at the server.",
    "The paper also adds C / sqrt(n_g) to each group's loss. We leave this adjustment out.",
)
"""Where published code differs from its paper, and what this module does."""
