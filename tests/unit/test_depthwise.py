"""Weight gradients of depthwise convolutions as sums of shifted products."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from feddg_bench.config.schema import BackboneSettings, Resources
from feddg_bench.data.federated import synthetic_federation
from feddg_bench.engine.construction import build_method
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.models.backbones import Backbone, build_backbone
from feddg_bench.models.batch_norm import foldable, folded, freeze_batch_norm
from feddg_bench.models.networks import (
    DepthwiseByCase,
    DepthwiseConv2d,
    sum_depthwise,
    weight_gradient,
)
from feddg_bench.runs.driver import train as train_run
from feddg_bench.runs.request import Request
from feddg_bench.runs.setup import start

CASES = [
    # sides of the input, kernel, stride, padding; the output has fewer pixels than the kernel
    ((2, 2), 3, 1, 1),
    ((1, 1), 3, 1, 1),
    ((2, 4), 3, 1, 1),
    ((4, 4), 5, 1, 2),
    ((2, 2), 5, 1, 2),
    ((3, 5), 5, 1, 2),
    ((5, 5), 5, 1, 0),
    ((4, 4), 3, 2, 1),
    ((2, 2), 3, 2, 1),
    ((5, 5), 3, 2, 0),
    ((7, 7), 5, 2, 0),
    ((7, 5), 5, 2, 2),
    ((4, 4), 7, 1, 3),
    ((3, 3), 5, (2, 1), (1, 2)),
]
LAYOUTS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}
FRAME: dict[str, Any] = {
    "data": {"image_size": 32},
    "backbone": {"name": "mobilenet_v2", "pretrained": False},
    "partition": {"clients": 2},
    "federation": {"rounds": 1, "per_round": None, "bn": "frozen"},
}
SGD = {"optimizer": "sgd", "lr": 0.1}


def pair(
    kernel: int, stride: Any, padding: Any, *, bias: bool = True, channels: int = 6
) -> tuple[nn.Conv2d, nn.Conv2d]:
    """Return PyTorch's layer and the summing one, with the same small integer weights."""
    plain = nn.Conv2d(
        channels, channels, kernel, stride, padding, groups=channels, bias=bias
    ).requires_grad_()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape))
    sums = nn.Sequential(copy.deepcopy(plain))
    sum_depthwise(sums)
    assert type(sums[0]) is DepthwiseConv2d
    return plain, sums[0]


def gradients(layer: nn.Module, values: Tensor, of: Tensor | None = None) -> list[Tensor]:
    """Return the output, and the gradients of the input and the parameters."""
    leaf = values.clone().requires_grad_()
    output = layer(leaf)
    of = torch.ones_like(output) if of is None else of
    return [output.detach(), *torch.autograd.grad(output, [leaf, *layer.parameters()], of)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_whole_numbers_are_exact(case: Any, layout: str, bias: bool) -> None:
    sides, *sizes = case
    plain, sums = pair(*sizes, bias=bias)
    values = torch.randint(-5, 6, (3, 6, *sides)).float().contiguous(memory_format=LAYOUTS[layout])
    of = torch.randint(-5, 6, plain(values).shape).float()
    for expected, found in zip(
        gradients(plain, values, of), gradients(sums, values, of), strict=True
    ):
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_real_numbers_differ_by_last_bits(case: Any) -> None:
    sides, *sizes = case
    plain, sums = pair(*sizes)
    values = torch.randn(32, 6, *sides).contiguous(memory_format=torch.channels_last)
    of = torch.randn_like(plain(values))
    for expected, found in zip(
        gradients(plain, values, of), gradients(sums, values, of), strict=True
    ):
        assert float((found - expected).norm()) < 1e-6 * float(expected.norm())


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_first_and_second_derivatives(case: Any) -> None:
    sides, *sizes = case
    _, sums = pair(*sizes, channels=2)
    names, parameters = zip(*sums.double().named_parameters(), strict=True)

    def function(values: Tensor, *given: Tensor) -> Tensor:
        result: Tensor = functional_call(sums, dict(zip(names, given, strict=True)), (values,))
        return result

    values = torch.randn(2, 2, *sides, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (values, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (values, *parameters), fast_mode=True)


@pytest.mark.parametrize("frozen", ["weight", "values"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    _, sums = pair(3, 1, 1)
    sums.weight.requires_grad_(frozen != "weight")
    values = torch.randn(2, 6, 2, 2, requires_grad=frozen != "values")
    sums(values).sum().backward()
    assert (sums.weight.grad is None, values.grad is None) == (
        frozen == "weight",
        frozen == "values",
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vectorised_over_models_and_images(case: Any) -> None:
    """Every model has its own weights and images."""
    sides, *sizes = case
    layers = [pair(*sizes) for _ in range(3)]
    values = torch.randn(3, 4, 6, *sides)
    names = [name for name, _ in layers[0][1].named_parameters()]
    stacks = {n: torch.stack([s.get_parameter(n).detach() for _, s in layers]) for n in names}

    def loss(parameters: dict[str, Tensor], images: Tensor) -> Tensor:
        result: Tensor = functional_call(layers[0][1], parameters, (images,)).square().sum()
        return result

    inside = vmap(grad(loss))(stacks, values)
    leaves = {name: stack.clone().requires_grad_() for name, stack in stacks.items()}
    outside = torch.autograd.grad(vmap(loss)(leaves, values).sum(), list(leaves.values()))
    for i, (plain, _) in enumerate(layers):
        plain.zero_grad()
        plain(values[i]).square().sum().backward()
        for k, name in enumerate(names):
            expected = plain.get_parameter(name).grad
            assert expected is not None
            for found in (inside[name][i], outside[k][i]):
                assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())


class _Kernels(TorchDispatchMode):
    """Notes depthwise gradients: of what and in which type, the kernel's side and the stride."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, int, Any]] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution_backward" in str(op):
            gradient, _, weight, _, stride = args[:5]
            of_values, of_weight, _ = args[-1]
            kind = "bf16" if gradient.dtype == torch.bfloat16 else "float32"
            for of, wanted in (("values", of_values), ("weight", of_weight)):
                if wanted and weight.shape[1] == 1:
                    self.found.add((f"{of} in {kind}", weight.shape[-1], stride[0]))
        return op(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("network", "sides", "folds"),
    [
        ("mobilenet_v2", {3}, False),
        pytest.param("efficientnet_lite0", {3, 5}, "auto", marks=pytest.mark.nightly),
    ],
)
def test_a_round_in_bf16_takes_no_slow_kernel(
    network: str, sides: set[int], folds: bool | str
) -> None:
    """Inputs of strided layers have gradients in float32; weights of 5x5 have those of 3x3."""
    train = {"precision": "bf16-mixed", "fold_batch_norm": folds}
    backbone = {"name": network, "pretrained": False}
    settings = {**FRAME, "backbone": backbone, "train": {**SGD, **train}}
    (plan,) = Request("fedavg", scenario="ip-o-c", settings=settings).plan(check=False)
    run = start(plan, synthetic_federation(2, 2, 32, 7), SerialExecutor(), Resources(device="cpu"))
    with _Kernels() as kernels:
        train_run(run)
    assert kernels.found == {
        *(("values in bf16", side, 1) for side in sides),
        *(("values in float32", side, 2) for side in sides),
        *(("weight in bf16", 3, stride) for stride in (1, 2)),
    }


@pytest.mark.parametrize(
    "case",
    [((8, 8), 3, 1, 1), ((8, 8), 3, 2, 1), ((9, 7), 5, 1, 2), ((9, 7), 5, 2, 0), ((4, 4), 5, 1, 2)],
    ids=str,
)
def test_gradients_in_bf16_are_exact_for_whole_numbers(case: Any) -> None:
    """Up to 256, bf16 has all of them; sums are in float32."""
    sides, *sizes = case
    values = torch.randint(-1, 2, (2, 6, *sides)).bfloat16()
    for layer in pair(*sizes):
        of = torch.randint(-1, 2, layer(values.float()).shape).bfloat16()
        with torch.autocast("cpu", torch.bfloat16), DepthwiseByCase():
            found = gradients(layer, values, of)
        assert found[0].dtype == torch.bfloat16
        for ours, exact in zip(found, gradients(layer, values.float(), of.float()), strict=True):
            assert torch.equal(ours.float(), exact)


@pytest.mark.parametrize("stride", [1, 2])
def test_second_derivatives_in_bf16(stride: int) -> None:
    """They are those of float32, but for bf16's rounding."""
    layer, _ = pair(5, stride, 2)
    values = torch.randn(4, 6, 9, 9).bfloat16().float().requires_grad_()
    found = []
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half), DepthwiseByCase():
            output = layer(values).float()
        first = torch.autograd.grad(
            output.square().sum(), [values, layer.weight], create_graph=True
        )
        length = torch.stack([gradient.square().sum() for gradient in first]).sum()
        found.append(torch.autograd.grad(length, [values, layer.weight]))
    for ours, exact in zip(found[1], found[0], strict=True):
        assert float((ours - exact).norm()) < 0.02 * float(exact.norm())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=2, groups=4, dilation=2),
        nn.Conv2d(4, 4, 3, padding="same", groups=4),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular"),
        type("Own", (nn.Conv2d,), {})(4, 4, 3, padding=1, groups=4),
    ],
)
def test_other_layers_stay_as_they_are(layer: nn.Conv2d) -> None:
    kind = type(layer)
    sum_depthwise(layer)
    assert type(layer) is kind


def test_large_maps_keep_the_librarys_bits() -> None:
    plain, sums = pair(3, 1, 1)
    with torch.no_grad():
        sums.weight.add_(torch.randn_like(sums.weight))
    plain.load_state_dict(sums.state_dict())
    values = torch.randn(4, 6, 4, 4)
    for expected, found in zip(gradients(plain, values), gradients(sums, values), strict=True):
        assert torch.equal(found, expected)


# ------------------------------------------------------------------------------ whole networks


def networks(name: str) -> Iterator[Backbone]:
    """Yield a frozen network with random weights in float64, and its summing copy."""
    net = build_backbone(BackboneSettings(name=name, pretrained=False)).double()
    for layer in net.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    freeze_batch_norm(net)
    sums = copy.deepcopy(net)
    sum_depthwise(sums)
    sum_depthwise(sums)
    yield net
    yield copy.deepcopy(sums)


@pytest.mark.parametrize(
    ("name", "layers", "layout", "folds"),
    [("mobilenet_v2", 17, "nchw", False), ("efficientnet_lite0", 16, "nhwc", True)],
)
def test_networks_have_the_same_gradients(name: str, layers: int, layout: str, folds: bool) -> None:
    """Also the gradient of a gradient's squared norm, which gradient inversion needs."""
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    images = images.contiguous(memory_format=LAYOUTS[layout])
    found = []
    for net in networks(name):
        net.to(memory_format=LAYOUTS[layout])
        found.append(_two_gradients(net, images, folds))
    assert sum(type(layer) is DepthwiseConv2d for layer in net.modules()) == layers
    assert list(found[0]) == list(found[1])
    for key, expected in found[0].items():
        torch.testing.assert_close(
            found[1][key], expected, rtol=0, atol=1e-9 * float(expected.norm()), msg=key
        )


def _two_gradients(net: Backbone, images: Tensor, folds: bool) -> dict[str, Tensor]:
    names, parameters = zip(*net.named_parameters(), strict=True)
    leaf = images.clone().requires_grad_()
    with folded(foldable(net, images[:1]) if folds else []):
        features = net.train()(leaf)
        first = torch.autograd.grad(features.square().sum(), parameters, create_graph=True)
        length = torch.stack([gradient.square().sum() for gradient in first]).sum()
        (second,) = torch.autograd.grad(length, leaf)
    named = {**dict(zip(names, first, strict=True)), "features": features, "images": second}
    return {name: tensor.detach() for name, tensor in named.items()}


def test_timms_networks() -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("mobilenetv3_small_050", num_classes=0)
    names = list(net.state_dict())
    sum_depthwise(net)
    assert list(net.state_dict()) == names
    assert sum(type(layer) is DepthwiseConv2d for layer in net.modules()) == 11
    net(torch.rand(2, 3, 32, 32)).sum().backward()


# ---------------------------------------------------------------------------------------- runs


def test_it_is_off_unless_asked_for() -> None:
    for on in (False, True):
        given = {"depthwise_sums": True} if on else {}
        method = build_method("fedavg", num_classes=3, backbone="mobilenet_v2", **given)
        found = [layer for layer in method.modules() if isinstance(layer, DepthwiseConv2d)]
        assert len(found) == (17 if on else 0)


def test_a_round_takes_sums_where_maps_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def noted(values: Tensor, gradient: Tensor, *sizes: Any) -> Tensor:
        shapes.append((*gradient.shape[1:], sizes[0][0]))
        return weight_gradient(values, gradient, *sizes)

    monkeypatch.setattr("feddg_bench.models.networks.weight_gradient", noted)

    def trained(**given: Any) -> Tensor:
        settings = {**FRAME, "train": {**SGD, **given}}
        (plan,) = Request("fedavg", scenario="ip-o-c", settings=settings).plan(check=False)
        federation = synthetic_federation(2, 4, 32, 7)
        run = start(plan, federation, SerialExecutor(), Resources(device="cpu"))
        train_run(run)
        return torch.cat([run.server.weights[name].flatten() for name in run.method.trainable])

    plain = trained()
    assert shapes == []
    sums = trained(depthwise_sums=True)
    assert float((plain - sums).norm()) < 1e-6 * float(plain.norm())
    assert set(shapes) == {
        *((960, 1, 1, 3), (576, 1, 1, 3)),
        *((576, 2, 2, 3), (384, 2, 2, 3), (192, 2, 2, 3)),
    }
