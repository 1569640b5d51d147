"""The store of a round's updates: memory or disk, one thread or many, and failures."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from feddg_bench.common.errors import FeddgError
from feddg_bench.config.schema import FederationSettings
from feddg_bench.core.messages import LocalUpdate, Reply
from feddg_bench.core.server import NoReplyError, Server
from feddg_methods.shared import round_updates
from feddg_methods.shared.round_updates import (
    UpdateStore,
    average_updates,
    combine_updates,
    image_count,
    one_each,
)
from tests.helpers import bitwise, refused

SHAPES = {"scalar": (), "kernel": (8, 3, 3, 3), "empty": (0,), "matrix": (50, 70), "bias": (70,)}
NAMES = list(SHAPES)
P = sum(int(np.prod(shape)) for shape in SHAPES.values())


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat(weights):
    return np.concatenate([weights[name].double().numpy().ravel() for name in NAMES])


def serve(weights=None):
    return Server(
        weights or state(99), (), None, seed=0, federation=FederationSettings(), uplink={}
    )


def replies(count):
    for k in range(count):
        yield Reply(f"client_{k}", k + 1, LocalUpdate(state(k)), {}, {})


def of_gram(gram, p):
    """A rule whose coefficients depend on every inner product."""
    return torch.linalg.solve(gram + gram.trace() * torch.eye(len(gram)), gram @ p)


def combined(count=5, **options):
    return combine_updates(serve(), replies(count), NAMES, of_gram, share=image_count, **options)


@pytest.fixture
def limits(monkeypatch):
    """Return a function that limits how much is kept in memory, or computed at once."""
    return partial(monkeypatch.setattr, round_updates)


@pytest.fixture
def files(monkeypatch, tmp_path):
    """Return the temporary files that were made, in a folder of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, make = [], tempfile.TemporaryFile

    def record(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", record)
    return made


# ------------------------------------------------------------------------------------ numbers


def test_a_combination_is_that_of_the_vectors():
    w = flat(state(99))
    deltas = np.stack([flat(state(k)) - w for k in range(5)])
    p = np.arange(1, 6) / 15
    gram = deltas @ deltas.T
    a = np.linalg.solve(gram + np.trace(gram) * np.eye(5), gram @ p)
    found = flat(combined()) - w
    assert np.linalg.norm(found - a @ deltas) <= 1e-6 * np.linalg.norm(a @ deltas)


def test_inner_products_by_tensor_add_up_to_those_of_the_whole():
    with UpdateStore(state(99), NAMES) as store:
        for k in range(4):
            store.add(state(k))
        parts = store.inner_products(by_tensor=True)
        whole = store.inner_products()
    assert list(whole) == [""]
    assert set(parts) == set(NAMES) - {"empty"}
    assert whole[""].dtype == torch.float64
    assert_close(sum(parts.values()), whole[""], rtol=1e-12, atol=0)
    deltas = np.stack([(state(k)["bias"] - state(99)["bias"]).double().numpy() for k in range(4)])
    np.testing.assert_allclose(parts["bias"].numpy(), deltas @ deltas.T, rtol=1e-12)


def test_updates_may_come_after_a_look():
    with UpdateStore(state(99), NAMES) as one, UpdateStore(state(99), NAMES) as other:
        for k in range(3):
            one.add(state(k))
            other.add(state(k))
            one.inner_products()
        bitwise(one.inner_products(), other.inner_products())


@pytest.mark.parametrize("by_tensor", [False, True])
@pytest.mark.parametrize("limit", [0, 4 * P, 3 * 4 * P, 5 * 4 * P - 1])
def test_disk_and_memory_agree_bit_for_bit(limits, files, limit, by_tensor):
    expected = combined(by_tensor=by_tensor)
    assert files == []
    limits("IN_MEMORY", limit)
    bitwise(combined(by_tensor=by_tensor), expected)
    assert len(files) == 1


@pytest.mark.parametrize("block", [1, 5, 999, 10**9])
def test_the_size_of_blocks_does_not_matter(limits, block):
    expected = combined()
    limits("BLOCK", block)
    assert_close(combined(), expected, rtol=1e-6, atol=1e-7)


def test_the_number_of_threads_does_not_matter():
    shape = (20, 40_000)
    base = {"w": torch.zeros(shape[1])}
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with UpdateStore(base, ["w"]) as store:
                for row in rows:
                    store.add({"w": row})
                gram = store.inner_products()[""]
                found.append((gram, store.step({"": gram[0]})["w"]))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for pair in found for a, b in zip(pair, found[0], strict=True))


def test_memory_formats_and_types_stay():
    base = state(99)
    base["kernel"] = base["kernel"].to(memory_format=torch.channels_last)
    base["bias"] = base["bias"].bfloat16()
    new = combine_updates(serve(base), replies(3), NAMES, lambda _, p: p, share=one_each)
    assert new["kernel"].is_contiguous(memory_format=torch.channels_last)
    assert new["bias"].dtype == torch.bfloat16
    mean = sum(state(k)["kernel"].double() for k in range(3)) / 3
    assert_close(new["kernel"].double(), mean, rtol=1e-6, atol=1e-6)
    mean = sum(state(k)["bias"].double() for k in range(3)) / 3
    assert_close(new["bias"].double(), mean, rtol=2**-8, atol=2**-8)


def test_own_shares_of_an_average():
    found = average_updates(serve(), replies(3), ["matrix"], share=one_each)
    rows = [state(k) for k in range(3)]
    assert_close(found["matrix"], sum(row["matrix"] for row in rows) / 3)
    assert_close(found["bias"], sum((k + 1) * row["bias"] for k, row in enumerate(rows)) / 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_the_cpu_gives_bit_for_bit():
    def there():
        for reply in replies(5):
            weights = {name: tensor.cuda() for name, tensor in reply.value.weights.items()}
            yield Reply(reply.client, reply.num_examples, LocalUpdate(weights), {}, {})

    server = serve({name: tensor.cuda() for name, tensor in state(99).items()})
    found = combine_updates(server, there(), NAMES, of_gram, share=image_count)
    assert all(tensor.is_cuda for tensor in found.values())
    bitwise({name: tensor.cpu() for name, tensor in found.items()}, combined())


# --------------------------------------------------------------------------------------- disk


def test_the_file_holds_one_row_a_client_has_no_name_and_is_closed(limits, files, tmp_path):
    limits("IN_MEMORY", 4 * P)
    sizes = []

    def look(_, p):
        sizes.append(os.fstat(files[0].fileno()).st_size)
        assert list(tmp_path.iterdir()) == []
        return p

    combine_updates(serve(), replies(6), NAMES, look, share=one_each)
    assert sizes == [6 * 4 * P]
    assert files[0].closed


@pytest.mark.parametrize("where", ["asking", "rule"])
def test_the_file_is_closed_when_something_fails(limits, files, where):
    limits("IN_MEMORY", 0)

    def failing():
        yield from replies(2)
        if where == "asking":
            raise NoReplyError("fit")

    def rule(*_):
        raise NoReplyError("rule")

    with pytest.raises(NoReplyError):
        combine_updates(serve(), failing(), NAMES, rule, share=one_each)
    assert [file.closed for file in files] == [True]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("limit", [0, 4 * P])
def test_a_full_disk_is_said_in_one_sentence(limits, monkeypatch, tmp_path, limit):
    limits("IN_MEMORY", limit)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    full = partial(Path("/dev/full").open, "r+b")
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(FeddgError) as caught:
        combined()
    message = str(caught.value)
    assert f"found no room in the temporary folder {tmp_path} (No space left on device)" in message
    assert "TMPDIR" in message
    assert "\n" not in message


def test_a_folder_that_is_not_there_is_said_too(limits, monkeypatch, tmp_path):
    limits("IN_MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with refused(FeddgError, "gone (No such file or directory)"):
        combined()
