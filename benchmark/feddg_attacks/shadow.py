"""The attacker's copy of the client half, and the content of messages as vectors.

The method is public. So an attacker computes with its own copy of the client half what a client
with a single image would have sent, and compares. This works for every method and everything that
it sends: styles, statistics, prototypes, gradients, weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddg_attacks.attack import Pictures
from feddg_attacks.capture import Message
from feddg_bench.common.streams import derive_seed, torch_generator
from feddg_bench.config.schema import AugmentSettings, PrivacySettings, RunSettings
from feddg_bench.core.messages import Task, content
from feddg_bench.core.method import Method
from feddg_bench.data.client_images import ClientImages
from feddg_bench.data.federated import Federation
from feddg_bench.engine.construction import build_run_method
from feddg_bench.engine.worker import Worker, WorkerSpec

MOST_NUMBERS = 2048
"""Maximum length of a vector: longer ones, such as those of weights, are sketched."""
REPEATS = 4
"""Measurements of each image's statistic, since clients can measure augmented images."""
PLAIN = AugmentSettings(
    crop_scale=None, flip=0, brightness=0, contrast=0, saturation=0, hue=0, grayscale=0
)
"""No augmentation."""


@dataclass(frozen=True)
class Rows:
    """The content of a message, as vectors."""

    vectors: Tensor  # float64 [J, P]
    each: bool  # whether a row is of one image or class, not of all images of the client
    mean: bool  # whether rows are means over images, not sums
    keys: Tensor | None = None  # class of each row, int64 [J], if rows are of classes


def read(
    value: Any, item: str, call: str, method: Method, task: Task, beside: Mapping[str, Any]
) -> Rows | None:
    """Return an item's content as vectors; ``None`` if it holds no measured number.

    Weights are read as their change from those received. An item whose declared form ends like
    ``[2, C]`` holds means and standard deviations, and is read as first and second moments, which
    are means over images.

    Args:
        value: What was sent.
        item: Its declared name.
        call: The client function that sent it.
        method: Declares the forms.
        task: The client's task.
        beside: Everything that was sent in the same reply.
    """
    declared = method.uplink.get(call, ())
    form = declared.get(item, "") if isinstance(declared, Mapping) else ""
    form = form if isinstance(form, str) else ""
    if isinstance(value, Mapping):
        old = task.weights if item == "weights" else {}
        parts = [
            (tensor - old[name] if name in old else tensor).double().flatten()
            for name, tensor in value.items()
            if isinstance(tensor, Tensor) and tensor.is_floating_point()
        ]
        return Rows(sketch(torch.cat(parts))[None], each=False, mean=False) if parts else None
    if isinstance(value, float):
        return Rows(torch.tensor([[value]], dtype=torch.float64), each=False, mean=True)
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return None
    numbers = value.double()
    sizes = [size.strip() for size in form[form.find("[") + 1 : form.find("]")].split(",")]
    each = sizes[0].isalpha() and sizes[0].islower()
    if sizes[-2:-1] == ["2"]:
        mean, std = numbers.unbind(-2)
        numbers = torch.stack([mean, std.square() + mean.square()], -2)
    rows = numbers.flatten(1) if each else numbers.flatten()[None]
    keys = [
        other
        for other in beside.values()
        if isinstance(other, Tensor) and other.dtype == torch.int64 and other.shape == (len(rows),)
    ]
    key = keys[0] if each and keys else None
    return Rows(torch.stack([sketch(row) for row in rows]), each, mean=True, keys=key)


def sketch(vector: Tensor) -> Tensor:
    """Return a vector's count sketch of `MOST_NUMBERS` numbers, or itself if it is short.

    Each number is added to a random place with a random sign. Both are the same for all vectors of
    a length, so that scalar products are preserved on average.
    """
    if len(vector) <= MOST_NUMBERS:
        return vector
    places, signs = _sketching(len(vector))
    return vector.new_zeros(MOST_NUMBERS).index_add_(0, places, vector * signs)


@lru_cache(2)
def _sketching(numbers: int) -> tuple[Tensor, Tensor]:
    draw = torch_generator(0, "sketch", numbers)
    places = torch.randint(MOST_NUMBERS, (numbers,), generator=draw)
    return places, torch.randint(2, (numbers,), generator=draw) * 2 - 1


class Shadow:
    """The attacker's own clients, with one image each.

    They draw their own random numbers, take plain SGD steps whatever the run's optimizer, and
    train on images as stored; everything else is as in the run.

    Args:
        settings: The run's settings.
        federation: Its names, classes and shapes are known to all; its images are not read.
        pictures: Images to ask about: public ones and targets.
    """

    def __init__(self, settings: RunSettings, federation: Federation, pictures: Pictures) -> None:
        train = settings.train.model_copy(
            update={"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.01}
        )
        known = replace(
            federation,
            images=pictures.images,
            labels=pictures.labels,
            clients={name: np.zeros(1, dtype=np.int64) for name in federation.clients},
            evaluation=(),
            domain_ids=pictures.domains,
            validation={},
            groups=np.empty(0, dtype=np.int64),
        )
        # The copy adds no noise for privacy, even if the real client does.
        own = settings.model_copy(update={"train": train, "privacy": PrivacySettings()})
        self.method = build_run_method(own, known)
        self.count = len(pictures)
        self.augment = settings.augment
        self.validates = bool(federation.validation)
        self.worker = Worker(WorkerSpec(own, known), self.method)

    def sent(self, task: Task, image: int, repeat: int) -> Any:
        """Return what the task's client would send if it held only one image.

        ``repeat`` numbers the attacker's draws. Training uses the image as stored.
        """
        worker = self.worker
        seed = derive_seed(0, "shadow", repeat)
        worker.settings = worker.settings.model_copy(update={"seed": seed})
        augment = PLAIN if task.call == "fit" else self.augment
        held = ClientImages(worker.bank, np.array([image]), augment, worker.settings.train)
        worker.data[task.client] = held
        worker.domain_ids[task.client] = torch.from_numpy(
            worker.spec.federation.domain_ids[[image]]
        )
        if self.validates:
            worker.validation[task.client] = held
        return content(worker.run(task).value)

    def answers(self, message: Message) -> bool:
        """Return whether a new client with this task would send a readable item of this name."""
        task = message.exchange.task
        sent = self.sent(task, 0, 0)
        value = sent.get(message.item)
        return read(value, message.item, task.call, self.method, task, sent) is not None

    def vectors(self, task: Task, item: str, images: Sequence[int]) -> Tensor:
        """Return the vector of each image, float64 [n, P]; statistics are means over `REPEATS`."""
        times = range(1 if task.call == "fit" else REPEATS)
        return torch.stack(
            [
                torch.stack([self.row(self.sent(task, i, r), item, task) for r in times]).mean(0)
                for i in images
            ]
        )

    def row(self, sent: Any, item: str, task: Task) -> Tensor:
        """Return the first row of an item."""
        rows = read(sent[item], item, task.call, self.method, task, sent)
        assert rows is not None  # noqa: S101 - the message that is attacked was readable
        return rows.vectors[0]

    def rows(self, message: Message) -> Rows | None:
        """Return the content of a message that a client sent, as `read` does."""
        e = message.exchange
        return read(message.value, message.item, e.task.call, self.method, e.task, e.sent)
