"""Invariants of the lambda partition, and its counts against a plain-Python oracle."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from feddg_bench.common.errors import SettingsError
from feddg_bench.data.partition import (
    dirichlet_indices,
    heterogeneous_counts,
    heterogeneous_indices,
    label_dirichlet_indices,
    label_shards_indices,
    per_domain_indices,
)

ROUNDINGS = st.sampled_from(["largest_remainder", "reference"])
SIZES = st.lists(st.integers(0, 80), min_size=1, max_size=8).filter(any)
NUM_CLIENTS = st.integers(1, 60)
LAMBDAS = st.integers(0, 100).map(lambda percent: percent / 100)
SEEDS = st.integers(0, 2**63 - 1)


def main_domains(sizes, num_clients):
    """Return u, the clients per domain, and each client's main domain."""
    u = [int(n > 0) for n in sizes]
    while sum(u) < num_clients:
        ratios = [n / c if c else 0 for n, c in zip(sizes, u, strict=True)]
        u[ratios.index(max(ratios))] += 1
    return u, [d for d, c in enumerate(u) for _ in range(c)]


def packing(sizes, num_clients, order):
    """Return the client that gets each whole domain."""
    totals, owner = [0] * num_clients, {}
    for d in order:
        owner[d] = totals.index(min(totals))
        totals[owner[d]] += sizes[d]
    return owner


def oracle(sizes, num_clients, lam, rounding):
    """Return counts by loops: exact fractions for our rounding, doubles for the reference."""
    clients, domains = range(num_clients), range(len(sizes))
    reference = rounding == "reference"
    if not reference:
        lam = Fraction(str(lam))
    if sum(n > 0 for n in sizes) <= num_clients:
        u, owner = main_domains(sizes, num_clients)
        mains = [[owner[i] == d for d in domains] for i in clients]
        one = 1 if reference else Fraction(1)
        targets = [
            [
                sizes[d]
                * ((one / u[d] if mains[i][d] else 0) * (1 - lam) + one / num_clients * lam)
                for d in domains
            ]
            for i in clients
        ]
    else:
        order = sorted(domains, key=lambda d: (-sizes[d], d))
        if reference:
            order = np.argsort(sizes)[::-1].tolist()
        owner = packing(sizes, num_clients, order)
        mains = [[owner[d] == i and sizes[d] > 0 for d in domains] for i in clients]
        targets = [
            [
                (sizes[d] / num_clients if reference else Fraction(sizes[d], num_clients)) * lam
                + (sizes[d] if mains[i][d] else 0) * (1 - lam)
                for d in domains
            ]
            for i in clients
        ]
    counts = [[floor(value) for value in row] for row in targets]
    for d in domains:
        left = sizes[d] - sum(row[d] for row in counts)
        order = list(clients)
        if not reference:
            order = sorted(
                (i for i in clients if targets[i][d] > 0),
                key=lambda i: (
                    counts[i][d] - targets[i][d],
                    not mains[i][d],
                    sum(counts[i]),
                    i,
                ),
            )
        for i in order[:left]:
            counts[i][d] += 1
    return counts


@given(SIZES, NUM_CLIENTS, LAMBDAS, ROUNDINGS)
def test_counts_are_the_oracles(sizes, num_clients, lam, rounding):
    counts = heterogeneous_counts(sizes, num_clients, lam, rounding=rounding)
    assert counts.tolist() == oracle(sizes, num_clients, lam, rounding)


@given(SIZES, NUM_CLIENTS, LAMBDAS, ROUNDINGS)
def test_every_image_is_counted_once(sizes, num_clients, lam, rounding):
    counts = heterogeneous_counts(sizes, num_clients, lam, rounding=rounding)
    assert counts.shape == (num_clients, len(sizes))
    assert counts.min() >= 0
    assert counts.sum(axis=0).tolist() == sizes


@given(SIZES, NUM_CLIENTS, ROUNDINGS)
def test_at_one_all_clients_hold_the_same_mixture(sizes, num_clients, rounding):
    counts = heterogeneous_counts(sizes, num_clients, 1, rounding=rounding)
    assert np.ptp(counts, axis=0).max() <= 1


@given(SIZES, NUM_CLIENTS)
def test_at_zero_clients_are_pure_or_domains_whole(sizes, num_clients):
    counts = heterogeneous_counts(sizes, num_clients, 0)
    if np.count_nonzero(sizes) <= num_clients:
        assert np.count_nonzero(counts, axis=1).max() <= 1
    else:
        assert np.count_nonzero(counts, axis=0).max() == 1


@given(SIZES, NUM_CLIENTS, LAMBDAS)
def test_foreign_images_grow_with_lambda(sizes, num_clients, lam):
    assume(sum(n > 0 for n in sizes) <= num_clients)
    u, owner = main_domains(sizes, num_clients)
    counts = heterogeneous_counts(sizes, num_clients, lam)
    foreign = sum(sizes) - counts[np.arange(num_clients), owner].sum()
    expected = lam * (sum(sizes) - sum(n * c for n, c in zip(sizes, u, strict=True)) / num_clients)
    # rounding moves each of the N counts of own images by less than one
    assert abs(foreign - expected) < num_clients + 1e-6


@given(SIZES, NUM_CLIENTS, LAMBDAS, ROUNDINGS, SEEDS)
def test_index_lists_hold_every_image_once(sizes, num_clients, lam, rounding, seed):
    domains = np.repeat(np.arange(len(sizes)), sizes)
    domains = np.random.default_rng(0).permutation(domains).tolist()
    parts = heterogeneous_indices(domains, num_clients, lam, seed=seed, rounding=rounding)
    again = heterogeneous_indices(domains, num_clients, lam, seed=seed, rounding=rounding)
    other = heterogeneous_indices(domains, num_clients, lam, seed=seed ^ 1, rounding=rounding)
    held = [[domains[i] for i in part] for part in parts]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(domains)))
    assert all(row == sorted(row) for row in held)
    assert [p.tolist() for p in parts] == [p.tolist() for p in again]
    assert held == [[domains[i] for i in part] for part in other]
    present = max(domains) + 1  # trailing empty domains leave no trace in the list
    counts = heterogeneous_counts(sizes[:present], num_clients, lam, rounding=rounding)
    assert [Counter(row) for row in held] == [
        Counter({d: n for d, n in enumerate(row) if n}) for row in counts.tolist()
    ]


@given(SIZES, st.integers(1, 9), SEEDS)
def test_clients_per_domain_are_pure_and_level(sizes, clients_per_domain, seed):
    domains = np.repeat(np.arange(len(sizes)), sizes)
    parts = per_domain_indices(domains, clients_per_domain, seed=seed)
    assert len(parts) == clients_per_domain * np.count_nonzero(sizes)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(domains)))
    assert all(len(set(domains[part])) <= 1 for part in parts)
    lengths = np.array([len(part) for part in parts]).reshape(-1, clients_per_domain)
    assert np.ptp(lengths, axis=1).max() <= 1


@given(SIZES, NUM_CLIENTS, st.floats(1e-3, 1e3), SEEDS)
def test_dirichlet_holds_every_image_once(sizes, num_clients, alpha, seed):
    domains = np.repeat(np.arange(len(sizes)), sizes)
    parts = dirichlet_indices(domains, num_clients, alpha, seed=seed)
    again = dirichlet_indices(domains, num_clients, alpha, seed=seed)
    assert len(parts) == num_clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(domains)))
    assert [p.tolist() for p in parts] == [p.tolist() for p in again]


CLASS_COUNTS = st.lists(
    st.lists(st.integers(0, 12), min_size=4, max_size=4), min_size=1, max_size=5
).filter(lambda rows: np.any(rows))


def images_of(counts, seed):
    """Return domains and labels of images of which there are [D, C], in any order."""
    domains, labels = (
        np.repeat(ids, np.ravel(counts)) for ids in map(np.ravel, np.indices(np.shape(counts)))
    )
    order = np.random.default_rng(seed).permutation(len(domains))
    return domains[order], labels[order]


@given(CLASS_COUNTS, NUM_CLIENTS, st.floats(1e-3, 1e3), LAMBDAS, SEEDS)
def test_label_dirichlet_holds_every_image_once(counts, num_clients, alpha, lam, seed):
    domains, labels = images_of(counts, seed)
    parts, again = (
        label_dirichlet_indices(domains, labels, num_clients, alpha, lam, seed=seed)
        for _ in range(2)
    )
    assert len(parts) == num_clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(domains)))
    assert [p.tolist() for p in parts] == [p.tolist() for p in again]
    if lam == 0:  # and only of the domains that clients have without label skew
        sizes = np.bincount(domains)
        for part, row in zip(parts, heterogeneous_counts(sizes * 60, num_clients, 0), strict=True):
            assert set(domains[part].tolist()) <= set(np.flatnonzero(row).tolist())


@given(CLASS_COUNTS, NUM_CLIENTS, st.integers(1, 4), LAMBDAS, SEEDS)
def test_label_shards_hold_every_image_once(counts, num_clients, classes, lam, seed):
    domains, labels = images_of(counts, seed)
    try:
        parts, again = (
            label_shards_indices(domains, labels, num_clients, classes, lam, seed=seed)
            for _ in range(2)
        )
    except SettingsError:  # only if the clients of a domain are too few for its classes
        sizes = np.bincount(domains).tolist()
        enough = sum(n > 0 for n in sizes) <= num_clients
        own = main_domains(sizes, num_clients)[0] if enough else [1] * len(sizes)
        assert any(u * classes < np.count_nonzero(row) for u, row in zip(own, counts, strict=False))
        return
    assert len(parts) == num_clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(domains)))
    assert all(len(set(labels[part].tolist())) <= classes for part in parts)
    assert [p.tolist() for p in parts] == [p.tolist() for p in again]


@pytest.mark.parametrize("rounding", ["largest_remainder", "reference"])
def test_hundreds_of_domains_match_the_oracle(rounding):
    sizes = [(7 * n) % 37 for n in range(200)]
    counts = heterogeneous_counts(sizes, 50, 0.3, rounding=rounding)
    assert counts.tolist() == oracle(sizes, 50, 0.3, rounding)
