"""Building a run's module."""

from __future__ import annotations

from feddg_bench.common.streams import torch_stream
from feddg_bench.config.layers import validate
from feddg_bench.config.schema import RunSettings
from feddg_bench.core.method import Method
from feddg_bench.data.federated import Federation
from feddg_bench.engine.compatibility import check_fit, is_rgb
from feddg_bench.models.backbones import build_backbone
from feddg_bench.plugins import load_method


def build_method(
    settings: RunSettings, federation: Federation, plugin: type[Method] | None = None
) -> Method:
    """Build a run's module; its initial weights depend on the seed and the backbone alone.

    Args:
        settings: What to run.
        federation: Clients, domains and classes.
        plugin: The method's class, where it is not the one registered under its name.

    Raises:
        SettingsError: If method and settings do not suit the images and the task.
    """
    method = plugin or load_method(settings.method)
    check_fit(settings, method, federation)
    hyper = validate(method.Settings, settings.hyper, "hyper.")
    with torch_stream(settings.seed, "init"):
        return method(
            hyper,
            backbone=build_backbone(settings.backbone, federation.channels, rgb=is_rgb(federation)),
            num_classes=federation.num_classes,
            train=settings.train,
            bn=settings.federation.bn,
            clients=tuple(federation.clients),
            sources=federation.sources,
            task=federation.task,
        )
