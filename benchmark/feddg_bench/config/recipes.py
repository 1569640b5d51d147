"""Recipes: whole experimental frames as YAML files."""

from __future__ import annotations

from pathlib import Path

from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.common.files import shipped
from feddg_bench.config.layers import Layer, load_layer, merge


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes that come with the package."""
    return tuple(sorted(path.stem for path in shipped("recipes", "sweeps/recipes").glob("*.yaml")))


def load_recipe(recipe: str, dataset: str, method: str) -> Layer:
    """Return a recipe's settings for a data set and a method: its common part, then the specific.

    A recipe file holds ``description``, ``settings`` for all data sets, and under ``datasets``
    and ``methods`` what differs for one of them.

    Args:
        recipe: A shipped recipe's name, or the path of a YAML file.
        dataset: Name of the data set.
        method: Name of the method.

    Raises:
        SettingsError: If the recipe is unknown, or was not written for the data set.
    """
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        if recipe not in recipe_names():
            raise SettingsError(unknown("recipe", recipe, recipe_names()))
        path = shipped("recipes", "sweeps/recipes") / f"{recipe}.yaml"
    layer = load_layer(path, "recipe")
    strange = sorted(set(layer) - {"description", "settings", "datasets", "methods"})
    if strange:
        raise SettingsError(
            f"recipe {path} has the key {strange[0]!r}; "
            f"expected description, settings, datasets, methods"
        )
    datasets = _mapping(layer, "datasets", path)
    if dataset not in datasets:
        raise SettingsError(
            f"recipe {recipe!r} has no settings for data set {dataset!r}, only for "
            f"{', '.join(sorted(datasets))}; copy it to a .yaml file, add an entry, give its path"
        )
    specific = dict(_mapping(datasets, dataset, path))
    methods = merge(_mapping(layer, "methods", path), _mapping(specific, "methods", path))
    specific.pop("methods", None)
    return merge(_mapping(layer, "settings", path), specific, _mapping(methods, method, path))


def _mapping(layer: Layer, key: str, path: Path) -> Layer:
    """Return what a recipe holds under a key, which must be a mapping or nothing."""
    value = layer.get(key) or {}
    if not isinstance(value, dict):
        raise SettingsError(
            f"recipe {path}: {key} must hold KEY: VALUE lines, not a {type(value).__name__}"
        )
    return value
