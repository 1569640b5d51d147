"""Training images of the clients: one shared array, from which all clients take batches."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddg_bench.config.schema import AugmentSettings, TrainSettings
from feddg_bench.core.client import Batch, on_device, rows_on_device
from feddg_bench.data.augment import Augment, to_float
from feddg_bench.data.federated import Federation

RESIDENT_SHARE = 0.4
"""Largest share of a GPU's free memory that the decoded images may take."""
MAPPED = 64 * 2**20
"""Largest image file, in bytes, whose pages may stay in the process's memory. Those of a larger one
are returned to the system after reading, which keeps them in its cache."""


class ImageBank:
    """All images of a run, mapped from disk or resident on a GPU.

    Args:
        federation: The federation whose images these are.
        device: Device of the batches.
        sharing: Number of workers on the device, each with its own copy of the images.
    """

    def __init__(self, federation: Federation, device: torch.device, sharing: int = 1) -> None:
        images = federation.images
        self._mapped: mmap.mmap | None = None
        self.encoded, self.views = federation.views > 0, max(1, federation.views)
        if isinstance(images, Path):
            side = federation.size
            rows = len(federation.labels) * self.views
            shape = (rows, side, side, federation.channels)
            with images.open("rb") as file:
                # Copy on write: nothing is written, but PyTorch rejects a read-only array.
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            pixels = np.frombuffer(
                self._mapped, federation.pixels, count=prod(shape), offset=federation.offset
            )
            images = pixels.reshape(shape)
        self.images = torch.from_numpy(images)
        self.device = device
        self.labels = torch.from_numpy(federation.labels).to(device)
        if device.type != "cpu":
            free, _ = torch.get_device_module(device).mem_get_info(device)
            if self.images.nbytes * sharing < RESIDENT_SHARE * free:
                self.images = self.images.to(device)
        self._here = self.images.device.type == device.type

    def _give_back(self) -> None:
        """Release the pages of earlier batches; reading one image can map megabytes."""
        mapped = self._mapped
        if mapped is not None and len(mapped) > MAPPED and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)

    def take(self, index: Tensor, *others: Tensor, view: Tensor | int = 0) -> tuple[Tensor, ...]:
        """Return copies of images, [B, H, W, C] as stored, and their labels [B], on the device.

        Args:
            index: Rows of the array, int64 [B] on the CPU.
            others: Tensors on the CPU, returned on the device after the labels.
            view: View of each image if they are encoded, int64 [B] on the CPU or one for all.
        """
        self._give_back()
        stored = index if self.views == 1 else index * self.views + view
        rows, places, *others_there = on_device([index, stored, *others], self.device)
        if self._here:
            images = self.images.index_select(0, places)
        else:
            (images,) = on_device([self.images.index_select(0, stored)], self.device)
        return images, self.labels.index_select(0, rows), *others_there

    def look(self, index: Tensor, *others: Tensor) -> tuple[Any, ...]:
        """Like `take`, but on a CPU return views of the stored images, [1, H, W, C], not copies."""
        if self.device.type != "cpu":
            return self.take(index, *others)
        self._give_back()
        return [self.images[row : row + 1] for row in index.tolist()], self.labels[index], *others


class ClientImages:
    """The images of one client; all its batches are copies."""

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
        generator: torch.Generator,
        shuffle: bool = False,
        augment: bool = False,
        views: int = 1,
        companions: Tensor | None = None,
        parts: Iterable[Tensor] | None = None,
        domains: Tensor | None = None,
    ) -> Iterator[Batch]:
        """Yield every image once, or the parts given, in batches on the device.

        With ``domains`` (one per image of the client), those of a batch are its last entry.
        """
        count = len(self.index)
        if parts is None:
            order = torch.randperm(count, generator=generator) if shuffle else torch.arange(count)
            parts = order.split(self.train.batch_size)
        drawn = augment and self.bank.views > 1  # one view of each encoded image
        augment = augment and not (self.augment.nothing or self.bank.encoded)
        height, width = self.bank.images.shape[1:3]
        for part in parts:
            if shuffle and self.train.drop_last_if_single and len(part) == 1 < count:
                continue
            index = self.index.index_select(0, part)
            if augment:
                draws = [
                    self.augment.draw(len(part), height, width, generator) for _ in range(views)
                ]
                tensors = chain.from_iterable(each.tensors for each in draws)
                images, labels, *moved = self.bank.look(index, *tensors)
                values = iter(moved)
                draws = [each._replace(tensors=tuple(islice(values, 4))) for each in draws]
                copies = [self.augment.apply(images, each) for each in draws]
            elif drawn:
                copies = []
                for _ in range(views):
                    view = torch.randint(self.bank.views, index.shape, generator=generator)
                    pixels, labels = self.bank.take(index, view=view)
                    copies.append(to_float(pixels))
            else:
                pixels, labels = self.bank.take(index)
                copies = [to_float(pixels)] * views
            if companions is not None:
                beside = rows_on_device(companions, part, labels.device)
                copies.append(self.augment.apply(beside, draws[0]) if augment else to_float(beside))
            batch = (copies[0] if len(copies) == 1 else torch.stack(copies)), labels
            yield batch if domains is None else (*batch, domains[part])
