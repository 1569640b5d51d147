"""Names to methods, data sets and recipes: modules of our packages, entry points of others'.

Only what is asked for is imported, so that one plugin's missing extra breaks no other, and the
known names can be listed without importing any.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddg_bench.errors import PluginError, SettingsError
from feddg_bench.settings import Layer, RunSettings, load_layer, merge, unknown, validate
from feddg_bench.streams import torch_stream

if TYPE_CHECKING:
    from feddg_bench.data import DomainDataset
    from feddg_bench.federation import Federation
    from feddg_bench.method import Method

_PACKAGES = {"method": "feddg_methods", "data set": "feddg_datasets"}
_GROUPS = {"method": "feddg_bench.methods", "data set": "feddg_bench.datasets"}


@cache
def names(kind: str) -> tuple[str, ...]:
    """Return the known names of a kind, ``method`` or ``data set``, without importing any."""
    package = importlib.import_module(_PACKAGES[kind])
    own = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg]
    return tuple(sorted({*own, *(e.name for e in entry_points(group=_GROUPS[kind]))}))


def check_name(kind: str, name: str) -> None:
    """Raise `SettingsError` with the nearest known name if ``name`` is unknown."""
    if name not in names(kind):
        raise SettingsError(unknown(kind, name, names(kind)))


def _load(kind: str, name: str, base: type) -> Any:
    check_name(kind, name)
    for entry in entry_points(group=_GROUPS[kind], name=name):
        return entry.load()
    module = importlib.import_module(f"{_PACKAGES[kind]}.{name}")
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise PluginError(
            f"{module.__name__} defines {len(found)} subclasses of {base.__name__}; expected one"
        )
    return found[0]


def load_method(name: str) -> type[Method]:
    """Return the class of a method; imports its module only."""
    from feddg_bench.method import Method

    loaded: type[Method] = _load("method", name, Method)
    return loaded


def load_dataset(name: str) -> type[DomainDataset]:
    """Return the class of a data set; imports its module only."""
    from feddg_bench.data import DomainDataset

    loaded: type[DomainDataset] = _load("data set", name, DomainDataset)
    return loaded


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
    from feddg_bench.fitness import check_fit, is_rgb
    from feddg_bench.models import build_backbone

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


# ------------------------------------------------------------------------------ recipes


def shipped(folder: str, source: str) -> Path:
    """Return a folder of files that come with the package, installed or in the repository."""
    package = Path(__file__).parent
    installed = package / folder
    return installed if installed.is_dir() else package.parents[1] / source


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
