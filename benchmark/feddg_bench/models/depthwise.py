"""Weight gradients of depthwise convolutions on small maps, as sums of shifted products.

On a CPU, PyTorch leaves these gradients to oneDNN. Where the kernel is larger than the map, this
takes 5 to 60 times as long as the products of which the gradient consists.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[int, int]
"""Of rows and columns."""


def sum_depthwise(module: nn.Module) -> None:
    """Let the depthwise convolutions in ``module`` sum their weight gradients on small maps.

    A map is small if a layer's output has fewer pixels than its kernel, such as 4x4 for a kernel of
    5x5. Sums are then up to 60 times faster than the library; on other maps they can be slower.
    The choice decides last bits, so that it follows from sizes and never from a measured time.

    Such layers are replaced inside ``module`` by `DepthwiseConv2d` with the same parameters and
    names. Outputs and the gradients of inputs keep their bits.
    Layers of a subclass of `nn.Conv2d` keep the library's gradient, for example timm's that pad as
    TensorFlow does; so do layers with dilation or with another padding than a number of zeros.
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
        """Return a layer with the sizes, parameters and hooks of another; draws no number."""
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
        if torch.is_autocast_enabled("cpu"):  # the function below needs one type, as its kernels do
            dtype = torch.get_autocast_dtype("cpu")
            values, weight = values.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        result = _Convolve.apply(values, weight, bias, self.stride, padding)
        return result


class _Convolve(torch.autograd.Function):
    """The library's depthwise convolution and input gradient, with `weight_gradient`.

    The backward pass consists of differentiable operations, so that it has a gradient itself and
    can be vectorised.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        values: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> Tensor:
        return F.conv2d(values, weight, bias, stride, padding, 1, weight.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        values, weight, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(values, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        stride, padding = ctx.stride, ctx.padding
        of_values = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_values = torch.ops.aten.convolution_backward(
                *(gradient, values, weight, None, stride, padding),
                *((1, 1), False, (0, 0), weight.shape[0], (True, False, False)),
            )[0]
        if ctx.needs_input_grad[1]:
            kernel = (weight.shape[2], weight.shape[3])
            of_weight = weight_gradient(values, gradient, kernel, stride, padding)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum((0, 2, 3))
        return of_values, of_weight, of_bias, None, None


def weight_gradient(
    values: Tensor, gradient: Tensor, kernel: Pair, stride: Pair, padding: Pair
) -> Tensor:
    """Return the gradient of a depthwise convolution's weight, [C, 1, *kernel].

    Its entry at a place of the kernel sums, over images and output pixels, the gradient times the
    input pixel that this place meets there. Sums are of float32 at least.

    Args:
        values: The input, [B, C, H, W].
        gradient: Of the output, [B, C, h, w].
        kernel: Its sides.
        stride: Of the convolution.
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
    """Return the input and the output pixels that meet at a place of the kernel, along one side.

    Both are ``slice(0, 0)`` if it meets zeros alone.
    """
    shift = place - padding
    first = max(0, math.ceil(-shift / stride))
    end = min(outputs, (inputs - 1 - shift) // stride + 1)
    if first >= end:
        return slice(0, 0), slice(0, 0)
    start = first * stride + shift
    return slice(start, start + (end - 1 - first) * stride + 1, stride), slice(first, end)
