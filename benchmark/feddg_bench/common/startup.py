"""Faster start of the command: modules that its libraries import, and that a run does not use."""

import os
import sys
from importlib import import_module, util
from types import ModuleType, SimpleNamespace
from typing import Any

from feddg_bench.common.limits import check_address_space

SWITCH = "FEDDG_QUICK_START"
"""Environment variable that the command sets, for itself and its worker processes."""


def quicken() -> None:
    """Stand in for PyTorch's compiler and torchmetrics, if this is a process of the command.

    They take more than half of the start. Lightning and torchvision import them for a few names,
    and so does each step of an optimizer. Nothing changes in other programs.
    """
    if SWITCH not in os.environ or "lightning" in sys.modules or "torch._dynamo" in sys.modules:
        return
    check_address_space()
    _stand_in("torch._dynamo", "OptimizedModule", disable=_unchanged, graph_break=_unchanged)
    _stand_in("torch._dynamo.utils", is_compile_supported=_is_compile_supported)
    _stand_in("torchmetrics", "Metric", "MetricCollection")
    sys.meta_path.insert(0, SimpleNamespace(find_spec=_inside))


class _Unused(ModuleType):
    """A stand-in; the real module is imported when an unknown name or a part of it is used."""

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return getattr(_real(self.__name__), key)


def _stand_in(name: str, *classes: str, **known: Any) -> None:
    module = sys.modules[name] = _Unused(name)
    known |= {each: _Late(each, (), {"__module__": name}) for each in classes}
    vars(module).update(known, __path__=[])


def _real(name: str) -> Any:
    """Import a module after all stand-ins have made room."""
    for each in [name for name, module in sys.modules.items() if isinstance(module, _Unused)]:
        del sys.modules[each]
    return import_module(name)


def _inside(name: str, *_: object) -> Any:
    """Find a module inside an unused package."""
    loader: Any = SimpleNamespace(create_module=lambda _: _real(name), exec_module=id)
    unused = isinstance(sys.modules.get(name.rpartition(".")[0]), _Unused)
    return util.spec_from_loader(name, loader) if unused else None


class _Late(type):
    """The type of a stand-in for a class; calling a subclass gives it the real base."""

    def __instancecheck__(cls, value: object) -> bool:
        return issubclass(type(value), getattr(sys.modules.get(cls.__module__), cls.__name__, cls))

    def __call__(cls, *args: Any, **more: Any) -> Any:
        cls.__bases__ = tuple(getattr(_real(b.__module__), b.__name__) for b in cls.__bases__)
        return super().__call__(*args, **more)


def _unchanged(function: Any = None, *_: object, **__: object) -> Any:
    return function or _unchanged


def _is_compile_supported(device: str) -> Any:
    return _real("torch._dynamo.utils").is_compile_supported(device)
