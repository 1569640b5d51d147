"""Partition of the training images over clients.

The main rule spreads D domains over N clients by one number, lambda in [0, 1] (Bai et al., ICLR
2024): 1 gives every client the same mixture of domains, 0 as few domains as possible, only one if
there are enough clients. A domain is an integer id from 0; ids without images are allowed.
The other rules are one pooled client, equal parts of every domain and a Dirichlet draw per domain
(both FedCCRL, Wang et al., 2024), and two with label skew inside the domains, which follow
partitioners of Flower (``flwr_datasets.partitioner``) and combine with lambda.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from feddg_bench.common.errors import DataError, SettingsError, unknown
from feddg_bench.common.titles import counted

if TYPE_CHECKING:
    from feddg_bench.config.schema import PartitionSettings

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

ROUNDINGS = ("largest_remainder", "reference")
TARGET_DECIMALS = 9
"""Decimals to which targets are rounded; smaller differences are floating-point noise."""


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The clients and their images."""

    clients: tuple[str, ...]  # names; their alphabetical order is their numerical order
    indices: tuple[IntArray, ...]  # for each client, the data-set indices of its images, int64
    rule: Mapping[str, Any]  # how it was made: kind, the settings that the kind reads, seed

    @property
    def sizes(self) -> IntArray:
        """Number of images of each client, int64 [N]."""
        return np.array([len(index) for index in self.indices], dtype=np.int64)

    def digest(self) -> str:
        """Return the SHA-256 of client names and index lists; the rule is not hashed."""
        content = [[name, index.tolist()] for name, index in self._items()]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    def as_json(
        self,
        domains: NDArray[np.integer],
        labels: NDArray[np.integer] | NDArray[np.floating],
        domain_names: Sequence[str],
    ) -> dict[str, Any]:
        """Return the partition as JSON values: rule, hash, and the contents of each client.

        A client's ``domains`` are image counts by name and its ``labels`` image counts by label
        as text; counts of 0 are left out. Targets of a regression are not counted.
        """
        targets = np.issubdtype(labels.dtype, np.floating)
        clients = [
            {
                "id": name,
                "domains": {domain_names[d]: n for d, n in _counted(domains[index])},
                **({} if targets else {"labels": {str(y): n for y, n in _counted(labels[index])}}),
                "indices": index.tolist(),
            }
            for name, index in self._items()
        ]
        return {"rule": dict(self.rule), "hash": self.digest(), "clients": clients}

    def _items(self) -> list[tuple[str, IntArray]]:
        return list(zip(self.clients, self.indices, strict=True))


def _counted(values: NDArray[Any]) -> list[tuple[int, int]]:
    """Return the distinct integers in ascending order, each with its count."""
    integers, counts = np.unique(values, return_counts=True)
    return list(zip(integers.tolist(), counts.tolist(), strict=True))


def heterogeneous_counts(
    sizes: ArrayLike, num_clients: int, heterogeneity: float, *, rounding: str = "largest_remainder"
) -> IntArray:
    """Return the number of images of each domain for each client.

    If there are at least as many clients as domains, every client has one main domain, and its
    real-valued target for domain d is n_d ((1 - lambda) [d is its main domain] / u_d + lambda / N),
    where u_d clients have d as their main domain. Otherwise, whole domains are packed onto clients,
    largest first, and lambda mixes that packing with equal shares (Bai et al., ICLR 2024).

    ``largest_remainder`` rounds targets down and gives the remaining images to the largest
    fractions. Ties go to clients with this main domain, then to the smaller client, then to the
    lower number. ``reference`` gives them to clients 0, 1, ... as the authors' code does, and
    reproduces its floating-point arithmetic bit for bit. Clients with low numbers are then larger,
    and even with lambda = 0, clients meant to hold one domain get images of others.

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
    reference = rounding == "reference"
    main, targets = _targets(sizes, num_clients, heterogeneity, stable=not reference)
    if reference:
        return _leftovers_to_first(targets, sizes)
    return _leftovers_to_largest(targets, sizes, main)


def _targets(
    sizes: IntArray, num_clients: int, heterogeneity: float, *, stable: bool = True
) -> tuple[NDArray[np.bool_], FloatArray]:
    """Return main domains, bool [N, D], and targets, [N, D]; ``stable`` packs ties in order."""
    if np.count_nonzero(sizes) <= num_clients:
        return _main_domains(sizes, num_clients, heterogeneity)
    order = np.argsort(-sizes, kind="stable") if stable else np.argsort(sizes)[::-1]
    return _packed_domains(sizes, num_clients, heterogeneity, order)


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
    totals = np.zeros(num_clients, dtype=np.int64)
    for domain in order:
        client = np.argmin(totals)
        packed[client, domain] = sizes[domain]
        totals[client] += sizes[domain]
    return packed > 0, sizes / num_clients * heterogeneity + packed * (1 - heterogeneity)


def _leftovers_to_first(targets: FloatArray, sizes: IntArray) -> IntArray:
    counts = np.floor(targets).astype(np.int64)
    for domain, left in enumerate(sizes - counts.sum(axis=0)):
        counts[:left, domain] += 1
    return counts


def _leftovers_to_largest(
    targets: FloatArray, sizes: IntArray, main: NDArray[np.bool_]
) -> IntArray:
    targets = np.round(targets, TARGET_DECIMALS)
    counts = np.floor(targets).astype(np.int64)
    fractions = np.round(targets - counts, TARGET_DECIMALS)
    totals = counts.sum(axis=1)
    for domain, left in enumerate(sizes - counts.sum(axis=0)):
        # lexsort is stable and its last key is the primary one; fractions below 1 sum to `left`,
        # so enough clients have a positive one
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

    One stream permutes every domain, in order of domain ids. Clients get as many images as
    `heterogeneous_counts` says, one after the other. The seed decides which images, not how many.

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
    return join_domains(
        np.split(rng.permutation(members), np.cumsum(column)[:-1])
        for members, column in zip(by_domain(domains), counts.T, strict=True)
    )


def by_domain(domains: NDArray[np.integer]) -> list[IntArray]:
    """Return the ascending positions of each domain's images, for ids from 0 to the largest."""
    bounds = np.cumsum(np.bincount(domains))[:-1]
    return np.split(np.argsort(domains, kind="stable"), bounds)


def join_domains(parts_by_domain: Iterable[list[IntArray]]) -> list[IntArray]:
    """Join the parts of all domains for each client."""
    return [np.concatenate(parts) for parts in zip(*parts_by_domain, strict=True)]


def per_domain_indices(
    domains: NDArray[np.integer], clients_per_domain: int, *, seed: int
) -> list[IntArray]:
    """Return the images of ``clients_per_domain`` single-domain clients per non-empty domain.

    A domain of n images is permuted and cut into k contiguous parts; part i is [i n // k,
    (i + 1) n // k). Clients are in the order of domains.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for members in filter(len, by_domain(domains)):
        bounds = np.arange(1, clients_per_domain) * len(members) // clients_per_domain
        parts += np.split(rng.permutation(members), bounds)
    return parts


def dirichlet_indices(
    domains: NDArray[np.integer], num_clients: int, alpha: float, *, seed: int
) -> list[IntArray]:
    """Return each client's images; the shares of every domain are a Dirichlet(alpha) draw.

    A domain is permuted and cut at the floors of its cumulative shares. Small ``alpha`` (> 0) gives
    most of a domain to few clients, and can leave clients empty.
    """
    rng = np.random.default_rng(seed)

    def cut(members: IntArray) -> list[IntArray]:
        shuffled = rng.permutation(members)
        shares = rng.dirichlet(np.full(num_clients, alpha))
        return np.split(shuffled, (np.cumsum(shares)[:-1] * len(members)).astype(np.int64))

    return join_domains(cut(members) for members in filter(len, by_domain(domains)))


def label_dirichlet_indices(
    domains: NDArray[np.integer],
    labels: NDArray[np.integer],
    num_clients: int,
    alpha: float,
    heterogeneity: float,
    *,
    seed: int,
) -> list[IntArray]:
    """Return each client's images; the shares of every class in a domain are a Dirichlet draw.

    In each domain, this is Flower's ``DirichletPartitioner`` (Yurochkin et al., ICML 2019) with a
    list of alphas: each class is permuted and cut at the floors of its cumulative shares. The alpha
    of client i in domain d is alpha s_i / sum_j s_j^2, where s_i is its share of d by lambda. It is
    ``alpha`` for all N clients at lambda = 1, and for the clients of the domain at lambda = 0. The
    mean of a client's share over draws is s_i for any ``alpha``. With one domain, clients hold as
    many images of each class as Flower's with the same seed, which however draws again if a client
    holds too few.
    """
    shares = _shares(np.bincount(domains), num_clients, heterogeneity)[1]
    rng = np.random.default_rng(seed)
    order = rng.spawn(1)[0]
    parts: list[list[IntArray]] = [[] for _ in range(num_clients)]
    for domain, _, members in _by_class(domains, labels):
        share = shares[:, domain]
        factors = np.round(share / (share**2).sum(), TARGET_DECIMALS)  # exactly 1 if all are equal
        holders = np.flatnonzero(factors)
        drawn = rng.dirichlet(np.clip(alpha, 1e-300, 1e300) * factors[holders])
        bounds = (np.cumsum(drawn)[:-1] * len(members)).astype(np.int64)
        for holder, part in zip(holders, np.split(order.permutation(members), bounds), strict=True):
            parts[holder].append(part)
    return _joined(parts)


def label_shards_indices(
    domains: NDArray[np.integer],
    labels: NDArray[np.integer],
    num_clients: int,
    classes_per_client: int,
    heterogeneity: float,
    *,
    seed: int,
) -> list[IntArray]:
    """Return each client's images, which are of at most ``classes_per_client`` classes.

    As in Flower's ``PathologicalPartitioner`` (Li et al., ICDE 2022, after the shards of McMahan et
    al., AISTATS 2017), a client gets distinct classes, and the images of a class are cut into one
    part for each client that has it. Here this happens in each domain, the parts are proportional
    to the clients' shares of the domain by lambda, and clients choose among the classes of their
    main domains, those first that the fewest clients of the same domain have, ties at random. So
    every image is used, which Flower's random choice does not guarantee.

    Raises:
        SettingsError: If no client has a class of a domain.
    """
    sizes = np.bincount(domains)
    main, shares = _shares(sizes, num_clients, heterogeneity)
    there = np.zeros((len(sizes), labels.max() + 1), dtype=bool)  # classes of each domain
    there[domains, labels] = True
    rng = np.random.default_rng(seed)
    taken = np.zeros(there.shape, dtype=np.int64)
    has = np.zeros((num_clients, there.shape[1]), dtype=bool)
    for client, own in enumerate(main):
        known = np.flatnonzero(there[own].any(axis=0))
        alike = taken[own.argmax()]  # how many clients of the same domain have each class
        order = np.lexsort((rng.random(len(known)), alike[known]))
        chosen = known[order[:classes_per_client]]
        has[client, chosen] = True
        alike[chosen] += 1
    parts: list[list[IntArray]] = [[] for _ in range(num_clients)]
    for domain, label, members in _by_class(domains, labels):
        # in any order, because the last one gets what rounding leaves
        holders = rng.permutation(np.flatnonzero(has[:, label] * shares[:, domain]))
        if not len(holders):
            raise SettingsError(
                f"with partition.clients={num_clients} and partition.classes_per_client="
                f"{classes_per_client}, no client has a class of one of the domains: raise one of "
                f"them, or partition.heterogeneity"
            )
        share = np.cumsum(shares[holders, domain])
        bounds = np.round(share[:-1] / share[-1] * len(members), TARGET_DECIMALS).astype(np.int64)
        for holder, part in zip(holders, np.split(rng.permutation(members), bounds), strict=True):
            parts[holder].append(part)
    return _joined(parts)


def _shares(
    sizes: IntArray, num_clients: int, heterogeneity: float
) -> tuple[NDArray[np.bool_], FloatArray]:
    """Return main domains, bool [N, D], and each client's share of each domain, [N, D]."""
    main, targets = _targets(sizes, num_clients, heterogeneity)
    return main, targets / np.maximum(sizes, 1)


def _by_class(
    domains: NDArray[np.integer], labels: NDArray[np.integer]
) -> Iterator[tuple[int, int, IntArray]]:
    """Yield domain, label and ascending positions of the images of each class in each domain."""
    for domain, members in enumerate(by_domain(domains)):
        own = labels[members]
        for label in np.unique(own).tolist():
            yield domain, label, members[own == label]


def _joined(parts: Iterable[list[IntArray]]) -> list[IntArray]:
    return [np.concatenate([*own, np.empty(0, dtype=np.int64)]) for own in parts]


PartitionRule = Callable[["PartitionSettings", IntArray, NDArray[Any], int], list[IntArray]]
"""Settings, domain and label of each training image, seed -> positions of each client's images."""

BY_CLASS = ("label_dirichlet", "label_shards")
"""Kinds that read labels."""

PARTITION_RULES: dict[str, tuple[PartitionRule, tuple[str, ...]]] = {
    "heterogeneous": (
        lambda s, domains, _, seed: heterogeneous_indices(
            domains, s.clients, s.heterogeneity, seed=seed, rounding=s.rounding
        ),
        ("clients", "heterogeneity", "rounding"),
    ),
    "pooled": (lambda _, domains, *__: [np.arange(len(domains))], ()),
    "domain": (lambda _, domains, __, seed: per_domain_indices(domains, 1, seed=seed), ()),
    "per_domain": (
        lambda s, domains, _, seed: per_domain_indices(domains, s.clients_per_domain, seed=seed),
        ("clients_per_domain",),
    ),
    "dirichlet": (
        lambda s, domains, _, seed: dirichlet_indices(domains, s.clients, s.alpha, seed=seed),
        ("clients", "alpha"),
    ),
    "label_dirichlet": (
        lambda s, domains, labels, seed: label_dirichlet_indices(
            domains, labels, s.clients, s.alpha, s.heterogeneity, seed=seed
        ),
        ("clients", "alpha", "heterogeneity"),
    ),
    "label_shards": (
        lambda s, domains, labels, seed: label_shards_indices(
            domains, labels, s.clients, s.classes_per_client, s.heterogeneity, seed=seed
        ),
        ("clients", "classes_per_client", "heterogeneity"),
    ),
}
"""Kind -> its rule and the settings that it reads."""


def make_partition(
    settings: PartitionSettings,
    indices: NDArray[np.integer],
    domains: NDArray[np.integer],
    labels: NDArray[Any],
    *,
    seed: int,
) -> Partition:
    """Spread the training images over clients.

    ``indices`` are the data-set indices of the training images, [n], ``domains`` and ``labels``
    their domain ids and labels, [n]; ``seed`` is that of the partition's own stream.

    Raises:
        DataError: If there are no training images.
        SettingsError: If a client would hold fewer images than ``settings.min_client_size``, or
            there are too few classes.
    """
    if not len(indices):
        raise DataError("there are no training images to spread over clients; check the splits")
    make, used = PARTITION_RULES[settings.kind]
    smallest = settings.min_client_size
    for name in {"clients", "clients_per_domain"}.intersection(used):
        # before the rule runs, so that a mistyped number of clients cannot fill the memory
        if (wanted := getattr(settings, name)) * smallest > len(indices):
            raise SettingsError(
                f"partition.{name} is {wanted} but there are only {len(indices)} training images, "
                f"too few for {smallest} each; use fewer clients, or partition.min_client_size=0 "
                f"to allow empty ones, which never train"
            )
    if settings.kind in BY_CLASS and np.issubdtype(labels.dtype, np.floating):
        raise SettingsError(
            f"partition.kind={settings.kind} spreads the images of each class, but this data set "
            f"is a regression and has no classes: choose another kind"
        )
    if "classes_per_client" in used and settings.classes_per_client > len(np.unique(labels)):
        raise SettingsError(
            f"partition.classes_per_client is {settings.classes_per_client} but the training "
            f"images have only {len(np.unique(labels))} classes; lower it"
        )
    parts = make(settings, np.asarray(domains, dtype=np.int64), labels, seed)
    too_small = [len(part) for part in parts if len(part) < smallest]
    if too_small:
        raise SettingsError(
            f"{len(too_small)} of {counted(len(parts), 'client')} would hold fewer than {smallest} "
            f"of the {counted(len(indices), 'training image')}, the smallest {min(too_small)}; use "
            f"fewer clients, or partition.min_client_size=0 to allow empty ones, which never train"
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


def validation_parts(
    settings: PartitionSettings,
    partition: Partition,
    id_val: NDArray[np.integer],
    domains: NDArray[np.integer],
    *,
    seed: int,
) -> tuple[dict[str, IntArray], dict[str, IntArray]]:
    """Give every client that holds images validation images too.

    The in-domain validation split is spread with the partition's own rule and seed. A client that
    gets none of it gives up a tenth of its training images, rounded down but at least one; a client
    with a single image uses it for both. With ``dirichlet``, the shares of domains differ from
    those of the training images, because the draw depends on the number of images; kinds that read
    labels therefore spread none of it. ``id_val`` are the data-set indices of the in-domain
    validation images, [n], ``domains`` their domain ids, [n].

    Returns:
        Training and validation images by client name: data-set indices.
    """
    make, _ = PARTITION_RULES[settings.kind]
    parts = []
    if len(id_val) and settings.kind not in BY_CLASS:
        parts = make(settings, np.asarray(domains, dtype=np.int64), np.empty(0), seed)
    if len(parts) != len(partition.clients):  # a domain without validation images has no parts
        parts = [np.arange(0)] * len(partition.clients)
    training: dict[str, IntArray] = {}
    validation: dict[str, IntArray] = {}
    for number, (name, held) in enumerate(zip(partition.clients, partition.indices, strict=True)):
        if not len(held):
            continue
        training[name] = held
        validation[name] = np.asarray(id_val, dtype=np.int64)[parts[number]]
        if not len(validation[name]):
            order = np.random.default_rng([seed, number]).permutation(len(held))
            count = max(1, len(held) // 10)
            validation[name] = held[np.sort(order[:count])]
            if len(held) > 1:
                training[name] = held[np.sort(order[count:])]
    return training, validation
