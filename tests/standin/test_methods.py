"""Every method, style back end, precision and kind of batch normalisation on a stand-in GPU.

Results must equal the CPU's bit for bit. Crops are off, since a GPU resizes in float32 (see
`feddg_bench.data.augment`); a test below checks crops with a tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from feddg_bench.config.schema import BACKBONE_NAMES, AugmentSettings, BackboneSettings
from feddg_bench.core.messages import decode, encode
from feddg_bench.data.augment import Augment
from feddg_bench.data.client_images import ImageBank
from feddg_bench.models.backbones import build_backbone
from feddg_bench.testing import start_toy_run, toy_federation
from feddg_methods.shared.style_transfer import build_style_backend
from tests.helpers import PLAIN, bitwise, hyper, numbers, pixel, rng
from tests.standin.conftest import METHODS, UNCROPPED

BF16 = {"train": {"precision": "bf16-mixed"}}
KEPT = {"train": {"optimizer_state": "persist"}}
ONE, TWO = "standin:0", "standin:1"

CASES = [
    *METHODS.items(),
    ("pardon", pixel(transfer="cached")),
    ("pardon", pixel(preset="artefact")),
    ("fedccrl", hyper(variant="released")),
    ("fediir", hyper(head="mlp")),
    ("feddg_ga", hyper(variant="pardon")),
    ("fedavg", KEPT),
]
THREE = {"federation": {"weighting": "uniform", "per_round": 3}}
PROTECTED = [
    ("scaffold", {"privacy": {"aggregation": "secure"}}),
    ("fedgma", {"privacy": {"aggregation": "secure", "dropout": 0.1}}),
    ("fedavg", {"privacy": {"mechanism": "dp_client", "noise_multiplier": 0.01}}),
    ("pardon", {"privacy": {"mechanism": "dp_style"}} | pixel()),
]

pytestmark = [pytest.mark.usefixtures("standin"), pytest.mark.nightly]


def compare(name: str, *layers: Any) -> None:
    """Assert that two rounds on a device, interrupted after the first, equal two on the CPU."""
    here = start_toy_run(name, UNCROPPED, *layers)
    expected = numbers(here.rounds(2))
    stopped = start_toy_run(name, UNCROPPED, *layers, device=ONE)
    first = numbers(stopped.rounds(1))
    resumed = start_toy_run(name, UNCROPPED, *layers, device=TWO)
    resumed.server.restore(decode(encode(stopped.server.state())))
    assert first + numbers(resumed.rounds(2)) == expected
    assert {str(tensor.device) for tensor in resumed.server.weights.values()} == {TWO}
    assert encode(resumed.server.state()) == encode(here.server.state())


@pytest.mark.parametrize(("name", "layer"), CASES, ids=str)
def test_training_evaluation_checkpoint_and_resume(name, layer) -> None:
    compare(name, layer)


@pytest.mark.parametrize(("name", "layer"), PROTECTED, ids=str)
def test_protection(name, layer) -> None:
    pytest.importorskip("opacus", reason="noise needs feddg-bench[privacy]")
    compare(name, THREE, layer)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedadg", "fedccrl", "feddg_ga", "fediir", "fedsam", "fpl", "pardon"]
)
def test_bf16(name) -> None:
    compare(name, METHODS[name], BF16)


@pytest.mark.parametrize(("bn", "folded"), [("frozen", False), ("frozen", True), ("local", False)])
def test_batch_normalisation(bn, folded) -> None:
    layer = {
        "backbone": {"name": "resnet18", "pretrained": False},
        "federation": {"bn": bn, "per_round": 1},
        "train": {"fold_batch_norm": folded},
        "evaluation": {"fuse_batch_norm": folded},
    }
    here, there = (
        start_toy_run("fedavg", UNCROPPED, layer, device=device) for device in ("cpu", TWO)
    )
    assert numbers(there.rounds(1)) == numbers(here.rounds(1))
    assert encode(there.server.state()) == encode(here.server.state())


SIDES = {"lenet": 28, "femnist_cnn": 28, "domainbed_mnist": 28}


@pytest.mark.parametrize("name", [name for name in BACKBONE_NAMES if name != "features"])
def test_backbones_with_deterministic_algorithms(name) -> None:
    """The networks are moved to the device after use on the CPU."""
    settings = BackboneSettings(name=name, pretrained=False)
    images = torch.rand(2, 3, *2 * [SIDES.get(name, 32)], generator=rng())
    net = build_backbone(settings).eval()
    found = []
    torch.use_deterministic_algorithms(True)
    for device in ("cpu", TWO):
        net.to(device).zero_grad()
        features = net(images.to(device))
        features.sum().backward()
        found.append([features.detach().cpu(), *(p.grad.cpu().clone() for p in net.parameters())])
    bitwise(*found)


# ----------------------------------------------------------------------------------- data


def test_images_stay_in_the_store_where_a_device_is_too_small(monkeypatch) -> None:
    federation = toy_federation()
    device = torch.device(ONE)
    large = ImageBank(federation, device)
    monkeypatch.setenv("STANDIN_FREE_GIB", "0.0001")  # 107 kB, of which the images take 46 kB
    small, shared = ImageBank(federation, device), ImageBank(federation, device, sharing=3)
    monkeypatch.setenv("STANDIN_FREE_GIB", "0.0002")
    middle = ImageBank(federation, device)
    assert [str(bank.images.device) for bank in (large, small, shared, middle)] == [
        ONE,
        "cpu",
        "cpu",
        ONE,
    ]
    index = torch.tensor([3, 1])
    for bank in (large, small):
        images, labels = bank.take(index)
        assert {str(images.device), str(labels.device)} == {ONE}
        bitwise(images.cpu(), torch.from_numpy(federation.images)[index])


def test_crops_agree_to_a_grey_level() -> None:
    images = torch.randint(0, 256, (8, 20, 20, 3), dtype=torch.uint8, generator=rng())
    colourless = {**PLAIN["augment"], "crop_scale": (0.7, 1.0), "flip": 0.5}
    augment = Augment(AugmentSettings.model_validate(colourless))
    there = augment(images.to(TWO), rng(1))
    assert str(there.device) == TWO
    assert float((there.cpu() - augment(images, rng(1))).abs().max()) < 1.01 / 255


def test_the_same_seed_gives_the_same_numbers_with_crops() -> None:
    one, two = (start_toy_run("fedavg", device=device) for device in (ONE, TWO))
    assert numbers(one.rounds(1)) == numbers(two.rounds(1))


# --------------------------------------------------------------------- style back ends


@pytest.fixture(params=["pixel", "vgg19_16x"])
def weights(request) -> tuple[str, str | None]:
    """Return a style back end's name and its file; skip if the file is absent."""
    if request.param == "pixel":
        return "pixel", None
    path = request.getfixturevalue("test_data") / "weights" / "vgg19_16x_adain.safetensors"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return request.param, str(path)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_style_back_ends(weights, precision) -> None:
    name, file = weights
    images = torch.rand(2, 3, 32, 32, generator=rng())
    found = []
    for device in ("cpu", TWO):
        backend = build_style_backend(name, weights=file).to(device)
        with torch.autocast(torch.device(device).type, precision, enabled=precision is not None):
            style = backend.style_maps(images.flip(0).to(device)).mean(dim=(2, 3))
            moments = torch.stack([style[0], style[0].abs() + 0.1])
            found.append(backend.transfer(images.to(device), moments, 0.5).cpu())
    bitwise(*found)


@pytest.mark.parametrize("name", ["pardon", "ccst"])
def test_methods_with_weights_of_a_style_network(weights, name) -> None:
    style, file = weights
    if file is None:
        pytest.skip("pixel styles are among the methods above")
    compare(name, hyper(style=style, style_weights=file), {"federation": {"per_round": 1}})
