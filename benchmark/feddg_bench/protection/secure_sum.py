"""Simulation of a secure sum: its result, the bytes of its messages, and dropouts.

Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017,
Figure 4, for a server that is honest but curious. Clients hide their numbers under masks that
cancel in the sum. Numbers are fixed-point integers modulo 2^k, so that masks cancel exactly. The
simulator therefore adds the numbers themselves and draws no mask: the messages that the protocol
would exchange are counted, not made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Ring = NDArray[np.uint64]
"""Integers modulo 2^k, [d]."""

STAGES = ("keys", "shares", "input")
"""The last message of a client that drops out: public keys, shares or masked input."""

KEYS_BYTES = 64
"""Two public X25519 keys, which each client advertises and receives from all."""

SHARE_BYTES = 33
"""A Shamir share of a secret of 32 bytes, over the field of the least prime above 2^256."""

BOX_BYTES = 2 * SHARE_BYTES + 16
"""The shares of two secrets for one other client, encrypted, with the cipher's tag."""


class TooFewError(Exception):
    """Fewer clients are left than the threshold, so that nothing can be unmasked."""


def to_ring(values: NDArray[np.float64], *, fraction: int, bits: int, terms: int) -> Ring:
    """Return numbers [d] as integers modulo 2^bits, in steps of 2^-fraction.

    Raises:
        OverflowError: If a number is too large for a sum of ``terms`` such numbers.
    """
    limit = math.nextafter(2.0 ** (bits - 1) / terms, 0.0)
    steps = np.rint(np.ldexp(values, fraction))
    if (np.abs(steps) > limit).any():
        largest = float(np.abs(values).max())
        raise OverflowError(f"{largest:g} is above {math.ldexp(limit, -fraction):g}")
    return wrap(np.trunc(steps).astype(np.int64).view(np.uint64), bits)


def from_ring(numbers: Ring, *, fraction: int, bits: int) -> NDArray[np.float64]:
    """Return the numbers [d] for integers modulo 2^bits, whose upper half is negative."""
    shift = np.uint64(64 - bits)
    signed = (numbers << shift).view(np.int64) >> np.int64(64 - bits)
    return np.ldexp(signed.astype(np.float64), -fraction)


def wrap(numbers: Ring, bits: int) -> Ring:
    """Return numbers modulo 2^bits; ``bits`` is at most 64."""
    return numbers if bits == 64 else numbers & np.uint64(2**bits - 1)


class SecureSum:
    """Simulates a secure sum over clients, some of which drop out.

    Attributes:
        up: Bytes that the clients sent.
        down: Bytes that the server sent.
        left: Clients that dropped out, and the last of `STAGES` that each sent.

    Args:
        clients: Names of the clients that are asked.
        length: Length of each client's vector.
        threshold: Number of clients that must be left at the end, in [1, number of clients].
        bits: k.
        left: For each client that drops out, the last of `STAGES` that it sends, by name.

    Raises:
        ValueError: If the threshold is out of range.
    """

    def __init__(
        self,
        clients: Sequence[str],
        length: int,
        *,
        threshold: int,
        bits: int,
        left: Mapping[str, str] | None = None,
    ) -> None:
        count = len(clients)
        if not 1 <= threshold <= count:
            raise ValueError(f"{threshold} of {count} shares cannot be asked for")
        self.clients, self.threshold, self.bits = clients, threshold, bits
        self.left = dict(left or {})
        self._sum: Ring = np.zeros(length, np.uint64)
        self._sent: set[str] = set()
        self._sharing = sum(self.left.get(name) != "keys" for name in clients)
        # Boxes for clients that do not share are sent, but not passed on.
        self.up = count * KEYS_BYTES + self._sharing * (count - 1) * BOX_BYTES
        self.down = count**2 * KEYS_BYTES + self._sharing * (self._sharing - 1) * BOX_BYTES

    def add(self, client: str, numbers: Ring) -> None:
        """Take a client's numbers [d], if it has not dropped out before."""
        if self.left.get(client) in ("keys", "shares"):
            return
        self.up += math.ceil(len(numbers) * self.bits / 8)
        self._sent.add(client)
        self._sum = wrap(self._sum + numbers, self.bits)

    def total(self) -> tuple[Ring, list[str]]:
        """Return the sum [d], and the clients whose numbers are in it.

        Raises:
            TooFewError: If fewer clients than the threshold are left.
        """
        summed = [name for name in self.clients if name in self._sent]
        left = sum(self.left.get(name) != "input" for name in summed)
        # Each reveals one share for every client that shared, and is told whose input arrived.
        self.up += left * self._sharing * SHARE_BYTES
        self.down += left * math.ceil(len(self.clients) / 8)
        if left < self.threshold:
            raise TooFewError(f"{left} clients are left, {self.threshold} are needed")
        return self._sum, summed
