"""Traces that a method can leave in its process and on itself, where others find them."""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from feddg_bench.core.messages import leaves
from feddg_bench.core.method import Method
from feddg_bench.core.server import Server
from feddg_bench.engine.worker import Worker


def process_settings() -> dict[str, Any]:
    """Return a snapshot of this process's settings by name."""
    # Once a script sets the precision in PyTorch's new way, reading it in the old way is an error.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return {
        "the working folder": Path.cwd(),
        "the number of threads": torch.get_num_threads(),
        "PyTorch's default type": torch.get_default_dtype(),
        "whether PyTorch computes gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the choice of convolutions by speed": torch.backends.cudnn.benchmark,
        "the precision of matrix products": precision or torch.get_float32_matmul_precision(),
        "the rounding of tiny numbers to 0": bool(torch.tensor(1e-40) * 1),
        "the level of logging": logging.getLogger().level,
        "torch.nn.functional": _members(vars(F)),
    }


def generators() -> dict[str, int]:
    """Return a checksum of the state of each library's global generator."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 - the generator of legacy code
    return {
        "PyTorch's": _content(torch.get_rng_state()),
        "NumPy's": zlib.crc32(f"{numpy[1].tolist()} {numpy[2]}".encode()),
        "Python's": zlib.crc32(repr(random.getstate()).encode()),
    }


def server_tensors(server: Server) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a server's model, broadcast and memory with its path."""
    held = {"weights": server.weights, "broadcast": server.broadcast, "memory": server.memory}
    return ((path, leaf) for path, leaf in leaves(held) if isinstance(leaf, Tensor))


def traces(worker: Worker) -> dict[str, Any]:
    """Return a snapshot of a worker's process, images and method, by the name of each part.

    Two snapshots differ in every part that the code between them changed.
    """
    method, settings = worker.method, worker.settings
    found: dict[str, Any] = {
        **process_settings(),
        "the settings of training": repr(settings.train),
        "the settings of the method": repr(method.settings),
        "the images": _content(worker.bank.images),
        "the labels": _content(worker.bank.labels),
    }
    for kind in type(method).__mro__:
        if issubclass(kind, Method):
            found[f"attributes of the class {kind.__name__}"] = _members(vars(kind))
    for name, module in method.named_modules():
        for key, value in vars(module).items():
            if key != "training":  # every task begins in training mode
                what = f"{key.strip('_').replace('_', ' ')} of {name or 'the method'}"
                found[what] = _members(value) if isinstance(value, dict) else id(value)
    for name, tensor in worker.method.state_dict(keep_vars=True).items():
        found[f"whether {name} takes gradients"] = tensor.requires_grad
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
        found[f"hooks of {name}"] = [[*(each or ())] for each in hooks]
    for name, tensor in {**method.state.tensors, **dict(method.named_buffers())}.items():
        if name not in {*method.state.federated, *method.state.private}:
            found[f"{name}, which no task loads anew"] = _content(tensor)
    return found


def _members(values: Any) -> dict[Any, tuple[int, int]]:
    """Return the identity of each member of a namespace, and its length if it has one."""
    return {
        key: (id(value), len(value) if isinstance(value, Sized) and type(value) in _GROWING else 0)
        for key, value in values.items()
    }


_GROWING = (dict, list, set)
"""Types in which a method could collect what it remembers."""


def _content(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes())
