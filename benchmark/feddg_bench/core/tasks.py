"""Learning tasks, classification or regression: loss, predictions, and accepted images.

Data sets and federations only name their task (``classification`` or ``regression``); this module
defines what that name means for every computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from feddg_bench.common.errors import DataError


@dataclass(frozen=True)
class LearningTask:
    """Loss and predictions of a task.

    Attributes:
        name: ``classification`` or ``regression``.
        loss: Maps outputs [B, C] or [B, 1], labels [B], and a reduction (``mean``, ``sum``,
            ``none``) to the training loss: a scalar, or [B].
        predict: Maps outputs to predictions [B]: class ids, int64, or numbers, float32.
    """

    name: str
    loss: Callable[[Tensor, Tensor, str], Tensor]
    predict: Callable[[Tensor], Tensor]


CLASSIFICATION = LearningTask(
    "classification",
    lambda logits, labels, how: F.cross_entropy(logits, labels, reduction=how),
    lambda logits: logits.argmax(dim=1),
)
REGRESSION = LearningTask(
    "regression",
    lambda outputs, targets, how: F.mse_loss(outputs.squeeze(1), targets, reduction=how),
    lambda outputs: outputs.squeeze(1).float(),
)
TASKS: Mapping[str, LearningTask] = {task.name: task for task in (CLASSIFICATION, REGRESSION)}
"""Tasks by name."""


class Prediction(NamedTuple):
    """Predictions for B images, on the CPU."""

    labels: Tensor  # int64 [B], class ids; float32 [B], the numbers of a regression
    probabilities: Tensor | None  # float32 [B, C] in [0, 1]; `None` for a regression


class Accepts(NamedTuple):
    """Which images a model accepts."""

    channels: int = 3
    rgb: bool = True  # whether they are red, green and blue in [0, 1]
    size: int | None = None  # side in pixels; `None` if it is not known

    def check(self, images: object) -> Tensor:
        """Return the images if the model accepts them.

        Raises:
            DataError: If they are not a float tensor [B, C, H, W] of the right size and range.
        """
        side = self.size or "S"
        expected = f"expected floats [B, {self.channels}, {side}, {side}]"
        expected += " in [0, 1]" if self.rgb else ", normalised as the data set's"
        if not isinstance(images, Tensor):
            raise DataError(f"images are a {type(images).__name__}: {expected}")
        shape = list(images.shape)
        if images.ndim != 4 or shape[1] != self.channels or not images.is_floating_point():
            raise DataError(
                f"images are {images.dtype} {shape}: {expected}; `transform` of a model makes them "
                f"from files, Pillow images and uint8 arrays"
            )
        if self.size is not None and shape[2:] != [self.size, self.size]:
            raise DataError(
                f"images have {shape[3]} x {shape[2]} pixels and the model was trained on "
                f"{self.size} x {self.size}: give them to its `transform` first"
            )
        if self.rgb and not bool(((images >= 0) & (images <= 1)).all()):
            low, high = float(images.min()), float(images.max())
            raise DataError(
                f"images have values from {low:g} to {high:g}: {expected}, neither bytes nor "
                f"normalised; bytes are divided by 255"
            )
        return images


def answer(task: LearningTask, outputs: Tensor) -> Prediction:
    """Return the predictions for a model's outputs, [B, C] or [B, 1]."""
    outputs = outputs.float().cpu()
    shares = torch.softmax(outputs, dim=1) if task is CLASSIFICATION else None
    return Prediction(task.predict(outputs), shares)
