"""Peak memory against the number of clients: N = 20 and N = 2,000 on the same images.

Each N runs in a process of its own; prints both peaks and their ratio (target at most 1.05).
Run: python tests/benchmarks/bench_memory.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

IMAGES = 4000
SIZE = 64


def main() -> None:
    if len(sys.argv) == 3:
        print(peak(int(sys.argv[1]), Path(sys.argv[2])))
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        np.random.default_rng(0).integers(0, 256, (IMAGES, SIZE, SIZE, 3), dtype=np.uint8).tofile(
            store
        )
        peaks = {}
        for clients in (20, 2000):
            command = [sys.executable, __file__, str(clients), str(store)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks[clients] = float(done.stdout)
            print(f"N = {clients:5}: {peaks[clients]:.1f} MiB")
        print(f"ratio: {peaks[2000] / peaks[20]:.3f}")


def peak(clients: int, store: Path) -> float:
    """Return the peak resident MiB of two rounds with the given number of clients."""
    from feddg_bench.config.schema import Resources
    from feddg_bench.data.federated import Federation
    from feddg_bench.engine.executors import SerialExecutor
    from feddg_bench.engine.worker import peak_memory_mib
    from feddg_bench.runs.request import Request
    from feddg_bench.runs.run import train
    from feddg_bench.runs.setup import start

    settings = {
        "data": {"image_size": SIZE},
        "backbone": {"name": "resnet18", "pretrained": False},
        "partition": {"clients": clients},
        "federation": {"rounds": 2, "per_round": 20},
    }
    (plan,) = Request(scenario="ip-o-c", settings=settings).plan(check=False)
    # Twenty clients a round train on as many images in both: only their number differs.
    sizes = IMAGES // 2000
    parts = np.arange(2000 * sizes).reshape(2000, sizes)[:clients]
    names = {f"client_{i:04}": part for i, part in enumerate(parts)}
    labels = np.random.default_rng(1).integers(0, 7, IMAGES)
    federation = Federation(store, SIZE, labels, names, (), 7)
    run = start(plan, federation, SerialExecutor(), Resources())
    train(run)
    return peak_memory_mib()


if __name__ == "__main__":
    main()
