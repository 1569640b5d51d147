"""FedGMA: the masked step worked out by hand and by an oracle, its readings, and its ties."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import FederationSettings
from feddg_bench.core.messages import LocalUpdate, Reply
from feddg_bench.core.server import NoReplyError, Server
from feddg_methods.fedavg import FedAvg
from feddg_methods.fedgma import FedGMA, FedGMASettings, agreement_mask
from feddg_methods.shared.sign_votes import SignVotes
from tests.helpers import bitwise
from tests.tester import MethodTester, Twin

DELTAS = [[1, 1, -1, 0, 2], [2, -1, -1, 0, 0], [3, 1, 1, 0, 0], [4, 1, -3, 0, -2]]
SIZES = [10, 20, 30, 40]
START = [1.0, -2.0, 0.5, 4.0, 0.0]


def reply(i, size, state):
    return Reply(f"client_{i:03}", size, LocalUpdate(state), {}, {})


def aggregate(start, states, sizes, *, method=FedGMA, federation=None, **hyper):
    """Return the new model of the server half, from the clients' models."""
    server = Server(
        start,
        (),
        executor=None,
        seed=0,
        federation=FederationSettings(**(federation or {})),
        uplink=method.uplink,
    )
    trainable = [name for name in start if name.startswith("w")]
    half = SimpleNamespace(trainable=trainable, settings=validate(method.Settings, hyper))
    replies = (reply(i, *pair) for i, pair in enumerate(zip(sizes, states, strict=True)))
    return method.aggregate(half, server, replies)


def update_of(deltas, sizes, start=None, **options):
    """Return what the server adds to the model."""
    start = torch.tensor(START if start is None else start)
    states = [{"w": start + torch.tensor(row, dtype=torch.float32)} for row in deltas]
    return (aggregate({"w": start}, states, sizes, **options)["w"] - start).tolist()


def approx(values):
    return pytest.approx(values, abs=2e-6)


# ------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3, 0.6, -1.2, 0, 0]),
        ({"threshold": 0.6}, [3, 0.3, -0.6, 0, 0]),
        ({"threshold": 0.5}, [3, 0.6, -1.2, 0, 0]),
        ({"threshold": 0.5, "compare": "gt"}, [3, 0.3, -0.6, 0, 0]),
        ({"threshold": 0.6, "below": "zero"}, [3, 0, 0, 0, 0]),
        ({"threshold": 0.0}, [3, 0.6, -1.2, 0, -0.6]),
        ({"threshold": 0.0, "compare": "gt"}, [3, 0.6, -1.2, 0, 0]),
        ({"federation": {"server_lr": 0.5}}, [1.5, 0.3, -0.6, 0, 0]),
        ({"threshold": 0.35, "agreement_weights": "samples"}, [3, 0.6, -1.2, 0, -0.18]),
        # 40 of 100 votes: no rounding decides whether they reach 0.4
        ({"agreement_weights": "samples"}, [3, 0.6, -1.2, 0, -0.18]),
        ({"agreement_weights": "samples", "compare": "gt"}, [3, 0.6, -0.48, 0, -0.18]),
        ({"variant": "reference"}, [6, 0.9, -1.8, 0, 0]),
        # one number for threshold and step
        ({"variant": "reference", "federation": {"server_lr": 0.4}}, [2.4, 0.36, -0.72, 0, 0]),
        ({"variant": "reference", "threshold": 0.6}, [6, 0, 0, 0, 0]),
        ({"variant": "reference", "threshold": 0.0}, [6, 0.9, -1.8, 0, -0.6]),
        ({"mean_weights": "uniform"}, [2.5, 0.5, -1, 0, 0]),
        ({"federation": {"weighting": "uniform"}}, [2.5, 0.5, -1, 0, 0]),
        (
            {"federation": {"weighting": "uniform"}, "mean_weights": "samples"},
            [3, 0.6, -1.2, 0, 0],
        ),
    ],
    ids=str,
)
def test_published_numbers(options, expected):
    assert update_of(DELTAS, SIZES, **options) == approx(expected)


def oracle(deltas, sizes, *, eta, uniform_mean, votes, threshold, below, compare, variant):
    """The step in float64, with agreement as an exact ratio of integers."""
    n = np.array(sizes, dtype=np.float64)
    mean = np.average(deltas, axis=0, weights=None if uniform_mean else n)
    voice = np.array(sizes) if votes == "samples" else np.ones(len(sizes), dtype=int)
    tau = Fraction(threshold).limit_denominator(10**6)
    step = []
    for column, move in zip(np.sign(deltas).astype(int).T, mean, strict=True):
        a = Fraction(abs(int(voice @ column)), int(voice.sum()))
        passes = a >= tau if compare == "ge" else a > tau
        paper = 1 if passes else (a if below == "score" else 0)
        factor = paper if variant == "paper" else (1 + a if passes else 0)
        step.append(eta * float(factor) * move)
    return np.array(step)


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 12),
    eta=st.sampled_from([0.4, 1.0, 1.7]),
    uniform_mean=st.booleans(),
    on_a_ratio=st.booleans(),
    votes=st.sampled_from(["uniform", "samples"]),
    below=st.sampled_from(["score", "zero"]),
    compare=st.sampled_from(["ge", "gt"]),
    variant=st.sampled_from(["paper", "reference"]),
)
def test_the_step_equals_its_definition(
    seed, count, eta, uniform_mean, on_a_ratio, votes, below, compare, variant
):
    rng = np.random.default_rng(seed)
    start = rng.integers(-64, 64, 9) / 64
    deltas = rng.integers(-96, 160, (count, 9)) / 64  # differences are exact in float32
    deltas[rng.uniform(size=deltas.shape) < 0.2] = 0
    sizes = rng.integers(1, 500, count).tolist()
    total = sum(sizes) if votes == "samples" else count
    threshold = int(rng.integers(0, total + 1)) / total if on_a_ratio else round(rng.uniform(), 3)
    hyper = {
        "threshold": threshold,
        "below": below,
        "compare": compare,
        "variant": variant,
    }
    expected = oracle(deltas, sizes, eta=eta, uniform_mean=uniform_mean, votes=votes, **hyper)
    tensors = [torch.tensor(row, dtype=torch.float32) for row in start + deltas]
    states = [{"w.0": t[:4].reshape(2, 2), "w.1": t[4:]} for t in tensors]
    first = torch.tensor(start, dtype=torch.float32)
    new = aggregate(
        {"w.0": first[:4].reshape(2, 2), "w.1": first[4:]},
        states,
        sizes,
        federation={"server_lr": eta, "weighting": "uniform" if uniform_mean else "samples"},
        agreement_weights=votes,
        **hyper,
    )
    found = torch.cat([new["w.0"].flatten(), new["w.1"]]).double().numpy()
    np.testing.assert_allclose(found, start + expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("compare", ["ge", "gt"])
@pytest.mark.parametrize("count", [5, 10, 20, 200])
def test_every_ratio_of_votes_at_the_threshold(count, compare):
    """Signs of n clients agree by k / n; no rounding lets one fall on the wrong side."""
    ups = torch.arange(count + 1)
    deltas = torch.where(torch.arange(count)[:, None] < ups, 1.0, -1.0)
    scores = (2 * ups - count).abs()
    mean = (2 * ups - count) / count
    for k in range(count % 2, count + 1, max(2, 2 * (count // 14))):
        passes = scores >= k if compare == "ge" else scores > k
        update = update_of(
            deltas.tolist(),
            [1] * count,
            start=[0.0] * (count + 1),
            threshold=k / count,
            below="zero",
            compare=compare,
        )
        assert update == approx((mean * passes).tolist())


def test_sums_of_votes_at_the_threshold_are_equal_to_it_for_every_ratio():
    """1 / 49 times 49 is less than 1 in float64, and 29 / 50 times 50 is more than 29."""
    for total in range(1, 60):
        votes = torch.arange(total + 1)
        for k in range(total + 1):
            for compare, passes in (("ge", votes >= k), ("gt", votes > k)):
                mask = agreement_mask(votes, k / total, total=total, below="zero", compare=compare)
                assert torch.equal(mask, passes.float())


def test_votes_are_compared_as_integers():
    """One vote of 2,000,000 decides, which the tolerance for rounded ratios would not see."""
    votes = torch.tensor([799_999, 800_000, 800_001], dtype=torch.int32)
    for compare, expected in (("ge", [0, 1, 1]), ("gt", [0, 0, 1])):
        mask = agreement_mask(votes, 0.4, total=2_000_000, below="zero", compare=compare)
        assert mask.tolist() == expected
    assert agreement_mask(votes, 0.5, total=2_000_000).tolist() == approx([0.4, 0.4, 0.4])


# ------------------------------------------------------------------------------- edges


def drawn(count, width=1000):
    generator = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(width, generator=generator)}
    states = [{"w": torch.randn(width, generator=generator)} for _ in range(count)]
    for state in states:
        state["w"][::7] = start["w"][::7]
    return start, states


@pytest.mark.parametrize(
    "hyper",
    [{}, {"threshold": 1.0, "compare": "gt"}, {"below": "zero"}, {"agreement_weights": "samples"}],
    ids=str,
)
def test_one_client_is_the_new_model_bit_for_bit(hyper):
    start, (state,) = drawn(1)
    delta = state["w"] - start["w"]
    assert not torch.equal(start["w"] + delta, state["w"]), "w + (theta - w) would not do"
    bitwise(aggregate(start, [state], [7], **hyper), state)
    halved = {"server_lr": 0.5}
    bitwise(
        aggregate(start, [state], [7], federation=halved, **hyper),
        aggregate(start, [state], [7], federation=halved, method=FedAvg),
    )


def test_one_client_under_the_reference_counts_twice():
    assert update_of([[1, -2, 0, 0.5, 3]], [7], variant="reference") == [2, -4, 0, 1, 6]


@pytest.mark.parametrize("variant", ["paper", "reference"])
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_without_change_the_model_stays_bit_for_bit(variant, threshold):
    start, _ = drawn(1)
    same = [{"w": start["w"].clone()} for _ in range(3)]
    bitwise(aggregate(start, same, [1, 5, 3], variant=variant, threshold=threshold), start)


def test_nothing_passes_where_signs_cancel():
    """Half of the clients against the other half: agreement 0, however long the mean."""
    start, _ = drawn(1, width=5)
    states = [{"w": start["w"] + step} for step in (3.0, 5.0, -0.1, -0.1)]
    bitwise(aggregate(start, states, [1, 1, 1, 1]), start)


@pytest.mark.parametrize("federation", [{}, {"server_lr": 0.7}, {"weighting": "uniform"}], ids=str)
def test_full_agreement_is_fedavg_bit_for_bit(federation):
    start, states = drawn(5)
    states = [{"w": start["w"] + (s["w"] - start["w"]).abs() + 1e-3} for s in states]
    args = (start, states, [3, 1, 4, 1, 5])
    expected = aggregate(*args, federation=federation, method=FedAvg)
    bitwise(aggregate(*args, federation=federation), expected)


BUFFERS = {
    "w": torch.tensor([1.0]),
    "running_mean": torch.tensor([0.5]),
    "running_var": torch.tensor([1.0]),
    "num_batches_tracked": torch.tensor(3),
}
TRAINED = [
    {
        "w": torch.tensor([w]),
        "running_mean": torch.tensor([mean]),
        "running_var": torch.tensor([0.4]),
        "num_batches_tracked": torch.tensor(batches),
    }
    for w, mean, batches in ((2.0, 0.2, 7), (3.0, 0.4, 9), (0.5, 0.1, 12))
]


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"threshold": 0.0},
        {"threshold": 1.0, "below": "zero"},
        {"variant": "reference"},
        {"variant": "reference", "mean_weights": "uniform"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("federation", "mean"),
    [({}, 0.2), ({"server_lr": 0.5}, 0.2), ({"weighting": "uniform"}, 0.7 / 3)],
    ids=str,
)
def test_buffers_are_averaged_whatever_the_mask(hyper, federation, mean):
    """A shrinking variance under the reference's factors would become negative."""
    new = aggregate(BUFFERS, TRAINED, [10, 30, 60], federation=federation, **hyper)
    assert list(new) == list(BUFFERS)
    assert new["running_mean"].tolist() == approx([mean])
    assert new["running_var"].tolist() == approx([0.4])
    assert int(new["num_batches_tracked"]) == 12
    assert new["num_batches_tracked"].dtype == torch.int64


def test_inputs_are_not_changed():
    start, states = drawn(3)
    copies = [{"w": s["w"].clone()} for s in (start, *states)]
    aggregate(start, states, [1, 2, 3], federation={"server_lr": 0.3})
    for before, after in zip(copies, (start, *states), strict=True):
        bitwise(after, before)


def test_memory_layouts_may_differ():
    start, states = drawn(4, width=2 * 3 * 4 * 4)
    shape, last = (2, 3, 4, 4), torch.channels_last
    plain = aggregate(
        {"w": start["w"].view(shape)}, [{"w": s["w"].view(shape)} for s in states], [1, 2, 3, 4]
    )
    mixed = aggregate(
        {"w": start["w"].view(shape).to(memory_format=last)},
        [
            {"w": s["w"].view(shape).to(memory_format=last) if i % 2 else s["w"].view(shape)}
            for i, s in enumerate(states)
        ],
        [1, 2, 3, 4],
    )
    bitwise(mixed, plain)


def test_a_round_without_replies_is_passed_on():
    def none():
        raise NoReplyError("fit")
        yield

    server = Server({}, (), None, seed=0, federation=FederationSettings(), uplink={})
    half = SimpleNamespace(trainable=[], settings=FedGMASettings())
    with pytest.raises(NoReplyError):
        FedGMA.aggregate(half, server, none())


# ------------------------------------------------------------------------ sums of votes


@pytest.mark.parametrize(
    ("ballots", "dtype"),
    [
        ([1] * 127, torch.int8),
        ([1] * 128, torch.int16),
        ([100, 200, 300], torch.int16),
        ([30_000, 2_767, 1], torch.int32),
        ([2**31 - 2, 1, 5], torch.int64),
    ],
    ids=["127", "128", "600", "32768", "2^31 + 4"],
)
def test_sums_of_votes_do_not_overflow(ballots, dtype):
    votes = SignVotes({"w": torch.zeros(3)}, ["w"])
    for count in ballots:
        votes.add({"w": torch.tensor([0.5, -2.0, 0.0])}, count)
    assert votes.total == sum(ballots)
    assert votes.sums["w"].dtype == dtype
    assert votes.sums["w"].tolist() == [sum(ballots), -sum(ballots), 0]
    assert votes.unanimous("w").tolist() == [True, True, False]


def test_the_least_change_has_a_sign():
    """A difference of two neighbouring numbers, normal, denormal and about 0."""
    start = torch.tensor([1.0, 1e-42, 0.0, -0.0, 3e38])
    up = torch.nextafter(start, torch.full((5,), torch.inf))
    votes = SignVotes({"w": start}, ["w"], changed=True)
    votes.add({"w": up})
    assert votes.sums["w"].tolist() == [1, 1, 1, 1, 1]
    votes.add({"w": torch.tensor([1.0, 1e-42, -0.0, 0.0, 3e38])})
    assert votes.sums["w"].tolist() == [1, 1, 1, 1, 1]
    assert votes.changed["w"].all()


# ------------------------------------------------------------------------------ settings


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", ["paper", "reference"])
def test_on_a_gpu_as_on_the_cpu(variant):
    start, states = drawn(5, width=100_000)
    here = aggregate(start, states, [3, 1, 4, 1, 5], variant=variant)
    there = aggregate(
        {"w": start["w"].cuda()},
        [{"w": s["w"].cuda()} for s in states],
        [3, 1, 4, 1, 5],
        variant=variant,
    )
    assert there["w"].is_cuda
    assert_close(there["w"].cpu(), here["w"], rtol=1e-6, atol=1e-7)


class TestFedGMA(MethodTester):
    """Three clients: agreement is 1 or 1/3 where all have moved."""

    name = "fedgma"
    layer = {"federation": {"per_round": 3}}
    twins = (
        Twin({"threshold": 0.0}),
        Twin({"threshold": 0.0}, {"federation": {"per_round": None, "server_lr": 0.5}}),
        Twin(
            {"threshold": 0, "below": "zero", "agreement_weights": "samples"},
            {"federation": {"weighting": "uniform"}},
        ),
        Twin({}, {"federation": {"per_round": 1}}),
    )
    apart = (
        {"threshold": 0.0},
        {"below": "zero"},
        {"variant": "reference"},
        {"agreement_weights": "samples"},
        {"mean_weights": "uniform"},
        {"threshold": 1.0, "compare": "gt", "below": "zero"},
    )
    wrong = (
        {"threshold": 1.1},
        {"threshold": -0.1},
        {"below": "nothing"},
        {"compare": "eq"},
        {"variant": "official"},
        {"agreement_weights": "steps"},
        {"mean_weights": "equal"},
        {"step": 0.4},
    )
    models = (1, 1)
