"""FedAlign: FedCCRL with styles chosen for variety, views in a row and consistent features."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_methods.fedccrl import (
    FedCCRL,
    FedCCRLSettings,
    channel_statistics,
    jensen_shannon,
)
from feddg_methods.shared.passes import features_of_each, widened

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "released": {"count_self": True, "clamp": False, "upload_rounding": "floor"},
}
"""Defaults that each variant changes: those of the authors' code."""


class FedAlignSettings(FedCCRLSettings):
    """Settings of FedCCRL and of FedAlign's additions; the defaults are the authors'."""

    labels: ClassVar[tuple[str, ...]] = (
        "variant", "ccdt", "difp", "ra", "js", "clusters", "chained",
    )  # fmt: skip
    presets = VARIANTS

    variant: Literal["default", "released"] = "default"
    """Sets the defaults of the settings below; each can still be set individually."""
    clusters: int = Field(7, ge=0)
    """C, the clusters of received styles; 0 draws all styles with equal chances, as FedCCRL."""
    chained: bool = True
    """Make the second view of the first one; otherwise of the image, as FedCCRL."""
    lambda2: float = Field(0.1, ge=0)
    """Weight of the prediction alignment."""
    lambda3: float = Field(0.1, ge=0)
    """Weight of the representation consistency."""


class FedAlign(FedCCRL):
    """FedAlign (Gupta et al., CVPR Workshops 2025, arXiv 2501.15486).

    As in FedCCRL, clients exchange the channel statistics of some images in each round, and make
    two views of each batch by MixStyle with these styles and AugMix. FedAlign adds three parts. It
    draws styles for variety: from all of their clusters, and in a cluster those that vary most
    (`chances`). The second view X2 is made of the first, X1. And the features of views are to be
    those of the image: a client minimises
    L = CE + CE1 + CE2 + lambda 1 SC + lambda 2 JS + lambda 3 RC, with RC the mean of
    mse(Z1, Z) and mse(Z2, Z). The server is FedAvg's.
    """

    Settings = FedAlignSettings
    settings: FedAlignSettings
    title = "FedAlign"
    citation = (
        "Sunny Gupta, Vinay Sutar, Varunav Singh, Amit Sethi: FedAlign: Federated Domain "
        "Generalization with Cross-Client Feature Alignment, CVPR Workshops 2025, arXiv 2501.15486"
    )

    def build(self) -> None:
        super().build()
        self.p: Tensor | None = None

    def fit(self, client: Client) -> LocalUpdate:
        with self.temporarily(p=self.of_received(client)):
            return super().fit(client)

    def styled(self, client: Client) -> Tensor | None:
        with self.temporarily(p=self.of_received(client)):
            return super().styled(client)

    def of_received(self, client: Client) -> Tensor | None:
        """Return the `chances` of the styles that a client received, ``None`` for equal ones."""
        pool = client.broadcast.get("pool", ())
        if not len(pool) or not self.settings.clusters:
            return None
        return chances(pool, self.settings.clusters, client.generator("clusters"))

    def chosen(self, count: int, size: int, generator: torch.Generator) -> Tensor:
        if self.p is None:
            return super().chosen(count, size, generator)
        enough = int((self.p > 0).sum()) >= size
        return torch.multinomial(self.p, size, replacement=not enough, generator=generator)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        s = self.settings
        images, labels = batch
        if not (s.ccdt or s.difp):
            return Method.training_step(self, batch, batch_idx)
        own = channel_statistics(images)
        first = self.view(images, own)
        if s.chained:
            second = self.view(first, channel_statistics(first))
        else:
            second = self.view(images, own)
        z = features_of_each(self, [images, first, second])  # Z, Z1, Z2: [B, D] each
        logits = [self.classifier(features) for features in z]
        losses = torch.stack([F.cross_entropy(scores, labels) for scores in logits])
        loss = losses.mean() if s.classification == "mean" else losses.sum()
        if s.ra and s.lambda1:
            loss = loss + s.lambda1 * self.alignment(z, labels)  # SC
        if s.js and s.lambda2:
            loss = loss + s.lambda2 * jensen_shannon([widened(x).softmax(1) for x in logits])
        if s.lambda3:
            original, *views = map(widened, z)
            rc = torch.stack([F.mse_loss(view, original) for view in views]).mean()
            loss = loss + s.lambda3 * rc
        return loss


def chances(pool: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Return the chance of each style, float64 [n], of which the sum is 1.

    k-means parts the styles, vectors of six numbers, into clusters. Each cluster has as large a
    share as it has of all styles; in it, chances are proportional to the variance of the vectors.

    Args:
        pool: Means and standard deviations, [n, 2, 3], n at least 1.
        clusters: C, at least 1; fewer if there are fewer different styles.
        generator: Chooses the first centres, on the CPU.
    """
    from sklearn.cluster import KMeans  # takes a second to import
    from threadpoolctl import threadpool_limits

    styles = pool.flatten(1).double().cpu().numpy()
    seed = int(torch.randint(2**31, (), generator=generator))
    count = min(clusters, len(np.unique(styles, axis=0)))
    with threadpool_limits(limits=1):  # sums over several threads vary
        labels = KMeans(count, n_init=1, random_state=seed).fit(styles).labels_
    # No variance at all, as of a style of equal numbers, leaves equal chances.
    variance = styles.var(axis=1, ddof=1) + np.finfo(np.float64).tiny
    totals = np.bincount(labels, variance)
    sizes = np.bincount(labels)
    return torch.from_numpy(sizes[labels] / len(styles) * variance / totals[labels])


DEVIATIONS = (
    "Losses and weights are those of the authors' code, which extends FedCCRL's. We have not read "
    "the paper's text; according to a reader's notes, it takes the cross-entropy of the original "
    "images alone, and both views are of them (`chained`).",
    "The code rounds the number of styles of each cluster, to at least one, so that they can "
    "exceed the batch, and orders them by cluster. We draw each style with its chance.",
    "The code also trains a discriminator of original and restyled features, which are detached, "
    "so that the model does not change. We leave it out.",
    "The code counts an anchor among its own positives and lets bytes wrap around. We do not "
    "(`count_self`, `clamp`; variant `released` does).",
    "The code seeds k-means with 42. We take the client's stream.",
)
"""Where published code differs from its paper, and what this module does."""
