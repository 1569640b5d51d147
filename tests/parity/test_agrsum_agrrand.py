"""AgrSum and AgrRand: the step worked out by hand and by an oracle, the noise, and its guards."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from feddg_bench.common.streams import torch_generator
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import FederationSettings
from feddg_bench.core.messages import LocalUpdate, Reply, decode, encode
from feddg_bench.core.server import Server
from feddg_methods.agrrand import (
    AgrRand,
    agreement_random,
    noise_scale,
    normal_where,
)
from feddg_methods.agrsum import AgrSum
from feddg_methods.fedavg import FedAvg
from tests.helpers import bitwise
from tests.tester import MethodTester, Twin

both = pytest.mark.parametrize("method", [AgrSum, AgrRand])

DELTAS = [[1, -2, 0.5, 0], [2, 1, 0.25, 1], [0.5, -1, 0.25, 1]]
START = [1.0, -2.0, 0.5, 4.0]


def replies_of(states, sizes):
    for i, (state, size) in enumerate(zip(states, sizes, strict=True)):
        yield Reply(f"client_{i:03}", size, LocalUpdate(state), {}, {})


def server_of(start, *, seed=0, round=1, **federation):
    federation = FederationSettings(**federation)
    server = Server(start, (), None, seed=seed, federation=federation, uplink=FedAvg.uplink)
    server.round = round
    return server


def aggregate(method, start, states, sizes=None, *, hyper=None, **options):
    """Return the new model of the server half, from the clients' models."""
    trainable = [name for name in start if name.startswith("w")]
    half = SimpleNamespace(trainable=trainable, settings=validate(method.Settings, hyper or {}))
    sizes = sizes or [1] * len(states)
    return method.aggregate(half, server_of(start, **options), replies_of(states, sizes))


def cut(vector):
    """Return a vector as a model of two tensors: four entries, and all others."""
    vector = torch.as_tensor(vector, dtype=torch.float32)
    return {"w.0": vector[:4].reshape(2, 2), "w.1": vector[4:]}


def joined(state):
    return torch.cat([tensor.flatten() for tensor in state.values()])


def update_of(method, deltas, start=START, **options):
    """Return what the server adds to the model."""
    start = torch.tensor(start)
    states = [{"w": start + torch.tensor(row, dtype=torch.float32)} for row in deltas]
    return (aggregate(method, {"w": start}, states, **options)["w"] - start).tolist()


def draws_of(count, *, seed=0, round=1):
    return torch.randn(count, generator=torch_generator(seed, "agrrand", round)).tolist()


def approx(values):
    return pytest.approx(values, abs=2e-6)


# ------------------------------------------------------------------------------ numbers

OPTIONS = [
    ({}, 1 / 3),
    ({"hyper": {"reduction": "sum"}}, 1.0),
    ({"server_lr": 0.5}, 1 / 6),
    ({"hyper": {"reduction": "sum"}, "server_lr": 0.5}, 0.5),
    ({"sizes": [10, 30, 60]}, 1 / 3),
    ({"sizes": [10, 30, 60], "weighting": "uniform"}, 1 / 3),
]


@pytest.mark.parametrize(("options", "scale"), OPTIONS, ids=str)
def test_published_numbers(options, scale):
    assert update_of(AgrSum, DELTAS, **options) == approx([3.5 * scale, 0, scale, 0])


@pytest.mark.parametrize(("options", "scale"), OPTIONS, ids=str)
def test_published_numbers_with_noise(options, scale):
    first, second = draws_of(2)
    sigma = 2.25 * scale
    expected = [3.5 * scale, sigma * first, scale, sigma * second]
    assert update_of(AgrRand, DELTAS, **options) == approx(expected)


def test_published_draws(monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.tensor([0.3, -1.2]))
    update = update_of(AgrRand, DELTAS, hyper={"reduction": "sum"})
    assert update == approx([3.5, 0.675, 1.0, -2.7])


def problem(seed, count, width=23):
    """Return a model and clients' changes, all multiples of 1/64, with zeros and agreement."""
    rng = np.random.default_rng(seed)
    deltas = rng.integers(-64, 65, (count, width)) + rng.integers(-96, 97, width)
    deltas[rng.uniform(size=deltas.shape) < 0.1] = 0
    deltas[:, rng.uniform(size=width) < 0.1] = 0
    return rng.integers(-128, 128, width) / 64, deltas / 64


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 6),
    reduction=st.sampled_from(["mean", "sum"]),
    eta=st.sampled_from([0.4, 1.0]),
    zeros=st.booleans(),
)
def test_the_step_equals_its_definition(seed, count, reduction, eta, zeros):
    start, deltas = problem(seed, count)
    agree = (deltas > 0).all(axis=0) | (deltas < 0).all(axis=0)
    whole = deltas.sum(axis=0) if reduction == "sum" else deltas.mean(axis=0)
    step = np.where(agree, whole, 0)
    sigma = np.abs(step[agree]).mean() if agree.any() else 0.0
    other = ~agree if zeros else ~agree & (deltas != 0).any(axis=0)
    noisy = step.copy()
    noisy[other] = sigma * np.array(draws_of(int(other.sum()), seed=seed, round=3))

    args = (cut(start), [cut(row) for row in start + deltas])
    options = {"server_lr": eta, "seed": seed, "round": 3}
    for method, hyper, expected in (
        (AgrSum, {}, step),
        (AgrRand, {"randomize_zeros": zeros}, noisy),
    ):
        hyper = {"reduction": reduction, **hyper}
        new = joined(aggregate(method, *args, hyper=hyper, **options)).double().numpy()
        np.testing.assert_allclose(new, start + eta * expected, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cutting_the_model_into_tensors_changes_nothing(reduction):
    """One scale and one stream for the whole network, in the order of its parameters."""
    start, deltas = problem(5, 3)
    states = [cut(row) for row in start + deltas]
    new = aggregate(AgrRand, cut(start), states, hyper={"reduction": reduction})
    expected = agreement_random(
        torch.tensor(deltas), reduction=reduction, generator=torch_generator(0, "agrrand", 1)
    )
    assert_close(joined(new).double(), torch.tensor(start) + expected, rtol=1e-6, atol=2e-6)
    assert not torch.equal(joined(new), joined(aggregate(AgrSum, cut(start), states)))


def test_the_noise_of_every_tensor_has_the_scale_of_the_whole_network():
    """A million disagreeing coordinates in one tensor; the agreeing ones, 0.5 and 1, in another."""
    width = 10**6
    start = {"w.a": torch.zeros(2), "w.b": torch.zeros(width)}
    states = [
        {"w.a": torch.tensor([0.5, 1.0]), "w.b": torch.full((width,), step)} for step in (3.0, -1.0)
    ]
    new = aggregate(AgrRand, start, states)
    assert new["w.a"].tolist() == [0.5, 1.0]
    noise = new["w.b"].double()
    assert noise.std().item() == pytest.approx(0.75, rel=0.01)
    assert abs(noise.mean().item()) < 4 * 0.75 / 1000
    wider = aggregate(AgrRand, start, states, hyper={"reduction": "sum"}, server_lr=0.5)
    assert wider["w.b"].double().std().item() == pytest.approx(0.75, rel=0.01)


def test_the_noise_belongs_to_seed_and_round():
    def noise(**options):
        return update_of(AgrRand, DELTAS, **options)[1]

    assert noise(seed=1, round=2) == noise(seed=1, round=2)
    assert len({noise(seed=s, round=r) for s in (0, 1) for r in (1, 2)}) == 4


# ------------------------------------------------------------------------------- guards


def drawn(count, width=1000):
    generator = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(width, generator=generator)}
    states = [{"w": torch.randn(width, generator=generator)} for _ in range(count)]
    for state in states:
        state["w"][::7] = start["w"][::7]
    return start, states


@both
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_client_is_the_new_model_bit_for_bit(method, reduction):
    start, (state,) = drawn(1)
    delta = state["w"] - start["w"]
    assert not torch.equal(start["w"] + delta, state["w"]), "w + (theta - w) would not do"
    hyper = {"reduction": reduction}
    bitwise(aggregate(method, start, [state], [7], hyper=hyper), state)
    bitwise(
        aggregate(method, start, [state], [7], hyper=hyper, server_lr=0.3),
        aggregate(FedAvg, start, [state], [7], server_lr=0.3),
    )


@both
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_all_disagree_the_model_stays_bit_for_bit(method, reduction):
    """The authors' code would take the mean of nothing, which is NaN."""
    start, (state,) = drawn(1)
    mirrored = {"w": 2 * start["w"] - state["w"]}
    longer = {"w": state["w"] + (state["w"] - start["w"])}
    hyper = {"reduction": reduction}
    bitwise(aggregate(method, start, [longer, mirrored], hyper=hyper), start)


@both
def test_without_change_the_model_stays_bit_for_bit(method):
    start, _ = drawn(1)
    same = [{"w": start["w"].clone()} for _ in range(3)]
    bitwise(aggregate(method, start, same), start)


def test_no_change_is_a_disagreement():
    assert update_of(AgrSum, [[1, 1, 0, -1], [2, 0, 0, -3]]) == [1.5, 0, 0, -2]


def test_coordinates_that_nobody_changed_get_noise_only_where_asked_for():
    deltas = [[1, 0, 2, 0], [1, 0, -2, 0]]
    update = update_of(AgrRand, deltas)
    assert update == approx([1, 0, draws_of(1)[0], 0])
    assert update[1] == update[3] == 0
    everywhere = update_of(AgrRand, deltas, hyper={"randomize_zeros": True})
    assert everywhere == approx([1, *draws_of(3)])


@both
@pytest.mark.parametrize("federation", [{}, {"server_lr": 0.7}], ids=str)
def test_full_agreement_is_fedavg_with_equal_shares_bit_for_bit(method, federation):
    start, states = drawn(5)
    states = [{"w": start["w"] + (s["w"] - start["w"]).abs() + 1e-3} for s in states]
    args = (start, states, [3, 1, 4, 1, 5])
    expected = aggregate(FedAvg, *args, **federation, weighting="uniform")
    bitwise(aggregate(method, *args, **federation), expected)


@both
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("federation", "mean"),
    [({}, 0.2), ({"server_lr": 0.5}, 0.2), ({"weighting": "uniform"}, 0.7 / 3)],
    ids=str,
)
def test_buffers_are_averaged_by_the_servers_shares(method, reduction, federation, mean):
    start = {
        "running_mean": torch.tensor([0.5]),
        "w": torch.tensor([1.0, 1.0]),
        "num_batches_tracked": torch.tensor(3),
    }
    states = [
        {
            "running_mean": torch.tensor([value]),
            "w": torch.tensor([1.0 + step, 1.0 + abs(step)]),
            "num_batches_tracked": torch.tensor(batches),
        }
        for value, step, batches in ((0.2, 1.0, 7), (0.4, -2.0, 9), (0.1, 3.0, 12))
    ]
    hyper = {"reduction": reduction}
    new = aggregate(method, start, states, [10, 30, 60], hyper=hyper, **federation)
    assert list(new) == list(start)
    assert new["running_mean"].tolist() == approx([mean])
    assert new["num_batches_tracked"].item() == 12
    assert new["num_batches_tracked"].dtype == torch.int64


@both
def test_inputs_are_not_changed(method):
    start, states = drawn(3)
    copies = [{"w": s["w"].clone()} for s in (start, *states)]
    aggregate(method, start, states, hyper={"reduction": "sum"}, server_lr=0.3)
    for before, after in zip(copies, (start, *states), strict=True):
        bitwise(after, before)


@both
def test_memory_layouts_may_differ(method):
    """Weights that come from another process have lost theirs."""
    start, states = drawn(2, width=2 * 3 * 4 * 4)
    shape, last = (2, 3, 4, 4), torch.channels_last
    tensors = [s["w"].view(shape) for s in (start, *states)]
    plain = aggregate(method, {"w": tensors[0]}, [{"w": t} for t in tensors[1:]])
    for layouts in ((last, last, last), (last, None, last), (None, last, None)):
        mixed = [t.to(memory_format=m) if m else t for t, m in zip(tensors, layouts, strict=True)]
        bitwise(aggregate(method, {"w": mixed[0]}, [{"w": t} for t in mixed[1:]]), plain)


def test_draws_lie_in_the_masks_in_their_order():
    masks = [torch.tensor([[True, False], [True, True]]), torch.zeros(3, dtype=torch.bool)]
    masks.append(torch.ones(20, dtype=torch.bool))
    first, none, last = normal_where(masks, torch.Generator().manual_seed(9))
    whole = torch.randn(23, generator=torch.Generator().manual_seed(9))
    bitwise(first, torch.tensor([[whole[0], 0], [whole[1], whole[2]]]))
    bitwise(none, torch.zeros(3))
    bitwise(last, whole[3:])


def test_scale_of_the_noise():
    update, agreed = torch.tensor([1.0, -3.0, 50.0]), torch.tensor([True, True, False])
    assert noise_scale([(update, agreed), (torch.tensor([[-8.0]]), torch.tensor([[True]]))]) == 4.0
    assert noise_scale([(update, torch.zeros(3, dtype=torch.bool))]) == 0.0
    assert noise_scale([]) == 0.0


# ------------------------------------------------------------------------ toy federation

NAMES = pytest.mark.parametrize("name", ["agrsum", "agrrand"])


@pytest.fixture
def many_clients(toy_federation):
    """The toy federation's images at 11 clients."""
    index = np.concatenate(list(toy_federation.clients.values()))
    parts = {f"client_{i:02}": part for i, part in enumerate(np.array_split(index, 11))}
    return replace(toy_federation, clients=parts, validation={})


@NAMES
@pytest.mark.parametrize(
    ("per_round", "warned"), [(8, None), (9, "9 clients"), (None, "11 clients")]
)
def test_many_clients_are_warned_of_once_a_run(
    start_run, many_clients, caplog, name, per_round, warned
):
    layer = {"federation": {"per_round": per_round}, "partition": {"clients": 11}}
    run = start_run(name, layer, federation=many_clients)
    with caplog.at_level(logging.WARNING):
        run.rounds(1)
        resumed = start_run(name, layer, federation=many_clients)
        resumed.server.restore(decode(encode(run.server.state())))
        resumed.rounds(2)
    messages = [record.getMessage() for record in caplog.records]
    if warned is None:
        assert messages == []
    else:
        (message,) = messages
        assert message.startswith(warned)
        assert message.endswith("set federation.per_round to 8 or less")
        assert message.count(". ") == 0


# ------------------------------------------------------------------------------ settings


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both
def test_on_a_gpu_as_on_the_cpu(method):
    start, states = drawn(3, width=100_000)
    here = aggregate(method, start, states)
    there = aggregate(method, {"w": start["w"].cuda()}, [{"w": s["w"].cuda()} for s in states])
    assert there["w"].is_cuda
    assert_close(there["w"].cpu(), here["w"], rtol=1e-6, atol=1e-6)


class TestAgrSum(MethodTester):
    name = "agrsum"
    twins = (
        Twin({"reduction": "mean"}, {"federation": {"per_round": 1}}),
        Twin({"reduction": "sum"}, {"federation": {"per_round": 1, "server_lr": 0.5}}),
    )
    apart = ({"reduction": "sum"},)
    wrong = ({"reduction": "median"}, {"randomize_zeros": True})
    models = (1, 1)


class TestAgrRand(TestAgrSum):
    name = "agrrand"
    apart = ({"reduction": "sum"}, {"randomize_zeros": True})
    wrong = ({"reduction": "total"}, {"randomize_zeros": "some"})
