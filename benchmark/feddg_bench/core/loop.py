"""The federated loop, independent of particular methods, of files and of tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from feddg_bench.common.errors import DataError
from feddg_bench.core.halves import server_half
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
        evaluation: Metrics of the new global model; ``None`` if this round is not evaluated. Round
            0 is evaluated if there is no other.
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
        rounds: Rounds of the whole run; with 0, the result of round 0 has an evaluation.
        per_round: K, the clients sampled each round; ``None`` for all.
        every: Evaluate after every n-th round and after the last.
        start: Evaluate no round before this one, except the last.
    """

    def measured() -> Evaluation | None:
        if not is_evaluated(server.round, rounds=rounds, every=every, start=start):
            return None
        began = time.perf_counter()
        evaluation = evaluate(evaluated_model(method, server))
        server.ledger.spend("evaluation", time.perf_counter() - began)
        return evaluation

    if not server.prepared:
        _exchange(method, server, "prepare")
        server.prepared = True
        yield RoundResult(0, server.clients, server.ledger, False, measured())
    while server.round < rounds:
        server.round += 1
        server.cohort = server.sampled(per_round)
        skipped = _exchange(method, server, "run_round")
        if not skipped and server.round > rounds - (server.federation.average_rounds or 0):
            server.average.add(_global_model(method, server), 1.0)
        yield RoundResult(server.round, server.cohort, server.ledger, skipped, measured())


def _exchange(method: Method, server: Server, call: str) -> bool:
    """Run ``prepare`` or ``run_round``; return whether it had no valid result.

    Time that no other phase accounts for counts as aggregation.

    Raises:
        DataError: If no client gave a valid reply before round 1.
    """
    server.ledger, began, skipped = Ledger(), time.perf_counter(), False
    try:
        with server.checking_sums(), server_half(method, server, call):
            getattr(method, call)(server)
    except NoReplyError as error:
        if not server.round:
            raise DataError(f"before round 1 nothing sound came of {error}: {error.why}") from error
        skipped = True
    rest = time.perf_counter() - began - math.fsum(server.ledger.seconds.values())
    server.ledger.spend("aggregation", max(rest, 0.0))
    return skipped


def evaluated_model(method: Method, server: Server) -> Weights:
    """Return the model to evaluate and keep: the mean over rounds, once it has begun."""
    return server.average.mean or _global_model(method, server)


def _global_model(method: Method, server: Server) -> Weights:
    with server_half(method, server, "global_model"):
        return method.global_model(server)
