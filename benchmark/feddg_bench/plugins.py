"""Plugins of each kind by name: modules of our packages, or entry points of others.

Only the plugin that is asked for is imported, so that one plugin's missing extra breaks no other,
and the known names can be listed without importing any. What a method's class says about itself,
including its settings, can be read without PyTorch (`outline`).
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import inspect
import json
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.abc import InspectLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import feddg_bench
from feddg_bench.common.errors import (
    FeddgError,
    PluginError,
    RunInterruptedError,
    SettingsError,
    in_a_line,
    interrupts_told,
    top,
    unknown,
)
from feddg_bench.config.reading import known_name
from feddg_bench.config.schema import MethodSettings
from feddg_bench.core.forms import check_uplink

if TYPE_CHECKING:
    from feddg_bench.core.method import Method
    from feddg_bench.data.dataset import DomainDataset

_PACKAGES = {
    "method": "feddg_methods",
    "data set": "feddg_datasets",
    "attack": "feddg_attacks.kinds",
}
_GROUPS = {
    "method": "feddg_bench.methods",
    "data set": "feddg_bench.datasets",
    "attack": "feddg_bench.attacks",
    "extension": "feddg_bench.extensions",
}
_EXTENSIONS = {"attacks": "feddg_attacks.extension"}
"""Those that come with the suite. It works without them."""


@cache
def _found(kind: str) -> dict[str, EntryPoint]:
    """Return the entry point of each plugin of a kind; other packages' plugins replace ours."""
    group = _GROUPS[kind]
    own = [EntryPoint(name, module, group) for name, module in _ours(kind)]
    theirs = reversed(list(entry_points(group=group)))  # the first of a name counts
    return {entry.name: entry for entry in (*own, *theirs)}


def _ours(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the module of each of our plugins; names of attacks have hyphens."""
    if kind == "extension":
        for name, module in _EXTENSIONS.items():
            if importlib.util.find_spec(top(module)) is not None:
                yield name, module
        return
    package = _PACKAGES[kind]
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not found.ispkg and found.name != "functional":
            name = found.name.replace("_", "-") if kind == "attack" else found.name
            yield name, f"{package}.{found.name}"


def names(kind: str) -> tuple[str, ...]:
    """Return the known names of a kind, a key of `_GROUPS`, without importing any."""
    return tuple(sorted(_found(kind)))


def check_name(kind: str, name: str) -> None:
    """Raise `SettingsError` with the nearest known name if ``name`` is unknown."""
    if name not in names(kind):
        raise SettingsError(unknown(kind, name, names(kind)))


def plugin_name(kind: str, name: str) -> str:
    """Return a plugin's name as it is registered, however the user writes it (`known_name`).

    Raises:
        SettingsError: If it is unknown; the message suggests the nearest known one.
    """
    found = known_name(name, names(kind))
    check_name(kind, found)
    return found


def load_method(name: str) -> type[Method]:
    """Return the class of a method; imports its module only.

    Raises:
        SettingsError: If there is no method of that name.
        PluginError: If it cannot be imported, or see `check_declared`.
    """
    from feddg_bench.core.method import Method

    loaded: type[Method] = load_plugin("method", name, Method)
    check_declared(loaded)
    return loaded


def check_declared(method: type[Method]) -> None:
    """Check what a method's class declares, before anything is computed; an outline will do.

    Raises:
        PluginError: If its settings, its ``uplink``, its ``version``, its ``__init__`` or one of
            its tuples of names cannot be used.
    """
    name, settings = f"{method.__module__}.{method.__name__}", method.Settings
    if not (inspect.isclass(settings) and issubclass(settings, MethodSettings)):
        raise PluginError(
            f"Settings of the method {name} is {settings!r}; expected a subclass of MethodSettings"
        )
    check_uplink(name, method.uplink)
    if type(method.version) is not int:
        raise PluginError(
            f"version of the method {name} is {method.version!r}; expected a whole number, such as "
            f"1, which is raised when the numbers change"
        )
    for what in ("downlink", "local", "frozen", "tasks"):
        value = getattr(method, what)
        if not (isinstance(value, tuple) and all(isinstance(each, str) for each in value)):
            raise PluginError(
                f"{what} of the method {name} is {value!r}; expected a tuple of names, such as "
                f"{(value if isinstance(value, str) else 'style',)!r}"
            )
    given = dict.fromkeys(("backbone", "num_classes", "train", "bn", "clients", "sources", "task"))
    try:
        inspect.signature(method.__init__).bind(method, settings, **given)
    except TypeError as error:
        raise PluginError(
            f"the method {name} has an __init__ that does not take what Method takes ({error}): "
            f"leave it out, and create layers in build()"
        ) from error


@cache
def harmless(method: str, version: int) -> frozenset[str]:
    """Return the digests with which one version of a built-in method gives the same numbers."""
    path = resources.files("feddg_methods") / "digests.json"
    known: dict[str, dict[str, list[str]]] = json.loads(path.read_bytes())
    return frozenset(known.get(method, {}).get(str(version), ()))


def load_dataset(name: str) -> type[DomainDataset]:
    """Return the class of a data set; imports its module only."""
    from feddg_bench.data.dataset import DomainDataset

    loaded: type[DomainDataset] = load_plugin("data set", name, DomainDataset)
    return loaded


@cache
def dataset_title(dataset: str) -> str:
    """Return a data set's title, or its name if it is not installed here."""
    try:
        return load_dataset(dataset).title
    except FeddgError:
        return dataset


def make_dataset(name: str, data_root: Path | None = None) -> DomainDataset:
    """Return a data set, opened.

    Raises:
        SettingsError: If there is no data set of that name.
        DataError: If it reads its domains or classes from the disk and they cannot be read.
        PluginError: If it cannot be imported, or its domains have no codes of their own.
    """
    opened = load_dataset(name)(data_root)
    codes = {domain: opened.letters.get(domain) for domain in opened.domains}
    uses = Counter(codes.values())
    for domain, code in codes.items():
        if not code or uses[code] > 1:
            raise PluginError(
                f"the data set {name} has the code {code!r} for the domain {domain}; expected one "
                f"of its own for each domain, as scenarios are named by them: mend `letters`"
            )
    return opened


def load_plugin(kind: str, name: str, base: type) -> Any:
    """Return the class of a plugin; imports its module only.

    Raises:
        PluginError: If it cannot be imported, or is no subclass of ``base``.
    """
    where = _where(kind, name)
    try:
        with interrupts_told():
            found = where.load()
    except (FeddgError, RunInterruptedError):
        raise
    except BaseException as error:
        where_from, mend = "", ""
        if where.dist is not None:
            where_from = f" of the package {where.dist.name}"
            mend = f"; mend or uninstall that package, or name the {kind}s that are wanted"
        raise PluginError(
            f"the {kind} {name}{where_from} cannot be imported: "
            f"{in_a_line(error, {top(where.value.partition(':')[0])})}{mend}"
        ) from error
    if not where.attr:
        return _the_only(base, found)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise PluginError(f"{where.value}, the {kind} {name}, is no subclass of {base.__name__}")
    return found


def _where(kind: str, name: str) -> EntryPoint:
    """Return the entry point of a plugin."""
    return _found(kind)[plugin_name(kind, name)]


def _the_only(base: type, module: ModuleType) -> Any:
    """Return the one subclass of ``base`` that a module defines."""
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


# -------------------------------------------------------------------- without PyTorch

_BASE = "feddg_bench.core.method"
_QUICK = ("pydantic", "annotated_types", "numpy", "feddg_bench.common", "feddg_bench.config")
"""Packages that an outline imports, besides Python's own: settings are made of these."""


@cache
def outline(name: str) -> type[Method]:
    """Return the part of a method's class that needs no PyTorch: its attributes and its settings.

    The class has the method's docstring, ``Settings``, ``version``, ``needs`` and so on, but none
    of its mathematics, and cannot be built. This takes milliseconds instead of seconds, because the
    module runs with a stand-in for every slow package. If that fails, or the slow packages are
    loaded already, the class is the real one.
    """
    where = _where("method", name)
    if _BASE not in sys.modules:
        with suppress(
            Exception, SystemExit, GeneratorExit
        ):  # the import below reports any error better
            outlines = _Outlines(top(where.module))
            module, base = outlines.run(where.module), outlines.run(_BASE).Method
            found = getattr(module, where.attr) if where.attr else _the_only(base, module)
            if issubclass(found, base):
                outlined: type[Method] = found
                check_declared(outlined)
                _outlined_in[outlined] = module
                return outlined
    return load_method(name)


_outlined_in: dict[type[Method], ModuleType] = {}


def module_of(method: type[Method]) -> ModuleType:
    """Return the module of a method, or of its outline."""
    return _outlined_in.get(method) or sys.modules[method.__module__]


class _Outlines:
    """Runs modules of one package, and the base of all methods, with stand-ins for the others."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.modules: dict[str, ModuleType] = {}

    def run(self, name: str) -> ModuleType:
        """Return a module that was run without its slow imports."""
        if name in sys.modules:
            return sys.modules[name]
        if name not in self.modules:
            spec = importlib.util.find_spec(name)
            if spec is None or not isinstance(spec.loader, InspectLoader):
                raise ImportError(name)
            code = spec.loader.get_code(name) or ""
            module = importlib.util.module_from_spec(spec)
            vars(module)["__builtins__"] = {**vars(builtins), "__import__": self.fetch}
            sys.modules[name] = module  # where pydantic and dataclasses look names up
            try:
                exec(code, vars(module))  # noqa: S102 - as importing it would
            finally:
                del sys.modules[name]
            self.modules[name] = module
        return self.modules[name]

    def fetch(self, name: str, *rest: Any) -> Any:
        """Act as ``import``, with a stand-in for every slow package."""
        first = name.partition(".")[0]
        if first in sys.stdlib_module_names or name.startswith(_QUICK):
            return builtins.__import__(name, *rest)
        if name == "feddg_bench":
            return _Face(self.fetch)
        return self.run(name) if first == self.package or name == _BASE else _STAND_IN


@dataclass(frozen=True)
class _Face:
    """The suite's public names; each comes from its own module."""

    fetch: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        module = f"feddg_bench.{feddg_bench._FACE[name]}"
        return getattr(self.fetch(module, None, None, (name,)), name)


class _StandIn:
    """Its attributes, calls and items are all itself; as a base class it vanishes."""

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Self:
        return self

    def __getitem__(self, _: Any) -> Self:
        return self

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


_STAND_IN = _StandIn()
