"""FedCCRL: two augmented views in the colours of other clients, aligned with the original."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.augmix import augmix
from feddg_methods.shared.draws import draw_beta, draw_rows, share_count
from feddg_methods.shared.losses import jensen_shannon, supervised_contrastive
from feddg_methods.shared.passes import features_of_each
from feddg_methods.shared.pixels import channel_statistics, restyle, to_bytes

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "released": {"lambda2": 0.1, "count_self": True, "clamp": False, "upload_rounding": "floor"},
    "paper_mean_ce": {"classification": "mean"},
}
"""What a variant changes of the defaults: the authors' code, and the paper's mean over views."""


class FedCCRLSettings(MethodSettings):
    """Readings, loss weights and ablation switches; defaults are the paper's."""

    labels: ClassVar[tuple[str, ...]] = ("variant", "ccdt", "difp", "ra", "js")

    variant: Literal["default", "released", "paper_mean_ce"] = "default"
    """Sets the defaults of the settings below; each can still be given by itself."""
    ccdt: bool = True
    """Cross-client domain transfer: views take on other clients' channel statistics."""
    difp: bool = True
    """Domain-invariant feature perturbation: views go through AugMix. Without it and ``ccdt``
    there are no views: the loss is the cross-entropy of the originals."""
    ra: bool = True
    """Representation alignment; needs views."""
    js: bool = True
    """Prediction alignment; needs views."""
    upload_ratio: float = Field(0.1, gt=0, le=1)
    """r: share of its images whose statistics a client sends."""
    upload_rounding: Literal["ceil", "floor"] = "ceil"
    """max(1, ceil(r n)) pairs as in the paper, or floor(r n) as in the code, which may be none."""
    upload_subset: Literal["each_round", "fixed"] = "each_round"
    """Draw the images whose statistics are sent anew in each round, or once for the run."""
    alpha: float = Field(0.1, gt=0)
    """Of the Beta(alpha, alpha) distribution that weighs an image's own statistics."""
    clamp: bool = True
    """Clamp and round images before AugMix; the code lets them wrap around at 0 and 255."""
    chains: int | None = Field(3, ge=1)
    """AugMix's chains: 3 as in the code; null draws 1, 2 or 3 for each batch as in the text."""
    per_image: bool = False
    """Draw AugMix's operations for every image as in the paper, or once a batch as in the code."""
    classification: Literal["sum", "mean"] = "sum"
    """Of the three views' cross-entropies: sum as in the code, or mean as in the text."""
    temperature: float = Field(0.1, gt=0)
    """tau of the representation alignment."""
    contrast: Literal["mean", "sum"] = "mean"
    """Over the 2B anchors of the representation alignment; the text's sum grows with the batch."""
    count_self: bool = False
    """Count an anchor among its own positives, as the code does."""
    lambda1: float = Field(0.1, ge=0)
    """Weight of the representation alignment."""
    lambda2: float = Field(1.0, ge=0)
    """Weight of the prediction alignment; 1.0 in the paper's study, 0.1 by default in the code."""

    @model_validator(mode="before")
    @classmethod
    def _variant(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {**VARIANTS.get(str(values.get("variant")), {}), **values}

    @model_validator(mode="after")
    def _alignment_has_views(self) -> FedCCRLSettings:
        if (self.ra or self.js) and not (self.ccdt or self.difp):
            raise ValueError(
                "ra and js align augmented views, but ccdt and difp, which make them, are both "
                "off: turn one of these on, or ra and js off"
            )
        return self


class FedCCRL(Method):
    """FedCCRL (Wang et al., 2024, arXiv 2410.11267).

    In each round every client sends the channel means and deviations of some images, and a client
    that trains gets those of all others. Two views of each batch, X1 and X2, are restyled to
    statistics drawn from them and perturbed by AugMix. A client minimises
    L = CE + CE1 + CE2 + lambda 1 RA + lambda 2 JS. The server is FedAvg's.
    """

    Settings = FedCCRLSettings
    settings: FedCCRLSettings
    uplink: ClassVar = {"fit": ("weights",), "statistics": ("statistics",)}
    downlink = ("pool",)
    group = "style"
    rgb_only = True
    citation = (
        "X. Wang, Y. Guo, X. Tang: FedCCRL: Federated Domain Generalization with Cross-Client "
        "Representation Learning, 2024, arXiv 2410.11267"
    )
    deviations = (
        "The paper averages the cross-entropies of the three views; the code adds them up, and so "
        "do we: classification.",
        "The paper sums the representation alignment over the 2B anchors; the code takes the mean, "
        "and so do we: contrast.",
        "The code counts an anchor among its own positives, which weakens their pull; the paper "
        "and we do not: count_self.",
        "The prediction alignment weighs 1.0 in the paper's sensitivity study, as with us, and 0.1 "
        "by default in the code: lambda2.",
        "The code sends int(r n) pairs, which may be none; we send max(1, ceil(r n)): "
        "upload_rounding.",
        "The code casts to 8 bits without clamping, so that bright and dark pixels wrap around; we "
        "clamp and round: clamp.",
        "The paper draws AugMix's operations for every image; the code draws them once a batch, "
        "and so do we: per_image.",
        "The paper draws 1, 2 or 3 AugMix chains; the code always has 3, and so do we: chains.",
        "The paper's algorithm box exchanges the mixed mean and the mixed deviation; the code and "
        "we do not.",
        "The paper weighs the foreign statistics with lambda, the code and we the image's own: the "
        "same distribution.",
        "The code decodes its images anew in each round to measure a random part; we measure all "
        "once and draw a part in each round.",
    )

    def build(self) -> None:
        self.generator: torch.Generator | None = None

    # ---------------------------------------------------------------- statistics, each round

    def run_round(self, server: Server) -> None:
        tell = None
        if self.settings.ccdt:
            replies = server.ask(self.statistics, everyone=True, weights=False)
            sent = {reply.client: reply.value["statistics"] for reply in replies}
            nothing = next(iter(sent.values()))[:0]
            tell = {
                client: {"pool": torch.cat([nothing, *(s for c, s in sent.items() if c != client)])}
                for client in server.cohort
            }
        server.weights = self.aggregate(server, server.ask(self.fit, tell=tell))

    @torch.no_grad()
    def statistics(self, client: Client) -> dict[str, Tensor]:
        """Return channel means and deviations of some stored images, (m, 2, 3) in [0, 1]."""
        s = self.settings
        if "statistics" not in client.memory:
            batches = client.batches(train=False)
            parts = [torch.stack(channel_statistics(images), dim=1) for images, _ in batches]
            client.memory["statistics"] = torch.cat(parts)
        known = client.memory["statistics"]  # (n, 2, 3)
        if s.upload_subset == "fixed":
            generator = torch_generator(client.seed, "upload", client.name)
        else:
            generator = client.generator("upload")
        count = share_count(len(known), s.upload_ratio, s.upload_rounding)
        rows = draw_rows(len(known), count, generator)
        return {"statistics": known[rows.to(known.device)]}

    # -------------------------------------------------------------- training, each round

    def fit(self, client: Client) -> LocalUpdate:
        self.generator = client.generator("views")
        return super().fit(client)

    def styled(self, client: Client) -> Tensor | None:
        if not (self.settings.ccdt or self.settings.difp):
            return None
        self.generator = client.generator("views")
        return self.view(client.broadcast["images"])

    @torch.no_grad()
    def view(self, images: Tensor) -> Tensor:
        """Return one augmented view DIFP(CCDT(X)) of images (B, 3, H, W)."""
        s, generator = self.settings, self.generator
        assert generator is not None  # noqa: S101 - fit made it
        if s.ccdt:
            pool = self.client.broadcast["pool"]
            if not len(pool):  # nobody else sent any: as MixStyle does, take the batch's own
                pool = torch.stack(channel_statistics(images), dim=1)
            rows = draw_rows(len(pool), len(images), generator)
            mean, std = pool[rows.to(pool.device)].to(images.device).unbind(1)  # (B, 3) each
            mix = draw_beta(s.alpha, len(images), generator).to(images.device)
            images = restyle(images, mean, std, mix)
        if s.difp:
            pixels = to_bytes(images, clamp=s.clamp)
            images = augmix(pixels, generator, chains=s.chains, per_image=s.per_image) / 255
        return images

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        s = self.settings
        images, labels = batch
        if not (s.ccdt or s.difp):
            return super().training_step(batch, batch_idx)
        views = [images, self.view(images), self.view(images)]
        z = features_of_each(self, views)  # Z, Z1, Z2: (B, D) each
        logits = [self.classifier(features) for features in z]
        losses = torch.stack([F.cross_entropy(scores, labels) for scores in logits])
        loss = losses.mean() if s.classification == "mean" else losses.sum()
        if s.ra and s.lambda1:
            loss = loss + s.lambda1 * self.alignment(z, labels)
        if s.js and s.lambda2:
            wide = torch.promote_types(z[0].dtype, torch.float32)
            predictions = [F.softmax(scores, dim=1, dtype=wide) for scores in logits]
            loss = loss + s.lambda2 * jensen_shannon(predictions)
        return loss

    def alignment(self, z: list[Tensor], labels: Tensor) -> Tensor:
        """Return RA = (SC(Z1, Z) + SC(Z2, Z)) / 2 of the features of the three views."""
        s = self.settings
        terms = [
            supervised_contrastive(
                torch.cat([view, z[0]]),
                labels,
                temperature=s.temperature,
                reduction=s.contrast,
                count_self=s.count_self,
            )
            for view in z[1:]
        ]
        return torch.stack(terms).mean()
