"""Whether a method and its settings suit the images and the task of a data set.

If they do not, the run is refused before anything is decoded or trained.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Protocol

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import EngineSettings
from feddg_bench.protection.possible import check_protection, own_classes

if TYPE_CHECKING:
    from feddg_bench.config.schema import RunSettings
    from feddg_bench.core.method import Method

logger = logging.getLogger(__name__)

_COLOURS = ("brightness", "contrast", "saturation", "hue", "grayscale")
"""Settings of augmentation that need RGB in [0, 1]."""


class ImageFacts(Protocol):
    """What a data set and a federation both say about their images."""

    @property
    def task(self) -> str:
        """``classification`` or ``regression``."""

    @property
    def channels(self) -> int:
        """Channels of an image."""

    @property
    def pixels(self) -> str:
        """Type of the stored pixels: ``uint8`` or ``float16``."""


def is_rgb(pictures: ImageFacts) -> bool:
    """Return whether images are red, green and blue in [0, 1]."""
    return pictures.channels == 3 and pictures.pixels == "uint8"


def check_fit(settings: RunSettings, method: type[Method], pictures: ImageFacts) -> None:
    """Check that a method can be run on a data set with these settings.

    Raises:
        SettingsError: If the method cannot learn the task or does not allow the protection, or if
            the method, the augmentation or the normalisation needs RGB images and these are not.
    """
    check_protection(settings, method)
    if pictures.task not in method.tasks:
        raise SettingsError(
            f"{settings.method} cannot learn a {pictures.task} such as {settings.dataset}: choose "
            f"one of {', '.join(methods_for(pictures.task)) or 'no known method'}"
        )
    if is_rgb(pictures):
        return
    images = (
        f"images of {settings.dataset} have {pictures.channels} channels of {pictures.pixels}, "
        f"not 3 of uint8"
    )
    if method.rgb_only:
        raise SettingsError(
            f"{settings.method} changes the style of RGB images, but {images}: choose a method "
            f"that leaves images as they are, such as fedavg"
        )
    wrong = [f"augment.{name}=0" for name in _COLOURS if getattr(settings.augment, name)]
    if wrong:
        raise SettingsError(
            f"augmentation of colours is for RGB images, but {images}: set {' '.join(wrong)}"
        )
    normalisation = settings.backbone.normalisation
    if normalisation not in ("auto", "none"):
        raise SettingsError(
            f"backbone.normalisation={normalisation} is for RGB images, but {images}: "
            f"set backbone.normalisation=none"
        )


def one_by_one(method: type[Method]) -> str:
    """Return why a method's clients cannot step together; "" if they can."""
    if not method.vectorised:
        return "a training step that draws numbers or takes gradients itself"
    own = own_classes(method)
    names = ("fit", "batches", "configure_optimizers", "on_before_optimizer_step")
    found = [name for name in names if any(name in vars(kind) for kind in own)]
    return f"its own {' and '.join(found)}" if found else ""


def settled_engine(settings: RunSettings, method: type[Method]) -> EngineSettings:
    """Return the engine settings for the key: the defaults if clients cannot step together."""
    engine = settings.engine
    if engine.clients != "exact":
        why = one_by_one(method)
        if not why:
            return engine
        say_one_by_one(settings.method, why)
    return EngineSettings()


@cache
def say_one_by_one(name: str, why: str) -> None:
    """Warn, only once, that a method's clients do not step together."""
    logger.warning("%s has %s: its clients train one by one (engine.clients=exact)", name, why)


def methods_for(task: str) -> list[str]:
    """Return the names of the known methods that can learn a task."""
    from feddg_bench.plugins import names, outline

    found = []
    for name in names("method"):
        with suppress(Exception):  # a plugin that cannot be imported can learn nothing
            if task in outline(name).tasks:
                found.append(name)
    return found
