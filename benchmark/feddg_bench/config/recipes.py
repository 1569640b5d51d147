"""Recipes: complete experimental setups as YAML files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from feddg_bench.common.errors import SettingsError, unknown
from feddg_bench.common.files import find_yaml, shipped_names
from feddg_bench.config.layers import Layer, load_layer, merge, read_settings, validate
from feddg_bench.config.schema import Section

OTHERS = "others"
"""Name of a recipe's entry for data sets that have none of their own."""
READINGS = ("published", "corrected")
"""Under ``published``, a recipe's entry for a method sets the errors and shortcuts of the code
behind a paper's tables; ``corrected`` leaves them out, for the papers' own formulas."""
INCONCLUSIVE = "for first runs, not for conclusions"
"""What is said of a recipe whose runs end before methods can be compared."""


class _Frame(Section):
    """A recipe's setup for one data set: settings for all methods, and for single ones."""

    model_config = ConfigDict(extra="allow")

    methods: dict[str, dict[str, Any] | None] | None = None
    # Keys that the paper does not publish: the values are ours; `select`: the selection rule.
    unpublished: tuple[str, ...] = ()


class _Recipe(Section):
    """A recipe file: settings for all data sets, and those for single data sets or methods."""

    description: str = ""
    like: str | None = None  # a shipped recipe, into whose content this one is merged
    conclusive: bool = True  # whether its runs are trained far enough to compare methods
    rank: int = 0  # papers' tables show the highest: 3 a paper's setup, 2 trained far, 1 less so
    settings: dict[str, Any] | None = None
    datasets: dict[str, _Frame | None] | None = None  # `OTHERS` stands for all that are not here
    methods: dict[str, dict[str, Any] | None] | None = None

    @property
    def summary(self) -> str:
        """Its description, and what it is not for."""
        return self.description + ("" if self.conclusive else f"; {INCONCLUSIVE}")


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes that come with the package."""
    return shipped_names("sweeps/recipes")


def read_recipe(recipe: str) -> _Recipe:
    """Return the content of a recipe's file.

    ``recipe`` is the name of a shipped recipe, or the path of a YAML file.

    Raises:
        SettingsError: If the recipe is unknown, or its file is not a recipe.
    """
    path = find_yaml("recipe", "sweeps/recipes", recipe)
    if recipe != path.stem and path.stem in recipe_names():
        raise SettingsError(
            f"recipe {path} has the name of one that comes with the suite; tables and tuning know "
            f"recipes by their names: rename the file, such as to my-{path.name}"
        )
    return _shipped(path) if recipe == path.stem else _read(path)


def conclusive(recipe: str) -> bool:
    """Return whether a shipped recipe's runs are trained far enough to compare methods."""
    return recipe not in recipe_names() or read_recipe(recipe).conclusive


def recipe_rank(recipe: str) -> int:
    """Return the rank of a shipped recipe; 0 for any other."""
    return read_recipe(recipe).rank if recipe in recipe_names() else 0


def _read(path: Path) -> _Recipe:
    layer = load_layer(path, "recipe")
    if (base := layer.get("like")) is not None:
        if base not in recipe_names():
            raise SettingsError(f"recipe {path}: {unknown('recipe', str(base), recipe_names())}")
        base_path = find_yaml("recipe", "sweeps/recipes", base)
        layer = merge(load_layer(base_path, "recipe"), layer)
    try:
        return validate(_Recipe, layer)
    except SettingsError as error:
        raise SettingsError(f"recipe {path}: {error}") from error


_shipped = cache(_read)


def names_in(recipe: str) -> tuple[set[str], set[str]]:
    """Return the data sets and the methods that a recipe has entries for, without `OTHERS`.

    Raises:
        SettingsError: If the recipe is unknown, or its file is not a recipe.
    """
    content = read_recipe(recipe)
    frames = content.datasets or {}
    methods = {*(content.methods or {})}
    return {*frames} - {OTHERS}, methods.union(
        *((frame.methods or {}) for frame in frames.values() if frame)
    )


def unpublished(recipe: str, dataset: str) -> tuple[str, ...]:
    """Return the dotted keys of the settings of a paper's setup that it does not publish.

    ``select`` among them stands for the selection rule.

    Raises:
        SettingsError: If the recipe is unknown, or its file is not a recipe.
    """
    frames = read_recipe(recipe).datasets or {}
    frame = frames.get(dataset, frames.get(OTHERS))
    return tuple(frame.unpublished) if frame else ()


def load_recipe(
    recipe: str, dataset: str, method: str, readings: str = READINGS[0]
) -> tuple[Layer, Layer]:
    """Return a recipe's settings for a data set, and those for one method, which override them.

    ``readings`` is one of `READINGS`.

    Raises:
        SettingsError: If the recipe is unknown, or has no settings for the data set.
    """
    if readings not in READINGS:
        raise SettingsError(unknown("readings", readings, READINGS))
    content = read_recipe(recipe)
    frames = content.datasets or {}
    if not {dataset, OTHERS} & {*frames}:
        file = "copy it to a .yaml file, " if recipe in recipe_names() else ""
        raise SettingsError(
            f"recipe {recipe!r} has no settings for data set {dataset!r}, only for "
            f"{', '.join(sorted(frames)) or 'none'}; {file}add an entry under `datasets`, such as "
            f"`{dataset}: {{}}`" + (", give its path" if file else "")
        )
    frame = frames.get(dataset, frames.get(OTHERS)) or _Frame()
    own: Layer = {}
    try:
        for methods in (content.methods, frame.methods):
            entry = dict((methods or {}).get(method) or {})
            published = entry.pop(READINGS[0], None) or {}
            read = published if readings == READINGS[0] else {}
            own = merge(own, read_settings(entry), read_settings(read))
        common = merge(
            read_settings(content.settings or {}), read_settings(frame.model_extra or {})
        )
    except SettingsError as error:
        raise SettingsError(f"recipe {recipe}: {error}") from error
    which = sorted({"method", "dataset", "protocol", "scenario", "seed"} & {*common, *own})
    if which:
        raise SettingsError(
            f"recipe {recipe!r} sets {which[0]}; a recipe says how a run is made, and the command "
            f"which: remove it, and give --{which[0]}"
        )
    return common, own
