"""The decoded store: speed of building and reading, and a reader's memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from feddg_bench.config.schema import Resources
from feddg_bench.data.federated import Federation
from feddg_bench.data.image_folders import ImageFolderDataset
from feddg_bench.data.image_store import open_store
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.runs.driver import train
from feddg_bench.runs.request import Request
from feddg_bench.runs.setup import start
from tests.benchmarks.rows import Row, benchmark

IMAGES, SIZE = 600, 224
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


@benchmark
def store() -> Iterator[Row]:
    """600 JPEGs of 256 px, few files under many names so that their bytes come from memory, are
    decoded to 224 px and read in random order in batches of 32. Memory is private memory, without
    the file cache."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "images", IMAGES)
        begun = time.process_time()
        images = open_store(Made(folder / "images"), SIZE, folder / "cache", processes=1).images
        work = 1000 * (time.process_time() - begun) / IMAGES
        yield Row("decoding an image", work, unit=" ms of CPU")
        rate, memory = apart("read", images, SIZE)
        yield Row("reading the store", rate, unit=" images/s")
        batch = BATCH * SIZE * SIZE * 3 / 2**20
        yield Row("memory of reading, in batches", memory / batch)
        for part in (IMAGES // 8, IMAGES):
            (more,) = apart("grown", images, SIZE, part)
            yield Row(f"memory of training on {part} images", more, unit=" MiB")


def apart(task: str, images: np.memmap, *numbers: int) -> list[float]:
    """Return the result of a function below, called in a separate process."""
    arguments = [str(images.filename), *numbers]
    code = f"from {__name__} import *; print(*{task}(*{arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    return [float(number) for number in done.stdout.split()]


def make_images(folder: Path, images: int) -> None:
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


def read(path: str, size: int) -> tuple[float, float]:
    """Read every image once; return images per second and the required MiB."""
    before = anonymous_mib()
    images = np.memmap(path, dtype=np.uint8, mode="r", shape=(IMAGES, size, size, 3))
    order = np.random.default_rng(0).permutation(len(images))
    most = before
    started = time.perf_counter()
    for part in np.split(order, range(BATCH, len(order), BATCH)):
        batch = images[part]
        most = max(most, anonymous_mib())
    seconds = time.perf_counter() - started
    assert batch.dtype == np.uint8
    return len(order) / seconds, most - before


def grown(path: str, size: int, count: int) -> tuple[float]:
    """Train for a local epoch on the first images; return the growth of memory in MiB."""
    settings = {
        "data": {"image_size": size},
        "backbone": {"name": "small_cnn", "pretrained": False},
        "partition": {"clients": 1},
        "federation": {"rounds": 1, "per_round": 1},
        "train": {"batch_size": BATCH, "local_epochs": 1},
    }
    (plan,) = Request(scenario="ip-o-c", settings=settings).plan(check=False)
    labels = np.random.default_rng(0).integers(0, 2, IMAGES)
    federation = Federation(Path(path), size, labels, {"only": np.arange(count)}, (), 2)
    run = start(plan, federation, SerialExecutor(), Resources())
    before = anonymous_mib()
    train(run)  # freed memory is kept for reuse, so the final memory is the peak
    return (anonymous_mib() - before,)


def anonymous_mib() -> float:
    """Return this process's resident memory without file pages, in MiB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024
