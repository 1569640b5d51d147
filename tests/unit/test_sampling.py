"""Client sampling: sizes, frequencies, and the same cohorts for every method."""

from __future__ import annotations

from collections import Counter

from feddg_bench.core.server import sample_clients

CLIENTS = tuple(f"client_{i:03d}" for i in range(10))


def test_every_client_is_drawn_equally_often():
    drawn = Counter()
    for round in range(10_000):
        cohort = sample_clients(CLIENTS, 3, seed=0, round=round)
        assert len(set(cohort)) == 3
        drawn.update(cohort)
    assert set(drawn) == set(CLIENTS)
    assert all(abs(count - 3000) <= 200 for count in drawn.values())


def test_cohorts_keep_the_order_of_the_clients():
    clients = tuple(reversed(CLIENTS))
    for round in range(20):
        cohort = sample_clients(clients, 5, seed=3, round=round)
        assert list(cohort) == sorted(cohort, reverse=True)


def test_a_cohort_depends_on_seed_and_round_alone():
    rounds = [sample_clients(CLIENTS, 4, seed=1, round=r) for r in range(1, 30)]
    backwards = [sample_clients(CLIENTS, 4, seed=1, round=r) for r in reversed(range(1, 30))]
    assert rounds == backwards[::-1]
    assert len(set(rounds)) > 20
    assert rounds != [sample_clients(CLIENTS, 4, seed=2, round=r) for r in range(1, 30)]


def test_none_and_all_are_everyone():
    assert sample_clients(CLIENTS, None, seed=0, round=1) == CLIENTS
    assert sample_clients(list(CLIENTS), 10, seed=0, round=1) == CLIENTS
