"""Training and evaluation in the PACS setup, and costs of methods relative to FedAvg."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from feddg_bench.common.portable import cpu_flags
from feddg_bench.config.layers import merge
from feddg_bench.config.schema import Resources, RunSettings
from feddg_bench.core.loop import RoundResult
from feddg_bench.data.augment import to_float
from feddg_bench.data.federated import synthetic_federation
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.models import backbones
from feddg_bench.models.networks import InPlaceReLU6
from feddg_bench.runs.request import Request
from feddg_bench.runs.setup import Run, start
from feddg_methods.shared import vgg
from tests.benchmarks.rows import (
    Row,
    benchmark,
    cpu,
    interval,
    pacs_run,
    pairs,
    ratios,
    rounds,
)

COSTS: dict[str, tuple[float | None, str]] = {
    "afl": (1.45, "each client measures the received model first: 1 + 1/3"),
    "ccst": (2.0, "originals and restyled images"),
    "copa": (1.3, "batch-instance normalisation as one scale and shift"),
    "fedadg": (1.3, "generator and discriminator on top"),
    "fedccrl": (3.1, "three views, two of them by AugMix"),
    "feddg": (None, "second derivatives of the whole network"),
    "feddg_ga": (1.4, "each client measures two models"),
    "fediir": (1.5, "each client sends gradients of the head first"),
    "fedsam": (2.1, "forward and backward twice"),
    "fpl": (1.3, "a contrast with prototypes"),
    "groupdro": (1.45, "each client measures the received model first: 1 + 1/3"),
    "moon": (1.85, "forward through two more models: 1 + 2/3"),
    "pardon": (2.3, "originals and restyled images, a triplet loss"),
}
"""Maximum CPU time of a round relative to FedAvg, and the reason."""
TOGETHER = 5
"""Number of methods that alternate with one FedAvg; more would let slow minutes bias a ratio."""


@benchmark
def evaluation() -> Iterator[Row]:
    """256 images: torchvision's network on all at once; the same network on parts whose maps stay
    in the cache, with ReLU6 in place; and the latter with evaluation.fuse_batch_norm."""
    run = pacs_run("fedavg", clients=6)
    fused = pacs_run("fedavg", clients=6, settings={"evaluation.fuse_batch_norm": True})
    index = torch.arange(256).numpy()
    worker, plain = run.executor.worker, pacs_run("fedavg").method  # type: ignore[attr-defined]
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, InPlaceReLU6):
            plain.set_submodule(name, nn.ReLU6())
    plain.to(memory_format=torch.channels_last).eval()
    parts = backbones.PART_PIXELS

    @torch.no_grad()
    def whole() -> None:
        backbones.PART_PIXELS = 2**62
        plain(to_float(worker.bank.take(torch.from_numpy(index))[0]))
        backbones.PART_PIXELS = parts

    works = {
        "plain": whole,
        "parts": lambda: worker.evaluate(run.server.weights, index),
        "fused": lambda: fused.executor.worker.evaluate(run.server.weights, index),  # type: ignore[attr-defined]
    }
    found = ratios(works, 5)
    yield Row("evaluation, the same bits", found["parts"])
    yield Row("evaluation, fused", found["fused"], why="the rest: convolutions and ReLU6")


@benchmark
def folding() -> Iterator[Row]:
    """A FedAvg round with torchvision's network; the same with ReLU6 in place (the same bits); and
    the latter with train.fold_batch_norm=auto."""
    runs = [
        pacs_run("fedavg", settings={"train.fold_batch_norm": f}) for f in (False, False, "auto")
    ]
    for name, layer in list(runs[0].method.named_modules()):
        if isinstance(layer, InPlaceReLU6):
            runs[0].method.set_submodule(name, nn.ReLU6())
    found = ratios(dict(zip(("plain", "in place", "folded"), map(step, runs), strict=True)), 5)
    yield Row("training, the same bits", found["in place"])
    why = "what remains are convolutions and ReLU6"
    yield Row("training, folded", found["folded"], most=0.9, why=why)


@benchmark
def depthwise_sums() -> Iterator[Row]:
    """A round of two clients of recipe `laptop` (EfficientNet-Lite0, 64 px): with
    train.depthwise_sums, relative to without. It helps CPUs with AVX2 at small sizes (0.65 at 64
    px), and hardly those with AVX-512 (at 96 px 0.9 to 1)."""
    for method in ("fedavg", "pardon", "fedccrl"):
        works = {
            str(on): step(_own_run(method, "laptop", {"train": {"depthwise_sums": on}})[1])
            for on in (False, True)
        }
        found = ratios(works, 3)
        yield Row(f"training, depthwise sums, {method}", found["True"])


@benchmark
def bf16() -> Iterator[Row]:
    """A FedAvg round with train.precision=bf16-mixed relative to one in float32, both with
    train.fold_batch_norm=auto: one client of 32 images in the setup "PACS", and two clients of
    recipe `desktop` with train.depthwise_sums; medians of alternating rounds. bf16 can cost
    accuracy (docs/explanation/performance.md), so no recipe for CPUs uses it."""
    if "amx_bf16" not in cpu_flags():
        yield Row("training in bf16, over float32", "this CPU has no AMX: bf16 is no faster")
        return
    torch.set_num_threads(1)

    def small(precision: str) -> Callable[[], RoundResult]:
        layer = {"train.precision": precision, "train.fold_batch_norm": "auto"}
        return step(pacs_run("fedavg", clients=1, images=32, settings=layer))

    def desktop(precision: str) -> Callable[[], RoundResult]:
        layer = {"precision": precision, "fold_batch_norm": "auto", "depthwise_sums": True}
        return step(_own_run("fedavg", "desktop", {"train": layer})[1])

    for what, make, repeats in (
        ("MobileNetV2 at 128 px", small, 21),
        ("EfficientNet-Lite0 at 96 px", desktop, 11),
    ):
        times = pairs({name: make(name) for name in ("bf16-mixed", "32-true")}, repeats)
        middle, low, high = interval(times["bf16-mixed"], times["32-true"])
        why = f"interval {low:.2f} to {high:.2f}"
        yield Row(f"training in bf16, over float32, {what}", middle, most=0.87, why=why)


@benchmark
def methods() -> Iterator[Row]:
    """CPU time of a round of two clients relative to FedAvg, of the methods that compute more than
    it: median of seven alternating rounds with its interval, one epoch of 32 images per client.
    PARDON and CCST restyle colours; COPA has hyper.affine_norm."""
    known = sorted(COSTS)
    affine, once = {"copa": {"hyper.affine_norm": True}}, {"train.local_epochs": 1}
    for first in range(0, len(known), TOGETHER):
        some = known[first : first + TOGETHER]
        works = {
            name: step(pacs_run(name, images=32, settings=once | affine.get(name, {})))
            for name in ("fedavg", *some)
        }
        times = pairs(works, 7)
        for name in some:
            most, why = COSTS[name]
            middle, low, high = interval(times[name], times["fedavg"])
            why += f"; interval {low:.2f} to {high:.2f}"
            yield Row(f"a round of {name}", middle, most=most, why=why)


@benchmark
def transfers() -> Iterator[Row]:
    """CPU time of PARDON's local training with ResNet-50 at 224 px, restyled by VGG-19 in each
    batch (online), or once per run (cached), which is not included; random weights, 8 images,
    medians of three alternating rounds."""
    pair = {"encoder": vgg._encoder, "decoder": vgg._decoder}
    architecture = vgg.ARCHITECTURES["vgg19"]
    tensors = {
        f"{part}.{name}": tensor
        for part, make in pair.items()
        for name, tensor in make(architecture).state_dict().items()
    }
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "vgg19.safetensors")
        save_file(tensors, weights)
        works = {}
        for transfer in ("online", "cached"):
            settings = {
                "backbone": {"name": "resnet50", "pretrained": False},
                "data.image_size": 224,
                "hyper": {"style": "vgg19", "style_weights": [weights], "transfer": transfer},
                "train.local_epochs": 1,
            }
            works[transfer] = step(pacs_run("pardon", clients=1, images=8, settings=settings))
        times = pairs(works, 3)
    ratio = statistics.median(map(truediv, times["cached"], times["online"]))
    online = statistics.median(times["online"]) / 8
    yield Row("PARDON, transfer=cached, over online", ratio)
    yield Row("PARDON, transfer=online, an image", online, unit=" s")


def step(run: Any) -> Callable[[], RoundResult]:
    """Return a function that runs the next round; the rounds before the first are already run."""
    each = rounds(run)
    next(each)
    return lambda: next(each)


EIGHT = ("fedavg", "fedprox", "fedsr", "fedgma", "feddg_ga", "fpl", "ccst", "pardon")
IMAGES = {"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929}
"""Number of PACS images by domain."""
SEEDS, SCHEMES, CORES, CLIENT = 3, 4, 2, 57


@benchmark
def sweep() -> Iterator[Row]:
    """Estimated time of eight methods, LTDO's four scenarios and three seeds on two cores, from the
    CPU time of a round of two clients and of an evaluation of their images (random images, random
    weights). It assumes that each of two busy cores is as fast as one alone, and leaves out
    decoding and start-up."""
    hours = {name: _seconds(name, "laptop") * SEEDS * SCHEMES / CORES / 3600 for name in EIGHT}
    parts = ", ".join(f"{name} {spent:.1f}" for name, spent in hours.items())
    yield Row(f"a sweep of PACS, recipe laptop: {parts}", sum(hours.values()), unit=" hours")


def _own_run(method: str, recipe: str, settings: dict[str, Any]) -> tuple[RunSettings, Run]:
    """Return the settings of a recipe on PACS, and a run of two clients of it."""
    small = {"partition": {"clients": 2}, "federation": {"per_round": None}}
    own = merge(small, {"backbone": {"pretrained": False}}, settings)
    plan, few = (
        Request(method, dataset="pacs", recipe=recipe, scenario="cs-a-p", settings=given).plan(
            check=False
        )[0]
        for given in (settings, own)
    )
    federation = synthetic_federation(2, CLIENT, few.settings.data.image_size, 7)
    return plan.settings, start(few, federation, SerialExecutor(), Resources(device="cpu"))


def _seconds(method: str, recipe: str) -> float:
    """Return the estimated CPU seconds of one run."""
    settings, run = _own_run(method, recipe, {})
    go_on = step(run)
    go_on()
    index = torch.arange(2 * CLIENT).numpy()
    worker = run.executor.worker  # type: ignore[attr-defined]
    worker.evaluate(run.server.weights, index)
    training = min(cpu(go_on) for _ in range(2)) / 2
    image = cpu(lambda: worker.evaluate(run.server.weights, index)) / len(index)
    # In each scheme two domains are val and test, and a share of the other two is id_val.
    measured = sum(IMAGES.values()) * (0.5 + 0.5 * settings.data.id_val_fraction)
    last = settings.federation.rounds
    evaluation = settings.evaluation
    due = set(range(evaluation.start, last)) & set(range(0, last, evaluation.every))
    times = len(due | {last})
    return last * (settings.federation.per_round or 100) * training + times * measured * image
