"""Runs of a method on a model of one number, whose every step can be worked out by hand."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.data.federated import Federation
from feddg_bench.plugins import load_method
from tests.helpers import PLAIN


class NoBackbone(nn.Module):
    num_features = 1


def quadratic(method):
    """Return a subclass of a method with one number v in float64 as its model.

    It is trained on the mean of a (v - b)^2 / 2 over images. The grey level of an image in
    [0, 255] is b, its label is a - 1.
    """

    class Quadratic(method):
        start = 1.0

        def build(self):
            super().build()
            self.v = nn.Parameter(torch.tensor(self.start, dtype=torch.float64))

        def forward(self, images):
            return self.v - (images.double().mean((1, 2, 3)) * 255).round()

        def training_step(self, batch, _index):
            images, labels = batch
            return ((labels + 1) * self(images) ** 2 / 2).mean()

    return Quadratic


def quadratics(start_run, name, clients, *, federation=None, hyper=None, rounds=50, **train):
    """Return a run of a method in which each client holds images (a, b), given by client."""
    train = {"optimizer": "sgd", "lr": 0.1, "batch_size": 1, "channels_last": False, **train}
    pairs = [pair for held in clients for pair in held]
    levels = np.array([b for _, b in pairs], dtype=np.uint8)
    images = np.broadcast_to(levels[:, None, None, None], (len(levels), 8, 8, 3)).copy()
    labels = np.array([a - 1 for a, _ in pairs])
    ends = np.cumsum([len(held) for held in clients])
    parts = np.split(np.arange(len(pairs)), ends[:-1])
    data = Federation(
        images, 8, labels, {f"client_{i}": part for i, part in enumerate(parts)}, (), 9
    )
    kind = load_method(name)
    method = quadratic(kind)(
        validate(kind.Settings, hyper or {}, "hyper."),
        backbone=NoBackbone(),
        num_classes=9,
        train=TrainSettings(**train),
    )
    layer = {
        "train": train,
        "hyper": hyper or {},
        "federation": {"rounds": rounds, "per_round": None, **(federation or {})},
        "partition": {"clients": len(clients)},
    }
    return start_run(name, PLAIN, layer, federation=data, method=method)
