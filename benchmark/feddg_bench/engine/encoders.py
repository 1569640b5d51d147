"""Encoders by name: networks from images to features, and from texts if they have a text tower."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddg_bench.common.errors import SettingsError, in_a_line, unknown
from feddg_bench.config.schema import BACKBONE_NAMES, TIMM, BackboneSettings
from feddg_bench.engine.compatibility import check_image_size
from feddg_bench.models.backbones import build_backbone
from feddg_bench.models.weights import digest, load_tensors
from feddg_bench.plugins import load_object, names

TORCHVISION, OPEN_CLIP, TENSORFLOW = "torchvision:", "open_clip:", "+tf"
KINDS = (f"{TIMM}NAME", f"{TORCHVISION}NAME", f"{OPEN_CLIP}ARCH/TAG")


class Encoder(nn.Module):
    """A frozen ``net`` from images [B, 3, S, S], normalised by ``mean`` and ``std``, to [B, D]."""

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.net = net
        self.mean, self.std = (nn.Buffer(torch.tensor(each)[:, None, None]) for each in (mean, std))

    def forward(self, images: Tensor) -> Tensor:
        """Return features [B, D] of images [B, 3, S, S] in [0, 1]."""
        features: Tensor = self.net((images - self.mean) / self.std)
        return features


def build_encoder(name: str, size: int, weights: Path | None = None) -> nn.Module:
    """Return an encoder in evaluation mode, a module from images [B, 3, S, S] to features [B, D].

    With a text tower, it has a method ``texts`` from texts to features [C, D] and the factor of
    cosines, ``logit_scale``.

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
    plain, kind = name.removesuffix(TENSORFLOW), f"{name.partition(':')[0]}:"
    known = [each for each in BACKBONE_NAMES if each != "features"]
    net: nn.Module
    if plain in known or kind == TIMM:
        settings = BackboneSettings(
            name=plain,
            weights=None if weights is None else str(weights),
            padding="torch" if plain == name else "tf",
        )
        check_image_size(settings, size)
        net = build_backbone(settings, size=size)
    elif kind in (TORCHVISION, OPEN_CLIP):
        build = _torchvision if kind == TORCHVISION else _open_clip
        try:
            net = build(name.removeprefix(kind), size, weights)
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"the encoder {name} needs open_clip: run pip install open_clip_torch"
            ) from error
        except (OSError, RuntimeError, ValueError, LookupError, AttributeError) as error:
            raise SettingsError(
                f"the encoder {name} cannot be built at {size} px ({in_a_line(error)}): give "
                f"another name or --size, or a file with its weights"
            ) from error
    elif name in names("encoder"):
        net = load_object("encoder", name)(size=size, weights=weights)
    else:
        raise SettingsError(unknown("encoder", name, [*known, *KINDS, *names("encoder")]))
    return net.requires_grad_(requires_grad=False).eval()


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
    return Encoder(net, made.mean, made.std)


def _open_clip(name: str, size: int, weights: Path | None) -> Encoder:
    open_clip: Any = import_module("open_clip")

    known = ["/".join(each) for each in open_clip.list_pretrained()]
    if weights is None and name not in known:  # without a tag, weights would be random
        raise SettingsError(unknown("model of open_clip", name, known))
    arch, _, tag = name.partition("/")
    root, quiet = logging.getLogger(), logging.NullHandler()
    root.addHandler(quiet)  # else open_clip's first message would add one that changes all messages
    try:
        model: Any = open_clip.create_model(
            arch, tag if weights is None else str(weights), force_image_size=size
        )
        tokens = open_clip.get_tokenizer(arch)
    finally:
        root.removeHandler(quiet)
    encoder: Any = Encoder(model.visual, model.visual.image_mean, model.visual.image_std)
    encoder.model = model  # so that the text tower is part of the hash
    encoder.texts = lambda texts: model.encode_text(tokens(list(texts)))
    encoder.logit_scale = float(model.logit_scale.detach().exp())
    return encoder  # type: ignore[no-any-return]


def encoder_digest(encoder: nn.Module) -> str:
    """Return the SHA-256 of an encoder's tensors, normalisation included, in hexadecimal."""
    return digest("", {**dict(encoder.named_parameters()), **dict(encoder.named_buffers())})
