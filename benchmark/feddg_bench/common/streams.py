"""Named random streams: each consumer derives its own from the run seed; no state is shared.

A stream depends on its name, not on earlier draws. Hence a new consumer does not change the others,
the order of clients does not matter, and resuming needs no stored state.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

_SPARE: list[Any] = []
"""NumPy bit generators for `global_streams`: making one takes longer than a training step."""


def derive_seed(root: int, *names: str | int) -> int:
    """Return the seed, in [0, 2**63), of the stream that ``names`` identify under ``root``.

    >>> derive_seed(0, "sampling", 1) == derive_seed(0, "sampling", 1)
    True
    >>> derive_seed(0, "sampling", 1) == derive_seed(0, "sampling", 2)
    False
    """
    text = "\x1f".join([str(root), *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(root: int, *names: str | int) -> np.random.Generator:
    """Return a NumPy generator for the named stream."""
    import numpy as np

    return np.random.default_rng(derive_seed(root, *names))


def torch_generator(
    root: int, *names: str | int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a PyTorch generator on ``device`` for the named stream."""
    import torch

    return torch.Generator(device=device).manual_seed(derive_seed(root, *names))


@contextmanager
def torch_stream(root: int, *names: str | int) -> Iterator[None]:
    """Run a block on the named stream, and leave PyTorch's global CPU generator unchanged.

    Layers such as dropout draw from it; inside the block it starts from the named seed.
    """
    states = _seeded(derive_seed(root, *names), "cpu")
    try:
        yield
    finally:
        for each, state in states:
            each.set_state(state)


def _seeded(seed: int, device: torch.device | str) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Seed PyTorch's global generators, and return each with its earlier state."""
    import torch

    device = torch.device(device)
    generators = [torch.default_generator]
    if device.type != "cpu":
        torch.empty(0, device=device)  # a GPU's generators exist only once it is used
        module = torch.get_device_module(device)
        generators.append(module.default_generators[device.index or 0])
    states = [(each, each.get_state()) for each in generators]
    for each in generators:
        each.manual_seed(seed)
    return states


@contextmanager
def global_streams(
    root: int, *names: str | int, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Run a block with the global generators of PyTorch, NumPy and Python on the named stream.

    The caller's generators go on afterwards as if the block had drawn nothing.
    """
    import numpy as np

    seed, numpy = derive_seed(root, *names), np.random.mtrand
    # Reading or writing the state of NumPy's generator takes fifty times as long as replacing it.
    theirs, python = numpy.get_bit_generator(), random.getstate()
    if theirs in _SPARE:  # blocks of two threads ended in another order than they began
        _SPARE.remove(theirs)
    ours = _SPARE.pop() if _SPARE else np.random.MT19937()
    numpy.set_bit_generator(ours)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - this is the generator that legacy code uses
    random.seed(seed)
    states = _seeded(seed, device)
    try:
        yield
    finally:
        for each, state in states:
            each.set_state(state)
        numpy.set_bit_generator(theirs)
        random.setstate(python)
        _SPARE.append(ours)
