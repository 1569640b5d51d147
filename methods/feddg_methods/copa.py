"""COPA: one feature extractor for all, and an ensemble of classifiers, one for each domain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.aggregation import server_step, streaming_mean
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.batch_instance_norm import clip_rho, mix_batch_norm
from feddg_methods.shared.ensemble import Ensemble, assemble, ensemble_logits, frozen_loss

MAX_CLIENT_SLOTS = 16
"""Most clients that get a classifier each by default: all classifiers travel to everybody."""


class CopaSettings(MethodSettings):
    """What has a classifier, how the others take part, and the normalisation."""

    labels: ClassVar[tuple[str, ...]] = ("slot", "norm")

    slot: Literal["auto", "client", "domain"] = "auto"
    """What has a classifier of its own: each client, or each source domain, where a client belongs
    to the domain that most of its images are from. ``auto``: clients if there are at most 16, else
    domains. In the paper the two are one, as every domain is one client."""
    beta: float = Field(1.0, ge=0)
    """Weight of the mean loss of the other slots' frozen classifiers; 0 leaves them out."""
    norm: Literal["bin", "bn"] = "bin"
    """Turn every batch normalisation of the backbone into batch-instance normalisation, as in the
    paper, or leave it. A backbone without batch normalisation stays as it is."""
    ensemble: Literal["probabilities", "logits"] = "probabilities"
    """What the classifiers' mean prediction is a mean of."""


class Copa(Method):
    """COPA (Wu & Gong, ICCV 2021): a reconstruction, from what is known without any code.

    The model is a feature extractor f and M classifiers c_1 ... c_M, one a slot. A client receives
    them all and trains f and the classifier c_i of its slot on

        CE(c_i(f(x)), y) + beta / (M - 1) sum over j != i of CE(c_j(f(x)), y)

    where the other classifiers are frozen, but pass their gradient on to f. It sends f and c_i. The
    server takes the mean of the extractors, with equal shares, and puts classifiers into their
    slots; clients of one slot are averaged, a slot without a reply keeps its classifier. The
    prediction is the mean of the classifiers' probabilities. All slots start from one classifier.
    """

    citation = (
        "Guile Wu, Shaogang Gong: Collaborative Optimization and Aggregation for Decentralized "
        "Domain Generalization and Adaptation, ICCV 2021"
    )
    deviations = (
        "No published code was found, so this method is a reconstruction from the paper's abstract "
        "and from its description as a baseline of PPDG; the prediction agreement, which is for "
        "domain adaptation only, is left out",
        "The losses of frozen classifiers are averaged; M - 1 times the weight gives their sum: "
        "beta",
        "The paper has one client a domain; with more, classifiers belong to clients or to domains "
        "by number: slot",
        "Extractors are averaged with equal shares; shares by image counts are a setting: "
        "federation.weighting",
        "The ensemble averages probabilities; a mean of logits predicts otherwise: ensemble",
        "Batch-instance normalisation starts as batch normalisation, so that pretrained networks "
        "keep their worth; it can be left out: norm",
    )
    Settings = CopaSettings
    settings: CopaSettings
    needs: ClassVar = {"federation": {"weighting": "uniform"}}
    uplink: ClassVar = {"fit": ("weights", "classifier", "slot")}

    def build(self) -> None:
        s = self.settings
        if s.norm == "bin":
            mix_batch_norm(self.backbone)
        few = len(self.clients) <= MAX_CLIENT_SLOTS
        self.by_domain = s.slot == "domain" or (s.slot == "auto" and not few)
        self.slots = self.sources if self.by_domain else self.clients
        self.slot = 0
        self.ensemble = Ensemble(self.classifier, max(1, len(self.slots)))
        # The client's own classifier is a working copy of its slot in the ensemble, which is the
        # state that travels; as state of its own it would be sent, or kept, for nothing.
        self.classifier.register_state_dict_post_hook(_leave_out)

    # ------------------------------------------------------------------------- model

    def forward(self, images: Tensor) -> Tensor:
        z = self.features(images)
        if self.training:
            own: Tensor = self.classifier(z)
            return own
        return ensemble_logits(self.ensemble(z), self.settings.ensemble)

    # ------------------------------------------------------------------- client half

    def slot_of(self, client: Client) -> int:
        """Return the number of the client's slot; of domains held alike, the first."""
        if len(self.slots) < 2:
            return 0
        if self.by_domain:
            counts = [client.domains.get(domain, 0) for domain in self.slots]
            return counts.index(max(counts))
        return self.slots.index(client.name)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: clip_rho(self.backbone))
        return optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        z = self.features(images)
        loss = F.cross_entropy(self.classifier(z).to(self.dtype), labels)
        if self.settings.beta and len(self.slots) > 1:
            loss = loss + self.settings.beta * frozen_loss(self.ensemble(z), labels, self.slot)
        return loss

    def fit(self, client: Client) -> LocalUpdate:
        self.slot = self.slot_of(client)
        with torch.no_grad():
            self.classifier.weight.copy_(self.ensemble.weight[self.slot])
            self.classifier.bias.copy_(self.ensemble.bias[self.slot])
        weights = super().fit(client).weights
        extractor = {n: tensor for n, tensor in weights.items() if not n.startswith("ensemble.")}
        own = {name: p.detach().clone() for name, p in self.classifier.named_parameters()}
        # The server knows a client by its name, but not the domains of its images.
        return LocalUpdate(
            extractor, {"classifier": own, **({"slot": self.slot} if self.by_domain else {})}
        )

    # ------------------------------------------------------------------- server half

    def aggregate(self, server: Server, updates: Iterable[Reply[LocalUpdate]]) -> Weights:
        number = {name: i for i, name in enumerate(self.slots)}
        received: dict[int, list[tuple[Weights, float]]] = {}

        def extractor(reply: Reply[LocalUpdate]) -> tuple[Weights, float]:
            share, extra = server.share(reply), reply.value.extra
            slot = extra.get("slot", number.get(reply.client, 0))
            received.setdefault(slot, []).append((extra["classifier"], share))
            return reply.value.weights, share

        lr = server.federation.server_lr
        new = server_step(
            server.weights, streaming_mean(map(extractor, updates)), lr, self.trainable
        )
        for name in self.trainable:
            if name.endswith(".rho"):  # a server step above 1 leaves the clients' convex hull
                new[name].clamp_(0, 1)
        old = {name: server.weights[f"ensemble.{name}"] for name in ("weight", "bias")}
        classifiers = assemble(old, received, lr)
        return new | {f"ensemble.{name}": tensor for name, tensor in classifiers.items()}


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Take a module's own parameters out of the state dict that was just made."""
    for name, _ in module.named_parameters():
        del state[prefix + name]
