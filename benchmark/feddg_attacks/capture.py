"""What crosses between server and clients in a run, kept as it crosses, and who sees what of it."""

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
    """One question to a client and its answer, without what the client remembers."""

    task: Task  # what the client received
    sent: Payload  # what it answered, by declared name
    images: int  # how many images it says it trains on


@dataclass(frozen=True, slots=True)
class Message:
    """One declared item that crossed."""

    item: str  # declared name, then dots and the path in it: `style`, `bank.client_3.overall`
    value: Any  # as it crossed; `None` if it was not kept, as most updates of many clients
    up: bool  # whether a client sent it
    exchange: Exchange  # the exchange in which it crossed

    @property
    def client(self) -> str:
        """The client that sent or received it."""
        return self.exchange.task.client

    @property
    def when(self) -> tuple[int, str]:
        """The round, 0 before the first, and the client function."""
        return self.exchange.task.round, self.exchange.task.call


class Capture(Observer):
    """Keeps what crosses in a run, on the CPU: what the method declares, and nothing else.

    Args:
        wanted: Returns for a task whether an attack looks at the update that answers it. Others
            are not kept: the models of hundreds of clients fill any memory.
    """

    def __init__(self, wanted: Callable[[Task], bool] = lambda _: True) -> None:
        self.wanted = wanted
        self.exchanges: list[Exchange] = []

    def replied(self, run: Run, task: Task, reply: Reply[Any]) -> None:
        """Keep a question and its answer; what the client remembers never crosses."""
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
    """Return the messages of some clients, a list for each item and client function.

    Those that were not kept are left out.
    """
    groups: dict[tuple[str, str], list[Message]] = {}
    for message in messages:
        group = groups.setdefault((message.item, message.when[1]), [])
        group += [message] if message.client in clients and message.value is not None else []
    return [group for group in groups.values() if group]
