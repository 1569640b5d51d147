"""ERM: the centralised reference that pools all training images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.method import Method


class ERMSettings(MethodSettings):
    """Composition of batches."""

    balanced_domains: bool = False
    """Each step takes ``train.batch_size`` images of every domain (Mansilla et al., ICCV 2021);
    an epoch goes once through the largest domain. False: batches of the pooled images."""


class ERM(Method):
    """Empirical risk minimisation on pooled data, "DeepAll" in domain generalisation papers.

    Federated averaging with one client that holds all data and keeps its optimizer: a round is the
    local epochs of ordinary training. As a LightningModule it also runs unchanged under
    ``lightning.Trainer``.
    """

    Settings = ERMSettings
    settings: ERMSettings
    group = "reference"
    tasks = ("classification", "regression")
    title = "ERM"
    citation = (
        "Gulrajani and Lopez-Paz: In Search of Lost Domain Generalization, ICLR 2021, "
        "arXiv 2007.01434 (as the baseline ERM)"
    )
    needs = {  # noqa: RUF012 - read only
        "partition": {"kind": "pooled", "clients": 1},
        "federation": {"per_round": None},
        "train": {"optimizer_state": "persist"},
    }

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        if not self.settings.balanced_domains:
            return super().batches(client, epoch)
        generator = client.generator("domains", epoch)
        parts = balanced_parts(client.domain_ids, client.train.batch_size, generator)
        return client.batches(train=True, epoch=epoch, parts=parts)


def balanced_parts(domains: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """Return batches of positions with ``size`` images of every domain in each.

    An exhausted domain is reshuffled and reused; the largest domain determines the number of
    batches.

    Args:
        domains: Domain id of each image, int64 [n].
        size: Images per domain in a batch.
        generator: On the CPU.

    Returns:
        Positions in [0, n), int64 [domains x size] each.
    """
    members = [(domains == d).nonzero().flatten() for d in domains.unique()]
    steps = -(-max(map(len, members)) // size)
    columns = []
    for positions in members:
        times = -(-steps * size // len(positions))
        order = [
            positions[torch.randperm(len(positions), generator=generator)] for _ in range(times)
        ]
        columns.append(torch.cat(order)[: steps * size].view(steps, size))
    return list(torch.cat(columns, dim=1))


DEVIATIONS = (
    "FedDG_Benchmark builds a new optimizer in every epoch, so Adam forgets its moments. We keep "
    "it (`train.optimizer_state`).",
    "The baseline in AgrSum's code takes equal parts of every domain in each step. We pool all "
    "images (`balanced_domains`).",
)
"""Where published code differs from its paper, and what this module does."""
