"""Augmentation: formulas match torchvision; random draws are independent per image."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as reference

from feddg_bench.config.schema import AugmentSettings
from feddg_bench.data import augment
from feddg_bench.data.augment import (
    Augment,
    adjust_brightness_,
    adjust_contrast_,
    adjust_hue_,
    adjust_saturation_,
    crop_and_flip,
    crop_and_flip_bytes,
    crop_and_flip_floats,
    draw_boxes,
    left_whole,
    luminance,
    to_float,
)

NOTHING = {
    "crop_scale": None,
    "flip": 0,
    "brightness": 0,
    "contrast": 0,
    "saturation": 0,
    "hue": 0,
    "grayscale": 0,
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(batch: int, height: int = 24, width: int = 24, seed: int = 0) -> torch.Tensor:
    size = (batch, height, width, 3)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=seeded(seed))


def only(**strengths: object) -> Augment:
    return Augment(AugmentSettings.model_validate(NOTHING | strengths))


# ------------------------------------------------------------------------------- formulas


def colour_lattice() -> torch.Tensor:
    """Return one image whose pixels cover all ties between channels, grey, black and white."""
    levels = torch.tensor(list(product([0.0, 0.2, 0.5, 0.9, 1.0], repeat=3)))  # (125, 3)
    return levels.T.reshape(1, 3, 5, 25)


@pytest.mark.parametrize(
    ("ours", "theirs", "values"),
    [
        (adjust_brightness_, reference.adjust_brightness, [0.0, 0.4, 1.0, 1.7]),
        (adjust_contrast_, reference.adjust_contrast, [0.0, 0.4, 1.0, 1.7]),
        (adjust_saturation_, reference.adjust_saturation, [0.0, 0.4, 1.0, 1.7]),
        (adjust_hue_, reference.adjust_hue, [-0.5, -0.3, -0.01, 0.0, 1 / 6, 0.25, 0.5]),
    ],
    ids=["brightness", "contrast", "saturation", "hue"],
)
def test_colour_adjustments_are_torchvisions(ours, theirs, values):
    for images in (to_float(pictures(1)).contiguous(), colour_lattice()):
        batch = images.repeat(len(values), 1, 1, 1)
        expected = torch.cat([theirs(images, value) for value in values])
        assert torch.allclose(ours(batch, torch.tensor(values)), expected, atol=3e-6)


def test_luminance_is_torchvisions():
    images = to_float(pictures(3))
    assert torch.allclose(luminance(images), reference.rgb_to_grayscale(images), atol=1e-6)


def test_hue_of_known_colours():
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    for turns, expected in ((1 / 3, [0, 1, 0]), (-1 / 3, [0, 0, 1]), (0.5, [0, 1, 1])):
        turned = adjust_hue_(red.clone(), torch.tensor([turns])).flatten()
        assert turned.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("height", "width"), [(24, 24), (20, 31)])
def test_crops_are_torchvisions(height, width):
    images = pictures(16, height, width)
    boxes = draw_boxes(16, height, width, (0.3, 1.0), (0.75, 4 / 3), seeded())
    mirrored = torch.arange(16) % 2 == 0
    expected = {}
    for kind, planes in (("floats", images.float()), ("bytes", images)):
        crops = [
            reference.resized_crop(image, *box, [height, width], antialias=True)
            for image, box in zip(planes.permute(0, 3, 1, 2), boxes.tolist(), strict=True)
        ]
        flips = mirrored.tolist()
        expected[kind] = torch.stack(
            [reference.hflip(c) if flip else c for c, flip in zip(crops, flips, strict=True)]
        )
    floats = crop_and_flip_floats(images, boxes, mirrored, torch.channels_last) * 255
    assert torch.allclose(floats, expected["floats"], atol=255 * 1e-5)
    on_cpu = crop_and_flip(images, boxes, mirrored) * 255
    assert (on_cpu - expected["bytes"]).abs().max() < 1.01
    assert (on_cpu - floats).abs().max() < 1.01
    assert (on_cpu - floats).mean().abs() < 0.2  # rounded, not truncated


@pytest.mark.parametrize("pixels", [torch.uint8, torch.float16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("apart", [False, True])
def test_a_batch_left_whole_is_as_if_resized(pixels, layout, apart):
    images = (torch.rand(9, 13, 17, 3, generator=seeded()) * 255).to(pixels)
    images = images if pixels == torch.uint8 else images / 255
    boxes, mirrored = torch.tensor([0, 0, 13, 17]).expand(9, 4), torch.zeros(9, dtype=torch.bool)
    given_images = list(images.split(1)) if apart else images
    whole = left_whole(given_images, layout)
    assert torch.equal(whole, crop_and_flip_bytes(given_images, boxes, mirrored, layout))
    assert whole.is_contiguous(memory_format=layout)
    assert whole.dtype == torch.float32


# --------------------------------------------------------------------------------- boxes


@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    scale=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted),
    ratio=st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)).map(sorted),
    seed=st.integers(0, 99),
)
def test_boxes_lie_inside_the_image(height, width, scale, ratio, seed):
    boxes = draw_boxes(32, height, width, tuple(scale), tuple(ratio), seeded(seed))
    top, left, box_height, box_width = boxes.T
    assert boxes.dtype == torch.int64
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (top + box_height <= height).all()
    assert (left + box_width <= width).all()


@pytest.mark.parametrize("ratio", [(3.0, 4.0), (0.2, 0.3)])
def test_box_without_fit_is_torchvisions_central_one(ratio):
    images = torch.zeros(3, 40, 60)
    expected = RandomResizedCrop.get_params(images, [1.0, 1.0], list(ratio))
    boxes = draw_boxes(3, 40, 60, (1.0, 1.0), ratio, seeded())
    assert boxes.tolist() == [list(expected)] * 3


def test_boxes_have_torchvisions_distribution():
    number, side, scale, ratio = 3000, 64, (0.7, 1.0), (0.75, 4 / 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        image = torch.zeros(3, side, side)
        theirs = [RandomResizedCrop.get_params(image, scale, ratio) for _ in range(number)]
    theirs = torch.tensor(theirs).double()
    ours = draw_boxes(number, side, side, scale, ratio, seeded()).double()
    tolerance = 4 * (2 / number) ** 0.5 * theirs.std(dim=0)
    assert ((ours.mean(dim=0) - theirs.mean(dim=0)).abs() < tolerance).all()
    assert torch.allclose(ours.std(dim=0), theirs.std(dim=0), rtol=0.1)


# ------------------------------------------------------------------------------- batches

strength = st.floats(0, 1)


@given(
    batch=st.integers(1, 9),
    values=st.fixed_dictionaries(
        {
            "crop_scale": st.sampled_from([None, (0.2, 1.0)]),
            "flip": strength,
            "brightness": strength,
            "contrast": strength,
            "saturation": strength,
            "hue": st.floats(0, 0.5),
            "grayscale": strength,
        }
    ),
    seed=st.integers(0, 99),
)
def test_results_stay_in_range(batch, values, seed):
    images = pictures(batch, 12, 9, seed)
    before = images.clone()
    result = Augment(AugmentSettings.model_validate(values))(images, seeded(seed))
    assert result.shape == (batch, 3, 12, 9)
    assert result.dtype == torch.float32
    assert result.min() >= 0
    assert result.max() <= 1
    assert torch.equal(images, before)


def test_nothing_changes_nothing():
    images = pictures(5)
    assert torch.equal(only()(images, seeded()), to_float(images))


def test_to_float_divides_by_255():
    image = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    assert to_float(image).flatten().tolist() == pytest.approx([0, 0.2, 1])


def test_flipping_twice_is_the_identity():
    images = pictures(4, 7, 10)
    flipped = only(flip=1)(images, seeded())
    assert torch.equal(flipped, to_float(images).flip(3))
    back = (flipped * 255).round().byte().permute(0, 2, 3, 1)
    assert torch.equal(only(flip=1)(back, seeded()), to_float(images))


def test_flips_come_with_their_probability():
    images = pictures(1, 4, 4).repeat(2000, 1, 1, 1)
    flipped = only(flip=0.3)(images, seeded()) != to_float(images)
    assert flipped.flatten(1).any(dim=1).float().mean() == pytest.approx(0.3, abs=0.04)


def test_same_seed_same_result():
    images, frame_a = pictures(6), Augment(AugmentSettings())
    first = frame_a(images, seeded(1))
    assert torch.equal(frame_a(images, seeded(1)), first)
    assert not torch.equal(frame_a(images, seeded(2)), first)


def test_equal_images_of_a_batch_differ_afterwards():
    results = Augment(AugmentSettings())(pictures(1).repeat(8, 1, 1, 1), seeded()).flatten(1)
    assert torch.cdist(results, results).fill_diagonal_(1).min() > 0.01


def test_images_do_not_look_at_their_neighbours():
    images, others = pictures(6), pictures(6, seed=1)
    others[2] = images[2]
    frame_a = Augment(AugmentSettings(grayscale=0.5))
    results = frame_a(images, seeded()), frame_a(others, seeded())
    assert torch.allclose(results[0][2], results[1][2], atol=1e-6)
    assert not torch.allclose(results[0][3], results[1][3], atol=0.1)


def test_pieces_of_a_batch_change_nothing(monkeypatch):
    images, frame_a = pictures(7), Augment(AugmentSettings())
    whole = frame_a(images, seeded())
    monkeypatch.setattr(augment, "PIECE_BYTES", 1)
    assert torch.allclose(frame_a(images, seeded()), whole, atol=1e-6)


def test_brightness_is_drawn_from_its_whole_range():
    grey = torch.full((1000, 2, 2, 3), 100, dtype=torch.uint8)
    factors = only(brightness=0.3)(grey, seeded()).amax(dim=(1, 2, 3)) * 2.55
    assert 0.7 <= factors.min() < 0.71
    assert 1.29 < factors.max() <= 1.3001
    assert factors.mean() == pytest.approx(1, abs=0.02)
    wide = only(brightness=1.5)(grey, seeded()).amax(dim=(1, 2, 3)) * 2.55
    assert wide.min() < 0.02
    assert (wide == 0).float().mean() < 0.01  # from [0, 2.5], not clipped from [-0.5, 2.5]


def test_colours_are_adjusted_in_different_orders():
    # A white and a black row: brightening, then reducing contrast keeps their sum at 1; the reverse
    # order makes it larger than 1; a brightness factor below 1 makes it smaller in either order.
    image = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    image[0, 0] = 255
    sums = set()
    for seed in range(60):
        result = only(brightness=0.9, contrast=0.9)(image, seeded(seed))
        if result.min() > 0:
            sums.add(round(float(result.min() + result.max()), 3))
    assert 1.0 in sums
    assert max(sums) > 1.1


def test_grayscale_makes_some_images_grey():
    results = only(grayscale=0.4)(pictures(500, 3, 3), seeded())
    grey = (results == results[:, :1]).flatten(1).all(dim=1)
    assert grey.float().mean() == pytest.approx(0.4, abs=0.08)
    assert torch.allclose(results[grey][:, 0], luminance(to_float(pictures(500, 3, 3)))[grey][:, 0])


def test_memory_layout_suits_what_was_done():
    images = pictures(2)
    assert only(flip=0.5)(images, seeded()).is_contiguous(memory_format=torch.channels_last)
    assert only(hue=0.1)(images, seeded()).is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_sees_the_same_draws():
    images = pictures(32, 64, 64)
    here = Augment(AugmentSettings())(images, seeded())
    there = Augment(AugmentSettings())(images.cuda(), seeded()).cpu()
    assert (here - there).abs().mean() < 1 / 255
    assert np.quantile((here - there).abs().numpy(), 0.99) < 4 / 255
