"""PARDON: the loss worked out by hand, its presets and ablations, and messages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.core.messages import Task
from feddg_bench.testing import toy_federation
from feddg_methods.pardon import (
    Pardon,
    PardonSettings,
    cluster_centres,
    interpolation_style,
    median_of,
    random_negatives,
)
from feddg_methods.shared.passes import features_of_each
from tests.helpers import PLAIN, Features, as_images, bitwise, pixel
from tests.tester import MethodTester

PIXEL = {"hyper": {"style": "pixel"}}


# ------------------------------------------------------------------------- the loss by hand

Z = torch.tensor([[3.0, 4.0], [4.0, 3.0], [1.0, 0.0], [0.0, 2.0]])
Z_STYLED = torch.tensor([[4.0, 3.0], [3.0, 4.0], [2.0, 0.0], [3.0, 4.0]])
LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.5]])
LABELS = torch.tensor([0, 1, 1, 0])
LOWEST, HIGHEST = [1, 0, 0, 1], [2, 3, 3, 2]


class Scores(nn.Module):
    """Gives any four images the logits of the four originals."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Parameter(torch.zeros(2))

    def forward(self, z):
        return LOGITS + 0 * z + self.classes


def build(**values):
    settings = validate(PardonSettings, {"style": "pixel", **values})
    method = Pardon(settings, backbone=Features(), num_classes=2, train=TrainSettings())
    method.classifier = Scores()
    return method


def total_loss(method, labels=LABELS, seed=0):
    method.generator = torch.Generator().manual_seed(seed)
    batch = torch.stack([as_images(Z), as_images(Z_STYLED)])
    return method.training_step((batch, labels), 0).item()


def seed_that_draws(negatives):
    return next(
        seed
        for seed in range(1000)
        if random_negatives(LABELS, torch.Generator().manual_seed(seed)).tolist() == negatives
    )


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ({"negatives": "set_mean"}, 4.042386),
        ({"negatives": "hardest"}, 4.151669),
        ({"negatives": "set_mean", "triplet_weight": 0.0}, 0.526853 + 0.2 * 16.75),
        ({"negatives": "set_mean", "feature_weight": 0.0}, 0.526853 + 0.75 * 0.220711),
        ({"negatives": "set_mean", "feature_reduction": "samples"}, 4.042386 + 0.2 * 16.75),
        ({"negatives": "set_mean", "feature_weight": 0.1}, 4.042386 - 0.1 * 16.75),
    ],
)
def test_total_loss(values, total):
    assert total_loss(build(**values)) == pytest.approx(total, abs=2e-6)


@pytest.mark.parametrize(("negatives", "total"), [(LOWEST, 4.151669), (HIGHEST, 3.933103)])
def test_total_loss_with_one_negative(negatives, total):
    assert total_loss(build(), seed=seed_that_draws(negatives)) == pytest.approx(total, abs=2e-6)


def test_one_random_negative_is_the_set_mean_on_average():
    method = build()
    losses = [total_loss(method, seed=seed) for seed in range(200)]
    assert sum(losses) / 200 == pytest.approx(4.042386, abs=0.02)


@pytest.mark.parametrize("negatives", ["random_one", "set_mean", "hardest"])
def test_a_batch_of_one_class_has_no_triplets(negatives):
    method = build(negatives=negatives)
    assert total_loss(method, torch.zeros(4, dtype=torch.int64)) == pytest.approx(
        4.126853, abs=2e-6
    )


def test_a_larger_margin():
    """With m = 10 every hinge is active: the term is m plus mean distance gaps."""
    small, large = (total_loss(build(negatives="set_mean", margin=m)) for m in (10.0, 11.0))
    assert large - small == pytest.approx(0.75, abs=1e-5)


def test_the_restyled_half_is_made_from_the_style_that_was_broadcast():
    """One pass with the transfer replaced gives the same loss as two halves made beforehand."""
    method = build(negatives="set_mean", strength=0.25)
    calls = []

    def transfer(_images, style, strength):
        calls.append((style, strength))
        return as_images(Z_STYLED)

    method.style.transfer = transfer
    style = torch.ones(2, 3)
    with method.state.serving(SimpleNamespace(broadcast={"style": style})):
        loss = method.training_step((as_images(Z), LABELS), 0).item()
    assert loss == pytest.approx(4.042386, abs=2e-6)
    assert len(calls) == 1
    assert calls[0][0] is style
    assert calls[0][1] == 0.25


def test_gradients_flow_through_both_halves():
    method = build(negatives="set_mean")
    batch = torch.stack([as_images(Z), as_images(Z_STYLED)]).requires_grad_()
    method.training_step((batch, LABELS), 0).backward()
    own, styled = batch.grad[:, :, 0, 0, :2]
    assert bool(own.isfinite().all())
    assert bool(styled.isfinite().all())
    assert (own.abs().sum(1) > 0).all()
    assert (styled.abs().sum(1) > 0).all()


def test_without_triplets_restyled_images_are_classified_too():
    """v3: the mean of the two cross-entropies, equal here, and the feature penalty."""
    assert total_loss(build(ablation="v3")) == pytest.approx(0.526853 + 0.2 * 16.75, abs=2e-6)


# ---------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("released", ("imagenet_norm", "conv4_1", "mixture", "released", "lower", 0.5)),
        ("artefact", ("imagenet_norm", "conv4_1", "mixture", "artefact", "lower", 0.5)),
        ("paper", ("unit", "relu4_1", "mean", "released", "lower", 1.0)),
        ("fisc", ("unit", "relu4_1", "mean", "released", "lower", 1.0)),
    ],
)
def test_presets(preset, expected):
    s = validate(PardonSettings, {"preset": preset})
    assert (
        s.adain_input,
        s.style_layer,
        s.client_sigma,
        s.server_style,
        s.median,
        s.strength,
    ) == expected
    # shared by all presets
    assert (s.negatives, s.feature_reduction, s.style_augment) == ("random_one", "elements", True)
    assert (s.triplet_weight, s.feature_weight, s.margin, s.ablation) == (0.75, 0.2, 0.3, "v5")


def test_the_default_is_the_released_code():
    assert validate(PardonSettings, {}) == validate(PardonSettings, {"preset": "released"})


def test_one_file_or_several():
    assert validate(PardonSettings, {"style_weights": "a"}).style_weights == ("a",)
    assert validate(PardonSettings, {"style_weights": ["a", "b"]}).style_weights == ("a", "b")
    assert validate(PardonSettings, {"style_weights": None}).style_weights == ()


# -------------------------------------------------------------------- styles, sent once


def tinted():
    """Three clients with less red and two with less blue: their styles form two clusters."""
    federation = toy_federation()
    images = federation.images.copy()
    everything = np.sort(np.concatenate(list(federation.clients.values())))
    parts = np.array_split(everything, 5)
    for number, part in enumerate(parts):
        images[part, ..., 0 if number < 3 else 2] //= 4 + number % 3
    clients = {f"client_{i}": part for i, part in enumerate(parts)}
    return replace(federation, images=images, clients=clients)


@pytest.fixture
def coloured():
    return tinted()


def prepared(start_run, recorder, *layers, **parts):
    """Return a run after round 0, and the styles that its clients sent, [K, 2, C]."""
    run = start_run("pardon", PIXEL, *layers, executor=recorder, **parts)
    run.rounds(0)
    return run, torch.stack([reply.value["style"] for reply in recorder.replies])


def test_every_client_sends_one_style_and_gets_one(start_run, recorder):
    """2 x 3 floats are 24 bytes: up from 4 clients, and down with the first model they receive."""
    run = start_run("pardon", PIXEL, executor=recorder)
    once, *results = run.rounds(3)
    styles = [reply.value["style"] for reply in recorder.replies[:4]]
    assert {(style.shape, style.dtype) for style in styles} == {((2, 3), torch.float32)}
    assert once.ledger.bytes == {"up": 96, "down": 0}
    assert all(task.weights == {} for task in recorder.tasks[:4])

    model = sum(t.numel() for t in run.server.weights.values()) * 4
    met = set()
    for result in results:
        newcomers = set(result.cohort) - met
        met |= newcomers
        assert result.ledger.bytes == {"up": 2 * model, "down": 2 * model + 24 * len(newcomers)}
    assert len(met) > 2


def test_the_broadcast_is_the_interpolation_style(start_run, recorder, coloured):
    run, styles = prepared(start_run, recorder, federation=coloured)
    bitwise(run.server.broadcast["style"], interpolation_style(styles))
    assert list(run.server.broadcast) == ["style"]


@pytest.mark.parametrize(
    ("values", "interpolate"),
    [
        ({"server_style": "artefact"}, partial(interpolation_style, preset="artefact")),
        ({"median": "average"}, lambda styles: median_of(cluster_centres(styles), "average")),
        ({"ablation": "v2"}, lambda styles: styles.mean(0)),
    ],
    ids=["artefact", "average", "v2"],
)
def test_other_readings_of_the_server_style(start_run, recorder, coloured, values, interpolate):
    run, styles = prepared(start_run, recorder, pixel(**values), federation=coloured)
    bitwise(run.server.broadcast["style"], interpolate(styles))
    assert not torch.equal(run.server.broadcast["style"], interpolation_style(styles))


def test_a_style_without_clusters_is_that_of_all_pixels(start_run, recorder):
    """v1, on stored images: channel means, and deviations with 1e-5 under the root."""
    run, styles = prepared(start_run, recorder, pixel(ablation="v1", style_augment=False))
    for style, index in zip(styles, run.federation.clients.values(), strict=True):
        pixels = torch.from_numpy(run.federation.images[index]).double().flatten(0, 2) / 255
        expected = torch.stack([pixels.mean(0), (pixels.var(0, unbiased=False) + 1e-5).sqrt()])
        assert_close(style.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "values", [{"ablation": "v1"}, {"client_sigma": "mean"}, {"style_augment": False}], ids=str
)
def test_other_readings_of_the_client_style(start_run, recorder, values):
    _, styles = prepared(start_run, recorder)
    _, others = prepared(start_run, recorder, pixel(**values))
    assert not torch.equal(styles, others)


def test_shrunken_styles(start_run, recorder):
    _, styles = prepared(start_run, recorder)
    _, shrunken = prepared(start_run, recorder, pixel(perturb_shrink=0.1))
    assert_close(shrunken, 0.9 * styles)
    _, gone = prepared(start_run, recorder, pixel(perturb_shrink=1.0))
    assert_close(gone[:, 0], torch.zeros(4, 3))
    assert_close(gone[:, 1], torch.full((4, 3), 1e-5**0.5))


def test_noisy_styles(start_run, recorder):
    _, styles = prepared(start_run, recorder)
    _, noisy = prepared(start_run, recorder, pixel(perturb_noise=1e-3, perturb_shrink=0.1))
    noise = noisy - 0.9 * styles
    assert len(noise.flatten().unique()) == noise.numel()
    assert 2e-4 < float(noise.std()) < 3e-3
    _, again = prepared(start_run, recorder, pixel(perturb_noise=1e-3, perturb_shrink=0.1))
    bitwise(noisy, again)
    _, louder = prepared(start_run, recorder, pixel(perturb_noise=1e-2, perturb_shrink=0.1))
    assert_close((louder - 0.9 * styles)[:, 0], 10 * noise[:, 0], rtol=1e-3, atol=1e-6)


def test_without_style_nothing_is_sent(start_run, recorder):
    run = start_run("pardon", pixel(ablation="v4"), executor=recorder)
    once, first = run.rounds(1)
    assert once.ledger.bytes == {"up": 0, "down": 0}
    assert first.ledger.bytes["up"] == first.ledger.bytes["down"] > 0
    assert {task.call for task in recorder.tasks} == {"fit"}
    assert dict(run.server.broadcast) == {}


# ------------------------------------------------------------------------------ training


def trained(start_run, federation, *layers):
    run = start_run("pardon", PIXEL, *layers, federation=federation)
    run.rounds(2)
    return run.server.weights


@pytest.fixture
def full(start_run, coloured):
    return trained(start_run, coloured)


def test_ablations_differ_from_each_other(start_run, coloured):
    found = [
        trained(start_run, coloured, pixel(ablation=f"v{i}"))["classifier.weight"]
        for i in range(1, 6)
    ]
    same = [(i, j) for i in range(5) for j in range(i) if torch.equal(found[i], found[j])]
    assert same == []


def test_the_full_method_is_the_default(start_run, coloured, full):
    bitwise(trained(start_run, coloured, pixel(ablation="v5")), full)


def batches(start_run, recorder, *layers):
    """Return a run, the images of a client's batches of round 1, and its reply."""
    run = start_run("pardon", PIXEL, *layers, executor=recorder)
    run.rounds(0)
    seen = []
    step = run.method.training_step

    def keep(batch, index):
        seen.append(batch[0].clone())
        return step(batch, index)

    run.method.training_step = keep
    reply = recorder.worker.run(
        Task("client_0", "fit", 1, run.server.weights, dict(run.server.broadcast))
    )
    return run, seen, reply


def test_transferred_beforehand_or_in_the_batch(start_run, recorder):
    """Without augmentation both are the same, up to rounding to 8 bits."""
    run, seen, reply = batches(start_run, recorder, PLAIN, pixel(transfer="cached"))
    style = run.server.broadcast["style"]
    assert [images.shape[0] for images in seen] == [2, 2]
    for images in seen:
        online = run.method.style.transfer(images[0], style, 0.5)
        assert_close(images[1], online, rtol=0, atol=0.5001 / 255)
        assert float((images[1] - images[0]).abs().max()) > 2 / 255
    kept = reply.memory["transferred"]
    assert (kept.shape, kept.dtype) == ((9, 16, 16, 3), torch.uint8)


def test_transferred_images_are_kept(start_run, recorder):
    run, _, reply = batches(start_run, recorder, pixel(transfer="cached"))
    marked = {"transferred": torch.full_like(reply.memory["transferred"], 7)}
    seen = []

    def step(batch, _index):
        seen.append(batch[0][1])
        return run.method.classifier.weight.sum()

    run.method.training_step = step
    task = Task("client_0", "fit", 2, run.server.weights, dict(run.server.broadcast), marked)
    second = recorder.worker.run(task)
    assert len(seen) == 2
    bitwise(second.memory, marked)


def test_online_keeps_nothing(start_run, recorder):
    _, seen, reply = batches(start_run, recorder)
    assert reply.memory == {}
    assert all(images.dim() == 4 for images in seen)


def test_two_augmentations_take_the_place_of_the_style(start_run, recorder):
    _, seen, _ = batches(start_run, recorder, pixel(ablation="v4"))
    for images in seen:
        assert images.shape[0] == 2
        assert not torch.equal(images[0], images[1])


def test_negatives_are_drawn_from_the_clients_own_stream(start_run, recorder):
    run, _ = prepared(start_run, recorder)

    def weights(client, round):
        task = Task(client, "fit", round, run.server.weights, dict(run.server.broadcast))
        return recorder.worker.run(task).value.weights["classifier.weight"]

    first = weights("client_2", 1)
    weights("client_3", 1)
    bitwise(weights("client_2", 1), first)
    assert not torch.equal(weights("client_2", 2), first)


# ------------------------------------------------------------------- one pass or two passes

RESNET = {"backbone": {"name": "resnet18", "pretrained": False}, "train": {"batch_size": 16}}


def passes(start_run, toy_federation, bn):
    """Return features of both halves, those of two single passes, and the number of passes."""
    run = start_run("pardon", PIXEL, RESNET, {"federation": {"bn": bn}}, federation=toy_federation)
    method = run.method.train()
    images = torch.from_numpy(toy_federation.images[:8]).permute(0, 3, 1, 2) / 255
    styled = images.flip(3)
    counted = []
    method.backbone.register_forward_hook(lambda *_: counted.append(1))
    with torch.no_grad():
        both = features_of_each(method, [images, styled])
        number = len(counted)
        single = method.features(images), method.features(styled)
    return both, single, number


def test_one_pass_where_batch_statistics_are_frozen(start_run, toy_federation):
    both, single, number = passes(start_run, toy_federation, "frozen")
    assert number == 1
    assert_close(both, single, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bn", ["average", "local"])
def test_two_passes_where_batch_statistics_would_mix(start_run, toy_federation, bn):
    both, single, number = passes(start_run, toy_federation, bn)
    assert number == 2
    assert_close(both, single, rtol=1e-5, atol=1e-5)


def test_one_pass_where_there_is_no_batch_normalisation(start_run):
    run = start_run("pardon", PIXEL)
    counted = []
    run.method.backbone.register_forward_hook(lambda *_: counted.append(1))
    with torch.no_grad():
        features_of_each(run.method, [torch.rand(3, 3, 16, 16), torch.rand(3, 3, 16, 16)])
    assert len(counted) == 1


def test_the_style_network_neither_travels_nor_trains(start_run):
    run = start_run("pardon", PIXEL)
    assert not any(name.startswith("style.") for name in run.server.weights)
    assert run.method.frozen == ("style.",)


class TestPardon(MethodTester):
    name = "pardon"
    layer = PIXEL
    federation = staticmethod(tinted)
    rounds = 2
    apart = (
        {"ablation": "v1"},
        {"ablation": "v2"},
        {"ablation": "v3"},
        {"ablation": "v4"},
        {"preset": "paper"},
        {"server_style": "artefact"},
        {"negatives": "set_mean"},
        {"negatives": "hardest"},
        {"transfer": "cached"},
        {"margin": 0.6},
        {"triplet_weight": 0.5},
        {"feature_weight": 0.1},
        {"feature_reduction": "samples"},
        {"strength": 1.0},
    )
