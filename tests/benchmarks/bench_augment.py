"""CPU time of augmentation, compared with torchvision's transforms on Pillow images."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from feddg_bench.config.schema import AugmentSettings
from feddg_bench.data.augment import Augment, Images
from feddg_bench.data.client_images import ImageBank
from feddg_bench.data.federated import Federation
from feddg_bench.engine.worker import keep_freed_memory
from tests.benchmarks.rows import Row, benchmark, ratios

SIZE, BATCH, IMAGES = 128, 32, 512
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photographs(number: int, size: int) -> np.ndarray:
    """Return uint8 images [N, S, S, 3] with the smoothness of photographs."""
    coarse = np.random.default_rng(0).integers(0, 256, (number, 9, 9, 3), dtype=np.uint8)
    bicubic = Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(c).resize((size, size), bicubic)) for c in coarse])


def pillow_chain(size: int, *, colours: bool) -> transforms.Compose:
    """Return the per-image transforms of FedDG benchmarks, with their jitter if ``colours``."""
    jitter = [transforms.ColorJitter(0.3, 0.3, 0.3, 0.3), transforms.RandomGrayscale(0.1)]
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(0.7, 1.0)),
            transforms.RandomHorizontalFlip(),
            *(jitter if colours else []),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def normaliser(size: int, layout: torch.memory_format) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return normalisation in one pass; full-size constants are faster than broadcasts."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1).expand(1, 3, size, size) for v in (MEAN, STD))
    scale, shift = (v.contiguous(memory_format=layout) for v in (1 / std, -mean / std))
    return lambda images: torch.addcmul(shift, images, scale)


@benchmark
def augmentation() -> Iterator[Row]:
    """Batches of 32 images at 128 px from a memory-mapped store, relative to torchvision's chain on
    Pillow images in memory; both normalise."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as in every worker
    images = photographs(IMAGES, SIZE)
    pictures = [Image.fromarray(image) for image in images]
    generator = torch.Generator().manual_seed(0)
    order = np.random.default_rng(0)
    crop = Augment(AugmentSettings(brightness=0, contrast=0, saturation=0, hue=0, grayscale=0))
    frame_a = Augment(AugmentSettings())
    normalise_crop = normaliser(SIZE, torch.channels_last)
    normalise_frame_a = normaliser(SIZE, torch.contiguous_format)
    pillow_crop = pillow_chain(SIZE, colours=False)
    pillow_frame_a = pillow_chain(SIZE, colours=True)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        path.write_bytes(images.tobytes())
        labels = np.zeros(IMAGES, dtype=np.int64)
        bank = ImageBank(Federation(path, SIZE, labels, {}, (), 1), torch.device("cpu"))

        def look() -> Images:
            return bank.look(torch.from_numpy(order.integers(0, IMAGES, BATCH)))[0]

        def pillow(chain: transforms.Compose) -> torch.Tensor:
            return torch.stack([chain(pictures[i]) for i in order.integers(0, IMAGES, BATCH)])

        cropped = {
            "theirs": lambda: pillow(pillow_crop),
            "ours": lambda: normalise_crop(crop(look(), generator)),
        }
        whole = {
            "theirs": lambda: pillow(pillow_frame_a),
            "ours": lambda: normalise_frame_a(frame_a(look(), generator)),
        }
        yield Row("crop and flip, over Pillow", ratios(cropped, 30)["ours"])
        yield Row("PARDON's augmentation, over Pillow", ratios(whole, 30)["ours"])
