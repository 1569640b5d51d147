"""PARDON: every client learns the one style that interpolates all clients' styles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.adain import (
    gram_and_moments,
    image_moments,
    interpolation_style,
    mean_style,
    perturb_style,
    pooled_style,
    style_from_moments,
)
from feddg_methods.shared.finch import finch_gram
from feddg_methods.shared.losses import feature_penalty, triplet_loss
from feddg_methods.shared.passes import features_of_each
from feddg_methods.shared.pixels import to_bytes
from feddg_methods.shared.style_settings import StyleSettings

_PAPER: dict[str, Any] = {
    "adain_input": "unit",
    "style_layer": "relu4_1",
    "client_sigma": "mean",
    "strength": 1.0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "released": {},
    "artefact": {"server_style": "artefact"},
    "paper": _PAPER,
    "fisc": _PAPER,
}
"""What a preset changes of the defaults below: the readings of the authors' code, of the style
files that ship with it, of the paper, and of its earlier version FISC, which reads alike."""


class PardonSettings(StyleSettings):
    """Readings, loss weights and ablations; defaults are the released code's, for PACS."""

    labels: ClassVar[tuple[str, ...]] = ("preset", "style", "transfer", "ablation")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS

    preset: Literal["released", "paper", "artefact", "fisc"] = "released"
    """Sets the defaults of the settings below; each can still be given by itself."""
    client_sigma: Literal["mixture", "mean"] = "mixture"
    """A client's deviation: of the mixture of its clusters, or the mean of theirs."""
    server_style: Literal["released", "artefact"] = "released"
    """Cosine FINCH and means inside clusters, or Euclidean FINCH and medians."""
    median: Literal["lower", "average"] = "lower"
    """Median over an even number of clusters."""
    style_augment: bool = True
    """Measure styles on augmented images, as the code does, or on the stored ones."""
    strength: float = Field(0.5, ge=0, le=1)
    """alpha of the transfer; 0.5 in the code, absent (1) in the paper's formula."""
    transfer: Literal["online", "cached"] = "online"
    """Transfer each augmented batch, or the stored images once and augment both alike."""
    negatives: Literal["random_one", "set_mean", "hardest"] = "random_one"
    margin: float = Field(0.3, ge=0)
    """m of the triplet loss."""
    triplet_weight: float = Field(0.75, ge=0)
    """gamma 1."""
    feature_weight: float = Field(0.2, ge=0)
    """gamma 2; 0.1 for Office-Home, unpublished for iWildCam."""
    feature_reduction: Literal["elements", "samples"] = "elements"
    """Mean over all B x D entries of the feature penalty, or over samples."""
    ablation: Literal["v1", "v2", "v3", "v4", "v5"] = "v5"
    """v1 no clusters at clients, v2 none at the server, v3 no triplet, v4 no style, v5 full."""
    perturb_shrink: float = Field(0.0, ge=0, le=1)
    """p: uploaded styles are multiplied with 1 - p (FISC, Table 10)."""
    perturb_noise: float = Field(0.0, ge=0)
    """s: standard deviation of the noise added to uploaded styles."""


class Pardon(Method):
    """PARDON (Nguyen et al., ICDCS 2025, arXiv 2410.22622); FISC is its earlier version.

    Before round 1 every client sends one style S_k, and the server answers with their
    interpolation S_g. In each batch the client restyles its images to S_g and learns from
    L = L_CE + gamma 1 L_con + gamma 2 L_reg. The server of each round is FedAvg's.
    """

    Settings = PardonSettings
    settings: PardonSettings
    group = "style"
    rgb_only = True
    citation = (
        "Nguyen, Johnson and Leach: PARDON: Privacy-Aware and Robust Federated Domain "
        "Generalization, ICDCS 2025, arXiv 2410.22622"
    )
    deviations = (
        "The paper measures styles after the last ReLU of images in [0, 1]; the code and our "
        "default before it, of ImageNet-normalised images: style_layer, adain_input, preset.",
        "The paper averages the deviations of a client's clusters, the code and our default take "
        "that of their mixture: client_sigma.",
        "The paper's transfer has no strength, which is alpha = 1; the code and our default take "
        "0.5: strength.",
        "The style files that come with the code were made by Euclidean FINCH and medians inside "
        "clusters, where paper and code say cosine and means, as we do: server_style.",
        "The paper's contrast reads like a mean over all negatives, the code and our default draw "
        "one for each anchor: negatives.",
        "The paper's penalty reads like a mean over images; the code and our default take the mean "
        "over all entries, which the published coefficient goes with: feature_reduction.",
        "The code reads cached styles of another seed or partition if their file is there; ours "
        "are computed in each run.",
        "The code repeats the backbone's pass for anchors, positives and negatives, five in all; "
        "we make one for each of the two views, which gives the same with frozen statistics.",
    )
    uplink: ClassVar = {"fit": ("weights",), "local_style": ("style",)}
    downlink = ("style",)
    frozen = ("style.",)

    def build(self) -> None:
        self.style = self.settings.build_backend()
        self.generator: torch.Generator | None = None

    # ------------------------------------------------------------------- styles, once

    def prepare(self, server: Server) -> None:
        if self.settings.ablation == "v4":
            return
        replies = server.ask(self.local_style, everyone=True, weights=False)
        styles = torch.stack([reply.value["style"] for reply in replies])  # (N, 2, C)
        if self.settings.ablation == "v2":
            server.broadcast["style"] = mean_style(styles)
        else:
            server.broadcast["style"] = interpolation_style(
                styles, preset=self.settings.server_style, median=self.settings.median
            )

    @torch.no_grad()
    def local_style(self, client: Client) -> dict[str, Tensor]:
        """Return the client's style S_k, (2, C); each cluster of its images counts once."""
        s = self.settings

        def maps() -> Iterator[Tensor]:
            for images, _ in client.batches(train=False, augment=s.style_augment):
                yield self.style.style_maps(images)

        if s.ablation == "v1":
            style = pooled_style(torch.cat([image_moments(m) for m in maps()]))
        else:
            gram, moments = gram_and_moments(maps)
            style = style_from_moments(moments, finch_gram(gram)[-1], sigma=s.client_sigma)
        if s.perturb_shrink or s.perturb_noise:
            noise = torch.randn(style.shape, generator=client.generator("perturbation"))
            noise = noise.to(style.device) * s.perturb_noise
            style = perturb_style(style, noise, shrink=s.perturb_shrink)
        return {"style": style}

    # -------------------------------------------------------------- training, each round

    def fit(self, client: Client) -> LocalUpdate:
        self.generator = client.generator("negatives")
        return super().fit(client)

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        if self.settings.ablation == "v4":  # the positive is a second augmentation
            return client.batches(train=True, epoch=epoch, views=2)
        if self.settings.transfer == "cached":
            if "transferred" not in client.memory:
                client.memory["transferred"] = self.transferred(client)
            companions = client.memory["transferred"]
            return client.batches(train=True, epoch=epoch, companions=companions)
        return super().batches(client, epoch)

    def transferred(self, client: Client) -> Tensor:
        """Return the client's stored images restyled, uint8 (n, H, W, 3)."""
        parts = [self.restyle(images) for images, _ in client.batches(train=False)]
        return to_bytes(torch.cat(parts)).permute(0, 2, 3, 1).contiguous()

    def restyle(self, images: Tensor) -> Tensor:
        """Return images (B, 3, H, W) in the interpolation style S_g, without gradients."""
        return self.style.transfer(images, self.client.broadcast["style"], self.settings.strength)

    def styled(self, client: Client) -> Tensor | None:
        return None if self.settings.ablation == "v4" else self.restyle(client.broadcast["images"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        s = self.settings
        images, labels = batch
        if images.dim() == 5:  # (2, B, 3, H, W): the second half was made beforehand
            images, styled = images.unbind(0)
        else:
            styled = self.restyle(images)
        z, z_styled = self.paired_features(images, styled)  # (B, D) each
        loss = F.cross_entropy(self.classifier(z), labels)
        if s.ablation == "v3":
            loss = (loss + F.cross_entropy(self.classifier(z_styled), labels)) / 2
        else:
            loss = loss + s.triplet_weight * triplet_loss(
                z,
                z_styled,
                labels,
                margin=s.margin,
                negatives=s.negatives,
                generator=self.generator,
            )
        return loss + s.feature_weight * feature_penalty(z, z_styled, s.feature_reduction)

    def paired_features(self, images: Tensor, styled: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of both; in one pass unless batch statistics would mix them."""
        z, z_styled = features_of_each(self, [images, styled])
        return z, z_styled
