"""FedGMA: the masked step worked out by hand and by an oracle, its variants, and ties."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from feddg_methods.fedgma import agreement_mask, masked_update
from feddg_methods.shared.sign_votes import SignVotes
from tests.rules import RuleTester, step
from tests.tester import MethodTester, Twin

DELTAS = [[1, 1, -1, 0, 2], [2, -1, -1, 0, 0], [3, 1, 1, 0, 0], [4, 1, -3, 0, -2]]
SIZES = [10, 20, 30, 40]
REFERENCE = {"variant": "reference"}
BY_IMAGES = {"agreement_weights": "samples"}


def approx(values):
    return pytest.approx(values, abs=2e-6)


class TestRule(RuleTester):
    name = "fedgma"
    rows = tuple(
        (DELTAS, {"sizes": SIZES, **options}, expected)
        for options, expected in (
            ({}, [3, 0.6, -1.2, 0, 0]),
            ({"threshold": 0.4}, [3, 0.6, -1.2, 0, 0]),
            ({"threshold": 0.6}, [3, 0.3, -0.6, 0, 0]),
            ({"threshold": 0.5}, [3, 0.6, -1.2, 0, 0]),
            ({"threshold": 0.5, "compare": "gt"}, [3, 0.3, -0.6, 0, 0]),
            ({"threshold": 0.6, "below": "zero"}, [3, 0, 0, 0, 0]),
            ({"threshold": 0.0}, [3, 0.6, -1.2, 0, -0.6]),
            ({"threshold": 0.0, "compare": "gt"}, [3, 0.6, -1.2, 0, 0]),
            ({"federation": {"server_lr": 0.5}}, [1.5, 0.3, -0.6, 0, 0]),
            ({"threshold": 0.35, **BY_IMAGES}, [3, 0.6, -1.2, 0, -0.18]),
            # 40 of 100 votes reach 0.4 exactly, without rounding
            (BY_IMAGES, [3, 0.6, -1.2, 0, -0.18]),
            ({**BY_IMAGES, "compare": "gt"}, [3, 0.6, -0.48, 0, -0.18]),
            (REFERENCE, [6, 0.9, -1.8, 0, 0]),
            # one number for threshold and step
            ({**REFERENCE, "federation": {"server_lr": 0.4}}, [2.4, 0.36, -0.72, 0, 0]),
            ({**REFERENCE, "threshold": 0.6}, [6, 0, 0, 0, 0]),
            ({**REFERENCE, "threshold": 0.6, "below": "score"}, [6, 0, 0, 0, 0]),
            ({**REFERENCE, "threshold": 0.0}, [6, 0.9, -1.8, 0, -0.6]),
            ({"mean_weights": "uniform"}, [2.5, 0.5, -1, 0, 0]),
            ({"federation": {"weighting": "uniform"}}, [2.5, 0.5, -1, 0, 0]),
            (
                {"federation": {"weighting": "uniform"}, "mean_weights": "samples"},
                [3, 0.6, -1.2, 0, 0],
            ),
        )
    )
    variants = (
        {},
        {"threshold": 0.0},
        {"threshold": 1.0, "below": "zero"},
        REFERENCE,
        {**REFERENCE, "threshold": 0.0},
    )
    lone = ({}, {"threshold": 1.0, "compare": "gt"}, {"below": "zero"}, BY_IMAGES)
    wrong = (
        ({"below": "scor"}, "did you mean"),
        ({"compare": "get"}, "did you mean"),
        ({"variant": "papr"}, "did you mean"),
    )

    @staticmethod
    def draw(rng, count):
        votes = rng.choice(["uniform", "samples"])
        on_a_ratio = int(rng.integers(0, count + 1)) / count
        return {
            "threshold": float(rng.choice([on_a_ratio, round(rng.uniform(), 3)])),
            "below": str(rng.choice(["score", "zero"])),
            "compare": str(rng.choice(["ge", "gt"])),
            "variant": str(rng.choice(["paper", "reference"])),
            "agreement_weights": str(votes),
            "federation": {
                "server_lr": float(rng.choice([0.4, 1.0, 1.7])),
                "weighting": str(rng.choice(["uniform", "samples"])),
            },
        }

    @staticmethod
    def oracle(deltas, sizes, *, threshold, below, compare, variant, **rest):
        """Agreement is an exact ratio of integers."""
        uniform = rest["federation"]["weighting"] == "uniform"
        mean = np.average(deltas, axis=0, weights=None if uniform else sizes)
        by_images = rest["agreement_weights"] == "samples"
        voice = np.array(sizes) if by_images else np.ones(len(sizes), dtype=int)
        tau = Fraction(threshold).limit_denominator(10**6)
        move = []
        for column, part in zip(np.sign(deltas).astype(int).T, mean, strict=True):
            a = Fraction(abs(int(voice @ column)), int(voice.sum()))
            passes = a >= tau if compare == "ge" else a > tau
            paper = 1 if passes else (a if below == "score" else 0)
            factor = paper if variant == "paper" else (1 + a if passes else 0)
            move.append(rest["federation"]["server_lr"] * float(factor) * part)
        return np.array(move)

    @staticmethod
    def function(deltas, sizes, **options):
        if options.keys() & {"federation", "agreement_weights", "mean_weights"}:
            return None
        shares = [size / sum(sizes) for size in sizes]
        return masked_update(deltas, shares, **{"threshold": 0.4, **options})


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_the_step_is_no_longer_than_the_mean_and_never_turns(threshold):
    rng = np.random.default_rng(0)
    deltas, shares = torch.from_numpy(rng.normal(size=(5, 40)) + 0.5), torch.full((5,), 0.2)
    mean = shares.double() @ deltas
    move = masked_update(deltas, shares.double(), threshold=threshold)
    assert (move.abs() <= mean.abs() + 1e-15).all()
    assert (move * mean >= 0).all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 0.2, 0]),
        ({"below": "zero"}, [1, 1, 1, 0, 0]),
        ({"compare": "gt"}, [1, 1, 0.4, 0.2, 0]),
        (REFERENCE, [2, 1.6, 1.4, 0, 0]),
    ],
)
def test_masks_by_hand(options, expected):
    agreement = torch.tensor([1, 0.6, 0.4, 0.2, 0], dtype=torch.float64)
    assert agreement_mask(agreement, 0.4, **options).tolist() == approx(expected)


def test_one_client_under_the_reference_counts_twice():
    assert step("fedgma", [[1, -2, 0, 0.5, 3]], **REFERENCE).tolist() == [2, -4, 0, 1, 6]


def test_nothing_passes_where_signs_cancel():
    """Half of the clients against the other half: agreement is 0, however large the mean."""
    assert not step("fedgma", [[3.0] * 5, [5.0] * 5, [-0.1] * 5, [-0.1] * 5]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agreement_at_the_threshold_is_equal_to_it_for_every_ratio(dtype):
    """Agreement of n clients is k / n; rounding must not decide for 0.4 x 5 or 0.7 x 10."""
    for size in range(1, 31):
        ups = torch.arange(size + 1)
        deltas = torch.where(torch.arange(size)[:, None] < ups, 1.0, -1.0).to(dtype)
        scores = (2 * ups - size).abs()
        shares = torch.full((size,), 1 / size, dtype=dtype)
        for k in set(scores.tolist()):
            for compare, passes in (("ge", scores >= k), ("gt", scores > k)):
                options = {"threshold": k / size, "below": "zero", "compare": compare}
                expected = (shares @ deltas) * passes.to(dtype)
                assert torch.equal(masked_update(deltas, shares, **options), expected)


def test_sums_of_votes_at_the_threshold_are_equal_to_it_for_every_ratio():
    """1 / 49 times 49 is less than 1 in float64, and 28 / 50 times 50 is more than 28."""
    for total in range(1, 60):
        votes = torch.arange(total + 1)
        for k in range(total + 1):
            for compare, passes in (("ge", votes >= k), ("gt", votes > k)):
                mask = agreement_mask(votes, k / total, total=total, below="zero", compare=compare)
                assert torch.equal(mask, passes.float())


def test_votes_are_compared_as_integers():
    """One vote of 2,000,000 decides; the tolerance for rounded ratios would hide it."""
    votes = torch.tensor([799_999, 800_000, 800_001], dtype=torch.int32)
    for compare, expected in (("ge", [0, 1, 1]), ("gt", [0, 0, 1])):
        mask = agreement_mask(votes, 0.4, total=2_000_000, below="zero", compare=compare)
        assert mask.tolist() == expected
    assert agreement_mask(votes, 0.5, total=2_000_000).tolist() == approx([0.4, 0.4, 0.4])


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
    """The difference of two neighbouring floats: normal, denormal and around 0."""
    start = torch.tensor([1.0, 1e-42, 0.0, -0.0, 3e38])
    up = torch.nextafter(start, torch.full((5,), torch.inf))
    votes = SignVotes({"w": start}, ["w"], changed=True)
    votes.add({"w": up})
    assert votes.sums["w"].tolist() == [1, 1, 1, 1, 1]
    votes.add({"w": torch.tensor([1.0, 1e-42, -0.0, 0.0, 3e38])})
    assert votes.sums["w"].tolist() == [1, 1, 1, 1, 1]
    assert votes.changed["w"].all()


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
