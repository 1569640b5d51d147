"""A client's training in each recipe, compared with a plain PyTorch loop."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

from feddg_bench.config.schema import Resources, RunSettings
from feddg_bench.core.messages import Task
from feddg_bench.data.federated import synthetic_federation
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.models.backbones import BACKBONES, NORMALISATIONS
from feddg_bench.models.networks import InPlaceReLU6
from feddg_bench.runs.request import Request
from feddg_bench.runs.setup import start
from tests.benchmarks.bench_augment import photographs
from tests.benchmarks.rows import Row, benchmark, interval, pairs

SETUPS = {
    "quick": ("digits4", 256, 6),
    "laptop": ("pacs", 64, 6),
    "desktop": ("pacs", 64, 6),
    "pardon": ("pacs", 8, 6),
}
"""Data set, images of the client, and repeats for each recipe."""
SIDE = 227
"""Pixels of an image's file, as in PACS."""


@benchmark
def recipes() -> Iterator[Row]:
    """A local epoch of FedAvg in recipes whose networks differ, over what most people write: files
    (JPEG, 227 px) in a DataLoader, torchvision's transforms and network, and Adam; and over the
    same in channels_last. The suite's images are decoded before, once in a run."""
    torch.set_num_threads(1)
    for recipe, (dataset, images, repeats) in SETUPS.items():
        settings, ours, size, classes = suite(recipe, dataset, images)
        with tempfile.TemporaryDirectory() as folder:
            pictures = Pictures(Path(folder), images, settings, size)
            works: dict[str, Callable[[], object]] = {
                "ours": ours,
                "plain": plain(settings, pictures, classes, torch.contiguous_format),
                "last": plain(settings, pictures, classes, torch.channels_last),
            }
            times = pairs(works, repeats)
        for other, words, most in (
            ("plain", "a plain loop", 1.0),
            ("last", "a plain loop in channels_last", None),
        ):
            middle, low, high = interval(times["ours"], times[other])
            what = f"recipe {recipe}, {settings.backbone.name} at {size} px, over {words}"
            yield Row(what, middle, most=most, why=f"interval {low:.2f} to {high:.2f}")


def suite(
    recipe: str, dataset: str, images: int
) -> tuple[RunSettings, Callable[[], object], int, int]:
    """Return the settings of a recipe, a client's local epoch, image size and number of classes."""
    given: dict[str, Any] = {
        "backbone.pretrained": False,
        "clients": 1,
        "per_round": None,
        "train.local_epochs": 1,
    }
    request = Request("fedavg", dataset=dataset, recipe=recipe, settings=given)
    plan = request.plan(check=False)[0]
    size, classes = plan.settings.data.image_size, len(plan.dataset.classes)
    federation = synthetic_federation(1, images, size, classes)
    run = start(plan, federation, SerialExecutor(), Resources(device="cpu"))
    (name,) = federation.clients
    worker = run.executor.worker  # type: ignore[attr-defined]
    task = Task(name, "fit", 1, run.server.weights, {})
    return plan.settings, lambda: worker.run(task), size, classes


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Files of images with torchvision's transforms for a recipe's augmentation."""

    def __init__(self, folder: Path, images: int, settings: RunSettings, size: int) -> None:
        self.paths = [folder / f"{number}.jpg" for number in range(images)]
        for path, pixels in zip(self.paths, photographs(images, SIDE), strict=True):
            Image.fromarray(pixels).save(path, quality=90)
        s = settings.augment
        crop = transforms.Resize((size, size))
        if s.crop_scale is not None:
            crop = transforms.RandomResizedCrop(size, scale=s.crop_scale, ratio=s.crop_ratio)
        self.transform = transforms.Compose(
            [
                crop,
                transforms.RandomHorizontalFlip(s.flip),
                transforms.ColorJitter(s.brightness, s.contrast, s.saturation, s.hue),
                transforms.RandomGrayscale(s.grayscale),
                transforms.ToTensor(),
                transforms.Normalize(*NORMALISATIONS["imagenet"]),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.open(self.paths[index]).convert("RGB")), index % 7


def plain(
    settings: RunSettings, pictures: Pictures, classes: int, layout: torch.memory_format
) -> Callable[[], None]:
    """Return an epoch of a plain loop, with the network as torchvision has it."""
    architecture, width = BACKBONES[settings.backbone.name], settings.backbone.projection
    net = architecture.features()
    for name, layer in list(net.named_modules()):
        if isinstance(layer, InPlaceReLU6):
            net.set_submodule(name, nn.ReLU6())
    features = architecture.num_features
    projection = [nn.Linear(features, width)] if width else []
    model = nn.Sequential(net, *projection, nn.Linear(width or features, classes))
    model.to(memory_format=layout).train()
    if settings.federation.bn == "frozen":
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
    received = copy.deepcopy(model.state_dict())

    def epoch() -> None:
        # Otherwise losses become so small that the CPU meets denormal numbers, and takes ten times
        # as long.
        model.load_state_dict(received)
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.train.lr)
        batch = settings.train.batch_size
        for images, labels in torch.utils.data.DataLoader(pictures, batch, shuffle=True):
            loss = F.cross_entropy(model(images.contiguous(memory_format=layout)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return epoch


@benchmark
def encoding() -> Iterator[Row]:
    """CPU time of `data encode` for 32 JPEG files of 227 px with EfficientNet-Lite0 and random
    weights at 224 px, over Pillow, a DataLoader and the same network in one batch."""
    from feddg_bench.config.schema import AugmentSettings, DataSettings, FeatureSettings
    from feddg_bench.data.feature_store import Encoding
    from feddg_bench.engine.encoders import build_encoder
    from feddg_bench.plugins import make_dataset
    from feddg_bench.runs.encode import encode_dataset

    torch.set_num_threads(1)
    size, count, repeats = 224, 32, 6
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for number, pixels in enumerate(photographs(count, SIDE)):
            path = folder / "data" / "ab"[number % 2] / "cd"[number // 2 % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=90)
        weights = folder / "weights.pt"
        torch.save(BACKBONES["efficientnet_lite0"].features().state_dict(), weights)
        dataset = make_dataset("folder", folder / "data")
        encoder = build_encoder("efficientnet_lite0", size, weights)
        features = FeatureSettings(encoder="efficientnet_lite0")
        settings = Encoding(features, DataSettings(image_size=size), AugmentSettings())
        files = [dataset.file(index) for index in range(count)]  # type: ignore[attr-defined]
        chain = transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor()])

        def ours() -> None:
            for store in (folder / "features").glob("*"):
                store.unlink()
            encode_dataset(dataset, settings, encoder, folder)

        class Files(torch.utils.data.Dataset[Tensor]):
            def __len__(self) -> int:
                return len(files)

            def __getitem__(self, index: int) -> Tensor:
                found: Tensor = chain(Image.open(files[index]).convert("RGB"))
                return found

        @torch.no_grad()
        def theirs() -> np.ndarray:
            batches = torch.utils.data.DataLoader(Files(), count)
            return torch.cat([encoder(images) for images in batches]).half().numpy()

        times = pairs({"ours": ours, "theirs": theirs}, repeats)
        middle, low, high = interval(times["ours"], times["theirs"])
        why = f"interval {low:.2f} to {high:.2f}"
        yield Row("`data encode`, over a plain loop", middle, 1.1, why=why)
        yield Row("`data encode`, an image", min(times["ours"]) / count * 1000, unit=" ms")
