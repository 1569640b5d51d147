"""Conditions for runs, and reasons to refuse a run, checked before images are decoded.

Conditions that need the built network or the number of clients are checked at the start of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import TIMM
from feddg_bench.data.dataset import DomainDataset
from feddg_bench.data.federated import ImageFacts
from feddg_bench.models.suitability import check_sides
from feddg_bench.protection.accounting import check_accountant

if TYPE_CHECKING:
    from feddg_bench.config.schema import BackboneSettings, RunSettings
    from feddg_bench.core.method import Method
    from feddg_bench.outlines import Outline

logger = logging.getLogger(__name__)

FEWEST = 3
"""Fewest clients of a secure sum: with two, each learns the other's numbers from the sum."""

_COLOURS = ("brightness", "contrast", "saturation", "hue", "grayscale")
"""Settings of augmentation that need RGB in [0, 1]."""


def is_rgb(pictures: ImageFacts) -> bool:
    """Return whether images are red, green and blue in [0, 1]."""
    return pictures.channels == 3 and pictures.pixels == "uint8"


def check_image_size(settings: BackboneSettings, image_size: int) -> None:
    """Check that square images of ``image_size`` pixels suit the backbone.

    Raises:
        SettingsError: If they do not.
    """
    check_sides(settings, image_size)
    if settings.name.startswith(TIMM):
        from feddg_bench.models.backbones import check_timm_size

        check_timm_size(settings, image_size)


class Rate(NamedTuple):
    """The learning rate of a recipe, if a run uses it."""

    recipe: str
    optimizer: str  # for which the recipe gives the rate


def check_fit(
    settings: RunSettings, method: Outline, images: ImageFacts, rate: Rate | None = None
) -> None:
    """Check that a method can be run on images with these settings.

    Raises:
        SettingsError: With the first reason why not, see `reasons_to_refuse`.
    """
    for why in reasons_to_refuse(settings, method, images, rate):
        raise SettingsError(why)


def check_start(settings: RunSettings, method: Method, clients: int) -> None:
    """Check the conditions that need the built network and the number of clients with images.

    A warning says if the method equals FedAvg with this network.

    Raises:
        SettingsError: With the first reason why the run cannot start, see `reasons_to_stop`.
    """
    for why in reasons_to_stop(settings, method, clients):
        raise SettingsError(why)
    if method.same_as_fedavg:
        logger.warning(f"{method.same_as_fedavg}: {settings.method} is the same as fedavg")


# ------------------------------------------------------------------------- conditions, reasons


def reasons_to_refuse(
    settings: RunSettings, method: Outline, images: ImageFacts, rate: Rate | None = None
) -> Iterator[str]:
    """Yield the reasons why a planned run is impossible.

    Args:
        settings: Settings of the run.
        method: Declarations of the method.
        images: Properties of the data set's images.
        rate: The recipe's learning rate; ``None`` if the run has one of its own.

    Raises:
        SettingsError: If a package for the protection is not installed.
    """
    name, privacy, partition = settings.method, settings.privacy, settings.partition
    protections = {privacy.mechanism, privacy.aggregation}
    for protection, why in method.obstacles.items():
        if why and protection in protections:
            key = "aggregation" if protection == "secure" else "mechanism"
            yield f"privacy.{key}={protection} does not go with {name}: {why}"

    alone = partition.clients == 1 or partition.kind == "pooled"
    if alone and protections & {"dp_client", "secure"}:
        yield (
            f"{name} has one client here, which holds all images: there is no crowd to hide it in; "
            f"choose another method, or more clients"
        )

    if privacy.mechanism != "none":
        check_accountant("opacus", f"privacy.mechanism={privacy.mechanism}")

    if images.task not in method.tasks:
        yield (
            f"{name} cannot learn a {images.task} such as {settings.dataset}: choose one of "
            f"{', '.join(methods_for(images.task)) or 'no known method'}"
        )

    if method.needs_text and not settings.features.encoder and isinstance(images, DomainDataset):
        yield (
            f"{name} needs text features of the classes' names: set backbone.name=features and "
            f"features.encoder=open_clip:ARCH/TAG, or another encoder with a text tower"
        )
    if settings.features.encoder:
        if method.rgb_only:
            yield (
                f"{name} changes the style of images, and pooled features of {settings.dataset} "
                f"have none that helps: choose a method that leaves images as they are, such as "
                f"fedavg"
            )
        if method.acts_on == "maps":
            yield (
                f"{name} changes maps inside a network, which features of {settings.dataset} no "
                f"longer have: choose another method, such as fedavg"
            )
    elif not is_rgb(images):
        but = (
            f"RGB images, but images of {settings.dataset} have {images.channels} channels of "
            f"{images.pixels}, not 3 of uint8"
        )
        if method.rgb_only:
            yield (
                f"{name} changes the style of {but}: choose a method that leaves images as they "
                f"are, such as fedavg"
            )
        wrong = [f"augment.{each}=0" for each in _COLOURS if getattr(settings.augment, each)]
        if wrong:
            yield f"augmentation of colours is for {but}: set {' '.join(wrong)}"
        normalisation = settings.backbone.normalisation
        if normalisation not in ("auto", "none"):
            yield (
                f"backbone.normalisation={normalisation} is for {but}: "
                f"set backbone.normalisation=none"
            )

    needed = method.needs.get("train", {}).get("optimizer")
    if rate is not None and needed not in (None, rate.optimizer):
        yield (
            f"{name} trains with {needed} and the learning rate of recipe {rate.recipe} is meant "
            f"for {rate.optimizer}: give one for {needed}, such as train.lr=0.01"
        )


def reasons_to_stop(settings: RunSettings, method: Method, clients: int) -> Iterator[str]:
    """Yield the reasons why a run with a built network and clients with images cannot start."""
    privacy, live = settings.privacy, method.live_batch_norm
    if live and settings.federation.bn == "average" and privacy.mechanism == "dp_client":
        yield (
            "the noise of privacy.mechanism=dp_client can make variances of batch normalisation "
            "negative: set federation.bn=frozen or federation.bn=local"
        )

    asked = settings.federation.per_round or clients
    if asked < FEWEST and privacy.aggregation == "secure" and privacy.mechanism != "dp_style":
        yield (
            f"a secure sum over {asked} clients hides nothing from them: ask {FEWEST} or more with "
            f"--per-round"
        )


def methods_for(task: str) -> list[str]:
    """Return the names of the known methods that can learn a task."""
    from feddg_bench.plugins import names, outline

    suitable = []
    for name in names("method"):
        with suppress(Exception):  # a plugin that cannot be imported can learn nothing
            if task in outline(name).tasks:
                suitable.append(name)
    return suitable
