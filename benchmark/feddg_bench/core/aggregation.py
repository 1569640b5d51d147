"""Pure functions on model weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from feddg_bench.core.messages import Weights


def weighted_mean(weights: Iterable[Mapping[str, Tensor]], shares: Iterable[float]) -> Weights:
    """Return the convex mean of K model states by K shares; see `streaming_mean`."""
    return streaming_mean(zip(weights, shares, strict=True))


def streaming_mean(states: Iterable[tuple[Mapping[str, Tensor], float]]) -> Weights:
    """Return the convex mean of model states; integer tensors take the maximum.

    Streams: only the running mean and one state are alive at a time. The running mean moves towards
    each state by its part of the shares seen so far, so that one client's mean is its state bit for
    bit, and a state of share 0 changes nothing. Inputs are read in the order given; the caller
    gives client order, hence the result does not depend on which client answered first.

    Args:
        states: K states with equal names and shapes, each with its share: a number >= 0, such as
            an image count. Shares are normalised to sum 1 here.

    Returns:
        A new state; no input is changed.

    Raises:
        ValueError: If no share is positive.
    """
    total = 0.0
    mean: Weights = {}
    floats: list[str] = []
    integers: list[str] = []
    for state, share in states:
        total += max(share, 0.0)
        if share > 0 and not mean:
            mean = {name: tensor.detach().clone() for name, tensor in state.items()}
            floats = [name for name, tensor in mean.items() if tensor.is_floating_point()]
            integers = [name for name in mean if name not in set(floats)]
        elif share > 0:
            if floats:
                torch._foreach_lerp_(
                    [mean[name] for name in floats], [state[name] for name in floats], share / total
                )
            for name in integers:
                torch.maximum(mean[name], state[name], out=mean[name])
        del state  # or it would stay while the next client trains
    if not mean:
        raise ValueError("no state with a positive share to average")
    return mean


def server_step(
    old: Mapping[str, Tensor], new: Weights, lr: float, names: Iterable[str]
) -> Weights:
    """Return ``new`` with the named tensors moved only ``lr`` of the way from ``old``.

    Names are those of trainable parameters: buffers are never extrapolated.
    """
    if lr != 1.0:
        for name in names:
            new[name] = old[name] + lr * (new[name] - old[name])
    return new
