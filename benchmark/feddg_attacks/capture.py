"""Messages between server and clients of a run, captured as sent, and who sees which of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from feddg_attacks.records import Attacker
from feddg_bench.core.messages import content, copied
from feddg_bench.runs.observer import Observer

if TYPE_CHECKING:
    from feddg_bench.core.messages import Payload, Reply, Task
    from feddg_bench.runs.setup import Run


@dataclass(frozen=True, slots=True)
class Exchange:
    """One task of a client and its reply, without the client's memory."""

    task: Task  # what the client received
    sent: Payload  # its reply, by declared name
    images: int  # number of training images that it states


@dataclass(frozen=True, slots=True)
class Message:
    """One declared item, sent or received by a client."""

    item: str  # declared name, then dots and the path in it: `style`, `bank.client_3.overall`
    value: Any  # as sent; `None` if it was not kept, like most updates if clients are many
    up: bool  # whether a client sent it
    exchange: Exchange  # the exchange that it belongs to

    @property
    def client(self) -> str:
        """The client that sent or received it."""
        return self.exchange.task.client

    @property
    def when(self) -> tuple[int, str]:
        """The round (0: before the first) and the client function."""
        return self.exchange.task.round, self.exchange.task.call


class Capture(Observer):
    """Keeps the messages of a run on the CPU, and of these only what the method declares.

    Args:
        wanted: Returns whether an attack uses the update that answers a task. Other updates are
            not kept: the models of hundreds of clients fill any memory.
    """

    def __init__(self, wanted: Callable[[Task], bool] = lambda _: True) -> None:
        self.wanted = wanted
        self.exchanges: list[Exchange] = []

    def replied(self, run: Run, task: Task, reply: Reply[Any]) -> None:
        """Keep a task and its reply, without the client's memory, which is never sent."""
        method, cpu = run.method, torch.device("cpu")
        told = {k: v for k, v in task.told.items() if k in method.downlink}
        broadcast = {k: v for k, v in task.broadcast.items() if k in method.downlink}
        declared = method.uplink.get(task.call, ())
        sent = {k: v for k, v in content(reply.value).items() if k in declared}
        if "weights" in sent and not self.wanted(task):
            sent = dict.fromkeys(sent)
        seen = replace(task, memory={}, told=copied(told, cpu), broadcast=copied(broadcast, cpu))
        self.exchanges.append(Exchange(seen, copied(sent, cpu), reply.num_examples))


def visible(
    exchanges: Iterable[Exchange], attacker: Attacker, own: str | None = None
) -> Iterator[Message]:
    """Yield the messages that an attacker sees; ``own`` is the client that attacks."""
    for exchange in exchanges:
        task = exchange.task
        if attacker != "client":
            for name, value in exchange.sent.items():
                yield Message(name, value, True, exchange)
        if attacker == "eavesdropper" or (attacker == "client" and task.client == own):
            weights = {"weights": task.weights} if task.weights else {}
            received: Mapping[str, Any] = {**weights, **task.broadcast, **task.told}
            for name, value in received.items():
                yield Message(name, value, False, exchange)


def by_item(messages: Iterable[Message], clients: Collection[str]) -> list[list[Message]]:
    """Return the messages of some clients, one list per item and client function.

    Messages that were not kept are left out.
    """
    groups: dict[tuple[str, str], list[Message]] = {}
    for message in messages:
        group = groups.setdefault((message.item, message.when[1]), [])
        group += [message] if message.client in clients and message.value is not None else []
    return [group for group in groups.values() if group]
