"""Traces that client work can leave in its process and on the method, where others find them."""

from __future__ import annotations

import zlib
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from feddg_bench.core.method import Method
from feddg_bench.engine.worker import Worker


def traces(worker: Worker) -> dict[str, Any]:
    """Return a snapshot of a worker's process, images and method, by the name of each part.

    Two snapshots differ in every part that the code between them changed.
    """
    method, settings = worker.method, worker.settings
    found: dict[str, Any] = {
        "the working folder": Path.cwd(),
        "the number of threads": torch.get_num_threads(),
        "PyTorch's default type": torch.get_default_dtype(),
        "whether PyTorch computes gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the settings of training": repr(settings.train),
        "the settings of the method": repr(method.settings),
        "the images": _content(worker.bank.images),
        "the labels": _content(worker.bank.labels),
        "torch.nn.functional": _members(vars(F)),
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
