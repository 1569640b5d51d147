"""CPU time of augmentation per image, beside torchvision's chain on Pillow images.

Run it by hand: ``python tests/benchmarks/bench_augment.py --size 128``. Every repetition measures
all variants, one after the other, so that a busy machine slows them alike; times are medians of
process CPU time on one thread. Ours gather their images from a memory-mapped store by index;
torchvision's start from Pillow images in memory, decoded and resized already.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from feddg_bench.config.schema import AugmentSettings
from feddg_bench.data.augment import Augment, Images, to_float
from feddg_bench.data.client_images import ImageBank
from feddg_bench.data.federated import Federation
from feddg_bench.engine.worker import keep_freed_memory

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photographs(number: int, size: int) -> np.ndarray:
    """Return uint8 images [N, S, S, 3] that are as smooth as photographs."""
    coarse = np.random.default_rng(0).integers(0, 256, (number, 9, 9, 3), dtype=np.uint8)
    bicubic = Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(c).resize((size, size), bicubic)) for c in coarse])


def pillow_chain(size: int, *, colours: bool) -> transforms.Compose:
    """Return the per-image chain of FedDG benchmarks, with its jitter if ``colours``."""
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
    """Return normalisation in one pass, whole images of constants being faster than broadcasts."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1).expand(1, 3, size, size) for v in (MEAN, STD))
    scale, shift = (v.contiguous(memory_format=layout) for v in (1 / std, -mean / std))
    return lambda images: torch.addcmul(shift, images, scale)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=128, help="side of the images in pixels")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=512, help="images in the store")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()

    torch.set_num_threads(1)
    keep_freed_memory()  # as every worker does
    images = photographs(args.images, args.size)
    pictures = [Image.fromarray(image) for image in images]
    generator = torch.Generator().manual_seed(0)
    order = np.random.default_rng(0)
    crop = Augment(AugmentSettings(brightness=0, contrast=0, saturation=0, hue=0, grayscale=0))
    frame_a = Augment(AugmentSettings())
    normalise_crop = normaliser(args.size, torch.channels_last)
    normalise_frame_a = normaliser(args.size, torch.contiguous_format)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        path.write_bytes(images.tobytes())
        labels = np.zeros(args.images, dtype=np.int64)
        bank = ImageBank(Federation(path, args.size, labels, {}, (), 1), torch.device("cpu"))

        def chosen() -> torch.Tensor:
            return torch.from_numpy(order.integers(0, args.images, args.batch))

        def gather() -> torch.Tensor:
            return bank.take(chosen())[0]

        def look() -> Images:
            return bank.look(chosen())[0]

        def pillow(chain: transforms.Compose) -> torch.Tensor:
            chosen = order.integers(0, args.images, args.batch)
            return torch.stack([chain(pictures[i]) for i in chosen])

        pillow_crop = pillow_chain(args.size, colours=False)
        pillow_frame_a = pillow_chain(args.size, colours=True)
        variants: dict[str, Callable[[], torch.Tensor]] = {
            "ours: gather, to float": lambda: to_float(gather()),
            "ours: crop, flip": lambda: crop(look(), generator),
            "ours: crop, flip, normalise": lambda: normalise_crop(crop(look(), generator)),
            "ours: Frame A": lambda: frame_a(look(), generator),
            "ours: Frame A, normalise": lambda: normalise_frame_a(frame_a(look(), generator)),
            "Pillow: crop, flip, normalise": lambda: pillow(pillow_crop),
            "Pillow: Frame A, normalise": lambda: pillow(pillow_frame_a),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for repeat in range(args.repeats + 2):
            for name, variant in variants.items():
                start = time.process_time()
                variant()
                if repeat >= 2:  # the first two warm up
                    times[name].append((time.process_time() - start) / args.batch * 1e3)

    print(f"{args.size} px, batches of {args.batch}, CPU ms per image: median (least)")
    for name, values in times.items():
        print(f"{name:32s} {statistics.median(values):.4f} ({min(values):.4f})")
    for chain in ("crop, flip, normalise", "Frame A, normalise"):
        pairs = zip(times[f"Pillow: {chain}"], times[f"ours: {chain}"], strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        print(f"{chain}: {ratio:.1f} times less CPU time than Pillow")


if __name__ == "__main__":
    main()
