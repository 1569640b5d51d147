"""Fedcolour: say in one line what it does."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from feddg_bench import Batch, Client, Method, MethodSettings, Server


class FedcolourSettings(MethodSettings):
    """Settings of this method; on the command line hyper.<name>=VALUE."""

    strength: float = Field(0.5, ge=0, le=1)
    """How far images move to the style of another client: 0 not at all, 1 all the way."""


class Fedcolour(Method):
    """FedAvg on images in the channel statistics of other clients (cite your paper here)."""

    title = "Fedcolour"
    Settings = FedcolourSettings
    settings: FedcolourSettings
    version = 1  # increment when results can change, so that old and new records are not mixed
    uplink: ClassVar = {"fit": ("weights",), "local_style": {"style": "float32 [2, C]"}}
    downlink = ("styles",)
    singles = "tells clients the styles of single others"
    rgb_only = True
    group = "style"
    citation = "Authors, title, venue and year"

    # The server half, before round 1: collect one style of each client and send all to everybody.

    def prepare(self, server: Server) -> None:
        replies = server.ask(self.local_style, everyone=True, weights=False)
        server.broadcast["styles"] = {reply.client: reply.value["style"] for reply in replies}

    # The client half.

    def local_style(self, client: Client) -> dict[str, Tensor]:
        batches = [images for images, _ in client.batches(train=False)]
        std, mean = torch.std_mean(torch.cat(batches), (0, 2, 3))
        return {"style": torch.stack([mean, std])}

    def batches(self, client: Client, epoch: int) -> Iterator[Batch]:
        generator = client.generator("styles", epoch)
        for images, labels in super().batches(client, epoch):
            yield self.restyled(images, client, generator), labels

    def restyled(self, images: Tensor, client: Client, generator: torch.Generator) -> Tensor:
        styles = client.broadcast["styles"]
        others = [styles[name] for name in sorted(styles) if name != client.name]
        if not others:
            return images
        drawn = int(torch.randint(len(others), (), generator=generator))
        return restyle(images, others[drawn], self.settings.strength)

    def styled(self, client: Client) -> Tensor:  # for `feddg-bench figures styles`
        return self.restyled(client.broadcast["images"], client, client.generator("figure"))


def restyle(images: Tensor, style: Tensor, strength: float) -> Tensor:
    """Move images [B, 3, H, W] to the channel means and deviations of a style [2, 3]."""
    std, mean = torch.std_mean(images, (2, 3), keepdim=True)
    new_mean, new_std = style[:, :, None, None]
    moved = (images - mean) / (std + 1e-5) * new_std + new_mean
    return images.lerp(moved.clamp(0, 1), strength)
