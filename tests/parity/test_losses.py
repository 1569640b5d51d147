"""Losses of PARDON, FedCCRL, FPL and FedSR as functions: NumPy oracles, edge cases, types.

Their published numbers are in the tests of the methods."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.common.errors import SettingsError
from feddg_methods.fedccrl import jensen_shannon, supervised_contrastive
from feddg_methods.fedsr import conditional_mutual_information
from feddg_methods.fpl import prototype_loss_by
from feddg_methods.pardon import feature_penalty, random_negatives, triplet_loss
from tests.helpers import refused

NEGATIVES = ("random_one", "set_mean", "hardest")
seeds = st.integers(0, 2**32 - 1)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def torch_rng(seed=0):
    return torch.Generator().manual_seed(seed)


def gradcheck(function, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(function, leaves)


def unit(row):
    return row / max(np.linalg.norm(row), 1e-12)


# ------------------------------------------------------------------------------- PARDON

Z = tensor((3, 4), (4, 3), (1, 0), (0, 2))
Z_STYLED = tensor((4, 3), (3, 4), (2, 0), (3, 4))
LABELS = torch.tensor([0, 1, 1, 0])
LOGITS = tensor((2, 0), (0, 1), (1, 1), (0, 0.5))


def pairwise_hinges(z, styled, margin):
    """hinges[i, j]: anchor i with the negative j, straight from the definition."""
    a, p = [unit(r) for r in z], [unit(r) for r in styled]
    distance = np.array([[np.linalg.norm(x - y + 1e-7) for y in p] for x in a])
    return np.maximum(0, np.diag(distance)[:, None] - distance + margin)


def triplet_oracle(z, styled, labels, margin, pick):
    hinges = pairwise_hinges(z, styled, margin)
    losses = []
    for i, label in enumerate(labels):
        others = [hinges[i, j] for j in range(len(labels)) if labels[j] != label]
        if others:
            losses.append(pick(others))
    return np.mean(losses) if losses else 0.0


def whole_loss(contrastive, labels=LABELS):
    return F.cross_entropy(LOGITS, labels) + 0.75 * contrastive + 0.2 * feature_penalty(Z, Z_STYLED)


@pytest.mark.parametrize(
    ("position", "each", "expected", "total"),
    [
        (0, [0.582843, 0.582843, 0, 0.3], 0.366421, 4.151669),
        (1, None, 0.075, 3.933103),
    ],
)
def test_triplet_published_numbers_of_single_negatives(position, each, expected, total):
    """One possible draw is the lowest, or the highest, negative of every anchor."""
    sets = [[1, 2], [0, 3], [0, 3], [1, 2]]
    wanted = [s[position] for s in sets]
    seed = next(s for s in range(500) if random_negatives(LABELS, torch_rng(s)).tolist() == wanted)
    loss = triplet_loss(Z, Z_STYLED, LABELS, margin=0.3, generator=torch_rng(seed))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert whole_loss(loss).item() == pytest.approx(total, abs=1e-6)
    if each is not None:
        hinges = pairwise_hinges(Z.numpy(), Z_STYLED.numpy(), 0.3)
        np.testing.assert_allclose(hinges[range(4), wanted], each, atol=1e-6)


@pytest.mark.parametrize(("reduction", "expected"), [("elements", 16.75), ("samples", 33.5)])
def test_feature_penalty_published_numbers(reduction, expected):
    assert feature_penalty(Z, Z_STYLED, reduction).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("negatives", NEGATIVES)
def test_triplet_of_one_class_is_zero_and_stays_in_the_graph(negatives):
    z, styled = Z.clone().requires_grad_(), Z_STYLED.clone().requires_grad_()
    labels = torch.zeros(4, dtype=torch.long)
    loss = triplet_loss(z, styled, labels, margin=0.3, negatives=negatives, generator=torch_rng())
    assert loss.item() == 0
    total = F.cross_entropy(LOGITS, labels) + 0.75 * loss + 0.2 * feature_penalty(z, styled)
    assert total.item() == pytest.approx(4.126853, abs=1e-6)
    loss.backward()
    assert torch.equal(z.grad, torch.zeros_like(z))
    assert torch.equal(styled.grad, torch.zeros_like(z))


@pytest.mark.parametrize("negatives", NEGATIVES)
def test_triplet_of_one_image(negatives):
    z = Z[:1].clone().requires_grad_()
    loss = triplet_loss(
        z, Z_STYLED[:1], LABELS[:1], margin=0.3, negatives=negatives, generator=torch_rng()
    )
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(z.grad, torch.zeros_like(z))


@pytest.mark.parametrize("negatives", NEGATIVES)
def test_triplet_gradient_is_finite_where_nothing_was_restyled_and_at_zero(negatives):
    z = tensor((1, 2), (0, 0), (3, 1)).requires_grad_()
    styled = z.detach().clone().requires_grad_()
    loss = triplet_loss(
        z, styled, torch.tensor([0, 1, 2]), margin=0.3, negatives=negatives, generator=torch_rng()
    )
    loss.backward()
    assert loss.isfinite()
    assert z.grad.isfinite().all()
    assert styled.grad.isfinite().all()


def test_triplet_offset_is_added_to_each_coordinate_of_each_difference():
    """Equal features lie 1e-7 sqrt(D) apart; only then is their gradient defined."""
    z = tensor((1, 0, 0, 0), (0, 1, 0, 0))
    loss = triplet_loss(z, z, torch.tensor([0, 1]), margin=5.0, negatives="set_mean")
    apart = math.sqrt((1 + 1e-7) ** 2 + (-1 + 1e-7) ** 2 + 2e-14)
    assert loss.item() == pytest.approx(5 + 2e-7 - apart, abs=1e-13)


@pytest.mark.parametrize("negatives", ["set_mean", "hardest"])
@given(seed=seeds, size=st.integers(1, 9), classes=st.integers(1, 4))
def test_triplet_equals_its_definition(negatives, seed, size, classes):
    rng = np.random.default_rng(seed)
    z, styled = rng.normal(size=(2, size, 5))
    labels = rng.integers(classes, size=size)
    margin = rng.uniform(0, 1)
    expected = triplet_oracle(
        z, styled, labels, margin, np.mean if negatives == "set_mean" else max
    )
    loss = triplet_loss(
        torch.from_numpy(z),
        torch.from_numpy(styled),
        torch.from_numpy(labels),
        margin=margin,
        negatives=negatives,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(seed=seeds, size=st.integers(1, 9), classes=st.integers(1, 4))
def test_random_negative_loss_is_that_of_the_drawn_negatives(seed, size, classes):
    rng = np.random.default_rng(seed)
    z, styled = rng.normal(size=(2, size, 5))
    labels = rng.integers(classes, size=size)
    drawn = random_negatives(torch.from_numpy(labels), torch_rng(seed)).tolist()
    hinges = pairwise_hinges(z, styled, 0.4)
    used = [i for i in range(size) if (labels != labels[i]).any()]
    assert all(labels[drawn[i]] != labels[i] for i in used)
    loss = triplet_loss(
        torch.from_numpy(z),
        torch.from_numpy(styled),
        torch.from_numpy(labels),
        margin=0.4,
        generator=torch_rng(seed),
    )
    expected = np.mean([hinges[i, drawn[i]] for i in used]) if used else 0
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_random_negatives_are_uniform_and_independent_over_anchors():
    labels = torch.tensor([0, 1, 0, 2, 1])
    rng = torch_rng(7)
    draws = torch.stack([random_negatives(labels, rng) for _ in range(4000)])
    for anchor, label in enumerate(labels):
        allowed = (labels != label).nonzero().flatten()
        counts = torch.stack([(draws[:, anchor] == j).sum() for j in allowed])
        expected = 4000 / len(allowed)
        assert counts.sum() == 4000
        # Five standard deviations of a binomial count.
        assert (counts - expected).abs().max() < 5 * math.sqrt(expected)
    both = ((draws[:, 0] == 1) & (draws[:, 2] == 1)).float().mean()
    assert both.item() == pytest.approx(1 / 9, abs=0.025)


def test_random_negative_of_an_anchor_does_not_depend_on_other_labels():
    """If labels decided how far the stream advances, the batches of a run would be coupled."""
    rngs = torch_rng(3), torch_rng(3)
    random_negatives(torch.tensor([0, 0, 0]), rngs[0])
    random_negatives(torch.tensor([0, 1, 2]), rngs[1])
    assert torch.equal(torch.rand(4, generator=rngs[0]), torch.rand(4, generator=rngs[1]))


def test_set_mean_is_the_expectation_of_random_one():
    z, styled = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch_rng(1))
    labels = torch.tensor([0, 1, 2, 0, 1, 1])
    rng = torch_rng(2)
    draws = [triplet_loss(z, styled, labels, margin=0.5, generator=rng) for _ in range(2000)]
    sample = torch.stack(draws)
    mean = triplet_loss(z, styled, labels, margin=0.5, negatives="set_mean")
    assert abs(sample.mean() - mean) < 5 * sample.std() / math.sqrt(2000)
    assert sample.std() > 0.01


@given(seed=seeds)
def test_triplet_invariants(seed):
    rng = torch_rng(seed)
    z, styled = torch.randn(2, 7, 4, dtype=torch.float64, generator=rng)
    labels = torch.randint(3, (7,), generator=rng)
    scale = 0.1 + torch.rand(7, 1, dtype=torch.float64, generator=rng)
    order = torch.randperm(7, generator=rng)

    def loss(z, styled, labels, negatives):
        return triplet_loss(z, styled, labels, margin=0.3, negatives=negatives).item()

    mean, hardest = loss(z, styled, labels, "set_mean"), loss(z, styled, labels, "hardest")
    one = triplet_loss(z, styled, labels, margin=0.3, generator=rng).item()
    assert 0 <= mean <= hardest + 1e-12
    assert 0 <= one <= hardest + 1e-12
    assert hardest <= 2.3 + 1e-6
    for negatives, value in (("set_mean", mean), ("hardest", hardest)):
        assert loss(scale * z, styled, labels, negatives) == pytest.approx(value, abs=1e-9)
        reordered = loss(z[order], styled[order], labels[order], negatives)
        assert reordered == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("negatives", NEGATIVES)
def test_triplet_gradients_flow_through_anchor_positive_and_negative(negatives):
    z, styled = torch.randn(2, 6, 5, dtype=torch.float64, generator=torch_rng(4))
    labels = torch.tensor([0, 1, 2, 0, 1, 1])

    def loss(z, styled):
        return triplet_loss(
            z, styled, labels, margin=1.0, negatives=negatives, generator=torch_rng(5)
        )

    gradcheck(loss, z, styled)
    gradcheck(feature_penalty, z, styled)


def test_negative_branch_is_not_detached():
    """Row 1 serves only as the negative of row 0 once row 1's own hinge is slack."""
    z = tensor((1, 0), (0, 1))
    styled = tensor((1, 0.1), (0.9, 0.5)).requires_grad_()
    labels = torch.tensor([0, 1])
    triplet_loss(z, styled, labels, margin=0.8, negatives="set_mean").backward()
    whole = styled.grad.clone()
    frozen = styled.detach().clone().requires_grad_()
    near = F.pairwise_distance(F.normalize(z), F.normalize(frozen), eps=1e-7)
    (near.sum() / 2).backward()
    assert not torch.allclose(whole, frozen.grad)


def test_random_negative_needs_a_generator():
    with refused(SettingsError, "pass generator=", "or choose 'set_mean'"):
        triplet_loss(Z, Z_STYLED, LABELS, margin=0.3)


def test_unknown_negatives_are_refused_with_the_nearest_name():
    with refused(SettingsError, "did you mean 'hardest'"):
        triplet_loss(Z, Z_STYLED, LABELS, margin=0.3, negatives="hardes")


def test_unknown_penalty_reduction_is_refused():
    with refused(SettingsError, "did you mean 'elements'"):
        feature_penalty(Z, Z_STYLED, "element")


# ------------------------------------------------------------------------------ FedCCRL

VIEWS = tensor((1, 0), (0, 1), (0.6, 0.8), (0.8, 0.6), (0, 2), (1, 0))
VIEW_LABELS = torch.tensor([0, 1, 0, 0, 1, 0])


def contrastive_oracle(z, labels, temperature, count_self):
    rows = [unit(r) for r in z]
    losses = []
    for i in range(len(rows)):
        s = np.array([rows[i] @ r for r in rows]) / temperature
        norm = np.log(sum(np.exp(s[a]) for a in range(len(rows)) if a != i))
        positives = [
            p for p in range(len(rows)) if labels[p] == labels[i] and (count_self or p != i)
        ]
        losses.append(-np.mean([s[p] - norm for p in positives]) if positives else 0.0)
    return np.array(losses)


@given(
    seed=seeds,
    size=st.integers(2, 10),
    classes=st.integers(1, 4),
    count_self=st.booleans(),
    temperature=st.sampled_from([0.05, 0.1, 1.0]),
)
def test_contrastive_equals_its_definition(seed, size, classes, count_self, temperature):
    rng = np.random.default_rng(seed)
    z, labels = rng.normal(size=(size, 4)), rng.integers(classes, size=size)
    each = contrastive_oracle(z, labels, temperature, count_self)
    for reduction, expected in (("mean", each.mean()), ("sum", each.sum())):
        loss = supervised_contrastive(
            torch.from_numpy(z),
            torch.from_numpy(labels),
            temperature=temperature,
            reduction=reduction,
            count_self=count_self,
        )
        assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-10)


@given(seed=seeds)
def test_contrastive_invariants(seed):
    rng = torch_rng(seed)
    z = torch.randn(8, 3, dtype=torch.float64, generator=rng)
    labels = torch.randint(3, (4,), generator=rng)
    both = labels.repeat(2)
    order = torch.randperm(8, generator=rng)
    loss = supervised_contrastive(z, both, temperature=0.1)
    assert loss.item() >= 0
    same = [
        supervised_contrastive(z, labels, temperature=0.1),
        supervised_contrastive(z[order], both[order], temperature=0.1),
        supervised_contrastive(
            z * (0.1 + torch.rand(8, 1, dtype=torch.float64, generator=rng)), both, temperature=0.1
        ),
    ]
    for other in same:
        assert other.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("count_self", [False, True])
def test_contrastive_of_one_image_in_two_views_is_the_log_of_one_candidate(count_self):
    z = tensor((1, 0), (0.6, 0.8)).requires_grad_()
    loss = supervised_contrastive(z, torch.tensor([3]), temperature=0.5, count_self=count_self)
    # Without itself the only candidate is the positive; with itself s_ii - s_ip = (1 - 0.6) / 0.5.
    assert loss.item() == pytest.approx(-0.4 if count_self else 0.0, abs=1e-12)
    loss.backward()
    assert z.grad.isfinite().all()


def test_contrastive_anchor_without_positive_counts_as_zero():
    z = tensor((1, 0), (0, 1), (0.6, 0.8)).requires_grad_()
    loss = supervised_contrastive(z, torch.tensor([0, 0, 1]), temperature=0.5, reduction="sum")
    expected = contrastive_oracle(z.detach().numpy(), [0, 0, 1], 0.5, False)
    assert expected[2] == 0
    assert loss.item() == pytest.approx(expected.sum(), rel=1e-9)
    alone = supervised_contrastive(z[:1], torch.tensor([0]), temperature=0.5)
    assert alone.item() == 0
    (loss + alone).backward()
    assert z.grad.isfinite().all()


def test_contrastive_zero_feature_has_finite_loss_and_gradient():
    z = tensor((0, 0), (0, 1), (0.6, 0.8), (0, 0)).requires_grad_()
    loss = supervised_contrastive(z, torch.tensor([0, 1]), temperature=0.1)
    loss.backward()
    assert loss.isfinite()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("count_self", [False, True])
def test_contrastive_gradient(count_self):
    z = torch.randn(6, 4, dtype=torch.float64, generator=torch_rng(6))

    def loss(z):
        return supervised_contrastive(z, VIEW_LABELS, temperature=0.3, count_self=count_self)

    gradcheck(loss, z)


def test_unknown_contrastive_reduction_is_refused():
    with refused(SettingsError, "unknown reduction 'total'"):
        supervised_contrastive(VIEWS, VIEW_LABELS, temperature=1.0, reduction="total")


PREDICTIONS = [tensor((0.7, 0.2, 0.1)), tensor((0.5, 0.4, 0.1)), tensor((0.6, 0.1, 0.3))]


def divergences(predictions):
    """KL of each prediction from the mean, [V, B]."""
    mean = np.clip(np.mean(predictions, axis=0), 1e-7, 1)
    return np.array(
        [
            [
                sum(q * math.log(q / m) for q, m in zip(row, centre, strict=True) if q > 0)
                for row, centre in zip(p, mean, strict=True)
            ]
            for p in predictions
        ]
    )


@given(seed=seeds, views=st.integers(1, 4), sharp=st.sampled_from([1.0, 30.0, 2000.0]))
def test_jensen_shannon_equals_its_definition(seed, views, sharp):
    logits = sharp * torch.randn(views, 5, 3, dtype=torch.float64, generator=torch_rng(seed))
    predictions = list(logits.softmax(dim=-1))
    loss = jensen_shannon(predictions).item()
    expected = divergences([p.numpy() for p in predictions]).mean()
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert -1e-6 <= loss <= math.log(views) + 1e-6
    assert jensen_shannon(predictions[::-1]).item() == pytest.approx(loss, rel=1e-9, abs=1e-12)


def test_jensen_shannon_of_equal_predictions_is_zero():
    assert jensen_shannon([PREDICTIONS[0]] * 3).item() == pytest.approx(0, abs=1e-15)


def test_jensen_shannon_of_disjoint_certainties_is_log_two():
    assert jensen_shannon([tensor((1, 0)), tensor((0, 1))]).item() == pytest.approx(math.log(2))


def test_jensen_shannon_gradient_is_finite_for_underflowed_probabilities():
    logits = torch.tensor([[[0.0, 200.0]], [[200.0, 0.0]]], requires_grad=True)
    probabilities = logits.softmax(dim=-1)
    assert (probabilities == 0).any()
    jensen_shannon(list(probabilities)).backward()
    assert logits.grad.isfinite().all()


def test_jensen_shannon_gradient_flows_through_the_mean():
    logits = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch_rng(8))
    gradcheck(lambda x: jensen_shannon(list(x.softmax(dim=-1))), logits)


# ---------------------------------------------------------------------------------- FPL

PROTOTYPES = {0: tensor((0.98, 0.14), (0.14, 0.98)), 1: tensor((-2, 0))}
POINT = tensor((0.6, 0.8))


def prototype_oracle(z, labels, prototypes, temperature, bugs=False):
    """Contrastive term and mean square of every example, None without prototypes."""
    rows = []
    for x, label in zip(z, labels, strict=True):
        if label not in prototypes:
            rows.append(None)
            continue
        weight = {
            c: [math.exp(unit(x) @ unit(p) / temperature) for p in ps]
            for c, ps in prototypes.items()
        }
        own = sum(weight[label])
        other = sum(w[0] if bugs else sum(w) for c, w in weight.items() if c != label)
        contrast = -math.log(own / (own + other))
        if bugs and next(iter(prototypes)) == label:
            contrast = 0.0
        rows.append((contrast, np.mean((x - np.mean(prototypes[label], axis=0)) ** 2)))
    return rows


def prototype_loss(z, labels, prototypes, *, temperature, divide_by="matched", pardon_bugs=False):
    return prototype_loss_by(z, labels, prototypes, temperature, divide_by, pardon_bugs=pardon_bugs)


@given(
    seed=seeds,
    known=st.integers(1, 4),
    pardon_bugs=st.booleans(),
    divide_by=st.sampled_from(["matched", "batch"]),
    temperature=st.sampled_from([0.02, 0.5]),
)
def test_prototype_equals_its_definition(seed, known, pardon_bugs, divide_by, temperature):
    rng = np.random.default_rng(seed)
    z, labels = rng.normal(size=(6, 3)), rng.integers(5, size=6)
    classes = rng.choice(5, size=known, replace=False).tolist()
    prototypes = {c: rng.normal(size=(rng.integers(1, 4), 3)) for c in classes}
    rows = prototype_oracle(z, labels, prototypes, temperature, bugs=pardon_bugs)
    matched = [sum(r) for r in rows if r is not None]
    count = max(1, len(matched)) if divide_by == "matched" else 6
    loss = prototype_loss(
        torch.from_numpy(z),
        torch.from_numpy(labels),
        {c: torch.from_numpy(p) for c, p in prototypes.items()},
        temperature=temperature,
        divide_by=divide_by,
        pardon_bugs=pardon_bugs,
    )
    assert loss.item() == pytest.approx(sum(matched) / count, rel=1e-6, abs=1e-9)
    assert loss.item() >= 0


@given(seed=seeds)
def test_prototype_loss_does_not_depend_on_the_order_of_classes(seed):
    rng = torch_rng(seed)
    z = torch.randn(5, 3, dtype=torch.float64, generator=rng)
    labels = torch.randint(4, (5,), generator=rng)
    prototypes = {c: torch.randn(2, 3, dtype=torch.float64, generator=rng) for c in range(3)}
    backwards = dict(reversed(prototypes.items()))
    loss = prototype_loss(z, labels, prototypes, temperature=0.1)
    again = prototype_loss(z, labels, backwards, temperature=0.1)
    assert again.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("prototypes", [{}, {4: tensor((1, 0))}])
@pytest.mark.parametrize("divide_by", ["matched", "batch"])
def test_prototype_loss_is_zero_without_a_match(prototypes, divide_by):
    z = tensor((1, 0), (0, 1)).requires_grad_()
    loss = prototype_loss(
        z, torch.tensor([0, 1]), prototypes, temperature=0.02, divide_by=divide_by
    )
    assert loss.item() == 0
    loss.backward()
    assert torch.equal(z.grad, torch.zeros_like(z))


@pytest.mark.parametrize("pardon_bugs", [False, True])
def test_prototype_loss_of_the_only_known_class_has_no_contrast(pardon_bugs):
    z = POINT.clone().requires_grad_()
    only = {0: PROTOTYPES[0]}
    loss = prototype_loss(z, torch.tensor([0]), only, temperature=0.02, pardon_bugs=pardon_bugs)
    assert loss.item() == pytest.approx(0.0296, abs=1e-12)
    loss.backward()
    torch.testing.assert_close(z.grad, (z.detach() - PROTOTYPES[0].mean(dim=0)), rtol=0, atol=1e-9)


def test_prototype_zero_vectors_have_finite_loss_and_gradient():
    z = tensor((0, 0), (1, 1)).requires_grad_()
    prototypes = {0: tensor((0, 0)), 1: tensor((1, 0), (0, 0))}
    loss = prototype_loss(z, torch.tensor([0, 1]), prototypes, temperature=0.02)
    loss.backward()
    assert loss.isfinite()
    assert z.grad.isfinite().all()


def test_prototypes_are_constants():
    prototypes = {c: p.clone().requires_grad_() for c, p in PROTOTYPES.items()}
    z = POINT.clone().requires_grad_()
    prototype_loss(z, torch.tensor([0]), prototypes, temperature=0.5).backward()
    assert all(p.grad is None for p in prototypes.values())
    assert z.grad.abs().sum() > 0


@pytest.mark.parametrize("pardon_bugs", [False, True])
def test_prototype_gradient(pardon_bugs):
    z = torch.randn(4, 3, dtype=torch.float64, generator=torch_rng(9))
    prototypes = {
        c: torch.randn(2, 3, dtype=torch.float64, generator=torch_rng(c)) for c in range(3)
    }
    labels = torch.tensor([0, 1, 2, 7])

    def loss(z):
        return prototype_loss(z, labels, prototypes, temperature=0.2, pardon_bugs=pardon_bugs)

    gradcheck(loss, z)


@pytest.mark.parametrize("options", [{"divide_by": "match"}])
def test_unknown_prototype_options_are_refused(options):
    with refused(SettingsError, "did you mean"):
        prototype_loss(POINT, torch.tensor([0]), PROTOTYPES, temperature=0.5, **options)


# -------------------------------------------------------------------------------- FedSR

MEAN, STD = tensor((1, 0), (0.5, -0.5)), tensor((1, 0.5), (2, 1))
CLASSES = torch.tensor([0, 1])
OFFICIAL_STD = F.softplus(torch.ones(2, 2, dtype=torch.float64))


@given(seed=seeds, scale=st.floats(0.1, 5))
def test_conditional_information_is_the_gaussian_divergence(seed, scale):
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=(5, 3)), rng.uniform(0.1, 3, size=(5, 3))
    r_mean, r_std = rng.normal(size=(4, 3)), rng.uniform(0.1, 3, size=(4, 3))
    labels = rng.integers(4, size=5)
    expected = 0.0
    for i, c in enumerate(labels):
        for d in range(3):
            m, s = scale * mean[i, d], scale * std[i, d]
            expected += math.log(r_std[c, d]) - math.log(s) - 0.5
            expected += (s**2 + (m - r_mean[c, d]) ** 2) / (2 * r_std[c, d] ** 2)
    arguments = [torch.from_numpy(x) for x in (mean, std, r_mean, r_std, labels)]
    loss = conditional_mutual_information(*arguments, scale=scale).item()
    assert loss == pytest.approx(expected / 5, rel=1e-6)
    assert loss >= 0
    normal = torch.distributions.Normal
    library = torch.distributions.kl_divergence(
        normal(scale * arguments[0], scale * arguments[1]),
        normal(arguments[2][labels], arguments[3][labels]),
    )
    assert loss == pytest.approx(library.sum(dim=1).mean().item(), rel=1e-9)


def test_conditional_information_of_the_reference_itself_is_zero():
    loss = conditional_mutual_information(MEAN, STD, MEAN, STD, CLASSES)
    assert loss.item() == pytest.approx(0, abs=1e-15)


def test_conditional_information_survives_underflowed_deviations():
    inputs = [MEAN.clone(), torch.zeros(2, 2, dtype=torch.float64), MEAN.clone(), STD.clone()]
    leaves = [x.requires_grad_() for x in inputs]
    loss = conditional_mutual_information(*leaves, CLASSES)
    assert loss.item() == pytest.approx((STD / 1e-6).log().sum(dim=1).mean().item() - 1, rel=1e-9)
    loss.backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_conditional_information_leaves_unseen_classes_alone():
    reference = [torch.zeros(3, 2).requires_grad_(), torch.ones(3, 2).requires_grad_()]
    conditional_mutual_information(MEAN, STD, *reference, CLASSES).backward()
    for parameter in reference:
        assert parameter.grad[:2].abs().sum() > 0
        assert torch.equal(parameter.grad[2], torch.zeros(2))


def test_conditional_information_trains_features_reference_and_scale():
    scale = torch.tensor(1.3, dtype=torch.float64)

    def loss(mean, std, reference_mean, reference_std, scale):
        return conditional_mutual_information(
            mean, std, reference_mean, reference_std, CLASSES, scale=scale
        )

    gradcheck(loss, MEAN, STD, MEAN + 0.3, OFFICIAL_STD, scale)


# -------------------------------------------------------------------------------- types

LOSSES = {
    "triplet": lambda z: triplet_loss(
        z, z.roll(1, 0), VIEW_LABELS, margin=0.5, negatives="set_mean"
    ),
    "triplet of one": lambda z: triplet_loss(
        z, z.roll(1, 0), VIEW_LABELS, margin=0.5, generator=torch_rng()
    ),
    "penalty": lambda z: feature_penalty(z, z.roll(1, 0)),
    "contrastive": lambda z: supervised_contrastive(z, VIEW_LABELS, temperature=0.1),
    "divergence": lambda z: jensen_shannon([z.abs(), z.abs().roll(1, 0)]),
    "prototypes": lambda z: prototype_loss(
        z, VIEW_LABELS, {0: z[:2].detach(), 1: z[3:].detach()}, temperature=0.02
    ),
    "no prototypes": lambda z: prototype_loss(z, VIEW_LABELS, {}, temperature=0.02),
    "information": lambda z: conditional_mutual_information(
        z, z.abs(), z[:2], z[2:4].abs(), VIEW_LABELS
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_and_autocast_has_no_effect(loss, dtype):
    half = torch.randn(6, 8, generator=torch_rng(11)).to(dtype)
    full = loss(half.float())
    with torch.autocast("cpu", dtype=dtype):
        values = [loss(half), loss(half.float())]
    for value in values:
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, full, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_losses_keep_the_type_and_single_precision_is_close_to_double(loss):
    z = torch.randn(6, 8, dtype=torch.float64, generator=torch_rng(12))
    double, single = loss(z), loss(z.float())
    assert double.dtype == torch.float64
    assert single.dtype == torch.float32
    assert double.shape == single.shape == ()
    assert single.item() == pytest.approx(double.item(), rel=2e-5, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_losses_on_a_gpu_equal_those_on_the_cpu(loss, monkeypatch):
    z = torch.randn(6, 8, generator=torch_rng(13))
    expected = loss(z)
    monkeypatch.setitem(globals(), "VIEW_LABELS", VIEW_LABELS.cuda())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        value = loss(z.cuda())
    assert value.is_cuda
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.cpu(), expected, rtol=1e-5, atol=1e-6)
