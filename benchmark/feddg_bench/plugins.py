"""Plugins of each kind by name: modules of the built-in packages, or entry points of others.

Only the requested plugin is imported, so that a missing extra of one plugin does not break others,
and the known names can be listed without any import. The declarations of a method's class,
including its settings, are stored in files, so that they are known without PyTorch (`outline`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import logging
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import resources
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import feddg_bench
from feddg_bench.common.errors import (
    FeddgError,
    PluginError,
    SettingsError,
    in_a_line,
    left_out,
    top,
    unknown,
)
from feddg_bench.common.files import cache_dir, write_whole
from feddg_bench.config.names import meant
from feddg_bench.config.reading import known_name, listed, read_names

if TYPE_CHECKING:
    from feddg_bench.config.layers import Layer
    from feddg_bench.core.method import Method
    from feddg_bench.data.dataset import DomainDataset
    from feddg_bench.outlines import Outline

logger = logging.getLogger(__name__)

_METHODS = "feddg_methods"
_PACKAGES = {
    "method": _METHODS,
    "data set": "feddg_datasets",
    "attack": "feddg_attacks.kinds",
}
GROUPS = {
    "method": "feddg_bench.methods",
    "data set": "feddg_bench.datasets",
    "attack": "feddg_bench.attacks",
    "extension": "feddg_bench.extensions",
    "encoder": "feddg_bench.encoders",
}
"""Kind of plugin -> group of the entry points that name it."""
_EXTENSIONS = {"attacks": "feddg_attacks.extension"}
"""Extensions that come with the suite, which works without them."""


@cache
def _found(kind: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a kind by name: one, or several if packages share the name."""
    group = GROUPS[kind]
    found: dict[str, list[EntryPoint]] = {}
    own = [EntryPoint(name, module, group) for name, module in _ours(kind)]
    for entry in (*own, *entry_points(group=group)):
        same = found.setdefault(entry.name, [])
        if entry.value not in [each.value for each in same]:  # a package that was renamed
            same.append(entry)
    return found


def _ours(kind: str) -> Iterator[tuple[str, str]]:
    """Yield name and module of each built-in plugin; names of attacks have hyphens."""
    if kind == "extension":
        for name, module in _EXTENSIONS.items():
            if importlib.util.find_spec(top(module)) is not None:
                yield name, module
        return
    if kind not in _PACKAGES:
        return
    package = _PACKAGES[kind]
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not info.ispkg and info.name != "functional":
            name = info.name.replace("_", "-") if kind == "attack" else info.name
            yield name, f"{package}.{info.name}"


_GIVEN: dict[str, type[Method]] = {}
"""Classes that this process was given as objects (`give_method`), by name."""


def give_method(name: str, method: type[Method]) -> None:
    """Make a class known in this process, by a name with an ``@``, which no plugin has."""
    check_declared(method)
    _GIVEN[name] = method


def given_method(name: str) -> type[Method] | None:
    """Return the class of a name that `give_method` made known, ``None`` for plugins."""
    return _GIVEN.get(name)


def names(kind: str) -> tuple[str, ...]:
    """Return the known names of a kind, a key of `GROUPS`, without importing any plugin."""
    return tuple(sorted(_found(kind)))


def check_name(kind: str, name: str) -> None:
    """Raise `SettingsError` with the nearest known name if ``name`` is unknown."""
    if kind == "method" and "@" in name:
        if name not in _GIVEN:
            raise SettingsError(
                f"the method {name} is a class of a script or a notebook: give the class to fb.run "
                f"in this process first, or make a package of it with `feddg-bench methods new`"
            )
    elif name not in names(kind):
        raise SettingsError(unknown(kind, name, names(kind)))


def plugin_name(kind: str, name: str) -> str:
    """Return a plugin's registered name for any spelling that `known_name` accepts.

    Raises:
        SettingsError: If it is unknown; the message suggests the nearest known one.
    """
    match = known_name(name, names(kind))
    check_name(kind, match)
    return match


def read_plugins(kind: str, text: str | Iterable[str], load: Callable[[str], object]) -> list[str]:
    """Return the names of plugins in a list, of which ``all`` stands for every usable one.

    A warning names each plugin that ``all`` leaves out, and the reason.

    Args:
        kind: A key of `GROUPS`.
        text: Names; see `feddg_bench.config.reading.read_names`.
        load: Function of a name that raises an error if the plugin cannot be used.

    Raises:
        SettingsError: If a name is unknown; the message suggests the nearest known one.
    """
    if "all" not in listed(text):
        for name in listed(text) if kind == "method" else ():
            if "@" in name:
                check_name(kind, name)
        return read_names(kind, text, (*names(kind), *(_GIVEN if kind == "method" else ())))
    chosen = read_names(kind, text, names(kind), every=True)
    usable = []
    for name in chosen:
        try:
            load(name)
        except Exception as error:
            _say_left_out(kind, name, in_a_line(error))
        else:
            usable.append(name)
    return usable


@cache
def _say_left_out(kind: str, name: str, why: str) -> None:
    logger.warning(left_out(f"the {kind} {name}", why))


def load_method(name: str) -> type[Method]:
    """Return the class of a method; imports its module only.

    Raises:
        SettingsError: If there is no method of that name.
        PluginError: If it cannot be imported, or `check_declared` refuses it.
    """
    from feddg_bench.core.method import Method

    if name in _GIVEN:
        return _GIVEN[name]
    loaded: type[Method] = load_plugin("method", name, Method)
    check_declared(loaded)
    return loaded


def check_declared(method: type[Method]) -> None:
    """Check the declarations of a method's class before anything is computed.

    Raises:
        PluginError: If its settings, its ``uplink``, its ``version``, its ``__init__`` or one of
            its tuples of names cannot be used.
    """
    from feddg_bench.config.schema import MethodSettings

    name, settings = f"{method.__module__}.{method.__name__}", method.Settings
    if not (inspect.isclass(settings) and issubclass(settings, MethodSettings)):
        raise PluginError(
            f"Settings of the method {name} is {settings!r}; expected a subclass of MethodSettings"
        )
    if type(method.version) is not int:
        raise PluginError(
            f"version of the method {name} is {method.version!r}; expected a whole number, such as "
            f"1, which is raised when the numbers change"
        )
    tuples = {what: getattr(method, what) for what in ("downlink", "local", "frozen", "tasks")}
    for call, sent in method.uplink.items():
        if not isinstance(sent, Mapping | list):
            tuples[f"uplink[{call!r}]"] = sent
    for what, value in tuples.items():
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
    """Return the digests with which one version of a built-in method gives the same results."""
    path = resources.files(_METHODS) / "digests.json"
    known: dict[str, dict[str, list[str]]] = json.loads(path.read_bytes())
    return frozenset(known.get(method, {}).get(str(version), ()))


def load_dataset(name: str) -> type[DomainDataset]:
    """Return the class of a data set; imports its module only.

    Raises:
        SettingsError: If there is no data set of that name.
        PluginError: If it cannot be imported, or declares names, counts or codes that cannot be
            used.
    """
    from feddg_bench.data.dataset import DomainDataset

    loaded: type[DomainDataset] = load_plugin("data set", name, DomainDataset)
    _check_data_set(plugin_name("data set", name), loaded)
    return loaded


def _check_data_set(name: str, loaded: type[DomainDataset]) -> None:
    from feddg_bench.data.dataset import names_only

    where = f"the data set {name} ({loaded.__module__}.{loaded.__name__})"
    if (own := getattr(loaded, "name", None)) != name:
        raise PluginError(
            f"{where} has the name {own!r}; expected {name!r}, as its entry point says"
        )
    if not isinstance(title := getattr(loaded, "title", None), str):
        raise PluginError(f"{where} has the title {title!r}; expected a text, shown in tables")
    for what in ("domains", "classes"):
        value = getattr(loaded, what, None)
        if not names_only(value):
            raise PluginError(
                f"{where} has the {what} {value!r}; expected a tuple of names, such as "
                f"{(value if isinstance(value, str) else 'photo', 'sketch')!r}"
            )
        if twice := [each for each, times in Counter(value).items() if times > 1]:
            raise PluginError(f"{where} has {twice[0]!r} twice in {what}; expected each name once")
    sizes = {domain: len(loaded.classes) or 1 for domain in loaded.domains}
    for domain, counts in loaded.counts.items():
        if domain not in sizes or len(counts) not in (1, sizes[domain]):
            raise PluginError(
                f"{where} has {len(counts)} counts for {domain!r}; expected for each of its "
                f"domains one number of images per class, here {len(loaded.classes) or 1}, or one "
                f"for the domain"
            )
    if lacking := sorted(loaded.__abstractmethods__):
        raise PluginError(
            f"{where} lacks {', '.join(lacking)}; write each as DomainDataset describes it, or "
            f"subclass ImageFolderDataset for images in <domain>/<class>/"
        )


@cache
def dataset_title(dataset: str, own: str | None = None) -> str:
    """Return a data set's title, or its name if it is not installed here.

    ``own`` is the name of a user's own data set (`DomainDataset.label`), which replaces the title.
    """
    if own:
        return own
    try:
        return load_dataset(dataset).title
    except FeddgError:
        return dataset


@cache
def method_title(method: str) -> str:
    """Return a method's title, or its name if it has none or is not installed here."""
    try:
        return outline(method).title or method
    except FeddgError:
        return method


@cache
def acts_on(method: str) -> str:
    """Return what a method declares to act on; "" if it declares nothing or is not installed."""
    try:
        return outline(method).acts_on
    except FeddgError:
        return ""


def make_dataset(name: str, data_root: Path | None = None) -> DomainDataset:
    """Return an opened data set.

    Raises:
        SettingsError: If there is no data set of that name.
        DataError: If it reads its domains or classes from the disk and they cannot be read.
        PluginError: If it cannot be imported, or its domains have no unique codes that can be part
            of a scenario's name.
    """
    opened = load_dataset(name)(data_root)
    codes = {domain: opened.letters.get(domain) for domain in opened.domains}
    uses = Counter(codes.values())
    for domain, code in codes.items():
        if not code or uses[code] > 1 or {*code} & {*"-+,"}:
            raise PluginError(
                f"the data set {name} has the code {code!r} for the domain {domain}; expected one "
                f"of its own for each domain, without - + and commas, as scenarios are named by "
                f"them: fix `letters`, or leave it out"
            )
    return opened


def load_plugin(kind: str, name: str, base: type) -> Any:
    """Return the class of a plugin; imports its module only.

    Raises:
        PluginError: If it cannot be imported, is not a subclass of ``base``, or has the name of
            another package's plugin.
    """
    where = _where(kind, name)
    package = _package(where)
    try:
        loaded = where.load()
    except FeddgError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"the {kind} {name}{f' of the package {package}' if package else ''} cannot be "
            f"imported: {in_a_line(error)}"
            f"{f'; fix or uninstall {package}' if package else ''}"
        ) from error
    if not where.attr:
        return _the_only(base, loaded)
    if not (inspect.isclass(loaded) and issubclass(loaded, base)):
        raise PluginError(
            f"the {kind} {name}{f' of the package {package}' if package else ''} is {where.value}, "
            f"which is no subclass of {base.__name__}"
            f"{f'; fix or uninstall {package}' if package else ''}"
        )
    return loaded


def load_object(kind: str, name: str) -> Any:
    """Return what the entry point of a plugin names."""
    return _where(kind, name).load()


def _where(kind: str, name: str) -> EntryPoint:
    """Return the entry point of a plugin.

    Raises:
        PluginError: If several packages have a plugin of this name.
    """
    found = _found(kind)[plugin_name(kind, name)]
    if len(found) > 1:
        packages = [_package(entry) for entry in found]
        theirs = [package for package in packages if package]
        several = " and ".join(package or "feddg-bench" for package in packages)
        one = theirs[0] if len(theirs) == 1 else "all but one"
        raise PluginError(
            f"the packages {several} each have a {kind} {found[0].name}; uninstall {one}, or "
            f"rename the entry point"
        )
    return found[0]


def _package(where: EntryPoint) -> str:
    """Return the name of the package that declares an entry point; empty for built-in plugins."""
    return where.dist.name if where.dist is not None else ""


def _the_only(base: type, module: ModuleType) -> Any:
    """Return the one subclass of ``base`` that a module defines."""
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise PluginError(
            f"{module.__name__} defines {len(classes)} subclasses of {base.__name__}; expected one"
        )
    return classes[0]


# -------------------------------------------------------------------- without PyTorch

OUTLINES = "outlines.json"
"""Outlines file in the package of the built-in methods, written by ``make digests``."""


@cache
def outline(name: str) -> Outline:
    """Return the outline of a method.

    Its module takes seconds to import. This is done only if no outline of the current source is
    stored in the user's cache folder or in `OUTLINES`.
    """
    from feddg_bench.outlines import outline_of, read_outline

    if name in _GIVEN:
        return outline_of(_GIVEN[name])
    where = _where("method", name)
    source = _source(where)
    with suppress(OSError, ValueError, LookupError, TypeError):  # missing or unreadable
        return read_outline(json.loads(_on_file(where).read_bytes()))
    shipped = _shipped_outlines()
    if shipped.get("source") == source and where.name in shipped["outlines"]:
        return read_outline(shipped["outlines"][where.name])
    declared = outline_of(load_method(name))
    _keep(where, declared)
    return declared


def own_values(name: str, given: Mapping[str, Any]) -> Layer:
    """Return every value of a method's own settings, as JSON values, for those that are given.

    The method is imported only if its outline cannot tell, such as what is wrong with a value.

    Raises:
        SettingsError: If a setting is unknown or out of range.
    """
    from feddg_bench.config.layers import validate

    own = outline(name).own
    if strange := "" if own.coded else next((key for key in given if key not in own.settings), ""):
        key, known = f"hyper.{strange}", [f"hyper.{each}" for each in own.settings]
        raise SettingsError(unknown("setting", key, known, meant(key, known)))
    values = own.values(given)
    if values is None:
        values = validate(load_method(name).Settings, given, "hyper.").model_dump(mode="json")
    return values


def check_outline(name: str, method: type[Method]) -> None:
    """Refuse a run that was planned with an outdated outline.

    Raises:
        PluginError: If the class now declares other values, because another package changed.
    """
    from feddg_bench.outlines import outline_of, write_outline

    if name in _GIVEN:
        return
    now = outline_of(method)
    written = write_outline(now)
    if written is not None and written != write_outline(outline(name)):
        _keep(_where("method", name), now)
        outline.cache_clear()
        raise PluginError(
            f"the method {name} declares other values than when its source was last read, because "
            f"a package that it uses has changed: give the same command again"
        )


def _keep(where: EntryPoint, declared: Outline) -> None:
    from feddg_bench.outlines import write_outline

    written = write_outline(declared)
    if written is not None:
        with suppress(OSError, FeddgError):  # the next command imports the module again
            write_whole(_on_file(where), json.dumps(written).encode())


def _on_file(where: EntryPoint) -> Path:
    """Return the cache file for the outline of the current source."""
    text = f"{where.value} {_source(where)}"
    return cache_dir() / "outlines" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _source(where: EntryPoint) -> str:
    """Return the digest of the source behind an outline: the plugin's and the built-in methods'."""
    return source_digest(*dict.fromkeys((top(where.module), _METHODS)))


@cache
def source_digest(*packages: str) -> str:
    """Return the SHA-256 of all Python files of packages, without importing them."""
    digest = hashlib.sha256(feddg_bench.__version__.encode())
    for package in packages:
        spec = importlib.util.find_spec(package)
        folders = (spec and spec.submodule_search_locations) or ()
        files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
        for path in files or [Path(spec.origin or "")] if spec else ():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _shipped_outlines() -> dict[str, Any]:
    """Return the content of `OUTLINES`: the digest of the source, and outlines by name."""
    with suppress(OSError, ValueError):
        shipped: dict[str, Any] = json.loads((resources.files(_METHODS) / OUTLINES).read_bytes())
        return shipped
    return {}
