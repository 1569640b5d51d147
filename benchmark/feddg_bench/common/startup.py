"""Faster start of the command: modules that its libraries import, and that a run does not use."""

import os
import sys
from abc import ABCMeta
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any

SWITCH = "FEDDG_QUICK_START"
"""Environment variable that the command sets, for itself and its worker processes."""


def quicken() -> None:
    """Defer PyTorch's compiler and torchmetrics, if this is a process of the command.

    They take more than half of the start. Lightning and torchvision import them for a few names,
    and so does the first step of an optimizer. Nothing changes in other programs.
    """
    if SWITCH not in os.environ or "lightning" in sys.modules or "torch._dynamo" in sys.modules:
        return
    import torch

    def defer(name: str, *classes: str, inside: ModuleType | None = None, **given: Any) -> Any:
        spec: Any = PathFinder.find_spec(name, vars(inside)["__path__"] if inside else None)
        module = sys.modules[name] = module_from_spec(spec)
        vars(module).update(given)
        for kind in classes:
            vars(module)[kind] = _Late(kind, (torch.nn.Module,), {"__module__": name})
        module.__class__ = _Unused
        if inside:
            setattr(inside, name.rpartition(".")[2], module)
        return module

    def supported(device: str) -> Any:
        utils.run()
        return utils.is_compile_supported(device)

    names = {"disable": _disable, "graph_break": lambda *_, **__: None}
    compiler = defer("torch._dynamo", "OptimizedModule", inside=torch, **names)
    utils = defer("torch._dynamo.utils", inside=compiler, is_compile_supported=supported)
    defer("torchmetrics", "Metric", "MetricCollection")
    sys.meta_path.insert(0, SimpleNamespace(find_spec=_inside))


class _Unused(ModuleType):
    """Runs when a name is read that it was not given, or when a module inside it is imported."""

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        self.run()
        return getattr(self, key)

    def run(self) -> None:
        package = sys.modules.get(self.__name__.rpartition(".")[0])
        if isinstance(package, _Unused):
            package.run()
        if isinstance(self, _Unused):  # its package has not run it
            self.__class__ = ModuleType  # type: ignore[assignment]
            self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]


def _inside(name: str, *_: object) -> ModuleSpec | None:
    """Find a module inside an unused package: Python runs the package first."""
    package = sys.modules.get(name.rpartition(".")[0])
    if not isinstance(package, _Unused):
        return None
    package.run()
    made: Any = sys.modules.get(name)
    loader: Any = SimpleNamespace(create_module=lambda _: made, exec_module=lambda _: None)
    return ModuleSpec(name, loader) if made else None


class _Late(ABCMeta):
    """The type of a class in an unused module. A subclass gets the real base when it is called."""

    def __instancecheck__(cls, value: object) -> bool:
        real = vars(sys.modules[cls.__module__]).get(cls.__name__, cls)
        return super().__instancecheck__(value) if real is cls else isinstance(value, real)

    def __call__(cls, *args: Any, **more: Any) -> Any:
        for base in cls.__bases__:
            if isinstance(module := sys.modules[base.__module__], _Unused):
                module.run()
        cls.__bases__ = tuple(getattr(sys.modules[b.__module__], b.__name__) for b in cls.__bases__)
        return super().__call__(*args, **more)


def _disable(function: Any = None, *_: object, **__: object) -> Any:
    """Return the function, marked as one that the compiler skips."""
    if function is None:
        return _disable
    with suppress(AttributeError):
        function._torchdynamo_disable = True
    return function
