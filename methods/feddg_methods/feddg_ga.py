"""FedDG-GA: raise the weights of clients that lose most when their model is averaged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.core.tasks import CLASSIFICATION, LearningTask
from feddg_methods.shared.updates import adjusted_weights, signed_mean

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "official": {"metric": "accuracy"},
    "paper": {"gap_timing": "next_participation"},
    "pardon": {
        "gap_data": "client_train",
        "gap_timing": "next_participation",
        "step": 1 / 3,
        "without_history": "zero",
        "fallback": "samples",
    },
    "fedccrl": {
        "gap_data": "client_train",
        "gap_mean": "batches",
        "step": 0.001,
        "initial_weights": "batches",
    },
}
"""What a variant changes of the settings' defaults, besides the rule for the weights itself."""


class FedDGGASettings(MethodSettings):
    """Readings of the gap and of the weights' rule."""

    labels: ClassVar[tuple[str, ...]] = ("variant", "gap_timing")

    variant: Literal["default", "official", "paper", "pardon", "fedccrl"] = "default"
    """Rule for the weights (`feddg_methods.shared.updates.adjusted_weights`); sets the defaults of
    the settings below, of which each can still be given by itself."""
    metric: Literal["loss", "accuracy"] = "loss"
    """What a gap is a difference of: cross-entropy as in the paper, or accuracy."""
    gap_data: Literal["client_val", "client_train"] = "client_val"
    """The client's validation images; or its training batches, where the local term is the running
    mean of the last local epoch, of the model while it was trained."""
    gap_mean: Literal["images", "batches"] = "images"
    """Mean over images, or over the means of batches, of which the last may be smaller."""
    gap_timing: Literal["same_round", "next_participation"] = "same_round"
    """Clients measure the new model at once, or the one they get when they next take part."""
    step: float = Field(0.2, ge=0)
    """d: step of the weights in the first round, relative to 1/N by default; falls to 0."""
    initial_weights: Literal["uniform", "batches"] = "uniform"
    """a before round 1: 1/N, or by the clients' numbers of training batches."""
    without_history: Literal["keep", "zero"] = "keep"
    """For ``next_participation``, a client that has no local term yet: keeps its weight, or takes
    0 for it, so that its gap is the whole metric."""
    fallback: Literal["weights", "samples"] = "weights"
    """``samples``: image counts weight the first round, and any round after a gap that is NaN,
    whose other gaps are ignored; else a client without a gap keeps its weight."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {**PRESETS.get(str(values.get("variant")), {}), **values}


class FedDGGA(Method):
    """FedDG-GA, generalisation adjustment (Zhang et al., CVPR 2023).

    The server keeps a weight a_i for every client and averages with a_i / sum of a_j over those
    that took part, instead of image counts. Client i's gap G_i is the metric of the averaged model
    minus that of its own, on its own images; a_i rises where G_i is above the mean gap. With
    ``step=0`` no gap is measured, and the default is FedAvg under ``federation.weighting=uniform``.
    """

    Settings = FedDGGASettings
    settings: FedDGGASettings
    uplink: ClassVar = {
        "fit": ("weights",),
        "measure": ("own", "averaged"),
        "count_batches": ("batches",),
    }
    client_validation = True
    tasks = ("classification", "regression")
    citation = (
        "R. Zhang, Q. Xu, J. Yao, Y. Zhang, Q. Tian, Y. Wang: Federated Domain Generalization "
        "with Generalization Adjustment, CVPR 2023"
    )
    deviations = (
        "The paper's gap is one of losses, the authors' script measures accuracy unless told "
        "otherwise; we measure the loss: metric",
        "The paper takes the mean gap off and divides by the largest, the authors' code divides "
        "raw gaps by the largest absolute one; we centre and divide by the absolute: variant",
        "The paper's step is d (1 - r/R), the authors' code takes a third of it, for three clients "
        "of weight 1/3; ours is relative to the uniform weight too, d (1 - r/R) / N: variant",
        "The authors' code decays one round late, from d (1 + 1/R), over R + 1 rounds; we count "
        "as the paper, and for them take R to be federation.rounds - 1: variant",
        "The paper compares when a client next receives a model, the authors' code sends the new "
        "model to the same clients at once, and so do we: gap_timing",
        "The authors' code measures on a held-out part of each source domain, we on validation "
        "images of each client: gap_data",
        "Neither says what becomes of clients that are not sampled; ours keep their weights, and "
        "the others the sum of theirs: variant",
        "PARDON takes 1/3 for the whole step, training images, augmented, and their running loss "
        "for the gap, 0 for the local term of newcomers and the gap of absent clients, and image "
        "counts for weights in the first round and when a gap is NaN; we do none of it: variant",
        "PARDON goes on to train in evaluation mode once it has measured; we go back: no setting",
        "FedCCRL starts from numbers of batches and moves by at most a third of 0.001, which is "
        "FedAvg in effect: variant",
    )

    def build(self) -> None:
        if self.settings.metric == "accuracy" and self.task is not CLASSIFICATION:
            raise SettingsError(
                f"feddg_ga measures gaps of accuracy, which a {self.task.name} has not: "
                f"set hyper.metric=loss"
            )
        self.seen: list[Tensor] = []

    # ----------------------------------------------------------------- aggregation weights a

    def prepare(self, server: Server) -> None:
        a = torch.ones(len(server.clients), dtype=torch.float64)
        if self.settings.initial_weights == "batches":
            replies = server.ask(self.count_batches, everyone=True, weights=False)
            a = torch.tensor([float(reply.value["batches"]) for reply in replies]).to(a)
        server.memory["a"] = a / a.sum()
        server.memory["by_samples"] = self.settings.fallback == "samples"

    def run_round(self, server: Server) -> None:
        s = self.settings
        if s.step and s.gap_timing == "next_participation" and server.round > 1:
            self.adjust(server, finished=server.round - 1)
        super().run_round(server)
        server.memory["by_samples"] = False
        if s.step and s.gap_timing == "same_round":
            self.adjust(server, finished=server.round)

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        a = server.memory["a"] / server.memory["a"].max()  # equal weights are exactly 1
        weights = dict(zip(server.clients, a.tolist(), strict=True))

        def weighted(reply: Reply[LocalUpdate]) -> tuple[Weights, float]:
            by_samples = server.memory["by_samples"]
            weight = reply.num_examples if by_samples else weights[reply.client]
            return reply.value.weights, weight

        mean = signed_mean(map(weighted, updates), self.trainable)
        return server_step(server.weights, mean, server.federation.server_lr, self.trainable)

    def adjust(self, server: Server, finished: int) -> None:
        """Ask the cohort for gaps of the model after ``finished`` rounds, and move a by them."""
        s = self.settings
        number = {client: i for i, client in enumerate(server.clients)}
        gaps = {}
        for reply in server.ask(self.measure):
            if reply.value:
                own, averaged = reply.value["own"], reply.value["averaged"]
                missing = own is None or averaged is None
                gaps[number[reply.client]] = math.nan if missing else averaged - own
        server.memory["by_samples"] = s.fallback == "samples" and any(
            math.isnan(value) for value in gaps.values()
        )
        if server.memory["by_samples"]:
            return
        late = s.variant == "official"  # counts rounds from 0, up to R itself
        server.memory["a"] = adjusted_weights(
            server.memory["a"],
            gaps,
            round=finished - late,
            rounds=max(server.federation.rounds - late, 1),
            step=s.step,
            variant=s.variant,
        )

    # --------------------------------------------------------------- gaps, at the clients

    def fit(self, client: Client) -> LocalUpdate:
        update = super().fit(client)
        if self.settings.step:
            on_training = self.settings.gap_data == "client_train"
            client.memory["own"] = self.mean(self.seen if on_training else self.measured(client))
        return update

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        self.seen = []
        return super().batches(client, epoch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        if self.settings.gap_data == "client_train":
            self.seen.append(badness(logits.detach(), labels, self.settings.metric, self.task))
        return self.task.loss(logits, labels, "mean")

    def measure(self, client: Client) -> Payload:
        """Return the metric of the client's own last model and of the one it has received.

        Either is ``None`` where it is not finite, and there is neither without an own model. The
        local term is used once: it belongs to the model that was averaged last.
        """
        newcomers = self.settings.gap_timing, self.settings.without_history
        if newcomers == ("next_participation", "zero"):
            client.memory.setdefault("own", 0.0)
        if "own" not in client.memory:
            return {}
        averaged = self.mean(self.measured(client))
        return {"own": client.memory.pop("own"), "averaged": averaged}

    @torch.no_grad()
    def measured(self, client: Client) -> list[Tensor]:
        """Return what `badness` makes of the client's batches, in evaluation mode."""
        if self.settings.gap_data == "client_val":
            batches = client.validation_batches()
        else:  # an epoch that is not trained on: augmentation of its own
            batches = client.batches(train=True, epoch=client.train.local_epochs)
        self.eval()
        values = []
        for images, labels in batches:
            with client.fabric.autocast():
                logits = self(images)
            values.append(badness(logits, labels, self.settings.metric, self.task))
        self.train()
        return values

    def mean(self, values: list[Tensor]) -> float | None:
        """Return the mean of values of batches, (B,) each; ``None`` if it is not finite."""
        if self.settings.gap_mean == "batches":
            values = [batch.mean(dtype=torch.float64, dim=0, keepdim=True) for batch in values]
        mean = float(torch.cat(values).mean(dtype=torch.float64))
        return mean if math.isfinite(mean) else None

    def count_batches(self, client: Client) -> Payload:
        """Return the number of the client's training batches."""
        return {"batches": math.ceil(len(client.data) / client.train.batch_size)}


def badness(
    outputs: Tensor, labels: Tensor, metric: str, task: LearningTask = CLASSIFICATION
) -> Tensor:
    """Return (B,) losses or, for accuracy, errors (0 or 1): larger is worse for both."""
    if metric == "accuracy":
        return (outputs.argmax(dim=1) != labels).float()
    return task.loss(outputs.float(), labels, "none")
