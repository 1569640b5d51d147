"""Memory of a worker on PACS, and memory by number of clients."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchvision.models import mobilenet_v2

from feddg_bench.config.schema import Resources
from feddg_bench.data.federated import Federation
from feddg_bench.engine.executors import ProcessExecutor, SerialExecutor
from feddg_bench.engine.worker import peak_memory_mib
from feddg_bench.runs.driver import train
from feddg_bench.runs.request import Request
from feddg_bench.runs.setup import start
from tests.benchmarks.rows import Row, benchmark, pacs_run, rounds
from tests.helpers import children

IMAGES, SIZE = 4000, 64
FOLDED = {"train.fold_batch_norm": "auto", "evaluation.fuse_batch_norm": True}


@benchmark
def clients_in_memory() -> Iterator[Row]:
    """Peak memory of two rounds of 20 of N clients on the same 4,000 images of 64 px with a
    ResNet-18, each N in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        np.random.default_rng(0).integers(0, 256, (IMAGES, SIZE, SIZE, 3), dtype=np.uint8).tofile(
            store
        )
        few, many = (
            float(apart(f"print(peak({clients}, Path({str(store)!r})))")) for clients in (20, 2000)
        )
    why = "names, seeds and image numbers of 1,980 more clients"
    yield Row("memory of 2,000 clients over that of 20", many / few, most=1.05, why=why)


@benchmark
def worker_memory() -> Iterator[Row]:
    """Peak memory of one process after two rounds of three clients and an evaluation of 256 images
    in the setup "PACS", each method in a separate process; folded:
    train.fold_batch_norm=auto and evaluation.fuse_batch_norm. There is no target, since PyTorch's
    own share depends on the CPU (next table)."""
    for method in ("fedavg", "pardon", "fedccrl"):
        for folds in (False, True):
            mib = float(apart(f"print(worker({method!r}, {folds}))"))
            what = f"memory of a worker, {method}{', folded' if folds else ''}"
            yield Row(what, mib, unit=" MiB")


def worker(method: str, folds: bool) -> float:
    """Return the peak resident MiB of a worker in the PACS setup."""
    run = pacs_run(method, clients=3, settings=FOLDED if folds else {})
    each = rounds(run)
    for _ in range(3):  # the first result is before round 1
        next(each)
    index = np.resize(np.arange(171), 256)
    run.executor.worker.evaluate(run.server.weights, index)  # type: ignore[attr-defined]
    return peak_memory_mib()


@benchmark
def plain_memory() -> Iterator[Row]:
    """Peak memory of a process that only makes three steps on 96 images, FedCCRL's three views of a
    batch in the setup "PACS", with torchvision's network, its BatchNorm folded into the
    convolutions and ReLU6 in place; and the part that a forward pass keeps for the backward
    pass."""
    peak, kept = map(float, apart("plain()").split())
    yield Row("memory of PyTorch alone, three views", peak, unit=" MiB")
    yield Row("memory of activations, three views", kept, unit=" MiB")


def plain() -> None:
    """Print the peak resident MiB of a plain loop, and the MiB kept by autograd."""
    net = mobilenet_v2(num_classes=7).eval()
    for block in [m for m in net.modules() if isinstance(m, nn.Sequential)]:
        for (name, one), (other, two) in pairwise(list(block.named_children())):
            if isinstance(two, nn.BatchNorm2d):
                setattr(block, name, fuse_conv_bn_eval(one, two))
                setattr(block, other, nn.Identity())
    for module in net.modules():
        if isinstance(module, nn.ReLU6):
            module.inplace = True
    net = net.requires_grad_().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    images = torch.rand(96, 3, 128, 128).to(memory_format=torch.channels_last)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for _ in range(3):
        kept.clear()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = F.cross_entropy(net(images), torch.zeros(96, dtype=torch.int64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(peak_memory_mib(), sum(kept.values()) / 2**20)


@benchmark
def run_memory() -> Iterator[Row]:
    """Peak memory of the main process and two workers together, in two rounds of four clients and
    an evaluation of 256 images in the setup "PACS", folded; shared memory is counted once."""
    for method in ("fedavg", "pardon", "fedccrl"):
        mib = float(apart(f"print(whole_run({method!r}))"))
        yield Row(f"memory of a run with two workers, {method}", mib, unit=" MiB")


def whole_run(method: str) -> float:
    """Return the peak sum of the processes' proportional memory in MiB, sampled every 0.1 s."""
    with closing(ProcessExecutor(2)) as executor:
        run = pacs_run(method, clients=4, settings=FOLDED, executor=executor)
        most, over = [0.0], threading.Event()

        def watch() -> None:
            while not over.wait(0.1):
                most.append(sum(map(proportional, descendants(os.getpid()))))

        thread = threading.Thread(target=watch)
        thread.start()
        each = rounds(run)
        for _ in range(3):  # the first result is before round 1
            next(each)
        part = np.resize(np.arange(171), 128)
        deque(executor.evaluate(run.server.weights, [part, part]), maxlen=0)
        over.set()
        thread.join()
    return max(most)


def descendants(process: int) -> list[int]:
    """Return a process and all its descendants."""
    return [process, *(p for child in children(process) for p in descendants(child))]


def proportional(process: int) -> float:
    """Return the MiB of a process, each page divided by the processes that share it."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
    return 0.0


def apart(code: str) -> str:
    """Return the output of code with this module's names, run in a separate process."""
    command = [sys.executable, "-c", f"from {__name__} import *\n{code}"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def peak(clients: int, store: Path) -> float:
    """Return the peak resident MiB of two rounds with the given number of clients."""
    settings = {
        "data": {"image_size": SIZE},
        "backbone": {"name": "resnet18", "pretrained": False},
        "partition": {"clients": clients},
        "federation": {"rounds": 2, "per_round": 20},
    }
    (plan,) = Request(scenario="ip-o-c", settings=settings).plan(check=False)
    # In both cases twenty clients a round train on equally many images: only their number differs.
    sizes = IMAGES // 2000
    parts = np.arange(2000 * sizes).reshape(2000, sizes)[:clients]
    names = {f"client_{i:04}": part for i, part in enumerate(parts)}
    labels = np.random.default_rng(1).integers(0, 7, IMAGES)
    federation = Federation(store, SIZE, labels, names, (), 7)
    run = start(plan, federation, SerialExecutor(), Resources())
    train(run)
    return peak_memory_mib()
