"""Styles, transfer and perturbation on worked examples, and their invariants."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from feddg_methods.pardon import (
    cluster_centres,
    cluster_style,
    gram_and_moments,
    interpolation_style,
    median_of,
)
from feddg_methods.shared.adain import (
    adain,
    image_moments,
    image_styles,
    pooled_style,
    style_from_moments,
)
from feddg_methods.shared.finch import finch, finch_gram
from feddg_methods.shared.perturbation import perturb_style


def random_maps(seed: int, *shape: int) -> Tensor:
    """Return maps with a different mean and scale in every channel."""
    random = torch.Generator().manual_seed(seed)
    maps = torch.randn(*shape, generator=random)
    scale, shift = torch.randn(2, 1, shape[1], 1, 1, generator=random)
    return maps * 5 * scale.abs() + 10 * shift


shapes = st.tuples(
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(2, 5),
)

# ------------------------------------------------------------------------------ transfer

CONTENT = torch.tensor([[[[1.0, 3], [5, 7]]]])
MEAN, STD = torch.tensor([10.0]), torch.tensor([2.0])


@pytest.mark.parametrize(
    ("strength", "expected"),
    [
        (1.0, [7.676212, 9.225404, 10.774596, 12.323788]),
        (0.5, [4.338106, 6.112702, 7.887298, 9.661894]),
    ],
)
def test_adain_on_one_channel(strength: float, expected: list[float]) -> None:
    result = adain(CONTENT, MEAN, STD, strength)
    assert result.shape == CONTENT.shape
    assert_close(result.flatten(), torch.tensor(expected), atol=1e-5, rtol=0)


def test_content_statistics_are_per_image_and_unbiased() -> None:
    maps = torch.tensor([[[[1.0, 3]], [[0, 0]]], [[[5, 7]], [[2, 2]]]])
    expected = [[[2, 0], [1.414217, 0.003162]], [[6, 2], [1.414217, 0.003162]]]
    assert_close(image_styles(maps), torch.tensor(expected), atol=1e-6, rtol=0)
    assert_close(image_styles(CONTENT)[0, 1, 0], torch.tensor(2.581991), atol=1e-5, rtol=0)


@given(shapes, st.integers(0, 2**32))
def test_full_strength_gives_the_style_and_none_gives_the_content(shape, seed: int) -> None:
    maps = random_maps(*shape).double()
    random = torch.Generator().manual_seed(seed)
    mean = 20 * torch.randn(maps.shape[1], generator=random)
    std = 10 * torch.rand(maps.shape[1], generator=random) + 0.1
    assert torch.equal(adain(maps, mean, std, 0.0), maps)

    restyled = adain(maps, mean, std, 1.0).flatten(2)
    variance = maps.flatten(2).var(2)
    shrunk = (variance / (variance + 1e-5)).sqrt()  # shrunk by the 1e-5
    assert_close(restyled.mean(2), mean.double().expand(len(maps), -1), atol=1e-6, rtol=1e-6)
    assert_close(restyled.std(2), std.double() * shrunk, atol=1e-6, rtol=1e-6)

    half = adain(maps, mean, std, 0.5).flatten(2)
    assert_close(half, (restyled + maps.flatten(2)) / 2)


@given(shapes)
def test_images_of_a_batch_do_not_touch_each_other(shape) -> None:
    maps = random_maps(*shape)
    style = random_maps(shape[0] + 1, 2, maps.shape[1], 1, 1).flatten(1).abs()
    together = adain(maps, *style, 0.7)
    alone = torch.cat([adain(image[None], *style, 0.7) for image in maps])
    assert_close(together, alone)


def test_flat_and_single_position_maps_become_the_style_mean() -> None:
    style = torch.tensor([3.0, -1.0]), torch.tensor([2.0, 5.0])
    for maps in (torch.full((2, 2, 3, 3), 7.0), torch.full((2, 2, 1, 1), 7.0)):
        expected = style[0][:, None, None].expand_as(maps)
        assert torch.equal(adain(maps, *style), expected)


def test_adain_computes_in_float32_under_autocast() -> None:
    maps = random_maps(0, 2, 3, 16, 16) + 100
    style = torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, half = adain(maps, *style), adain(maps.bfloat16(), *style)
    assert torch.equal(mixed, adain(maps, *style))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, adain(maps.bfloat16().float(), *style).bfloat16())


# ------------------------------------------------------------------------- client styles

# One channel, three images of two pixels: the first is cluster 0, the others are cluster 1.
PIXELS = torch.tensor([[0.0, 2], [4, 4], [4, 8]]).view(3, 1, 1, 2)
CLUSTERS = torch.tensor([0, 1, 1])


@pytest.mark.parametrize(("sigma", "expected"), [("mixture", 2.449492), ("mean", 1.366029)])
def test_clusters_count_equally(sigma, expected: float) -> None:
    style = cluster_style(PIXELS, CLUSTERS, sigma=sigma)
    assert style.dtype == torch.float32
    assert_close(style, torch.tensor([[3.0], [expected]]), atol=1e-6, rtol=0)


def test_pooled_style() -> None:
    style = pooled_style(image_moments(PIXELS))
    assert_close(style, torch.tensor([[3.666667], [2.426705]]), atol=1e-6, rtol=0)
    # Channels stay apart: mixing images and channels would give the means (1, 4).
    maps = torch.tensor([[[1.0, 3], [0, 0]], [[5, 7], [2, 2]]])[..., None]
    expected = torch.tensor([[4, 1], [2.236070, 1.000005]])
    assert_close(pooled_style(image_moments(maps)), expected, atol=1e-6, rtol=0)


def stacked_style(maps: Tensor, labels: Tensor, sigma: str) -> Tensor:
    """Return the client style from stacked maps, cluster by cluster."""
    clusters = [maps[labels == c].double().transpose(0, 1).flatten(1) for c in labels.unique()]
    means = torch.stack([pixels.mean(1) for pixels in clusters])
    mean = means.mean(0)
    if sigma == "mean":
        stds = [(pixels.var(1, correction=0) + 1e-5).sqrt() for pixels in clusters]
        return torch.stack([mean, torch.stack(stds).mean(0)]).float()
    seconds = torch.stack([pixels.square().mean(1) for pixels in clusters])
    return torch.stack([mean, (seconds.mean(0) - mean**2 + 1e-5).sqrt()]).float()


@given(shapes, st.sampled_from(["mixture", "mean"]), st.randoms(use_true_random=False))
def test_styles_from_moments_are_those_of_stacked_maps_in_any_order(shape, sigma, random) -> None:
    maps = random_maps(*shape)
    labels = finch(maps.flatten(1))[-1]
    style = cluster_style(maps, labels, sigma=sigma)
    assert_close(style, stacked_style(maps, labels, sigma), atol=1e-4, rtol=1e-5)
    assert (style[1] >= 1e-5**0.5 * 0.999).all()

    order = random.sample(range(len(maps)), len(maps))
    renamed = labels.max() - labels
    assert_close(cluster_style(maps[order], renamed[order], sigma=sigma), style)


@given(shapes)
def test_the_mixture_is_at_least_as_wide_as_the_mean(shape) -> None:
    maps = random_maps(*shape)
    labels = torch.arange(len(maps))
    mixture, mean = (cluster_style(maps, labels, sigma=s)[1] for s in ("mixture", "mean"))
    assert (mixture >= mean * (1 - 1e-6)).all()


def test_large_means_do_not_cancel_the_deviation() -> None:
    flat = torch.full((4, 1, 64, 64), 1234.567)
    assert_close(pooled_style(image_moments(flat))[1], torch.tensor([1e-5**0.5]), atol=1e-5, rtol=0)
    noise = 0.01 * torch.randn(4, 1, 256, 256, generator=torch.Generator().manual_seed(0))
    std = pooled_style(image_moments((noise + 100).double()))[1]
    assert_close(std, torch.tensor([(0.01**2 + 1e-5) ** 0.5]), atol=0, rtol=1e-2)


@pytest.mark.parametrize("sizes", [[3], [4, 4, 1], [5, 3, 2, 4], [1] * 7])
def test_gram_and_moments_do_not_depend_on_the_budget(sizes: list[int]) -> None:
    maps = random_maps(1, sum(sizes), 3, 4, 5)
    row_bytes = 8 * 3 * 4 * 5
    rows = maps.double().flatten(1)
    previous = None
    for budget in [0, *(k * row_bytes for k in range(1, sum(sizes) + 1)), 2**30]:
        calls = 0

        def batches():
            nonlocal calls
            calls += 1
            return maps.split(sizes)

        gram, moments = gram_and_moments(batches, budget_bytes=budget)
        assert gram.dtype == moments.dtype == torch.float64
        assert_close(gram, rows @ rows.T)
        assert torch.equal(moments, image_moments(maps))
        assert previous is None or torch.equal(gram, previous)
        previous = gram
        assert calls <= len(sizes)
        assert calls >= sum(sizes) * row_bytes / max(budget, max(sizes) * row_bytes)
    assert calls == 1


def test_gram_and_moments_give_the_clients_style() -> None:
    maps = torch.cat([random_maps(seed, 6, 3, 4, 4) for seed in range(3)])
    gram, moments = gram_and_moments(lambda: iter(maps.split(5)), budget_bytes=3000)
    labels = finch_gram(gram)[-1]
    assert torch.equal(labels, finch(maps.flatten(1))[-1])
    assert torch.equal(style_from_moments(moments, labels), cluster_style(maps, labels))


@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=6), st.floats(0, 1), st.integers(0, 2**32)
)
def test_perturbation_shrinks_adds_and_keeps_deviations_positive(mean, shrink, seed) -> None:
    style = torch.tensor([mean, [abs(v) for v in mean]])
    noise = torch.randn(style.shape, generator=torch.Generator().manual_seed(seed))
    result = perturb_style(style, noise, shrink=shrink)
    assert_close(result[0], (1 - shrink) * style[0] + noise[0])
    assert (result[1] >= 0.00316).all()
    assert_close(perturb_style(style, torch.zeros_like(style), shrink=0.0)[0], style[0])


def test_perturbation_on_numbers() -> None:
    style = torch.tensor([[10.0, -4], [10, 0.02]])
    noise = torch.tensor([[0.02, -0.03], [0.02, -0.03]])
    expected = torch.tensor([[9.02, -3.63], [9.02, 1e-5**0.5]])
    assert_close(perturb_style(style, noise, shrink=0.1), expected)


# -------------------------------------------------------------------------- server style

ROWS = torch.tensor(
    [[1, 0, 1, 1], [1.1, 0, 1, 1.2], [0, 2, 1, 1], [0, 2.2, 1, 1.1], [0.1, 2.1, 1, 1.3]]
)
MORE = torch.cat([ROWS, torch.tensor([[3, 3, 0.1, 0.1], [3.2, 3.1, 0.1, 0.3]])])


def test_interpolation_style_on_numbers() -> None:
    styles = ROWS.view(5, 2, 2)
    assert finch(ROWS)[0].tolist() == [0, 0, 1, 1, 1]
    lower = interpolation_style(styles)
    assert_close(lower.flatten(), torch.tensor([0.033333, 0, 1, 1.1]), atol=1e-6, rtol=0)
    assert torch.equal(lower, interpolation_style(styles, preset="paper"))
    average = median_of(cluster_centres(styles), "average").flatten()
    assert_close(average, torch.tensor([0.541667, 1.05, 1, 1.116667]), atol=1e-6, rtol=0)


def test_interpolation_style_of_three_clusters() -> None:
    assert finch(MORE)[0].tolist() == [0, 0, 1, 1, 1, 2, 2]
    expected = torch.tensor([1.05, 2.1, 1, 1.1])
    assert_close(interpolation_style(MORE.view(7, 2, 2)).flatten(), expected)
    centres = cluster_centres(MORE.view(7, 2, 2))
    assert_close(median_of(centres, "average").flatten(), expected)


def test_the_artefact_preset_takes_medians_of_euclidean_clusters() -> None:
    # In direction all nearly agree; in distance there are two pairs and one triple.
    means = [[1.0, 1.0], [1.0, 1.2], [50.0, 50.0], [50.0, 51.0], [51.0, 60.0], [90, 90], [90, 92]]
    styles = torch.tensor([[mean, [1.0, 1.0]] for mean in means])
    assert finch(styles.flatten(1), distance="euclidean")[0].tolist() == [0, 0, 1, 1, 1, 2, 2]
    # Medians of the clusters: (1, 1.1), (50, 51), (90, 91).
    artefact = interpolation_style(styles, preset="artefact")
    assert_close(artefact, torch.tensor([[50.0, 51.0], [1.0, 1.0]]))
    # For an even number of clusters, the lower median.
    artefact = interpolation_style(styles[:5], preset="artefact")
    assert_close(artefact, torch.tensor([[1.0, 1.1], [1.0, 1.0]]))


@pytest.mark.parametrize("preset", ["released", "paper", "artefact"])
def test_one_style_is_the_interpolation_style(preset) -> None:
    style = random_maps(0, 1, 2, 1, 8).view(1, 2, 8)
    assert_close(interpolation_style(style, preset=preset), style[0])


@given(st.integers(1, 30), st.integers(0, 2**32), st.sampled_from(["released", "artefact"]))
def test_the_order_of_clients_does_not_matter(count: int, seed: int, preset) -> None:
    random = torch.Generator().manual_seed(seed)
    styles = torch.randn(count, 2, 6, generator=random, dtype=torch.float64)
    order = torch.randperm(count, generator=random)
    straight = interpolation_style(styles, preset=preset)
    assert straight.shape == (2, 6)
    assert_close(interpolation_style(styles[order], preset=preset), straight)
    low, high = styles.amin(0), styles.amax(0)
    assert ((straight >= low - 1e-9) & (straight <= high + 1e-9)).all()


def test_presets_differ_where_lengths_decide() -> None:
    styles = torch.stack([s * torch.tensor([[1.0, 3], [1, 1]]) for s in (1.0, 1.1, 20, 21, 22)])
    results = [interpolation_style(styles, preset=p) for p in ("released", "artefact")]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(results))


@pytest.mark.parametrize(
    ("scheme", "cosine", "euclidean", "shipped"),
    [
        ("ac-p-s", [19, 5, 2], [22, 6, 2], True),
        ("cs-a-p", [21, 4], [23, 7, 3], False),
        ("pa-s-c", [23, 2], [23, 5, 2], True),
        ("ps-c-a", [18, 6], [18, 5], True),
    ],
)
def test_style_files_shipped_with_pardon(scheme: str, cosine, euclidean, shipped: bool) -> None:
    folder = Path(os.environ.get("FEDDG_TEST_DATA", "absent")) / "style_stats" / "PACS"
    if not folder.is_dir():
        pytest.skip("no style_stats/ of PARDON's repository in FEDDG_TEST_DATA")
    styles = torch.stack(
        [
            torch.from_numpy(np.load(folder / f"{scheme}_0.1_{kind}_arr_100_clients_FINCH.npy"))
            for kind in ("mean", "std")
        ],
        1,
    ).view(100, 2, 512)
    rows = styles.flatten(1).double()
    for partitions, expected in (
        (finch(rows), cosine),
        (finch_gram(rows @ rows.T), cosine),
        (finch(rows, distance="euclidean"), euclidean),
    ):
        assert [int(labels.max()) + 1 for labels in partitions] == expected
    if shipped:
        broadcast = np.load(folder / f"{scheme}_0.1_100_mean_std__FINCH.npy")
        artefact = interpolation_style(styles, preset="artefact")
        assert torch.equal(artefact, torch.from_numpy(broadcast).view(2, 512))
    if scheme == "ac-p-s":
        first = torch.tensor(
            [[2.99768, -11.43326, -20.47557, -2.41674], [6.94775, 23.34612, 28.79748, 12.53015]]
        )
        assert_close(interpolation_style(styles)[:, :4], first, atol=1e-5, rtol=0)
