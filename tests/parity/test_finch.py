"""FINCH on worked examples, against an independent implementation, and its invariants."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from feddg_methods.shared.finch import finch, finch_gram


def directions(*degrees: float) -> Tensor:
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angles.cos(), angles.sin()], 1)


def by_gram(rows: Tensor) -> list[Tensor]:
    rows = rows.double()
    return finch_gram(rows @ rows.T)


def as_lists(partitions: list[Tensor]) -> list[list[int]]:
    return [labels.tolist() for labels in partitions]


def plain_finch(rows: np.ndarray, distance: str) -> list[list[int]]:
    """FINCH in explicit loops in float64; distances within 1e-12 count as equal."""
    labels, partitions = np.arange(len(rows)), []
    while True:
        count = labels.max() + 1
        means = np.stack([rows[labels == c].mean(0) for c in range(count)])
        nearest = []
        for i in range(count):
            best, found = np.inf, i
            for j in range(count):
                if distance == "euclidean":
                    d = np.linalg.norm(means[i] - means[j])
                else:
                    norms = np.linalg.norm(means[i]) * np.linalg.norm(means[j])
                    d = 1 - means[i] @ means[j] / norms if norms else 1.0
                if i != j and d < best - 1e-12:
                    best, found = d, j
            nearest.append(found)
        edges = coo_array((np.ones(count), (np.arange(count), nearest)), shape=(count, count))
        merged = connected_components(edges, directed=False)[1][labels]
        order = list(dict.fromkeys(merged.tolist()))
        merged = np.array([order.index(label) for label in merged])
        clusters = merged.max() + 1
        if partitions and clusters in (1, count):
            return partitions
        partitions.append(merged.tolist())
        labels = merged
        if clusters == 1:
            return partitions


@pytest.mark.parametrize("cluster", [finch, by_gram])
@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ((0, 2, 10, 12, 90, 92, 100, 102), [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 1]]),
        ((90, 0, 100, 10, 2, 92, 12, 102), [[0, 1, 2, 3, 1, 0, 3, 2], [0, 1, 0, 1, 1, 0, 1, 0]]),
        ((37,), [[0]]),
        ((0, 80), [[0, 0]]),
        ((0, 2, 90), [[0, 0, 0]]),
        # Equally near neighbours: the first index wins, so 10 joins 0 and not 20.
        ((0, 10, 20, 24), [[0, 0, 1, 1]]),
    ],
)
def test_worked_examples(cluster, degrees, expected) -> None:
    assert as_lists(cluster(directions(*degrees))) == expected


@pytest.mark.parametrize("cluster", [finch, by_gram])
def test_a_row_of_zeros_is_at_distance_one_from_everything(cluster) -> None:
    # 0 and 1 are opposite (distance 2), so both are nearest to the zero row between them.
    assert as_lists(cluster(torch.tensor([[1.0, 0], [-1, 0], [0, 0]]))) == [[0, 0, 0]]
    # The zero row is equally far from all others, so it takes the first.
    rows = torch.cat([directions(0, 1, 80, 81), torch.zeros(1, 2)])
    assert as_lists(cluster(rows)) == [[0, 0, 1, 1, 0]]
    assert as_lists(cluster(torch.zeros(3, 2))) == [[0, 0, 0]]


@pytest.mark.parametrize("cluster", [finch, by_gram])
@pytest.mark.parametrize("count", [2, 4, 7])
def test_identical_rows_are_one_cluster(cluster, count) -> None:
    row = torch.rand(1, 300, generator=torch.Generator().manual_seed(count))
    assert as_lists(cluster(row.expand(count, -1))) == [[0] * count]


def test_euclidean_sees_lengths() -> None:
    rows = torch.tensor([[1.0, 0], [10, 0], [0, 1], [11, 1], [100, 0], [0, 101]])
    assert as_lists(finch(rows, distance="euclidean")) == [[0, 1, 0, 1, 1, 0]]
    assert as_lists(finch(rows))[0] == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("seed", range(220))
def test_agrees_with_a_plain_implementation(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = 1 + seed % 60
    rows = random.normal(size=(count, random.integers(1, 30))) + random.normal() * (seed % 3)
    if seed % 4 == 1:
        rows = rows[random.integers(count, size=count)]
    if seed % 4 == 2:
        rows[random.random(count) < 0.2] = 0
    expected = plain_finch(rows, "cosine")
    assert as_lists(finch(rows)) == expected
    assert as_lists(by_gram(torch.from_numpy(rows))) == expected
    if seed < 60:
        assert as_lists(finch(rows, distance="euclidean")) == plain_finch(rows, "euclidean")


@pytest.mark.parametrize("seed", range(10))
def test_rows_that_hardly_differ_are_told_apart(seed: int) -> None:
    # Their cosine distances are about 1e-8: below the resolution of float32.
    random = np.random.default_rng(seed)
    rows = random.normal(size=(1, 12)) + 1e-4 * random.normal(size=(40, 12))
    expected = plain_finch(rows, "cosine")
    assert as_lists(finch(rows))[0] == expected[0]
    assert as_lists(by_gram(torch.from_numpy(rows))) == expected


gaussian_rows = st.builds(
    lambda count, width, seed: torch.randn(
        count, width, generator=torch.Generator().manual_seed(seed)
    ),
    st.integers(1, 50),
    st.integers(1, 20),
    st.integers(0, 2**32),
)


@given(gaussian_rows, st.sampled_from([finch, by_gram]))
def test_partitions_are_numbered_nested_and_shrink(rows: Tensor, cluster) -> None:
    partitions = cluster(rows)
    counts = [int(labels.max()) + 1 for labels in partitions]
    assert counts[0] <= max(1, len(rows) // 2)
    assert all(2 * coarse <= fine for fine, coarse in itertools.pairwise(counts))
    assert len(partitions) == 1 or counts[-1] > 1
    for labels, count in zip(partitions, counts, strict=True):
        assert labels.dtype == torch.int64
        assert labels.shape == (len(rows),)
        assert list(dict.fromkeys(labels.tolist())) == list(range(count))
    for fine, coarse in itertools.pairwise(partitions):
        pairs = {(f, c) for f, c in zip(fine.tolist(), coarse.tolist(), strict=True)}
        assert len(pairs) == int(fine.max()) + 1


@given(gaussian_rows, st.integers(0, 2**32))
def test_the_order_of_rows_only_renumbers(rows: Tensor, seed: int) -> None:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    straight, shuffled = by_gram(rows), by_gram(rows[order])
    assert len(straight) == len(shuffled)
    for before, after in zip(straight, shuffled, strict=True):
        together = before[order][:, None] == before[order]
        assert torch.equal(together, after[:, None] == after)


def test_the_cosine_ignores_lengths() -> None:
    random = torch.Generator().manual_seed(3)
    rows = torch.randn(30, 6, generator=random)
    lengths = torch.rand(30, 1, generator=random) * 100 + 0.01
    assert torch.equal(finch(rows)[0], finch(rows * lengths)[0])


def test_a_few_thousand_rows() -> None:
    rows = torch.randn(1500, 8, generator=torch.Generator().manual_seed(0))
    assert as_lists(by_gram(rows)) == as_lists(finch(rows))


def test_arrays_lists_and_half_precision_are_rows() -> None:
    rows = [[0.0, 1.0], [0.0, 2.0], [1.0, 0.0], [3.0, 0.0]]
    for kind in (rows, np.array(rows, dtype=np.float32), torch.tensor(rows).half()):
        assert as_lists(finch(kind)) == [[0, 0, 1, 1]]


def test_inputs_stay_as_they_are() -> None:
    rows = torch.randn(9, 3, requires_grad=True)
    gram = (rows @ rows.T).detach()
    before, gram_before = rows.detach().clone(), gram.clone()
    finch(rows)
    finch_gram(gram)
    assert torch.equal(rows, before)
    assert torch.equal(gram, gram_before)


def test_it_is_silent(monkeypatch, capfd) -> None:
    # The package warns on its first import when its optional parts are missing.
    for name in [name for name in sys.modules if name.split(".")[0] == "finch"]:
        monkeypatch.delitem(sys.modules, name)
    finch(torch.eye(6))
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("count", [1, 2, 3, 60, 1500])
def test_the_device_does_not_matter(count: int) -> None:
    rows = torch.randn(count, 8, generator=torch.Generator().manual_seed(count)).double()
    on_device = finch_gram((rows @ rows.T).cuda())
    assert all(labels.is_cuda for labels in on_device)
    assert as_lists(on_device) == as_lists(by_gram(rows))
