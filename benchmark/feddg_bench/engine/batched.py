"""Vectorised training: one step for several clients of a worker instead of one for each.

Batches, draws and the optimizer's arithmetic are those of `Method.fit`; gradients are equal up to
rounding, since PyTorch guarantees no more for several models at once. These runs therefore have
their own keys. Layers that cannot be vectorised are refused: live batch normalisation, whose
statistics change inside the step, and random layers, as ``vmap`` does not draw from our streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from feddg_bench.common.errors import PluginError, SettingsError, first_line, printable
from feddg_bench.core.client import Batch, Client
from feddg_bench.core.flaws import check_loss
from feddg_bench.core.messages import LocalUpdate, Task, Weights
from feddg_bench.core.method import Method
from feddg_bench.core.state import kept, restore


def grouped(tasks: Iterator[Task], size: int) -> Iterator[list[Task]]:
    """Yield, in order, ``fit`` tasks in groups of ``size`` that train together, others alone."""
    for task in tasks:
        yield [task, *islice(tasks, size - 1 if task.call == "fit" else 0)]


def fit_together(
    method: Method, clients: Sequence[Client], private: Mapping[str, Tensor]
) -> list[LocalUpdate]:
    """Do the work of `Method.fit` for several clients of one round, and return their weights.

    Epochs begin together; a client that has no batch left waits, and its parameters and its
    optimizer's moments do not change. If batches differ in size, the smaller are padded with images
    of weight 0; if the method has its own training step, each size takes a separate step instead.

    Args:
        method: The module, in training mode; its own federated and private tensors are not used.
        clients: Clients with received content; their memories change as in `Method.fit`.
        private: Private state of a client that has not trained yet.

    Raises:
        SettingsError: If the method's training step cannot be vectorised.
    """
    train, device = clients[0].train, clients[0].fabric.device
    own = [{**client.memory.pop("private state", private), **client.weights} for client in clients]
    stacks = {
        name: torch.stack([weights[name].to(device) for weights in own]).contiguous()
        for name in own[0]
    }
    names = [n for n, p in method.named_parameters() if p.requires_grad and n in stacks]
    # One optimizer over the clients' parts of the stacks: it skips tensors without a gradient.
    parts = [[stacks[name][k] for name in names] for k in range(len(clients))]
    optimizer = method.configure_optimizers()
    optimizer.param_groups[0]["params"] = list(chain(*parts))
    for client, part in zip(clients, parts, strict=True):
        restore(optimizer, part, client.memory.get("optimizer", {}))
    step = _Step(method, clients)
    for epoch in range(train.local_epochs):
        optimizer.param_groups[0]["lr"] = train.lr * clients[0].lr_factor(epoch)
        for index, batches in enumerate(zip_longest(*(method.batches(c, epoch) for c in clients))):
            optimizer.zero_grad()
            present = {k: batch for k, batch in enumerate(batches) if batch is not None}
            for group in step.groups(present):
                losses, gradients = step.gradients(stacks, names, group, index)
                for i, (k, (_, labels)) in enumerate(group.items()):
                    for value, gradient in zip(parts[k], gradients, strict=True):
                        value.grad = None if gradient is None else gradient[i]
                    clients[k].log("loss", losses[i], len(labels))
            optimizer.step()
    for k, (client, part) in enumerate(zip(clients, parts, strict=True)):
        if private:
            client.memory["private state"] = _copy(stacks, method.state.private, k)
        if train.optimizer_state == "persist":
            client.memory["optimizer"] = kept(optimizer, part)
    return [LocalUpdate(_copy(stacks, method.state.federated, k)) for k in range(len(clients))]


def _copy(stacks: Weights, names: Iterable[str], k: int) -> Weights:
    return {name: stacks[name][k].clone() for name in names}


class _Step(nn.Module):
    """The losses of several models, each on its own batch, and their gradients."""

    def __init__(self, method: Method, clients: Sequence[Client]) -> None:
        super().__init__()
        self.method = method
        self.plain = type(method).training_step is Method.training_step
        self.autocast = clients[0].fabric.autocast
        shared = ("round", "rounds", "weights", "fabric", "train", "seed", "sources")
        every = {name: getattr(clients[0], name) for name in shared}
        self.client = cast(Client, SimpleNamespace(**every, broadcast=clients[0].broadcast))
        self.warm = False

    def groups(self, present: dict[int, Batch]) -> Iterator[dict[int, Batch]]:
        """Yield groups of batches, by client, that can be stacked."""
        sizes = [0] if self.plain else sorted({len(labels) for _, labels in present.values()})
        for size in sizes:
            yield {k: b for k, b in present.items() if self.plain or len(b[1]) == size}

    def gradients(
        self, stacks: Weights, names: Sequence[str], group: dict[int, Batch], index: int
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the losses [K] of a group, and the gradients [K, ...] of each parameter."""
        self.index = index
        images, labels, shares = padded(list(group.values()))
        rows = list(group)
        some = len(rows) < len(next(iter(stacks.values())))
        weights = {n: stack[rows] if some else stack.detach() for n, stack in stacks.items()}
        leaves = [weights[name].requires_grad_() for name in names]
        try:
            with self.method.state.serving(self.client), self.autocast():
                if not self.warm:  # layers must not cache vmap's tensors at their first call
                    with torch.no_grad():
                        self.method(images[0, :1])
                    self.warm = True
                given = {f"method.{name}": weight for name, weight in weights.items()}
                losses = vmap(lambda *values: functional_call(self, values[0], values[1:]))(
                    given, images, labels, shares
                )
                total = losses.sum()
        except PluginError:
            raise
        except Exception as error:
            why = printable(first_line(error))
            raise SettingsError(
                f"clients of {type(self.method).__name__} cannot step together, as its training "
                f"step is made ({why}): set engine.clients=exact"
            ) from error
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        return losses.detach(), [None if g is None else g.contiguous() for g in gradients]

    def forward(self, images: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        """Return one model's loss on its batch, whose images have shares [B] that sum to 1."""
        if not self.plain:
            loss = self.method.training_step((images, labels), self.index)
            check_loss(type(self.method).__name__, loss)
            return loss.reshape(())  # [1] is one number, too
        losses = self.method.task.loss(self.method(images), labels, "none")
        return (losses * shares).sum()


def padded(batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack K batches, and pad the smaller ones with zeros.

    Returns:
        Images [K, B, C, H, W], labels [K, B], and shares [K, B] of the images in the mean of their
        batch: 1 over its size, and 0 for padding.
    """
    most = max(len(labels) for _, labels in batches)

    def fill(values: Tensor) -> Tensor:
        missing = values.new_zeros(most - len(values), *values.shape[1:])
        return torch.cat([values, missing]) if len(missing) else values

    images, labels = (
        torch.stack([fill(part) for part in parts]) for parts in zip(*batches, strict=True)
    )
    ones = [torch.ones(len(b), device=labels.device) / len(b) for _, b in batches]
    return images, labels, torch.stack([fill(part) for part in ones])
