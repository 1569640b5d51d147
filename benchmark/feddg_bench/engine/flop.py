"""Floating point operations of client work, and the maximum rate of a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from feddg_bench.core.messages import Reply, Task


class Tally:
    """Operations of clients' work, estimated from the first reply to each call, which is counted.

    Attributes:
        flop: Operations so far; ``None`` if unknown.

    Args:
        flop: Operations to start from.
    """

    def __init__(self, flop: float | None = 0.0) -> None:
        self.flop = flop
        self._an_image: dict[str, float] = {}

    def add(self, task: Task, reply: Reply[Any]) -> None:
        """Add a reply's operations: its images times what one image cost in the counted reply."""
        if reply.counted:
            self._an_image[task.call] = reply.counted["flop an image"]
        an_image = self._an_image.get(task.call)
        if self.flop is not None:
            self.flop = None if an_image is None else self.flop + an_image * reply.num_examples


def count_flop(work: Callable[[], object]) -> int:
    """Return the operations of ``work`` in convolutions and matrix products."""
    mapping = {torch.ops.aten.convolution_backward: _convolution_backward_flop}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    counter.mod_tracker = _Together()  # type: ignore[assignment]
    with counter:
        work()
    flop: int = counter.get_total_flops()
    return flop


class _Together(nullcontext[None]):
    """Counts all modules together.

    PyTorch's own tracker fails in `torch.autograd.grad` of a leaf that has passed a module.
    """

    parents = ("Global",)


def _convolution_backward_flop(
    grad_shape: Sequence[int], _input: object, weight_shape: Sequence[int], *rest: Any, **_: object
) -> int:
    """Return the operations of a convolution's backward pass.

    Each requested gradient, of the input or of the weight, costs as much as the forward pass.
    PyTorch's own formula treats grouped convolutions as full ones, which is six times too much for
    MobileNetV2.
    """
    wanted: Sequence[bool] = rest[7]
    return 2 * math.prod(grad_shape) * math.prod(weight_shape[1:]) * sum(wanted[:2])


@cache
def peak_flops(device: torch.device, precision: str, threads: int) -> float:
    """Return the operations per second of a large matrix product: the best of five.

    Measured once per process, on a CPU within 0.05 s. Draws no random numbers.

    Args:
        device: Device that computes the product.
        precision: ``32-true`` or ``bf16-mixed``.
        threads: Threads with which this process computes on a CPU.
    """
    size = 8192 if device.type == "cuda" else 768 if threads < 8 else 2048
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    a = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)
    return 2 * size**3 / min(seconds_of(lambda: a @ a, device) for _ in range(5))


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the wall time of some work in seconds, including what it queued on the device."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
