"""What the federated loop costs: one round against a plain loop over the same batches, paired.

The model is so small that overhead dominates. Prints CPU seconds of both, alternating, and the
ratio of the medians (target at most 1.03, bound 1.10). Run: python tests/benchmarks/bench_loop.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings, RunSettings
from feddg_bench.core.loop import federate
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.models.backbones import Backbone
from feddg_bench.runs.profile import synthetic_federation


def tiny() -> Backbone:
    """Return about 2,000 parameters: one strided convolution and a pooled linear layer."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    return Backbone(net, 32, 0, "half")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--per-client", type=int, default=57)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--augment", action="store_true", help="with the full Frame A chain")
    args = parser.parse_args()

    augment = {} if args.augment else {"brightness": 0, "contrast": 0, "saturation": 0, "hue": 0}
    settings = RunSettings.model_validate(
        {
            "method": "fedavg",
            "scenario": "synthetic",
            "data": {"image_size": args.size},
            "augment": augment,
            "partition": {"clients": args.clients},
            "federation": {"rounds": 10**6, "per_round": None},
            "train": {"lr": 1e-3},
        }
    )
    federation = synthetic_federation(args.clients, args.per_client, args.size, 7)
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
    clients = list(executor.worker.data.values())

    def plain_epoch() -> None:
        plain.train()
        for number, client in enumerate(clients):
            generator = torch_generator(0, "loader", number)
            for images, labels in client.batches(
                shuffle=True, augment=True, views=1, companions=None, generator=generator
            ):
                loss = F.cross_entropy(plain(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def federated_epoch() -> None:
        next(rounds)

    for work in (plain_epoch, federated_epoch):
        work()
    pairs = [(cpu(plain_epoch), cpu(federated_epoch)) for _ in range(args.repeats)]
    bare, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    steps = args.clients * -(-args.per_client // settings.train.batch_size)
    print(f"plain loop      {1000 * bare / steps:.3f} ms CPU a step")
    print(f"federated loop  {1000 * ours / steps:.3f} ms CPU a step")
    print(f"ratio           {ratio:.3f} (median of {args.repeats} pairs)")


def cpu(work: Callable[[], None]) -> float:
    """Return the CPU seconds of this process that ``work`` takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
