"""Small networks of the field, from images [B, 3, H, W] to features [B, D], and faster layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def small_cnn() -> nn.Sequential:
    """Return a network for small images on a CPU: 97,680 parameters, 128 features.

    Groups of channels are normalised within each image, not over the batch: clients with few
    images train as well as others, and only parameters need averaging. Strides instead of max
    pooling make it cheap, and deterministic on every device.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((3, 16, 32, 64, 128)):
        layers += [
            nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(values.clamp_(0, 6))
        ctx.save_for_backward(values)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        before: torch.Tensor = torch.ops.aten.hardtanh_backward(gradient, values, 0, 6)
        return before


class InPlaceReLU6(nn.ReLU6):
    """ReLU6 that overwrites its input and keeps only its result for the backward pass.

    PyTorch's layer also keeps the input, in addition to the result that the next layer keeps: a
    third of all that MobileNetV2 keeps, and a twentieth of its time. Results are bitwise equal.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` clamped to [0, 6], in place."""
        if torch._C._are_functorch_transforms_active():  # these cannot work in place
            return F.relu6(values)
        clipped: torch.Tensor = _Clip.apply(values)
        return clipped


class Grey(nn.Module):
    """Keep one of the three equal channels of grey images: [B, 3, H, W] to [B, 1, H, W]."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the first channel."""
        return images[:, :1]


def lenet() -> nn.Sequential:
    """Return LeNet-5 (LeCun et al., 1998) for grey images of 28 px: 60,856 parameters, 84 features.

    With ReLU and max pooling, as is usual today. PPDG names it without details.
    """
    return nn.Sequential(
        Grey(),
        nn.Conv2d(1, 6, kernel_size=5, padding=2),
        nn.MaxPool2d(2),  # pooled before ReLU: the same bits, a quarter of the work
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(inplace=True),
        nn.Linear(120, 84),
        nn.ReLU(inplace=True),
    )


def domainbed_mnist() -> nn.Sequential:
    """Return DomainBed's network for grey digits: 370,560 parameters, 128 features.

    Gulrajani and Lopez-Paz, ICLR 2021: four convolutions, each followed by ReLU and then by group
    normalisation, and the mean over all positions.
    """
    layers: list[nn.Module] = [Grey()]
    for inputs, outputs, stride in ((1, 64, 1), (64, 128, 2), (128, 128, 1), (128, 128, 1)):
        layers += [
            nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1),
            nn.ReLU(inplace=True),
            nn.GroupNorm(8, outputs),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def femnist_cnn() -> nn.Sequential:
    """Return FedDG_Benchmark's network for grey images of 28 px: 512 features.

    Bai et al., ICLR 2024: two convolutions with max pooling and one hidden layer, 1,632,224
    parameters.
    """
    layers: list[nn.Module] = [Grey()]
    for inputs, outputs in pairwise((1, 16, 64)):
        layers += [
            nn.Conv2d(inputs, outputs, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ]
    layers += [nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


LITE0 = (
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 5, 40, 2, 2),
    (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)
"""Stages of EfficientNet-Lite0: expansion, kernel, channels, blocks, stride of the first block."""


class Residual(nn.Sequential):
    """Add the input to the output of the layers."""

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps of the same shape, [B, C, H, W]."""
        made = maps
        for layer in self:
            made = layer(made)
        return maps + made


def efficientnet_lite0() -> nn.Sequential:
    """Return EfficientNet-Lite0 (Google, 2020): 4,652,008 parameters, 1,280 features, 1,000 scores.

    EfficientNet-B0 (Tan and Le, ICML 2019) with ReLU6 and without squeeze and excitation. Its
    tensors are in the order of timm's ``tf_efficientnet_lite0``; it pads as TensorFlow does.
    """
    from torchvision.ops import Conv2dNormActivation

    norm = partial(nn.BatchNorm2d, eps=1e-3)
    layer = partial(Conv2dNormActivation, norm_layer=norm, activation_layer=nn.ReLU6)
    layers = [layer(3, 32, 3, 2)]
    inputs = 32
    for expansion, kernel, outputs, blocks, first in LITE0:
        for stride in (first, *[1] * (blocks - 1)):
            wide = inputs * expansion
            block = [layer(inputs, wide, 1)] if expansion > 1 else []
            block.append(layer(wide, wide, kernel, stride, groups=wide))
            block.append(layer(wide, outputs, 1, activation_layer=None))
            kind = Residual if stride == 1 and inputs == outputs else nn.Sequential
            layers.append(kind(*block))
            inputs = outputs
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    features = nn.Sequential(*layers, layer(inputs, 1280, 1), *pool)
    pad_like_tensorflow(features)
    return nn.Sequential(OrderedDict(features=features, classifier=nn.Linear(1280, 1000)))


def pad_like_tensorflow(net: nn.Module) -> None:
    """Pad square convolutions of stride 2 as TensorFlow's "same" does, in place."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2):
            layer.padding = (0, 0)
            layer.register_forward_pre_hook(_pad_same)


def _pad_same(layer: nn.Conv2d, inputs: tuple[Tensor]) -> Tensor:
    """Pad so that half the positions result, rounded up; an odd pixel goes right and bottom."""
    (left, right), (top, bottom) = (
        (total // 2, total - total // 2)
        for total in (
            max(0, layer.kernel_size[0] - 2 + side % 2) for side in inputs[0].shape[:1:-1]
        )
    )
    return F.pad(inputs[0], (left, right, top, bottom))


# ------------------------------------------------------- depthwise convolutions in bf16


class DepthwiseByCase(TorchFunctionMode):
    """Computes depthwise convolutions under autocast on a CPU with the gradients of `_Convolve`.

    Even on CPUs that multiply in bf16, oneDNN has slow kernels for two of these gradients: that of
    inputs with stride 2 takes 5 to 300 times as long as in float32, that of 5x5 weights 4 to 8
    times.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch, or `_Convolve` in its place."""
        if function is F.conv2d and len(args) == 7 and torch.is_autocast_enabled("cpu"):
            values, weight, bias, stride, padding, dilation, groups = args
            plain = dilation == (1, 1) and isinstance(stride, tuple) and isinstance(padding, tuple)
            if plain and 1 < groups == len(weight) == values.shape[-3] and values.dim() == 4:
                return _convolve(values, weight, bias, stride, padding, False)
        return function(*args, **kwargs or {})


def _convolve(*inputs: Any) -> Tensor:
    """Return what `_Convolve` makes of its inputs, in the type of autocast if that is on."""
    result: Tensor
    if not torch.is_autocast_enabled("cpu"):
        result = _Convolve.apply(*inputs)
        return result
    half = torch.get_autocast_dtype("cpu")
    inputs = tuple(each.to(half) if isinstance(each, Tensor) else each for each in inputs)
    with torch.autocast("cpu", enabled=False):
        result = _Convolve.apply(*inputs)
    return result


# ----------------------------------------------------- depthwise convolutions on small maps

# On a CPU, PyTorch computes their weight gradients with oneDNN. If the kernel is larger than the
# map, this takes 5 to 60 times as long as the products that make up the gradient.

Pair = tuple[int, int]
"""A value for rows and one for columns."""


def sum_depthwise(module: nn.Module) -> None:
    """Let the depthwise convolutions in ``module`` sum their weight gradients on small maps.

    A map is small if a layer's output has fewer pixels than its kernel, such as 4x4 for a kernel of
    5x5. Sums are then up to 60 times faster than the library; on other maps they can be slower.
    The choice affects rounding, so it depends on sizes and never on a measured time.

    Such layers are replaced inside ``module`` by `DepthwiseConv2d` with the same parameters and
    names. Outputs and the gradients of inputs are bitwise unchanged.
    Layers of a subclass of `nn.Conv2d`, such as timm's with TensorFlow's padding, keep the
    library's gradient; so do layers with dilation or with padding other than a number of zeros.
    Calling this twice changes nothing.
    """
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Conv2d and _is_supported(layer):
                setattr(parent, name, DepthwiseConv2d.like(layer))


def _is_supported(layer: nn.Conv2d) -> bool:
    depthwise = 1 < layer.groups == layer.in_channels == layer.out_channels
    zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return depthwise and zeros and layer.dilation == (1, 1)


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution whose weight gradient is summed on a CPU (see `sum_depthwise`)."""

    @classmethod
    def like(cls, layer: nn.Conv2d) -> DepthwiseConv2d:
        """Return a layer with the sizes, parameters and hooks of another, without random draws."""
        channels = layer.in_channels
        kernel, stride, padding = (
            cast(Pair, each) for each in (layer.kernel_size, layer.stride, layer.padding)
        )
        new = cls(
            *(channels, channels, kernel, stride, padding),
            groups=channels,
            bias=False,
            device="meta",
        )
        new.weight, new.bias = layer.weight, layer.bias
        for hook in layer._forward_pre_hooks.values():  # such as padding
            new.register_forward_pre_hook(hook)
        return new.train(layer.training)

    def _conv_forward(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = cast(Pair, self.padding)
        sizes = zip(values.shape[-2:], self.kernel_size, self.stride, padding, strict=True)
        outputs = [(side + 2 * p - kernel) // stride + 1 for side, kernel, stride, p in sizes]
        small = math.prod(outputs) < math.prod(self.kernel_size)
        result: Tensor
        if not (small and values.is_cpu and values.dim() == 4):
            result = super()._conv_forward(values, weight, bias)
            return result
        return _convolve(values, weight, bias, self.stride, padding, True)


class _Convolve(torch.autograd.Function):
    """The library's depthwise convolution, with gradients that are fast in each case.

    In bf16, the gradient of inputs with a stride is computed in float32, and that of 5x5 weights as
    four of 3x3. With ``sums``, the weight gradient is `weight_gradient`. Others are the library's.
    The backward pass consists of differentiable operations, so that it has a gradient itself and
    can be vectorised.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
        sums: bool,  # noqa: ARG004
    ) -> Tensor:
        return F.conv2d(values, weight, bias, stride, padding, 1, weight.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        values, weight, _, ctx.stride, ctx.padding, ctx.sums = inputs
        ctx.save_for_backward(values, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        stride, padding, kernel = ctx.stride, ctx.padding, tuple(weight.shape[2:])
        half = values.dtype == torch.bfloat16
        of_values = of_weight = of_bias = None
        if ctx.needs_input_grad[0] and half and stride != (1, 1):
            like = torch.empty_like(values, dtype=torch.float32)  # only its shape counts
            of_values = _gradient(0, gradient.float(), like, weight.float(), stride, padding)
            of_values = of_values.to(values.dtype)
        elif ctx.needs_input_grad[0]:
            of_values = _gradient(0, gradient, values, weight, stride, padding)
        if ctx.needs_input_grad[1] and ctx.sums:
            of_weight = weight_gradient(values, gradient, kernel, stride, padding)
        elif ctx.needs_input_grad[1] and half and kernel == (5, 5):
            of_weight = _gradient_of_5x5(gradient, values, weight, stride, padding)
        elif ctx.needs_input_grad[1]:
            of_weight = _gradient(1, gradient, values, weight, stride, padding)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum((0, 2, 3))
        return of_values, of_weight, of_bias, None, None, None


def _gradient(
    of: int, gradient: Tensor, values: Tensor, weight: Tensor, stride: Pair, padding: Pair
) -> Tensor:
    """Return the library's gradient of a depthwise convolution's input (0) or weight (1)."""
    found: Tensor = torch.ops.aten.convolution_backward(
        *(gradient, values, weight, None, stride, padding),
        *((1, 1), False, (0, 0), weight.shape[0], (of == 0, of == 1, False)),
    )[of]
    return found


def _gradient_of_5x5(
    gradient: Tensor, values: Tensor, weight: Tensor, stride: Pair, padding: Pair
) -> Tensor:
    """Return a weight gradient from those of the kernel's four corners of 3x3, which overlap."""
    padded = F.pad(values, (padding[1], padding[1], padding[0], padding[0]))
    rows, columns = (
        (count - 1) * step + 3 for count, step in zip(gradient.shape[2:], stride, strict=True)
    )
    top, bottom = (
        torch.cat(
            [
                _gradient(
                    *(1, gradient, padded[:, :, y : y + rows, x : x + columns]),
                    *(weight[:, :, :3, :3], stride, (0, 0)),
                )[..., x // 2 :]
                for x in (0, 2)
            ],
            -1,
        )
        for y in (0, 2)
    )
    return torch.cat([top, bottom[:, :, 1:]], -2)


def weight_gradient(
    values: Tensor, gradient: Tensor, kernel: Pair, stride: Pair, padding: Pair
) -> Tensor:
    """Return the gradient of a depthwise convolution's weight, [C, 1, *kernel].

    Its entry at a kernel position sums, over images and output pixels, the gradient times the input
    pixel at this position. Sums are computed in float32 at least.

    Args:
        values: The input, [B, C, H, W].
        gradient: Gradient of the output, [B, C, h, w].
        kernel: Sides of the kernel.
        stride: Stride of the convolution.
        padding: Zeros at each side.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    inputs, outputs = (
        tensor.to(dtype).permute(0, 2, 3, 1).contiguous() for tensor in (values, gradient)
    )
    none = inputs.new_zeros(inputs.shape[-1])
    rows, columns = (
        [_meeting(place, *sizes) for place in range(side)]
        for side, *sizes in zip(
            kernel, inputs.shape[1:3], outputs.shape[1:3], stride, padding, strict=True
        )
    )
    sums = [
        (inputs[:, y, x] * outputs[:, v, u]).sum((0, 1, 2)) if v.stop and u.stop else none
        for y, v in rows
        for x, u in columns
    ]
    return torch.stack(sums, 1).view(-1, 1, *kernel).to(values.dtype)


def _meeting(
    place: int, inputs: int, outputs: int, stride: int, padding: int
) -> tuple[slice, slice]:
    """Return the input and the output pixels that meet at a kernel position, along one side.

    Both are ``slice(0, 0)`` if the position meets only zeros.
    """
    shift = place - padding
    first = max(0, math.ceil(-shift / stride))
    end = min(outputs, (inputs - 1 - shift) // stride + 1)
    if first >= end:
        return slice(0, 0), slice(0, 0)
    start = first * stride + shift
    return slice(start, start + (end - 1 - first) * stride + 1, stride), slice(first, end)
