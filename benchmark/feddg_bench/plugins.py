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
from typing import TYPE_CHECKING, Any

from feddg_bench.common.errors import PluginError, SettingsError, unknown

if TYPE_CHECKING:
    from feddg_bench.core.method import Method
    from feddg_bench.data.dataset import DomainDataset

_PACKAGES = {"method": "feddg_methods", "data set": "feddg_datasets"}
_GROUPS = {"method": "feddg_bench.methods", "data set": "feddg_bench.datasets"}


@cache
def names(kind: str) -> tuple[str, ...]:
    """Return the known names of a kind, ``method`` or ``data set``, without importing any."""
    package = importlib.import_module(_PACKAGES[kind])
    modules = pkgutil.iter_modules(package.__path__)
    own = [m.name for m in modules if not m.ispkg and m.name != "functional"]
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
    from feddg_bench.core.method import Method

    loaded: type[Method] = _load("method", name, Method)
    return loaded


def load_dataset(name: str) -> type[DomainDataset]:
    """Return the class of a data set; imports its module only."""
    from feddg_bench.data.dataset import DomainDataset

    loaded: type[DomainDataset] = _load("data set", name, DomainDataset)
    return loaded
