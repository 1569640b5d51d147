"""FedCCRL's transfer of channel statistics: published numbers, a NumPy oracle, edge cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg_methods.fedccrl import channel_statistics, restyle

seeds = st.integers(0, 2**32 - 1)


def drawn(seed, size=3, side=4):
    rng = np.random.default_rng(seed)
    images = rng.uniform(size=(size, 3, side, side))
    mean, std = rng.uniform(size=(size, 3)), rng.uniform(0.05, 0.5, size=(size, 3))
    return images, mean, std, rng.uniform(size=size)


def tensors(*arrays):
    return [torch.from_numpy(a) for a in arrays]


def constant(value, *shape):
    return torch.full(shape, value, dtype=torch.float64)


def test_published_numbers():
    images = (
        torch.tensor([0.0, 0, 0, 4], dtype=torch.float64).reshape(1, 1, 2, 2).repeat(1, 3, 1, 1)
    )
    mean, std = channel_statistics(images)
    assert mean.flatten().tolist() == pytest.approx([1] * 3)
    assert std.flatten().tolist() == pytest.approx([2] * 3, abs=1e-6)
    styled = restyle(images, constant(5, 1, 3), constant(1, 1, 3), constant(0.25, 1))
    for channel in styled[0]:
        assert channel.flatten().tolist() == pytest.approx([3.375, 3.375, 3.375, 5.875], abs=1e-6)


@given(seed=seeds)
def test_equals_its_definition(seed):
    images, mean, std, mix = drawn(seed)
    expected = np.empty_like(images)
    for b in range(3):
        for c in range(3):
            own_mean = images[b, c].mean()
            own_std = np.sqrt(images[b, c].var(ddof=1) + 1e-6)
            new_std = mix[b] * own_std + (1 - mix[b]) * std[b, c]
            new_mean = mix[b] * own_mean + (1 - mix[b]) * mean[b, c]
            expected[b, c] = new_std * (images[b, c] - own_mean) / own_std + new_mean
    styled = restyle(*tensors(images, mean, std, mix))
    assert styled.dtype == torch.float64
    np.testing.assert_allclose(styled.numpy(), expected, rtol=1e-6, atol=1e-12)


@given(seed=seeds)
def test_own_weight_one_changes_nothing_and_zero_gives_the_foreign_statistics(seed):
    images, mean, std, mix = tensors(*drawn(seed, side=8))
    same = restyle(images, mean, std, torch.ones_like(mix))
    torch.testing.assert_close(same, images)
    foreign = restyle(images, mean, std, torch.zeros_like(mix))
    torch.testing.assert_close(foreign.mean(dim=(2, 3)), mean)
    torch.testing.assert_close(foreign.std(dim=(2, 3)), std, rtol=1e-3, atol=0)


@given(seed=seeds)
def test_commutes_with_the_normalisation_of_channels(seed):
    images, mean, std, mix = tensors(*drawn(seed, side=8))
    shift = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64)
    scale = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64)

    def normalised(x):
        return (x - shift[:, None, None]) / scale[:, None, None]

    before = restyle(normalised(images), (mean - shift) / scale, std / scale, mix)
    # The offset under the root is not scaled: agreement up to 1e-6 / variance.
    torch.testing.assert_close(
        before, normalised(restyle(images, mean, std, mix)), rtol=0, atol=1e-3
    )


@given(seed=seeds)
def test_each_image_has_its_own_style(seed):
    images, mean, std, mix = tensors(*drawn(seed))
    whole = restyle(images, mean, std, mix)
    for b in range(3):
        one = slice(b, b + 1)
        torch.testing.assert_close(restyle(images[one], mean[one], std[one], mix[one]), whole[one])


def test_constant_image_becomes_the_mixed_mean():
    styled = restyle(
        constant(0.4, 1, 3, 5, 5), constant(0.8, 1, 3), constant(0.2, 1, 3), constant(0.5, 1)
    )
    torch.testing.assert_close(styled, constant(0.6, 1, 3, 5, 5))


def test_image_of_one_pixel_has_no_unbiased_variance():
    images = constant(0.4, 2, 3, 1, 1)
    mean, std = channel_statistics(images)
    torch.testing.assert_close(mean, constant(0.4, 2, 3))
    torch.testing.assert_close(std, constant(1e-3, 2, 3))
    styled = restyle(images, constant(0.8, 2, 3), constant(0.2, 2, 3), constant(0.25, 2))
    torch.testing.assert_close(styled, constant(0.7, 2, 3, 1, 1))


def test_nothing_is_clamped():
    images = torch.tensor([0.0, 1], dtype=torch.float64).reshape(1, 1, 1, 2).repeat(1, 3, 1, 1)
    styled = restyle(images, constant(0.9, 1, 3), constant(2, 1, 3), constant(0, 1))
    assert styled.min() < 0
    assert styled.max() > 1


def test_statistics_are_constants_to_autograd():
    images, mean, std, mix = tensors(*drawn(3))
    images.requires_grad_()
    restyle(images, mean, std, mix).sum().backward()
    _, own_std = channel_statistics(images.detach())
    slope = mix[:, None] + (1 - mix[:, None]) * std / own_std
    torch.testing.assert_close(images.grad, slope[..., None, None].expand_as(images))


def test_single_precision_is_kept():
    images, mean, std, mix = (x.float() for x in tensors(*drawn(4)))
    styled = restyle(images, mean, std, mix)
    assert styled.dtype == torch.float32
    double = restyle(images.double(), mean.double(), std.double(), mix.double())
    torch.testing.assert_close(styled.double(), double, rtol=1e-5, atol=1e-5)
