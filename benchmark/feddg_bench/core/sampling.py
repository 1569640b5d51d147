"""Which clients take part in a round: the same for every method with the same seed."""

from __future__ import annotations

from collections.abc import Sequence

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.streams import generator


def sample_clients(
    clients: Sequence[str], size: int | None, *, seed: int, round: int, poisson: bool = False
) -> tuple[str, ...]:
    """Return the cohort of one round, drawn uniformly without replacement, in client order.

    Args:
        clients: All clients that hold images.
        size: K, from 1 to the number of clients; ``None`` for all.
        seed: Seed of the run.
        round: Round number; every round has its own stream, whatever was drawn before.
        poisson: Draw each client independently with probability K / N: cohorts have K clients on
            average, and may be empty.

    Raises:
        SettingsError: If ``size`` is out of range.
    """
    if size is None:
        return tuple(clients)
    if not 1 <= size <= len(clients):
        raise SettingsError(
            f"cannot sample {size} of {len(clients)} clients a round; "
            f"set --per-round to a number from 1 to {len(clients)}"
        )
    draws = generator(seed, "sampling", round)
    if poisson:
        taken = draws.random(len(clients)) < size / len(clients)
        return tuple(client for client, take in zip(clients, taken, strict=True) if take)
    chosen = draws.choice(len(clients), size, replace=False)
    return tuple(clients[i] for i in sorted(chosen))
