"""Measure a GPU: ``python -m tests.benchmarks.gpu [DEVICE] [FILE]``, by default the first one.

It takes at most eight minutes: after seven no part starts. Each part writes its result at once to
FILE (``build/benchmarks/gpu.json``) and keeps its errors to itself. No data and no weights are
needed. ``cpu`` stands in for a GPU with tiny sizes: it tries every part and measures nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FILE = ROOT / "build" / "benchmarks" / "gpu.json"
PAGE = ROOT / "results" / "benchmarks.md"
LIMIT = 420
"""Seconds after which no part starts; the longest, compiling, takes a minute."""
FAST: dict[str, dict[str, Any]] = {
    "float32": {},
    "TF32": {"gpu": {"tf32": True}},
    "bf16": {"train": {"precision": "bf16-mixed"}},
    "bf16, not deterministic": {
        "train": {"precision": "bf16-mixed"},
        "gpu": {"autotune": True, "deterministic": False},
    },
}
"""Arithmetics of the suite's rounds, from the default to the fastest."""


class Sizes(NamedTuple):
    """What is measured."""

    device: str
    network: str = "resnet50"
    side: int = 224
    batch: int = 32
    clients: int = 20
    images: int = 57
    repeats: int = 20
    product: int = 8192

    @property
    def gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.device != "cpu"


def sizes_of(device: str) -> Sizes:
    """Return sizes for a device."""
    return Sizes(device) if device != "cpu" else Sizes("cpu", "small_cnn", 32, 8, 2, 16, 2, 256)


def timed(
    s: Sizes, work: Callable[[], object], repeats: int = 0, warm: int = 3
) -> dict[str, float]:
    """Return milliseconds of a work, and of the host's part: until everything is launched."""
    import torch

    wait = torch.cuda.synchronize if s.gpu else (lambda: None)
    for _ in range(warm):
        work()
    wait()
    count, start = repeats or s.repeats, time.perf_counter()
    for _ in range(count):
        work()
    host = time.perf_counter() - start
    wait()
    whole = time.perf_counter() - start
    return {"ms": round(whole / count * 1e3, 3), "host ms": round(host / count * 1e3, 3)}


def peaks(s: Sizes) -> dict[str, Any]:
    """TFLOP/s of a large product by arithmetic, and GB/s of a copy."""
    import torch

    found: dict[str, Any] = {"device": torch.cuda.get_device_name(s.device) if s.gpu else "cpu"}
    kinds = (("float32", torch.float32, False), ("TF32", torch.float32, True))
    for name, dtype, tf32 in (*kinds, ("bf16", torch.bfloat16, False)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        a = torch.randn(s.product, s.product, device=s.device).to(dtype)
        found[name] = round(2 * s.product**3 / timed(s, lambda a=a: a @ a, 5)["ms"] / 1e9, 1)
    x = torch.empty(2**28 if s.gpu else 2**22, device=s.device)
    y = torch.empty_like(x)
    found["copy"] = round(2 * x.nbytes / timed(s, lambda: y.copy_(x), 5)["ms"] / 1e6)
    return found


def started(s: Sizes, method: str, settings: dict[str, Any]) -> Callable[[], object]:
    """Return the next round of a run as the suite makes it, on random images."""
    from feddg_bench.config.schema import Resources
    from feddg_bench.data.federated import synthetic_federation
    from feddg_bench.engine.executors import SerialExecutor
    from feddg_bench.runs.request import Request
    from feddg_bench.runs.setup import start
    from tests.benchmarks.rows import rounds

    base = {
        "data": {"image_size": s.side},
        "backbone": {"name": s.network, "pretrained": False},
        "partition": {"clients": s.clients},
        "federation": {"rounds": 10**6, "per_round": None},
        **({"hyper": {"style": "pixel"}} if method == "pardon" else {}),
    }
    request = Request(
        method,
        dataset="pacs",
        recipe="pardon",
        scenario="cs-a-p",
        settings={**base, **settings},
        resources=Resources(device=s.device),
    )
    federation = synthetic_federation(s.clients, s.images, s.side, 7)
    (plan,) = request.plan(check=False)
    each = rounds(start(plan, federation, SerialExecutor(), request.resources))
    for _ in range(2):
        next(each)
    return lambda: next(each)


def rounds_of(s: Sizes) -> dict[str, Any]:
    """Images a second of the suite's rounds."""
    found = {}
    for method in ("fedavg", "pardon"):
        for name, settings in FAST.items():
            ms = timed(s, started(s, method, settings), 2, 1)["ms"]
            found[f"{method}, {name}"] = round(s.clients * s.images / ms * 1e3, 1)
    return found


def waits(s: Sizes) -> dict[str, int]:
    """Operations that make the host wait, by source line, in one round of FedAvg."""
    import torch

    go_on, found = started(s, "fedavg", FAST["bf16"]), Counter[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if s.gpu:
            torch.cuda.set_sync_debug_mode("warn")
        go_on()
        if s.gpu:
            torch.cuda.set_sync_debug_mode("default")
    found.update(f"{Path(each.filename).name}:{each.lineno}" for each in caught)
    return dict(found.most_common(20))


def bare(s: Sizes, batch: int, *, half: bool) -> tuple[Callable[[], object], Any, Any]:
    """Return a step of the network alone: forward, backward, fused Adam; the network; its input."""
    import torch
    import torch.nn.functional as F

    from feddg_bench.config.schema import BackboneSettings
    from feddg_bench.models.backbones import build_backbone
    from feddg_bench.models.batch_norm import freeze_batch_norm

    settings = BackboneSettings(name=s.network, pretrained=False, projection=2048)
    body = build_backbone(settings)
    freeze_batch_norm(body)
    net: Any = torch.nn.Sequential(body, torch.nn.Linear(2048, 7))
    net.to(s.device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-5, fused=True, capturable=s.gpu)
    images = torch.rand(batch, 3, s.side, s.side, device=s.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 7, (batch,), device=s.device)
    kind = s.device.partition(":")[0]

    def step() -> None:
        with torch.autocast(kind, torch.bfloat16, enabled=half, cache_enabled=False):
            loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    return step, net, images


def steps(s: Sizes) -> dict[str, Any]:
    """Milliseconds of a bare step, of the host, and as a CUDA graph."""
    import torch

    found = {}
    for batch in (s.batch, 2 * s.batch):
        for name, tf32, half in (("float32", 0, 0), ("TF32", 1, 0), ("bf16", 0, 1)):
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = bool(tf32)
            step, *_ = bare(s, batch, half=bool(half))
            found[f"{name}, batch {batch}"] = timed(s, step)
        if s.gpu:
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                step()
            found[f"bf16 as a CUDA graph, batch {batch}"] = timed(s, graph.replay)
    return found


def trace(s: Sizes) -> dict[str, Any]:
    """Share of a round in which the GPU works, its kernels, and those that take longest."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    found = {}
    for method in ("fedavg", "pardon"):
        go_on = started(s, method, FAST["bf16, not deterministic"])
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if s.gpu else [])]
        start = time.perf_counter()
        with profile(activities=kinds) as profiler:
            go_on()
            if s.gpu:
                torch.cuda.synchronize()
        whole = time.perf_counter() - start
        events = [(getattr(e, "self_device_time_total", 0), e) for e in profiler.key_averages()]
        busy = sorted(((us, e.key[:60], e.count) for us, e in events if us), reverse=True)
        found[method] = {
            "seconds": round(whole, 3),
            "share of the GPU": round(sum(us for us, *_ in busy) / 1e6 / whole, 3),
            "kernels": sum(count for *_, count in busy),
            "longest": [(key, round(us / 1e3, 2), count) for us, key, count in busy[:15]],
        }
    return found


def evaluation(s: Sizes) -> dict[str, Any]:
    """Images a second of an evaluation."""
    import torch

    found = {}
    for name, tf32, half in (("float32", 0, 0), ("TF32", 1, 0), ("bf16", 0, 1)):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = bool(tf32)
        for batch in (8 * s.batch, 32 * s.batch):
            _, net, images = bare(s, batch, half=False)
            kind = s.device.partition(":")[0]

            @torch.no_grad()
            def look(net: Any = net, images: Any = images, kind: str = kind) -> None:
                with torch.autocast(kind, torch.bfloat16, enabled=bool(half)):  # noqa: B023
                    net(images)

            net.eval()
            found[f"{name}, {batch}"] = round(batch / timed(s, look, 5)["ms"] * 1e3)
    return found


def same_bits(s: Sizes) -> dict[str, bool]:
    """Whether two rounds, made twice with deterministic algorithms, give the same losses."""
    found = []
    for _ in range(2):
        go_on = started(s, "pardon", FAST["bf16"])
        found.append(repr(go_on().ledger.means()))  # type: ignore[attr-defined]
    return {"equal": found[0] == found[1]}


def compiled(s: Sizes) -> dict[str, Any]:
    """Seconds of compiling, and a compiled evaluation and backward pass."""
    import torch

    _, net, images = bare(s, 2 * s.batch, half=True)
    whole = torch.compile(net)

    def step() -> None:
        with torch.autocast(s.device.partition(":")[0], torch.bfloat16):
            loss = whole(images).square().mean()
        loss.backward()

    start = time.perf_counter()
    step()
    if s.gpu:
        torch.cuda.synchronize()
    return {"seconds to compile": round(time.perf_counter() - start, 1), **timed(s, step)}


PARTS = (peaks, rounds_of, steps, waits, trace, evaluation, same_bits, compiled)
"""In the order of their worth, for the case that time runs out."""


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    device, file = (*sys.argv[1:], *("cuda:0", str(FILE))[len(sys.argv) - 1 :])[:2]
    if device != "cpu" and not torch.cuda.is_available():
        print("no GPU is here; try the parts on a CPU: python -m tests.benchmarks.gpu cpu FILE")
        sys.exit(2)
    found: dict[str, Any] = {"on a GPU": device != "cpu", "torch": torch.__version__}
    began = time.monotonic()
    for part in PARTS:
        if time.monotonic() - began > LIMIT or (part is compiled and device == "cpu"):
            continue
        start = time.monotonic()
        try:
            found[part.__name__] = part(sizes_of(device))
        except Exception as error:  # one failure costs one part
            found[part.__name__] = {"error": repr(error)[:300]}
            traceback.print_exc()
        found[f"{part.__name__} took"] = round(time.monotonic() - start, 1)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(found, indent=1, default=str))
        print(part.__name__, json.dumps(found[part.__name__], default=str)[:1500], flush=True)
    if device != "cpu":
        write_section(PAGE, Path(file))


# ---------------------------------------------------------------------------------- the page


def section(file: Path, page: Path | None = None) -> str:
    """Return the GPU's section, from a file of results; else that of a page made on a GPU."""
    found = json.loads(file.read_text()) if file.exists() else {}
    found = {
        part: {} if isinstance(value, dict) and "error" in value else value
        for part, value in found.items()
    }
    if not found.get("on a GPU"):
        held = page.read_text().partition("## On a GPU\n")[2] if page and page.exists() else ""
        if held.startswith("\nWritten by `make gpu`"):
            return "## On a GPU\n" + held.partition("\n## ")[0]
        return (
            "## On a GPU\n\nNot measured: no GPU was available. `make gpu` measures one in eight "
            "minutes and fills this section.\n"
        )
    lines = [
        f"## On a GPU\n\nWritten by `make gpu`: {found['peaks'].get('device', 'a GPU')}, PyTorch "
        f"{found['torch']}; ResNet-50 with frozen batch normalisation at 224 px, batches of 32, 20 "
        f"clients of 57 random images.\n",
        "| measurement | measured |\n| --- | --- |",
        *(f"| {what} | {value} |" for what, value in _rows(found)),
        "",
        *(f"- {rule}" for rule in decisions(found)),
    ]
    return "\n".join([*lines, ""])


def write_section(page: Path, file: Path) -> None:
    """Replace the GPU's section of a page by that of a file of results."""
    before, title, rest = page.read_text().partition("## On a GPU\n")
    assert title, f"{page} has no section on a GPU"
    after = rest.partition("\n## ")[2]
    page.write_text(f"{before}{section(file)}\n## {after}")


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for part, unit in (("peaks", ""), ("rounds_of", " images/s"), ("evaluation", " images/s")):
        for name, value in found.get(part, {}).items():
            title = {"peaks": "peak", "rounds_of": "a round", "evaluation": "evaluation"}[part]
            yield f"{title}: {name}", f"{value}{unit}"
    for name, value in found.get("steps", {}).items():
        if isinstance(value, dict):
            yield f"a bare step: {name}", f"{value['ms']} ms, host {value['host ms']} ms"
    for name, value in found.get("trace", {}).items():
        if isinstance(value, dict):
            share, kernels = value["share of the GPU"], value["kernels"]
            yield f"a round of {name}, fastest", f"GPU at work {share:.0%}, {kernels:,} kernels"
    if waits_found := found.get("waits"):
        yield "waits of the host in a round", sum(v for v in waits_found.values() if v)
    if "equal" in found.get("same_bits", {}):
        yield "two runs have the same bits", "yes" if found["same_bits"]["equal"] else "no"


def decisions(found: dict[str, Any]) -> Iterator[str]:
    """Yield what the measurements say about the three ways to be faster.

    A step is bound by launches if the host takes over 0.8 of it; the suite costs too much around
    steps if a round takes over 1.15 of them; defaults cost too much if the fastest settings are
    over 3 times as fast.
    """
    step = found.get("steps", {}).get("bf16, batch 32")
    rounds = found.get("rounds_of", {})
    if step:
        share = step["host ms"] / step["ms"]
        yield (
            f"Launches: the host takes {share:.2f} of a step in bf16. "
            + ("Capture steps as CUDA graphs." if share > 0.8 else "CUDA graphs would gain little.")
        )
    if step and "fedavg, bf16" in rounds:
        # 57 images are a batch of 32 and one of 25, which costs as much
        ratio = 2 * 20 * step["ms"] / 1e3
        ratio = 20 * 57 / rounds["fedavg, bf16"] / ratio
        yield (
            f"Around steps: a round takes {ratio:.2f} times its bare steps. "
            + ("Draw an epoch at once, and copy less per client." if ratio > 1.15 else "Fine.")
        )
    if {"fedavg, float32", "fedavg, bf16, not deterministic"} <= rounds.keys():
        gain = rounds["fedavg, bf16, not deterministic"] / rounds["fedavg, float32"]
        yield (
            f"Defaults: the fastest settings are {gain:.1f} times as fast. "
            + ("The line that `run` prints matters." if gain > 3 else "Defaults are fine.")
        )


if __name__ == "__main__":
    main()
