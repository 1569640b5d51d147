"""FedProto: clients exchange class prototypes instead of models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import streaming_mean
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.fpl import ClassSums


class FedProtoSettings(MethodSettings):
    """Weight of the prototypes, and how a model predicts."""

    labels: ClassVar[tuple[str, ...]] = ("prediction",)
    toy: ClassVar = {"prediction": "classifier"}  # distances to prototypes need longer training

    lam: float = Field(1.0, ge=0)
    """lambda, the weight of the distance to the global prototypes; 1 in the authors' code."""
    prediction: Literal["prototype", "classifier"] = "prototype"
    """The class of the nearest global prototype, as in the paper, or the classifier's."""


class FedProto(Method):
    """FedProto (Tan et al., AAAI 2022, arXiv 2105.00243, Algorithm 1).

    Every client keeps a model of its own. Its prototypes C_k^c are the mean features of its classes
    c (Equation 3), and the server takes their mean Cbar^c over clients, weighted by the images
    |D_k^c| (Equation 6). A client minimises its loss plus lambda times the mean square of
    f(x) - Cbar^y over the batch (Equation 7); images without a global prototype do not count.

    An image gets the class of the nearest prototype (Equation 4): logits are minus the squared
    distances. Personal models are measured on the clients' test images
    (`data.client_test_fraction`). The paper has no model for an unseen domain. For evaluation
    there, clients also send their models, as FedBN's send their batch normalisation. The server
    averages them, and sends the mean only to a client that takes part for the first time.
    """

    Settings = FedProtoSettings
    settings: FedProtoSettings
    group = "personalisation"
    title = "FedProto"
    citation = (
        "Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang, Chengqi Zhang: "
        "FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022, "
        "arXiv 2105.00243"
    )
    uplink: ClassVar = {
        "fit": {
            "weights": "model",
            "prototypes": "float32 [n, D]",
            "classes": "int64 [n]",
            "counts": "int64 [n]",
        }
    }
    downlink = ("prototypes", "known")
    local = ("prototypes", "known")
    prototypes: Tensor
    known: Tensor

    def build(self) -> None:
        c, d = self.num_classes, self.num_features
        self.register_buffer("prototypes", torch.zeros(c, d))
        self.register_buffer("known", torch.zeros(c, dtype=torch.bool))
        self.sums = ClassSums(c, d)
        self.table: dict[str, Tensor] = {}

    # ------------------------------------------------------------------------------ model

    def forward(self, images: Tensor) -> Tensor:
        z = self.features(images)
        logits: Tensor = self.classifier(z)
        if self.training or self.settings.prediction == "classifier" or not self.known.any():
            return logits
        return prototype_logits(z, self.prototypes, self.known)

    # ------------------------------------------------------------------------ client half

    def fit(self, client: Client) -> LocalUpdate:
        self.state.load(client.memory.get("own", {}))
        table = self.received(client)
        with self.temporarily(table=table, sums=self.sums):
            update = super().fit(client)
            classes, prototypes = self.sums.means()
            counts = torch.cat(self.sums.labels).bincount(minlength=self.num_classes)
        client.memory["own"] = update.weights
        return LocalUpdate(
            update.weights,
            {"prototypes": prototypes, "classes": classes, "counts": counts.cpu()[classes]},
        )

    def received(self, client: Client) -> dict[str, Tensor]:
        """Return the global prototypes and which are known; none are in round 1."""
        table = {n: client.broadcast[n].to(self.device) for n in self.downlink if client.broadcast}
        return table or {n: torch.zeros_like(getattr(self, n)) for n in self.downlink}

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        # Reset in every epoch, so that the sums of the last one remain.
        self.sums = ClassSums(self.num_classes, self.num_features, self.device)
        return super().batches(client, epoch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        z = self.features(images)
        if not self.alone:
            self.sums.add(z.detach(), labels)
        loss = F.cross_entropy(self.classifier(z), labels)
        if self.alone:
            return loss
        return loss + self.settings.lam * distance(z, labels, **self.table)

    def personal_model(self, client: Client) -> Weights:
        own = self.state.federated_weights() | self.state.private_weights()
        return own | self.received(client)

    # ------------------------------------------------------------------------ server half

    def run_round(self, server: Server) -> None:
        """Train, and send a model only to clients that have none yet."""
        server.weights = self.aggregate(server, server.ask(self.fit, weights="once"))

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        c, d = self.num_classes, self.num_features
        sums, counts = torch.zeros(c, d, dtype=torch.float64), torch.zeros(c, dtype=torch.int64)

        def counted(reply: Reply[LocalUpdate]) -> tuple[Weights, float]:
            extra = {name: value.cpu() for name, value in reply.value.extra.items()}
            rows = extra["prototypes"].double() * extra["counts"][:, None]
            sums.index_add_(0, extra["classes"], rows)
            counts.index_add_(0, extra["classes"], extra["counts"])
            return reply.value.weights, server.share(reply)

        mean = streaming_mean(map(counted, updates))
        means = (sums / counts.clamp(min=1)[:, None]).float()
        server.broadcast["prototypes"], server.broadcast["known"] = means, counts > 0
        return mean

    def global_model(self, server: Server) -> Weights:
        table = {name: server.broadcast[name] for name in self.downlink if name in server.broadcast}
        return {**server.weights, **table}


def prototype_logits(z: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Return minus the squared distance of features to prototypes, [B, C].

    Classes without a prototype get less than all others.

    Args:
        z: Features [B, D].
        prototypes: [C, D].
        known: Which classes have a prototype, bool [C].
    """
    logits = -torch.cdist(z.float(), prototypes.float()).square()
    return logits.masked_fill(~known, float(logits.detach().min()) - 1)


def distance(z: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Return the mean square of z - Cbar^y over batch and features; see `prototype_logits`.

    Args:
        z: Features [B, D].
        labels: y, int64 [B].
        prototypes: Cbar, [C, D].
        known: bool [C]; an image of another class counts with distance 0.
    """
    gaps = (z - prototypes[labels].to(z)) * known[labels, None]
    return gaps.square().mean()


DEVIATIONS = (
    "Equation 6 of the paper also divides the weighted sum by the number of clients, which would "
    "shrink prototypes towards 0. The authors' code takes a mean without weights. We weight by "
    "images and divide by their sum.",
    "Equation 8 sums, over classes, the distance of the batch's mean features. As the authors' "
    "code does, we take the mean square over the images and features of a batch.",
    "The paper has no global model. Ours, the mean of the clients' models, serves unseen domains "
    "only; see the class.",
    "The authors' code keeps a prototype only for the next round, and so do we.",
)
"""Where published code differs from its paper, and what this module does."""
