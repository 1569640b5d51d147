"""StableFDG: styles of others and beyond one's own, and attention to what a class shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.client import Batch, Client, on_device
from feddg_bench.core.messages import Payload
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_methods.shared.adain import image_styles
from feddg_methods.shared.stages import changed, check_stages


class StableFDGSettings(MethodSettings):
    """How styles are changed, and the highlighter."""

    labels: ClassVar[tuple[str, ...]] = ("width",)

    p: float = Field(0.5, ge=0, le=1)
    """Probability that a batch is shifted, and that it is explored at each stage; 0.5 in the
    authors' code."""
    alpha: float = Field(3.0, ge=0)
    """Exploration level: how far the styles of copies lie beyond those of their images; the
    authors' code has 3."""
    oversampling: float = Field(1.0, ge=0)
    """Copies of images that join a batch, as a fraction of it; 1 in the authors' code."""
    beta: float = Field(0.1, gt=0)
    """Both parameters of the Beta distribution of lambda, as in MixStyle."""
    stages: tuple[int, ...] = (1, 2, 3)
    """Stages of the backbone whose output is explored, from 1; the first three of a ResNet in the
    authors' code. Styles are shared and shifted after the first stage."""
    width: int = Field(30, ge=0)
    """d, the width of queries and keys; 30 in the authors' code. 0 leaves the highlighter out."""


class StableFDG(Method):
    """StableFDG (Park et al., NeurIPS 2023, arXiv 2311.00227).

    *Style sharing.* In each round client n sends Phi_n: mean and standard deviation, over its
    images, of the styles (mu, sigma) of the maps after stage 1. The server gives each client of
    the round the Phi of another one. *Shifting.* k-means++ chooses the half of a batch that keeps
    its styles; the others take styles drawn from that Phi. *Exploration.* Copies of images, which
    make the classes of the batch even, get styles further from the batch's mean, alpha times the
    distance; then all styles are mixed, as by MixStyle. The *highlighter* compares the maps after
    the last stage with those of another image of the class; its attention over positions makes a
    second set of features, beside the pooled ones.

    The weights are averaged as in FedAvg, the highlighter among them. In prediction an image is
    compared with itself.
    """

    group = "style"
    acts_on = "maps"
    title = "StableFDG"
    citation = (
        "Jungwuk Park, Dong-Jun Han, Jinho Kim, Shiqiang Wang, Christopher G. Brinton, Jaekyun "
        "Moon: StableFDG: Style and Attention Based Learning for Federated Domain Generalization, "
        "NeurIPS 2023, arXiv 2311.00227"
    )
    Settings = StableFDGSettings
    settings: StableFDGSettings
    uplink: ClassVar = {"fit": ("weights",), "local_style": {"style": "float32 [2, 2, C]"}}
    downlink = ("style",)
    singles = "passes each client's style on to another client"

    def build(self) -> None:
        check_stages(self.backbone, "stages", self.settings.stages or (1,))
        if self.settings.width:
            last = len(self.backbone.stages)
            self.highlighter = Highlighter(self.backbone.channels(last), self.settings.width)
            self.num_features *= 2
            self.classifier = self.new_classifier()

    # ------------------------------------------------------------------------------ model

    def features(self, images: Tensor) -> Tensor:
        return self.represent(images)

    def represent(self, images: Tensor, other: Tensor | None = None) -> Tensor:
        """Return pooled and highlighted features, [B, 2 D].

        The rest of the network pools the maps z and P A z, with P positions and attention A.

        Args:
            images: [B, 3, H, W]; B is the number of maps after the last stage.
            other: Positions of the images to compare with, int64 [B]; by default each itself.
        """
        if not self.settings.width:
            return super().features(images)

        def highlighted(z: Tensor) -> Tensor:
            a = self.highlighter(z, other).to(z.dtype)
            return torch.cat([z, z * a * a[0].numel()])

        with changed(self.backbone.stages[-1], highlighted):
            return torch.cat(super().features(images).chunk(2), 1)

    # ------------------------------------------------------------------------ client half

    @torch.no_grad()
    def local_style(self, client: Client) -> Payload:
        """Return Phi_n: mean and standard deviation of the images' (mu, sigma), [2, 2, C]."""
        self.eval()
        found = []
        for images, _ in client.batches(train=False):
            with client.fabric.autocast():
                found.append(image_styles(self.backbone.maps(images, 1)))
        self.train()
        styles = torch.cat(found)
        variance, mean = torch.var_mean(styles, 0, correction=min(1, len(styles) - 1))
        return {"style": torch.stack([mean, variance.sqrt()]).float()}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        s, b, known = self.settings, len(labels), labels.tolist()
        steps = []
        phi = None if self.alone else self.client.broadcast.get("style")
        if phi is not None and torch.rand(()) < s.p:
            kept = b - b // 2
            draws = torch.rand(kept), torch.randn(b // 2, *phi[0].shape)
            uniform, noise = on_device(draws, self.device)
            phi = phi.to(self.device)
            steps.append((1, partial(shifted, phi=phi, draws=uniform, noise=noise)))
        explored_stages = [number for number in s.stages if torch.rand(()) < s.p]
        extra: list[int] = []
        if explored_stages:
            number = round(s.oversampling * b)
            extra = balancing(known, number, torch.rand(number, 2).tolist())
        known += [known[position] for position in extra]
        copies = [torch.tensor(extra, dtype=torch.int64), torch.empty(0, dtype=torch.int64)]
        beta = torch.distributions.Beta(s.beta, s.beta)
        for index, stage in enumerate(explored_stages):
            lam, other = beta.sample((len(known),)), torch.randperm(len(known))
            joining, lam, other = on_device([copies[index > 0], lam, other], self.device)
            steps.append(
                (stage, partial(explored, extra=joining, alpha=s.alpha, other=other, lam=lam))
            )
        everyone, pairs = on_device(
            [torch.tensor(known), torch.tensor(partners_in_class(known))], self.device
        )
        with ExitStack() as stack:
            for stage, change in steps:
                stack.enter_context(changed(self.backbone.stages[stage - 1], change))
            z = self.represent(images, pairs)
        return self.task.loss(self.classifier(z), everyone, "mean")

    # ------------------------------------------------------------------------ server half

    def run_round(self, server: Server) -> None:
        told: dict[str, Payload] = {}
        if self.settings.p:
            asked = server.ask(self.local_style)
            styles = {reply.client: reply.value["style"] for reply in asked}
            names = sorted(styles)
            order = torch.randperm(
                len(names), generator=torch_generator(server.seed, "styles", server.round)
            )
            told = {n: {"style": styles[giver]} for n, giver in cycle(names, order).items()}
        server.weights = self.aggregate(server, server.ask(self.fit, tell=told))


# ---------------------------------------------------------------------------------- styles


def cycle(names: Sequence[str], order: Tensor) -> dict[str, str]:
    """Return for each name the next one in the given order; nothing if there is only one."""
    ordered = [names[i] for i in order.tolist()]
    return dict(zip(ordered, ordered[1:] + ordered[:1], strict=True)) if len(names) > 1 else {}


def shifted(maps: Tensor, phi: Tensor, draws: Tensor, noise: Tensor) -> Tensor:
    """Return maps of which some take styles drawn from the normal distribution Phi.

    Maps of a single pixel hold nothing but their style and stay as they are.

    Args:
        maps: z, [B, C, H, W].
        phi: Mean and standard deviation of (mu, sigma), [2, 2, C].
        draws: Uniform numbers that choose the K maps which keep their style, [K].
        noise: Standard normal numbers for the styles of the others, [B - K, 2, C].
    """
    if maps.shape[2:].numel() == 1:
        return maps
    style = image_styles(maps).detach()
    kept = torch.zeros(len(maps), dtype=torch.int64, device=maps.device)
    kept[far_apart(style.flatten(1), draws)] = 1
    others = kept.argsort(stable=True)[: len(noise)]
    drawn = phi[0] + phi[1] * noise
    drawn[:, 1].clamp_(min=0)
    new = style.index_copy(0, others, drawn.to(style))
    restyled = styleless(maps, style) * new[:, 1, :, None, None] + new[:, 0, :, None, None]
    return torch.where(kept.view(-1, 1, 1, 1) > 0, maps, restyled.to(maps.dtype))


def far_apart(points: Tensor, draws: Tensor) -> Tensor:
    """Return the positions of points that k-means++ chooses as centres, int64 [K].

    The first centre is any point. Each further one has a probability that is proportional to its
    squared distance to the nearest centre so far.

    Args:
        points: [B, D].
        draws: Uniform numbers in [0, 1), one for each centre: [K], K at most B.
    """
    gaps = torch.ones(len(points), dtype=points.dtype, device=points.device)
    free = torch.ones_like(gaps)
    chosen: list[Tensor] = []
    for u in draws:
        total = (gaps * free).cumsum(0)
        centre = (total <= u * total[-1]).sum().clamp(max=len(points) - 1)
        free = free.index_fill(0, centre, 0)
        distance = (points - points.index_select(0, centre[None])).square().sum(1) + TINY
        gaps = torch.minimum(gaps, distance) if chosen else distance
        chosen.append(centre)
    return torch.stack(chosen)


TINY = 1e-12
"""Added to squared distances, so that points in the same place can be chosen too."""


def balancing(labels: Sequence[int], number: int, draws: Sequence[Sequence[float]]) -> list[int]:
    """Return positions of images whose copies make classes as even as possible.

    Each copy is of a class with the fewest images and copies so far.

    Args:
        labels: Classes of the images.
        number: Number of copies.
        draws: Two uniform numbers in [0, 1) for each copy: they choose class and image.
    """
    counts = Counter(labels)
    members = {c: [i for i, label in enumerate(labels) if label == c] for c in sorted(counts)}
    found: list[int] = []
    for u, v in draws[:number]:
        fewest = min(counts.values())
        classes = [c for c in members if counts[c] == fewest]
        own = classes[int(u * len(classes))]
        counts[own] += 1
        found.append(members[own][int(v * len(members[own]))])
    return found


def explored(maps: Tensor, extra: Tensor, alpha: float, other: Tensor, lam: Tensor) -> Tensor:
    """Return maps and copies, [B + O, C, H, W], with explored and then mixed styles.

    Maps of a single pixel hold nothing but their style, which they and their copies keep.

    Args:
        maps: z, [B, C, H, W].
        extra: Positions of the maps that are copied, int64 [O].
        alpha: How far the styles of copies lie beyond their own.
        other: Position of each map's partner among all, int64 [B + O].
        lam: lambda of each map in [0, 1], [B + O].
    """
    if maps.shape[2:].numel() == 1:
        return torch.cat([maps, maps[extra]])
    style = image_styles(maps).detach()  # [B, 2, C]
    copies = style[extra] + alpha * (style[extra] - style.mean(0))
    copies[:, 1].clamp_(min=0)
    every, inner = torch.cat([style, copies]), styleless(maps, style)
    lam = lam.to(style).view(-1, 1, 1)
    beta, gamma = (lam * every + (1 - lam) * every[other])[..., None, None].unbind(1)
    return (gamma * torch.cat([inner, inner[extra]]) + beta).to(maps.dtype)


def styleless(maps: Tensor, style: Tensor) -> Tensor:
    """Return (z - mu) / sigma of maps [B, C, H, W] with styles [B, 2, C]."""
    mu, sigma = style[..., None, None].unbind(1)
    return (maps - mu) / sigma


# ------------------------------------------------------------------------------- attention


class Highlighter(nn.Module):
    """Attention over the positions of a map, by what it shares with another map of its class.

    Args:
        channels: C of the maps.
        width: d, the width of queries and keys.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.theta_q = nn.Conv2d(channels, width, kernel_size=1)
        self.theta_k = nn.Conv2d(channels, width, kernel_size=1)

    def forward(self, z: Tensor, other: Tensor | None) -> Tensor:
        """Return A, [B, 1, H, W], which sums to 1 over positions.

        Args:
            z: Maps, [B, C, H, W].
            other: Position of each z' in the batch, int64 [B]; by default z' = z.
        """
        q = F.normalize(self.theta_q(z).flatten(2), dim=1)
        k = F.normalize(self.theta_k(z).flatten(2), dim=1)
        if other is not None:
            q = (q + q[other]) / 2
        # The mean over the queries' positions of their products with a key.
        scores = (q.mean(2, keepdim=True) * k).sum(1)
        return scores.softmax(1).view(len(z), 1, *z.shape[2:])


def partners_in_class(labels: Sequence[int]) -> list[int]:
    """Return for each position the next one with the same label, and after the last the first.

    >>> partners_in_class([0, 1, 0])
    [2, 1, 0]
    """
    members: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        members.setdefault(label, []).append(position)
    pairs = {a: b for m in members.values() for a, b in zip(m, m[1:] + m[:1], strict=True)}
    return [pairs[position] for position in range(len(labels))]


DEVIATIONS = (
    "The authors' code shifts a batch to the centres of a k-means clustering and to drawn styles, "
    "in this order, so that images do not keep their own styles. Half keep theirs here, as in "
    "accounts of the paper, whose text we have not read beyond its introduction.",
    "The authors' code exchanges styles after round 1 only, measured on augmented images. We "
    "exchange them in each round, measured on the images as stored.",
    "The order in which styles go around is a random cycle. The authors' code tries pairs until "
    "each client has another's.",
    "For an image without another of its class in the batch, the authors' code draws one from a "
    "second, class-balanced batch. We compare it with itself, as in prediction.",
    "In the authors' code extrapolated standard deviations can be negative. We bound them by 0, as "
    "it does with drawn ones.",
    "The authors' code adds 1e-6 to variances, we add 1e-5.",
    "The highlighter reads the maps after the last stage. In a network with further layers before "
    "pooling, these work on plain and on highlighted maps.",
    "Models have shares by image counts as in FedAvg (`federation.weighting`), equal ones in the "
    "authors' code.",
)
"""Where published code differs from its paper, and what this module does."""
