"""Interface of the server half: global model, broadcast, cohorts and requests to clients."""

from __future__ import annotations

import logging
import math
import time
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar

from feddg_bench.common.errors import ClientError, PluginError, SettingsError
from feddg_bench.common.streams import generator
from feddg_bench.common.titles import counted
from feddg_bench.config.schema import FederationSettings
from feddg_bench.core.aggregation import RunningMean
from feddg_bench.core.flaws import Flaw, Form, misfit, misform, nonfinite
from feddg_bench.core.messages import (
    LocalUpdate,
    Payload,
    Reply,
    Task,
    Weights,
    content,
    copied,
    leaf_bytes,
    leaves,
    nbytes,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

Uplink = Mapping[str, tuple[str, ...] | Mapping[str, Form]]
"""Client function -> names of the values it may send, or their `feddg_bench.core.flaws.Form`.

``weights`` has the form ``model`` if no form is given.
"""


class ClientPool(Protocol):
    """The part of an executor that the server uses: running tasks, and the clients' memories."""

    memories: dict[str, Payload]

    def map(self, tasks: Iterable[Task]) -> Iterator[Reply[Any]]:
        """Run the tasks lazily, as replies are taken, and yield replies in the tasks' order."""


class Protection(Protocol):
    """A protection between the clients' replies and the server half."""

    poisson: bool
    """Whether each client is sampled independently."""

    def applied(
        self, server: Server, call: str, clients: Sequence[str], replies: Iterator[Reply[Any]]
    ) -> Iterator[Reply[Any]]:
        """Yield what the server half may see of the replies of ``clients`` to a call."""


class NoReplyError(Exception):
    """No reply to a call was valid, or their sum was invalid; the round is skipped and counted.

    Args:
        what: Name of the missing or invalid result.
        why: Reason and remedy, for the case that this ends the run.
    """

    def __init__(
        self,
        what: str,
        why: str = "every one held NaN, infinity or the wrong form; check the images and the "
        "method's settings",
    ) -> None:
        super().__init__(what)
        self.why = why


class Broadcast(UserDict[str, Any]):
    """Content for all clients, in addition to the model; counted when first sent to a client.

    Assign a new value to change an entry: a value changed in place is not sent again.
    """

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        self.versions: dict[str, int] = {}
        self.received: dict[str, dict[str, int]] = {}
        super().__init__(content)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.versions[key] = self.versions.get(key, 0) + 1

    def deliver(self, client: str) -> int:
        """Return the bytes needed to bring ``client`` up to date, and mark it as up to date."""
        known = self.received.setdefault(client, {})
        stale = [key for key in self if known.get(key) != self.versions[key]]
        known.update((key, self.versions[key]) for key in stale)
        return sum(nbytes(self[key]) for key in stale)


class Ledger:
    """Cost and faults of one round.

    Attributes:
        bytes: Bytes sent, ``up`` and ``down``.
        seconds: Wall time by phase.
        dropped: Replies, and sums (client ``server``), that were left out: client, tensor, reason.
        clients: Seconds of work by client.
        protection: The part of ``bytes`` that is sent only for protection.
    """

    def __init__(self) -> None:
        self.bytes = {"up": 0, "down": 0}
        self.protection: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.dropped: list[dict[str, str]] = []
        self.clients: dict[str, float] = {}
        self._sums: dict[str, tuple[float, int]] = {}

    def spend(self, phase: str, seconds: float) -> None:
        """Add wall time to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def log(self, metrics: Mapping[str, float], weight: int) -> None:
        """Add a client's finite metrics to the round's means, weighted by its images."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                continue
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value * weight, count + weight)

    def means(self) -> dict[str, float]:
        """Return the round's means over the clients that answered."""
        return {name: total / count for name, (total, count) in self._sums.items()}


class Server:
    """The global model, and access to the clients.

    Attributes:
        weights: The global model; the server half assigns it, which makes a new version.
        version: Number of the current version.
        received: Version that each client got last; the same one is not sent to it again.
        broadcast: Content for all clients, in addition to the model.
        memory: State that the server half keeps between rounds; never sent.
        round: Current round from 1; 0 before the first.
        average: Mean of the models of the last rounds (``federation.average_rounds``); never sent.
        prepared: Whether the method's ``prepare`` has run.
        clients: Names of all clients that hold images, ascending.
        cohort: Names of the clients sampled for this round, ascending.
        ledger: Bytes, seconds and dropped clients of the current round.
        federation: Settings of rounds, shares and the server step.
        protection: Hides or changes replies; ``None`` for no protection.
    """

    def __init__(
        self,
        weights: Weights,
        clients: tuple[str, ...],
        executor: ClientPool,
        *,
        seed: int,
        federation: FederationSettings,
        uplink: Uplink,
        downlink: tuple[str, ...] = (),
        protection: Protection | None = None,
    ) -> None:
        self.protection = protection
        self.version = 0
        self.weights = weights
        self.received: dict[str, int] = {}
        self.broadcast = Broadcast()
        self.memory: Payload = {}
        self.average = RunningMean()
        self.round = 0
        self.prepared = False
        self.clients = clients
        self.cohort: tuple[str, ...] = clients
        self.ledger = Ledger()
        self.seed = seed
        self.federation = federation
        self._executor = executor
        self._uplink = uplink
        self._sizes: dict[str, int] = {}
        self._downlink = downlink

    @property
    def weights(self) -> Weights:
        """The global model."""
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._weights = weights
        self.version += 1

    def sampled(self, per_round: int | None) -> tuple[str, ...]:
        """Return this round's cohort of K clients, or of all; see `sample_clients`."""
        poisson = self.protection is not None and self.protection.poisson
        return sample_clients(
            self.clients, per_round, seed=self.seed, round=self.round, poisson=poisson
        )

    def ask(
        self,
        call: Callable[..., T],
        *,
        everyone: bool = False,
        weights: bool | Literal["once"] = True,
        tell: Mapping[str, Payload] | None = None,
    ) -> Iterator[Reply[T]]:
        """Run a client-half function on the cohort and yield replies in client order.

        Tasks are fixed at the call, but run only as replies are taken: with `streaming_mean`,
        `fold` or ``map``, only one reply is alive at a time. A reply is dropped and logged if it
        holds NaN, infinity or huge numbers, or does not have its declared form, which for weights
        is that of the model (``federation.on_fault``).

        Args:
            call: Bound method of the plugin, such as ``self.fit``. Only its name is sent.
            everyone: Ask all clients, not only this round's cohort.
            weights: Send the global model along; ``False`` for calls that do not read it, and
                ``"once"`` to send it only to clients that never had one. Bytes are counted for
                clients that do not have this version of the model yet.
            tell: Content for individual clients, by name; each finds its own in
                ``client.broadcast``. Keys must be declared in ``downlink``. Sent and counted at
                every call.

        Raises:
            NoReplyError: If every reply was dropped.
            PluginError: If the broadcast or a reply holds something the method does not declare,
                or every reply has the wrong form.
            ClientError: If a fault ends the run, or a client raised an exception.
        """
        name = call.__name__
        tell = tell or {}
        told = set(self.broadcast).union(*tell.values())
        undeclared = sorted(told - set(self._downlink))
        if undeclared:
            raise PluginError(
                f"the server tells clients {', '.join(undeclared)}, which the method does not "
                f"declare: add it to downlink"
            )
        asked = self.clients if everyone else self.cohort
        known = self.received if weights == "once" else {}
        given = {client for client in asked if weights and client not in known}
        broadcast = dict(self.broadcast)
        tasks = [
            Task(
                client,
                name,
                self.round,
                self.weights if client in given else {},
                broadcast,
                told=tell.get(client, {}),
            )
            for client in asked
        ]
        stale = [client for client in given if self.received.get(client) != self.version]
        self.ledger.bytes["down"] += nbytes(self.weights) * len(stale)
        self.received.update(dict.fromkeys(sorted(stale), self.version))
        self.ledger.bytes["down"] += sum(nbytes(task.told) for task in tasks)
        self.ledger.bytes["down"] += sum(self.broadcast.deliver(client) for client in asked)
        replies = self._replies(name, tasks)
        if self.protection is None:
            return replies
        return self.protection.applied(self, name, asked, replies)

    def _replies(self, call: str, tasks: list[Task]) -> Iterator[Reply[Any]]:
        kept = 0
        flaws: list[Flaw] = []
        memories = dict(self._executor.memories)
        replies = self._executor.map(tasks)
        while True:
            start = time.perf_counter()
            reply = next(replies, None)
            waited = time.perf_counter() - start
            if reply is None:
                break
            copying = min(reply.seconds.get("copy", 0.0), waited)
            self.ledger.spend("communication", copying)
            self.ledger.spend("training", waited - copying)
            start = time.perf_counter()
            flaw = self._flaw(call, reply)
            self.ledger.spend("communication", time.perf_counter() - start)
            if flaw is None:
                kept += 1
                yield replace(reply, metrics={})  # only for the log: methods declare none
                del reply  # or it would stay while the next client trains
            else:  # a client that diverged forgets this task, or it would diverge again
                self._executor.memories[reply.client] = memories.get(reply.client, {})
                flaws.append(flaw)
                self._leave_out(reply.client, flaw, reply.client)
        if flaws and not kept and all(flaw.form for flaw in flaws):
            raise PluginError(
                f"what every client's {call!r} sends is wrong, such as {flaws[0].name}, which "
                f"{flaws[0].reason}: the method breaks its contract"
            )
        if tasks and not kept:
            raise NoReplyError(f"the clients' answers to {call}")

    def _flaw(self, call: str, reply: Reply[Any]) -> Flaw | None:
        """Count a reply, and return its first flaw, if any."""
        sent, declared = content(reply.value), self._uplink.get(call, ())
        if undeclared := sorted(sent.keys() - declared):
            raise PluginError(
                f"client function {call!r} sent {', '.join(undeclared)} from {reply.client}, which "
                f"the method does not declare: add it to uplink[{call!r}]"
            )
        found = leaves(sent)
        self.ledger.bytes["up"] += sum(leaf_bytes(leaf) for _, leaf in found)
        self.ledger.clients[reply.client] = reply.seconds.get("work", 0.0)
        forms = declared if isinstance(declared, Mapping) else {}
        sizes = dict(self._sizes)
        for name, value in sent.items():
            form = forms.get(name, "model" if name == "weights" else "")
            flaw = misform(name, value, form, self.weights, sizes)
            if flaw is not None:
                return flaw
        flaw = nonfinite(found)
        if flaw is None:
            self._sizes = {size: number for size, number in sizes.items() if size.isupper()}
            self.ledger.log(reply.metrics, reply.num_examples)
        return flaw

    def _leave_out(self, client: str, flaw: Flaw, what: str) -> None:
        """Log and count a reply or a sum that is left out of the round.

        Raises:
            ClientError: If a fault ends the run.
        """
        if self.federation.on_fault == "fail":
            raise ClientError(
                f"round {self.round}: {what}, its {flaw.name} {flaw.reason}; with "
                f"federation.on_fault=drop the run goes on without it"
            )
        logger.warning("round %d: dropped %s, its %s %s", self.round, what, *flaw[:2])
        self.ledger.dropped.append({"client": client, "tensor": flaw.name, "reason": flaw.reason})

    @contextmanager
    def checking_sums(self) -> Iterator[None]:
        """Undo a block that gets no reply, or leaves NaN, infinity or huge numbers.

        The model and the broadcast are checked. The block must assign new tensors to the server,
        never change them in place.

        Raises:
            NoReplyError: After undoing the block.
            PluginError: If the model has other names, shapes or types than before.
            ClientError: If a fault ends the run.
        """
        weights, broadcast, memory = self.weights, dict(self.broadcast), dict(self.memory)
        memories = dict(self._executor.memories)
        try:
            yield
            wrong = misfit(self.weights, weights)
            if wrong is not None:
                part = f"'s {wrong.name}" if wrong.name else ""
                raise PluginError(
                    f"after round {self.round} the global model{part} {wrong.reason}: the method's "
                    f"server half must keep names, shapes and types"
                )
            flaw = nonfinite(leaves({"weights": self.weights, "broadcast": dict(self.broadcast)}))
            if flaw is not None:
                self._leave_out("server", flaw, "the sum of the replies")
                raise NoReplyError("the sum of the replies")  # noqa: TRY301 - undone below
        except NoReplyError:
            if self.weights is not weights:  # else it would be sent again to clients that have it
                self.weights = weights
            self.memory, self._executor.memories = memory, memories
            for key in set(self.broadcast) - set(broadcast):
                del self.broadcast[key]
            for key, value in broadcast.items():
                if self.broadcast.get(key) is not value:
                    self.broadcast[key] = value
            raise

    def share(self, reply: Reply[Any]) -> float:
        """Return a reply's share in a mean, not normalised: its image count, or 1 if uniform."""
        uniform = self.federation.weighting == "uniform"
        return float(reply.clients if uniform else reply.num_examples)

    def with_shares(self, updates: Iterable[Reply[LocalUpdate]]) -> Iterator[tuple[Weights, float]]:
        """Yield each update's weights with its `share`, and keep none."""

        def pair(reply: Reply[LocalUpdate]) -> tuple[Weights, float]:
            return reply.value.weights, self.share(reply)

        return map(pair, updates)

    # ------------------------------------------------------------------- checkpoints

    def state(self) -> Payload:
        """Return all state that a later process needs to continue."""
        return {
            "round": self.round,
            "prepared": self.prepared,
            "weights": self.weights,
            "version": self.version,
            "weights_received": self.received,
            "broadcast": dict(self.broadcast),
            "versions": self.broadcast.versions,
            "received": self.broadcast.received,
            "memory": self.memory,
            "average": self.average.mean,
            "averaged": self.average.total,
            "clients": self._executor.memories,
        }

    def restore(self, state: Payload) -> None:
        """Continue from a result of `state`; weights are copied in place."""
        self.round, self.prepared = state["round"], state["prepared"]
        for name, tensor in state["weights"].items():
            self.weights[name].copy_(tensor)
        self.version, self.received = state["version"], state["weights_received"]
        home = next((tensor.device for tensor in self.weights.values()), None)
        self.broadcast = Broadcast(copied(state["broadcast"], home))
        self.broadcast.versions = state["versions"]
        self.broadcast.received = state["received"]
        self.memory = copied(state["memory"], home)
        self.average.mean = copied(state.get("average", {}), home)
        self.average.total = state.get("averaged", 0.0)
        self._executor.memories.update(state["clients"])


def sample_clients(
    clients: Sequence[str], size: int | None, *, seed: int, round: int, poisson: bool = False
) -> tuple[str, ...]:
    """Return the cohort of one round, drawn uniformly without replacement, in client order.

    Args:
        clients: All clients that hold images.
        size: K, from 1 to the number of clients; ``None`` for all.
        seed: Seed of the run.
        round: Round number; every round has its own random stream, whatever was drawn before.
        poisson: Draw each client independently with probability K / N: cohorts have K clients on
            average, and may be empty.

    Raises:
        SettingsError: If ``size`` is out of range.
    """
    if size is None:
        return tuple(clients)
    if not 1 <= size <= len(clients):
        raise SettingsError(
            f"cannot sample {size} of {counted(len(clients), 'client')} a round; "
            f"set --per-round to a number from 1 to {len(clients)}"
        )
    draws = generator(seed, "sampling", round)
    if poisson:
        taken = draws.random(len(clients)) < size / len(clients)
        return tuple(client for client, take in zip(clients, taken, strict=True) if take)
    chosen = draws.choice(len(clients), size, replace=False)
    return tuple(clients[i] for i in sorted(chosen))
