"""A sum of clients' numbers whose terms the server does not see.

Masks hide the terms and cancel in the sum, even if clients drop out. Source:
Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017,
Figure 4, for a server that is honest but curious. Keys are agreed by X25519 and HKDF, masks are
ChaCha20's stream, shares travel under ChaCha20-Poly1305. `Participant` and `Collector` know no more
than a client and the server would, and exchange nothing but messages; `SecureSum` simulates both.

Numbers are fixed-point integers modulo 2^k, so that masking changes no bit of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feddg_bench.common.streams import RandomBytes
from feddg_bench.protection.shamir import SHARE_BYTES, join_shares, split_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

Ring = NDArray[np.uint64]
"""Integers modulo 2^k, [d]."""

KEY_BYTES = 32
STAGES = ("keys", "shares", "input")
"""The last thing a client sends before it drops out: public keys, shares or masked input."""


class TooFewError(Exception):
    """Fewer clients are left than the threshold, so that nothing can be unmasked."""


# ------------------------------------------------------------------------------ fixed point


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


def stream(seed: bytes, length: int, bits: int) -> Ring:
    """Return the mask [length] of a seed of 32 bytes: ChaCha20's stream modulo 2^bits."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    encryptor = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return wrap(np.frombuffer(encryptor.update(bytes(8 * length)), dtype="<u8"), bits)


# ------------------------------------------------------------------------------------- keys


class PublicKeys(NamedTuple):
    """The public keys that a client advertises, 32 bytes each."""

    channel: bytes  # for the shares that clients send each other through the server
    mask: bytes  # for the masks that two clients have in common


class Shares(NamedTuple):
    """What one client holds of another's secrets."""

    key: int  # of its private mask key
    own: int  # of the seed of its own mask


def _private(raw: bytes) -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(raw)


def public_key(raw: bytes) -> bytes:
    """Return the public key of a private one."""
    return _private(raw).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return the 32 bytes that two clients have in common, from either's private key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = _private(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


# ----------------------------------------------------------------------------- the two sides


class Participant:
    """One client's side of one sum.

    Args:
        place: Its number in the sum, from 1.
        random: Makes its keys, its seed and the coefficients of its shares.
        bits: k: numbers are integers modulo 2^k.
    """

    def __init__(self, place: int, random: RandomBytes, bits: int) -> None:
        self.place, self.bits = place, bits
        self._random = random
        self._channel, self._mask, self._seed = (random(KEY_BYTES) for _ in range(3))
        self._others: Mapping[int, PublicKeys] = {}
        self._boxes: Mapping[int, bytes] = {}

    def advertise(self) -> PublicKeys:
        """Return the client's public keys (stage 0)."""
        return PublicKeys(public_key(self._channel), public_key(self._mask))

    def share(self, keys: Mapping[int, PublicKeys], threshold: int) -> dict[int, bytes]:
        """Return for every other client its shares of this one's secrets, encrypted (stage 1)."""
        self._others = {place: key for place, key in keys.items() if place != self.place}
        secrets = (int.from_bytes(raw, "big") for raw in (self._mask, self._seed))
        parts = [split_secret(s, list(keys), threshold, self._random) for s in secrets]
        self._kept = Shares(*(part[self.place] for part in parts))
        return {
            place: self._box(self.place, place).encrypt(
                bytes(12), b"".join(p[place].to_bytes(SHARE_BYTES, "big") for p in parts), None
            )
            for place in self._others
        }

    def masked(self, numbers: Ring, boxes: Mapping[int, bytes]) -> Ring:
        """Return the client's numbers under its own mask and those shared with senders of boxes.

        Args:
            numbers: Integers modulo 2^k, [d].
            boxes: What each other client that takes part encrypted for this one (stage 2).
        """
        self._boxes = boxes
        total = numbers + stream(self._seed, len(numbers), self.bits)
        for place in boxes:
            common = agree(self._mask, self._others[place].mask, b"mask")
            mask = stream(common, len(numbers), self.bits)
            total = total + mask if place < self.place else total - mask
        return wrap(total, self.bits)

    def reveal(self, sent: Collection[int]) -> dict[int, int]:
        """Return one share for each client: of its seed if its input came, else of its key."""
        revealed = {self.place: self._kept.own}
        for place, box in self._boxes.items():
            text = self._box(place, self.place).decrypt(bytes(12), box, None)
            halves = Shares(*(int.from_bytes(t, "big") for t in _halved(text)))
            revealed[place] = halves.own if place in sent else halves.key
        return revealed

    def _box(self, sender: int, receiver: int) -> ChaCha20Poly1305:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        # A key for each direction, used once: a constant nonce is safe.
        other = self._others[receiver if sender == self.place else sender]
        purpose = b"shares %d to %d" % (sender, receiver)
        return ChaCha20Poly1305(agree(self._channel, other.channel, purpose))


def _halved(text: bytes) -> tuple[bytes, bytes]:
    return text[:SHARE_BYTES], text[SHARE_BYTES:]


class Collector:
    """The server's side of one sum.

    Attributes:
        total: Sum of the masked inputs so far; after `unmask`, of the inputs.
        sent: Places of the clients whose input came.

    Args:
        keys: What the clients advertised, by place.
        sharing: Places of the clients that shared their secrets.
        threshold: How many shares give a secret back.
        length: How many numbers a client has.
        bits: k.
    """

    def __init__(
        self,
        keys: Mapping[int, PublicKeys],
        sharing: Sequence[int],
        threshold: int,
        length: int,
        bits: int,
    ) -> None:
        self.keys, self.sharing, self.threshold, self.bits = keys, sharing, threshold, bits
        self.total: Ring = np.zeros(length, np.uint64)
        self.sent: list[int] = []

    def add(self, place: int, masked: Ring) -> None:
        """Take a client's masked input."""
        self.sent.append(place)
        self.total = wrap(self.total + masked, self.bits)

    def unmask(self, revealed: Mapping[int, Mapping[int, int]]) -> Ring:
        """Return the sum of the inputs, from the shares that each remaining client revealed.

        Raises:
            TooFewError: If fewer clients than the threshold remain.
        """
        if len(revealed) < self.threshold:
            raise TooFewError(f"{len(revealed)} clients are left, {self.threshold} are needed")
        helpers = list(revealed)[: self.threshold]

        def secret(place: int) -> bytes:
            joined = join_shares({helper: revealed[helper][place] for helper in helpers})
            return joined.to_bytes(KEY_BYTES, "big")

        length, bits = len(self.total), self.bits
        for place in self.sharing:
            if place in self.sent:
                self.total = self.total - stream(secret(place), length, bits)
                continue
            key = secret(place)  # of one that dropped out: its masks on others' inputs remain
            for other in self.sent:
                mask = stream(agree(key, self.keys[other].mask, b"mask"), length, bits)
                self.total = self.total + mask if other < place else self.total - mask
        self.total = wrap(self.total, bits)
        return self.total


# ------------------------------------------------------------------------------ the simulation


class SecureSum:
    """Simulates a secure sum over clients, some of which drop out.

    Attributes:
        up: Bytes that the clients sent.
        down: Bytes that the server sent.
        left: Clients that dropped out, and the last of `STAGES` that each sent.

    Args:
        clients: Names of the clients that are asked.
        length: How many numbers each has.
        threshold: How many clients must be left at the end, in [1, number of clients].
        bits: k.
        random: Gives each client its random bytes.
        left: For each client that drops out, the last of `STAGES` that it sends, by name.
    """

    def __init__(
        self,
        clients: Sequence[str],
        length: int,
        *,
        threshold: int,
        bits: int,
        random: Mapping[str, RandomBytes],
        left: Mapping[str, str] | None = None,
    ) -> None:
        self.left = dict(left or {})
        self.bits = bits
        self._place = {name: number for number, name in enumerate(clients, 1)}
        players = {
            self._place[name]: Participant(self._place[name], random[name], bits)
            for name in clients
        }
        keys = {place: player.advertise() for place, player in players.items()}
        sharing = [self._place[name] for name in clients if self.left.get(name) != "keys"]
        boxes = {place: players[place].share(keys, threshold) for place in sharing}
        self._players = {place: players[place] for place in sharing}
        self._boxes = {
            place: {sender: boxes[sender][place] for sender in sharing if sender != place}
            for place in sharing
        }
        self._collector = Collector(keys, sharing, threshold, length, bits)
        advertised = sum(len(key) for pair in keys.values() for key in pair)
        shared = sum(len(box) for row in boxes.values() for box in row.values())
        # Boxes for clients that do not share are passed on to nobody.
        passed = sum(len(box) for row in self._boxes.values() for box in row.values())
        self.up, self.down = advertised + shared, len(clients) * advertised + passed

    def add(self, client: str, numbers: Ring) -> None:
        """Take a client's numbers [d], if it has not dropped out before."""
        if self.left.get(client) in ("keys", "shares"):
            return
        place = self._place[client]
        masked = self._players[place].masked(numbers, self._boxes[place])
        self.up += math.ceil(len(masked) * self.bits / 8)
        self._collector.add(place, masked)

    def total(self) -> tuple[Ring, list[str]]:
        """Return the sum [d], and whose numbers are in it.

        Raises:
            TooFewError: If fewer clients than the threshold are left.
        """
        sent = self._collector.sent
        names = [name for name, place in self._place.items() if place in sent]
        answering = [self._place[name] for name in names if self.left.get(name) != "input"]
        sharing = len(self._collector.sharing)
        self.up += len(answering) * sharing * SHARE_BYTES
        self.down += len(answering) * math.ceil(len(self._place) / 8)
        revealed = {place: self._players[place].reveal(sent) for place in answering}
        return self._collector.unmask(revealed), names
