"""FedAlign: choice of styles, views in a row and the loss in float64, and FedCCRL as a case."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_methods.fedalign import FedAlign, FedAlignSettings, chances
from tests.helpers import Features, hyper, rng
from tests.tester import MethodTester, Twin
from tests.views import loss_of_views, views_made

# ------------------------------------------------------------------------ choice of styles


def test_chances():
    """A cluster has its share of all styles; in it, a style's chance grows with its variance."""
    noise = np.random.default_rng(0)
    pool = np.concatenate(
        [
            noise.normal(centre, 0.02, (size, 2, 3))
            for centre, size in ((0.1, 4), (0.5, 2), (0.9, 6))
        ]
    )
    found = chances(torch.from_numpy(pool), 3, rng()).numpy()
    var = pool.reshape(12, 6).var(1, ddof=1)
    expected = np.concatenate([len(v) / 12 * v / v.sum() for v in np.split(var, [4, 6])])
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize(("count", "clusters"), [(1, 7), (5, 7), (5, 1)])
def test_equal_styles_have_equal_chances(count, clusters):
    pool = torch.full((count, 2, 3), 0.4)
    assert_close(chances(pool, clusters, rng()), torch.full((count,), 1 / count).double())


def test_a_batch_takes_styles_by_their_chances(start_run):
    method = start_run("fedalign").method
    p = torch.tensor([0.0, 0.75, 0.25, 0.0, 0.0], dtype=torch.float64)
    with method.temporarily(p=p):
        rows = method.chosen(5, 4000, rng())
        few = method.chosen(5, 2, rng())
    assert rows.bincount(minlength=5)[[0, 3, 4]].sum() == 0
    assert (rows == 1).double().mean().item() == pytest.approx(0.75, abs=0.03)
    assert sorted(few.tolist()) == [1, 2]  # without replacement, if there are enough


def test_clients_choose_among_the_styles_they_got(start_run, recorder):
    """Each from its own stream, anew in each round."""
    run = start_run("fedalign", executor=recorder)
    seen = []
    choose = run.method.chosen

    def noted(count, size, generator):
        p = run.method.p
        seen.append((count, p))
        return choose(count, size, generator)

    run.method.chosen = noted
    run.rounds(1)
    pools = [len(task.told["pool"]) for task in recorder.tasks if task.call == "fit"]
    assert {count for count, _ in seen} == set(pools)
    assert all(len(p) == count and p.sum().item() == pytest.approx(1) for count, p in seen)


# --------------------------------------------------------------------------------- views


@pytest.mark.parametrize("chained", [True, False])
def test_the_second_view_is_one_of_the_first(start_run, recorder, chained):
    run = start_run("fedalign", hyper(chained=chained), executor=recorder)
    for (original, first), (source, second) in views_made(run):
        assert source is (first if chained else original)
        assert not torch.equal(first, second)


# ---------------------------------------------------------------------------------- loss


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ({}, (0.1, 0.1, 0.1)),
        ({"lambda1": 0.3, "lambda2": 2.0, "lambda3": 0.7}, (0.3, 2.0, 0.7)),
        ({"ra": False, "js": False}, (0, 0, 0.1)),
        ({"lambda3": 0.0}, (0.1, 0.1, 0)),
    ],
    ids=str,
)
def test_the_loss(values, weights):
    """CE + CE1 + CE2 + lambda 1 SC + lambda 2 JS + lambda 3 RC, and its gradient of Z, Z1, Z2."""
    noise = np.random.default_rng(3)
    z, scores = (torch.from_numpy(noise.normal(size=(3, 5, d))) for d in (2, 4))
    y, z = torch.tensor([0, 1, 0, 2, 1]), z.requires_grad_()
    p = scores.exp() / scores.exp().sum(-1, keepdim=True)
    expected = -p[:, range(5), y].log().mean(1).sum() + 0 * z.sum()
    twice = y.repeat(2)
    for view in (1, 2):
        rows = torch.cat([z[view], z[0]])
        rows = rows / rows.norm(dim=1, keepdim=True)
        e = (rows @ rows.T / 0.1).exp()
        terms = []
        for i in range(10):
            others = [j for j in range(10) if j != i]
            own = [j for j in others if twice[j] == twice[i]]
            terms += [-(e[i, own] / e[i, others].sum()).log().mean()]
        expected = expected + weights[0] * torch.stack(terms).mean() / 2
        expected = expected + weights[2] * (z[view] - z[0]).square().mean() / 2
    expected = expected + weights[1] * (p * (p / p.mean(0)).log()).sum(-1).mean()

    s = validate(FedAlignSettings, values)
    method = FedAlign(s, backbone=Features(), num_classes=4, train=TrainSettings())
    loss = loss_of_views(method, list(z), y, list(scores))
    assert_close(loss, expected)
    assert_close(*(torch.autograd.grad(total, z)[0] for total in (loss, expected)))


def test_without_views_it_is_cross_entropy():
    off = {"ccdt": False, "difp": False, "ra": False, "js": False}
    settings = validate(FedAlignSettings, off)
    method = FedAlign(settings, backbone=Features(), num_classes=4, train=TrainSettings())
    images, labels = torch.rand(3, 3, 4, 4, generator=rng()), torch.tensor([0, 1, 3])
    expected = F.cross_entropy(method(images), labels)
    assert_close(method.training_step((images, labels), 0), expected)


class TestFedAlign(MethodTester):
    name = "fedalign"
    twins = (
        Twin({"ccdt": False, "difp": False, "ra": False, "js": False}),
        Twin(
            {"chained": False, "clusters": 0, "lambda3": 0.0},
            theirs="fedccrl",
            only_theirs=hyper(lambda2=0.1),
        ),
    )
    apart = ({"clusters": 0}, {"clusters": 2}, {"chained": False}, {"lambda3": 0.0})
    wrong = ({"clusters": -1}, {"lambda3": -1}, {"variant": "paper_mean_ce"})
