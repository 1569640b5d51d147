"""Style transfer back ends: architectures, weights files, transfer with the distilled weights."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from feddg_bench.common.errors import DataError, SettingsError
from feddg_methods.pardon import gram_and_moments
from feddg_methods.shared.adain import adain, image_moments, pooled_style, style_from_moments
from feddg_methods.shared.finch import finch_gram
from feddg_methods.shared.style_transfer import StyleBackend, build_style_backend
from tests.helpers import refused

ENCODER = {0: (3, 3), 2: (3, 64), 5: (64, 64), 9: (64, 128), 12: (128, 128), 16: (128, 256)}
ENCODER |= {19: (256, 256), 22: (256, 256), 25: (256, 256), 29: (256, 512)}
DECODER = {1: (512, 256), 5: (256, 256), 8: (256, 256), 11: (256, 256), 14: (256, 128)}
DECODER |= {18: (128, 128), 21: (128, 64), 25: (64, 64), 28: (64, 3)}
DEEPER = dict.fromkeys((32, 35, 38, 42, 45, 48, 51), (512, 512))


def state_dict(layers: dict[int, tuple[int, int]], seed: int) -> dict[str, Tensor]:
    """Return random weights under the original files' keys."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, (width, out) in layers.items():
        side = 1 if (index, width) == (0, 3) else 3
        scale = (2 / (width * side**2)) ** 0.5
        weight = torch.randn(out, width, side, side, generator=random)
        tensors[f"{index}.weight"] = scale * weight
        tensors[f"{index}.bias"] = 0.1 * torch.randn(out, generator=random)
    return tensors


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> tuple[str, str]:
    """Files with the shapes and keys of vgg_normalised.pth and decoder.pth."""
    folder = tmp_path_factory.mktemp("original")
    paths = folder / "vgg_normalised.pth", folder / "decoder.pth"
    torch.save(state_dict(ENCODER | DEEPER, 0), paths[0], _use_new_zipfile_serialization=False)
    torch.save(state_dict(DECODER, 1), paths[1], _use_new_zipfile_serialization=False)
    return str(paths[0]), str(paths[1])


@pytest.fixture(scope="module")
def vgg19(original) -> StyleBackend:
    return build_style_backend("vgg19", weights=original, adain_input="unit")


@pytest.fixture(scope="module")
def data() -> Path:
    root = os.environ.get("FEDDG_TEST_DATA")
    if root is None:
        pytest.skip("FEDDG_TEST_DATA does not name a folder with pacs/ and weights/")
    return Path(root)


@pytest.fixture(scope="module")
def distilled_file(data: Path) -> str:
    path = data / "weights" / "vgg19_16x_adain.safetensors"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return str(path)


@pytest.fixture(scope="module")
def distilled(distilled_file: str) -> StyleBackend:
    return build_style_backend("vgg19_16x", weights=distilled_file, style_layer="relu4_1")


def pacs_images(data: Path, domain: str, count: int = 8, side: int = 128) -> Tensor:
    paths = sorted((data / "pacs" / domain).rglob("*.[jp][pn]g"))
    if not paths:
        pytest.skip(f"no PACS images in {data / 'pacs' / domain}")
    images = []
    for path in paths[:: len(paths) // count][:count]:
        with Image.open(path) as image:
            images.append(np.array(image.convert("RGB").resize((side, side))))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255


def random_images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def reference_vgg(tensors: dict[str, Tensor], x: Tensor, layers, pooled=(), doubled=()) -> Tensor:
    """AdaIN's networks written out: convolve, activate, pool or double after the named layers."""
    for index in layers:
        weight, bias = tensors[f"{index}.weight"], tensors[f"{index}.bias"]
        if weight.shape[-1] == 1:
            x = F.conv2d(x, weight, bias)
            continue
        x = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), weight, bias)
        x = x if index == 28 else F.relu(x)
        if index in pooled:
            x = F.max_pool2d(x, 2, ceil_mode=True)
        if index in doubled:
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    return x


# ----------------------------------------------------------------------------------- vgg19


def test_vgg19_has_the_original_size(vgg19) -> None:
    assert vgg19.channels == 512
    assert len(vgg19.encoder) == 31
    assert sum(p.numel() for p in vgg19.encoder.parameters()) == 3_505_740
    assert sum(p.numel() for p in vgg19.decoder.parameters()) == 3_505_219


@pytest.mark.parametrize("size", [(32, 32), (27, 42)])
def test_vgg19_is_the_original_network(original, vgg19, size) -> None:
    images = random_images(2, 3, *size)
    maps = vgg19.encode(images)
    expected = reference_vgg(torch.load(original[0]), images, ENCODER, pooled=(5, 12, 25))
    assert maps.shape == (2, 512, -(-size[0] // 8), -(-size[1] // 8))
    assert_close(maps, expected)
    decoded = reference_vgg(torch.load(original[1]), expected, DECODER, doubled=(1, 14, 21))
    decoded = decoded[..., : size[0], : size[1]].clamp(0, 1)
    assert_close(vgg19.decode(maps, size), decoded)


def test_imagenet_norm_normalises_before_and_undoes_it_after(original, vgg19) -> None:
    backend = build_style_backend("vgg19", weights=original)
    images = random_images(2, 3, 16, 16)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    maps = backend.encode(images)
    assert_close(maps, vgg19.encode((images - mean) / std))
    decoded = backend.decode(maps, (16, 16))
    assert_close(decoded, vgg19.decoder(maps) * std + mean)
    assert decoded.max() > 1


def test_style_layer_is_before_or_after_the_relu(original, vgg19) -> None:
    before = build_style_backend("vgg19", weights=original, adain_input="unit")
    after = build_style_backend(
        "vgg19", weights=original, adain_input="unit", style_layer="relu4_1"
    )
    images = random_images(1, 3, 24, 24)
    maps = before.style_maps(images)
    assert maps.min() < 0
    assert torch.equal(maps.relu(), before.encode(images))
    assert torch.equal(after.style_maps(images), vgg19.encode(images))


def test_one_file_with_both_parts(original, vgg19, tmp_path: Path) -> None:
    encoder, decoder = (torch.load(path) for path in original)
    path = tmp_path / "adain.safetensors"
    both = {f"encoder.{k}": v for k, v in encoder.items()}
    save_file(both | {f"decoder.{k}": v for k, v in decoder.items()}, path)
    backend = build_style_backend("vgg19", weights=str(path), adain_input="unit")
    images = random_images(1, 3, 16, 16)
    style = torch.ones(2, 512)
    assert torch.equal(backend.transfer(images, style, 0.5), vgg19.transfer(images, style, 0.5))
    assert torch.equal(
        build_style_backend("vgg19", weights=(str(path),)).encode(images),
        build_style_backend("vgg19", weights=original).encode(images),
    )


def change(tensors: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    tensors = dict(tensors)
    if case == "12.bias is missing":
        del tensors["12.bias"]
    elif case == "30.weight is unknown":
        tensors["30.weight"] = torch.ones(2)
    elif case == "9.weight is [64, 64, 3, 3] instead of [128, 64, 3, 3]":
        tensors["9.weight"] = tensors["9.weight"][:64]
    elif case == "5.bias holds NaN or Inf":
        tensors["5.bias"] = tensors["5.bias"] / 0
    elif case == "16.weight is zero":
        tensors["16.weight"] = torch.zeros_like(tensors["16.weight"])
    else:
        tensors = {f"features.{key}": tensor for key, tensor in tensors.items()}
    return tensors


@pytest.mark.parametrize(
    "case",
    [
        "12.bias is missing",
        "30.weight is unknown",
        "9.weight is [64, 64, 3, 3] instead of [128, 64, 3, 3]",
        "5.bias holds NaN or Inf",
        "16.weight is zero",
        "0.weight is missing",
    ],
)
def test_another_network_is_refused_in_one_sentence(original, tmp_path: Path, case: str) -> None:
    torch.save(change(state_dict(ENCODER, 0), case), tmp_path / "other.pth")
    with refused(DataError, "other.pth does not hold the encoder", f"{case}") as caught:
        build_style_backend("vgg19", weights=(str(tmp_path / "other.pth"), original[1]))
    assert "\n" not in str(caught.value)


def test_files_in_the_wrong_order_or_number_are_refused(original) -> None:
    with refused(DataError, "encoder's file and then the decoder's"):
        build_style_backend("vgg19", weights=original[::-1])
    with refused(DataError, "one file with encoder"):
        build_style_backend("vgg19", weights=original[0])
    with refused(SettingsError, "3 files"):
        build_style_backend("vgg19", weights=(*original, original[0]))
    with refused(DataError, "vgg19_16x"):
        build_style_backend("vgg19_16x", weights=original)


def test_missing_files_and_code_are_refused(original, tmp_path: Path) -> None:
    with refused(DataError, "there is no weights file"):
        build_style_backend("vgg19", weights=(str(tmp_path / "gone.pth"), original[1]))
    path = tmp_path / "code.pth"
    path.write_bytes(pickle.dumps({"0.weight": print}, protocol=2))
    with refused(DataError, "run code"):
        build_style_backend("vgg19", weights=(str(path), original[1]))


@pytest.mark.parametrize("name", ["vgg19", "vgg19_16x"])
def test_no_weights_names_the_setting_and_the_way_out(name: str) -> None:
    with refused(SettingsError, "hyper.style_weights", "hyper.style=pixel"):
        build_style_backend(name, weights=None)


def test_unknown_names_list_the_known() -> None:
    with refused(SettingsError, "vgg19, vgg19_16x or pixel"):
        build_style_backend("vgg16", weights=None)


# ------------------------------------------------------------------------------- all three


@pytest.fixture(params=["vgg19", "vgg19_16x", "pixel"])
def backend(request) -> StyleBackend:
    if request.param == "vgg19":
        return request.getfixturevalue("vgg19")
    if request.param == "vgg19_16x":
        return request.getfixturevalue("distilled")
    return build_style_backend("pixel", weights=None)


@pytest.mark.parametrize("size", [(9, 9), (16, 24), (17, 30)])
def test_transfer_keeps_the_size_and_the_range(backend, size) -> None:
    images = random_images(2, 3, *size)
    style = pooled_style(image_moments(backend.style_maps(1 - images)))
    assert style.shape == (2, backend.channels)
    result = backend.transfer(images, style, 0.5)
    assert result.shape == images.shape
    assert result.dtype == torch.float32
    assert result.min() >= 0
    assert result.max() <= 1
    assert_close(result[1:], backend.transfer(images[1:], style, 0.5), atol=1e-4, rtol=1e-4)
    maps = adain(backend.encode(images), style[0], style[1], 0.5)
    assert torch.equal(result, backend.decode(maps, size))


def test_backends_are_frozen_and_without_gradients(backend) -> None:
    model = nn.ModuleDict({"style": backend}).train()
    assert not any(module.training for module in model["style"].modules())
    assert not any(parameter.requires_grad for parameter in backend.parameters())
    images = random_images(1, 3, 16, 16).requires_grad_()
    assert not backend.transfer(images, torch.ones(2, backend.channels), 1.0).requires_grad


def test_channels_last_and_autocast(backend) -> None:
    images = random_images(2, 3, 32, 32)
    style = pooled_style(image_moments(backend.style_maps(images.flip(1))))
    result = backend.transfer(images, style, 0.5)
    last = backend.transfer(images.to(memory_format=torch.channels_last), style, 0.5)
    assert_close(last, result, atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = backend.transfer(images, style, 0.5)
    assert mixed.dtype == torch.float32
    assert (mixed - result).abs().mean() < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_device_does_not_matter(original, layout) -> None:
    def style_and_restyled(device: str) -> tuple[Tensor, Tensor]:
        backend = build_style_backend("vgg19", weights=original).to(device)
        images = random_images(6, 3, 40, 40).to(device, memory_format=layout)
        gram, moments = gram_and_moments(lambda: map(backend.style_maps, images.split(4)))
        style = style_from_moments(moments, finch_gram(gram)[-1])
        return style.cpu(), backend.transfer(images, style, 0.5).cpu()

    assert_close(style_and_restyled("cuda"), style_and_restyled("cpu"), atol=1e-2, rtol=1e-2)


def test_building_draws_no_random_numbers(original) -> None:
    state = torch.get_rng_state()
    build_style_backend("vgg19", weights=original)
    assert torch.equal(torch.get_rng_state(), state)


def test_images_too_small_for_vgg_are_refused(vgg19) -> None:
    with refused(SettingsError, "9 pixels", "8 x 20", "pixel"):
        vgg19.encode(torch.zeros(1, 3, 8, 20))


def test_pixel_gives_images_the_colours_of_the_style() -> None:
    backend = build_style_backend("pixel", weights=None)
    images = random_images(3, 3, 32, 32)
    assert torch.equal(backend.transfer(images, torch.ones(2, 3), 0.0), images)
    mean, std = torch.tensor([0.3, 0.5, 0.6]), torch.tensor([0.05, 0.1, 0.02])
    result = backend.transfer(images, torch.stack([mean, std]), 1.0).flatten(2)
    assert_close(result.mean(2), mean.expand(3, -1), atol=1e-4, rtol=0)
    assert_close(result.std(2), std.expand(3, -1), atol=1e-4, rtol=0)
    assert backend.transfer(images, 10 * torch.ones(2, 3), 1.0).max() == 1


# ------------------------------------------------------------------------- distilled weights


def test_distilled_architecture(distilled, distilled_file) -> None:
    assert distilled.channels == 128
    file = {k: v for k, v in load_file(distilled_file).items() if "_aux" not in k}
    state = distilled.state_dict()
    assert state.keys() == file.keys()
    assert all(torch.equal(state[key], file[key]) for key in file)


def test_distilled_takes_unit_images_whatever_the_preset(distilled, distilled_file) -> None:
    images = random_images(1, 3, 32, 32)
    other = build_style_backend("vgg19_16x", weights=distilled_file, adain_input="imagenet_norm")
    assert torch.equal(other.encode(images), distilled.encode(images))
    assert other.decode(20 * other.encode(images), (32, 32)).max() == 1


def test_distilled_autoencoder_restores_photos(distilled, data) -> None:
    photos = pacs_images(data, "photo")
    restored = distilled.decode(distilled.encode(photos), (128, 128))
    assert F.mse_loss(restored, photos) < 0.02


@pytest.mark.parametrize("style_domain", ["sketch", "cartoon", "art_painting"])
def test_distilled_transfer_moves_colours_and_maps_towards_the_style(
    distilled, data, style_domain
) -> None:
    photos = pacs_images(data, "photo")
    maps = distilled.style_maps(pacs_images(data, style_domain))
    style = pooled_style(image_moments(maps))

    def distance(images: Tensor) -> float:
        own = pooled_style(image_moments(distilled.style_maps(images)))
        return float((own - style).norm())

    steps = [distance(distilled.transfer(photos, style, alpha)) for alpha in (0.0, 0.5, 1.0)]
    assert steps[0] > steps[1] > steps[2]
    assert steps[2] < 0.8 * steps[0]


def test_distilled_transfer_to_sketches_whitens_photos(distilled, data) -> None:
    photos = pacs_images(data, "photo")
    style = pooled_style(image_moments(distilled.style_maps(pacs_images(data, "sketch"))))
    half, full = (distilled.transfer(photos, style, alpha).mean() for alpha in (0.5, 1.0))
    assert photos.mean() + 0.1 < half < full - 0.1
