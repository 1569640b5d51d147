"""The federated loop compared with a plain PyTorch loop and with pfl-research."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.schema import MethodSettings, RunSettings
from feddg_bench.core.loop import federate
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.data.federated import Federation, synthetic_federation
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.models.backbones import Backbone
from feddg_bench.models.networks import small_cnn
from tests.benchmarks.rows import Row, benchmark, interval, pairs

PEERS = Path(__file__).parents[2] / ".peers"
"""Folder in which `make peers` installs pfl-research, isolated from everything else."""
COLOURS = ("brightness", "contrast", "saturation", "hue", "grayscale", "flip")
UNCHANGED = {**dict.fromkeys(COLOURS, 0), "crop_scale": None}
REPEATS, LR, CLASSES = 15, 1e-3, 7
PATIENCE = 240
"""Seconds for Flower's six rounds, which take half a minute on an idle machine."""
WHY = "what remains are checks of replies, random streams of each task and nested modules"


def mlp() -> Backbone:
    """Return the hidden layer of an MLP 3072-32-7."""
    return Backbone(nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.ReLU()), 32, 0, "half")


def own(
    make: Callable[[], Backbone], federation: Federation, layer: dict[str, Any]
) -> tuple[Callable[[], object], SerialExecutor]:
    """Return a function for the suite's next round of FedAvg with all clients, and its executor."""
    settings = RunSettings.model_validate(
        {
            "method": "fedavg",
            "scenario": "synthetic",
            "data": {"image_size": federation.size},
            "partition": {"clients": len(federation.clients)},
            "federation": {"rounds": 10**6, "per_round": None},
            **layer,
        }
    )
    method = Method(
        MethodSettings(),
        backbone=make(),
        num_classes=federation.num_classes,
        train=settings.train,
    )
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
    next(rounds)  # the result before round 1
    return lambda: next(rounds), executor


class Plain(nn.Module):
    """A network that first maps images from [0, 1] to [-1, 1], like our backbones."""

    def __init__(self, body: nn.Module, width: int, size: int, classes: int = CLASSES) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, classes)
        self.register_buffer("two", torch.full((1, 3, size, size), 2.0), persistent=False)
        self.register_buffer("less", torch.full((1, 3, size, size), -1.0), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        mapped = torch.addcmul(cast(Tensor, self.less), images, cast(Tensor, self.two))
        logits: Tensor = self.head(self.body(mapped))
        return logits


Batches = Callable[[int], Iterator[tuple[Tensor, Tensor]]]


def plain_round(
    net: nn.Module, optimizer: torch.optim.Optimizer, clients: int, batches: Batches
) -> Callable[[], None]:
    """Return a round of FedAvg without a framework; weights are reset and averaged in place."""
    weights = [parameter.data for parameter in net.parameters()]
    received = [tensor.clone() for tensor in weights]
    mean = [torch.zeros_like(tensor) for tensor in weights]

    def go_on() -> None:
        net.train()
        torch._foreach_zero_(mean)
        for number in range(clients):
            torch._foreach_copy_(weights, received)
            optimizer.state.clear()
            for images, labels in batches(number):
                loss = F.cross_entropy(net(images), labels)
                optimizer.zero_grad()
                cast(None, loss.backward())  # type: ignore[no-untyped-call]
                optimizer.step()
            torch._foreach_add_(mean, weights, alpha=1 / clients)
        torch._foreach_copy_(received, mean)

    return go_on


def rows(what: str, times: dict[str, list[float]], name: str, over: str, **target: Any) -> Row:
    """Return the CPU-time ratio of two works; the row's name ends with the median's interval."""
    ratio, low, high = interval(times[name], times[over])
    return Row(f"{what} (interval {low:.3f} to {high:.3f})", ratio, **target)


@benchmark
def loop() -> Iterator[Row]:
    """A FedAvg round of 50 clients with 5 batches of 10 random images at 32 px, an MLP 3072-32-7
    and SGD, so that overhead dominates: CPU time relative to a plain loop with its own batches, to
    pfl-research 0.6 (`make peers`), and to a loop that keeps a model and an optimizer per client,
    as PFLlib does; medians of 15 alternating rounds with 97 % intervals."""
    clients, images, size, batch = 50, 50, 32, 10
    federation = synthetic_federation(clients, images, size, CLASSES)
    train = {"lr": LR, "optimizer": "sgd", "batch_size": batch, "local_epochs": 1}
    ours, _ = own(mlp, federation, {"augment": UNCHANGED, "train": train})
    pixels, labels = map(torch.from_numpy, (federation.images, federation.labels))
    index = [torch.from_numpy(part) for part in federation.clients.values()]
    draw = torch.Generator()

    def batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        draw.manual_seed(number)
        for part in torch.randperm(images, generator=draw).split(batch):
            chosen = index[number][part]
            floats = pixels.index_select(0, chosen).permute(0, 3, 1, 2).float().div_(255)
            yield floats, labels.index_select(0, chosen)

    net = Plain(mlp().net, 32, size)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, fused=True)
    works = {"plain": plain_round(net, optimizer, clients, batches), "ours": ours}
    peer = pfl_round(Plain(mlp().net, 32, size), pixels, labels, index, batch)
    works |= {"pfl": peer} if peer else {}
    works["pfllib"] = pfllib_round(Plain(mlp().net, 32, size), pixels, labels, index, batch)
    times = pairs(works, REPEATS)
    what = "a round of 50 x 5 small steps, over"
    yield rows(f"{what} a plain PyTorch loop", times, "ours", "plain", most=1.15, why=WHY)
    yield rows("a loop in the style of PFLlib over the plain loop", times, "pfllib", "plain")
    if peer is None:
        yield Row(f"{what} pfl-research 0.6", "not installed (`make peers`)", most=1.0)
    else:
        yield rows(f"{what} pfl-research 0.6", times, "ours", "pfl", most=1.0, why=WHY)
        yield rows("pfl-research 0.6 over the plain loop", times, "pfl", "plain")


@benchmark
def flower() -> Iterator[Row]:
    """The round of the part "Loop" in Flower's simulation with one actor of one core, in another
    process: seconds of a round by the clock, without start-up, over those of ours."""
    what, python = "Flower's simulation, a round over ours", PEERS / "flower" / "bin" / "python"
    if not python.exists():
        yield Row(what, "not installed (`make peers`)")
        return
    clients, images, size, batch = 50, 50, 32, 10
    federation = synthetic_federation(clients, images, size, CLASSES)
    train = {"lr": LR, "optimizer": "sgd", "batch_size": batch, "local_epochs": 1}
    ours, _ = own(mlp, federation, {"augment": UNCHANGED, "train": train})
    ours()
    started = time.perf_counter()
    for _ in range(5):
        ours()
    seconds = (time.perf_counter() - started) / 5
    script = str(Path(__file__).with_name("flower.py"))
    try:
        done = subprocess.run(
            [python, script, "6"], check=True, stdout=subprocess.PIPE, text=True, timeout=PATIENCE
        )
    except subprocess.SubprocessError:  # on a busy machine its Ray gives up starting after 30 s
        yield Row(what, "it did not finish", why="Ray gives up starting on a busy machine")
        return
    theirs = float(done.stdout.split()[-1])
    yield Row(what, theirs / seconds, why=f"{theirs:.2f} s and {seconds:.2f} s")


@benchmark
def digits() -> Iterator[Row]:
    """A FedAvg round of 10 clients with 72 images in recipe `quick` of Digits4, relative to a plain
    loop with the same augmented batches; median of 15 alternating rounds with its interval."""
    clients, size, classes = 10, 32, 10
    federation = synthetic_federation(clients, 72, size, classes)
    train = {"lr": 0.002, "batch_size": 32, "local_epochs": 2}
    augment = {"flip": 0.0, "hue": 0.1, "grayscale": 0.1}

    def make() -> Backbone:
        return Backbone(small_cnn(), 128, 0, "half")

    ours, executor = own(make, federation, {"augment": augment, "train": train})
    held = [*executor.worker.data.values()]

    def batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(2):
            given = {"shuffle": True, "augment": True, "views": 1, "companions": None}
            draw = torch_generator(0, "loader", epoch, number)
            for batch in held[number].batches(**given, generator=draw):  # type: ignore[arg-type]
                yield batch[0], batch[1]

    net = Plain(small_cnn(), 128, size, classes).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.002, fused=True)
    works = {"plain": plain_round(net, optimizer, clients, batches), "ours": ours}
    times = pairs(works, REPEATS)
    yield rows("a round of Digits4 `quick`, over a plain loop", times, "ours", "plain", most=1.02)


def pfllib_round(
    net: Plain, pixels: Tensor, labels: Tensor, index: Sequence[Tensor], batch: int
) -> Callable[[], None]:
    """Return a round as PFLlib writes it: a model, an optimizer and a DataLoader for each client.

    Clients copy the global model tensor by tensor, and the server adds up theirs.
    """
    floats = pixels.permute(0, 3, 1, 2).float().div(255).contiguous()
    sets = [[(floats[i], labels[i]) for i in rows.tolist()] for rows in index]
    models = [copy.deepcopy(net) for _ in sets]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]

    def go_on() -> None:
        for model, optimizer, held in zip(models, optimizers, sets, strict=True):
            for own_one, theirs in zip(model.parameters(), net.parameters(), strict=True):
                own_one.data = theirs.data.clone()
            model.train()
            for images, targets in torch.utils.data.DataLoader(held, batch, shuffle=True):  # type: ignore[arg-type]
                loss = F.cross_entropy(model(images), targets)
                optimizer.zero_grad()
                cast(None, loss.backward())  # type: ignore[no-untyped-call]
                optimizer.step()
        for total in net.parameters():
            total.data.zero_()
        for model in models:
            for total, own_one in zip(net.parameters(), model.parameters(), strict=True):
                total.data += own_one.data.clone() / len(models)

    return go_on


def pfl_round(
    net: Plain, pixels: Tensor, labels: Tensor, index: Sequence[Tensor], batch: int
) -> Callable[[], object] | None:
    """Return the next round of pfl-research's FedAvg simulation; ``None`` if not installed."""
    sys.path.append(str(PEERS))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = ("aggregate.simulate", "algorithm", "algorithm.federated_averaging")
            simulate, algorithm, averaging = (importlib.import_module(f"pfl.{n}") for n in names)
            data, sampling, hyper, model, metrics = (
                importlib.import_module(f"pfl.{n}")
                for n in ("data", "data.sampling", "hyperparam", "model.pytorch", "metrics")
            )
    except ImportError:
        return None
    floats = pixels.permute(0, 3, 1, 2).float().div(255).contiguous()

    class Net(Plain):
        def loss(self, images: Tensor, targets: Tensor, eval: bool = False) -> Tensor:
            del eval
            return F.cross_entropy(self(images), targets)

        @torch.no_grad()
        def metrics(self, images: Tensor, targets: Tensor, eval: bool = False) -> Any:
            value = float(self.loss(images, targets, eval)) * len(targets)
            return {"loss": metrics.Weighted(value, len(targets))}

    net.__class__ = Net

    def user(name: str) -> Any:
        rows = index[int(name)]
        return data.dataset.Dataset(raw_data=[floats[rows], labels[rows]], user_id=str(name))

    sampler = sampling.get_user_sampler("random", list(range(len(index))))
    backend = simulate.SimulatedBackend(
        training_data=data.federated_dataset.FederatedDataset(user, sampler), val_data=None
    )
    central = model.PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    settings = algorithm.NNAlgorithmParams(
        central_num_iterations=10**6,
        evaluation_frequency=10**6,
        train_cohort_size=len(index),
        val_cohort_size=None,
    )
    local = hyper.NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=LR, local_batch_size=batch
    )
    steps = averaging.FederatedAveraging()
    number = iter(range(1, 10**6))

    def go_on() -> None:
        contexts, _, _ = steps.get_next_central_contexts(central, next(number), settings, local)
        for context in contexts:
            found, measured = backend.gather_results(
                model=central, training_algorithm=steps, central_context=context
            )
            steps.process_aggregated_statistics(context, measured, central, found)

    return go_on
