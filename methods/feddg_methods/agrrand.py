"""AgrRand: mean update where the signs of all clients agree, random noise elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.choices import reduced
from feddg_methods.shared.round_updates import average_updates, check_share, one_each
from feddg_methods.shared.sign_votes import SignVotes, sign_tally, warn_of_rare_agreement


class AgrRandSettings(MethodSettings):
    """Combination of agreeing updates, and coordinates with noise."""

    labels: ClassVar[tuple[str, ...]] = ("reduction",)

    reduction: Literal["mean", "sum"] = "mean"
    """Mean of the updates, or their sum as in the paper: K times as long, and K times the noise."""
    randomize_zeros: bool = False
    """Also add noise to coordinates that no client changed, as the authors' code does."""


class AgrRand(Method):
    """AgrRand (Mansilla et al., ICCV 2021, arXiv 2108.01621) on client updates.

    The paper combines the gradients of domains in centralised training; as a federated rule, it is
    a baseline in domain generalisation papers such as PPDG's. Clients train as in FedAvg. A
    coordinate takes the mean of the updates if they all have the same sign, and otherwise a draw
    from N(0, sigma^2), with sigma the mean absolute value of the agreed coordinates of the whole
    network. Clients have equal weight. Buffers are averaged.
    """

    Settings = AgrRandSettings
    settings: AgrRandSettings
    tasks = ("classification", "regression")
    title = "AgrRand"
    citation: ClassVar[str] = (
        "Mansilla, Echeveste, Milone and Ferrante: Domain Generalization via Gradient Surgery, "
        "ICCV 2021, arXiv 2108.01621"
    )

    singles = ""

    def tally(self, reply: Reply[LocalUpdate], received: Weights) -> Payload:
        return sign_tally(
            reply, received, self.trainable, changed=not self.settings.randomize_zeros
        )

    def prepare(self, server: Server) -> None:
        check_share(server, one_each)
        warn_of_rare_agreement(server, "nearly all of the model will move at random")

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        s, old = self.settings, server.weights
        votes = SignVotes(old, self.trainable, changed=not s.randomize_zeros)
        new = average_updates(server, votes.count(updates), self.trainable, share=one_each)
        if s.reduction == "sum":
            new = server_step(old, new, votes.total, self.trainable)
        # Measured on the step just taken, so it includes the server's learning rate.
        sigma = noise_scale((new[n] - old[n], votes.unanimous(n)) for n in self.trainable)
        stream = torch_generator(server.seed, "agrrand", server.round)
        others = [~votes.unanimous(n) & votes.changed.get(n, True) for n in self.trainable]
        for name, draws in zip(self.trainable, normal_where(others, stream), strict=True):
            moved = (old[name] + sigma * draws).to(old[name])
            new[name] = torch.where(votes.unanimous(name), new[name], moved)
        return new


def agreement_random(
    deltas: Tensor, *, reduction: Literal["mean", "sum"] = "mean", generator: torch.Generator
) -> Tensor:
    """Return the mean update, with noise in every coordinate where the clients' signs differ.

    1/K sum_k Delta_k where |sum_k sign(Delta_k)| = K, and a draw from N(0, sigma^2) elsewhere, with
    sigma the `noise_scale` of the agreed coordinates. Coordinates that no client changed keep 0:
    they may be frozen.

    Args:
        deltas: Updates Delta_k, [K, P].
        reduction: Mean or sum of the agreeing updates; the noise scales with them.
        generator: Source of the noise, on the CPU; one number for each disagreed coordinate.

    Returns:
        Update, [P].

    Raises:
        SettingsError: If ``reduction`` is unknown.
    """
    agreed = deltas.sign().sum(dim=0).abs() == len(deltas)
    update = reduced(deltas, reduction)
    (draws,) = normal_where([~agreed & (deltas != 0).any(dim=0)], generator)
    return torch.where(agreed, update, noise_scale([(update, agreed)]) * draws.to(update))


def noise_scale(updates: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return AgrRand's sigma: the mean absolute value of all agreed coordinates of a network.

    Args:
        updates: For each of its tensors, the mean update and a bool mask, in its shape, of the
            agreed coordinates; read once.

    Returns:
        0 or more; 0 if clients agree nowhere. Summed in float64 in a fixed order, independent of
        the device, the memory layout and the number of threads.
    """
    total, count = 0.0, 0
    for update, agreed in updates:
        kept = update[agreed].abs().double().cpu().numpy()
        total += float(kept.sum())
        count += kept.size
    return total / max(count, 1)


def normal_where(masks: Sequence[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
    """Yield standard normal numbers where a mask is set, and 0 elsewhere.

    All are drawn at once, on the CPU, in the order of the masks and of their coordinates: the
    numbers do not depend on the device or on the split of a vector into tensors.

    Args:
        masks: Bool, any shapes.
        generator: Source of the numbers, on the CPU.

    Yields:
        float32, for each mask in its shape and on its device.
    """
    counts = [int(mask.sum()) for mask in masks]
    draws = torch.randn(sum(counts), dtype=torch.float32, generator=generator)
    for mask, part in zip(masks, draws.split(counts), strict=True):
        nothing = torch.zeros(mask.shape, device=mask.device)
        yield nothing.masked_scatter(mask, part.to(mask.device))


DEVIATIONS = (
    "Paper and code sum the agreeing gradients, which does no harm under Adam. As a server step "
    "the sum is K times too long and diverges, so we take the mean (`reduction`).",
    "The authors' code also puts noise where every gradient is exactly 0, as in frozen layers and"
    " dead filters. We leave these coordinates alone (`randomize_zeros`).",
    "Where no coordinate agrees, the authors' code takes the mean of an empty set and the model "
    "becomes NaN. Our noise is then 0.",
)
"""Where published code differs from its paper, and what this module does."""
