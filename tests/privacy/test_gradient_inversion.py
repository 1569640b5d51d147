"""Images reconstructed from gradients, and the scores of these images."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from feddg_attacks.kinds.gradient_inversion import (
    GradientInversion,
    gradient_of,
    invert,
    mismatch,
    psnr,
    rank,
    ssim,
    total_variation,
)
from feddg_attacks.pictures import GAP, LEFT, TOP, cases, sheet
from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import merge
from feddg_bench.engine.construction import build_method
from tests.privacy.scenes import CLIENTS, EACH, scene_of
from tests.privacy.test_membership import pictures

ONE_STEP = merge({}, GradientInversion.overrides, {"federation": {"per_round": 3}})


class Flat(nn.Module):
    """A linear network, whose gradient is a multiple of the image."""

    num_features = 12

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)


def test_an_update_of_one_step_is_the_gradient() -> None:
    scene = scene_of("fedavg", ONE_STEP)
    (first, *_) = [m for m in scene.messages() if m.item == "weights"]
    method = build_method("fedavg", num_classes=3)
    method.train()
    method.state.load(first.exchange.task.weights)
    found = GradientInversion.gradient(first, scene, method)
    held = scene.pictures(scene.federation.clients[first.client])
    images = torch.from_numpy(held.images).permute(0, 3, 1, 2) / 255
    true = gradient_of(method, images, torch.from_numpy(held.labels), list(found))
    assert float(mismatch(found, true, "cosine")) < 1e-4


def test_distances_of_gradients() -> None:
    one = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    other = {"a": torch.tensor([4.0]), "b": torch.tensor([3.0])}
    assert float(mismatch(one, other, "cosine")) == pytest.approx(1 - 24 / 25)
    assert float(mismatch(one, other, "dlg")) == 2
    assert float(total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))) == 1


@pytest.mark.parametrize("objective", ["cosine", "dlg"])
def test_the_image_of_a_linear_network_comes_back(objective: str) -> None:
    method = build_method("fedavg", num_classes=3)
    method.backbone = Flat()  # type: ignore[assignment]
    method.classifier = nn.Linear(12, 3)
    image = torch.rand(1, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([1])
    names = ["classifier.weight", "classifier.bias"]
    wanted = {n: g.detach() for n, g in gradient_of(method, image, labels, names).items()}
    draw = torch.Generator().manual_seed(0)
    found = invert(method, wanted, labels, (3, 2, 2), objective, draw, steps=300, smooth=0.0)  # type: ignore[arg-type]
    assert float(psnr(found, image)) > 20


def test_quality_of_images() -> None:
    black, grey = torch.zeros(1, 3, 16, 16), torch.full((1, 3, 16, 16), 0.1)
    assert float(psnr(grey, black)) == pytest.approx(20, abs=1e-4)
    assert float(psnr(black, black)) == 100
    assert float(ssim(black, black)) == pytest.approx(1)


def test_a_rank_is_the_share_of_others_that_are_further_off() -> None:
    levels = torch.tensor([0.0, 0.5, 0.9])[:, None, None, None].expand(3, 3, 2, 2)
    found, truth = levels[1:2] + 0.1, levels[1:2]
    shares = rank(found, truth, pictures([0], [0]), levels[[0, 2]], pictures([0, 0], [0, 0]))
    assert shares.tolist() == [1.0]
    assert rank(levels[:1], truth, pictures([0], [0]), levels[[0]], pictures([0], [0])) == [0.0]


def test_every_picture_shows_best_median_and_worst() -> None:
    quality = torch.tensor([3.0, 9.0, 1.0])
    assert cases(quality) == [1, 0, 2]
    truth = torch.tensor([0.0, 0.2, 0.4])[:, None, None, None].expand(3, 3, 128, 128)
    pixels = np.asarray(Image.open(BytesIO(sheet(truth, 1 - truth, quality))))
    assert pixels.shape == (TOP + 2 * (128 + GAP), LEFT + 3 * (128 + GAP), 3)
    places = [LEFT + i * (128 + GAP) for i in range(3)]
    assert pixels[TOP, places, 0].tolist() == [51, 0, 102]
    assert pixels[TOP + 2 * 128 + GAP - 1, places, 0].tolist() == [204, 255, 153]
    named = [pixels[:TOP, left : left + 128] for left in places]
    assert all(name.min() < 100 for name in named), "each case is named"


@pytest.mark.nightly
def test_an_attack_on_real_updates_shows_its_pictures() -> None:
    attack = GradientInversion()
    attack.steps = 25
    scene = scene_of("fedavg", ONE_STEP)
    results = {r.about: r for r in attack.measure(scene)}
    assert set(results) == {"cosine", "dlg"}
    assert results["cosine"].targets == 3 * EACH < CLIENTS * EACH
    assert set(attack.pictures) == {name for name, r in results.items() if r.figures}


def test_nothing_is_inverted_where_one_client_alone_sends() -> None:
    with pytest.raises(SettingsError, match="gradient-inversion"):
        list(GradientInversion().measure(scene_of("fedavg", {"federation": {"per_round": 1}})))
