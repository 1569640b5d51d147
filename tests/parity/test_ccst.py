"""CCST: styles, the draw of other clients' styles, the loss by hand, and messages."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import TrainSettings
from feddg_bench.core.messages import nbytes
from feddg_bench.testing import toy_federation
from feddg_methods.ccst import (
    CCST,
    PRESETS,
    CCSTSettings,
    draw_for_images,
    draw_style,
    pooled,
    without,
)
from feddg_methods.shared.adain import adain
from feddg_methods.shared.style_transfer import PixelBackend
from tests.helpers import PLAIN, Features, bitwise, pixel, refused, rng
from tests.tester import ONE_CLIENT, MethodTester, Twin, alone


def asked(recorder, call, round=None):
    pairs = zip(recorder.tasks, recorder.replies, strict=True)
    return [(t, r) for t, r in pairs if t.call == call and round in (None, t.round)]


# ------------------------------------------------------------------------------------ styles


def build(**values):
    settings = validate(CCSTSettings, {"style": "pixel", **values})
    method = CCST(settings, backbone=Features(), num_classes=2, train=TrainSettings())
    method.classifier = nn.Identity()
    return method


MAPS = torch.tensor([[[1.0, 3.0], [0.0, 0.0]], [[5.0, 7.0], [2.0, 2.0]]])[..., None]


def a_client(images, **values):
    labels = torch.zeros(len(images), dtype=torch.int64)
    return SimpleNamespace(
        data=labels,
        batches=lambda **_options: iter([(images[:1], labels[:1]), (images[1:], labels[1:])]),
        generator=lambda *_names: rng(),
        **values,
    )


def test_published_styles():
    """Two images of two channels and two positions, in two batches."""
    method = build(bank="both")
    method.style.style_maps = lambda images: images
    styles = method.local_styles(a_client(MAPS))
    overall = torch.tensor([[[4.0, 1.0], [2.236070, 1.000005]]])
    assert_close(styles["overall"], overall, atol=1e-6, rtol=0)
    assert styles["single"][:, 0].tolist() == [[2, 0], [6, 2]]
    assert_close(styles["single"][:, 1, 0], torch.full((2,), 2**0.5), atol=4e-6, rtol=0)


def test_noise_does_not_cancel_between_kinds_of_styles():
    """With many channels, a generator's first numbers do not depend on how many follow."""
    maps = torch.randn(2, 512, 2, 1, generator=rng())

    def gap(**values):
        method = build(bank="both", **values)
        method.style.style_maps = lambda images: images
        styles = method.local_styles(a_client(maps))
        return styles["overall"][0, 0] - styles["single"][0, 0]

    noise = gap(perturb_noise=0.5) - gap()
    assert 0.5 < float(noise.std()) < 0.9  # sqrt(2) * 0.5


@pytest.mark.parametrize(
    ("bank", "ratio", "counts"),
    [
        ("overall", 1.0, [0, 0, 0, 0]),
        ("single", 1.0, [9, 11, 12, 12]),
        ("both", 0.5, [5, 6, 6, 6]),
        ("both", 0.01, [1, 1, 1, 1]),
    ],
)
def test_styles_of_stored_images_equal_their_definition(start_run, recorder, bank, ratio, counts):
    """In NumPy: biased and pooled over images, unbiased per image; 1e-5 under both roots."""
    values = {"bank": bank, "upload_ratio": ratio, "style_augment": False}
    run = start_run("ccst", pixel(**values), executor=recorder)
    run.rounds(0)
    for (task, reply), count in zip(asked(recorder, "local_styles"), counts, strict=True):
        pixels = run.federation.images[run.federation.clients[task.client]] / 255.0
        single = np.stack([pixels.mean((1, 2)), np.sqrt(pixels.var((1, 2), ddof=1) + 1e-5)], axis=1)
        sent = {kind: styles.double().numpy() for kind, styles in reply.value.items()}
        assert set(sent) == ({"overall", "single"} if bank == "both" else {bank})
        if count:
            assert sent["single"].shape == (count, 2, 3)
            distance = np.abs(sent["single"][:, None] - single[None]).max((2, 3))
            assert distance.min(1).max() < 1e-6
            assert len(set(distance.argmin(1).tolist())) == count
        if bank == "overall":
            every = np.stack([pixels.mean((0, 1, 2)), np.sqrt(pixels.var((0, 1, 2)) + 1e-5)])
            np.testing.assert_allclose(sent["overall"][0], every, rtol=1e-6)
        if count == 1:  # of the same single image, with the biased variance
            biased = (sent["single"][0, 1] ** 2 - 1e-5) * 255 / 256 + 1e-5
            np.testing.assert_allclose(sent["overall"][0, 0], sent["single"][0, 0], rtol=1e-5)
            np.testing.assert_allclose(sent["overall"][0, 1], np.sqrt(biased), rtol=1e-5)


def test_styles_may_be_those_of_augmented_images(start_run, recorder):
    start_run("ccst", pixel(), executor=recorder).rounds(0)
    start_run("ccst", pixel(style_augment=False), executor=(other := type(recorder)())).rounds(0)
    for first, second in zip(recorder.replies, other.replies, strict=True):
        assert not torch.equal(first.value["overall"], second.value["overall"])


def test_one_style_for_every_image():
    """AdaIN with styles [B, C] equals AdaIN image by image."""
    content = torch.randn(3, 5, 4, 4, generator=rng())
    styles = torch.rand(3, 2, 5, generator=rng(1))
    together = adain(content, styles[:, 0], styles[:, 1], 0.7)
    for i in range(3):
        bitwise(together[i : i + 1], adain(content[i : i + 1], *styles[i], 0.7))
    images = torch.rand(3, 3, 4, 4, generator=rng(2))
    styles = torch.rand(3, 2, 3, generator=rng(3))
    whole = PixelBackend().transfer(images, styles, 1.0)
    for i in range(3):
        bitwise(whole[i : i + 1], PixelBackend().transfer(images[i : i + 1], styles[i], 1.0))


# ------------------------------------------------------------------------- drawing styles


def a_bank(*names, kinds=("overall",), rows=1):
    """Return a bank whose style values encode client, kind and row."""
    return {
        name: {
            kind: torch.full((rows, 2, 3), 100.0 * i + 10 * k) + torch.arange(rows)[:, None, None]
            for k, kind in enumerate(kinds)
        }
        for i, name in enumerate(names)
    }


def test_published_selection_of_all_sources():
    """Three sources, K = 3: every image once unchanged and once in each of the other styles."""
    found = list(draw_for_images(a_bank("a", "b", "c"), "b", 50, 3, rng()))
    whose = torch.stack([styles[:, 0, 0] for styles, _ in found])  # [K, B]
    assert whose.shape == (3, 50)
    assert bool((whose.sort(0).values == torch.tensor([[0.0], [100], [200]])).all())
    own = torch.stack([own for _, own in found])
    assert bool((own == (whose == 100)).all())
    assert len(own.int().argmax(0).unique()) == 3


def test_published_selection_of_one_source():
    """K = 1: a third of the images stays unchanged, within four standard deviations."""
    ((styles, own),) = draw_for_images(a_bank("a", "b", "c"), "b", 9000, 1, rng())
    assert abs(int(own.sum()) - 3000) < 4 * math.sqrt(9000 * 2 / 9)
    counts = (styles[:, 0, 0] / 100).long().bincount()
    assert bool(((counts - 3000).abs() < 180).all())


def test_with_fewer_styles_than_clients_the_original_may_be_absent():
    found = list(draw_for_images(a_bank(*"abcd"), "a", 200, 2, rng()))
    whose = torch.stack([styles[:, 0, 0] for styles, _ in found])
    assert bool((whose[0] != whose[1]).all())
    absent = ~torch.stack([own for _, own in found]).any(0)
    assert 60 < int(absent.sum()) < 140


def test_a_coin_decides_between_kinds_before_the_row_is_drawn():
    styles = a_bank("a", kinds=("overall", "single"), rows=3)["a"]
    drawn = torch.stack([draw_style(styles, generator) for generator in [rng()] * 900])[:, 0, 0]
    counts = torch.tensor([int((drawn == v).sum()) for v in (0, 1, 2, 10, 11, 12)])
    assert int(counts.sum()) == 900
    assert bool(((counts - 150).abs() < 50).all())
    many = {"overall": styles["overall"][:1], "single": styles["single"].repeat(50, 1, 1)}
    drawn = torch.stack([draw_style(many, generator) for generator in [rng(1)] * 900])[:, 0, 0]
    assert abs(int((drawn == 0).sum()) - 450) < 60


def test_the_bank_without_a_client_and_as_pools():
    bank = a_bank("b", "a", "c", kinds=("overall", "single"), rows=2)
    others = without(bank, "b")
    assert list(others) == ["a", "c"]
    pools = pooled(others)
    assert pools["overall"][:, 0, 0].tolist() == [100, 101, 200, 201]
    assert pools["single"][:, 0, 0].tolist() == [110, 111, 210, 211]
    assert pooled({}) == {}


# ------------------------------------------------------------------------- the loss by hand


def logits(cross_entropy):
    """Return an image whose logits have this cross-entropy for class 0."""
    image = torch.zeros(1, 3, 4, 4)
    image[0, 0, 0, 0] = -math.log(math.exp(cross_entropy) - 1)
    return image


def loss(originals, copies, **values):
    """Return the loss of images and of restyled copies with these cross-entropies."""
    method = build(**values)
    made = [torch.cat([logits(c) for c in copy]) for copy in copies]
    method.restyled = lambda _images: made
    images = torch.cat([logits(c) for c in originals])
    labels = torch.zeros(len(images), dtype=torch.int64)
    return method.training_step((images, labels), 0).item()


def test_published_loss():
    assert loss([0.5], [[0.9]]) == pytest.approx(1.4, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "copies", "expected"),
    [
        ({}, [[0.9, 0.7]], 0.4 + 0.8),
        ({}, [[0.9, 0.7], [0.1, 0.3]], 0.4 + 0.5),
        ({"preset": "fedccrl"}, [[0.9, 0.7], [0.1, 0.3]], 0.4 + 0.8 + 0.2),
        ({"preset": "fedccrl"}, [], 0.4),
        ({"preset": "official"}, [[0.9, 0.7]], 0.4),
    ],
    ids=str,
)
def test_losses_of_several_copies(values, copies, expected):
    """The mean over all restyled images, or the sum over passes; ``official`` adds nothing."""
    assert loss([0.5, 0.3], copies, **values) == pytest.approx(expected, abs=1e-6)


def test_copies_made_beforehand():
    method = build(transfer="cached")
    batch = torch.stack([logits(0.5), logits(0.9), logits(0.7)])
    found = method.training_step((batch, torch.tensor([0])), 0).item()
    assert found == pytest.approx(0.5 + 0.8, abs=1e-6)


# ---------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("pardon", ("imagenet_norm", "conv4_1", "overall", "client", 1, 0.5, "online", "once")),
        ("official", ("unit", "relu4_1", "overall", "image", 3, 1.0, "cached", "once")),
        ("fedccrl", ("imagenet_norm", "relu4_1", "both", "pass", 3, 1.0, "online", "round")),
    ],
)
def test_presets(preset, expected):
    s = validate(CCSTSettings, {"preset": preset})
    assert (
        s.adain_input,
        s.style_layer,
        s.bank,
        s.selection,
        s.styles,
        s.strength,
        s.transfer,
        s.refresh,
    ) == expected
    assert s.upload_ratio == (0.5 if preset == "fedccrl" else 1.0)
    assert s.style_augment == (preset == "pardon")
    assert validate(CCSTSettings, s.model_dump(mode="json")) == s


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transfer": "cached", "refresh": "round"}, "transfer=cached needs styles that stay"),
        ({"preset": "fedccrl", "transfer": "cached"}, "transfer=cached needs styles that stay"),
        ({"preset": "official", "transfer": "online"}, "selection=image restyles the stored"),
        ({"preset": "paper"}, r"setting hyper\.preset: 'paper' is not valid"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(values, message):
    with pytest.raises(SettingsError, match=f"^{message}"):
        validate(CCSTSettings, values, "hyper.")


def test_the_vgg_back_ends_need_weights(start_run):
    with refused(SettingsError, "style back end vgg19 has no weights"):
        start_run("ccst")


# --------------------------------------------------------------------------------- messages


class Wide(PixelBackend):
    """Has styles of 512 channels, as AdaIN's VGG-19; the transfer mirrors the images."""

    channels = 512

    def style_maps(self, images):
        return images.mean(1, keepdim=True).expand(-1, 512, -1, -1)

    def transfer(self, images, style, _strength):
        assert style.shape[-2:] == (2, 512)
        return images.flip(3)


def model_bytes(run):
    return sum(t.numel() for t in run.server.weights.values()) * 4


@pytest.mark.parametrize(("styles", "told"), [(1, 1), (2, 2), (3, 3), (10, 3)])
def test_styles_of_4096_bytes_once_up_and_k_down(start_run, recorder, styles, told):
    """Clients that are never sampled also send styles; K is clipped to the three others."""
    run = start_run("ccst", pixel(styles=styles), executor=recorder)
    run.method.style = Wide()
    once, *results = run.rounds(3)
    assert once.ledger.bytes == {"up": 4 * 4096, "down": 0}
    assert [task.client for task, _ in asked(recorder, "local_styles")] == list(run.server.clients)
    assert all(task.weights == {} for task, _ in asked(recorder, "local_styles"))
    for result in results:
        assert len(result.cohort) == 2
        assert result.ledger.bytes == {
            "up": 2 * model_bytes(run),
            "down": 2 * model_bytes(run) + 2 * told * 4096,
        }
    for task, _ in asked(recorder, "fit"):
        assert set(task.told) == {"styles"}
        assert nbytes(task.told) == told * 4096


def test_a_client_is_told_styles_of_others_the_same_in_all_rounds(start_run, recorder):
    run = start_run("ccst", pixel(styles=2), {"federation": {"per_round": None}}, executor=recorder)
    run.rounds(2)
    sent = {t.client: r.value["overall"][0] for t, r in asked(recorder, "local_styles")}
    for task, _ in asked(recorder, "fit", 1):
        owners = [
            [name for name, style in sent.items() if torch.equal(style, told)]
            for told in task.told["styles"]
        ]
        assert len(owners) == 2
        assert owners[0] != owners[1]
        assert all(len(names) == 1 and names != [task.client] for names in owners)
    first, second = (
        {t.client: t.told["styles"] for t, _ in asked(recorder, "fit", n)} for n in (1, 2)
    )
    bitwise(first, second)
    bitwise(first, run.server.memory["styles"])


def test_every_other_client_is_equally_likely(start_run):
    run, drawn = start_run("ccst", pixel()), {}
    bank = {f"client_{i}": {"overall": torch.full((1, 2, 3), float(i))} for i in range(4)}
    replies = [SimpleNamespace(client=name, value=value) for name, value in bank.items()]
    run.server.ask = lambda *_args, **_options: replies
    for seed in range(60):
        run.server.seed = seed
        run.method.prepare(run.server)
        for name, styles in run.server.memory["styles"].items():
            drawn.setdefault(name, []).append(int(styles[0, 0, 0]))
    for i, counts in enumerate(np.bincount(d, minlength=4) for d in drawn.values()):
        assert counts[i] == 0
        assert counts.sum() == 60
        assert sorted(counts)[1] >= 8


def test_official_tells_everybody_the_whole_bank_once(start_run, recorder):
    run = start_run("ccst", pixel(preset="official"), executor=recorder)
    run.method.style = Wide()
    once, *results = run.rounds(3)
    assert once.ledger.bytes == {"up": 4 * 4096, "down": 0}
    met = set()
    for result in results:
        newcomers = set(result.cohort) - met
        met |= newcomers
        down = 2 * model_bytes(run) + len(newcomers) * 4 * 4096
        assert result.ledger.bytes == {"up": 2 * model_bytes(run), "down": down}


def test_fedccrl_rebuilds_its_bank_in_each_round(start_run, recorder):
    """One overall style, and one per image for half of the images: 1 + 5, and three times 1 + 6."""
    run = start_run("ccst", pixel(preset="fedccrl"), executor=recorder)
    run.method.style = Wide()
    once, *results = run.rounds(2)
    assert once.ledger.bytes == {"up": 0, "down": 0}
    bank = (6 + 3 * 7) * 4096
    for result in results:
        assert result.ledger.bytes == {
            "up": 2 * model_bytes(run) + bank,
            "down": 2 * model_bytes(run) + 2 * bank,
        }
    first, second = (
        torch.cat([r.value["single"] for _, r in asked(recorder, "local_styles", n)])
        for n in (1, 2)
    )
    assert not torch.equal(first, second)


# ------------------------------------------------------------------------------ training


def tinted():
    """Return the toy federation with a different tint per client."""
    federation = toy_federation()
    images = federation.images.copy()
    for number, part in enumerate(federation.clients.values()):
        images[part, ..., number % 3] //= 3 + number
    return replace(federation, images=images)


@pytest.fixture
def coloured():
    return tinted()


def trained(start_run, federation, *layers, name="ccst", rounds=1):
    run = start_run(name, *layers, federation=federation)
    run.rounds(rounds)
    assert all(bool(tensor.isfinite().all()) for tensor in run.server.weights.values())
    return run.server.weights


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("bank", ["overall", "single", "both"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_with_every_bank(start_run, coloured, preset, bank):
    trained(start_run, coloured, pixel(preset=preset, bank=bank))


def seen(start_run, recorder, federation, *layers, rounds=1):
    """Return the run and the inputs of its training steps: client, round, images, labels."""
    run = start_run("ccst", *layers, federation=federation, executor=recorder)
    steps = []
    step = run.method.training_step

    def keep(batch, index):
        client = run.method.client
        steps.append((client.name, client.round, batch[0].clone(), batch[1]))
        return step(batch, index)

    run.method.training_step = keep
    run.rounds(rounds)
    return run, steps


def restyled(pixels, style):
    """AdaIN at full strength in colour space, in float64: uint8 [n, H, W, 3] to the same shape."""
    x = pixels / 255.0
    mean, std = x.mean((1, 2), keepdims=True), x.std((1, 2), ddof=1, keepdims=True)
    std = np.sqrt(std**2 + 1e-5)
    return np.clip(style[1] * (x - mean) / std + style[0], 0, 1) * 255


def test_official_keeps_every_image_once_and_in_each_style_of_the_others(
    start_run, recorder, coloured
):
    """K = 4, the number of clients: compared with AdaIN in NumPy, up to rounding to 8 bits."""
    layer = {"federation": {"per_round": None}}
    run, _ = seen(start_run, recorder, coloured, pixel(preset="official", styles=4), layer)
    sent = {
        t.client: r.value["overall"][0].double().numpy() for t, r in asked(recorder, "local_styles")
    }
    for name, index in run.federation.clients.items():
        stored = run.federation.images[index]
        copies = recorder.memories[name]["transferred"]
        assert [(c.shape, c.dtype) for c in copies] == [(stored.shape, torch.uint8)] * 4
        versions = np.stack(
            [stored if other == name else restyled(stored, sent[other]) for other in sent]
        )
        distance = np.abs(torch.stack(copies).numpy()[:, None] - versions[None]).max((3, 4, 5))
        match = distance.argmin(1)  # (copy, image): owner of the style
        assert distance.min(1).max() < 0.502
        assert np.array_equal(np.sort(match, axis=0), np.arange(4)[:, None].repeat(len(index), 1))
        own = list(sent).index(name)
        assert len(np.unique((match == own).argmax(0))) > 1


def test_official_trains_on_the_list_of_all_copies(start_run, recorder, coloured):
    """An epoch has K times the client's images, each copy once, in batches of single images."""
    run, steps = seen(start_run, recorder, coloured, pixel(preset="official"), PLAIN)
    for name in {step[0] for step in steps}:
        images = torch.cat([i for n, _, i, _ in steps if n == name])
        labels = torch.cat([y for n, _, _, y in steps if n == name])
        index = run.federation.clients[name]
        assert images.shape == (3 * len(index), 3, 16, 16)
        expected = torch.cat(recorder.memories[name]["transferred"]).permute(0, 3, 1, 2) / 255
        order, wanted = (i.double().sum((1, 2, 3)).argsort() for i in (images, expected))
        assert_close(images[order], expected[wanted])
        truth = torch.from_numpy(run.federation.labels[index]).repeat(3)
        bitwise(labels[order], truth[wanted])


@pytest.mark.parametrize("styles", [1, 2])
def test_transferred_beforehand_or_in_the_batch(start_run, recorder, coloured, styles):
    """Without augmentation both are the same, up to rounding to 8 bits."""
    values = pixel(transfer="cached", styles=styles)
    run, steps = seen(start_run, recorder, coloured, values, PLAIN)
    for name, _, images, _ in steps:
        assert images.shape[0] == 1 + styles
        for copy, style in zip(images[1:], run.server.memory["styles"][name], strict=True):
            online = run.method.style.transfer(images[0], style, 0.5)
            assert_close(copy, online, rtol=0, atol=0.5001 / 255)
            assert float((copy - images[0]).abs().max()) > 2 / 255


@pytest.mark.parametrize("preset", ["pardon", "official"])
def test_transferred_images_are_kept(start_run, recorder, coloured, preset):
    layers = (pixel(preset=preset, transfer="cached"), {"federation": {"per_round": None}})
    run, _ = seen(start_run, recorder, coloured, *layers)
    first = {name: memory["transferred"] for name, memory in recorder.memories.items()}

    def never(*_args):
        raise AssertionError

    run.method.transfer = never
    run.rounds(2)
    bitwise({name: memory["transferred"] for name, memory in recorder.memories.items()}, first)


def test_online_keeps_nothing(start_run, recorder, coloured):
    _, steps = seen(start_run, recorder, coloured, pixel())
    assert all(images.dim() == 4 for _, _, images, _ in steps)
    assert all(memory == {} for memory in recorder.memories.values())


@pytest.mark.parametrize("rows", [2, 40])
def test_passes_take_any_style_of_the_others(rows):
    """0 to 3 passes; a coin decides the kind; no replacement if there are enough styles."""
    method = build(preset="fedccrl")
    method.transfer = lambda _images, styles: styles[:, 0, 0]
    bank = a_bank("a", "b", "c", kinds=("overall", "single"), rows=rows)
    method.pools = pooled(without(bank, "b"))
    images = torch.zeros(8, 3, 4, 4)
    made = []
    with method.state.serving(SimpleNamespace(name="b", broadcast={"bank": bank})):
        for seed in range(400):
            method.generator = rng(seed)
            made.append(method.restyled(images))
    counts = np.bincount([len(copies) for copies in made], minlength=4)
    assert len(counts) == 4
    assert all(abs(c - 100) < 35 for c in counts)
    copies = [copy for copies in made for copy in copies]
    kinds = [(copy.long() % 100 // 10 if rows < 10 else copy.long() // 50 % 2) for copy in copies]
    if rows == 2:
        assert all(len(kind.unique()) == 1 for kind in kinds)
        assert abs(sum(int(kind[0]) for kind in kinds) / len(kinds) - 0.5) < 0.1
        assert all(len(copy.unique()) <= 4 for copy in copies)
    else:
        assert all(len(copy.unique()) == 8 for copy in copies)
    owners = torch.cat(copies).div(100, rounding_mode="floor").unique().tolist()
    assert owners == [0, 2]


# ------------------------------------------------------------------- one pass or two passes

RESNET = {"backbone": {"name": "resnet18", "pretrained": False}, "train": {"batch_size": 16}}


@pytest.mark.parametrize(("bn", "sizes"), [("average", [6, 12]), ("frozen", [18])])
def test_copies_share_a_pass_only_where_batch_statistics_are_frozen(
    start_run, toy_federation, bn, sizes
):
    layers = (RESNET, {"federation": {"bn": bn}}, pixel(styles=2))
    method = start_run("ccst", *layers, federation=toy_federation).method.train()
    method.generator = rng()
    counted = []
    method.backbone.register_forward_hook(lambda _m, args, _out: counted.append(len(args[0])))
    images = torch.from_numpy(toy_federation.images[:6]).permute(0, 3, 1, 2) / 255
    told = SimpleNamespace(name="a", broadcast={"styles": torch.rand(2, 2, 3, generator=rng())})
    with method.state.serving(told), torch.no_grad():
        method.training_step((images, torch.arange(6) % 3), 0)
    assert counted == sizes


def test_the_style_network_neither_travels_nor_trains(start_run):
    run = start_run("ccst", pixel())
    assert not any(name.startswith("style.") for name in run.server.weights)
    assert run.method.frozen == ("style.",)


class TestCCST(MethodTester):
    name = "ccst"
    layer = pixel()
    federation = staticmethod(tinted)
    twins = (
        *(Twin({"preset": preset, "styles": 0}, federation=tinted) for preset in PRESETS),
        *(
            Twin({"preset": preset}, ONE_CLIENT, rounds=1, federation=alone, sends=False)
            for preset in PRESETS
        ),
    )
    apart = (
        {"preset": "official"},
        {"preset": "fedccrl"},
        {"bank": "single"},
        {"bank": "both"},
        {"selection": "pass"},
        {"selection": "image", "transfer": "cached"},
        {"styles": 2},
        {"strength": 1.0},
        {"transfer": "cached"},
        {"refresh": "round"},
        {"upload_ratio": 0.5},
        {"style_augment": False},
    )
