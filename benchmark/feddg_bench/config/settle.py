"""Precedence of settings: which layers decide a run, and what they decide together."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import dotted, merge, validate
from feddg_bench.config.recipes import READINGS, load_recipe
from feddg_bench.config.schema import DatasetSettings, MethodSettings, RunSettings

ORIGINS = ("recipe", "method", "recipe", "tuned", "command", "command")
"""Where each field of `Layers` comes from, for users."""


_NONE: Mapping[str, Any] = MappingProxyType({})


class Layers(NamedTuple):
    """The layers of a run's settings, in order of precedence: later ones win."""

    recipe: Mapping[str, Any] = _NONE  # settings for all methods
    needs: Mapping[str, Any] = _NONE  # what the method needs
    entry: Mapping[str, Any] = _NONE  # the recipe's settings for this method
    tuned: Mapping[str, Any] = _NONE  # what tuning chose
    user: Mapping[str, Any] = _NONE  # files, flags and KEY=VALUE
    named: Mapping[str, Any] = _NONE  # method, data set, protocol, scenario and seed

    def origins(self) -> dict[str, str]:
        """Return the origin of each setting by dotted key; one without has its default."""
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
    """Return the layers of a recipe's run of a method on a data set, without tuning or user.

    ``needs`` is what the method declares that it needs.

    Raises:
        SettingsError: If the recipe is unknown, or has no settings for the data set.
    """
    common, entry = load_recipe(recipe, dataset, method, readings)
    named = {"method": method, "dataset": dataset, "scenario": ""}
    return Layers(common, needs, entry, named=named)


def settle(
    layers: Layers,
    hyper: type[MethodSettings] | None = None,
    world: type[DatasetSettings] | None = None,
) -> RunSettings:
    """Return the settings that layers decide.

    ``hyper`` and ``world`` are the models of the method's and the data set's own settings, of which
    the result then holds every value; without a model they stay as given.

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
        values = own_settings(hyper, settings)
    except SettingsError as error:  # the user may have named several methods
        raise SettingsError(f"{settings.method}: {error}") from error
    return settings.model_copy(update={"hyper": values.model_dump(mode="json")})


def own_settings(hyper: type[MethodSettings], settings: RunSettings) -> MethodSettings:
    """Return the settings of a method's own, of which ``hyper`` is the model.

    Raises:
        SettingsError: If one is unknown or out of range.
    """
    return validate(hyper, settings.hyper, "hyper.")
