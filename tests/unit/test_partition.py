"""Partitions: worked examples of FedDG_Benchmark's rule and the default; validation images."""

from __future__ import annotations

import json

import numpy as np
import pytest

from feddg_bench.config.schema import PartitionSettings
from feddg_bench.data.partition import (
    Partition,
    dirichlet_indices,
    heterogeneous_counts,
    heterogeneous_indices,
    label_dirichlet_indices,
    label_shards_indices,
    make_partition,
    per_domain_indices,
    validation_parts,
)

MORE_CLIENTS = (10, 7, 4)  # over 5 clients: main domains 0, 0, 1, 1, 2
MORE_DOMAINS = (9, 6, 5, 2)  # over 2 clients: packed as {0, 3}, {1, 2}
PACS = {"ac-p-s": (0, 1853, 2125), "cs-a-p": (0, 0, 2126, 3557), "pa-s-c": (1515, 1860)}


@pytest.mark.parametrize(
    ("sizes", "heterogeneity", "expected"),
    [
        (MORE_CLIENTS, 0, [(5, 1, 0), (5, 0, 0), (0, 3, 0), (0, 3, 0), (0, 0, 4)]),
        (MORE_CLIENTS, 0.25, [(5, 1, 1), (5, 1, 0), (0, 3, 0), (0, 2, 0), (0, 0, 3)]),
        (MORE_CLIENTS, 0.5, [(4, 1, 1), (3, 1, 1), (1, 3, 0), (1, 2, 0), (1, 0, 2)]),
        (MORE_CLIENTS, 1, [(2, 2, 1), (2, 2, 1), (2, 1, 1), (2, 1, 1), (2, 1, 0)]),
        (MORE_DOMAINS, 0, [(9, 0, 0, 2), (0, 6, 5, 0)]),
        (MORE_DOMAINS, 0.5, [(7, 2, 2, 2), (2, 4, 3, 0)]),
        (MORE_DOMAINS, 1, [(5, 3, 3, 1), (4, 3, 2, 1)]),
    ],
)
def test_reference_counts(sizes, heterogeneity, expected):
    counts = heterogeneous_counts(sizes, len(expected), heterogeneity, rounding="reference")
    assert counts.dtype == np.int64
    assert counts.tolist() == [list(row) for row in expected]


@pytest.mark.parametrize(
    ("sizes", "heterogeneity", "expected"),
    [
        (MORE_CLIENTS, 0, [(5, 0, 0), (5, 0, 0), (0, 4, 0), (0, 3, 0), (0, 0, 4)]),
        (MORE_CLIENTS, 0.5, [(4, 1, 0), (3, 1, 0), (1, 2, 1), (1, 2, 0), (1, 1, 3)]),
        (MORE_CLIENTS, 1, [(2, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 0), (2, 1, 1)]),
        (MORE_DOMAINS, 0, [(9, 0, 0, 2), (0, 6, 5, 0)]),
        (MORE_DOMAINS, 0.5, [(7, 1, 1, 2), (2, 5, 4, 0)]),
        (MORE_DOMAINS, 1, [(5, 3, 2, 1), (4, 3, 3, 1)]),
        ((3, 2), 0, [(1, 0), (1, 0), (1, 0), (0, 0), (0, 1), (0, 1), (0, 0)]),
    ],
)
def test_default_counts(sizes, heterogeneity, expected):
    counts = heterogeneous_counts(sizes, len(expected), heterogeneity)
    assert counts.dtype == np.int64
    assert counts.tolist() == [list(row) for row in expected]


def test_reference_leaves_clients_empty_and_others_mixed():
    counts = heterogeneous_counts((3, 2), 7, 0, rounding="reference")
    assert counts.sum(axis=1).tolist() == [2, 2, 1, 0, 0, 0, 0]


def test_domains_of_one_size_are_packed_in_order_of_their_ids():
    assert heterogeneous_counts((4, 4, 4), 2, 0).tolist() == [[4, 0, 4], [0, 4, 0]]


def test_binary_noise_moves_the_reference_rounding_only():
    # 49 * (1 / 49) is slightly below 1: the authors' code floors it to 0 and deals from client 0
    assert 49 * (1 / 49) < 1
    ours = heterogeneous_counts((1, 49), 50, 0)
    assert ours.tolist() == [[1, 0]] + [[0, 1]] * 49
    theirs = heterogeneous_counts((1, 49), 50, 0, rounding="reference")
    assert theirs.tolist() == [[1, 1]] + [[0, 1]] * 48 + [[0, 0]]


def test_binary_noise_does_not_move_ties():
    # client 2 has a target of 5 * (0.1 + 0.9 / 3) = 2 images of domain 2, slightly less in binary:
    # its total still counts as 2, so the tie of clients 0 and 2 for domain 1 goes to client 0
    assert heterogeneous_counts((1, 2, 5), 3, 0.9).tolist() == [[1, 1, 1], [0, 1, 2], [0, 0, 2]]


@pytest.mark.parametrize(
    ("scenario", "num_mains"), [("ac-p-s", (47, 53)), ("cs-a-p", (38, 62)), ("pa-s-c", (45, 55))]
)
def test_main_domains_of_the_pacs_scenarios(scenario, num_mains):
    counts = heterogeneous_counts(PACS[scenario], 100, 0)
    held = (counts > 0).sum(axis=0)
    assert tuple(held[held > 0]) == num_mains
    assert np.all((counts > 0).sum(axis=1) == 1)


def _off_main(counts):
    return int((counts.sum(axis=1) - counts.max(axis=1)).sum())


@pytest.mark.parametrize(
    ("scenario", "heterogeneity", "rounding", "off_main"),
    [
        ("ac-p-s", 0.1, "reference", 178),
        ("ac-p-s", 0.1, "largest_remainder", 200),
        ("ac-p-s", 0, "reference", 5),
        ("cs-a-p", 0, "reference", 23),
        ("pa-s-c", 0, "reference", 45),
        ("ac-p-s", 0, "largest_remainder", 0),
        ("cs-a-p", 0, "largest_remainder", 0),
        ("pa-s-c", 0, "largest_remainder", 0),
    ],
)
def test_foreign_images_in_the_pacs_scenarios(scenario, heterogeneity, rounding, off_main):
    counts = heterogeneous_counts(PACS[scenario], 100, heterogeneity, rounding=rounding)
    assert _off_main(counts) == off_main


def test_reference_counts_of_ac_p_s():
    counts = heterogeneous_counts(PACS["ac-p-s"], 100, 0.1, rounding="reference")
    assert counts[:3].tolist() == [[0, 38, 3]] * 3
    assert counts[99].tolist() == [0, 1, 38]
    sizes = counts.sum(axis=1)
    assert (sizes.min(), sizes.max()) == (39, 41)


def test_index_lists_of_the_reference():
    domains = (0, 1, 0, 1, 1, 0, 2, 2, 0, 1)
    mixed = heterogeneous_indices(domains, 3, 0.5, seed=1001, rounding="reference")
    assert [part.tolist() for part in mixed] == [[8, 5, 2, 3, 7], [0, 9, 4, 1], [6]]
    pure = heterogeneous_indices(domains, 4, 0, seed=1001, rounding="reference")
    assert [part.tolist() for part in pure] == [[8, 5], [2, 0], [3, 9, 4, 1], [7, 6]]


def test_an_empty_domain_consumes_no_randomness():
    domains = np.array([0, 2, 0, 2, 2, 0, 2])
    gap = heterogeneous_indices(domains, 3, 0.3, seed=4)
    dense = heterogeneous_indices(domains // 2, 3, 0.3, seed=4)
    assert [a.tolist() for a in gap] == [b.tolist() for b in dense]


def test_seed_moves_images_but_not_counts():
    domains = np.repeat([0, 1], [60, 40])
    one, again, other = (heterogeneous_indices(domains, 7, 0.4, seed=s) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    for a, b in zip(one, other, strict=True):
        assert np.bincount(domains[a], minlength=2).tolist() == (
            np.bincount(domains[b], minlength=2).tolist()
        )


def test_clients_per_domain_are_pure_and_equal():
    domains = np.repeat([0, 3], [90, 49])
    parts = per_domain_indices(domains, 2, seed=0)
    assert [len(part) for part in parts] == [45, 45, 24, 25]
    assert [set(domains[part]) for part in parts] == [{0}, {0}, {3}, {3}]
    assert sorted(np.concatenate(parts)) == list(range(139))
    assert parts[0].tolist() != sorted(parts[0])


def test_dirichlet_spreads_more_evenly_with_larger_alpha():
    domains = np.repeat([0, 1, 2], 400)
    spread = {}
    for alpha in (0.1, 1000.0):
        parts = dirichlet_indices(domains, 5, alpha, seed=0)
        assert sorted(np.concatenate(parts)) == list(range(1200))
        spread[alpha] = np.stack([np.bincount(domains[p], minlength=3) for p in parts]).std(axis=0)
    assert np.all(spread[1000.0] < 10)
    assert np.all(spread[0.1] > 80)


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_survives_tiny_alpha(seed):
    parts = dirichlet_indices(np.repeat([0, 1], 50), 7, 1e-6, seed=seed)
    assert sum(len(part) == 0 for part in parts) >= 5
    assert sorted(np.concatenate(parts)) == list(range(100))


CLASSES = np.tile(np.arange(4), 30)


def of_classes(parts):
    """Return each client's number of images of each of `CLASSES`."""
    return [np.bincount(CLASSES[part], minlength=4).tolist() for part in parts]


@pytest.mark.parametrize("heterogeneity", [0.0, 1.0])
def test_label_dirichlet_of_one_domain_has_the_counts_of_flower(heterogeneity):
    """These are those of ``DirichletPartitioner(3, "label", 0.5, 0, seed=7)`` of fdef7afb."""
    one = np.zeros(120, int)
    parts = label_dirichlet_indices(one, CLASSES, 3, 0.5, heterogeneity, seed=7)
    assert of_classes(parts) == [[9, 0, 3, 0], [18, 27, 25, 3], [3, 3, 2, 27]]


def test_label_dirichlet_skews_classes_and_keeps_lambda():
    """Over many draws, clients hold their share of each domain, by lambda, for any alpha."""
    domains, labels = np.repeat([0, 1], 600), np.tile(np.arange(4), 300)
    for alpha, lam in ((0.1, 0.0), (0.1, 0.5), (10.0, 0.5)):
        held = np.zeros((4, 2))
        for seed in range(300):
            parts = label_dirichlet_indices(domains, labels, 4, alpha, lam, seed=seed)
            held += [np.bincount(domains[part], minlength=2) for part in parts]
        expected = heterogeneous_counts([600, 600], 4, lam)
        assert np.abs(held / 300 - expected).max() < 30, (alpha, lam)
        assert not held[expected == 0].any()


def test_label_shards_of_one_domain_are_equal_parts_of_two_classes():
    one = np.zeros(120, int)
    parts = label_shards_indices(one, CLASSES, 4, 2, 0.5, seed=0)
    assert [sorted(row) for row in of_classes(parts)] == [[0, 0, 15, 15]] * 4
    assert sorted(np.concatenate(parts)) == list(range(120))
    three = label_shards_indices(one, CLASSES, 3, 4, 0.0, seed=0)
    assert of_classes(three) == [[10] * 4] * 3


def test_label_shards_keep_lambda():
    """Clients 0 and 1 have most of the first domain; 22.5 and 7.5 would be exact."""
    domains = np.repeat([0, 1], 60)
    parts = label_shards_indices(domains, CLASSES, 4, 4, 0.5, seed=0)
    counts = [np.bincount(domains[part], minlength=2).tolist() for part in parts]
    assert counts == [[23, 7], [22, 8], [8, 22], [7, 23]]
    pure = label_shards_indices(domains, CLASSES, 4, 2, 0.0, seed=0)
    assert [np.bincount(domains[part], minlength=2).tolist() for part in pure] == [
        [30, 0],
        [30, 0],
        [0, 30],
        [0, 30],
    ]
    assert all(sorted(row) == [0, 0, 15, 15] for row in of_classes(pure))


# images 100 to 119 of a data set of 200: 12 in domain 1, 8 in domain 3
INDICES = np.arange(100, 120)
DOMAINS = np.where(np.arange(200) < 112, 1, 3)
LABELS = np.arange(200) % 4


def _make(seed=5, **values) -> Partition:
    return make_partition(
        PartitionSettings(**values), INDICES, DOMAINS[INDICES], LABELS[INDICES], seed=seed
    )


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({"kind": "pooled"}, [20]),
        ({"kind": "domain"}, [12, 8]),
        ({"kind": "per_domain", "clients_per_domain": 3}, [4, 4, 4, 2, 3, 3]),
        ({"kind": "heterogeneous", "clients": 5, "heterogeneity": 0.0}, [4, 4, 4, 4, 4]),
    ],
)
def test_kinds(values, sizes):
    partition = _make(**values)
    assert partition.sizes.tolist() == sizes
    assert partition.sizes.dtype == np.int64
    assert sorted(np.concatenate(partition.indices)) == INDICES.tolist()
    assert np.bincount(DOMAINS[np.concatenate(partition.indices)]).tolist() == [0, 12, 0, 8]
    assert partition.rule == {"seed": 5, **values} | (
        {"rounding": "largest_remainder"} if values["kind"] == "heterogeneous" else {}
    )


def test_dirichlet_kind_deals_its_own_rule():
    partition = _make(kind="dirichlet", clients=3, alpha=2.0, min_client_size=0)
    parts = dirichlet_indices(DOMAINS[INDICES], 3, 2.0, seed=5)
    assert [i.tolist() for i in partition.indices] == [INDICES[p].tolist() for p in parts]
    assert partition.rule == {"kind": "dirichlet", "clients": 3, "alpha": 2.0, "seed": 5}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("label_dirichlet", "alpha", 2.0), ("label_shards", "classes_per_client", 3)],
)
def test_kinds_of_label_skew_deal_their_own_rule(kind, name, value):
    own = {"kind": kind, "clients": 3, name: value, "heterogeneity": 0.4}
    partition = _make(**own, min_client_size=0)
    rule = {"label_dirichlet": label_dirichlet_indices, "label_shards": label_shards_indices}[kind]
    parts = rule(DOMAINS[INDICES], LABELS[INDICES], 3, value, 0.4, seed=5)
    assert [i.tolist() for i in partition.indices] == [INDICES[p].tolist() for p in parts]
    assert partition.rule == own | {"seed": 5}


def test_heterogeneous_kind_follows_its_settings():
    partition = _make(clients=3, heterogeneity=0.7, rounding="reference")
    parts = heterogeneous_indices(DOMAINS[INDICES], 3, 0.7, seed=5, rounding="reference")
    assert [i.tolist() for i in partition.indices] == [INDICES[p].tolist() for p in parts]


def test_names_sort_as_numbers():
    assert _make(clients=11).clients[7] == "client_007"
    many = make_partition(
        PartitionSettings(clients=1001), np.arange(1001), *np.zeros((2, 1001), int), seed=0
    )
    assert many.clients[7] == "client_0007"
    assert list(many.clients) == sorted(many.clients)


def test_digest_is_of_names_and_indices_only():
    arrays = (np.array([3, 1]), np.array([2]))
    one = Partition(("client_000", "client_001"), arrays, {"kind": "a"})
    same = Partition(("client_000", "client_001"), arrays, {"kind": "b"})
    moved = Partition(("client_000", "client_001"), (np.array([3]), np.array([1, 2])), {})
    ordered = Partition(("client_000", "client_001"), (np.array([1, 3]), np.array([2])), {})
    renamed = Partition(("client_000", "client_002"), arrays, {})
    assert len(one.digest()) == 64
    assert one.digest() == same.digest()
    assert len({p.digest() for p in (one, moved, ordered, renamed)}) == 4


def test_json_says_what_every_client_holds():
    partition = _make(kind="per_domain", clients_per_domain=1)
    value = json.loads(json.dumps(partition.as_json(DOMAINS, LABELS, ("w", "x", "y", "z"))))
    assert value["rule"] == {"kind": "per_domain", "clients_per_domain": 1, "seed": 5}
    assert value["hash"] == partition.digest()
    first, second = value["clients"]
    assert first["id"] == "client_000"
    assert first["domains"] == {"x": 12}
    assert first["labels"] == {"0": 3, "1": 3, "2": 3, "3": 3}
    assert sorted(first["indices"]) == list(range(100, 112))
    assert second["domains"] == {"z": 8}


def test_empty_clients_are_allowed_on_request():
    settings = PartitionSettings(clients=7, heterogeneity=0, min_client_size=0)
    partition = make_partition(settings, np.arange(5), *[np.array([0, 0, 0, 1, 1])] * 2, seed=0)
    assert partition.sizes.tolist() == [1, 1, 1, 0, 1, 1, 0]
    partition.as_json(np.zeros(5, int), np.zeros(5, int), ("a",))


def test_kinds_without_a_number_of_clients_ignore_it():
    assert _make(kind="pooled", clients=500).clients == ("client_000",)
    assert len(_make(kind="domain", clients=500).clients) == 2


# ------------------------------------------------------------------- clients' validation images


def held(kind, train, id_val, *, clients=4, seed=3, **values):
    """Return a partition, training and validation images by client; odd images: domain 1."""
    settings = PartitionSettings(kind=kind, clients=clients, min_client_size=0, **values)
    train, id_val = np.asarray(train), np.asarray(id_val, dtype=np.int64)
    partition = make_partition(settings, train, train % 2, train // 2 % 3, seed=seed)
    parts = validation_parts(settings, partition, id_val, id_val % 2, seed=seed)
    return partition, *parts


def test_validation_images_are_spread_by_the_rule_of_the_partition():
    partition, training, validation = held("heterogeneous", range(80), range(100, 116))
    assert training.keys() == validation.keys() == set(partition.clients)
    spread = make_partition(
        PartitionSettings(clients=4, heterogeneity=0.1),
        np.arange(100, 116),
        np.arange(16) % 2,
        np.zeros(16, int),
        seed=3,
    )
    for name, index, expected in zip(
        partition.clients, partition.indices, spread.indices, strict=True
    ):
        assert validation[name].tolist() == expected.tolist()
        assert training[name].tolist() == index.tolist()
    assert sorted(np.concatenate(list(validation.values()))) == list(range(100, 116))


def test_a_client_without_validation_images_gives_up_a_tenth_of_its_own():
    partition, training, validation = held("heterogeneous", range(100), [], clients=3)
    for name, index in zip(partition.clients, partition.indices, strict=True):
        assert len(validation[name]) == len(index) // 10 > 0
        assert sorted([*training[name], *validation[name]]) == sorted(index)


@pytest.mark.parametrize(("count", "trains", "validates"), [(1, 1, 1), (2, 1, 1), (20, 18, 2)])
def test_how_many_images_are_given_up(count, trains, validates):
    _, training, validation = held("pooled", range(count), [])
    assert len(training["client_000"]) == trains
    assert len(validation["client_000"]) == validates


def test_clients_with_own_classes_validate_on_them():
    partition, training, validation = held(
        "label_shards", range(96), range(100, 124), classes_per_client=1, heterogeneity=0, clients=6
    )
    for name, index in zip(partition.clients, partition.indices, strict=True):
        assert len(validation[name]) == 1
        assert sorted([*training[name], *validation[name]]) == sorted(index)


def test_a_domain_without_validation_images_leaves_none_to_spread():
    """With one client per domain, the parts could not be assigned."""
    _, training, validation = held("domain", range(40), range(100, 110, 2))
    assert {len(index) for index in validation.values()} == {2}
    assert {len(index) for index in training.values()} == {18}


def test_clients_without_images_have_no_validation_images_either():
    partition, training, validation = held("heterogeneous", range(3), range(100, 140), clients=6)
    assert len(partition.clients) == 6
    assert len(training) == len(validation) == 3
