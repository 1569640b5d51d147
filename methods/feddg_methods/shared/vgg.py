"""AdaIN's networks: VGG-19 up to relu4_1, its mirror image, and their weights files."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.models.weights import load_tensors

LAYERS = ("11", "12", "21", "22", "31", "32", "33", "34", "41")
"""VGG-19's 3 x 3 convolutions up to conv4_1."""
AFTER_POOLING = ("21", "31", "41")


@dataclass(frozen=True)
class Architecture:
    """An encoder-decoder pair and the keys of its weights files.

    Attributes:
        widths: Output channels of the encoder's `LAYERS`; the decoder mirrors them.
        last_relu: Whether a ReLU follows the decoder's last convolution.
        named_layers: Whether keys name layers, as in ``conv31.weight``; otherwise they hold the
            index in the `nn.Sequential`.
        unused: Regular expression for the keys of parts that are not needed.
    """

    widths: tuple[int, ...]
    last_relu: bool
    named_layers: bool
    unused: str


ARCHITECTURES = {
    "vgg19": Architecture(
        widths=(64, 64, 128, 128, 256, 256, 256, 256, 512),
        last_relu=False,
        named_layers=False,
        unused=r"(3[1-9]|[45]\d)\.",  # the layers after relu4_1
    ),
    "vgg19_16x": Architecture(
        widths=(16, 16, 32, 32, 64, 64, 64, 64, 128),
        last_relu=True,
        named_layers=True,
        unused=r"conv\d+_aux\.",  # heads used only for distillation
    ),
}


def load_pair(name: str, weights: tuple[str, ...] | str) -> tuple[nn.Sequential, nn.Sequential]:
    """Return the encoder and the decoder of the architecture ``name``, on the CPU.

    Args:
        name: A key of `ARCHITECTURES`.
        weights: One file with the tensors ``encoder.*`` and ``decoder.*``, or the encoder's file
            and the decoder's.

    Raises:
        SettingsError: Neither one nor two files.
        DataError: A file is missing, unreadable or holds another network.
    """
    architecture = ARCHITECTURES[name]
    with torch.device("meta"):  # allocates no memory and draws no random numbers
        encoder, decoder = _encoder(architecture), _decoder(architecture)
    for part, network, (source, tensors) in zip(
        ("encoder", "decoder"), (encoder, decoder), _read_pair(weights), strict=True
    ):
        used = {key: t for key, t in tensors.items() if not re.match(architecture.unused, key)}
        _fill(network, used, f"{source} does not hold the {part} of {name}")
    return encoder, decoder


def _encoder(architecture: Architecture) -> nn.Sequential:
    """Return the encoder, 31 modules from the colour scaling to relu4_1."""
    network = nn.Sequential()
    _add_convolution(network, "0", 3, 3, kernel_size=1, architecture=architecture)
    width = 3
    for layer, out in zip(LAYERS, architecture.widths, strict=True):
        if layer in AFTER_POOLING:
            network.append(nn.MaxPool2d(2, ceil_mode=True))
        network.append(nn.ReflectionPad2d(1))
        _add_convolution(network, layer, width, out, kernel_size=3, architecture=architecture)
        network.append(nn.ReLU())
        width = out
    return network


def _decoder(architecture: Architecture) -> nn.Sequential:
    """Return the decoder: the encoder's mirror image with nearest upsampling instead of pooling."""
    network = nn.Sequential()
    outs = (3, *architecture.widths)
    for layer, width, out in list(zip(LAYERS, architecture.widths, outs, strict=False))[::-1]:
        network.append(nn.ReflectionPad2d(1))
        _add_convolution(network, layer, width, out, kernel_size=3, architecture=architecture)
        if layer != LAYERS[0] or architecture.last_relu:
            network.append(nn.ReLU())
        if layer in AFTER_POOLING:
            network.append(nn.Upsample(scale_factor=2, mode="nearest"))
    return network


def _add_convolution(
    network: nn.Sequential,
    layer: str,
    width: int,
    out: int,
    *,
    kernel_size: int,
    architecture: Architecture,
) -> None:
    name = f"conv{layer}" if architecture.named_layers else str(len(network))
    network.add_module(name, nn.Conv2d(width, out, kernel_size))


def _read_pair(weights: tuple[str, ...] | str) -> list[tuple[str, dict[str, Tensor]]]:
    """Return file name and tensors of the encoder and of the decoder."""
    paths = (weights,) if isinstance(weights, str) else weights
    if len(paths) not in (1, 2):
        raise SettingsError(
            f"hyper.style_weights names {len(paths)} files: "
            f"give one with both parts, or the encoder's and then the decoder's"
        )
    files = [(path, load_tensors(path)) for path in paths]
    if len(files) == 2:
        return files
    path, tensors = files[0]
    return [
        (path, {k.removeprefix(part): t for k, t in tensors.items() if k.startswith(part)})
        for part in ("encoder.", "decoder.")
    ]


def _fill(network: nn.Sequential, tensors: dict[str, Tensor], complaint: str) -> None:
    """Load the tensors into the network.

    Raises:
        DataError: They do not fit the network or are not trained weights; the message starts with
            ``complaint``.
    """
    expected = network.state_dict()
    if problems := [
        *(f"{key} is missing" for key in expected if key not in tensors),
        *(f"{key} is unknown" for key in tensors if key not in expected),
        *(
            f"{key} is {list(tensors[key].shape)} instead of {list(tensor.shape)}"
            for key, tensor in expected.items()
            if key in tensors and tensors[key].shape != tensor.shape
        ),
        *(f"{key} holds NaN or Inf" for key, t in tensors.items() if not t.isfinite().all()),
        *(f"{key} is zero" for key, t in tensors.items() if key.endswith("weight") and not t.any()),
    ]:
        raise DataError(
            f"{complaint}: {problems[0]} (problems in all: {len(problems)}); give one file with "
            f"encoder.* and decoder.*, or the encoder's file and then the decoder's"
        )
    network.load_state_dict({key: t.float() for key, t in tensors.items()}, assign=True)
