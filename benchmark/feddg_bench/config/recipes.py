"""Recipes: whole experimental frames as YAML files."""

from __future__ import annotations

from feddg_bench.common.errors import SettingsError
from feddg_bench.common.files import find_yaml, shipped_names
from feddg_bench.config.layers import Layer, load_layer, merge


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes that come with the package."""
    return shipped_names("sweeps/recipes")


def read_recipe(recipe: str) -> Layer:
    """Return a recipe file: ``description``, and what it sets.

    ``settings`` are for all data sets; what differs for one data set or method stands under
    ``datasets`` and ``methods``, and under ``methods`` of a data set.

    Args:
        recipe: A shipped recipe's name, or the path of a YAML file.

    Raises:
        SettingsError: If the recipe is unknown, or its file holds something else.
    """
    path = find_yaml("recipe", "sweeps/recipes", recipe)
    layer = load_layer(path, "recipe")
    parts = ("settings", "datasets", "methods")
    strange = sorted(set(layer) - {"description", *parts})
    if strange:
        raise SettingsError(
            f"recipe {path} has the key {strange[0]!r}; "
            f"expected description, settings, datasets, methods"
        )
    checked = {part: _mapping(layer, part, recipe) for part in parts}
    for entries in (checked["datasets"], checked["methods"]):
        for name in entries:
            entries[name] = _mapping(entries, name, recipe)
    return {"description": str(layer.get("description", "")), **checked}


def load_recipe(recipe: str, dataset: str, method: str) -> Layer:
    """Return a recipe's settings for a data set and a method: its common part, then the specific.

    Args:
        recipe: A shipped recipe's name, or the path of a YAML file.
        dataset: Name of the data set.
        method: Name of the method.

    Raises:
        SettingsError: If the recipe is unknown, or has no settings for the data set.
    """
    layer = read_recipe(recipe)
    datasets = layer["datasets"]
    if dataset not in datasets:
        raise SettingsError(
            f"recipe {recipe!r} has no settings for data set {dataset!r}, only for "
            f"{', '.join(sorted(datasets)) or 'none'}; "
            f"copy it to a .yaml file, add an entry, give its path"
        )
    specific = dict(datasets[dataset])
    own = _mapping(specific, "methods", recipe)
    specific.pop("methods", None)
    methods = (layer["methods"].get(method, {}), _mapping(own, method, recipe))
    merged = merge(layer["settings"], specific, *methods)
    which = sorted({"method", "dataset", "protocol", "scenario", "seed"} & set(merged))
    if which:
        raise SettingsError(
            f"recipe {recipe!r} sets {which[0]}; a recipe says how a run is made, and the command "
            f"which: remove it, and give --{which[0]}"
        )
    return merged


def _mapping(layer: Layer, key: str, recipe: str) -> Layer:
    """Return what a recipe holds under a key, which must be a mapping or nothing."""
    value = layer.get(key) or {}
    if not isinstance(value, dict):
        raise SettingsError(
            f"recipe {recipe}: {key} must hold KEY: VALUE lines, not a {type(value).__name__}"
        )
    return value
