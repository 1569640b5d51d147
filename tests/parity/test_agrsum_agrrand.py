"""AgrSum and AgrRand: the step by hand and by an oracle, the noise, and its guards."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from feddg_bench.common.streams import torch_generator
from feddg_bench.core.messages import decode, encode
from feddg_methods.agrrand import agreement_random, noise_scale, normal_where
from feddg_methods.agrsum import agreement_sum
from tests.helpers import bitwise
from tests.rules import RuleTester, step
from tests.tester import MethodTester, Twin

DELTAS = [[1, -2, 0.5, 0], [2, 1, 0.25, 1], [0.5, -1, 0.25, 1]]
OPTIONS = (
    ({}, 1 / 3),
    ({"reduction": "mean"}, 1 / 3),
    ({"reduction": "sum"}, 1.0),
    ({"federation": {"server_lr": 0.5}}, 1 / 6),
    ({"reduction": "sum", "federation": {"server_lr": 0.5}}, 0.5),
    ({"sizes": [10, 30, 60]}, 1 / 3),
    ({"sizes": [10, 30, 60], "federation": {"weighting": "uniform"}}, 1 / 3),
)
REDUCTIONS = ({"reduction": "mean"}, {"reduction": "sum"})


def draws_of(count, *, seed=0, round=1):
    return torch.randn(count, generator=torch_generator(seed, "agrrand", round)).tolist()


class TestRule(RuleTester):
    name = "agrsum"
    rows = tuple((DELTAS, options, [3.5 * s, 0, s, 0]) for options, s in OPTIONS)
    variants = lone = REDUCTIONS
    alike = {"weighting": "uniform"}
    wrong = (({"reduction": "means"}, "did you mean 'mean'"),)

    @staticmethod
    def draw(rng, count):
        lr = float(rng.choice([0.4, 1.0]))
        return {**rng.choice(REDUCTIONS), "federation": {"server_lr": lr}}

    @staticmethod
    def oracle(deltas, sizes, *, reduction="mean", federation=None):
        agree = (deltas > 0).all(axis=0) | (deltas < 0).all(axis=0)
        whole = deltas.sum(axis=0) if reduction == "sum" else deltas.mean(axis=0)
        return (federation or {}).get("server_lr", 1.0) * np.where(agree, whole, 0)

    @staticmethod
    def function(deltas, sizes, federation=None, **options):
        lr = (federation or {}).get("server_lr", 1.0)
        return lr * agreement_sum(deltas, **options)


class TestRandomRule(TestRule):
    name = "agrrand"
    rows = tuple(
        (DELTAS, options, [3.5 * s, 2.25 * s * first, s, 2.25 * s * second])
        for first, second in [draws_of(2)]
        for options, s in OPTIONS
    )

    @staticmethod
    def draw(rng, count):
        return {**TestRule.draw(rng, count), "randomize_zeros": bool(rng.integers(2))}

    @staticmethod
    def oracle(deltas, sizes, *, reduction="mean", randomize_zeros=False, federation=None):
        agree = (deltas > 0).all(axis=0) | (deltas < 0).all(axis=0)
        move = TestRule.oracle(deltas, sizes, reduction=reduction, federation=federation)
        sigma = np.abs(move[agree]).mean() if agree.any() else 0.0
        other = ~agree if randomize_zeros else ~agree & (deltas != 0).any(axis=0)
        move[other] = sigma * np.array(draws_of(int(other.sum())))
        return move

    @staticmethod
    def function(deltas, sizes, federation=None, *, randomize_zeros=False, **options):
        """Splitting the model into tensors changes nothing: one scale and one stream for all."""
        if randomize_zeros:
            return None
        generator = torch_generator(0, "agrrand", 1)
        lr = (federation or {}).get("server_lr", 1.0)
        return lr * agreement_random(deltas, generator=generator, **options)


def test_published_draws(monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.tensor([0.3, -1.2]))
    found = step("agrrand", DELTAS, reduction="sum")
    assert found.tolist() == pytest.approx([3.5, 0.675, 1.0, -2.7], abs=2e-6)


def test_the_noise_of_every_tensor_has_the_scale_of_the_whole_network():
    """A million disagreeing coordinates in one tensor, one agreeing coordinate in another."""
    width = 10**6
    deltas = np.stack([np.append(0.75, np.full(width, step)) for step in (3.0, -1.0)])
    for options in ({}, {"reduction": "sum", "federation": {"server_lr": 0.5}}):
        found = step("agrrand", deltas, **options)
        assert found[0] == 0.75
        assert found[1:].std() == pytest.approx(0.75, rel=0.01)
        assert abs(found[1:].mean()) < 4 * 0.75 / 1000


def test_the_noise_belongs_to_seed_and_round():
    def noise(**options):
        return step("agrrand", DELTAS, **options)[1]

    assert noise(seed=1, round=2) == noise(seed=1, round=2)
    assert len({noise(seed=s, round=r) for s in (0, 1) for r in (1, 2)}) == 4


@pytest.mark.parametrize("name", ["agrsum", "agrrand"])
@pytest.mark.parametrize("values", REDUCTIONS, ids=str)
def test_where_all_disagree_the_model_stays(name, values):
    """The authors' code would take the mean of an empty set, which is NaN."""
    assert not step(name, [[2, -4, 6], [-1, 2, -3]], **values).any()
    assert not step(name, [[1, -1, 2], [-1, 1, 0]], **values).any()


def test_no_change_is_a_disagreement():
    assert step("agrsum", [[1, 1, 0, -1], [2, 0, 0, -3]]).tolist() == [1.5, 0, 0, -2]


def test_coordinates_that_nobody_changed_get_noise_only_where_asked_for():
    deltas = [[1, 0, 2, 0], [1, 0, -2, 0]]
    assert step("agrrand", deltas).tolist() == pytest.approx([1, 0, draws_of(1)[0], 0], abs=2e-6)
    everywhere = step("agrrand", deltas, randomize_zeros=True)
    assert everywhere.tolist() == pytest.approx([1, *draws_of(3)], abs=2e-6)


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


NAMES = pytest.mark.parametrize("name", ["agrsum", "agrrand"])


@pytest.fixture
def many_clients(toy_federation):
    """The toy federation's images, split among 11 clients."""
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
