"""Random streams: independent by name, without effect on global generators."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.common.streams import (
    derive_seed,
    generator,
    global_streams,
    torch_generator,
    torch_stream,
)

NAMES = [
    (),
    ("",),
    ("", ""),
    ("a",),
    ("b",),
    ("a", "b"),
    ("b", "a"),
    ("ab",),
    ("a,b",),
    ("a b",),
    (1,),
    ("1",),
    (1, 2),
    (12,),
    ("1", 2),
    (1, "2"),
    (-1,),
    ("fit", 1, "client_11"),
    ("fit", 11, "client_1"),
    ("int:1",),
    ("str:a",),
]


def test_the_same_name_gives_the_same_stream():
    assert derive_seed(3, "fit", 1, "client_0") == derive_seed(3, "fit", 1, "client_0")
    first, second = (generator(3, "fit", 1).random(5) for _ in range(2))
    assert first.tolist() == second.tolist()
    draws = [torch.rand(5, generator=torch_generator(3, "fit", 1)).tolist() for _ in range(2)]
    assert draws[0] == draws[1]


def test_a_seed_never_changes():
    """Numbers of published runs depend on these: SHA-256 of the names, first 63 bits."""
    assert derive_seed(0, "init") == 2_410_301_491_197_795_094
    assert derive_seed(7, "fit", 3, "client_05") == 8_936_605_786_095_734_216


def test_names_that_look_alike_give_different_streams():
    seeds = {(root, *names): derive_seed(root, *names) for names in NAMES for root in (0, 1, 10)}
    same = [(a, b) for a, b in combinations(seeds, 2) if seeds[a] == seeds[b]]
    assert same == []


def test_a_root_is_not_a_name():
    assert derive_seed(1, 2) != derive_seed(12)
    assert derive_seed(1, "2") != derive_seed(1, 2)


words = st.text(st.characters(codec="ascii", min_codepoint=32), max_size=6) | st.integers(0, 999)


@given(st.lists(words, max_size=4), st.lists(words, max_size=4), st.integers(0, 9))
def test_seeds_differ_where_names_do(first, second, root):
    assert 0 <= derive_seed(root, *first) < 2**63
    assert (derive_seed(root, *first) == derive_seed(root, *second)) == (first == second)


def test_streams_of_neighbouring_rounds_are_not_alike():
    rows = np.stack([generator(0, "sampling", r).standard_normal(2000) for r in range(5)])
    correlation = np.corrcoef(rows) - np.eye(5)
    assert np.abs(correlation).max() < 0.1


def test_a_block_runs_on_its_stream():
    with torch_stream(0, "fit", 1, "client_0"):
        first = torch.rand(3)
    torch.rand(10)
    with torch_stream(0, "fit", 1, "client_0"):
        assert torch.equal(torch.rand(3), first)
    with torch_stream(0, "fit", 1, "client_1"):
        assert not torch.equal(torch.rand(3), first)


def test_dropout_is_drawn_from_the_stream():
    ones = torch.ones(64)
    with torch_stream(0, "a"):
        first = torch.nn.functional.dropout(ones)
    with torch_stream(0, "a"):
        assert torch.equal(torch.nn.functional.dropout(ones), first)


def states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002


def test_a_block_gives_the_global_generators_back():
    before = states()
    with torch_stream(0, "fit"):
        torch.rand(100)
    assert states() == before


def test_a_block_that_raises_gives_the_global_generators_back():
    before = states()
    with pytest.raises(RuntimeError), torch_stream(0, "fit"):
        torch.rand(100) @ torch.rand(99)
    assert states() == before


def test_blocks_may_be_nested():
    with torch_stream(0, "outer"):
        expected = torch.rand(2)
    with torch_stream(0, "outer"):
        first = torch.rand(1)
        with torch_stream(0, "inner"):
            torch.rand(7)
        assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def test_generators_leave_the_global_ones_alone():
    before = states()
    generator(0, "a").random(3)
    torch.rand(3, generator=torch_generator(0, "a"))
    assert states() == before


def test_blocks_that_end_in_another_order_leave_later_blocks_intact():
    """Blocks of two threads do."""
    first, second = global_streams(0, "first"), global_streams(0, "second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    legacy = np.random.mtrand._rand  # what np.random's functions draw from
    for _ in range(2):
        before = legacy.get_state()[1].tolist()
        with global_streams(0, "third"):
            inside = legacy.get_state()[1].tolist()
            with global_streams(0, "fourth"):
                legacy.random_sample()
            assert legacy.get_state()[1].tolist() == inside
        assert legacy.get_state()[1].tolist() == before
