"""Source-domain weights that the server raises where the global model's loss is high."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import RunningMean, server_step, streaming_mean
from feddg_bench.core.client import Batch, Client, on_device
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.server import Server
from feddg_methods.shared.domains import DomainBatches, parted

LAST_RESORT = 1e-300
"""Minimum weight of a client; it matters only if lambda is 0 on all other clients' domains too."""


class DomainWeightSettings(MethodSettings):
    """Step size and initial values of the domain weights."""

    step: float = Field(0.1, ge=0)
    """Step size of the weights per round; 0 keeps them and measures no losses."""
    start: Literal["uniform", "images"] = "uniform"
    """Initial weights: equal, or the domains' shares of all images, as in FedAvg."""


class DomainWeighted(DomainBatches):
    """Minimises sum_d lambda_d L_d, with L_d the mean loss on source domain d.

    lambda lies in the simplex and is kept by the server. An image of domain d has the weight
    lambda_d / p_d, where p_d is the domain's share of all images; so the mean loss over all images
    is the sum above. The weight is split into two factors: the mean weight omega_k of a client's
    images multiplies the client's share in the server's mean, and the rest,
    lambda_d / (p_d omega_k), multiplies the loss of the image. Thus lambda also acts if a client
    has one domain and its optimizer, such as Adam, ignores the scale of the loss.

    Before local training each client measures the received model on its domains, and sends losses
    and shares with its weights. The server computes L from them and updates lambda. A domain
    without images in the round gets the mean of the other L_d, so that its weight hardly changes.

    Domains are those of the data set; clients must agree on them.
    """

    Settings = DomainWeightSettings
    settings: DomainWeightSettings
    tasks = ("classification", "regression")
    uplink: ClassVar = {
        "domain_shares": {"share": "float32 [S]"},
        "fit": {"weights": "model", "loss": "float32 [S]", "share": "float32 [S]"},
    }
    downlink = ("image_weights",)
    singles = "gives each client a weight of its own"
    image_weights: Tensor
    """Weight of an image of each domain in the loss, float32 [S], during `fit`."""

    def moved(self, weights: Tensor, losses: Tensor) -> Tensor:
        """Return the new lambda, float64 [S], from the old lambda and L."""
        raise NotImplementedError

    # ------------------------------------------------------------------------ client half

    def domain_shares(self, client: Client) -> Payload:
        """Return each source domain's fraction of the client's images, float32 [S]."""
        count = client.domain_ids.bincount(minlength=len(client.sources))
        return {"share": count / count.sum()}

    def fit(self, client: Client) -> LocalUpdate:
        measured = self.domain_losses(client) if self.settings.step else self.domain_shares(client)
        weights = client.broadcast["image_weights"].cpu()  # on the CPU, like the domain ids
        omega = self.domain_shares(client)["share"] @ weights
        weights = weights / omega if omega > 0 else torch.ones_like(weights)
        with self.temporarily(image_weights=weights):
            return LocalUpdate(super().fit(client).weights, measured)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels, domains = parted(batch)
        losses = self.task.loss(self(images), labels, "none")
        if self.alone:
            return losses.mean()
        (weights,) = on_device([self.image_weights[domains]], losses.device)
        return (weights * losses).mean()

    # ------------------------------------------------------------------------ server half

    def prepare(self, server: Server) -> None:
        replies = server.ask(self.domain_shares, everyone=True, weights=False)
        p = streaming_mean((reply.value, server.share(reply)) for reply in replies)["share"]
        p = p.cpu().double()
        server.memory["p"] = p = p / p.sum()
        start = p if self.settings.start == "images" else (p > 0).double()
        self.publish(server, start / start.sum())

    def publish(self, server: Server, weights: Tensor) -> None:
        """Store lambda, float64 [S], and broadcast the image weights, float32 [S]."""
        server.memory["lambda"], p = weights, server.memory["p"].cpu()
        server.broadcast["image_weights"] = torch.where(p > 0, weights / p, 0.0).float()

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        seen, image_weights = RunningMean(), server.broadcast["image_weights"].cpu()

        def weighted(reply: Reply[LocalUpdate]) -> tuple[Weights, float]:
            seen.add(reply.value.extra, server.share(reply))
            omega = float(reply.value.extra["share"].cpu() @ image_weights)
            return reply.value.weights, max(server.share(reply) * omega, LAST_RESORT)

        mean = streaming_mean(map(weighted, updates))
        if "loss" in seen.mean:
            losses = mean_losses(seen.mean["loss"].cpu(), seen.mean["share"].cpu())
            self.publish(server, self.moved(server.memory["lambda"].cpu(), losses))
        return server_step(server.weights, mean, server.federation.server_lr, self.trainable)


def mean_losses(loss: Tensor, share: Tensor) -> Tensor:
    """Return the mean loss of each domain; a domain without images gets the mean of the others.

    Args:
        loss: Sum of each domain's losses, divided by the number of all images, [S].
        share: Each domain's share of these images, [S].

    Returns:
        float64 [S].
    """
    measured = share > 0
    losses = (loss.double() / share.double())[measured]
    return torch.full(share.shape, losses.mean().item()).double().masked_scatter(measured, losses)
