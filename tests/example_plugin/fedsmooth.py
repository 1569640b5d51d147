"""Fedsmooth: say in one line what it does."""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from feddg_bench import Batch, Method, MethodSettings


class FedsmoothSettings(MethodSettings):
    """Settings of this method; on the command line hyper.<name>=VALUE."""

    smoothing: float = Field(0.1, ge=0, le=1)
    """Share of each target that is spread evenly over all classes."""


class Fedsmooth(Method):
    """FedAvg whose clients train with smoothed labels (cite your paper here)."""

    title = "Fedsmooth"
    Settings = FedsmoothSettings
    settings: FedsmoothSettings
    version = 1  # increment when results can change, so that old and new records are not mixed
    group = "local training"
    citation = "Authors, title, venue and year"

    # The server half is FedAvg's. To change it, override aggregate(server, updates).

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch  # [B, 3, H, W] in [0, 1] and [B]
        return F.cross_entropy(self(images), labels, label_smoothing=self.settings.smoothing)
