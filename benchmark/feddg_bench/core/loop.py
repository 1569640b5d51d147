"""The federated loop, independent of particular methods, of files and of tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from feddg_bench.common.errors import DataError
from feddg_bench.core.halves import plugin_call
from feddg_bench.core.messages import Weights
from feddg_bench.core.method import Method
from feddg_bench.core.server import Ledger, NoReplyError, Server
from feddg_bench.records.checks import is_evaluated
from feddg_bench.records.measured import Evaluation


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Result of one round; round 0 is ``prepare``.

    Attributes:
        round: Round number.
        cohort: Clients that were asked.
        ledger: Bytes, seconds, dropped clients, training metrics.
        skipped: Whether the round had no valid result, so that the model is unchanged.
        evaluation: Metrics of the new global model; ``None`` if this round is not evaluated.
    """

    round: int
    cohort: tuple[str, ...]
    ledger: Ledger
    skipped: bool
    evaluation: Evaluation | None


def federate(
    method: Method,
    server: Server,
    evaluate: Callable[[Weights], Evaluation],
    *,
    rounds: int,
    per_round: int | None = None,
    every: int = 1,
    start: int = 1,
) -> Iterator[RoundResult]:
    """Train for ``rounds`` rounds and yield the result of each.

    Args:
        method: The plugin; its server half runs here.
        server: Global model and clients; a server restored from a checkpoint continues from there.
        evaluate: Measures global weights.
        rounds: Rounds of the whole run.
        per_round: K, the clients sampled each round; ``None`` for all.
        every: Evaluate after every n-th round and after the last.
        start: Evaluate no round before this one, except the last.
    """
    if not server.prepared:
        with _exchange(method, server, "prepare"):
            method.prepare(server)
        server.prepared = True
        yield RoundResult(0, server.clients, server.ledger, False, None)
    while server.round < rounds:
        server.round += 1
        server.cohort = server.sampled(per_round)
        with _exchange(method, server, "run_round") as exchange:
            method.run_round(server)
        evaluation = None
        if is_evaluated(server.round, rounds=rounds, every=every, start=start):
            evaluation = _evaluated(method, server, evaluate)
        yield RoundResult(server.round, server.cohort, server.ledger, exchange.skipped, evaluation)


@dataclass(slots=True)
class _Exchange:
    """An exchange between server and clients; skipped if it had no valid result."""

    skipped: bool = False


@contextmanager
def _exchange(method: Method, server: Server, call: str) -> Iterator[_Exchange]:
    """Measure, protect and report an exchange, which may fail in a round but not in `prepare`.

    Raises:
        DataError: If no client gave a valid reply before round 1.
    """
    exchange = _Exchange()
    with _phases(server):
        try:
            with server.checking_sums(), _server_half(method, server, call):
                yield exchange
        except NoReplyError as error:
            if not server.round:
                raise DataError(
                    f"before round 1 nothing sound came of {error}: {error.why}"
                ) from error
            exchange.skipped = True


def _evaluated(
    method: Method, server: Server, evaluate: Callable[[Weights], Evaluation]
) -> Evaluation:
    """Return the metrics of the global model, and add the evaluation time to the ledger."""
    began = time.perf_counter()
    with _server_half(method, server, "global_model"):
        model = method.global_model(server)
    evaluation = evaluate(model)
    server.ledger.spend("evaluation", time.perf_counter() - began)
    return evaluation


def _server_half(method: Method, server: Server, call: str) -> AbstractContextManager[None]:
    """Return the frame of a call of the server half."""
    where = f"server half, round {server.round}" if server.round else "server half, before round 1"
    stream = ("server half", call, server.round)
    device = next(iter(server.weights.values())).device
    return plugin_call(method, where, "server.memory", server.seed, *stream, device=device)


@contextmanager
def _phases(server: Server) -> Iterator[None]:
    """Open a new ledger; time that no other phase accounts for counts as aggregation."""
    server.ledger = Ledger()
    start = time.perf_counter()
    yield
    rest = time.perf_counter() - start - sum(server.ledger.seconds.values())
    server.ledger.spend("aggregation", max(rest, 0.0))
