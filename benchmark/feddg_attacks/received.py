"""Content of the messages that a client receives: what others sent, or means of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from feddg_attacks.capture import Exchange, Message
from feddg_attacks.shadow import Rows, Shadow, read
from feddg_bench.core.messages import Task, leaves, nbytes


@dataclass(frozen=True)
class ReceivedRows:
    """One message to a client, read as if a client had sent it."""

    item: str  # its name
    sent_as: str  # the name of the item that it is read as
    task: Task  # the task to which a client replies with such an item
    rows: tuple[Rows, ...]  # one for each part of it, or one that holds many
    images: int  # of the client
    bytes: int  # of the message


def read_received(
    messages: Sequence[Message], own: Sequence[Exchange], shadow: Shadow
) -> Iterator[ReceivedRows]:
    """Yield what a client can read in the messages to it.

    A client knows what it sends itself, and reads data with the same trailing shape as this item of
    others. A model is read as its change from the previous one, which is the mean of updates.

    Args:
        messages: The messages to it, in order.
        own: Its own exchanges.
        shadow: Its copy of the client half.
    """
    before: Exchange | None = None
    for message in messages:
        e, size = message.exchange, nbytes(message.value)
        if message.item == "weights":
            task = before.task if before is not None else e.task
            if task.round < e.task.round and task.call == "fit":
                rows = read(message.value, "weights", "fit", shadow.method, task, {})
                if rows is not None:
                    yield ReceivedRows("weights", "weights", task, (rows,), e.images, size)
            before = e
            continue
        for exchange, item in ((x, name) for x in own for name in x.sent):
            matching = tuple(_alike(message, exchange, item, shadow))
            if matching:
                yield ReceivedRows(message.item, item, exchange.task, matching, e.images, size)
                break


def _alike(message: Message, exchange: Exchange, item: str, shadow: Shadow) -> Iterator[Rows]:
    """Yield the parts of a message that look like an item that the client sends."""
    value, task = exchange.sent[item], exchange.task
    form = read(value, item, task.call, shadow.method, task, exchange.sent)
    if form is None or not isinstance(value, Tensor):
        return
    shape = value.shape[1:] if form.each or value.shape[0] == 1 else value.shape
    for _, leaf in leaves(message.value):
        if not isinstance(leaf, Tensor) or leaf.dtype != value.dtype or not leaf.numel():
            continue
        if len(shape) and leaf.shape[-len(shape) :] == shape:
            rows = leaf.reshape(-1, *shape)
            for part in [rows] if form.each else [row.view(value.shape) for row in rows]:
                matching = read(part, item, task.call, shadow.method, task, {})
                if matching is not None:
                    yield matching
