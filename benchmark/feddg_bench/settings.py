"""Settings: frozen, typed, unknown ones refused. They say *what* is computed, `Resources` where.

Layers, later wins: the defaults below, the recipe, what the method needs, ``--config`` files,
command-line flags and ``KEY=VALUE``. This module imports neither torch nor a plugin, so that a
settings error answers at once.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from feddg_bench.errors import SettingsError

S = TypeVar("S", bound=BaseModel)
Layer = dict[str, Any]
"""Nested settings as a YAML file holds them."""


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class DataSettings(Section):
    """Images and in-domain splits."""

    image_size: int = Field(224, ge=8, le=1024)
    """Side in pixels of the square images that the store holds and the backbone sees."""
    id_val_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of each training domain and class held out as ``id_val``, after ``id_test``."""
    id_test_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of each training domain and class held out as ``id_test``."""
    split_csv: str | None = None
    """Split file with the columns split, domain, category, path; replaces our own splits."""


class AugmentSettings(Section):
    """Training augmentation, drawn for every image by itself (Frame A's values)."""

    crop_scale: tuple[float, float] | None = (0.7, 1.0)
    """Share of the image area a random crop keeps; null for no crop."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Width over height of the crop before it is resized back to a square."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    brightness: float = Field(0.3, ge=0)
    """Factor drawn from [1 - x, 1 + x]; so for contrast and saturation."""
    contrast: float = Field(0.3, ge=0)
    saturation: float = Field(0.3, ge=0)
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
    """How the training images are spread over clients (see `feddg_bench.partition`)."""

    kind: Literal["heterogeneous", "pooled", "domain", "per_domain", "dirichlet"] = "heterogeneous"
    """By lambda; one client with all; one a domain; ``clients_per_domain`` each; Dirichlet."""
    clients: int = Field(100, ge=1)
    """N, for ``heterogeneous`` and ``dirichlet``."""
    heterogeneity: float = Field(0.1, ge=0, le=1)
    """lambda: 1 gives every client the same mixture of domains, 0 as few domains as possible."""
    rounding: Literal["largest_remainder", "reference"] = "largest_remainder"
    """``reference`` is bit-compatible with FedDG_Benchmark, whose remainders leak."""
    clients_per_domain: int = Field(2, ge=1)
    """For ``per_domain`` (FedCCRL)."""
    alpha: float = Field(0.5, gt=0)
    """Concentration of the Dirichlet partition: small is heterogeneous."""
    min_client_size: int = Field(1, ge=0)
    """Smallest number of images a client may hold; 0 allows empty clients, which never train."""


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
)
"""What `feddg_bench.models` can build; kept here so that a wrong name is refused without torch."""


class BackboneSettings(Section):
    """The feature extractor."""

    name: str = "resnet50"
    """One of `BACKBONE_NAMES`."""
    pretrained: bool = True
    """Start from ImageNet weights: ``weights`` if given, else torchvision's download."""
    weights: str | None = None
    """A local weights file (.safetensors, or .pth read with ``weights_only``)."""
    padding: Literal["torch", "tf"] = "torch"
    """``tf``: stride-2 convolutions pad right and bottom only, for weights from TensorFlow."""
    normalisation: Literal["auto", "imagenet", "half", "none"] = "auto"
    """Input normalisation; ``auto`` is what the backbone's weights were trained with."""
    projection: int = Field(0, ge=0)
    """Width of an extra linear layer after pooling (Frame A: 2048); 0 for none."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BACKBONE_NAMES:
            raise ValueError(unknown("backbone", name, BACKBONE_NAMES))
        return name


class TrainSettings(Section):
    """Local training."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = Field(3e-5, gt=0)
    """Learning rate."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """For ``sgd``."""
    weight_decay: float = Field(0.0, ge=0)
    eps: float = Field(1e-8, gt=0)
    """For ``adam``."""
    schedule: Literal["constant", "cosine", "exponential"] = "constant"
    """Stepped once a local epoch: ``cosine`` falls to 0 over rounds x local epochs, ``exponential``
    is ``decay`` to the power of the epochs done in all rounds before."""
    decay: float = Field(0.96, gt=0, le=1)
    """For ``exponential``; 0.96 is that of WILDS for FMoW and PovertyMap."""
    optimizer_state: Literal["reset", "persist"] = "reset"
    """What becomes of Adam's moments or SGD's momentum between a client's rounds."""
    local_epochs: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1)
    drop_last_if_single: bool = False
    """Skip a last batch of one image: batch normalisation cannot train on it."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    channels_last: bool = True
    """Memory layout of images and convolutions; changes speed and the last bits."""


class FederationSettings(Section):
    """Rounds and participation."""

    rounds: int = Field(50, ge=1)
    per_round: int | None = Field(20, ge=1)
    """K, the clients sampled each round; null for all."""
    bn: Literal["average", "frozen", "local"] = "average"
    """Batch normalisation: averaged; eval mode with the initial statistics; private (FedBN)."""
    weighting: Literal["samples", "uniform"] = "samples"
    """Shares of clients in a mean."""
    server_lr: float = Field(1.0, gt=0)
    """Step from the old global model towards the aggregate; trainable parameters only."""


class EvaluationSettings(Section):
    """When and how the global model is measured."""

    every: int = Field(1, ge=1)
    """Evaluate after every n-th round; the last round always."""
    batch_size: int = Field(256, ge=1)


class MethodSettings(Section):
    """Base of every method's own settings (``hyper.*``)."""

    files: ClassVar[tuple[str, ...]] = ()
    """Names of settings that are paths; their content enters the run key."""
    labels: ClassVar[tuple[str, ...]] = ()
    """Names of settings that a table's caption must say, such as a variant."""


class RunSettings(Section):
    """Everything that decides a run's numbers."""

    method: str
    dataset: str = "digits4"
    protocol: str = "ltdo"
    scenario: str
    """Canonical name, such as ``ac-p-s``."""
    seed: int = Field(0, ge=0)
    data: DataSettings = DataSettings()
    augment: AugmentSettings = AugmentSettings()
    partition: PartitionSettings = PartitionSettings()
    backbone: BackboneSettings = BackboneSettings()
    train: TrainSettings = TrainSettings()
    federation: FederationSettings = FederationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    hyper: dict[str, Any] = {}
    """The method's own settings, checked by its ``Settings``."""

    @model_validator(mode="after")
    def _sampled_clients_exist(self) -> RunSettings:
        k, n = self.federation.per_round, self.partition.clients
        if self.partition.kind in ("heterogeneous", "dirichlet") and k is not None and k > n:
            raise ValueError(
                f"federation.per_round is {k} but partition.clients is {n}: "
                f"K clients are drawn out of N, so lower --per-round or raise --clients"
            )
        return self

    def canonical(self, hyper_files: Iterable[str] = ()) -> Layer:
        """Return what decides the numbers as JSON values: files by their content, not their path.

        Args:
            hyper_files: Keys of ``hyper`` that name files.

        Raises:
            SettingsError: If a named file cannot be read.
        """
        values = self.model_dump(mode="json")
        if self.train.decay == TrainSettings.model_fields["decay"].default:
            del values["train"]["decay"]  # keys are as they were before there was one
        named = [("data", "split_csv"), ("backbone", "weights")]
        for section, key in [*named, *(("hyper", key) for key in hyper_files)]:
            given = values[section].get(key)
            if isinstance(given, str):
                values[section][key] = {"sha256": file_digest(Path(given))}
            elif given:
                values[section][key] = [{"sha256": file_digest(Path(path))} for path in given]
        return values


def run_key(canonical: Layer, method_version: int) -> str:
    """Return the run key: 16 hexadecimal digits over all that decides the numbers."""
    text = json.dumps([canonical, method_version], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        SettingsError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}; check the path") from error


class Resources(Section):
    """Where and how fast a run is computed; never part of its key."""

    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    workers: int = Field(0, ge=0)
    """Processes that train clients: 1 trains in this one, 0 is one a core (CPU) or 1 (GPU)."""
    threads: int = Field(1, ge=1)
    """CPU threads of each worker; the numbers' last bits depend on it, on nothing else here."""
    data_root: Path | None = None
    cache_dir: Path | None = None
    """Where decoded stores lie; default ``$FEDDG_CACHE`` or ``~/.cache/feddg-bench``."""
    results: Path = Path("results")
    checkpoint_every: int = Field(1, ge=1)
    wandb: Literal["off", "offline", "online"] = "off"
    """Whether runs are tracked by W&B (see `feddg_bench.tracking`)."""
    wandb_project: str = Field("feddg-bench", min_length=1)


# ------------------------------------------------------------------------------- layers


def merge(*layers: Mapping[str, Any]) -> Layer:
    """Return the layers as one, later ones winning key by key.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    merged: Layer = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge(merged[key], value) if both else value
    return merged


def dotted_keys(model: type[BaseModel] = RunSettings, prefix: str = "") -> Iterator[str]:
    """Yield every settable key of ``model``, such as ``train.lr``."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from dotted_keys(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def parse_override(text: str, known: Iterable[str] = ()) -> Layer:
    """Return ``KEY=VALUE`` as a nested layer; the value is read as YAML.

    A key may be given by its last part alone where only one known key ends so.

    Raises:
        SettingsError: If there is no ``=``, or the key is unknown or ambiguous.

    >>> parse_override("train.lr=0.01")
    {'train': {'lr': 0.01}}
    >>> parse_override("lr=0.01")
    {'train': {'lr': 0.01}}
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise SettingsError(f"cannot read {text!r}: expected KEY=VALUE, such as train.lr=0.001")
    keys = [*dotted_keys(), *known]
    if key not in keys and not key.startswith("hyper."):
        ends = [k for k in keys if k.endswith(f".{key}")]
        if len(ends) > 1:
            raise SettingsError(f"setting {key!r} is ambiguous: give one of {', '.join(ends)}")
        if not ends:
            raise SettingsError(unknown("setting", key, keys))
        key = ends[0]
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise SettingsError(f"cannot read the value of {text!r} as YAML") from error
    if isinstance(value, str):
        value = _number(value)
    layer: Layer = {}
    inner = layer
    *path, last = key.split(".")
    for part in path:
        inner = inner.setdefault(part, {})
    inner[last] = value
    return layer


def _number(text: str) -> str | float:
    """Read what YAML 1.1 takes for text although every reader means a number, such as 1e-3."""
    try:
        return float(text)
    except ValueError:
        return text


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C, ten times as quick, where PyYAML was built with it."""


def load_layer(path: Path, what: str = "settings file") -> Layer:
    """Read one YAML file of settings.

    Raises:
        SettingsError: If it is missing, not YAML or not a mapping.
    """
    try:
        layer = yaml.load(path.read_text(encoding="utf-8"), _LOADER)  # noqa: S506 - both are safe
    except OSError as error:
        raise SettingsError(f"cannot read {what} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{what} {path} is not YAML: {error}".splitlines()[0]) from error
    if layer is None:
        return {}
    if not isinstance(layer, dict):
        raise SettingsError(
            f"{what} {path} must hold KEY: VALUE lines, not a {type(layer).__name__}"
        )
    return layer


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence that names the nearest known name.

    >>> unknown("method", "fedgam", ["fedavg", "fedgma"])
    "unknown method 'fedgam'; did you mean 'fedgma'? Known: fedavg, fedgma"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not near:  # a dotted key typed without its section, or with the wrong one
        lasts = {n.rsplit(".", 1)[-1]: n for n in names}
        near = [lasts[m] for m in difflib.get_close_matches(name.rsplit(".", 1)[-1], lasts, n=1)]
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(names) or 'none'}"


def validate(model: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    """Build ``model``, or raise one sentence about the first thing that is wrong.

    Raises:
        SettingsError: Naming the key, what was given and what was expected.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = prefix + ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            keys = [prefix + k for k in dotted_keys(model)]
            raise SettingsError(unknown("setting", key, keys)) from error
        if first["type"] == "value_error":
            where = f"{key}: " if key and key.rstrip(".") != prefix.rstrip(".") else ""
            raise SettingsError(where + str(first["ctx"]["error"])) from error
        given = "" if first["type"] == "missing" else f" {first['input']!r} is not valid:"
        raise SettingsError(f"setting {key}:{given} {_lower(first['msg'])}") from error


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
