"""The frame around every call of a method's code: its random streams, and one check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from feddg_bench.common.errors import PluginError, noted
from feddg_bench.common.streams import global_streams


@contextmanager
def plugin_call(
    method: object, where: str, memory: str, seed: int, *stream: str | int, device: torch.device
) -> Iterator[None]:
    """Run a block of a method's client or server half.

    Global generators start from the named stream. A new or other value of an attribute ends the
    run: other processes and a resumed run would not have it.

    Args:
        method: The plugin.
        where: Place of the call, such as ``client_003, round 2, fit``; exceptions get it as a note.
        memory: Where this half keeps its state: ``client.memory`` or ``server.memory``.
        seed: Seed of the run.
        stream: Names of the call's stream.
        device: Device whose generator is seeded, too.

    Raises:
        PluginError: If an attribute of the method changed.
    """
    before = dict(vars(method))
    with noted(where):
        with global_streams(seed, *stream, device=device):
            yield
        for name, value in vars(method).items():
            # PyTorch itself sets the mode, and each task begins in training mode.
            if name != "training" and (name not in before or before[name] is not value):
                raise PluginError(
                    f"the method set self.{name}, which no other process and no resumed run would "
                    f"find: keep it in {memory}, or if only this call needs it, set it inside "
                    f"`with self.temporarily({name}=...)`"
                )
