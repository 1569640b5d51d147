"""How one number, lambda in [0, 1], spreads D domains over N clients (Bai et al., ICLR 2024).

1 gives every client the same mixture of domains, 0 as few domains as possible: only one, if there
are enough clients. A domain is an integer id from 0; ids without images are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from feddg_bench.common.errors import SettingsError, unknown

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

ROUNDINGS = ("largest_remainder", "reference")
TARGET_DECIMALS = 9
"""Differences between targets beyond this many decimals are binary rounding noise."""


def heterogeneous_counts(
    sizes: ArrayLike, num_clients: int, heterogeneity: float, *, rounding: str = "largest_remainder"
) -> IntArray:
    """Return how many images of each domain each client gets.

    Where there are at least as many clients as domains, every client has one main domain, and its
    real-valued target for domain d is n_d ((1 - lambda) [d is its main domain] / u_d + lambda / N),
    where u_d clients have d as their main domain. Otherwise whole domains are packed onto clients,
    largest first, and lambda mixes that packing with equal shares (Bai et al., ICLR 2024).

    ``largest_remainder`` gives the images that the floors leave over to the largest fractions, ties
    to clients whose main domain it is, then to the smaller client, then to the lower number.
    ``reference`` gives them to clients 0, 1, ... as the authors' code does, and repeats its
    floating-point arithmetic bit for bit. Clients with low numbers are then larger, and even
    lambda = 0 leaves foreign images in pure clients.

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
    return join_domains(
        np.split(rng.permutation(members), np.cumsum(column)[:-1])
        for members, column in zip(by_domain(domains), counts.T, strict=True)
    )


def by_domain(domains: NDArray[np.integer]) -> list[IntArray]:
    """Return the ascending positions of each domain's images, for ids from 0 to the largest."""
    bounds = np.cumsum(np.bincount(domains))[:-1]
    return np.split(np.argsort(domains, kind="stable"), bounds)


def join_domains(parts_by_domain: Iterable[list[IntArray]]) -> list[IntArray]:
    """Join, for every client, its parts of all domains."""
    return [np.concatenate(parts) for parts in zip(*parts_by_domain, strict=True)]
