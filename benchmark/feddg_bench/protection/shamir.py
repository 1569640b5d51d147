"""Shamir's secret sharing: of n shares of a number, any t give it back, fewer tell nothing.

Shamir: How to share a secret, Communications of the ACM 22(11), 1979.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from feddg_bench.common.streams import RandomBytes

PRIME = 2**256 + 297
"""The least prime above 2^256, so that 32 bytes are a number of the field."""

SHARE_BYTES = 33
"""Bytes of a share."""


def split_secret(
    secret: int, places: Sequence[int], threshold: int, random: RandomBytes
) -> dict[int, int]:
    """Return a share of a secret for each place.

    Shares are values of a polynomial of degree ``threshold - 1`` over the field of `PRIME`, whose
    value at 0 is the secret.

    Args:
        secret: In [0, `PRIME`).
        places: Where the polynomial is read: different numbers in [1, `PRIME`).
        threshold: t, how many shares give the secret back, in [1, number of places].
        random: Gives the other coefficients.

    Raises:
        ValueError: If the threshold is out of range.
    """
    if not 1 <= threshold <= len(places):
        raise ValueError(f"{threshold} of {len(places)} shares cannot be asked for")
    # 16 bytes more than a field element needs, so that the remainder is as good as uniform.
    rest = [int.from_bytes(random(SHARE_BYTES + 15), "big") % PRIME for _ in range(threshold - 1)]
    shares = {}
    for place in places:
        value = 0
        for coefficient in reversed([secret, *rest]):
            value = (value * place + coefficient) % PRIME
        shares[place] = value
    return shares


def join_shares(shares: Mapping[int, int]) -> int:
    """Return the secret from shares by place: the value at 0 of the polynomial through them."""
    secret = 0
    for place, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        secret += share * above * pow(below, -1, PRIME)
    return secret % PRIME
