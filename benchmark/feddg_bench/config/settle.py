"""Precedence of settings: the layers of a run, and the settings that result from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import Layer, dotted, merge, validate
from feddg_bench.config.recipes import READINGS, load_recipe
from feddg_bench.config.schema import DatasetSettings, MethodSettings, RunSettings

ORIGINS = ("recipe", "method", "recipe", "tuned", "command", "command")
"""Origin of each field of `Layers`, as shown to users."""


_NONE: Mapping[str, Any] = MappingProxyType({})


class Layers(NamedTuple):
    """The layers of a run's settings; later ones take precedence."""

    recipe: Mapping[str, Any] = _NONE  # settings for all methods
    needs: Mapping[str, Any] = _NONE  # the method's needs
    entry: Mapping[str, Any] = _NONE  # the recipe's settings for this method
    tuned: Mapping[str, Any] = _NONE  # settings chosen by tuning
    user: Mapping[str, Any] = _NONE  # files, flags and KEY=VALUE
    named: Mapping[str, Any] = _NONE  # method, data set, protocol, scenario and seed

    def origins(self) -> dict[str, str]:
        """Return the origin of each setting by dotted key; settings without one have defaults."""
        origins: dict[str, str] = {}
        for origin, layer in zip(ORIGINS, self, strict=True):
            origins |= dict.fromkeys(dotted(layer), origin)
        return origins


def recipe_layers(
    recipe: str,
    dataset: str,
    method: str = "",
    needs: Mapping[str, Any] = _NONE,
    readings: str = READINGS[0],
) -> Layers:
    """Return a recipe's layers for a method on a data set, without those of tuning and user.

    ``needs`` holds the needs that the method declares.

    Raises:
        SettingsError: If the recipe is unknown, or has no settings for the data set.
    """
    common, entry = load_recipe(recipe, dataset, method, readings)
    named = {"method": method, "dataset": dataset, "scenario": ""}
    return Layers(common, needs, entry, named=named)


def settle(
    layers: Layers,
    hyper: Callable[[Mapping[str, Any]], Layer] | None = None,
    world: type[DatasetSettings] | None = None,
) -> RunSettings:
    """Return the settings that result from layers.

    ``hyper`` returns every value of the method's own settings for those given; ``world`` is the
    class of the data set's. Without them, these settings stay as given.

    Raises:
        SettingsError: If a setting is unknown or out of range.
    """
    merged = merge(*layers)
    if merged.get("partition", {}).get("kind") == "pooled":  # one client: there is no K to choose
        merged = merge(merged, {"federation": {"per_round": None}})
    settings = validate(RunSettings, merged)
    if world is not None:
        own = validate(world, settings.world, "world.")
        settings = settings.model_copy(update={"world": own.model_dump(mode="json")})
    if hyper is None:
        return settings
    try:
        values = hyper(settings.hyper)
    except SettingsError as error:  # the user may have named several methods
        raise SettingsError(f"{settings.method}: {error}") from error
    return settings.model_copy(update={"hyper": values})


def own_settings(hyper: type[MethodSettings], settings: RunSettings) -> MethodSettings:
    """Return the method's own settings, checked by the model ``hyper``.

    Raises:
        SettingsError: If one is unknown or out of range.
    """
    return validate(hyper, settings.hyper, "hyper.")
