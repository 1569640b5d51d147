"""Fedmeans: say in one line what it does."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench import (
    Batch,
    Client,
    LocalUpdate,
    Method,
    MethodSettings,
    Reply,
    Server,
    watched,
)


class FedmeansSettings(MethodSettings):
    """Settings of this method; on the command line hyper.<name>=VALUE."""

    pull: float = Field(0.1, ge=0)
    """Weight of the distance between features and the global mean of their class."""


class Fedmeans(Method):
    """FedAvg whose clients share the mean features of each class (cite your paper here)."""

    title = "Fedmeans"
    Settings = FedmeansSettings
    settings: FedmeansSettings
    version = 1  # increment when results can change, so that old and new records are not mixed
    uplink: ClassVar = {
        "fit": {"weights": "model", "sums": "float32 [C, D]", "counts": "float32 [C]"}
    }
    downlink = ("means",)
    singles = "adds up what single clients send about their classes"
    group = "alignment"
    citation = "Authors, title, venue and year"

    # The server half: average models as FedAvg does, and the features of each class.

    def run_round(self, server: Server) -> None:
        sums = torch.zeros(self.num_classes, self.num_features)
        counts = torch.zeros(self.num_classes)

        def add(reply: Reply[LocalUpdate]) -> None:
            sums.add_(reply.value.extra["sums"].cpu())
            counts.add_(reply.value.extra["counts"].cpu())

        replies = watched(server.ask(self.fit), add)  # one reply at a time is in memory
        server.weights = self.aggregate(server, replies)
        server.broadcast["means"] = sums / counts.clamp(min=1)[:, None]  # 0 for an absent class

    # The client half.

    def fit(self, client: Client) -> LocalUpdate:
        update = super().fit(client)
        sums = torch.zeros(self.num_classes, self.num_features, device=self.device)
        counts = torch.zeros(self.num_classes, device=self.device)
        self.eval()
        with torch.no_grad():
            for images, labels in client.batches(train=False):
                sums.index_add_(0, labels, self.features(images).float())
                counts += labels.bincount(minlength=self.num_classes)
        self.train()
        return LocalUpdate(update.weights, {"sums": sums, "counts": counts})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        features = self.features(images)  # [B, D]
        loss = self.task.loss(self.classifier(features), labels, "mean")
        if self.alone or "means" not in self.client.broadcast:  # under a Trainer, or in round 1
            return loss
        means = self.client.broadcast["means"][labels]
        return loss + self.settings.pull * distance(features, means)


def distance(features: Tensor, means: Tensor) -> Tensor:
    """Return the mean squared distance of features [B, D] to means [B, D]; rows of 0 count 0."""
    known = means.any(1)
    return ((features - means).square().mean(1) * known).mean()
