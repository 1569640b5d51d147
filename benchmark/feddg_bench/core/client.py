"""A method's view of one client during one task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from feddg_bench.common.errors import PluginError
from feddg_bench.common.streams import torch_generator
from feddg_bench.core.messages import Payload, copied

if TYPE_CHECKING:
    from feddg_bench.common.lightning import Fabric
    from feddg_bench.config.schema import TrainSettings

Batch = tuple[Tensor, ...]
"""Images, float [B, 3, H, W] in [0, 1], labels, int64 [B], and domain ids, int64 [B], if requested.

Domain ids are on the CPU: a training step needs the number of images per domain, and reading it
from a GPU would wait for the GPU. Other data sets can have another number of channels, values that
are already normalised, or regression targets, float32 [B], as labels. Images are [V, B, 3, H, W]
if V > 1 views of each were requested.
"""


def on_device(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Return CPU tensors on ``device``, moved together by one asynchronous copy.

    Any other copy from the CPU waits until the GPU has finished all earlier work.
    """
    given = list(tensors)
    if device.type == "cpu" or not given:
        return given
    if len(given) == 1:
        return [given[0].pin_memory().to(device, non_blocking=True)]
    # Contiguous: a single number of a longer tensor would keep the stride of that tensor.
    copies = [t.reshape(-1).clone(memory_format=torch.contiguous_format) for t in given]
    flat = [copy.view(torch.uint8) for copy in copies]
    padded = [F.pad(part, (0, -len(part) % 8)) for part in flat]  # aligned for any type
    packed = torch.cat(padded).pin_memory().to(device, non_blocking=True)
    pieces = packed.split([len(part) for part in padded])
    return [
        piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for piece, tensor in zip(pieces, given, strict=True)
    ]


def rows_on_device(values: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Return ``values[rows]`` on ``device``; ``rows`` are on the CPU, ``values`` on either."""
    if values.is_cpu:
        return on_device([values[rows]], device)[0]
    return values[on_device([rows], device)[0]]


class ClientData(Protocol):
    """A client's images."""

    def __len__(self) -> int: ...

    @property
    def batches(self) -> Callable[..., Iterator[Batch]]:
        """As `feddg_bench.data.client_images.ClientImages.batches`."""


class Received(Mapping[str, Any]):
    """Content that a client received from the server; each entry is copied when first read.

    A client's writes thus never reach the server or another client, and an entry that is never
    read costs nothing.

    Args:
        content: The original entries.
        device: Device of the copies; by default that of the entries.
    """

    def __init__(self, content: Mapping[str, Any], device: torch.device | None = None) -> None:
        self._content, self._device = content, device
        self._copies: Payload = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._copies:
            self._copies[key] = copied(self._content[key], self._device)
        return self._copies[key]

    def __contains__(self, key: object) -> bool:
        return key in self._content

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


@dataclass(slots=True)
class Client:
    """One client during one task; nothing in it is shared with the server or another task.

    Attributes:
        name: Name of the client.
        round: Round number from 1; 0 during ``prepare``.
        rounds: Rounds of the whole run.
        data: The client's images; use `batches`.
        weights: The global model as received, on the worker's device.
        broadcast: Content that the server sent, in addition to the model.
        memory: State that this client keeps between its tasks.
        fabric: Precision and device of this worker.
        train: Settings of local training.
        seed: Root of this run's random streams.
        domain_ids: Domain of each of its training images, as an index into ``sources``: int64 [n]
            on the CPU.
        sources: Names of the source domains.
        validation: Its validation images, if the method needs them; use `validation_batches`.
    """

    name: str
    round: int
    rounds: int
    data: ClientData
    weights: Mapping[str, Tensor]
    broadcast: Mapping[str, Any]
    memory: Payload
    fabric: Fabric
    train: TrainSettings
    seed: int
    domain_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    sources: tuple[str, ...] = ()
    validation: ClientData | None = None
    _sums: dict[str, tuple[float | Tensor, int]] = field(default_factory=dict)

    @property
    def domains(self) -> dict[str, int]:
        """The client's number of training images by source domain, without zeros."""
        counts = ((name, int((self.domain_ids == i).sum())) for i, name in enumerate(self.sources))
        return {name: count for name, count in counts if count}

    def generator(self, *names: str | int) -> torch.Generator:
        """Return a CPU generator for the named random stream of this client and round."""
        return torch_generator(self.seed, *names, self.round, self.name)

    def batches(
        self,
        *,
        train: bool,
        augment: bool | None = None,
        epoch: int = 0,
        views: int = 1,
        companions: Tensor | None = None,
        parts: Iterable[Tensor] | None = None,
        domains: bool = False,
    ) -> Iterator[Batch]:
        """Yield one epoch of batches on the worker's device.

        Within a task, the same arguments always yield the same batches.

        Args:
            train: Shuffle and augment; otherwise keep images in order and as stored.
            augment: Overrides whether images are augmented.
            epoch: Local epoch from 0; each has its own random stream.
            views: Independently augmented copies of each image (see `Batch`).
            companions: One more image for each of the client's images, in the same order: uint8
                [n, H, W, 3]. It is added as a further view, with the same draws as the first.
            parts: The images of each batch, instead of every image once: positions among the
                client's images, int64 [b] for each batch, on the CPU.
            domains: Add the images' domains to each batch, as indices into ``sources``: int64 [B],
                on the CPU.
        """
        return self.data.batches(
            shuffle=train,
            augment=train if augment is None else augment,
            views=views,
            companions=companions,
            parts=parts,
            generator=self.generator("loader", epoch),
            domains=self.domain_ids if domains else None,
        )

    def validation_batches(self) -> Iterator[Batch]:
        """Yield the client's validation images in order and as stored, in batches on the device.

        Raises:
            PluginError: If the method does not declare that its clients keep validation images.
        """
        if self.validation is None:
            raise PluginError(
                "clients keep no validation images: set client_validation = True in the method"
            )
        return self.validation.batches(generator=self.generator("validation"))

    def lr_factor(self, epoch: int) -> float:
        """Return the factor of the learning rate in this local epoch (from 0)."""
        if self.train.schedule == "constant":
            return 1.0
        epochs = self.train.local_epochs
        done = (self.round - 1) * epochs + epoch
        if self.train.schedule == "exponential":
            return self.train.decay**done
        return 0.5 * (1 + math.cos(math.pi * done / (self.rounds * epochs)))

    def log(self, name: str, value: float | Tensor, weight: int = 1) -> None:
        """Add to the weighted mean that the reply reports under ``name``."""
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value * weight, count + weight)

    def log_all(self, name: str, values: Sequence[Tensor], weights: Sequence[int]) -> None:
        """Log one-element tensors like repeated calls of `log`, but wait for a GPU only once."""
        if values:
            exact = np.float64 if values[0].dtype == torch.float64 else np.float32
            before, count = self._sums.get(name, (0.0, 0))
            total = exact(float(before))
            together = values if values[0].is_cpu else torch.stack([*values]).cpu()
            for number, weight in zip(map(float, together), weights, strict=True):
                total += exact(number) * exact(weight)
            self._sums[name] = (float(total), count + sum(weights))

    def metrics(self) -> dict[str, float]:
        """Return the weighted means of everything logged so far."""
        return {name: float(total) / count for name, (total, count) in self._sums.items()}
