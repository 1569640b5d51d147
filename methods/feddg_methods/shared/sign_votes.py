"""Running sums of the clients' votes on the sign of each parameter's change.

Sign-based rules (FedGMA, AgrSum, AgrRand) need the mean of the models and the sum of the updates'
signs. Both are running sums, so one pass over the replies is enough and no reply is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from feddg_bench.core.aggregation import watched
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Weights
from feddg_bench.core.server import Server
from feddg_methods.shared.round_updates import Share, one_each

logger = logging.getLogger(__name__)

WIDTHS = (torch.int8, torch.int16, torch.int32, torch.int64)

FEW = 8
"""Largest number of clients with frequent agreement by chance: 1 coordinate in 128."""


class SignVotes:
    """Sums of the clients' votes: the signs of their changes to the global model.

    Sums are integers of the smallest width that holds them, hence exact: for up to 127 votes they
    take a quarter of the parameters' memory.

    Args:
        start: The global model that clients started from.
        names: Parameters to count; if there are none, nothing is counted.
        changed: Also record the coordinates that any client changed.

    Attributes:
        sums: For each parameter, the votes for up minus those for down, in its shape.
        changed: For each parameter, the mask of coordinates that any client changed, bool in its
            shape; empty unless requested.
        total: Votes cast on each coordinate, including those for neither.
    """

    def __init__(
        self, start: Mapping[str, Tensor], names: Sequence[str], *, changed: bool = False
    ) -> None:
        self._start = {name: start[name] for name in names}
        self.total = 0
        self.sums = {n: torch.zeros_like(w, dtype=WIDTHS[0]) for n, w in self._start.items()}
        self.changed = (
            {n: torch.zeros_like(w, dtype=torch.bool) for n, w in self._start.items()}
            if changed
            else {}
        )

    def count(
        self,
        replies: Iterable[Reply[LocalUpdate]],
        share: Share = one_each,
    ) -> Iterator[Reply[LocalUpdate]]:
        """Yield the replies unchanged, each after counting it.

        Args:
            replies: Replies to ``fit``, read once.
            share: Number of votes of a client, an integer.
        """

        def look(reply: Reply[LocalUpdate]) -> None:
            if "votes" in reply.value.extra:  # the sum over all clients, whose updates are hidden
                self._take(reply.value.extra)
            else:
                self.add(reply.value.weights, int(share(reply)))

        return watched(replies, look)

    def add(self, weights: Mapping[str, Tensor], votes: int = 1) -> None:
        """Count one client's model."""
        self.total += votes
        dtype = next(width for width in WIDTHS if torch.iinfo(width).max >= self.total)
        for name, w in self._start.items():
            theta = weights[name]
            sums = self.sums[name].to(dtype)
            self.sums[name] = sums.add_(theta > w, alpha=votes).add_(theta < w, alpha=-votes)
            if self.changed:
                self.changed[name] |= theta != w

    def _take(self, tally: Payload) -> None:
        self.total += int(tally["voices"])
        dtype = next(width for width in WIDTHS if torch.iinfo(width).max >= self.total)
        for name in self._start:
            self.sums[name] = self.sums[name].to(dtype) + tally["votes"][name].to(dtype)
            if self.changed:
                self.changed[name] |= tally["changed"][name] > 0

    def unanimous(self, name: str) -> Tensor:
        """Return where all clients moved a parameter the same way, bool in its shape."""
        return self.sums[name].abs() == self.total


def sign_tally(
    reply: Reply[LocalUpdate],
    received: Weights,
    names: Sequence[str],
    share: Share = one_each,
    *,
    changed: bool = False,
) -> Payload:
    """Return a client's votes in the form of `Method.tally`; `SignVotes` counts their sum."""
    votes = SignVotes(received, names, changed=changed)
    votes.add(reply.value.weights, int(share(reply)))
    sent: Payload = {"votes": {n: v.float() for n, v in votes.sums.items()}, "voices": votes.total}
    return sent | ({"changed": {n: c.float() for n, c in votes.changed.items()}} if changed else {})


def warn_of_rare_agreement(server: Server, consequence: str) -> None:
    """Log a warning if more than `FEW` clients take part in a round; call once per run.

    Args:
        server: Provides the clients and the number sampled.
        consequence: Effect on the model if clients hardly agree.
    """
    everyone = len(server.clients)
    clients = min(server.federation.per_round or everyone, everyone)
    if clients > FEW:
        logger.warning(
            "%d clients take part in a round, and by chance only %.1g of all coordinates move the "
            "same way at all of them, so that %s: set federation.per_round to %d or less",
            clients,
            2.0 ** (1 - clients),
            consequence,
            FEW,
        )
