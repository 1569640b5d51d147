"""Deferred modules of other packages: imported for a few names, run only if others are read.

Lightning imports all of torchmetrics, which imports SciPy's signals and matplotlib; Lightning,
torchvision and the first step of an optimizer import PyTorch's compiler. A run uses none of them,
and they take half of its start-up time. `importlib.util.LazyLoader` does not help, since each of
the importing modules reads a name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from threading import RLock
from types import FunctionType
from typing import Any

DATA = ("__all__", "__version__")
"""Names with underscores that a module can define; tools look up others in every module."""


class _Path(list[str]):
    """Folders of a package's modules. The package runs before they are searched."""

    run: Callable[[], None]

    def __iter__(self) -> Iterator[str]:
        self.run()
        return super().__iter__()


def defer(
    name: str,
    given: Mapping[str, Any] | None = None,
    *,
    calls: tuple[str, ...] = (),
    parts: Mapping[str, str] | None = None,
) -> None:
    """Import a module without running it until a name is read that is not listed here.

    All imports, before and after it runs, return this module. Nothing happens if it was imported
    before, or if the installed version does not have it.

    Args:
        name: The module. Its package must have been imported.
        given: Names and values until it runs.
        calls: Functions that run it when they are called.
        parts: Name -> the module of the package that defines it. Modules of a package with parts
            can be imported before it runs; any other package runs before its modules.
    """
    outer, _, last = name.rpartition(".")
    package = sys.modules.get(outer)
    if name in sys.modules or (outer and package is None):
        return
    folders = package.__path__ if package else None
    spec = PathFinder.find_spec(name, folders.copy() if isinstance(folders, _Path) else folders)
    if spec is None or spec.loader is None:
        return
    module, loader, lock, running = module_from_spec(spec), spec.loader, RLock(), False
    path = spec.submodule_search_locations

    def run() -> None:
        nonlocal running
        if isinstance(folders, _Path):
            folders.run()
        with lock:
            if running or vars(module).get("__getattr__") is not missing:
                return
            running = True
            for key in known:
                vars(module).pop(key, None)
            if path is not None:
                module.__path__ = path
            try:
                loader.exec_module(module)
            finally:
                running = False
            if vars(module).get("__getattr__") is missing:
                del vars(module)["__getattr__"]

    def missing(key: str) -> Any:
        with lock:
            if running or (key.startswith("__") and key not in DATA):
                raise AttributeError(f"module {name!r} has no attribute {key!r}")
        if parts and key in parts:
            return getattr(import_module(parts[key]), key)
        run()
        return getattr(module, key)

    def call(key: str) -> Callable[..., Any]:
        def function(*args: Any, **more: Any) -> Any:
            run()
            return getattr(module, key)(*args, **more)

        return function

    known = {**(given or {}), **{key: call(key) for key in calls}}
    vars(module).update(known, __getattr__=missing)
    if path is not None and parts is None:
        module.__path__ = _Path(path)
        module.__path__.run = run
    sys.modules[name] = module
    if package:
        setattr(package, last, module)


class _Compiled(type):
    """Recognises PyTorch's compiled modules; none exist before the compiler has run."""

    def __instancecheck__(cls, instance: Any) -> bool:
        real = vars(sys.modules["torch._dynamo"]).get("OptimizedModule")
        return real not in (None, cls) and isinstance(instance, real)


class OptimizedModule(metaclass=_Compiled):
    """Placeholder for the class of PyTorch's compiled modules."""


def disable(function: Callable[..., Any] | None = None, *args: Any, **more: Any) -> Any:
    """Replace ``torch._dynamo.disable``, which has no effect before the compiler has run."""
    compiler = sys.modules["torch._dynamo"]
    if not isinstance(function, FunctionType):
        compiler.__all__  # noqa: B018 - runs it
        return compiler.disable(function, *args, **more)
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        nonlocal disabled
        real = vars(compiler).get("disable")
        if disabled is None and real not in (None, disable):
            disabled = real(function, *args, **more)
        return (disabled or function)(*values, **named)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # the compiler skips it
    return call


def graph_break(*args: Any, **more: Any) -> None:
    """Replace ``torch._dynamo.graph_break``, which does nothing in code that is not compiled."""


def defer_unused() -> None:
    """Defer unused imports of Lightning, torchvision and optimizers; PyTorch must be imported."""
    given = {"OptimizedModule": OptimizedModule, "disable": disable, "graph_break": graph_break}
    defer("torch._dynamo", given)
    defer("torch._dynamo.utils", calls=("is_compile_supported",))
    parts = {
        "Metric": "torchmetrics.metric",
        "MetricCollection": "torchmetrics.collections",
        "__version__": "torchmetrics.__about__",
    }
    defer("torchmetrics", {"_logger": logging.getLogger("torchmetrics")}, parts=parts)
    defer("torchmetrics.functional", parts={})
    defer("torchmetrics.utilities", parts={"rank_zero_warn": "torchmetrics.utilities.prints"})
    types = {"_AX_TYPE": object, "_PLOT_OUT_TYPE": object}
    defer("torchmetrics.utilities.plot", types, calls=("plot_single_or_multi_val",))
    try:
        for module in parts.values():
            import_module(module)
    except ImportError:  # a version with other modules: import all of it
        for name in [*sys.modules]:
            if name.partition(".")[0] == "torchmetrics":
                del sys.modules[name]
