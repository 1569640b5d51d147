"""Batched AugMix against torchvision's, and random draws shared by methods."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.streams import torch_stream
from feddg_methods.fedccrl import augmix, draw_beta
from feddg_methods.shared.draws import draw_rows, share_count
from feddg_methods.shared.passes import to_bytes
from tests.helpers import refused, rng


def pictures(count=4, side=16, seed=0):
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=rng(seed))


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_what_torchvision_makes_of_it(seed):
    images = pictures()
    found = augmix(images, rng(seed))
    assert (found.shape, found.dtype) == (images.shape, torch.uint8)
    with torch_stream(int(torch.randint(2**62, (), generator=rng(seed))), "augmix"):
        expected = v2.AugMix()(images)
    assert torch.equal(found, expected)


def test_a_seed_means_the_same_images_whatever_was_drawn_before():
    images = pictures()
    first = augmix(images, rng(3))
    torch.rand(7)
    before = torch.get_rng_state()
    generator = rng(3)
    assert torch.equal(augmix(images, generator), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(augmix(images, generator), first)
    assert torch.equal(augmix(images.contiguous(memory_format=torch.channels_last), rng(3)), first)


def operations(monkeypatch, seed, **options):
    """Return the operations with their batch sizes, and the mixing weights."""
    ran, weights = [], []
    apply, sample = v2.AugMix._apply_image_or_video_transform, torch._sample_dirichlet

    def spy(self, image, name, *args, **kwargs):
        ran.append((name, len(image)))
        return apply(self, image, name, *args, **kwargs)

    def note(params, *args, **kwargs):
        weights.append(sample(params, *args, **kwargs))
        return weights[-1]

    with monkeypatch.context() as patch:
        patch.setattr(v2.AugMix, "_apply_image_or_video_transform", spy)
        patch.setattr(torch, "_sample_dirichlet", note)
        augmix(pictures(5), rng(seed), **options)
    return ran, weights


def test_operations_are_drawn_once_a_batch_and_weights_for_every_image(monkeypatch):
    ran, (beta, dirichlet) = operations(monkeypatch, 0)
    assert {size for _, size in ran} == {5}
    assert 3 <= len(ran) <= 9
    assert beta.shape == (5, 2)
    assert dirichlet.shape == (5, 3)
    assert len(dirichlet[:, 0].unique()) == 5


def test_operations_of_every_image_by_itself(monkeypatch):
    ran, weights = operations(monkeypatch, 0, per_image=True)
    assert {size for _, size in ran} == {1}
    assert 15 <= len(ran) <= 45
    assert len(weights) == 10


@pytest.mark.parametrize("chains", [1, 2, 3])
def test_the_number_of_chains(monkeypatch, chains):
    _, (_, dirichlet) = operations(monkeypatch, 0, chains=chains)
    assert dirichlet.shape == (5, chains)


def test_the_number_of_chains_may_be_drawn(monkeypatch):
    widths = {operations(monkeypatch, seed, chains=None)[1][1].shape[1] for seed in range(20)}
    assert widths == {1, 2, 3}


def test_a_mixture_stays_between_the_image_and_its_chains(monkeypatch):
    """If chains only paint white, the result lies between the image and white."""

    def white(_self, image, *_args, **_options):
        return torch.full_like(image, 255)

    monkeypatch.setattr(v2.AugMix, "_apply_image_or_video_transform", white)
    images = pictures() // 2
    shares = ((augmix(images, rng(0)) - images) / (255 - images.float())).flatten(1)
    assert bool((shares >= 0).all())
    assert float((shares.amax(1) - shares.amin(1)).max()) < 0.02  # 8 bits
    assert len(shares[:, 0].unique()) == 4


def test_autocast_moves_no_pixel():
    images = pictures(side=32)
    for seed in range(10):
        plain = augmix(images, rng(seed))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(augmix(images, rng(seed)), plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("per_image", [False, True])
def test_a_gpu_draws_the_same(per_image):
    images = pictures(side=32)
    for seed in range(20):
        here = augmix(images, rng(seed), per_image=per_image).int()
        there = augmix(images.cuda(), rng(seed), per_image=per_image)
        assert there.is_cuda
        difference = (here - there.cpu().int()).abs()
        assert float((difference > 2).float().mean()) < 0.02  # rounding can move an edge


# ------------------------------------------------------------------------------------ draws


def test_rows_are_drawn_without_replacement_where_there_are_enough():
    for seed in range(50):
        assert len(draw_rows(8, 8, rng(seed)).unique()) == 8
        assert len(draw_rows(9, 4, rng(seed)).unique()) == 4
    counts = torch.stack([draw_rows(9, 4, rng(seed)) for seed in range(900)]).flatten().bincount()
    assert counts.shape == (9,)
    assert bool(((counts - 400).abs() < 80).all())


def test_rows_are_drawn_with_replacement_where_there_are_too_few():
    rows = draw_rows(3, 3000, rng())
    counts = rows.bincount()
    assert rows.shape == (3000,)
    assert bool(((counts - 1000).abs() < 120).all())
    assert draw_rows(1, 3, rng()).tolist() == [0, 0, 0]


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 1.0, 5.0])
def test_beta_has_its_moments(alpha):
    numbers = draw_beta(alpha, 40_000, rng()).double()
    assert bool(((numbers >= 0) & (numbers <= 1)).all())
    variance = 1 / (4 * (2 * alpha + 1))
    assert float(numbers.mean()) == pytest.approx(0.5, abs=4 * math.sqrt(variance / 40_000))
    assert float(numbers.var()) == pytest.approx(variance, rel=0.05)


def test_published_upload_counts():
    assert [share_count(n, 0.1) for n in (10, 25)] == [1, 3]
    assert [share_count(n, 0.1, "floor") for n in (10, 25)] == [1, 2]


def test_upload_counts():
    assert [share_count(n, 0.1) for n in (1, 9, 11, 30)] == [1, 1, 2, 3]
    assert [share_count(n, 0.1, "floor") for n in (1, 9, 11, 30)] == [0, 0, 1, 3]
    assert share_count(100, 0.07) == 7  # not 8: the product is 7 plus a rounding error
    assert share_count(100, 0.29, "floor") == 29  # not 28
    assert [share_count(n, 1.0) for n in (1, 57)] == [1, 57]
    with refused(SettingsError, "unknown rounding 'up'"):
        share_count(10, 0.1, "up")


def test_bytes_are_clamped_and_rounded():
    values = torch.tensor([-5.0, 0.0, 99.4, 99.6, 254.9, 300.0]) / 255
    assert to_bytes(values).tolist() == [0, 0, 99, 100, 255, 255]
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_bytes(every.float() / 255), every)


def test_bytes_may_wrap_around():
    values = torch.tensor([-5.0, 300.0, 511.5, -256.0, 12.9, -0.9]) / 255
    assert to_bytes(values, clamp=False).tolist() == [251, 44, 255, 0, 12, 0]
    rows = np.random.default_rng(0).uniform(-2, 3, 1000).astype(np.float32)
    expected = np.trunc(rows * np.float32(255)).astype(np.int64) % 256
    assert to_bytes(torch.from_numpy(rows), clamp=False).tolist() == expected.tolist()
