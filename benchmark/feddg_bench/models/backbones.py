"""Backbones by name: images to features, normalising their own input, RGB in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path, PurePosixPath

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import BackboneSettings
from feddg_bench.models.weights import load_tensors

NORMALISATIONS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
"""Mean and standard deviation of the channels red, green, blue."""


class Backbone(nn.Module):
    """A feature extractor.

    Attributes:
        num_features: D, the width of its output.
        net: The network up to global pooling, with torchvision's names inside.
        projection: Linear layer on the pooled features, or the identity.

    Args:
        net: [B, C, H, W] to [B, ``width``].
        width: Features that ``net`` gives.
        projection: Width of the linear layer, 0 for none.
        normalisation: A key of `NORMALISATIONS`.
        channels: C; other numbers than 3 go with ``none``.
    """

    mean: torch.Tensor
    std: torch.Tensor
    _spread: tuple[torch.Tensor, torch.Tensor] | None

    def __init__(
        self,
        net: nn.Module,
        width: int,
        projection: int,
        normalisation: str,
        channels: int = 3,
    ) -> None:
        super().__init__()
        mean, std = map(torch.tensor, NORMALISATIONS[normalisation])
        if channels != 3:
            mean, std = mean[:1].expand(channels).clone(), std[:1].expand(channels).clone()
        # Constants: they neither travel nor are averaged, hence not in the state dict.
        self.register_buffer("mean", mean.view(-1, 1, 1), persistent=False)
        self.register_buffer("std", std.view(-1, 1, 1), persistent=False)
        self._spread = None
        self.net = net
        self.projection = nn.Linear(width, projection) if projection else nn.Identity()
        self.num_features = projection or width

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return features [B, D] of ``images`` [B, C, H, W], which are in [0, 1] if RGB."""
        features: torch.Tensor = self.projection(self.net(self.normalise(images)))
        return features

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """Return ``(images - mean) / std``, [B, C, H, W].

        Three constants broadcast over channels-last images cost ten times the arithmetic on a
        CPU, so they are spread over one image once and kept.
        """
        like = images[:1]
        if self._spread is None or self._spread[0].shape != like.shape:
            scale, shift = 1 / self.std, -self.mean / self.std
            self._spread = (
                torch.empty_like(like).copy_(scale),
                torch.empty_like(like).copy_(shift),
            )
        scale, shift = self._spread
        return torch.addcmul(shift, images, scale)


@dataclass(frozen=True)
class Architecture:
    """How to build one network without its classifier.

    Attributes:
        build: Makes the full network with random weights.
        num_features: Width after global pooling.
        classifier: Submodule that is left out, and ignored in weights files; "" for none.
        instead: Makes what stands in its place.
        url: torchvision's ImageNet weights, if there are any.
        smallest_side: Side in pixels below which the network has no map left to pool.
        normalisation: What ``auto`` stands for.
        largest_side: Side above which a network that flattens its maps fits no longer, if any.
    """

    build: Callable[[], nn.Module]
    num_features: int
    classifier: str = ""
    instead: Callable[[], nn.Module] = nn.Identity
    url: str | None = None
    smallest_side: int = 8
    normalisation: str = "imagenet"
    largest_side: int | None = None

    def features(self) -> nn.Module:
        """Return the network with random weights and without its classifier."""
        net = self.build()
        if self.classifier:
            net.set_submodule(self.classifier, self.instead())
        for layer in net.modules():
            # In place, these copy their input for the backward pass: a seventh of MobileNetV2's
            # training step on a CPU, for nothing.
            if isinstance(layer, nn.Hardtanh | nn.Hardswish):
                layer.inplace = False
        return net


def small_cnn() -> nn.Sequential:
    """Return a network for small images on a CPU: 97,680 parameters, 128 features.

    Groups of channels are normalised within each image, not over the batch: clients with a
    handful of images train as well as others, and nothing is left to average but parameters.
    Strides instead of max pooling keep it cheap, and deterministic on every device.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((3, 16, 32, 64, 128)):
        layers += [
            nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Grey(nn.Module):
    """Keep one of the three equal channels of grey images: [B, 3, H, W] to [B, 1, H, W]."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the first channel."""
        return images[:, :1]


def lenet() -> nn.Sequential:
    """Return LeNet-5 (LeCun et al., 1998) for grey images of 28 px: 60,856 parameters, 84 features.

    With ReLU and max pooling, as it is used today. PPDG names it without saying more.
    """
    return nn.Sequential(
        Grey(),
        nn.Conv2d(1, 6, kernel_size=5, padding=2),
        nn.MaxPool2d(2),  # before ReLU the same, to the bit, with a quarter of its work
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
    return nn.Sequential(
        Grey(),
        nn.Conv2d(1, 16, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 64, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(inplace=True),
    )


BACKBONES = {
    "small_cnn": Architecture(small_cnn, 128, normalisation="half"),
    # All three read pixels in [0, 1] as they are, as their authors do; two flatten 28 px maps.
    "lenet": Architecture(lenet, 84, smallest_side=28, largest_side=31, normalisation="none"),
    "domainbed_mnist": Architecture(domainbed_mnist, 128, normalisation="none"),
    "femnist_cnn": Architecture(
        femnist_cnn, 512, smallest_side=28, largest_side=31, normalisation="none"
    ),
    "squeezenet1_1": Architecture(
        models.squeezenet1_1,
        512,
        "classifier",  # its last convolution makes the class scores, before pooling
        partial(nn.AdaptiveAvgPool2d, 1),
        models.SqueezeNet1_1_Weights.IMAGENET1K_V1.url,
        smallest_side=17,
    ),
    "mobilenet_v2": Architecture(
        models.mobilenet_v2,
        1280,
        "classifier",
        url=models.MobileNet_V2_Weights.IMAGENET1K_V1.url,
    ),
    # FedCCRL's features: hidden layer, Hardswish and dropout of the classifier are kept.
    "mobilenet_v3_large": Architecture(
        models.mobilenet_v3_large,
        1280,
        "classifier.3",
        url=models.MobileNet_V3_Large_Weights.IMAGENET1K_V2.url,
    ),
    "resnet18": Architecture(
        models.resnet18, 512, "fc", url=models.ResNet18_Weights.IMAGENET1K_V1.url
    ),
    "resnet50": Architecture(
        models.resnet50, 2048, "fc", url=models.ResNet50_Weights.IMAGENET1K_V1.url
    ),
    "densenet121": Architecture(
        models.densenet121,
        1024,
        "classifier",
        url=models.DenseNet121_Weights.IMAGENET1K_V1.url,
        smallest_side=29,
    ),
}


def build_backbone(
    settings: BackboneSettings, channels: int = 3, *, rgb: bool | None = None
) -> Backbone:
    """Build the backbone; random weights are drawn from PyTorch's global generator.

    Args:
        settings: Which one.
        channels: Of the images. For other numbers than 3 the first convolution is widened (see
            `widen`).
        rgb: Whether images are RGB in [0, 1]; others are not normalised. By default whether there
            are three channels.

    Raises:
        SettingsError: The settings contradict each other, the weights file does not fit, or
            pretrained weights cannot be had.
        DataError: The weights file cannot be read.
    """
    rgb = channels == 3 if rgb is None else rgb
    if not rgb and settings.normalisation not in ("auto", "none"):
        raise SettingsError(
            f"backbone.normalisation={settings.normalisation} is for RGB images: "
            f"set backbone.normalisation=none"
        )
    if settings.padding == "tf" and settings.name != "mobilenet_v2":
        raise SettingsError(
            f"backbone.padding=tf is for mobilenet_v2, not for {settings.name}: "
            f"set backbone.padding=torch"
        )
    if settings.weights is not None and not settings.pretrained:
        raise SettingsError(
            "backbone.weights names a file but backbone.pretrained is false: "
            "set backbone.pretrained=true, or leave backbone.weights out"
        )
    architecture = BACKBONES[settings.name]
    net = architecture.features()
    if settings.pretrained:
        path = settings.weights or _download(settings.name, architecture.url)
        _load(net, settings.name, Path(path))
    if channels != 3:
        widen(net, channels, pretrained=settings.pretrained)
    if settings.padding == "tf":
        _pad_like_tensorflow(net)
    normalisation: str = settings.normalisation
    if normalisation == "auto":
        normalisation = "half" if settings.padding == "tf" else architecture.normalisation
    if not rgb:
        normalisation = "none"
    return Backbone(net, architecture.num_features, settings.projection, normalisation, channels)


def widen(net: nn.Module, channels: int, *, pretrained: bool) -> None:
    """Let a network's first convolution read another number of channels, in place.

    Channel i starts from the pretrained weights of RGB channel i mod 3, unscaled, as in
    FedDG_Benchmark (Bai et al., ICLR 2024) for PovertyMap's eight; else all start anew from
    PyTorch's default. Networks for grey images then read every channel instead of one.

    Args:
        net: Starts with a convolution, or with `Grey`.
        channels: At least 1.
        pretrained: Whether its weights are pretrained.
    """
    for name, layer in list(net.named_modules()):
        if isinstance(layer, Grey):
            net.set_submodule(name, nn.Identity())
    name, old = next((n, m) for n, m in net.named_modules() if isinstance(m, nn.Conv2d))
    if old.in_channels == channels:
        return
    new = type(old)(
        channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        old.stride,  # type: ignore[arg-type]
        old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    with torch.no_grad():
        if pretrained:
            new.weight.copy_(old.weight[:, torch.arange(channels) % old.in_channels])
            if old.bias is not None and new.bias is not None:
                new.bias.copy_(old.bias)
    net.set_submodule(name, new)


def check_image_size(settings: BackboneSettings, image_size: int) -> None:
    """Check that square images of ``image_size`` pixels suit the backbone.

    Raises:
        SettingsError: Too small or too large, or not a multiple of 32 with TensorFlow's padding,
            which pads odd sides otherwise than even ones.
    """
    smallest, largest = (
        BACKBONES[settings.name].smallest_side,
        BACKBONES[settings.name].largest_side,
    )
    if image_size < smallest:
        raise SettingsError(
            f"data.image_size={image_size} is too small for {settings.name}: "
            f"give at least {smallest}"
        )
    if largest is not None and image_size > largest:
        raise SettingsError(
            f"data.image_size={image_size} is too large for {settings.name}: give {smallest}"
        )
    if settings.padding == "tf" and image_size % 32:
        raise SettingsError(
            f"data.image_size={image_size} does not go with backbone.padding=tf: "
            f"give a multiple of 32, such as {image_size // 32 * 32 + 32}"
        )


# ------------------------------------------------------------------------------- padding


class TensorFlowConv2d(nn.Conv2d):
    """A 3x3 convolution of stride 2 padded as TensorFlow's "same" does on even sides.

    Args:
        layer: The convolution whose parameters this one takes over.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__(
            layer.in_channels,
            layer.out_channels,
            kernel_size=3,
            stride=2,
            groups=layer.groups,
            bias=layer.bias is not None,
            device="meta",
        )
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """Return [B, C', H / 2, W / 2] of ``maps`` [B, C, H, W]."""
        return super().forward(F.pad(maps, (0, 1, 0, 1)))


def _pad_like_tensorflow(net: nn.Module) -> None:
    for name, layer in list(net.named_modules()):
        if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2):
            net.set_submodule(name, TensorFlowConv2d(layer))


# ------------------------------------------------------------------------------- weights


def _download(name: str, url: str | None) -> Path:
    """Return torchvision's weights file of the backbone, downloaded once."""
    if url is None:
        raise SettingsError(f"{name} has no pretrained weights: set backbone.pretrained=false")
    path = Path(torch.hub.get_dir(), "checkpoints", PurePosixPath(url).name)
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), path.stem.rpartition("-")[2])
        except (OSError, RuntimeError, HTTPException) as error:
            raise SettingsError(
                f"cannot download the weights of {name} from {url} ({error}): give a local file "
                f"with backbone.weights=PATH, or start at random with backbone.pretrained=false"
            ) from error
    return path


def _load(net: nn.Module, name: str, path: Path) -> None:
    """Copy a file's weights into ``net``, which is backbone ``name`` without its classifier."""
    # torchvision's DenseNet files are older than the names of its layers.
    tensors = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d)\.", r"\1\2.", key): tensor
        for key, tensor in load_tensors(path).items()
    }
    wrong = _first_difference(net, BACKBONES[name], tensors)
    if wrong:
        others = [other for other in BACKBONES if other != name and _fits(other, tensors)]
        advice = (
            f"it looks like {others[0]}, so set backbone.name={others[0]}"
            if others
            else f"give weights with the names of torchvision's {name}"
        )
        raise SettingsError(f"{path} does not hold weights of {name}: {wrong}; {advice}")
    values = {key: tensors[key] for key in net.state_dict() if key in tensors}
    for key, tensor in values.items():
        if not tensor.isfinite().all():
            raise SettingsError(
                f"{path} holds NaN or infinity in {key}: expected finite weights, get the file anew"
            )
    net.load_state_dict(values, strict=False)


def _first_difference(
    net: nn.Module, architecture: Architecture, tensors: dict[str, torch.Tensor]
) -> str:
    """Say which tensor is the first that does not suit ``net``; "" if all do."""
    expected = {key: tuple(tensor.shape) for key, tensor in net.state_dict().items()}
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    for key, shape in expected.items():
        if key not in found and not key.endswith("num_batches_tracked"):
            return f"{key} of shape {shape} is missing"
        if found.get(key, shape) != shape:
            return f"{key} has shape {found[key]}, expected {shape}"
    ignored = f"{architecture.classifier}." if architecture.classifier else ()
    for key, shape in found.items():
        if key not in expected and not key.startswith(ignored):
            return f"{key} of shape {shape} is not expected"
    return ""


def _fits(name: str, tensors: dict[str, torch.Tensor]) -> bool:
    with torch.device("meta"):
        net = BACKBONES[name].features()
    return not _first_difference(net, BACKBONES[name], tensors)
