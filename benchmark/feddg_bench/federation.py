"""Data as the workers see it: one array of images, clients and splits as index arrays into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from feddg_bench.augment import Augment, to_float
from feddg_bench.client import Batch
from feddg_bench.settings import AugmentSettings, TrainSettings

RESIDENT_SHARE = 0.4
"""Largest share of a GPU's free memory that the decoded images may take."""


@dataclass(frozen=True)
class Federation:
    """Where the images are and who holds which; small enough to send to every process.

    Attributes:
        images: A store's file to map, or the array itself: uint8 (N, size, size, 3).
        size: Side of the images in pixels.
        labels: int64 (N,).
        clients: Client name to the indices of its training images.
        evaluation: Split, domain and indices of every set that is measured.
        num_classes: C.
    """

    images: Path | np.ndarray
    size: int
    labels: np.ndarray
    clients: dict[str, np.ndarray]
    evaluation: tuple[tuple[str, str, np.ndarray], ...]
    num_classes: int


class ImageBank:
    """All images of a run, mapped from disk or resident on a GPU."""

    def __init__(self, federation: Federation, device: torch.device) -> None:
        images = federation.images
        if isinstance(images, Path):
            shape = (len(federation.labels), federation.size, federation.size, 3)
            images = np.memmap(images, dtype=np.uint8, mode="r", shape=shape)
        self.array = images
        self.device = device
        self.labels = torch.from_numpy(federation.labels).to(device)
        self.resident: Tensor | None = None
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if self.array.nbytes < RESIDENT_SHARE * free:
                self.resident = torch.from_numpy(np.array(self.array)).to(device)

    def take(self, index: Tensor) -> Batch:
        """Return images, uint8 (B, H, W, 3), and labels (B,), on the device.

        Args:
            index: Rows of the array, int64 (B,) on the CPU.
        """
        on_device = index.to(self.device, non_blocking=True)
        labels = self.labels.index_select(0, on_device)
        if self.resident is not None:
            return self.resident.index_select(0, on_device), labels
        images = torch.from_numpy(self.array[index.numpy()])
        return images.to(self.device, non_blocking=True), labels


class ClientImages:
    """The images of one client (see `feddg_bench.client.ClientData`)."""

    def __init__(
        self, bank: ImageBank, index: np.ndarray, augment: AugmentSettings, train: TrainSettings
    ) -> None:
        self.bank = bank
        self.index = torch.from_numpy(np.asarray(index, dtype=np.int64))
        self.augment = Augment(augment)
        self.train = train

    def __len__(self) -> int:
        return len(self.index)

    def batches(
        self,
        *,
        shuffle: bool,
        augment: bool,
        views: int,
        companions: Tensor | None,
        generator: torch.Generator,
    ) -> Iterator[Batch]:
        """Yield every image once, in batches on the device."""
        count = len(self.index)
        order = torch.randperm(count, generator=generator) if shuffle else torch.arange(count)
        for part in order.split(self.train.batch_size):
            if shuffle and self.train.drop_last_if_single and len(part) == 1 < count:
                continue
            images, labels = self.bank.take(self.index[part])
            twin = None if companions is None else generator.clone_state()
            copies = [self._float(images, augment, generator) for _ in range(views)]
            if companions is not None and twin is not None:
                beside = companions[part.to(companions.device)].to(images.device)
                copies.append(self._float(beside, augment, twin))
            yield (copies[0] if len(copies) == 1 else torch.stack(copies)), labels

    def _float(self, images: Tensor, augment: bool, generator: torch.Generator) -> Tensor:
        return self.augment(images, generator) if augment else to_float(images)
