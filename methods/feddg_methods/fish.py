"""Fish: make the gradients of the domains agree, by steps on one domain after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import Field

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client, on_device
from feddg_methods.shared.domains import DomainBatches, members


class FishSettings(MethodSettings):
    """Length of the outer step."""

    labels: ClassVar[tuple[str, ...]] = ("meta_lr",)

    meta_lr: float = Field(0.5, ge=0)
    """epsilon in the paper: 0.5 in DomainBed, 0.1 in FedDG_Benchmark."""


class Fish(DomainBatches):
    """Fish (Shi et al., ICLR 2022, arXiv 2104.09937, Algorithm 1).

    From theta, an inner loop visits the domains of a batch in random order, with one step of the
    optimizer on the images of each, and ends at theta~. The outer step, which is Reptile's, goes to
    theta + epsilon (theta~ - theta). To first order it follows the mean gradient and the gradient
    of the inner products between the domains' gradients. The server is FedAvg's.

    Domains are those of one client. If a batch has one domain, the inner loop is one step, so a
    client with one domain trains as in FedAvg, with steps epsilon times as long.
    """

    group = "alignment"
    tasks = ("classification", "regression")
    title = "Fish"
    citation = (
        "Shi, Seely, Torr, Siddharth, Hannun, Usunier and Synnaeve: Gradient Matching for Domain "
        "Generalization, ICLR 2022, arXiv 2104.09937"
    )
    Settings = FishSettings
    settings: FishSettings

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        """Yield the images of one domain at a time; `fit` takes an inner step between them."""
        generator = client.generator("fish", epoch)
        for images, labels, domains in super().batches(client, epoch):
            parameters = [p for p in self.parameters() if p.requires_grad]
            theta = [p.detach().clone() for p in parameters]
            # Batch normalisation cannot train on one image.
            least = 2 if self.live_batch_norm and len(labels) > 1 else 1
            parts = on_device(members(domains, least=least), labels.device)
            for i in torch.randperm(len(parts), generator=generator).tolist():
                yield images[parts[i]], labels[parts[i]]
            if self.settings.meta_lr != 1:
                with torch.no_grad():
                    for p, start in zip(parameters, theta, strict=True):
                        p.copy_(start + self.settings.meta_lr * (p - start))


DEVIATIONS = (
    "The paper draws a batch from every domain for each inner loop. As in FedDG_Benchmark, ours "
    "are the domains' parts of one batch of FedAvg's, so each image is used once in an epoch.",
    "The inner steps in the paper are plain SGD. Ours are those of the run's optimizer, as in the "
    "code of the authors and both benchmarks; its moments go on through outer steps.",
    "FedDG_Benchmark also interpolates the running statistics of batch normalisation. We "
    "interpolate parameters only.",
)
"""Where published code differs from its paper, and what this module does."""
