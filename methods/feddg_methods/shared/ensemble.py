"""An ensemble of linear classifiers on shared features, one in each slot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from feddg_bench.core.aggregation import server_step, streaming_mean
from feddg_bench.core.messages import Weights


class Ensemble(nn.Module):
    """The classifiers of all slots, as buffers: weight (S, C, D) and bias (S, C).

    Args:
        classifier: What every slot starts from.
        slots: S.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, classifier: nn.Linear, slots: int) -> None:
        super().__init__()
        self.register_buffer("weight", classifier.weight.detach().repeat(slots, 1, 1))
        self.register_buffer("bias", classifier.bias.detach().repeat(slots, 1))

    def forward(self, z: Tensor) -> Tensor:
        """Map features (B, D) to the logits of every slot, (B, S, C), in the buffers' type."""
        logits = F.linear(z, self.weight.flatten(0, 1), self.bias.flatten())
        return logits.view(len(z), *self.bias.shape).to(self.bias.dtype)


def ensemble_logits(
    logits: Tensor, mean: Literal["probabilities", "logits"] = "probabilities"
) -> Tensor:
    """Return the logits (B, C) of an ensemble whose members have the logits (B, S, C).

    The logarithm of the mean of probabilities, or the mean of logits; of one member its own.
    """
    if logits.shape[1] == 1 or mean == "logits":
        return logits.mean(dim=1)
    return logits.log_softmax(dim=2).logsumexp(dim=1) - math.log(logits.shape[1])


def frozen_loss(logits: Tensor, labels: Tensor, slot: int) -> Tensor:
    """Return the cross-entropy of all slots but one, mean over slots and images: a scalar.

    Args:
        logits: Of all slots, (B, S, C), with S at least 2.
        labels: Class ids, (B,).
        slot: The one to leave out.
    """
    others = [j for j in range(logits.shape[1]) if j != slot]
    return F.cross_entropy(logits[:, others].flatten(0, 1), labels.repeat_interleave(len(others)))


def assemble(
    old: Mapping[str, Tensor], received: Mapping[int, list[tuple[Weights, float]]], lr: float = 1.0
) -> Weights:
    """Put classifiers into their slots: new tensors, with slots nobody sent to as they were.

    Args:
        old: Tensors of all slots, (S, ...) each.
        received: For a slot, what its clients sent, (...) each, with their shares in its mean.
        lr: Step from a slot's old classifier to its new one.
    """
    new = {name: tensor.clone() for name, tensor in old.items()}
    for slot, states in received.items():
        before = {name: tensor[slot] for name, tensor in old.items()}
        after = server_step(before, streaming_mean(states), lr, before)
        for name, tensor in after.items():
            new[name][slot] = tensor
    return new
