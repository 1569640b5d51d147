"""Encoders by name: networks from images to features, and from texts if they have a text tower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddg_bench.common.errors import SettingsError, in_a_line, unknown
from feddg_bench.config.schema import BACKBONE_NAMES, TIMM, BackboneSettings
from feddg_bench.models.backbones import NORMALISATIONS, Normalisation, build_backbone
from feddg_bench.models.suitability import check_sides
from feddg_bench.models.weights import digest, load_tensors
from feddg_bench.plugins import load_object, names

TORCHVISION, OPEN_CLIP, TENSORFLOW = "torchvision:", "open_clip:", "+tf"
KINDS = (f"{TIMM}NAME", f"{TORCHVISION}NAME", f"{OPEN_CLIP}ARCH/TAG")


class Encoder(nn.Module):
    """A frozen network.

    Attributes:
        texts: Maps texts to features [C, D]; ``None`` without a text tower.
        logit_scale: Factor of cosines between features of images and of texts.

    Args:
        net: Maps images [B, 3, S, S] to features [B, D].
        normalisation: Mean and standard deviation that ``net`` expects.
    """

    mean: Tensor
    std: Tensor
    texts: Callable[[Sequence[str]], Tensor] | None = None
    logit_scale: float = 100.0

    def __init__(self, net: nn.Module, normalisation: Normalisation) -> None:
        super().__init__()
        self.net = net
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in normalisation)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return features [B, D] of images [B, 3, S, S] in [0, 1]."""
        features: Tensor = self.net((images - self.mean) / self.std)
        return features


def build_encoder(name: str, size: int, weights: Path | None = None) -> nn.Module:
    """Return an encoder in evaluation mode, a module from images [B, 3, S, S] to features [B, D].

    Args:
        name: A backbone of the suite, with ``+tf`` for TensorFlow's padding; one of `KINDS`; or an
            entry point of the group ``feddg_bench.encoders``, a function of ``size`` and
            ``weights`` that returns such a module.
        size: Side S of the images in pixels, in [0, 1].
        weights: File of its weights; default those that the name's package has.

    Raises:
        SettingsError: If the name is unknown, a package is missing, or weights do not fit.
        DataError: If the file of weights cannot be read.
    """
    kind, _, rest = name.partition(":")
    known = [each for each in BACKBONE_NAMES if each != "features"]
    net: nn.Module
    if name.removesuffix(TENSORFLOW) in known or name.startswith(TIMM):
        values = {
            "name": name.removesuffix(TENSORFLOW),
            "weights": None if weights is None else str(weights),
            "padding": "tf" if name.endswith(TENSORFLOW) else "torch",
        }
        settings = BackboneSettings(**values)
        check_sides(settings, size)
        net = build_backbone(settings, size=size)
    elif f"{kind}:" in (TORCHVISION, OPEN_CLIP) and rest:
        if find_spec(kind) is None:
            raise SettingsError(f"the encoder {name} needs {kind}: run pip install {_PIP[kind]}")
        try:
            net = (_torchvision if kind == "torchvision" else _open_clip)(rest, size, weights)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise SettingsError(
                f"the encoder {name} cannot be built at {size} px ({in_a_line(error)}): give "
                f"another name or --size, or a file with its weights"
            ) from error
    elif name in names("encoder"):
        net = load_object("encoder", name)(size=size, weights=weights)
    else:
        raise SettingsError(unknown("encoder", name, [*known, *KINDS, *names("encoder")]))
    return net.requires_grad_(requires_grad=False).eval()


_PIP = {"torchvision": "torchvision", "open_clip": "open_clip_torch"}


def _torchvision(name: str, size: int, weights: Path | None) -> Encoder:
    from torchvision.models import get_model, get_model_weights

    own = get_model_weights(name).DEFAULT
    more = {"image_size": size} if name.startswith("vit_") else {}
    net = get_model(name, weights=own if weights is None else None, **more)
    if weights is not None:
        net.load_state_dict(load_tensors(weights))
    linear = [each for each, layer in net.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ValueError("its classifier is no linear layer")
    net.set_submodule(linear[-1], nn.Identity())
    made = own.transforms()
    mean, std = NORMALISATIONS["imagenet"]
    return Encoder(net, (tuple(getattr(made, "mean", mean)), tuple(getattr(made, "std", std))))


def _open_clip(name: str, size: int, weights: Path | None) -> Encoder:
    open_clip: Any = import_module("open_clip")

    arch, _, tag = name.partition("/")
    if arch not in (known := open_clip.list_models()):
        raise SettingsError(unknown("architecture of open_clip", arch, known))
    tags = open_clip.list_pretrained_tags_by_model(arch)
    if weights is None and tag not in tags:
        raise SettingsError(
            f"open_clip has no weights {tag!r} of {arch}; it has "
            f"{', '.join(tags) or 'none'}: name one of them, or give a file with --weights"
        )
    with _root_handlers_kept():
        model: Any = open_clip.create_model(
            arch, tag if weights is None else str(weights), force_image_size=size
        )
        tokens = open_clip.get_tokenizer(arch)
    encoder = Encoder(model.visual, (model.visual.image_mean, model.visual.image_std))
    encoder.model = model  # so that the text tower is part of the hash
    encoder.texts = lambda texts: model.encode_text(tokens(list(texts)))
    encoder.logit_scale = float(model.logit_scale.detach().exp())
    return encoder


@contextmanager
def _root_handlers_kept() -> Iterator[None]:
    """Keep a package that logs by the root logger from choosing how all messages look."""
    root = logging.getLogger()
    before = root.handlers[:]
    root.addHandler(logging.NullHandler())  # else its first message would add another
    try:
        yield
    finally:
        root.handlers[:] = before


def encoder_digest(encoder: nn.Module) -> str:
    """Return the SHA-256 of an encoder's tensors, normalisation included, in hexadecimal."""
    return digest("", {**dict(encoder.named_parameters()), **dict(encoder.named_buffers())})
