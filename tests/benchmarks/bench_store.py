"""The decoded store: how fast it is built and read, and what a reader keeps in memory.

Measures on a part of 200,000 images and prints what the whole would take. The images are JPEGs of
256 x 256 pixels, few of them under many names, so that their bytes come from memory: what is
measured is decoding and writing. Reading takes batches of 32 in random order, first from the disk,
then from the file cache. Then a small network trains on an eighth of the images and on all of them.
The memory is what a process cannot give back, without the file cache.
Run: python tests/benchmarks/bench_store.py [--images 1000] [--size 224] [--processes 1,2]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from feddg_bench.data.image_folders import ImageFolderDataset

if TYPE_CHECKING:
    from feddg_bench.data.store import Store

WHOLE = 200_000
BATCH = 32
DISTINCT = 64


class Made(ImageFolderDataset):
    """Two domains of two classes."""

    name = "made"
    title = "Made"
    domains = ("day", "night")
    letters: ClassVar[Mapping[str, str]] = {"day": "d", "night": "n"}
    classes = ("disc", "ring")
    licence = "none"
    source = "made by this script"


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        print(read(Path(sys.argv[2]), int(sys.argv[3])))
        return
    if sys.argv[1:2] == ["--train"]:
        print(train(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
        return
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--processes", default=",".join(map(str, dict.fromkeys((1, 2, cores)))))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), chosen.images, chosen.size, chosen.processes)


def measure(folder: Path, images: int, size: int, processes: str) -> None:
    from feddg_bench.data.store import open_store

    make_images(folder / "images", images)
    whole_gib = WHOLE * size * size * 3 / 2**30
    print(f"{images:,} images at {size} px, {images * size * size * 3 / 2**30:.2f} GiB")
    print(f"the whole: {WHOLE:,} images, {whole_gib:.1f} GiB and a journal of 12.2 MiB meanwhile")
    for number in map(int, processes.split(",")):
        started, work = time.perf_counter(), cpu_seconds()
        cache = folder / f"cache{number}"
        store = open_store(Made(folder / "images"), size, cache, processes=number)
        rate = images / (time.perf_counter() - started)
        work = 1000 * (cpu_seconds() - work) / images
        who = "in this process, a thread a core" if number == 1 else f"{number} processes"
        print(
            f"build, {who}: {rate:.0f} images/s, {work:.1f} ms of CPU an image; "
            f"the whole in {WHOLE / rate / 60:.0f} min"
        )
    for state in ("cold", "warm"):
        descriptor = os.open(store.images.filename, os.O_RDONLY)
        if state == "cold":
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        print(f"read in random order, file cache {state}: {apart('--read', store, size)}")
    for part in (images // 8, images):
        gib = part * size * size * 3 / 2**30
        print(f"train on {part:,} images, {gib:.2f} GiB: {apart('--train', store, size, part)}")


def apart(task: str, store: Store, *numbers: int) -> str:
    """Return what this script prints for one task, in a process of its own."""
    command = [sys.executable, __file__, task, str(store.images.filename), *map(str, numbers)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make_images(folder: Path, images: int) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    originals = []
    folders = [folder / d / c for d in Made.domains for c in Made.classes]
    for inside in folders:
        inside.mkdir(parents=True)
    for i in range(DISTINCT):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
        fine = np.asarray(coarse.resize((256, 256))) / 2 + rng.integers(0, 64, (256, 256, 3))
        originals.append(folder / f"original_{i}.jpg")
        Image.fromarray(fine.astype(np.uint8)).save(originals[-1], quality=90)
    for i in range(images):
        os.link(originals[i % DISTINCT], folders[i % len(folders)] / f"{i:07}.jpg")


def read(path: Path, size: int) -> str:
    """Read every image once, and tell rate and memory."""
    before = anonymous_mib()
    images = np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, size, size, 3)
    order = np.random.default_rng(0).permutation(len(images))
    most = before
    started = time.perf_counter()
    for start in range(0, len(order), BATCH):
        batch = images[order[start : start + BATCH]]
        most = max(most, anonymous_mib())
    seconds = time.perf_counter() - started
    return (
        f"{len(order) / seconds:,.0f} images/s, {most - before:.1f} MiB "
        f"(one batch is {batch[:1].nbytes * BATCH / 2**20:.1f} MiB)"
    )


def train(path: Path, size: int, count: int) -> str:
    """Train for a local epoch on the first images, and tell by how much the memory grew."""
    from feddg_bench.config.schema import Resources
    from feddg_bench.data.federated import Federation
    from feddg_bench.engine.executors import SerialExecutor
    from feddg_bench.runs.request import Request
    from feddg_bench.runs.run import train
    from feddg_bench.runs.setup import start

    settings = {
        "data": {"image_size": size},
        "backbone": {"name": "small_cnn", "pretrained": False},
        "partition": {"clients": 1},
        "federation": {"rounds": 1, "per_round": 1},
        "train": {"batch_size": BATCH, "local_epochs": 1},
    }
    (plan,) = Request(scenario="ip-o-c", settings=settings).plan(check=False)
    stored = path.stat().st_size // (size * size * 3)
    labels = np.random.default_rng(0).integers(0, 2, stored)
    federation = Federation(path, size, labels, {"only": np.arange(count)}, (), 2)
    run = start(plan, federation, SerialExecutor(), Resources())
    before = anonymous_mib()
    train(run)  # freed memory is kept for reuse, so that what is held at the end is the most
    return f"{anonymous_mib() - before:.0f} MiB more than the {before:.0f} MiB of a worker"


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has ended."""
    return sum(os.times()[:4])


def anonymous_mib() -> float:
    """Return this process's resident memory without pages of files."""
    status = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


if __name__ == "__main__":
    main()
