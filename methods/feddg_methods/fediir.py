"""FedIIR: align the gradients of all clients' classifiers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server

Gradient = dict[str, Tensor]
"""A gradient of the classifier, by parameter name."""


class FedIIRSettings(MethodSettings):
    """Strength of the penalty, form of the mean gradient, and classifier."""

    labels: ClassVar[tuple[str, ...]] = ("mean", "head")

    gamma: float = Field(1e-3, ge=0)
    """Weight of the penalty: 1e-3 for PACS, 1e-2 for Rotated MNIST, 5e-3 for VLCS and 5e-4 for
    Office-Home in the authors' code, chosen from 1e-4 to 1e-2; 5e-4 in FedCCRL. 0 is FedAvg."""
    ema: float = Field(0.95, ge=0, lt=1)
    """Share of the old mean gradient in the new one: 0.95 in the authors' code, chosen from 0.90,
    0.95 and 0.99, and 0.9 in FedCCRL."""
    ema_bias_correction: bool = False
    """Divide by 1 - ema^t after t rounds. The authors' code does not: starting from zero, the mean
    reaches 14 % of a constant gradient after 3 rounds."""
    mean: Literal["batches", "clients"] = "batches"
    """Terms of the mean gradient: all batches, as in the authors' code, or the clients' means, as
    in FedCCRL."""
    head: Literal["linear", "mlp"] = "linear"
    """The classifier: linear as in every other method and in FedCCRL, or with a hidden layer of
    half the width, as in the authors' code for all but Rotated MNIST."""


class FedIIR(Method):
    """FedIIR (Guo et al., ICML 2023).

    A round has two exchanges. First each client sends the gradients of its cross-entropy with
    respect to the classifier, at the received weights: their sum over its batches, and the number
    of batches. The server keeps a moving average g of their mean and sends it to all. Then clients
    minimise CE + gamma ||grad CE - g||^2 over the whole model, where grad CE is the batch's own
    gradient with respect to the classifier.

    The server takes the mean of the clients' models with equal shares, as in the authors' code;
    ``federation.weighting=samples`` weights them by image counts.
    """

    group = "alignment"
    title = "FedIIR"
    citation = (
        "Yaming Guo, Kai Guo, Xiaofeng Cao, Tieru Wu, Yi Chang: Out-of-Distribution Generalization "
        "of Federated Learning via Implicit Invariant Relationships, ICML 2023, "
        "https://proceedings.mlr.press/v202/guo23b.html"
    )
    Settings = FedIIRSettings
    settings: FedIIRSettings
    needs: ClassVar = {"federation": {"weighting": "uniform"}}
    uplink: ClassVar = {
        "fit": ("weights",),
        "head_gradients": {"gradient": "model within classifier.", "batches": "int"},
    }
    downlink = ("mean_gradient",)
    singles = ""

    def build(self) -> None:
        if self.settings.head == "mlp":
            width = self.num_features // 2
            layers = (nn.Linear(self.num_features, width), nn.Linear(width, self.num_classes))
            for layer in layers:
                nn.init.kaiming_normal_(layer.weight)
            self.classifier = nn.Sequential(  # type: ignore[assignment] # wider than the base's
                layers[0], nn.ReLU(), layers[1]
            )

    # ------------------------------------------------------------------------ first exchange

    def head_gradients(self, client: Client) -> dict[str, Any]:
        """Return the sum of the batches' gradients at the received weights, and their number."""
        self.eval()  # keeps the statistics of batch normalisation
        total: Gradient = {}
        count = 0
        # A separate epoch: no local epoch has the same order and augmentation.
        for images, labels in client.batches(train=True, epoch=client.train.local_epochs):
            with torch.no_grad(), client.fabric.autocast():
                z = self.features(images)
            _, gradient = head_gradient(self.classifier, z, labels)
            total = {n: total[n] + g if total else g for n, g in gradient.items()}
            count += 1
        self.train()
        return {"gradient": total, "batches": count}

    def tally(self, reply: Reply[Any], received: Weights) -> Payload:
        if isinstance(reply.value, LocalUpdate):
            return {}
        gradient, batches = reply.value["gradient"], reply.value["batches"]
        if self.settings.mean == "batches":
            return {"gradient": gradient, "batches": batches}
        return {"gradient": {n: g / batches for n, g in gradient.items()}, "batches": 1}

    def run_round(self, server: Server) -> None:
        s = self.settings
        server.broadcast.pop("mean_gradient", None)  # of the last round, no longer needed
        if s.gamma:
            replies = server.ask(self.head_gradients)
            sums = ((reply.value["gradient"], reply.value["batches"]) for reply in replies)
            new = mean_gradient(sums, over=s.mean)
            g = moving_average(server.memory.get("mean_gradient"), new, s.ema)
            t = server.memory.get("updates", 0) + 1
            server.memory.update(mean_gradient=g, updates=t)
            scale = 1 - s.ema**t if s.ema_bias_correction else 1.0
            server.broadcast["mean_gradient"] = {n: value / scale for n, value in g.items()}
        super().run_round(server)

    # ----------------------------------------------------------------------- second exchange

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.alone or not self.settings.gamma:
            return super().training_step(batch, batch_idx)
        images, labels = batch
        loss, gradient = head_gradient(
            self.classifier, self.features(images), labels, create_graph=True
        )
        penalty = gradient_penalty(gradient, self.client.broadcast["mean_gradient"])
        return loss + self.settings.gamma * penalty


def head_gradient(
    head: nn.Module, z: Tensor, labels: Tensor, *, create_graph: bool = False
) -> tuple[Tensor, Gradient]:
    """Return the mean cross-entropy of a batch and its gradient with respect to the head.

    Runs outside autocast: the gradient of half-precision products would be in half precision.

    Args:
        head: Maps features to logits [B, C].
        z: Features [B, D].
        labels: Class ids [B], int64.
        create_graph: Make the gradient differentiable, with respect to ``z`` too.
    """
    parameters = dict(head.named_parameters())
    with torch.autocast(z.device.type, enabled=False):
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        loss = F.cross_entropy(head(z), labels)
        gradients = torch.autograd.grad(
            loss, list(parameters.values()), create_graph=create_graph, retain_graph=create_graph
        )
    return loss, dict(zip(parameters, gradients, strict=True))


def gradient_penalty(gradient: Gradient, mean: Gradient) -> Tensor:
    """Return the squared distance of a gradient from the mean gradient, over all parameters."""
    distances = [(g - mean[n].to(g.device)).square().sum() for n, g in gradient.items()]
    return torch.stack(distances).sum()


def mean_gradient(sums: Iterable[tuple[Gradient, int]], *, over: str = "batches") -> Gradient:
    """Return the mean of gradients, given each client's sum over batches and number of batches.

    Streams: only the running sum and one client's sum are in memory at a time.

    Args:
        sums: A sum of gradients and their number, 1 or more, for each client.
        over: ``batches``: each batch counts once; ``clients``: each client's mean does.
    """
    total: Gradient = {}
    count = 0
    for gradient, batches in sums:
        parts, divisor = (batches, 1) if over == "batches" else (1, batches)
        count += parts
        total = {n: g / divisor + total[n] if total else g / divisor for n, g in gradient.items()}
    return {n: g / count for n, g in total.items()}


def moving_average(old: Gradient | None, new: Gradient, ema: float) -> Gradient:
    """Return ema * old + (1 - ema) * new; ``None`` stands for zero."""
    return {n: (1 - ema) * g + (ema * old[n] if old else 0.0) for n, g in new.items()}


DEVIATIONS = (
    "The paper mentions the moving average of the mean gradient in its appendix; the authors' "
    "code starts it at zero and does not correct the bias. So do we (`ema_bias_correction`).",
    "FedCCRL averages the clients' mean gradients, the authors' code the gradients of all "
    "batches. So do we (`mean`).",
    "FedCCRL weights models by image counts, the authors' code equally. So do we "
    "(`federation.weighting`).",
    "FedCCRL computes the first gradients in training mode, which moves the statistics of batch "
    "normalisation. We compute them in evaluation mode.",
    "FedCCRL skips batches of one image. We keep them (`train.drop_last_if_single`).",
    "The authors' code has a classifier with a hidden layer for every data set but Rotated MNIST."
    " Ours is linear, as in all methods (`head`).",
    "The authors' code freezes batch normalisation, FedCCRL does not. We do what the recipe says "
    "(`federation.bn`).",
)
"""Where published code differs from its paper, and what this module does."""
