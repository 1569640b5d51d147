"""Construction of a method's module, for a run or on its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from feddg_bench.common.errors import SettingsError, noted, unknown
from feddg_bench.common.streams import global_streams
from feddg_bench.config.layers import Layer, merge
from feddg_bench.config.schema import BackboneSettings, RunSettings, TrainSettings
from feddg_bench.config.settle import own_settings, recipe_layers, settle
from feddg_bench.core.method import Method
from feddg_bench.data.federated import Federation, ImageFacts, Images
from feddg_bench.engine.compatibility import check_fit, is_rgb
from feddg_bench.engine.portable_functions import use_portable
from feddg_bench.outlines import outline_of
from feddg_bench.plugins import check_declared, load_method, plugin_name


def build_run_method(
    settings: RunSettings, federation: Federation, plugin: type[Method] | None = None
) -> Method:
    """Build a run's module; its initial weights depend only on the seed and the backbone.

    Args:
        settings: Settings of the run.
        federation: Clients, domains and classes.
        plugin: The method's class, if it is not the one registered under its name.

    Raises:
        SettingsError: If one of the method's own settings cannot be used.
    """
    use_portable(wanted=settings.portable)
    plugin, more = plugin or load_method(settings.method), {}
    if plugin.needs_text and len(federation.text):
        text = torch.from_numpy(federation.text)
        more["text"] = torch.nn.functional.normalize(text) * federation.logit_scale
    return build_on(
        plugin,
        settings,
        federation,
        **more,
        num_classes=federation.num_classes,
        clients=tuple(federation.clients),
        sources=federation.sources,
    )


def build_method(
    name: str,
    *,
    num_classes: int,
    backbone: str = "small_cnn",
    channels: int = 3,
    task: str = "classification",
    seed: int = 0,
    **settings: Any,
) -> Method:
    """Build a method's module on its own, for ``lightning.Trainer`` or a custom loop.

    Settings that are not given come from the recipe ``quick``.

    Args:
        name: The method's registered name, such as ``pardon``.
        num_classes: C; 1 for a regression.
        backbone: Name of the backbone; its weights are random unless ``pretrained=True``.
        channels: Channels of the images; three are red, green and blue in [0, 1].
        task: ``classification`` or ``regression``.
        seed: Determines the initial weights.
        settings: The method's own settings, or those of training or the backbone, by the last part
            of their key: ``mu=0.1``, ``lr=0.01``.

    Raises:
        SettingsError: If a name or a value cannot be used.
    """
    if not isinstance(name, str):
        raise SettingsError(f"name: {name!r} cannot be read; expected a method, such as 'fedavg'")
    name = plugin_name("method", name)
    method = load_method(name)
    if not isinstance(num_classes, int | np.integer) or num_classes < 1:
        raise SettingsError(
            f"num_classes is {num_classes!r}: give the number of classes, at least 1"
        )
    given: Layer = {
        "method": name,
        "dataset": "your data",
        "scenario": "none",
        "seed": seed,
        "backbone": {"name": backbone, "pretrained": False},
    }
    sections: dict[str, type[BaseModel]] = {
        "hyper": method.Settings,
        "train": TrainSettings,
        "backbone": BackboneSettings,
    }
    for key, value in settings.items():
        owners = [section for section, model in sections.items() if key in model.model_fields]
        if not owners:
            known = [field for model in sections.values() for field in model.model_fields]
            raise SettingsError(unknown(f"{name} setting", key, known))
        given = merge(given, {owners[0]: {key: value}})
    layers = recipe_layers("quick", "digits4", name, method.needs)._replace(named=given)
    checked, images = settle(layers), Images(task, channels)
    check_fit(checked, outline_of(method), images)
    return build_on(method, checked, images, num_classes=num_classes)


def build_on(
    method: type[Method], settings: RunSettings, images: ImageFacts, **arguments: Any
) -> Method:
    """Build a module for images that suit it (`check_fit`).

    ``arguments`` are the remaining arguments of `Method`.

    Raises:
        SettingsError: If one of the method's own settings cannot be used.
        PluginError: If the class breaks its contract.
    """
    check_declared(method)
    hyper = own_settings(method.Settings, settings)
    backbone = {
        **settings.backbone.model_dump(mode="json"),
        "channels": images.channels,
        "rgb": is_rgb(images),
        "size": settings.data.image_size,
    }
    with noted(f"build of {method.__name__}"), global_streams(settings.seed, "init"):
        return method(
            hyper,
            backbone=backbone,
            train=settings.train,
            bn=settings.federation.bn,
            task=images.task,
            **arguments,
        )
