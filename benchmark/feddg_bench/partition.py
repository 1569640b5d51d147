"""Which client holds which training image.

The main rule spreads D domains over N clients by one number, lambda in [0, 1] (Bai et al., ICLR
2024): 1 gives every client the same mixture of domains, 0 as few domains as possible. The others
are one pooled client, equal parts of every domain (k = 2: FedCCRL, Wang et al., 2024) and a
Dirichlet draw per domain.

In all of them a *domain* is an integer id from 0; ids without images are allowed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from feddg_bench.errors import DataError, SettingsError
from feddg_bench.settings import unknown

if TYPE_CHECKING:
    from feddg_bench.settings import PartitionSettings

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

ROUNDINGS = ("largest_remainder", "reference")
TARGET_DECIMALS = 9
"""Targets are exact to this many decimals; what differs beyond them is binary noise."""


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The clients and the images each holds.

    Attributes:
        clients: Names, whose order as text is their order as numbers.
        indices: For each client the data-set indices of its images, int64.
        rule: What made the partition: kind, number of clients, the kind's settings, seed.
    """

    clients: tuple[str, ...]
    indices: tuple[IntArray, ...]
    rule: Mapping[str, Any]

    @property
    def sizes(self) -> IntArray:
        """Images of each client, int64 [N]."""
        return np.array([len(index) for index in self.indices], dtype=np.int64)

    def counts(self, values: NDArray[np.integer], num_values: int) -> IntArray:
        """Return how often each client holds each value, int64 [N, ``num_values``].

        Args:
            values: One integer in [0, ``num_values``) for every image of the data set, such as
                its label or its domain.
            num_values: Number of columns.
        """
        return np.stack([np.bincount(values[i], minlength=num_values) for i in self.indices])

    def digest(self) -> str:
        """Return the SHA-256 of names and index lists, whatever rule made them."""
        content = [[name, index.tolist()] for name, index in self._items()]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    def as_json(
        self, domains: NDArray[np.integer], labels: NDArray[np.integer], domain_names: Sequence[str]
    ) -> dict[str, Any]:
        """Return the partition as JSON values: rule, hash, and for each client what it holds.

        Args:
            domains: Domain id of every image of the data set.
            labels: Label of every image of the data set.
            domain_names: Names of the domain ids.
        """
        by_domain = self.counts(domains, len(domain_names)).tolist()
        by_label = self.counts(labels, int(labels.max()) + 1).tolist()
        clients = [
            {
                "id": name,
                "domains": dict(zip(domain_names, in_domains, strict=True)),
                "labels": in_labels,
                "indices": index.tolist(),
            }
            for (name, index), in_domains, in_labels in zip(
                self._items(), by_domain, by_label, strict=True
            )
        ]
        return {"rule": dict(self.rule), "hash": self.digest(), "clients": clients}

    def _items(self) -> list[tuple[str, IntArray]]:
        return list(zip(self.clients, self.indices, strict=True))


# ------------------------------------------------------------------------------- by lambda


def heterogeneous_counts(
    sizes: ArrayLike,
    num_clients: int,
    heterogeneity: float,
    *,
    rounding: str = "largest_remainder",
) -> IntArray:
    """Return how many images of each domain each client gets.

    Where there are at least as many clients as domains, every client has one main domain, and its
    real-valued target for domain d is n_d ((1 - lambda) [d is its main domain] / u_d + lambda / N),
    with u_d clients for d. Else whole domains are packed on clients, largest first, and lambda
    mixes that packing with equal shares (Bai et al., ICLR 2024).

    ``largest_remainder`` gives the images that the floors leave over to the largest fractions, ties
    to clients whose main domain it is, then to the smaller client, then to the lower number.
    ``reference`` gives them to clients 0, 1, ... as the authors' code does, in its floating-point
    arithmetic bit for bit; there clients with low numbers are larger, and lambda = 0 leaves foreign
    images in pure clients.

    Args:
        sizes: Images of each domain, integers >= 0, [D].
        num_clients: N >= 1.
        heterogeneity: lambda in [0, 1].
        rounding: One of `ROUNDINGS`.

    Returns:
        int64 [N, D]; columns sum to ``sizes``.

    Raises:
        SettingsError: If an argument is out of range, or there are no images.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    if not 0 <= heterogeneity <= 1:
        raise SettingsError(
            f"heterogeneity is {heterogeneity} but lambda lies in [0, 1]: 0 gives clients as few "
            f"domains as possible, 1 the same mixture to all"
        )
    if num_clients < 1:
        raise SettingsError(f"the number of clients is {num_clients} but must be at least 1")
    if rounding not in ROUNDINGS:
        raise SettingsError(unknown("rounding", rounding, ROUNDINGS))
    if sizes.ndim != 1 or not sizes.any() or sizes.min() < 0:
        raise SettingsError(
            f"domain sizes are {sizes.tolist()} but a partition needs one count >= 0 for each "
            f"domain and at least one image"
        )
    if np.count_nonzero(sizes) <= num_clients:
        main, targets = _main_domains(sizes, num_clients, heterogeneity)
    else:
        order = np.argsort(sizes)[::-1]
        if rounding == "largest_remainder":
            order = np.argsort(-sizes, kind="stable")
        main, targets = _packed_domains(sizes, num_clients, heterogeneity, order)
    if rounding == "reference":
        return _leftovers_to_first(targets, sizes)
    return _leftovers_to_largest(targets, sizes, main)


def _main_domains(
    sizes: IntArray, num_clients: int, heterogeneity: float
) -> tuple[NDArray[np.bool_], FloatArray]:
    """Return main domains, bool [N, D], and targets, [N, D], for N >= non-empty domains."""
    num_mains = (sizes > 0).astype(np.int64)
    while num_mains.sum() < num_clients:
        num_mains[np.argmax(sizes / np.maximum(num_mains, 1))] += 1
    owner = np.repeat(np.arange(len(sizes)), num_mains)
    main = owner[:, None] == np.arange(len(sizes))
    # the order of these operations decides the last bit, and with it the reference rounding
    own = 1 / np.maximum(num_mains, 1) * main * (1 - heterogeneity)
    return main, sizes * (own + 1 / num_clients * heterogeneity)


def _packed_domains(
    sizes: IntArray, num_clients: int, heterogeneity: float, order: NDArray[np.intp]
) -> tuple[NDArray[np.bool_], FloatArray]:
    """Return main domains, bool [N, D], and targets, [N, D], for N < non-empty domains."""
    packed = np.zeros((num_clients, len(sizes)), dtype=np.int64)
    for domain in order:
        packed[np.argmin(packed.sum(axis=1)), domain] = sizes[domain]
    return packed > 0, sizes / num_clients * heterogeneity + packed * (1 - heterogeneity)


def _leftovers_to_first(targets: FloatArray, sizes: IntArray) -> IntArray:
    counts = np.floor(targets).astype(np.int64)
    left = sizes - counts.sum(axis=0)
    return counts + (np.arange(len(counts))[:, None] < left)


def _leftovers_to_largest(
    targets: FloatArray, sizes: IntArray, main: NDArray[np.bool_]
) -> IntArray:
    targets = np.round(targets, TARGET_DECIMALS)
    counts = np.floor(targets).astype(np.int64)
    fractions = np.round(targets - counts, TARGET_DECIMALS)
    totals = counts.sum(axis=1)
    for domain, left in enumerate(sizes - counts.sum(axis=0)):
        # lexsort is stable and its last key weighs most; fractions below 1 sum to `left`, so
        # there are always enough clients with a positive one
        order = np.lexsort((totals, ~main[:, domain], -fractions[:, domain]))
        counts[order[:left], domain] += 1
        totals[order[:left]] += 1
    return counts


def heterogeneous_indices(
    domains: ArrayLike,
    num_clients: int,
    heterogeneity: float,
    *,
    seed: int,
    rounding: str = "largest_remainder",
) -> list[IntArray]:
    """Return each client's images, as positions in ``domains``, grouped by domain.

    Every domain is permuted by one stream, in order of domain ids, and dealt out client by client
    in the numbers of `heterogeneous_counts`. The seed decides which images, not how many.

    Args:
        domains: Domain id of each image, [n].
        num_clients: N >= 1.
        heterogeneity: lambda in [0, 1].
        seed: Seed of the permutations, >= 0.
        rounding: One of `ROUNDINGS`.

    Raises:
        SettingsError: If an argument is out of range, or there are no images.
    """
    domains = np.asarray(domains, dtype=np.int64)
    counts = heterogeneous_counts(
        np.bincount(domains), num_clients, heterogeneity, rounding=rounding
    )
    rng = np.random.default_rng(seed)
    return _deal(
        np.split(rng.permutation(np.flatnonzero(domains == domain)), np.cumsum(column)[:-1])
        for domain, column in enumerate(counts.T)
    )


# ------------------------------------------------------------------------------- other rules


def per_domain_indices(
    domains: NDArray[np.integer], clients_per_domain: int, *, seed: int
) -> list[IntArray]:
    """Return the images of ``clients_per_domain`` pure clients for each non-empty domain.

    A domain of n images is permuted and cut into k contiguous parts; part i is [i n // k,
    (i + 1) n // k). Clients come domain by domain.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for domain in np.unique(domains):
        members = rng.permutation(np.flatnonzero(domains == domain))
        bounds = np.arange(1, clients_per_domain) * len(members) // clients_per_domain
        parts += np.split(members, bounds)
    return parts


def dirichlet_indices(
    domains: NDArray[np.integer], num_clients: int, alpha: float, *, seed: int
) -> list[IntArray]:
    """Return each client's images where every domain's shares are a Dirichlet(alpha) draw.

    A domain is permuted and cut at the floors of its cumulative shares. Small ``alpha`` (> 0) gives
    most of a domain to few clients, and may leave clients empty.
    """
    rng = np.random.default_rng(seed)

    def cut(domain: np.integer) -> list[IntArray]:
        members = rng.permutation(np.flatnonzero(domains == domain))
        shares = rng.dirichlet(np.full(num_clients, alpha))
        return np.split(members, (np.cumsum(shares)[:-1] * len(members)).astype(np.int64))

    return _deal(cut(domain) for domain in np.unique(domains))


def _deal(by_domain: Iterable[list[IntArray]]) -> list[IntArray]:
    """Join, for every client, its parts of all domains."""
    return [np.concatenate(parts) for parts in zip(*by_domain, strict=True)]


Rule = Callable[["PartitionSettings", IntArray, int], list[IntArray]]
"""Settings, domain of each training image, seed -> positions of each client's images."""

RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "heterogeneous": (
        lambda s, domains, seed: heterogeneous_indices(
            domains, s.clients, s.heterogeneity, seed=seed, rounding=s.rounding
        ),
        ("clients", "heterogeneity", "rounding"),
    ),
    "pooled": (lambda _, domains, __: [np.arange(len(domains))], ()),
    "domain": (lambda _, domains, seed: per_domain_indices(domains, 1, seed=seed), ()),
    "per_domain": (
        lambda s, domains, seed: per_domain_indices(domains, s.clients_per_domain, seed=seed),
        ("clients_per_domain",),
    ),
    "dirichlet": (
        lambda s, domains, seed: dirichlet_indices(domains, s.clients, s.alpha, seed=seed),
        ("clients", "alpha"),
    ),
}
"""Kind -> its rule and the settings that it reads."""


def make_partition(
    settings: PartitionSettings,
    indices: NDArray[np.integer],
    domains: NDArray[np.integer],
    *,
    seed: int,
) -> Partition:
    """Spread the training images over clients.

    Args:
        settings: The rule and its numbers.
        indices: Data-set indices of the training images, [n].
        domains: Domain id of each of them, [n].
        seed: Seed of the partition's own stream.

    Raises:
        DataError: If there are no training images.
        SettingsError: If a client would hold fewer images than ``settings.min_client_size``.
    """
    if not len(indices):
        raise DataError("there are no training images to spread over clients; check the splits")
    make, used = RULES[settings.kind]
    smallest = settings.min_client_size
    for name in {"clients", "clients_per_domain"}.intersection(used):
        # before the rule runs: a mistyped number of clients may not fill the memory
        if (wanted := getattr(settings, name)) * smallest > len(indices):
            raise SettingsError(
                f"partition.{name} is {wanted} but there are only {len(indices)} training images, "
                f"too few for {smallest} each; use fewer clients, or partition.min_client_size=0 "
                f"to allow empty ones, which never train"
            )
    parts = make(settings, np.asarray(domains, dtype=np.int64), seed)
    too_small = [len(part) for part in parts if len(part) < smallest]
    if too_small:
        raise SettingsError(
            f"{len(too_small)} of {len(parts)} clients would hold fewer than {smallest} of the "
            f"{len(indices)} training images, the smallest {min(too_small)}; use fewer clients, or "
            f"partition.min_client_size=0 to allow empty ones, which never train"
        )
    width = max(3, len(str(len(parts) - 1)))
    return Partition(
        clients=tuple(f"client_{i:0{width}d}" for i in range(len(parts))),
        indices=tuple(np.asarray(indices, dtype=np.int64)[part] for part in parts),
        rule={
            "kind": settings.kind,
            **{name: getattr(settings, name) for name in used},
            "seed": seed,
        },
    )
