"""Images reconstructed from styles."""

import pytest
import torch

from feddg_attacks.kinds.gradient_inversion import psnr
from feddg_attacks.kinds.style_inversion import (
    Painter,
    StyleInversion,
    new_painter,
    train_painter,
)
from feddg_bench.common.errors import SettingsError
from tests.privacy.scenes import CLIENTS, EACH, attacked_federation, scene_of

PIXEL = {"hyper": {"style": "pixel", "style_augment": False}}


def trained(vectors: torch.Tensor, images: torch.Tensor, epochs: int) -> Painter:
    return train_painter(new_painter(vectors, images, 0), vectors, images, 0, epochs)


def inverted(method: str, *layers: object) -> StyleInversion:
    attack = StyleInversion()
    attack.epochs = 20
    few = attacked_federation(each=3, public=30)
    (result,) = attack.measure(scene_of(method, *layers, federation=few))  # type: ignore[arg-type]
    assert result.messages == CLIENTS
    assert result.targets == CLIENTS * 3
    attack.result = result  # type: ignore[attr-defined]
    return attack


def test_a_generator_learns_what_its_vectors_say() -> None:
    colours = torch.rand(80, 3, generator=torch.Generator().manual_seed(0)).double()
    images = colours.float()[:, :, None, None].expand(80, 3, 8, 8)
    painter = trained(colours[:60], images[:60], 40)
    with torch.no_grad():
        assert float(psnr(painter(colours[60:]), images[60:]).mean()) > 20


def test_the_best_epoch_counts() -> None:
    colours = torch.rand(20, 3, generator=torch.Generator().manual_seed(0)).double()
    images = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    once, longer = (trained(colours, images, n) for n in (3, 30))
    draw = [psnr(p(colours).detach(), images).mean() for p in (once, longer)]
    again = trained(colours, images, 3)
    assert torch.equal(again(colours), once(colours))
    assert all(value > 0 for value in draw)


def test_styles_of_single_images_and_of_clients() -> None:
    single = inverted("ccst", PIXEL, {"hyper": {"bank": "single"}}).result  # type: ignore[attr-defined]
    client = inverted("pardon", PIXEL).result  # type: ignore[attr-defined]
    assert (single.about, client.about) == ("single images", "clients")
    assert single.planted_leak.holds
    assert abs(client.no_leak.measured.value - 0.5) < 0.2
    assert single.figures["rank"].value > 0.7
    assert client.figures["sample_rank"].value > 0.7
    assert single.figures["retrieved"].value > client.figures["retrieved"].value
    for name in ("psnr", "ssim", "retrieved"):
        assert {name, f"sample_{name}", f"{name}_of_images"} <= set(client.figures)


def test_weights_are_no_style() -> None:
    with pytest.raises(SettingsError, match="style-inversion reads"):
        list(StyleInversion().measure(scene_of("fedavg")))


def test_a_client_inverts_what_is_passed_on_to_it() -> None:
    layers = PIXEL, {"hyper": {"bank": "single", "selection": "pass"}}
    few = attacked_federation(public=20)
    scene = scene_of("ccst", *layers, attacker="client", federation=few)
    attack = StyleInversion()
    attack.epochs = 8
    (result,) = attack.measure(scene)
    assert not result.up
    assert result.messages == CLIENTS - 1, "its own it knows"
    assert result.targets == (CLIENTS - 1) * EACH
    assert "rank" in result.figures
    layers = PIXEL, {"hyper": {"bank": "overall", "styles": 3}}
    (one,) = attack.measure(scene_of("ccst", *layers, attacker="client", federation=few))
    assert one.messages == 3, "the server drew three others for it"


def test_the_mean_of_styles_is_nobodys_style() -> None:
    with pytest.raises(SettingsError, match="style-inversion reads"):
        list(StyleInversion().measure(scene_of("pardon", PIXEL, attacker="client")))
