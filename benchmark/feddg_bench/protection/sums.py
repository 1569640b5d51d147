"""One reply for all clients, for a server half from which single replies are hidden.

`HiddenReplies` gives the server half one reply, made from a sum whose terms it does not see: the
mean weighted by `feddg_bench.core.server.Server.share`, or the noisy mean of clipped updates.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from feddg_bench.common.errors import PluginError, SettingsError
from feddg_bench.common.streams import generator
from feddg_bench.config.schema import PrivacySettings
from feddg_bench.core.aggregation import fold
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, content, nbytes
from feddg_bench.core.server import NoReplyError, Server
from feddg_bench.protection.secure_sum import STAGES, SecureSum, TooFewError, from_ring, to_ring
from feddg_bench.protection.vectors import (
    Vector,
    adapted_norm,
    clipped,
    form,
    forms_of,
    from_vector,
    gaussian,
    length,
    to_vector,
    update_noise,
)

if TYPE_CHECKING:
    from feddg_bench.core.method import Method

logger = logging.getLogger(__name__)

NORM = "clip norm"
"""Key in the server's memory of the adaptive norm, kept between rounds."""


Term = tuple[Payload, Vector]
"""A client's term of a sum: its form and its numbers."""


class Adder(Protocol):
    """Adds the clients' vectors."""

    def add(self, client: str, vector: Vector) -> None:
        """Take a client's vector."""

    def total(self) -> Vector:
        """Return the sum."""


class PlainSum:
    """Adds vectors in the order in which they come."""

    def __init__(self, size: int) -> None:
        self._sum = np.zeros(size)

    def add(self, client: str, vector: Vector) -> None:
        """Take a client's vector."""
        self._sum += vector

    def total(self) -> Vector:
        """Return the sum."""
        return self._sum


class MaskedSum:
    """Adds vectors by a secure sum, whose bytes and dropouts it writes into the ledger."""

    def __init__(
        self, server: Server, call: str, clients: Sequence[str], size: int, s: PrivacySettings
    ) -> None:
        self._server, self._settings, self._clients = server, s, clients
        stream = generator(server.seed, "dropouts", call, server.round)
        draws = stream.random((len(clients), len(STAGES)))
        left = {
            client: STAGES[int(np.argmax(row < s.dropout))]
            for client, row in zip(clients, draws, strict=True)
            if (row < s.dropout).any()
        }
        self._session = SecureSum(
            clients,
            size,
            threshold=max(2, math.ceil(round(s.threshold * len(clients), 9))),
            bits=s.bits,
            left=left,
        )

    def add(self, client: str, vector: Vector) -> None:
        """Take a client's vector.

        Raises:
            SettingsError: If one of its numbers does not fit.
        """
        s, terms = self._settings, len(self._clients)
        try:
            numbers = to_ring(vector, fraction=s.fraction_bits, bits=s.bits, terms=terms)
        except OverflowError as error:
            raise SettingsError(
                f"a number of {client} does not fit into a secure sum of {terms} clients with "
                f"privacy.bits={s.bits} and privacy.fraction_bits={s.fraction_bits}: {error}; give "
                f"more bits, or fewer behind the point"
            ) from error
        self._session.add(client, numbers)

    def total(self) -> Vector:
        """Return the sum.

        Raises:
            TooFewError: If too few clients stayed to the end.
        """
        session, ledger = self._session, self._server.ledger
        try:
            total, _ = session.total()
        finally:
            for way, sent in (("up", session.up), ("down", session.down)):
                ledger.bytes[way] += sent
                ledger.protection[way] = ledger.protection.get(way, 0) + sent
            for client, stage in session.left.items():
                if stage != "input":  # after that its numbers are in the sum
                    reason = f"did not come: the client dropped out after its {stage}"
                    ledger.dropped.append({"client": client, "tensor": "input", "reason": reason})
        s = self._settings
        return from_ring(total, fraction=s.fraction_bits, bits=s.bits)


class HiddenReplies:
    """Gives the server half one reply for all clients that were asked.

    Args:
        settings: Mechanism and aggregation.
        method: The method, whose `tally` gives a client's tally.
        expected: Mean number of clients in a round.

    Raises:
        SettingsError: If the noise on the count of short updates is too small.
    """

    def __init__(self, settings: PrivacySettings, method: Method, expected: float) -> None:
        self.settings, self.method, self.expected = settings, method, expected
        self.private = settings.mechanism == "dp_client"
        self.poisson = self.private and settings.sampling == "poisson"
        self.count_noise = settings.count_noise or expected / 20
        z = settings.noise_multiplier
        self.multiplier = update_noise(z, self.count_noise) if settings.adaptive_clipping else z

    def applied(
        self, server: Server, call: str, clients: Sequence[str], replies: Iterator[Reply[Any]]
    ) -> Iterator[Reply[Any]]:
        """Yield one reply.

        Raises:
            NoReplyError: If there is nothing to add, or too few clients stay for a secure sum.
            PluginError: If the clients' content cannot be summed.
        """
        term = _clipped_update if self.private else _shared_terms
        tree: Payload = {}
        adder: Adder | None = None

        def add(reply: Reply[Any]) -> None:
            nonlocal adder
            start = time.perf_counter()
            sent, vector = term(self, server, reply)
            if adder is None:
                tree.update(form(sent))
                adder = self._adder(server, call, clients, len(vector))
            elif forms_of(sent) != forms_of(tree):
                raise PluginError(
                    f"what {call} sends has one form from {reply.client} and another from clients "
                    f"before it, so that it has no sum"
                )
            adder.add(reply.client, vector)
            if self.settings.aggregation == "secure":  # masked numbers are sent instead
                server.ledger.bytes["up"] -= nbytes(content(reply.value))
            server.ledger.spend("protection", time.perf_counter() - start)

        try:
            # Noise is added even if no client answers: its absence would reveal this.
            with suppress(*([NoReplyError] if self.private else [])):
                fold(replies, add)
            start = time.perf_counter()
            total = None if adder is None else adder.total()
        except TooFewError as error:
            logger.warning("round %d: no sum of what %s sends: %s", server.round, call, error)
            raise NoReplyError(
                f"the sum of what {call} sends",
                f"{error}; lower privacy.dropout or privacy.threshold, or try another seed",
            ) from error
        reply = self._noisy_mean(server, total) if self.private else _mean(server, tree, total)
        server.ledger.spend("protection", time.perf_counter() - start)
        yield reply

    def _adder(self, server: Server, call: str, clients: Sequence[str], size: int) -> Adder:
        if self.settings.aggregation == "plain":
            return PlainSum(size)
        return MaskedSum(server, call, clients, size, self.settings)

    def norm(self, server: Server) -> float:
        """Return the clip norm of this round."""
        return float(server.memory.get(NORM, self.settings.clip_norm))

    def _noisy_mean(self, server: Server, total: Vector | None) -> Reply[LocalUpdate]:
        """Return the global model plus the noisy sum of updates over the expected client number.

        Integers, such as batch counters, stay unchanged.
        """
        s, seed, round = self.settings, server.seed, server.round
        moved = {n: w for n, w in server.weights.items() if w.is_floating_point()}
        old, norm = to_vector(moved), self.norm(server)
        if total is None:
            total = np.zeros(len(old) + s.adaptive_clipping)
        noise = gaussian(len(old), self.multiplier * norm, seed, "updates", round)
        new = old + (total[: len(old)] + noise) / self.expected
        if s.adaptive_clipping:
            count = total[-1] + gaussian(1, self.count_noise, seed, "count", round)[0]
            server.memory[NORM] = adapted_norm(
                norm, count / self.expected + 0.5, quantile=s.clip_quantile, rate=s.clip_rate
            )
        weights = {**server.weights, **from_vector(new, moved)}
        return Reply("all", 1, LocalUpdate(weights), {}, {})


def _clipped_update(hidden: HiddenReplies, server: Server, reply: Reply[Any]) -> Term:
    """Return a client's clipped update and, if clipping adapts, whether it was short enough."""
    got = reply.value.weights
    moved = {n: w for n, w in server.weights.items() if w.is_floating_point()}
    change = to_vector({n: got[n] for n in moved}) - to_vector(moved)
    vector, below = clipped(change, hidden.norm(server))
    # Shifted by 1/2, so that a client changes the count by no more than 1/2.
    extra = [below - 0.5] if hidden.settings.adaptive_clipping else []
    return {}, np.append(vector, extra)


def _shared_terms(hidden: HiddenReplies, server: Server, reply: Reply[Any]) -> Term:
    """Return a client's content times its share, then share, images, 1 client and tally."""
    share, base = server.share(reply), np.zeros(0)
    tally = hidden.method.tally(reply, server.weights)
    sent = {name: value for name, value in content(reply.value).items() if name not in tally}
    if "weights" in sent:  # in the server's order
        sent["weights"] = {name: sent["weights"][name] for name in server.weights}
        base = _base(server)
    mean = to_vector(sent)
    mean[: len(base)] -= base  # changes are small, so that fixed point has more digits for them
    tree = {"sent": sent, "share": share, "images": reply.num_examples, "clients": 1}
    numbers = np.array([share, reply.num_examples, 1.0])
    return {**tree, "tally": tally}, np.concatenate([mean * share, numbers, to_vector(tally)])


def _mean(server: Server, tree: Payload, total: Vector | None) -> Reply[Any]:
    """Return the mean of the clients' content, and the sums of their tallies, as one reply."""
    if total is None:
        raise NoReplyError("the sum of no replies")
    size = length(tree["sent"])
    share, images, clients = total[size : size + 3]
    if share <= 0:
        raise NoReplyError("the sum of replies without a share")
    total[:size] /= share
    if "weights" in tree["sent"]:
        base = _base(server)
        total[: len(base)] += base
    home = next(iter(server.weights.values())).device
    mean = from_vector(total, tree, home)
    value: Any = {**mean["sent"], **mean["tally"]}
    if "weights" in value:
        value = LocalUpdate(value.pop("weights"), value)
    return Reply("all", round(images), value, {}, {}, clients=round(clients))


def _base(server: Server) -> Vector:
    """Return the global model, with 0 for integers: of these, values are averaged, not changes."""
    return to_vector(
        {n: w if w.is_floating_point() else torch.zeros_like(w) for n, w in server.weights.items()}
    )
