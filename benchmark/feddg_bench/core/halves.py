"""The frames around every call of a method's code: its random streams, and one check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from feddg_bench.common.errors import PluginError, noted
from feddg_bench.common.streams import global_streams

if TYPE_CHECKING:
    from feddg_bench.core.client import Client
    from feddg_bench.core.method import Method
    from feddg_bench.core.server import Server


def client_half(method: Method, client: Client, call: str) -> AbstractContextManager[None]:
    """Return the frame of a call of a client's function; ``client.fabric`` names the device."""
    where = f"{client.name}, round {client.round}, {call}"
    stream = call, client.round, client.name
    device = client.fabric.device
    return _frame(method, where, "client.memory", client.seed, stream, device)


def server_half(method: Method, server: Server, call: str) -> AbstractContextManager[None]:
    """Return the frame of a call of the server half."""
    where = f"server half, round {server.round}" if server.round else "server half, before round 1"
    stream = "server half", call, server.round
    device = next((t.device for t in server.weights.values()), torch.device("cpu"))
    return _frame(method, where, "server.memory", server.seed, stream, device)


@contextmanager
def _frame(
    method: Method,
    where: str,
    memory: str,
    seed: int,
    stream: tuple[str | int, ...],
    device: torch.device,
) -> Iterator[None]:
    """Run a block with the global generators on the named stream, and note ``where`` in exceptions.

    A new or other value of an attribute ends the run: other processes and a resumed run would not
    have it. The half keeps its state in ``memory``.

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
