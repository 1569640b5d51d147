"""FedCCRL: the loss worked out by hand, its variants and switches, and messages."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import FederationSettings, TrainSettings
from feddg_bench.core.messages import LocalUpdate, Reply, Task
from feddg_bench.core.server import Server
from feddg_methods.fedccrl import (
    VARIANTS,
    FedCCRL,
    FedCCRLSettings,
    channel_statistics,
    draw_beta,
)
from feddg_methods.shared.draws import draw_rows
from tests.helpers import PLAIN, Features, bitwise, hyper, rng
from tests.tester import MethodTester, Twin
from tests.views import loss_of_views, views_made

OFF = {"ccdt": False, "difp": False, "ra": False, "js": False}


# ------------------------------------------------------------------------- the loss by hand


def build(classes=2, **values):
    s = validate(FedCCRLSettings, values)
    return FedCCRL(s, backbone=Features(), num_classes=classes, train=TrainSettings())


def loss(views, labels, logits, **values):
    """Return the loss of three given views (features) with given logits."""
    return loss_of_views(build(logits[0].shape[1], **values), views, labels, logits)


Z1 = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
Z = torch.tensor([[0.8, 0.6], [0.0, 2.0], [1.0, 0.0]])
LABELS = torch.tensor([0, 1, 0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": 1.0, "contrast": "sum"}, 8.251961),
        ({"temperature": 1.0}, 1.375327),
        ({"temperature": 1.0, "variant": "released"}, 1.340882),
        ({"contrast": "sum"}, 8.793443),
        ({}, 1.465574),
        ({"variant": "released"}, 1.121129),
    ],
    ids=str,
)
def test_published_representation_alignment(values, expected):
    """Both views are Z1, so RA is one term; the rest of the loss is subtracted."""
    logits = [torch.zeros(3, 2)] * 3
    on, off = (
        loss([Z, Z1, Z1], LABELS, logits, js=False, ra=ra, lambda1=1.0, **values).item()
        for ra in (True, False)
    )
    assert on - off == pytest.approx(expected, abs=2e-6)


def test_representation_alignment_is_the_mean_of_both_views_terms():
    logits = [torch.zeros(3, 2)] * 3
    values = {"js": False, "lambda1": 1.0, "temperature": 1.0}
    both = loss([Z, Z1, Z1.roll(1, 0)], LABELS, logits, **values)
    one, other = (loss([Z, v, v], LABELS, logits, **values) for v in (Z1, Z1.roll(1, 0)))
    assert both.item() == pytest.approx((one + other).item() / 2, abs=1e-6)
    assert one.item() != pytest.approx(other.item(), abs=1e-3)


def test_published_prediction_alignment():
    rows = torch.tensor([[[0.7, 0.2, 0.1]], [[0.5, 0.4, 0.1]], [[0.6, 0.1, 0.3]]])
    z = torch.tensor([[1.0, 0.0]])
    labels = torch.tensor([0])
    on, half, off = (
        loss([z] * 3, labels, rows.log(), ra=False, lambda2=weight).item()
        for weight in (1.0, 0.5, 0.0)
    )
    assert on - off == pytest.approx(0.063651, abs=1e-6)
    assert half - off == pytest.approx(0.063651 / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, 1.8), ({"variant": "paper_mean_ce"}, 0.6), ({"variant": "released"}, 1.8)],
    ids=str,
)
def test_published_cross_entropies(values, expected):
    """0.4, 0.9 and 0.5: logits (d, 0) with log(1 + exp(-d)) equal to each."""
    logits = [torch.tensor([[-math.log(math.exp(c) - 1), 0.0]]) for c in (0.4, 0.9, 0.5)]
    z = torch.tensor([[1.0, 0.0]])
    found = loss([z] * 3, torch.tensor([0]), logits, ra=False, js=False, **values)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def oracle(z, labels, logits, *, temperature, lambda1, lambda2, mean, with_self, anchors):
    """FedCCRL's loss in float64, pair by pair."""
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)  # [3, B, C]
    count = len(labels)
    entropies = [-np.log(p[v, np.arange(count), labels]).mean() for v in range(3)]
    total = sum(entropies) / (3 if mean else 1)
    for view in (1, 2):
        rows = np.concatenate([z[view], z[0]])
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        y = np.tile(labels, 2)
        terms = []
        for i, anchor in enumerate(rows):
            s = rows @ anchor / temperature
            rest = np.log(sum(np.exp(s[a]) for a in range(2 * count) if a != i))
            pulls = [
                s[j] - rest for j in range(2 * count) if y[j] == y[i] and (j != i or with_self)
            ]
            terms.append(-np.mean(pulls))
        total += lambda1 * (sum(terms) if anchors == "sum" else np.mean(terms)) / 2
    centre = p.mean(0)
    total += lambda2 * (p * np.log(p / centre)).sum(-1).mean()
    return total


READINGS = [
    ({}, {"lambda1": 0.1, "lambda2": 1.0}),
    ({"variant": "released"}, {"lambda1": 0.1, "lambda2": 0.1, "with_self": True}),
    ({"variant": "paper_mean_ce"}, {"lambda1": 0.1, "lambda2": 1.0, "mean": True}),
    ({"contrast": "sum", "lambda1": 0.3}, {"lambda1": 0.3, "lambda2": 1.0, "anchors": "sum"}),
    ({"ra": False}, {"lambda1": 0.0, "lambda2": 1.0}),
    ({"js": False}, {"lambda1": 0.1, "lambda2": 0.0}),
]


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 6), reading=st.sampled_from(READINGS))
def test_the_loss_equals_its_definition(seed, size, reading):
    values, expected = reading
    generator = np.random.default_rng(seed)
    z, logits = generator.normal(size=(3, size, 2)), generator.normal(size=(3, size, 4))
    labels = generator.integers(0, 4, size)
    found = loss(
        list(torch.from_numpy(z)),
        torch.from_numpy(labels),
        list(torch.from_numpy(logits)),
        temperature=0.5,
        **values,
    )
    base = {"temperature": 0.5, "mean": False, "with_self": False, "anchors": "mean"}
    wanted = oracle(z, labels, logits, **{**base, **expected})
    assert found.item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_the_loss(variant):
    """For the features and logits of all three views, against finite differences."""
    z = torch.randn(3, 4, 2, dtype=torch.float64, generator=rng(1)).requires_grad_()
    logits = torch.randn(3, 4, 3, dtype=torch.float64, generator=rng(2)).requires_grad_()
    labels = torch.tensor([0, 1, 0, 2])

    def total(z, logits):
        return loss(list(z), labels, list(logits), variant=variant, temperature=0.5)

    assert torch.autograd.gradcheck(total, (z, logits))
    gradients = torch.autograd.grad(total(z, logits), (z, logits))
    assert all(bool((g.abs().amax((1, 2)) > 0).all()) for g in gradients)


def test_a_batch_of_one_image_has_its_own_view_as_positive():
    """The positive is the only candidate: the term is 0, and gradients are finite."""
    views = [torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 1.0]])]
    logits = [torch.zeros(1, 2, requires_grad=True) for _ in range(3)]
    found = loss(views, torch.tensor([1]), logits)
    found.backward()
    assert found.item() == pytest.approx(3 * math.log(2), abs=1e-6)
    assert all(bool(t.grad.isfinite().all()) for t in logits)


def test_half_precision_logits_are_aligned_in_single():
    views = [Z, Z1, Z1]
    logits = list(torch.randn(3, 3, 2, generator=rng(3)))
    exact = loss(views, LABELS, [t.bfloat16().float() for t in logits], ra=False)
    half = loss([v.bfloat16() for v in views], LABELS, [t.bfloat16() for t in logits], ra=False)
    plain = [
        loss(v, LABELS, y, ra=False, js=False)
        for v, y in (
            (views, [t.bfloat16().float() for t in logits]),
            ([v.bfloat16() for v in views], [t.bfloat16() for t in logits]),
        )
    ]
    assert (half - plain[1]).item() == pytest.approx((exact - plain[0]).item(), abs=2e-2)


def test_published_average_of_clients():
    server = Server(
        {"w": torch.zeros(2)},
        (),
        executor=None,
        seed=0,
        federation=FederationSettings(),
        uplink=FedCCRL.uplink,
    )
    states = torch.tensor([[1.0, 2.0], [5.0, -2.0]])
    replies = [
        Reply(f"client_{i}", size, LocalUpdate({"w": w}), {}, {})
        for i, (size, w) in enumerate(zip((30, 10), states, strict=True))
    ]
    mean = FedCCRL.aggregate(SimpleNamespace(trainable=["w"]), server, replies)
    assert_close(mean["w"], torch.tensor([2.0, 1.0]))


# ---------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("default", (1.0, False, True, "ceil", "sum")),
        ("released", (0.1, True, False, "floor", "sum")),
        ("paper_mean_ce", (1.0, False, True, "ceil", "mean")),
    ],
)
def test_variants(variant, expected):
    s = validate(FedCCRLSettings, {"variant": variant})
    found = (s.lambda2, s.count_self, s.clamp, s.upload_rounding, s.classification)
    assert found == expected
    # shared by all variants
    assert (s.lambda1, s.temperature, s.alpha, s.upload_ratio) == (0.1, 0.1, 0.1, 0.1)
    assert (s.contrast, s.chains, s.per_image, s.upload_subset) == ("mean", 3, False, "each_round")
    assert (s.ccdt, s.difp, s.ra, s.js) == (True,) * 4
    assert validate(FedCCRLSettings, s.model_dump(mode="json")) == s


@pytest.mark.parametrize("alignment", [{"ra": True}, {"js": True}, {}], ids=str)
def test_alignment_needs_views(alignment):
    values = {"ccdt": False, "difp": False, **({**OFF, **alignment} if alignment else {})}
    with pytest.raises(SettingsError, match=r"^ra and js align augmented views, .* both off"):
        validate(FedCCRLSettings, values, "hyper.")
    assert validate(FedCCRLSettings, OFF).ra is False


# --------------------------------------------------------------------------------- messages


def asked(recorder, call, round):
    pairs = zip(recorder.tasks, recorder.replies, strict=True)
    return [(t, r) for t, r in pairs if t.call == call and t.round == round]


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ({}, [1, 2, 2, 2]),
        ({"upload_rounding": "floor"}, [0, 1, 1, 1]),
        ({"variant": "released"}, [0, 1, 1, 1]),
        ({"upload_ratio": 0.5}, [5, 6, 6, 6]),
        ({"upload_ratio": 1.0}, [9, 11, 12, 12]),
    ],
    ids=str,
)
def test_every_client_sends_24_bytes_an_image_in_each_round(start_run, recorder, values, counts):
    """Including clients that are not sampled; those that train receive the others' pairs."""
    run = start_run("fedccrl", hyper(**values), executor=recorder)
    once, *results = run.rounds(2)
    assert once.ledger.bytes == {"up": 0, "down": 0}
    names = list(run.server.clients)
    model = sum(t.numel() for t in run.server.weights.values()) * 4
    for result in results:
        pairs = asked(recorder, "statistics", result.round)
        assert [task.client for task, _ in pairs] == names
        assert all(task.weights == {} for task, _ in pairs)
        sent = {r.client: r.value["statistics"] for _, r in pairs}
        assert [tuple(s.shape) for s in sent.values()] == [(c, 2, 3) for c in counts]
        assert len(result.cohort) == 2
        down = [
            24 * sum(c for n, c in zip(names, counts, strict=True) if n != client)
            for client in result.cohort
        ]
        assert result.ledger.bytes == {
            "up": 24 * sum(counts) + 2 * model,
            "down": sum(down) + 2 * model,
        }
        for task, _ in asked(recorder, "fit", result.round):
            others = [sent[name] for name in names if name != task.client]
            bitwise(task.told["pool"], torch.cat(others))


def test_statistics_are_those_of_stored_images(start_run, recorder):
    """Mean and sqrt(unbiased variance + 1e-6) of each channel, in NumPy."""
    run = start_run("fedccrl", hyper(upload_ratio=1.0), executor=recorder)
    run.rounds(1)
    for task, reply in asked(recorder, "statistics", 1):
        pixels = run.federation.images[run.federation.clients[task.client]] / 255.0
        expected = np.stack(
            [pixels.mean((1, 2)), np.sqrt(pixels.var((1, 2), ddof=1) + 1e-6)], axis=1
        )
        found = reply.value["statistics"].double().numpy()
        by_mean = [np.lexsort(s.reshape(len(s), 6).T) for s in (found, expected)]
        np.testing.assert_allclose(found[by_mean[0]], expected[by_mean[1]], rtol=1e-5)


def subsets(start_run, recorder, rounds, **values):
    run = start_run("fedccrl", hyper(upload_ratio=0.4, **values), executor=recorder)
    run.rounds(rounds)
    return [
        torch.stack([r.value["statistics"].flatten(1).sum(1).sort().values for _, r in pairs[2:]])
        for pairs in (asked(recorder, "statistics", n + 1) for n in range(rounds))
    ]


def test_each_round_sends_another_part(start_run, recorder):
    first, second = subsets(start_run, recorder, 2)
    assert not torch.equal(first, second)


def test_the_part_may_stay_the_same(start_run, recorder):
    first, second = subsets(start_run, recorder, 2, upload_subset="fixed")
    bitwise(first, second)


def test_images_are_measured_once(start_run, recorder):
    run = start_run("fedccrl", executor=recorder)
    run.rounds(1)
    kept = recorder.memories["client_0"]["statistics"]
    assert tuple(kept.shape) == (9, 2, 3)
    memory = {"statistics": torch.full_like(kept, 7)}
    reply = recorder.worker.run(Task("client_0", "statistics", 2, {}, {}, memory))
    assert bool((reply.value["statistics"] == 7).all())


# --------------------------------------------------------------------------------- views


def views(start_run, images, pool, seed=0, **values):
    """Return a view of images made by a client that received ``pool``."""
    method = start_run("fedccrl", hyper(**values)).method
    method.generator = rng(seed)
    with method.state.serving(SimpleNamespace(broadcast={"pool": pool})):
        return method.view(images, channel_statistics(images))


def images_and_pool(count, known, seed=0):
    images = torch.rand(count, 3, 8, 8, generator=rng(seed))
    return images, 0.1 + 0.5 * torch.rand(known, 2, 3, generator=rng(seed + 1))


@pytest.mark.parametrize(("count", "known"), [(4, 9), (4, 4), (6, 2)])
def test_transfer_equals_its_definition(start_run, count, known):
    """x^ = (l s + (1 - l) s') (x - m) / s + (l m + (1 - l) m'), in NumPy, without AugMix."""
    images, pool = images_and_pool(count, known)
    found = views(start_run, images, pool, difp=False)
    generator = rng()
    rows = draw_rows(known, count, generator).numpy()
    mix = draw_beta(0.1, count, generator).double().numpy()[:, None]
    x, foreign = images.double().numpy(), pool.double().numpy()[rows]
    mean, std = x.mean((2, 3)), np.sqrt(x.var((2, 3), ddof=1) + 1e-6)
    new_mean = mix * mean + (1 - mix) * foreign[:, 0]
    new_std = mix * std + (1 - mix) * foreign[:, 1]
    standard = (x - mean[..., None, None]) / std[..., None, None]
    expected = standard * new_std[..., None, None] + new_mean[..., None, None]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=2e-6)
    assert len(set(rows.tolist())) == min(count, known) if known >= count else True


def test_with_an_empty_pool_a_batch_takes_on_its_own_statistics(start_run):
    """Each view's channel means lie between those of its image and those of another one."""
    images, pool = images_and_pool(8, 0)
    images *= torch.linspace(0.2, 1, 8)[:, None, None, None]
    found = views(start_run, images, pool, difp=False).mean((2, 3))
    own = images.mean((2, 3))
    t = torch.linspace(0, 1, 401)[:, None, None, None]
    lines = own[:, None] + t * (own[None] - own[:, None])  # (401, image, other, channel)
    nearest = (found[:, None] - lines).abs().amax(3).amin((0, 2))
    assert float(nearest.max()) < 2e-3
    assert float((found - own).abs().max()) > 0.05


def test_a_single_image_with_an_empty_pool_stays(start_run):
    images, pool = images_and_pool(1, 0)
    assert_close(views(start_run, images, pool, difp=False), images, atol=1e-5, rtol=0)


def test_perturbation_alone_takes_8_bits(start_run):
    images, _ = images_and_pool(4, 0)
    found = views(start_run, images, None, ccdt=False) * 255
    assert_close(found, found.round(), atol=1e-3, rtol=0)
    assert not torch.equal(found, (images * 255).round())


def test_without_a_clamp_bright_pixels_turn_dark(start_run, monkeypatch):
    """Without AugMix, the view is AugMix's input."""
    monkeypatch.setattr("feddg_methods.fedccrl.augmix", lambda pixels, *_args, **_options: pixels)
    images, _ = images_and_pool(1, 0)
    images = images + 0.5
    clamped = views(start_run, images, None, ccdt=False)
    wrapped = views(start_run, images, None, ccdt=False, variant="released")
    bright = images > 256 / 255
    assert bool((clamped[bright] == 1).all())
    assert float(wrapped[bright].max()) < 0.51
    assert_close(wrapped[bright], images[bright] - 256 / 255, atol=1.01 / 255, rtol=0)


def test_both_views_of_a_step_are_drawn_independently(start_run, recorder):
    run = start_run("fedccrl", executor=recorder)
    for (original, first), (same, second) in views_made(run):
        assert original is same
        assert original.shape == first.shape == second.shape
        assert not torch.equal(first, second)


def test_views_come_from_the_clients_own_stream(start_run, recorder):
    run = start_run("fedccrl", executor=recorder)
    run.rounds(1)
    task = asked(recorder, "fit", 1)[0][0]
    first, again = (recorder.worker.run(task).value.weights for _ in range(2))
    bitwise(first, again)
    later = recorder.worker.run(replace(task, round=2)).value.weights
    assert any(not torch.equal(first[name], later[name]) for name in first)


# ------------------------------------------------------------------------------ training


def trained(start_run, name="fedccrl", *layers, rounds=1, **parts):
    run = start_run(name, *layers, **parts)
    results = run.rounds(rounds)
    assert all(bool(tensor.isfinite().all()) for tensor in run.server.weights.values())
    return run.server.weights, results


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("weight", "switch"), [("lambda1", "ra"), ("lambda2", "js")])
def test_a_weight_of_zero_switches_off(start_run, weight, switch):
    weightless = trained(start_run, "fedccrl", hyper(**{weight: 0.0}))[0]
    bitwise(trained(start_run, "fedccrl", hyper(**{switch: False}))[0], weightless)


def test_without_transfer_nothing_but_models_travels(start_run, recorder):
    _, results = trained(start_run, "fedccrl", hyper(ccdt=False), executor=recorder)
    assert {task.call for task in recorder.tasks} == {"fit"}
    assert all(r.ledger.bytes["up"] == r.ledger.bytes["down"] for r in results)


def test_one_client_alone(start_run, recorder, toy_federation):
    """Its pool is empty; it trains with the statistics of its own batches."""
    name, index = next(iter(toy_federation.clients.items()))
    alone = replace(toy_federation, clients={name: index})
    layer = {"federation": {"per_round": 1}}
    trained(start_run, "fedccrl", layer, federation=alone, executor=recorder)
    (task, _), *_ = asked(recorder, "fit", 1)
    assert tuple(task.told["pool"].shape) == (0, 2, 3)


def test_a_share_too_small_for_any_image(start_run, recorder):
    values = {"upload_ratio": 0.01, "upload_rounding": "floor"}
    trained(start_run, "fedccrl", hyper(**values), executor=recorder)
    assert {len(r.value["statistics"]) for _, r in asked(recorder, "statistics", 1)} == {0}


def test_black_images(start_run, toy_federation):
    black = replace(toy_federation, images=np.zeros_like(toy_federation.images))
    trained(start_run, "fedccrl", PLAIN, federation=black)


# ------------------------------------------------------------------- one pass or three passes

RESNET = {"backbone": {"name": "resnet18", "pretrained": False}, "train": {"batch_size": 16}}


@pytest.mark.parametrize(("bn", "passes"), [("average", 3), ("local", 3), ("frozen", 1)])
def test_views_share_a_pass_only_where_batch_statistics_are_frozen(
    start_run, toy_federation, bn, passes
):
    layers = (RESNET, {"federation": {"bn": bn}}, hyper(ccdt=False))
    run = start_run("fedccrl", *layers, federation=toy_federation)
    method = run.method.train()
    method.generator = rng()
    sizes = []
    method.backbone.register_forward_hook(lambda _module, args, _out: sizes.append(len(args[0])))
    images = torch.from_numpy(toy_federation.images[:6]).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        method.training_step((images, torch.arange(6) % 3), 0)
    assert sizes == [18 // passes] * passes


class TestFedCCRL(MethodTester):
    name = "fedccrl"
    twins = (Twin(OFF),)
    apart = (
        {"variant": "released"},
        {"variant": "paper_mean_ce"},
        {"ccdt": False},
        {"difp": False},
        {"ra": False},
        {"js": False},
        {"ra": False, "js": False},
        {"upload_ratio": 0.5},
        {"upload_rounding": "floor"},
        {"alpha": 1.0},
        {"clamp": False},
        {"chains": 1},
        {"chains": None},
        {"per_image": True},
        {"classification": "mean"},
        {"contrast": "sum"},
        {"count_self": True},
        {"temperature": 0.5},
        {"lambda1": 0.5},
        {"lambda2": 0.1},
    )
