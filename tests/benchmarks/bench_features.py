"""Runs on frozen features compared with a plain PyTorch loop on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from feddg_bench.config.schema import BackboneSettings
from feddg_bench.data.augment import to_float
from feddg_bench.data.federated import Images, synthetic_federation
from feddg_bench.models.backbones import build_backbone
from tests.benchmarks.bench_loop import CLASSES, LR, own, plain_round
from tests.benchmarks.rows import Row, benchmark, cpu, interval, pairs

CLIENTS, PER_CLIENT, WIDTH, ROUNDS, HELD, REPEATS = 4, 250, 1280, 9, 4000, 25
"""K clients a round, an evaluation of the held-out features after every nine rounds."""


@benchmark
def frozen_features() -> Iterator[Row]:
    """Nine rounds of a linear head and one evaluation, four clients of 250 features each."""
    like = Images("classification", WIDTH, "float16")
    federation = synthetic_federation(CLIENTS, PER_CLIENT, 1, CLASSES, like=like)
    features = torch.from_numpy(federation.images)
    labels = torch.from_numpy(federation.labels)
    parts = [torch.from_numpy(part) for part in federation.clients.values()]
    held = np.arange(HELD) % len(labels)
    layer = {
        "data": {"image_size": 8},
        "backbone": {"name": "features"},
        "features": {"encoder": "random"},
        "train": {"lr": LR, "batch_size": 32},
    }
    settings = BackboneSettings(name="features")
    ours, executor = own(partial(build_backbone, settings, WIDTH), federation, layer)

    def batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        rows = parts[number]
        for index in rows[torch.randperm(len(rows))].split(32):
            yield features.index_select(0, index).flatten(1).float(), labels[index]

    net = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR, fused=True)
    train = plain_round(net, optimizer, CLIENTS, batches)

    def plain() -> None:
        for _ in range(ROUNDS):
            train()
        with torch.no_grad():
            for index in torch.from_numpy(held).split(256):
                net(to_float(features.index_select(0, index)).flatten(1)).argmax(1)

    def suite() -> None:
        for _ in range(ROUNDS):
            ours()
        weights = executor.worker.method.state.federated_weights()
        list(executor.evaluate(weights, np.split(held, range(256, HELD, 256))))

    times = pairs({"plain": plain, "suite": suite}, REPEATS)
    middle, low, high = interval(times["suite"], times["plain"])
    why = f"{low:.2f} to {high:.2f}; checks of replies and random streams of each task"
    yield Row(
        "FedAvg with a linear head on frozen features, of a plain loop", middle, 1.15, why=why
    )


@benchmark
def heads() -> Iterator[Row]:
    """CPU seconds of 45 rounds of FedAvg on 1,280 features, four clients of 282 images a round, as
    in recipe `features` on PACS, without start, evaluations and record."""
    like = Images("classification", WIDTH, "float16")
    for what, backbone in (
        ("a linear head", {}),
        ("a hidden layer of 256", {"hidden": 256}),
        ("an adapter of 64", {"adapter": 64}),
        ("a cosine classifier", {"classifier": "cosine"}),
    ):
        federation = synthetic_federation(4, 282, 1, CLASSES, like=like)
        layer = {
            "data": {"image_size": 8},
            "backbone": {"name": "features", **backbone},
            "features": {"encoder": "random"},
            "train": {"lr": LR, "batch_size": 32},
        }
        settings = BackboneSettings(name="features", **backbone)
        go_on, _ = own(partial(build_backbone, settings, WIDTH), federation, layer)
        go_on()

        def third(go_on: Callable[[], object] = go_on) -> None:
            for _ in range(15):
                go_on()

        seconds = 3 * min(cpu(third) for _ in range(3))
        yield Row(f"45 rounds of {what}", seconds, unit=" s")
