"""A round's updates for server rules that only form linear combinations of them.

Such a rule (PPDG, PCGrad, FedOMG) computes a coefficient for each of the K updates from the inner
products of all pairs alone. The updates are therefore kept, on disk if they are large, and read
twice: once for the K x K inner products, once for the combination.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch
from torch import Tensor

from feddg_bench.common.errors import FeddgError, SettingsError
from feddg_bench.core.aggregation import RunningMean, fold, server_step, streaming_mean
from feddg_bench.core.messages import LocalUpdate, Reply, Weights
from feddg_bench.core.server import Server

Share = Callable[[Reply[Any]], float]
"""A client's share in a mean, not normalised."""

Rule = Callable[[Tensor, Tensor], Tensor]
"""Coefficients [K] of the updates from their inner products [K, K] and their shares [K].

All are float64 on the CPU, in client order; shares sum to 1.
"""

IN_MEMORY = 64 * 2**20
"""Maximum bytes of updates kept in memory; in a round with more, they go to a file."""

BLOCK = 2**20
"""Number of entries read at once, over all updates."""


def one_each(_reply: Reply[Any]) -> float:
    """Return 1: all clients have the same share."""
    return 1.0


def image_count(reply: Reply[Any]) -> float:
    """Return the client's image count as its share."""
    return float(reply.num_examples)


def check_share(server: Server, share: Share) -> None:
    """Refuse shares other than the server's if single updates are hidden.

    Raises:
        SettingsError: If updates are hidden and ``share`` is not the server's.
    """
    uniform = server.federation.weighting == "uniform"
    if server.protection is not None and share is (image_count if uniform else one_each):
        wanted = "samples" if uniform else "uniform"
        raise SettingsError(
            f"a sum of hidden updates has the shares of federation.weighting, and this method "
            f"takes its mean by others: set federation.weighting={wanted}"
        )


# ---------------------------------------------------------------------------- the server's step


def combine_updates(
    server: Server,
    updates: Iterable[Reply[LocalUpdate]],
    names: Sequence[str],
    rule: Rule,
    *,
    share: Share,
    by_tensor: bool = False,
) -> Weights:
    """Return the new global model after a step along a combination of the updates.

    Trainable parameters become w + eta sum_k a_k Delta_k, with a from the rule and eta the
    server's learning rate; everything else takes the mean of `average_updates`. Only one reply is
    in memory at a time.

    Args:
        server: Holds the global model, the server's shares and its learning rate.
        updates: Replies in client order, read once.
        names: Trainable parameters.
        rule: Computes the coefficients.
        share: Shares passed to the rule.
        by_tensor: Apply the rule to each tensor separately, not to the whole vector.

    Raises:
        FeddgError: If the disk has no space for the updates; see `UpdateStore`.
    """
    others = RunningMean()
    shares: list[float] = []

    def add(reply: Reply[LocalUpdate]) -> None:
        store.add(reply.value.weights)
        others.add(_without(reply.value.weights, names), server.share(reply))
        shares.append(share(reply))

    with UpdateStore(server.weights, names) as store:
        fold(updates, add)
        p = torch.tensor(shares, dtype=torch.float64)
        p /= p.sum()
        new = store.step(
            {
                part: server.federation.server_lr * rule(gram, p)
                for part, gram in store.inner_products(by_tensor=by_tensor).items()
            }
        )
    return {name: new[name] if name in new else others.mean[name] for name in server.weights}


def average_updates(
    server: Server, updates: Iterable[Reply[LocalUpdate]], names: Sequence[str], *, share: Share
) -> Weights:
    """Return the global model after federated averaging, with ``share`` for trainable parameters.

    If ``share`` is the server's, this is FedAvg bit for bit.

    Args:
        server: Holds the global model, the server's shares and its learning rate.
        updates: Replies in client order, read once.
        names: Trainable parameters; everything else is averaged with the server's shares.
        share: Shares of the trainable parameters.
    """
    new = mean_model(server, updates, names, share=share)
    return server_step(server.weights, new, server.federation.server_lr, names)


def mean_model(
    server: Server, updates: Iterable[Reply[LocalUpdate]], names: Sequence[str], *, share: Share
) -> Weights:
    """Return the mean of the clients' models; see `average_updates`, whose server step it omits."""
    others = RunningMean()

    def trained(reply: Reply[LocalUpdate]) -> tuple[Weights, float]:
        others.add(_without(reply.value.weights, names), server.share(reply))
        return {name: reply.value.weights[name] for name in names}, share(reply)

    mean = streaming_mean(map(trained, updates)) | others.mean
    return {name: mean[name] for name in server.weights}


def _without(weights: Weights, names: Sequence[str]) -> Weights:
    left_out = set(names)
    return {name: tensor for name, tensor in weights.items() if name not in left_out}


# ------------------------------------------------------------------------------- the updates


class UpdateStore:
    """Updates of K clients, P float32 entries each, read in blocks of coordinates.

    Up to `IN_MEMORY` bytes stay in memory. Beyond that, all go to an unnamed temporary file in the
    folder that the environment variable TMPDIR names (``/tmp`` unless set): 4 K P bytes, 2.2 GB for
    20 clients with a ResNet-50. The system deletes it when the store is closed or the process ends
    in any way. If that folder is in memory (tmpfs), set TMPDIR to another.

    Results do not depend on the device, on the number of threads or on where the updates are kept.

    Args:
        base: The global model w that the clients started from.
        names: Trainable parameters.
    """

    def __init__(self, base: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self._base = {name: base[name] for name in names}
        self._width = sum(w.numel() for w in self._base.values())
        self._clients = 0
        self._file: io.BufferedIOBase = io.BytesIO()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # closing retries writes that failed on a full disk
            self._file.close()

    def add(self, weights: Mapping[str, Tensor]) -> None:
        """Keep ``weights`` minus the global model.

        Raises:
            FeddgError: If the disk has no space for it.
        """
        try:
            self._make_room()
            for name, w in self._base.items():
                delta = weights[name].detach().to(w.device, torch.float32) - w.float()
                self._file.write(delta.reshape(-1).cpu().numpy().data)
            self._file.flush()
        except OSError as error:
            raise FeddgError(
                f"the updates of a round found no room in the temporary folder "
                f"{_temporary_folder()} ({error.strerror}): they take "
                f"{self._width / 2**18:.0f} MiB for each sampled client, so free as much there "
                f"or let the environment variable TMPDIR name a folder that has it"
            ) from error
        self._clients += 1

    def _make_room(self) -> None:
        """Move the updates from memory to a file if one more would exceed `IN_MEMORY`."""
        entries = (self._clients + 1) * self._width
        if isinstance(self._file, io.BytesIO) and 4 * entries > IN_MEMORY:
            memory, self._file = self._file, tempfile.TemporaryFile()  # noqa: SIM115
            with memory, memory.getbuffer() as kept:
                self._file.write(kept)

    def _blocks(self) -> Iterator[tuple[str, slice, Tensor]]:
        """Yield a tensor's name, a slice of its entries, and their updates, float64 [K, B]."""
        columns = max(1, BLOCK // self._clients)
        offset = 0
        for name, w in self._base.items():
            for start in range(0, w.numel(), columns):
                stop = min(start + columns, w.numel())
                block = torch.empty(self._clients, stop - start)
                for k, row in enumerate(block):
                    self._file.seek(4 * (k * self._width + offset + start))
                    self._file.readinto(row.numpy().data)
                yield name, slice(start, stop), block.double()
            offset += w.numel()

    def inner_products(self, *, by_tensor: bool = False) -> dict[str, Tensor]:
        """Return the updates' inner products, float64 [K, K], under the key ``""``.

        With ``by_tensor``, there is one matrix for each tensor, under its name.
        """
        grams: dict[str, Tensor] = {}
        with _one_thread():
            for name, _, block in self._blocks():
                part = name if by_tensor else ""
                gram = block @ block.T
                grams[part] = grams[part] + gram if part in grams else gram
        return grams

    def step(self, coefficients: Mapping[str, Tensor]) -> Weights:
        """Return w + sum_k a_k Delta_k, in the global model's shapes, types and device.

        Args:
            coefficients: a, float64 [K], under the keys of `inner_products`.
        """
        moves = {name: torch.empty(w.numel()) for name, w in self._base.items()}
        with _one_thread():
            for name, part, block in self._blocks():
                moves[name][part] = coefficients[name if name in coefficients else ""] @ block
        return {
            name: (w + moves.pop(name).view(w.shape).to(w.device)).to(w.dtype)
            for name, w in self._base.items()
        }


def _temporary_folder() -> str:
    with suppress(OSError):
        return tempfile.gettempdir()
    return "(none can be written to)"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, since a matrix product rounds differently on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------ rules on the updates' inner products


def gram_matrix(deltas: Tensor) -> Tensor:
    """Return the inner products of updates in float64, without a full float64 copy.

    Args:
        deltas: Updates, [K, P].

    Returns:
        [K, K], float64.
    """
    gram = torch.zeros(len(deltas), len(deltas), dtype=torch.float64, device=deltas.device)
    for columns in deltas.split(2**20, dim=1):
        wide = columns.double()
        gram += wide @ wide.T
    return gram


def permutation(order: Sequence[int] | Tensor | None, num_clients: int) -> list[int]:
    """Return the order in which clients are visited; ascending if not given.

    Raises:
        SettingsError: If it does not contain each client exactly once.
    """
    if order is None:
        return list(range(num_clients))
    indices = [int(i) for i in order]
    if sorted(indices) != list(range(num_clients)):
        raise SettingsError(
            f"order {indices} does not name each of {num_clients} clients once: "
            f"give a permutation of 0 to {num_clients - 1}"
        )
    return indices
