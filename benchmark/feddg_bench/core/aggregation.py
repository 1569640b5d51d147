"""Pure functions on model weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from feddg_bench.core.messages import Weights

T = TypeVar("T")


def fold(items: Iterable[T], add: Callable[[T], object]) -> None:
    """Pass every item to ``add`` and keep none, so that only one is alive at a time.

    A ``for`` loop would keep its item while the next one is made, such as a client's whole model
    while the next client trains.
    """
    deque(map(add, items), maxlen=0)


def watched(items: Iterable[T], look: Callable[[T], object]) -> Iterator[T]:
    """Yield every item after passing it to ``look``, and keep none; see `fold`."""

    def seen(item: T) -> T:
        look(item)
        return item

    return map(seen, items)


class RunningMean:
    """The convex mean of the model states added so far; integer tensors take the maximum.

    It moves towards each new state by that state's fraction of the shares so far. So the mean of
    one client is its state bit for bit, and a state with share 0 changes nothing.

    Attributes:
        mean: A separate copy, empty before the first state with a positive share.
    """

    def __init__(self) -> None:
        self.mean: Weights = {}
        self.total = 0.0

    def add(self, state: Mapping[str, Tensor], share: float) -> None:
        """Add a state with its share, a number >= 0; the state is not changed."""
        self.total += max(share, 0.0)
        if share <= 0:
            return
        if not self.mean:
            self.mean = {name: tensor.detach().clone() for name, tensor in state.items()}
            return
        floats = [name for name, tensor in self.mean.items() if tensor.is_floating_point()]
        if floats:
            torch._foreach_lerp_(
                [self.mean[name] for name in floats],
                [state[name] for name in floats],
                share / self.total,
            )
        for name in self.mean.keys() - set(floats):
            torch.maximum(self.mean[name], state[name], out=self.mean[name])


def streaming_mean(states: Iterable[tuple[Mapping[str, Tensor], float]]) -> Weights:
    """Return the `RunningMean` of model states.

    Only the running mean and one state are alive at a time. Inputs are read in the order given;
    callers use client order, so the result does not depend on which client answered first.

    Args:
        states: K states with equal names and shapes, each with its share: a number >= 0, such as
            an image count. Shares are normalised to sum 1 here.

    Returns:
        A new state; no input is changed.

    Raises:
        ValueError: If no share is positive.
    """
    running = RunningMean()
    fold(states, lambda pair: running.add(*pair))
    if not running.total:
        raise ValueError("no state with a positive share to average")
    return running.mean


def weighted_mean(weights: Iterable[Mapping[str, Tensor]], shares: Iterable[float]) -> Weights:
    """Return the convex mean of K model states by K shares; see `streaming_mean`."""
    return streaming_mean(zip(weights, shares, strict=True))


def server_step(
    old: Mapping[str, Tensor], new: Weights, lr: float, names: Iterable[str]
) -> Weights:
    """Return ``new`` with each named tensor replaced by ``old + lr * (new - old)``.

    Names are those of trainable parameters: buffers are never extrapolated.
    """
    if lr != 1.0:
        for name in names:
            new[name] = old[name] + lr * (new[name] - old[name])
    return new
