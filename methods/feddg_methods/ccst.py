"""CCST: clients train on their images restyled to other clients' styles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddg_bench.common.streams import torch_generator
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.messages import LocalUpdate
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server, Uplink
from feddg_methods.shared.adain import image_moments, image_styles, pooled_style
from feddg_methods.shared.draws import draw_rows, share_count
from feddg_methods.shared.passes import features_of_each, to_bytes
from feddg_methods.shared.perturbation import PerturbationSettings
from feddg_methods.shared.style_settings import StyleSettings

STYLES = {"overall": "float32 [1, 2, C]", "single": "float32 [j, 2, C]"}
"""Declared form of each kind of style that clients send."""
PRESETS: dict[str, dict[str, Any]] = {
    "pardon": {},
    "official": {
        "adain_input": "unit",
        "style_layer": "relu4_1",
        "selection": "image",
        "styles": 3,
        "strength": 1.0,
        "transfer": "cached",
        "style_augment": False,
    },
    "fedccrl": {
        "style_layer": "relu4_1",
        "bank": "both",
        "selection": "pass",
        "styles": 3,
        "strength": 1.0,
        "refresh": "round",
        "upload_ratio": 0.5,
        "style_augment": False,
    },
}
"""Defaults below that each preset changes, as in the code of PARDON, the authors and FedCCRL."""


Styles = Mapping[str, Tensor]
"""Styles by kind, [J, 2, C] each: ``overall`` of all images, ``single`` of one image each."""

Bank = Mapping[str, Styles]
"""Styles sent by each client; all clients send the same kinds."""


_CHANGING = (
    "transfer=cached needs styles that stay: set refresh=once and selection=client or "
    "selection=image, or transfer=online"
)


class CCSTSettings(PerturbationSettings, StyleSettings):
    """Variants of CCST; the defaults are PARDON's code, with which PARDON's tables compare."""

    labels: ClassVar[tuple[str, ...]] = ("preset", "style", "bank", "transfer")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS
    impossible = (
        ({"transfer": "cached", "selection": "pass"}, _CHANGING),
        ({"transfer": "cached", "refresh": "round"}, _CHANGING),
        (
            {"transfer": "online", "selection": "image"},
            "selection=image restyles the stored images once: set transfer=cached, or "
            "selection=client or selection=pass",
        ),
    )

    preset: Literal["pardon", "official", "fedccrl"] = "pardon"
    """Sets the defaults of the settings below; each can still be set individually."""
    bank: Literal["overall", "single", "both"] = "overall"
    """Styles that clients send: one of all their images, one of each image, or both kinds, from
    which each draw picks one at random."""
    selection: Literal["client", "image", "pass"] = "client"
    """Draw of styles. ``client``: the server draws ``styles`` other clients for each client,
    whenever clients send styles (``refresh``). ``image``: each image gets the styles of ``styles``
    clients out of all; the style of its own client leaves it unchanged. ``pass``: each batch is
    restyled 0 to ``styles`` times, each image to any style of another client."""
    styles: int = Field(1, ge=0)
    """K, the number of styles; clipped if there are fewer. 0 is FedAvg."""
    strength: float = Field(0.5, ge=0, le=1)
    """alpha of the transfer; 1 in the authors' code."""
    transfer: Literal["online", "cached"] = "online"
    """Transfer each augmented batch, or the stored images once; copies share the augmentation."""
    refresh: Literal["once", "round"] = "once"
    """Time at which clients send styles: before round 1, or in every round."""
    upload_ratio: float = Field(1.0, gt=0, le=1)
    """Share of a client's images, at least one image, used for its styles."""
    style_augment: bool = True
    """Measure styles on augmented images, as PARDON's code does, or on the stored ones."""


class CCST(Method):
    """CCST (Chen et al., WACV 2023, arXiv 2210.00912).

    Clients send the channel statistics of their feature maps, and train on their own images, both
    unchanged and restyled by AdaIN to the statistics of other clients. The server is FedAvg's. With
    ``selection=image``, an epoch goes through the client's images K times, each time in another of
    the K styles of an image. Otherwise the loss is that of the originals plus that of all restyled
    images, or plus that of each pass.
    """

    Settings = CCSTSettings
    settings: CCSTSettings
    uplink: ClassVar = {"fit": ("weights",), "local_styles": STYLES}
    downlink = ("styles", "bank")
    singles = "tells clients the styles of single others"
    frozen = ("style.",)
    group = "style"
    rgb_only = True
    title = "CCST"
    citation = (
        "J. Chen, M. Jiang, Q. Dou, Q. Chen: Federated Domain Generalization for Image Recognition "
        "via Cross-Client Style Transfer, WACV 2023, arXiv 2210.00912"
    )

    @classmethod
    def sends(cls, settings: CCSTSettings) -> Uplink:
        sent = {kind: form for kind, form in STYLES.items() if settings.bank in (kind, "both")}
        return {**cls.uplink, "local_styles": sent}

    def build(self) -> None:
        self.style = self.settings.build_backend()
        self.generator: torch.Generator | None = None
        self.pools: dict[str, Tensor] = {}

    # ------------------------------------------------------------- styles, once or each round

    def prepare(self, server: Server) -> None:
        if self.settings.refresh == "once":
            self.share_styles(server)

    def run_round(self, server: Server) -> None:
        if self.settings.refresh == "round":
            self.share_styles(server)
        drawn = server.memory.get("styles", {})
        tell = {name: {"styles": drawn[name]} for name in server.cohort if name in drawn}
        server.weights = self.aggregate(server, server.ask(self.fit, tell=tell))

    def share_styles(self, server: Server) -> None:
        """Ask all clients for styles; draw some for each client, or broadcast all of them."""
        s = self.settings
        if s.styles == 0 or len(server.clients) == 1:
            return
        server.broadcast.pop("bank", None)  # the last round's bank is no longer needed
        replies = server.ask(self.local_styles, everyone=True, weights=False)
        bank = {reply.client: reply.value for reply in replies}
        if s.selection == "client":
            server.memory["styles"] = {
                name: draw_clients(
                    others, s.styles, torch_generator(server.seed, "styles", server.round, name)
                )
                for name in server.clients
                if (others := without(bank, name))
            }
        else:
            server.broadcast["bank"] = bank

    @torch.no_grad()
    def local_styles(self, client: Client) -> dict[str, Tensor]:
        """Return the client's styles, [1, 2, C] overall and [J, 2, C] of single images."""
        s, count = self.settings, len(client.data)
        chosen = torch.zeros(count, dtype=torch.bool)
        share = share_count(count, s.upload_ratio)
        chosen[draw_rows(count, share, client.generator("upload"))] = True
        moments, single, start = [], [], 0
        for images, labels in client.batches(train=False, augment=s.style_augment):
            rows = chosen[start : start + len(labels)].to(images.device)
            start += len(labels)
            if rows.any():
                maps = self.style.style_maps(images[rows])
                moments.append(image_moments(maps))
                single.append(image_styles(maps))
        kinds = {"overall": pooled_style(torch.cat(moments))[None], "single": torch.cat(single)}
        sent = {kind: styles for kind, styles in kinds.items() if s.bank in (kind, "both")}
        # Draw noise for all styles at once: equal noise on both kinds would cancel in their
        # difference.
        noisy = s.perturbed(torch.cat([*sent.values()]), client)
        return dict(zip(sent, noisy.split([*map(len, sent.values())]), strict=True))

    # ----------------------------------------------------------------- training, each round

    def fit(self, client: Client) -> LocalUpdate:
        with self.bank_of(client):
            return super().fit(client)

    def bank_of(self, client: Client) -> AbstractContextManager[None]:
        """Return a context in which styles can be drawn for the client's images."""
        pools = pooled(without(client.broadcast.get("bank", {}), client.name))
        return self.temporarily(generator=client.generator("styles"), pools=pools)

    def styled(self, client: Client) -> Tensor | None:
        if not {"styles", "bank"} & set(client.broadcast):
            return None
        with self.bank_of(client):
            copies = self.restyled(client.broadcast["images"])
        return copies[0] if copies else None

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        s = self.settings
        if s.transfer == "online" or not {"styles", "bank"} & set(client.broadcast):
            return super().batches(client, epoch)
        if "transferred" not in client.memory:
            client.memory["transferred"] = self.transferred(client)
        copies = client.memory["transferred"]
        if s.selection == "image":
            return (
                (images[1], labels)
                for number, companions in enumerate(copies, epoch * len(copies))
                for images, labels in client.batches(
                    train=True, epoch=number, companions=companions
                )
            )
        # The same arguments give the same originals and labels for each copy.
        beside = [client.batches(train=True, epoch=epoch, companions=c) for c in copies]
        return (
            (torch.stack([batch[0][0][0], *(images[1] for images, _ in batch)]), batch[0][1])
            for batch in zip(*beside, strict=True)
        )

    def transferred(self, client: Client) -> list[Tensor]:
        """Return K restyled copies of the client's stored images, uint8 [n, H, W, 3] each."""
        parts = [self.restyled(images) for images, _ in client.batches(train=False)]
        return [
            to_bytes(torch.cat(copies)).permute(0, 2, 3, 1).contiguous()
            for copies in zip(*parts, strict=True)
        ]

    @torch.no_grad()
    def restyled(self, images: Tensor) -> list[Tensor]:
        """Return copies of images [B, 3, H, W], restyled to styles drawn for them."""
        if self.alone:  # no client task, so no styles
            return []
        assert self.generator is not None  # noqa: S101 - fit made it
        return SELECTIONS[self.settings.selection](self, images, self.generator)

    def transfer(self, images: Tensor, styles: Tensor) -> Tensor:
        """Return images restyled to one style [2, C], or to one style each [B, 2, C]."""
        return self.style.transfer(images, styles.to(images.device), self.settings.strength)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        if images.dim() == 5:  # [1 + K, B, 3, H, W]: copies were precomputed
            images, *copies = images.unbind(0)
        else:
            copies = [] if self.settings.transfer == "cached" else self.restyled(images)
        if not copies:
            return super().training_step((images, labels), batch_idx)
        views = copies if self.settings.selection == "pass" else [torch.cat(copies)]
        losses = [
            F.cross_entropy(self.classifier(z), labels.repeat(len(z) // len(labels)))
            for z in features_of_each(self, [images, *views])
        ]
        return torch.stack(losses).sum()


# ------------------------------------------------------------------------- selection of styles


def _of_client(method: CCST, images: Tensor, _: torch.Generator) -> list[Tensor]:
    styles = method.client.broadcast.get("styles", ())
    return [method.transfer(images, style) for style in styles]


def _of_image(method: CCST, images: Tensor, generator: torch.Generator) -> list[Tensor]:
    bank, name = method.client.broadcast["bank"], method.client.name
    return [
        torch.where(
            own.to(images.device)[:, None, None, None], images, method.transfer(images, styles)
        )
        for styles, own in draw_for_images(
            bank, name, len(images), method.settings.styles, generator
        )
    ]


def _of_pass(method: CCST, images: Tensor, generator: torch.Generator) -> list[Tensor]:
    if not method.pools:
        return []
    copies = []
    for _ in range(int(torch.randint(method.settings.styles + 1, (), generator=generator))):
        pool = draw_kind(method.pools, generator)
        rows = draw_rows(len(pool), len(images), generator)
        copies.append(method.transfer(images, pool[rows.to(pool.device)]))
    return copies


SELECTIONS = {"client": _of_client, "image": _of_image, "pass": _of_pass}
"""Functions that return restyled copies of images [B, 3, H, W], by ``selection``."""


# ---------------------------------------------------------------------------------- style bank


def without(bank: Bank, client: str) -> dict[str, Styles]:
    """Return the bank without a client's own styles."""
    return {name: bank[name] for name in sorted(bank) if name != client}


def pooled(bank: Bank) -> dict[str, Tensor]:
    """Return all styles of each kind, [J, 2, C]; nothing if the bank is empty."""
    kinds = next(iter(bank.values()), {})
    return {kind: torch.cat([bank[name][kind] for name in sorted(bank)]) for kind in kinds}


def draw_kind(styles: Styles, generator: torch.Generator) -> Tensor:
    """Draw a kind uniformly and return its styles [J, 2, C]."""
    kinds = sorted(styles)
    return styles[kinds[int(torch.randint(len(kinds), (), generator=generator))]]


def draw_style(styles: Styles, generator: torch.Generator) -> Tensor:
    """Draw one style [2, C] of a client: first the kind, then a style of that kind."""
    rows = draw_kind(styles, generator)
    return rows[int(torch.randint(len(rows), (), generator=generator))]


def draw_clients(bank: Bank, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` clients, or all if there are fewer, and one style of each: [K, 2, C]."""
    names = sorted(bank)
    drawn = draw_rows(len(names), min(count, len(names)), generator).tolist()
    return torch.stack([draw_style(bank[names[i]], generator) for i in drawn])


def draw_for_images(
    bank: Bank, own: str, size: int, count: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw ``count`` clients for every image without replacement; its own can be among them.

    Args:
        bank: Styles of all clients, at least one.
        own: Client that holds the images.
        size: Number of images B.
        count: K; clipped to the number of clients.
        generator: On the CPU.

    Yields:
        K times the drawn styles [B, 2, C], and which images drew their own client [B], bool.
    """
    names = sorted(bank)
    order = torch.rand(size, len(names), generator=generator).argsort(1)[:, :count]  # [B, K]
    for column in order.T.tolist():
        drawn = [names[i] for i in column]
        styles = torch.stack([draw_style(bank[name], generator) for name in drawn])
        yield styles, torch.tensor([name == own for name in drawn])


DEVIATIONS = (
    "The authors restyle every image to the styles of K source clients with alpha = 1 before "
    "training. PARDON's code, our default, restyles every batch to one other client's style with "
    "alpha = 0.5 and adds both cross-entropies (`preset`).",
    "The authors' code measures styles after the last ReLU; PARDON's code measures them before "
    "it, as we do by default (`style_layer`).",
    "The authors' code encodes images in [0, 1]; PARDON's code encodes ImageNet-normalised "
    "images, as we do by default (`adain_input`).",
    "FedCCRL's code flattens the maps of several images without exchanging the axes, so its "
    "overall style mixes images with channels. Ours is a statistic of each channel.",
    "FedCCRL's code stops where a client has too few batches for its share, and takes one batch "
    "too few. We take ceil(share x n) images, at least one.",
    "FedCCRL's code adds 1e-8 to variances and takes the unbiased variance for the overall style."
    " We add 1e-5 and take the biased one, as the authors do.",
    "PARDON's code hands GPU tensors to a constructor for CPU tensors when styles are new, so it "
    "works from cached files only. Ours works from the first run.",
    "The authors' released code stops at a breakpoint, uses an option that does not exist and has"
    " the line that saves styles commented out. Ours does what it was meant to do.",
    "The authors transfer at 512 pixels and store JPEG files. We transfer at the run's image size"
    " and store 8 bits without loss (`data.image_size`).",
    "Where styles are of single images, the authors draw one image of the other client for a "
    "whole batch. We draw one for each image.",
    "The authors shuffle the K n images of an epoch together. We go through the n images K times.",
    "The authors average clients equally, PARDON's and FedCCRL's code by their images "
    "(`federation.weighting`).",
)
"""Where published code differs from its paper, and what this module does."""
