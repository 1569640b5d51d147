"""PARDON: clients also train on images restyled to one interpolation of all clients' styles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddg_bench.common.errors import SettingsError
from feddg_bench.core.client import Batch, Client, on_device
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.adain import (
    Sigma,
    image_moments,
    pooled_style,
    style_from_moments,
)
from feddg_methods.shared.choices import choose
from feddg_methods.shared.finch import finch, finch_gram
from feddg_methods.shared.passes import features_of_each, to_bytes, widened
from feddg_methods.shared.perturbation import PerturbationSettings
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
"""Defaults below that each preset changes: as in the authors' code, in the style files shipped with
it, in the paper, and in its earlier version FISC, which says the same."""


DISTANCE_EPS = 1e-7
"""Added to every coordinate of a difference, so that equal features have a gradient."""


Preset = Literal["released", "paper", "artefact"]
"""Variants of the server's style."""


class PardonSettings(PerturbationSettings, StyleSettings):
    """Variants, loss weights and ablations; the defaults are the released code's, for PACS."""

    labels: ClassVar[tuple[str, ...]] = ("preset", "style", "transfer", "ablation")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS

    preset: Literal["released", "paper", "artefact", "fisc"] = "released"
    """Sets the defaults of the settings below; each can still be set individually."""
    client_sigma: Literal["mixture", "mean"] = "mixture"
    """Deviation in a client's style: of the mixture of its clusters, or the clusters' mean
    deviation."""
    server_style: Literal["released", "artefact"] = "released"
    """Cosine FINCH and means inside clusters, or Euclidean FINCH and medians."""
    median: Literal["lower", "average"] = "lower"
    """Median over an even number of clusters: the lower of the middle two, or their average."""
    style_augment: bool = True
    """Measure styles on augmented images, as the code does, or on the stored ones."""
    strength: float = Field(0.5, ge=0, le=1)
    """alpha of the transfer; 0.5 in the code, absent (1) in the paper's formula."""
    transfer: Literal["online", "cached"] = "online"
    """Transfer each augmented batch, or the stored images once; copies share the augmentation."""
    negatives: Literal["random_one", "set_mean", "hardest"] = "random_one"
    """Negatives of an anchor: one at random, all (the mean of their losses), or the nearest."""
    margin: float = Field(0.3, ge=0)
    """m of the triplet loss."""
    triplet_weight: float = Field(0.75, ge=0)
    """gamma 1, the weight of the triplet loss."""
    feature_weight: float = Field(0.2, ge=0)
    """gamma 2, the weight of the feature penalty; 0.1 for Office-Home, unpublished for iWildCam."""
    feature_reduction: Literal["elements", "samples"] = "elements"
    """Feature penalty as a mean over all B x D entries, or over samples."""
    ablation: Literal["v1", "v2", "v3", "v4", "v5"] = "v5"
    """v1 no clusters at clients, v2 none at the server, v3 no triplet, v4 no style, v5 full."""


class Pardon(Method):
    """PARDON (Nguyen et al., ICDCS 2025, arXiv 2410.22622); FISC is its earlier version.

    Before round 1 every client sends one style S_k, and the server answers with their
    interpolation S_g. In each batch the client restyles its images to S_g and minimises
    L = L_CE + gamma 1 L_con + gamma 2 L_reg. In each round the server is FedAvg's.
    """

    Settings = PardonSettings
    settings: PardonSettings
    group = "style"
    rgb_only = True
    title = "PARDON"
    citation = (
        "Nguyen, Johnson and Leach: PARDON: Privacy-Aware and Robust Federated Domain "
        "Generalization, ICDCS 2025, arXiv 2410.22622"
    )
    uplink: ClassVar = {"fit": ("weights",), "local_style": {"style": "float32 [2, C]"}}
    downlink = ("style",)
    singles = "clusters single clients' styles"
    frozen = ("style.",)

    def build(self) -> None:
        self.style = self.settings.build_backend()
        self.generator: torch.Generator | None = None

    # ------------------------------------------------------------------- styles, once

    def prepare(self, server: Server) -> None:
        if self.settings.ablation == "v4":  # without styles
            return
        replies = server.ask(self.local_style, everyone=True, weights=False)
        styles = torch.stack([reply.value["style"] for reply in replies])  # S_k: [N, 2, C]
        server.broadcast["style"] = server_style(styles, self.settings)

    @torch.no_grad()
    def local_style(self, client: Client) -> dict[str, Tensor]:
        """Return the client's style S_k, [2, C]; all clusters of its images have equal weight."""

        def maps() -> Iterator[Tensor]:
            for images, _ in client.batches(train=False, augment=self.settings.style_augment):
                yield self.style.style_maps(images)

        return {"style": self.settings.perturbed(client_style(maps, self.settings), client)}

    # -------------------------------------------------------------- training, each round

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        s = self.settings
        images, labels = batch
        if images.dim() == 5:  # [2, B, 3, H, W]: the second half was precomputed
            images, styled = images.unbind(0)
        elif self.alone:  # no client task, so no style
            return super().training_step(batch, batch_idx)
        else:
            styled = self.restyle(images)
        z, z_styled = features_of_each(self, [images, styled])  # [B, D] each
        loss = F.cross_entropy(self.classifier(z), labels)
        if s.ablation == "v3":  # without the triplet loss
            loss = (loss + F.cross_entropy(self.classifier(z_styled), labels)) / 2
        else:
            l_con = triplet_loss(
                z,
                z_styled,
                labels,
                margin=s.margin,
                negatives=s.negatives,
                generator=self.generator,
            )
            loss = loss + s.triplet_weight * l_con
        return loss + s.feature_weight * feature_penalty(z, z_styled, s.feature_reduction)

    def restyle(self, images: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in the interpolation style S_g, without gradients."""
        return self.style.transfer(images, self.client.broadcast["style"], self.settings.strength)

    def styled(self, client: Client) -> Tensor | None:
        return None if self.settings.ablation == "v4" else self.restyle(client.broadcast["images"])

    # --------------------------------------------------------- where second views come from

    def fit(self, client: Client) -> LocalUpdate:
        with self.temporarily(generator=client.generator("negatives")):
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
        """Return the client's stored images restyled, uint8 [n, H, W, 3]."""
        parts = [self.restyle(images) for images, _ in client.batches(train=False)]
        return to_bytes(torch.cat(parts)).permute(0, 2, 3, 1).contiguous()


# -------------------------------------------------------------------------------------- styles


def cluster_style(maps: Tensor, labels: Tensor, *, sigma: Sigma = "mixture") -> Tensor:
    """Return a client's style S_k [2, C] from its maps [N, C, H, W] and their clusters [N].

    mu_k = mean_j mu(C_j), and sigma_k that of the clusters' mixture or mean_j sigma(C_j): clusters
    C_j have equal weight, whatever their size; see `style_from_moments`.
    """
    return style_from_moments(image_moments(maps), labels, sigma=sigma)


def client_style(maps: Callable[[], Iterable[Tensor]], settings: PardonSettings) -> Tensor:
    """Return S_k [2, C] of maps [B, C, H, W], batch by batch, in FINCH's coarsest clusters."""
    if settings.ablation == "v1":  # without clusters
        return pooled_style(torch.cat([image_moments(batch) for batch in maps()]))
    gram, moments = gram_and_moments(maps)
    return style_from_moments(moments, finch_gram(gram)[-1], sigma=settings.client_sigma)


def server_style(styles: Tensor, settings: PardonSettings) -> Tensor:
    """Return S_g [2, C], the median of the clusters of styles S_k [N, 2, C]."""
    if settings.ablation == "v2":  # without clusters
        return styles.mean(0)
    return median_of(cluster_centres(styles, settings.server_style), settings.median)


def interpolation_style(styles: Tensor, *, preset: Preset = "released") -> Tensor:
    """Return S_g, the style that the server broadcasts: the median of FINCH's finest clusters.

    S_g = median_j mu(C_j), each coordinate separately, so that mean and std can come from different
    clusters; over an even number of clusters the lower of the middle two.

    Args:
        styles: S_k of the clients [K, 2, C], K >= 1; unweighted.
        preset: See `cluster_centres`.

    Returns:
        [2, C].
    """
    return median_of(cluster_centres(styles, preset), "lower")


def cluster_centres(styles: Tensor, preset: Preset = "released") -> Tensor:
    """Return the centres [J, 2, C] of FINCH's finest clusters of styles [K, 2, C].

    Args:
        styles: The clients' styles, K >= 1.
        preset: ``released`` and ``paper``: cosine distance, mean inside a cluster; ``artefact``:
            that of `artefact_centres`.
    """
    rows = styles.flatten(1)
    if preset == "artefact":
        centres = artefact_centres(rows)
    else:
        centres = [cluster.mean(0) for cluster in clusters(rows, "cosine")]
    return torch.stack(centres).view(-1, *styles.shape[1:])


def artefact_centres(rows: Tensor) -> list[Tensor]:
    """Return Euclidean FINCH's medians, which reproduce the files shipped with PARDON's code.

    A median of an even number is the average of the middle two.
    """
    return [median_of(cluster, "average") for cluster in clusters(rows, "euclidean")]


def clusters(rows: Tensor, distance: Literal["cosine", "euclidean"]) -> list[Tensor]:
    """Return FINCH's finest clusters of rows [K, P], each [n, P]."""
    labels = finch(rows, distance=distance)[0]
    return [rows[labels == j] for j in range(int(labels.max()) + 1)]


def median_of(rows: Tensor, middle: Literal["lower", "average"]) -> Tensor:
    """Return the median over the first axis; ``middle`` applies to an even number of rows."""
    ordered = rows.sort(0).values  # torch.median has no deterministic algorithm on a GPU
    lower = ordered[(len(rows) - 1) // 2]
    return lower if middle == "lower" else (lower + ordered[len(rows) // 2]) / 2


def gram_and_moments(
    encode_batches: Callable[[], Iterable[Tensor]], *, budget_bytes: int = 2**30
) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix and the moments of a client's maps, holding few maps at a time.

    The maps of the first batches that fit are held in float64 and multiplied with those of all
    later batches; then the batches are encoded again for the next group, ceil(total / budget)
    times in all. The result does not depend on the budget.

    Args:
        encode_batches: Returns maps [B, C, H, W] batch by batch, the same at every call.
        budget_bytes: Maximum bytes of maps to hold, at 8 bytes per number; at least one batch is
            held, in addition to the one being multiplied.

    Returns:
        The Gram matrix [N, N] of the flattened maps and `image_moments` [N, 2, C], both float64
        and in the order of the images.
    """
    moments: list[Tensor] = []
    blocks: dict[tuple[int, int], Tensor] = {}
    start = 0  # first batch of the group that is held in this pass
    while True:
        held: list[Tensor] = []
        held_bytes = 0
        for index, maps in enumerate(encode_batches()):
            if start == 0:
                moments.append(image_moments(maps))
            if index < start:
                continue
            rows = maps.double().flatten(1)
            fits = not held or held_bytes + rows.nbytes <= budget_bytes
            if fits and index == start + len(held):
                held.append(rows)
                held_bytes += rows.nbytes
            for column, other in enumerate(held, start):
                blocks[index, column] = rows @ other.T
        start += len(held)
        if start == len(moments):
            break
    batches = range(len(moments))
    lower = {(j, i): block.T for (i, j), block in blocks.items()}
    blocks = lower | blocks
    gram = torch.cat([torch.cat([blocks[i, j] for j in batches], 1) for i in batches])
    return gram, torch.cat(moments)


# -------------------------------------------------------------------------------------- losses


def triplet_loss(
    z: Tensor,
    z_styled: Tensor,
    labels: Tensor,
    *,
    margin: float,
    negatives: Literal["random_one", "set_mean", "hardest"] = "random_one",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Pull features towards those of the same image restyled, away from other classes: L_con.

    The mean over images i of max(0, ||z_i - z'_i|| - ||z_i - z'_n|| + m), where z is normalised, z'
    are the features of transferred images, and n is an image of another class than i.

    Anchors are the features of original images, positives those of the same images after style
    transfer, negatives those of transferred images of other classes. Features are normalised and
    compared by Euclidean distance, not squared. Gradients flow through all three. A batch of one
    class has no negatives: the loss is 0 and still part of the graph.

    Source: PARDON (Nguyen et al., ICDCS 2025, arXiv 2410.22622), Eq. 7; one random negative for
    an anchor as in FISC, its earlier version, and in the authors' code. ``set_mean`` is the
    expectation of ``random_one``, ``hardest`` takes the nearest negative; both hold a
    [B, B, D] tensor.

    Args:
        z: Features of original images, [B, D].
        z_styled: Features of the same images after style transfer, [B, D].
        labels: Class ids, [B].
        margin: Distance by which a negative must be farther than the positive, 0 or more.
        negatives: Choice of an anchor's negatives.
        generator: Draws the negatives of ``random_one``.

    Returns:
        A scalar, 0 or more.

    Raises:
        SettingsError: For an unknown name, or if ``random_one`` has no generator.
    """
    anchors = F.normalize(widened(z), dim=1, eps=1e-12)
    styled = F.normalize(widened(z_styled), dim=1, eps=1e-12)
    differs = labels[:, None] != labels  # [B, B]
    rule = choose("choice of negatives", negatives, NEGATIVES)
    hinges = rule(anchors, styled, differs, margin, generator)
    # Either every image of a batch has a negative in it, or none has.
    return (hinges * differs.any(dim=1)).mean()


def feature_penalty(
    z: Tensor, z_styled: Tensor, reduction: Literal["elements", "samples"] = "elements"
) -> Tensor:
    """Return L_reg = (||Z||^2 + ||Z'||^2) / (B D) of original and transferred images.

    The authors' code takes the mean over all B x D elements; the text reads like a mean over
    samples, which is D times larger and does not fit its coefficient.

    Args:
        z: Features of original images, [B, D].
        z_styled: Features of the same images after style transfer, [B, D].
        reduction: Divisor of the sum of squares.

    Returns:
        A scalar, 0 or more.

    Raises:
        SettingsError: If ``reduction`` is unknown.
    """
    count = choose("reduction", reduction, {"elements": z.numel(), "samples": len(z)})
    return (widened(z).square() + widened(z_styled).square()).sum() / count


# ----------------------------------------------------------------- negatives of the triplet loss


def _random_one(
    anchors: Tensor,
    styled: Tensor,
    differs: Tensor,
    margin: float,
    generator: torch.Generator | None,
) -> Tensor:
    """Return the hinge [B] of each anchor with one negative."""
    if generator is None:
        raise SettingsError(
            "negatives='random_one' needs randomness: pass generator=torch.Generator(), "
            "or choose 'set_mean' or 'hardest'"
        )
    near = _distance(anchors, styled)
    other = styled[drawn_negatives(differs, generator)]
    return F.relu(near - _distance(anchors, other) + margin)


def _every(anchors: Tensor, styled: Tensor, differs: Tensor, margin: float) -> Tensor:
    """Return the hinges [B, B] of each anchor with every image; 0 where it is not a negative."""
    near, far = _distance(anchors, styled), _distance(anchors[:, None], styled)
    return F.relu(near[:, None] - far + margin) * differs


def _set_mean(
    anchors: Tensor, styled: Tensor, differs: Tensor, margin: float, _: torch.Generator | None
) -> Tensor:
    every = _every(anchors, styled, differs, margin)
    return every.sum(dim=1) / differs.sum(dim=1).clamp(min=1)


def _hardest(
    anchors: Tensor, styled: Tensor, differs: Tensor, margin: float, _: torch.Generator | None
) -> Tensor:
    return _every(anchors, styled, differs, margin).amax(dim=1)


def _distance(ours: Tensor, others: Tensor) -> Tensor:
    return F.pairwise_distance(ours, others, eps=DISTANCE_EPS)


NEGATIVES = {"random_one": _random_one, "set_mean": _set_mean, "hardest": _hardest}
"""Hinges [B] of anchors [B, D] with restyled images [B, D], by the choice of negatives."""


def random_negatives(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one index for each anchor, uniformly among the examples of other classes.

    The generator advances by one number per anchor, regardless of the labels.

    Args:
        labels: Class ids, [B].
        generator: Source of randomness, usually on the CPU, regardless of the labels' device.

    Returns:
        Indices [B], int64; meaningless in a batch of one class.
    """
    return drawn_negatives(labels[:, None] != labels, generator)


def drawn_negatives(differs: Tensor, generator: torch.Generator) -> Tensor:
    """Return `random_negatives`, given the mask of examples that differ in class, bool [B, B]."""
    uniform = torch.rand(
        len(differs), dtype=torch.float64, generator=generator, device=generator.device
    )
    if uniform.is_cpu:
        (uniform,) = on_device([uniform], differs.device)
    rank = (uniform * differs.sum(dim=1)).long()
    # The negative of rank r is the first column where more than r negatives have been counted.
    index = (differs.cumsum(dim=1) <= rank[:, None]).sum(dim=1)
    return index.clamp(max=len(differs) - 1)


DEVIATIONS = (
    "The paper measures styles after the last ReLU, of images in [0, 1]. The code and our default"
    " measure them before it, of ImageNet-normalised images (`style_layer`, `adain_input`, "
    "`preset`).",
    "The paper averages the deviations of a client's clusters. The code and our default take the "
    "deviation of their mixture (`client_sigma`).",
    "The paper's transfer has no strength, which means alpha = 1. The code and our default take "
    "0.5 (`strength`).",
    "The style files that come with the code were made by Euclidean FINCH and medians inside "
    "clusters. Paper and code say cosine distance and means, and so do we (`server_style`).",
    "The paper's contrast reads like a mean over all negatives. The code and our default draw one"
    " for each anchor (`negatives`).",
    "The paper's penalty reads like a mean over images. The code and our default take the mean "
    "over all entries, which fits the published coefficient (`feature_reduction`).",
    "The code has a linear layer of width 2048 behind the backbone, on which contrast and penalty "
    "act; the paper does not show it. Recipes of the papers have it, and `laptop` gives it to all "
    "methods: on PACS (cs-a-p, three seeds, rate 0.0008) PARDON's mean rose with it from 55 to 68 "
    "on id_val, and from 34 to 63 on the test domain. `quick` has none: on Digits4 (two scenarios, "
    "three seeds) PARDON's test mean moved with it from 61 to 62 at the rate 0.001, from 77 to 70 "
    "at 0.002 and from 83 to 73 at 0.004; FedAvg's from 60 to 61, from 72 to 67 and from 81 to 69. "
    "Smaller gammas in its place helped nowhere.",
    "The code reads cached styles of another seed or partition if their file is there. We compute"
    " them in each run.",
    "The code runs the backbone five times for anchors, positives and negatives. We run it once "
    "for each of the two views, which gives the same with frozen statistics.",
)
"""Where published code differs from its paper, and what this module does."""
