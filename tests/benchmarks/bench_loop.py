"""What the federated loop costs beside a plain loop over the same batches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings, RunSettings
from feddg_bench.core.loop import federate
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.data.client_images import ClientImages
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.engine.timing import synthetic_federation
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.models.backbones import Backbone
from tests.benchmarks.rows import Row, benchmark, ratios

CLIENTS, IMAGES, SIZE = 20, 57, 32


def tiny() -> Backbone:
    """Return about 2,000 parameters: one strided convolution and a pooled linear layer."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    return Backbone(net, 32, 0, "half")


@benchmark
def loop() -> Iterator[Row]:
    """A round of 20 clients of 57 images, 32 px, on 2,000 parameters, so that overhead dominates,
    over the same batches in a plain loop; the median and the largest of five medians of 15. A plain
    loop of FedAvg gives each client the global weights and a new optimizer, and takes the mean."""
    colours = {"brightness": 0, "contrast": 0, "saturation": 0, "hue": 0}
    settings = RunSettings.model_validate(
        {
            "method": "fedavg",
            "scenario": "synthetic",
            "data": {"image_size": SIZE},
            "augment": colours,
            "partition": {"clients": CLIENTS},
            "federation": {"rounds": 10**6, "per_round": None},
            "train": {"lr": 1e-3},
        }
    )
    federation = synthetic_federation(CLIENTS, IMAGES, SIZE, 7)
    method = Method(MethodSettings(), backbone=tiny(), num_classes=7, train=settings.train)
    executor = SerialExecutor()
    executor.start(WorkerSpec(settings, federation), method)
    server = Server(
        method.state.federated_weights(),
        tuple(federation.clients),
        executor,
        seed=0,
        federation=settings.federation,
        uplink=method.uplink,
    )
    rounds = federate(method, server, lambda _: {}, rounds=10**6, every=10**6)
    next(rounds)  # before round 1

    plain = Method(MethodSettings(), backbone=tiny(), num_classes=7, train=settings.train)
    plain.to(memory_format=torch.channels_last)
    optimizer = plain.configure_optimizers()

    def steps(client: ClientImages, number: int) -> None:
        generator = torch_generator(0, "loader", number)
        for images, labels in client.batches(
            shuffle=True, augment=True, views=1, companions=None, generator=generator
        ):
            loss = F.cross_entropy(plain(images), labels)
            optimizer.zero_grad()
            cast(None, loss.backward())  # type: ignore[no-untyped-call]
            optimizer.step()

    def plain_epoch() -> None:
        plain.train()
        for number, client in enumerate(executor.worker.data.values()):
            steps(client, number)

    def plain_fedavg() -> None:
        plain.train()
        weights = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        mean = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for number, client in enumerate(executor.worker.data.values()):
            plain.load_state_dict(weights)
            optimizer.state.clear()
            steps(client, number)
            for name, tensor in plain.state_dict().items():
                mean[name] += tensor / CLIENTS
        plain.load_state_dict(mean)

    works = {"plain": plain_epoch, "fedavg": plain_fedavg, "ours": lambda: next(rounds)}
    found = [ratios(works, 15) for _ in range(5)]
    own = [each["ours"] for each in found]
    yield Row("the loop's own cost, median of five", statistics.median(own), most=1.05)
    yield Row("the loop's own cost, largest of five", max(own))
    federated = statistics.median(each["ours"] / each["fedavg"] for each in found)
    yield Row("the loop's own cost over a plain loop of FedAvg", federated, most=1.05)
