"""MOON: keep representations near the global model's and away from the last local model's."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Weights
from feddg_bench.core.method import Method


class MoonSettings(MethodSettings):
    """Weight and temperature of the contrast, and the representation that it compares."""

    labels: ClassVar[tuple[str, ...]] = ("first_visit",)

    mu: float = Field(1.0, ge=0)
    """Weight of the contrastive term; 1 is the default of the authors' code, which tries 0.001 to
    10 and sets 5 in its example on CIFAR-10."""
    temperature: float = Field(0.5, gt=0)
    """tau, by which cosine similarities are divided; 0.5 in the authors' code."""
    proj_dim: int | None = Field(None, ge=1)
    """Width of a two-layer projection head before the classifier; 256 in the authors' code,
    for every method it compares. ``none``: the features themselves, so that all methods here train
    the same network."""
    first_visit: Literal["received", "initial"] = "received"
    """Previous model of a client that never trained: ``received``, the global model that it
    receives, so that there is no contrast; ``initial``, the global model before round 1."""


class Moon(Method):
    """MOON (Li, He and Song, CVPR 2021, arXiv 2103.16257, Algorithm 1).

    Each client minimises its loss plus mu times the contrast of its representation z with z_glob,
    that of the model received, and z_prev, that of its own model after its last task. Both are
    frozen and in evaluation mode. The server is FedAvg's. A client that never trained has no
    previous model (``first_visit``). By default the received model replaces it: the contrast is
    then log 2 and has no gradient. In round 1 this also holds with the initial model.

    Memory: every client keeps its last model except the classifier, so that a simulation of N
    clients holds up to N x |w| in memory and in each checkpoint: 9.4 GB for 100 times ResNet-50. A
    step needs two more forward passes.
    """

    Settings = MoonSettings
    settings: MoonSettings
    group = "local training"
    tasks = ("classification", "regression")
    acts_on = "features"
    title = "MOON"
    citation = (
        "Q. Li, B. He, D. Song: Model-Contrastive Federated Learning, CVPR 2021, arXiv 2103.16257"
    )

    def build(self) -> None:
        self.head: nn.Module = nn.Identity()
        if self.settings.proj_dim is not None:
            width, self.num_features = self.num_features, self.settings.proj_dim
            self.head = nn.Sequential(
                nn.Linear(width, width), nn.ReLU(), nn.Linear(width, self.num_features)
            )
            self.classifier = nn.Linear(self.num_features, self.num_classes)
        self.received: Weights = {}
        self.previous: Weights = {}
        self.initial: Weights = {}
        if self.settings.first_visit == "initial":
            self.initial = {name: tensor.clone() for name, tensor in self.state_dict().items()}

    def features(self, images: Tensor) -> Tensor:
        z: Tensor = self.head(super().features(images))
        return z

    def fit(self, client: Client) -> LocalUpdate:
        if self.settings.mu == 0:
            return super().fit(client)
        now = {
            name: tensor.detach()
            for name, tensor in self.state.tensors.items()
            if name.startswith(("backbone.", "head.")) and tensor.is_floating_point()
        }
        # Private state is in neither message: it is unchanged since the client last trained.
        received = {name: tensor.clone() for name, tensor in now.items()}
        sent = [name for name in self.federated if name in now]
        initial = self.initial if client.round > 1 else {}  # in round 1 it is the model received
        kept: Mapping[str, Tensor] = client.memory.get("previous", initial)
        previous = {
            # memory from another process has lost its layout, which affects rounding
            name: torch.empty_like(now[name]).copy_(kept[name])
            for name in (sent if kept else ())
        }
        with self.temporarily(received=received, previous=previous):
            update = super().fit(client)
        client.memory["previous"] = {name: now[name].to("cpu", copy=True) for name in sent}
        return update

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        s = self.settings
        images, labels = batch
        z = self.features(images)  # [B, D]
        loss = self.task.loss(self.classifier(z), labels, "mean")
        if not self.previous:
            return loss + s.mu * math.log(2)
        z_glob = self.representation(images, self.received)
        z_prev = self.representation(images, {**self.received, **self.previous})
        return loss + s.mu * model_contrast(z, z_glob, z_prev, temperature=s.temperature)

    @torch.no_grad()
    def representation(self, images: Tensor, weights: Weights) -> Tensor:
        """Return the features [B, D] of images under other weights, in evaluation mode."""
        encoder = nn.Sequential(OrderedDict(backbone=self.backbone, head=self.head))
        encoder.eval()
        z: Tensor = functional_call(encoder, weights, (images,))
        encoder.train()
        return z


def model_contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, *, temperature: float) -> Tensor:
    """Contrast representations with those of the global and of the previous local model.

    The mean over the batch of -log(e^g / (e^g + e^p)), where g and p are the cosine similarities
    of z with z_glob and z_prev, divided by the temperature.

    Args:
        z: Representations by the model in training, [B, D].
        z_glob: Those by the global model, [B, D].
        z_prev: Those by the client's previous model, [B, D].
        temperature: Above 0.

    Returns:
        A scalar, above 0; float32 or wider.
    """
    dtype = torch.promote_types(z.dtype, torch.float32)
    z, z_glob, z_prev = (values.to(dtype) for values in (z, z_glob, z_prev))
    pull = F.cosine_similarity(z, z_glob, dim=1) - F.cosine_similarity(z, z_prev, dim=1)
    return F.softplus(-pull / temperature).mean()


DEVIATIONS = (
    "The authors' code compares a client that never trained with an initial network of its own. We "
    "use the model it received, with which the contrast has no gradient, or the initial global "
    "model (`first_visit`). With 20 of 100 clients a round, 3 in 10 visits of 16 rounds are first "
    "visits.",
    "The authors' code puts a projection head between backbone and classifier for every method. "
    "We take the backbone's features, to train the same network as the other methods "
    "(`proj_dim`).",
)
"""Where published code differs from its paper, and what this module does."""
