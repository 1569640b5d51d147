"""Global models kept with a record: safetensors files with all data needed to load them."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from feddg_bench.common.errors import DataError, FeddgError, SettingsError, in_a_line
from feddg_bench.common.files import write_whole
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import KEEP, DataSettings, RunSettings
from feddg_bench.core.flaws import misfit, nonfinite
from feddg_bench.core.loop import evaluated_model
from feddg_bench.core.messages import Weights
from feddg_bench.core.method import Method
from feddg_bench.data.augment import to_float
from feddg_bench.data.dataset import pixels_of
from feddg_bench.data.federated import Images
from feddg_bench.engine.compatibility import check_fit, is_rgb
from feddg_bench.engine.construction import build_on
from feddg_bench.engine.encoders import build_encoder, encoder_digest
from feddg_bench.models.predictor import Accepts
from feddg_bench.models.weights import digest
from feddg_bench.outlines import outline_of
from feddg_bench.plugins import load_dataset, load_method
from feddg_bench.records.sources import read_json
from feddg_bench.records.store import open_results

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from feddg_bench.runs.setup import Run


class KeptModel(BaseModel, frozen=True, extra="forbid"):
    """Description of a model in its file."""

    key: str  # key of the run
    round: int = Field(ge=0)  # round after which these weights were the global model
    settings: RunSettings  # settings of the run, without those that name files
    num_classes: int = Field(ge=1)  # outputs of the classifier
    clients: tuple[str, ...]  # names of the clients
    sources: tuple[str, ...]  # names of the training domains
    task: str  # `classification` or `regression`
    channels: int = Field(ge=1)  # of an image
    rgb: bool  # whether images are red, green and blue in [0, 1]
    classes: tuple[str, ...] = ()  # names of the classes; early models lack them
    encoder: str = ""  # SHA-256 of the encoder's weights, if the run used features


def save_model(path: Path, run: Run, number: int) -> None:
    """Write the global model after a round."""
    federation = run.federation
    facts = KeptModel(
        key=run.plan.key,
        round=number,
        settings=_without_files(run),
        num_classes=federation.num_classes,
        clients=tuple(federation.clients),
        sources=federation.sources,
        task=federation.task,
        channels=federation.channels,
        rgb=is_rgb(federation),
        classes=run.plan.dataset.classes,
        encoder=(run.record and run.record.data.encoder) or "",
    )
    # The state that evaluation would load: the global model, constant state, and initial private
    # state. A plugin's frozen networks, which come from files, are not copied.
    state = run.method.state_dict() | run.private | evaluated_model(run.method, run.server)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in state.items()
        if not name.startswith(run.method.frozen)
    }
    description = facts.model_dump_json()
    write_whole(path, save(tensors, {"model": description, "digest": digest(description, tensors)}))


def _without_files(run: Run) -> RunSettings:
    """Return the run's settings without those that name files of this machine."""
    values = run.plan.settings.model_dump()
    values["data"]["split_csv"] = values["backbone"]["weights"] = None
    values["hyper"].update(dict.fromkeys(run.method.Settings.files))
    return validate(RunSettings, values)


def read_model(path: Path) -> tuple[KeptModel, Weights]:
    """Return the description and weights that `save_model` wrote.

    Models kept by earlier versions have no digest; a warning says so.

    Raises:
        DataError: If the file is missing or damaged, is not a kept model, or belongs to another run
            or round than its name says.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            facts = KeptModel.model_validate(read_json(metadata["model"]))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check(path.name, metadata, facts, weights)
    except FileNotFoundError:
        raise DataError(
            f"there is no kept model {path}: make it with `feddg-bench run ... --keep last,best`"
        ) from None
    except (SafetensorError, KeyError, ValidationError, OSError, DataError) as error:
        why = str(error) if isinstance(error, DataError) else type(error).__name__
        raise DataError(
            f"{path} is damaged or no model that a run kept ({why}); delete it and run again with "
            f"--keep"
        ) from error
    if "digest" not in metadata:
        logger.warning("%s was kept without a digest: a change of it would not be noticed", path)
    return facts, weights


def _check(name: str, metadata: dict[str, str], facts: KeptModel, weights: Weights) -> None:
    """Check a kept model in a file of this name.

    A file whose name does not begin with a run's key can hold the model of any run.

    Raises:
        DataError: If a check fails; the message is part of a sentence.
    """
    if metadata.get("digest") not in (None, digest(metadata["model"], weights)):
        raise DataError("its content has not the digest it was written with")
    key, _, which = name.removesuffix(".safetensors").partition(".")
    if re.fullmatch("[0-9a-f]{16}", key) and key != facts.key:
        raise DataError(f"it holds the model of the run {facts.key}")
    rounds = facts.settings.federation.rounds
    if facts.round > rounds or (which == "last" and facts.round != rounds):
        raise DataError(f"it holds the model of round {facts.round}, and the run has {rounds}")
    if wrong := nonfinite(weights.items()):
        raise DataError(f"{wrong.name} {wrong.reason}")
    # Each class and channel has at least one weight of its own.
    if max(facts.num_classes, facts.channels) > sum(map(Tensor.numel, weights.values())):
        raise DataError(
            f"it is too small for {facts.num_classes} classes and {facts.channels} channels"
        )


def load_model(
    key: str,
    results: str | Path = "runs",
    which: str = "last",
    encoder: str | Path | None = None,
    **hyper: Any,
) -> Method:
    """Return the global model of a recorded run, in evaluation mode on the CPU.

    It has ``classes``, the names of the classes; ``transform``, which converts a file's path, a
    Pillow image or a uint8 array to a tensor, as for the data set's images; and ``predict``, which
    returns labels and probabilities (`feddg_bench.Method`).

    Args:
        key: The run's key or its first letters, or the path of a kept model's file.
        results: The results folder.
        which: ``last`` or ``best``.
        encoder: File with the weights of the encoder of a model trained on features, if they do not
            come with a package; ``transform`` encodes images by it.
        hyper: Settings of the method that name files, such as ``style_weights``, if it cannot be
            built without them; a kept model does not hold them.

    Raises:
        SettingsError: If ``which`` has another value, several keys begin so, or the method cannot
            be built.
        DataError: If the run kept no such model, or the file is damaged or does not fit the method.
    """
    if not isinstance(key, str | Path):
        raise SettingsError(f"key: {key!r} cannot be read; expected a run's key, or a model's path")
    if which not in KEEP:
        raise SettingsError(f"cannot load the {which!r} model: expected {' or '.join(KEEP)}")
    path = Path(key)
    if path.suffix != ".safetensors":
        store = open_results(Path(results))
        kept = {path.name.partition(".")[0] for path in store.runs.glob("*.safetensors")}
        found = store.find(str(key), store.keys() | kept)
        if found is None:
            raise DataError(
                f"there is no run {str(key)!r} in {results}: `feddg-bench runs --results "
                f"{results}` lists the keys"
            )
        path = store.model(found, which)
    facts, weights = read_model(path)
    settings = facts.settings
    plugin = load_method(settings.method)
    blank = settings.backbone.model_copy(update={"pretrained": False})
    again = {"backbone": blank, "hyper": {**settings.hyper, **hyper}}
    images = Images(facts.task, facts.channels, "uint8" if facts.rgb else "")
    changed = settings.model_copy(update=again)
    check_fit(changed, outline_of(plugin), images)
    try:
        module = build_on(
            plugin,
            changed,
            images,
            num_classes=facts.num_classes,
            clients=facts.clients,
            sources=facts.sources,
        )
    except (RuntimeError, MemoryError) as error:  # from PyTorch, such as too little memory
        raise DataError(f"the model in {path} cannot be built: {in_a_line(error)}") from error
    expected = {
        name: tensor
        for name, tensor in module.state_dict().items()
        if not name.startswith(plugin.frozen)
    }
    if wrong := misfit(weights, expected):
        raise DataError(
            f"{path} does not fit {settings.method} as it is here: {wrong.name} {wrong.reason}; "
            f"run again with --keep"
        )
    module.load_state_dict(weights, strict=False)
    module.accepts = Accepts(facts.channels, facts.rgb, settings.side)
    module.classes = facts.classes or _classes(settings.dataset, facts.num_classes)
    if facts.rgb:
        module.transform = partial(image_tensor, data=settings.data)
    elif settings.features.encoder:
        module.transform = Encoded(facts, None if encoder is None else Path(encoder))
    return module.eval()


@dataclass(frozen=True)
class Encoded:
    """Maps an image, as `image_tensor` takes it, to features [D, 1, 1] by a model's encoder."""

    facts: KeptModel  # the model's description
    weights: Path | None  # file of the encoder's weights; default those of its package

    @cached_property
    def encoder(self) -> torch.nn.Module:
        """The encoder, built for the first image.

        Raises:
            SettingsError: If it cannot be built, or has other weights than in training.
        """
        settings, name = self.facts.settings, str(self.facts.settings.features.encoder)
        encoder = build_encoder(name, settings.data.image_size, self.weights)
        if encoder_digest(encoder) != self.facts.encoder:
            raise SettingsError(
                f"the encoder {name} has other weights here than when the model was trained: give "
                f"their file, with the SHA-256 {self.facts.encoder[:16]}... of its tensors"
            )
        return encoder

    @torch.no_grad()
    def __call__(self, image: Any) -> Tensor:
        """Return the features of an image."""
        pixels = image_tensor(image, self.facts.settings.data)
        features: Tensor = self.encoder(pixels[None])[0].half().float()  # as stored
        return features[:, None, None]


def _classes(dataset: str, count: int) -> tuple[str, ...]:
    """Return a data set's classes for a model that lacks them; numbers if they are not known."""
    known: tuple[str, ...] = ()
    with suppress(FeddgError):  # its plugin is not installed
        known = getattr(load_dataset(dataset), "classes", ())
    return known if len(known) == count else tuple(map(str, range(count)))


def image_tensor(image: Any, data: DataSettings) -> Tensor:
    """Return an image as floats [3, S, S] in [0, 1], converted as in a data set's store.

    Args:
        image: A file's path, a Pillow image, or a uint8 array [H, W, 3] or [H, W].
        data: The model's settings: side S in pixels, background of transparent pixels, EXIF.

    Raises:
        DataError: If it is something else, or the file cannot be decoded.
    """
    pixels = pixels_of(image, data.image_size, background=data.background, exif=data.exif)
    return to_float(torch.tensor(pixels)[None])[0]
