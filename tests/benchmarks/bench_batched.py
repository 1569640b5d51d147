"""Cost of clients that train together, compared with clients that train one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from feddg_bench.config.schema import Resources
from feddg_bench.core.messages import Task, Weights
from feddg_bench.data.federated import synthetic_federation
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.models.networks import small_cnn
from feddg_bench.runs.request import Request
from feddg_bench.runs.setup import Run, RunData, open_run, start
from tests.benchmarks.rows import Row, benchmark, ratios

CLIENTS = 10
FRAMES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "digits4, 37 images, batches of 32 and 5": ("digits4", 37, {}),
    "digits4, 16 images, batches of 8": ("digits4", 16, {"train": {"batch_size": 8}}),
    "RMNIST, 128 images, batches of 64": ("rmnist", 128, {}),
}
"""Data set (with recipe `quick`), images per client, settings."""


def local_training(
    dataset: str, images: int, settings: dict[str, Any], clients: str
) -> Callable[[], object]:
    """Return a function that runs a round of FedAvg's local training in this process."""
    given = {**settings, "partition": {"clients": CLIENTS}, "engine": {"clients": clients}}
    request = Request("fedavg", dataset=dataset, recipe="quick", settings=given)
    plan = request.plan(check=False)[0]
    federation = synthetic_federation(CLIENTS, images, plan.settings.data.image_size, 10)
    run = start(plan, federation, SerialExecutor(), Resources(device="cpu"))

    def work() -> None:
        tasks = (Task(name, "fit", 1, run.server.weights, {}) for name in run.server.clients)
        deque(run.executor.map(tasks), maxlen=0)

    return work


@benchmark
def batched() -> Iterator[Row]:
    """Local training of one FedAvg round with `small_cnn` in recipe `quick`: the 10 clients of a
    worker together, relative to one by one; median of 9."""
    for name, frame in FRAMES.items():
        works = {clients: local_training(*frame, clients) for clients in ("exact", "batched")}
        found = ratios(works, 9)["batched"]
        yield Row(f"clients together: {name}", found, most=0.55, why="see the next table")


@benchmark
def batched_alone() -> Iterator[Row]:
    """Forward and backward pass of one batch for each of 10 copies of `small_cnn`, without other
    work: `torch.func.vmap` relative to one by one. This bounds the gain of batched clients."""
    for images, size in ((5, 32), (8, 32), (32, 32), (64, 28)):
        ratio = ratios(one_step(images, size), 9)["batched"]
        yield Row(f"PyTorch alone: batches of {images}, {size} px", ratio)


@benchmark
def batched_agreement() -> Iterator[Row]:
    """Relative distance of the mean update of 10 batched FedAvg clients on Digits4, recipe `quick`,
    from that of sequential clients: the largest of rounds 1 to 6, each starting from the weights of
    sequential clients. Last bits: sequential clients whose weights were moved to a neighbouring
    float, three draws. Rounding alone has no smaller effect."""
    exact, batched = (digits4(clients) for clients in ("exact", "batched"))
    weights = exact.server.weights
    names = exact.server.clients[:CLIENTS]
    draws = torch.Generator().manual_seed(0)
    together, last_bits = [], []
    for number in range(1, 7):
        reached = mean_weights(exact, names, number, weights)
        length = distance(reached, weights)
        together.append(distance(mean_weights(batched, names, number, weights), reached) / length)
        for _ in range(3):
            near = {name: neighbour(value, draws) for name, value in weights.items()}
            last_bits.append(distance(mean_weights(exact, names, number, near), reached) / length)
        weights = {name: value.float() for name, value in reached.items()}
    why = "rounding alone does more: the next row"
    yield Row("a round's update, clients together", max(together), most=0.001, why=why)
    yield Row("a round's update, the last bits of its weights changed", max(last_bits))


def digits4(clients: str) -> Run:
    """Return a run of FedAvg on Digits4 with clients ``exact`` or ``batched``."""
    given = {"engine": {"clients": clients}}
    (plan,) = Request(
        "fedavg", dataset="digits4", recipe="quick", scenario="ip-o-c", settings=given
    ).plan(check=False)
    data = RunData(None)
    return open_run(plan, data, SerialExecutor(), Resources(device="cpu"))


def mean_weights(run: Run, names: Sequence[str], number: int, weights: Weights) -> Weights:
    """Return the mean of the clients' new weights in a round, in double precision."""
    tasks = (Task(name, "fit", number, weights, {}) for name in names)
    replies = [reply.value.weights for reply in run.executor.map(tasks)]
    return {n: torch.stack([r[n].double() for r in replies]).mean(dim=0) for n in weights}


def distance(one: Weights, other: Weights) -> float:
    """Return the Euclidean distance between two sets of weights."""
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


def neighbour(value: Tensor, draws: torch.Generator) -> Tensor:
    """Move each number up or down to the adjacent float."""
    up = torch.rand(value.shape, generator=draws) < 0.5
    return value.nextafter(torch.where(up, torch.inf, -torch.inf))


def one_step(images: int, size: int) -> dict[str, Callable[[], object]]:
    """Return a step of 10 clients in PyTorch alone, one by one and together."""
    net = nn.Sequential(small_cnn(), nn.Linear(128, 10)).to(memory_format=torch.channels_last)
    weights = dict(net.named_parameters())
    stacks = {n: w.detach().expand(CLIENTS, *w.shape).contiguous() for n, w in weights.items()}
    leaves = [stack.requires_grad_() for stack in stacks.values()]
    batches = torch.rand(CLIENTS, images, 3, size, size)
    each = [batch.to(memory_format=torch.channels_last) for batch in batches]
    labels = torch.randint(10, (CLIENTS, images))

    def exact() -> None:
        for batch, label in zip(each, labels, strict=True):
            torch.autograd.grad(F.cross_entropy(net(batch), label), list(weights.values()))

    def loss(weights: dict[str, Tensor], batch: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (batch,)), label)

    def batched() -> None:
        torch.autograd.grad(vmap(loss)(stacks, batches, labels).sum(), leaves)

    return {"exact": exact, "batched": batched}
