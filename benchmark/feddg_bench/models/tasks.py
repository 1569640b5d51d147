"""Learning tasks, classification or regression: loss and predictions.

Data sets and federations only name their task (``classification`` or ``regression``); this module
defines what that name means for every computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


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
