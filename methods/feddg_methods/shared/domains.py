"""Batches with domain ids, and helpers for methods that use them.

A client can hold images of several source domains. In batches without domain ids, as under
``lightning.Trainer``, all images count as one domain.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client, on_device
from feddg_bench.core.messages import Payload
from feddg_bench.core.method import Method


class DomainBatches(Method):
    """Trains on batches of images, labels and domain ids."""

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        return client.batches(train=True, epoch=epoch, domains=True)

    @torch.no_grad()
    def domain_losses(self, client: Client) -> Payload:
        """Return the losses of the received model on the client's domains, and their shares.

        The model is in evaluation mode; images are augmented as in training, with the draws of an
        epoch not used for training.

        Returns:
            ``loss``, float32 [S]: for each source domain, the sum of its images' losses, divided by
            the number of all images of the client. ``share``, float32 [S]: the domain's fraction of
            the client's images. The ratio of their means over clients, weighted by image counts, is
            the domain's mean loss.
        """
        total = torch.zeros(len(client.sources), dtype=torch.float64, device=self.device)
        count = total.clone()
        self.eval()
        for images, labels, domains in client.batches(
            train=True, epoch=client.train.local_epochs, domains=True
        ):
            with client.fabric.autocast():
                outputs = self(images)
            losses = self.task.loss(outputs.float(), labels, "none")
            (members,) = on_device([F.one_hot(domains, len(total)).double()], self.device)  # [B, S]
            total += losses.double() @ members
            count += members.sum(0)
        self.train()
        seen = count.sum()
        return {"loss": (total / seen).float(), "share": (count / seen).float()}


def parted(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, labels and domain ids of a batch; without ids, all images are of domain 0."""
    images, labels, *ids = batch
    return images, labels, ids[0] if ids else torch.zeros(len(labels), dtype=torch.int64)


def members(domains: Tensor, *, least: int = 1) -> list[Tensor]:
    """Return the positions of each domain's images in a batch.

    Args:
        domains: Domain ids [B], on the CPU.
        least: Domains with fewer images are left out.

    Returns:
        On the CPU: int64 [n_e] for each domain e, in ascending order of e and of the positions.

    >>> members(torch.tensor([2, 0, 2]))
    [tensor([1]), tensor([0, 2])]
    """
    by_domain = [(domains == e).nonzero().flatten() for e in domains.unique()]
    return [positions for positions in by_domain if len(positions) >= least]


class AnnealedSettings(MethodSettings):
    """Schedule of a penalty's weight."""

    anneal: float = Field(0.4, ge=0, le=1)
    """Fraction of the rounds with a penalty weight of at most 1, so that the model learns something
    first; in the authors' code, 190 of 501 steps."""

    def annealed(self, weight: float, client: Client | None) -> float:
        """Return the weight of a penalty in the client's round; at most 1 without a client."""
        early = client is None or client.round <= self.anneal * client.rounds
        return min(weight, 1.0) if early else weight
