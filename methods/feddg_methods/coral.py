"""DeepCORAL: align the covariances of the domains' features."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from feddg_methods.shared.alignment import AlignmentSettings, PairwiseAligned


class CORALSettings(AlignmentSettings):
    """Strength and form of the alignment."""

    labels: ClassVar[tuple[str, ...]] = ("weight",)

    means: bool = False
    """DomainBed's penalty: the mean squared difference of the covariances, four times the paper's,
    plus that of the means."""


class CORAL(PairwiseAligned):
    """DeepCORAL (Sun and Saenko, ECCV Workshops 2016, arXiv 1607.01719, Equations 1 to 3).

    l_CORAL = ||C_S - C_T||_F^2 / (4 d^2), with C_S and C_T the covariances of the d features of two
    domains. Here the paper's source and target are any two source domains, as in DomainBed. The
    penalty is the mean over all pairs of the domains of a client's batch; a domain with one image
    in the batch is left out, and a batch without a pair has no penalty. The server is FedAvg's.
    """

    acts_on = "features"
    title = "DeepCORAL"
    citation = (
        "Sun and Saenko: Deep CORAL: Correlation Alignment for Deep Domain Adaptation, ECCV "
        "Workshops 2016, arXiv 1607.01719"
    )
    Settings = CORALSettings
    settings: CORALSettings

    def difference(self, x: Tensor, y: Tensor) -> Tensor:
        distance = coral_distance(x, y)
        if self.settings.means:
            return 4 * distance + (x.mean(0) - y.mean(0)).square().mean()
        return distance


def coral_distance(source: Tensor, target: Tensor) -> Tensor:
    """Return ||C_S - C_T||_F^2 / (4 d^2): a scalar.

    Args:
        source: Features [n, d], n at least 2.
        target: Features [m, d], m at least 2.
    """
    return (covariance(source) - covariance(target)).square().mean() / 4


def covariance(x: Tensor) -> Tensor:
    """Return the unbiased covariance [d, d] of features [n, d], n at least 2.

    `torch.cov` returns the same numbers, but waits for a GPU to check that n - 1 is positive.
    """
    rows = x.T  # [d, n]
    rows = rows - (rows.sum(1) / len(x))[:, None]
    return rows @ rows.T / (len(x) - 1)


DEVIATIONS = (
    "The paper aligns one source and one target domain, in the last layer. We align all pairs of a "
    "client's domains, in the features, as DomainBed and FedDG_Benchmark do.",
    "The paper chooses the weight so that the penalty is as large as the loss at the end of the "
    "training. Ours is 1, as in both benchmarks (`weight`).",
    "In both benchmarks a batch has equally many images of each domain. Ours is a batch of the "
    "client's images: a domain with one image in it is left out, and the penalty is the mean over "
    "the pairs that remain.",
    "DomainBed and FedDG_Benchmark add the difference of the means and take no 1/4. We follow the "
    "paper (`means`).",
    "FedDG_Benchmark sets the penalty to 0 after the loop that computes it, so its CORAL is FedAvg "
    "on batches of two domains. We use the penalty (`weight`).",
)
"""Where published code differs from its paper, and what this module does."""
