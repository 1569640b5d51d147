"""Isolate clients from each other: undo, or refuse, the side effects of a client's work.

Without this, results would depend on which clients share a process. The checks are cheap enough for
every task. They miss changes inside a list or an object that an attribute refers to, and patches of
libraries other than ``torch.nn.functional``; the contract and `Worker.run_all` look for the effects
of these. Client code gets only copies of images and labels (see
`feddg_bench.data.client_images.Lent`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from operator import is_
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddg_bench.common.errors import PluginError

logger = logging.getLogger(__name__)

Attributes = dict[Any, Any]
"""An object's ``__dict__``, or a dictionary inside it, such as a module's hooks."""


_ENVIRONMENT: dict[Any, Any] = vars(os.environ)["_data"]
"""The encoded variables: decoding and copying all of them takes a hundred times as long."""


def _folder() -> str:
    with suppress(OSError):  # the folder was deleted
        return os.getcwd()  # noqa: PTH109 - a tenth of the time
    return ""


_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("the working folder", _folder, os.chdir),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    ("whether PyTorch computes gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    ("PyTorch's default type", torch.get_default_dtype, torch.set_default_dtype),
)
"""Settings of the process: name, how to read it, how to set it."""


class Kept:
    """A snapshot of dictionaries, to be restored later. Values are compared by identity."""

    def __init__(self, dictionaries: Sequence[Attributes]) -> None:
        self._full = [each for each in dictionaries if each]
        self._empty = [each for each in dictionaries if not each]  # most are empty, and stay so
        self._then = [dict.copy(each) for each in self._full]

    def restore(self) -> list[tuple[Attributes, set[Any]]]:
        """Restore everything, and return what had changed: dictionaries and their keys."""
        now, then = self._full, self._then
        changed: list[tuple[Attributes, set[Any]]] = []
        for each in filter(None, self._empty):
            changed.append((each, set(each)))
            each.clear()
        if [*map(len, now)] == [*map(len, then)] and all(map(is_, _values(now), _values(then))):
            return changed
        for new, old in zip(now, then, strict=True):
            keys = _changed(new, old)
            if keys or [*new] != [*old]:
                new.clear()
                new.update(old)
                changed.append((new, keys))
        return changed


def _values(dictionaries: Iterable[Attributes]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dictionaries))


def _changed(new: Mapping[Any, Any], old: Mapping[Any, Any]) -> set[Any]:
    """Return the keys that only one of two mappings has, or whose objects differ."""
    common = new.keys() & old.keys()
    return (new.keys() ^ old.keys()) | {key for key in common if new[key] is not old[key]}


class _Frozen:
    """A snapshot of tensors, to be restored later.

    PyTorch's version counters miss writes through ``.data`` or ``.numpy()``.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._now = [t.detach().view(_BITS.get(t.itemsize, t.dtype)) for t in tensors.values()]
        self._then = [tensor.clone() for tensor in self._now]

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Restore everything, and return the names of changed tensors.

        Tensors on a GPU are never named, since each comparison would wait for the GPU.
        """
        if not self.tensors:
            return []
        pairs = zip(self.tensors, self._now, self._then, strict=True)
        changed = [name for name, now, then in pairs if now.is_cpu and not torch.equal(now, then)]
        if changed or any(not now.is_cpu for now in self._now):
            torch._foreach_copy_(self._now, self._then)
        return changed


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type for each size in bytes: compared as integers, NaN equals itself."""


class Isolation:
    """Undoes the changes that client work made to its process and its module.

    Attributes:
        undone: Descriptions of the changes that were undone so far.

    Args:
        module: The method.
        classes: Its classes, whose attributes must not change.
        tensors: The module's state by name.
        frozen: The part of the state that must never change.
        data: Other tensors that must never change, by name. No attribute of a client leads to them.
        shared: Other objects whose attributes must not change, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        classes: Iterable[type],
        tensors: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
        data: Mapping[str, Tensor],
        shared: Mapping[str, object],
    ) -> None:
        self.undone: set[str] = set()
        self._tensors = dict(tensors)
        self._frozen = _Frozen({f"{name}, which is frozen": t for name, t in frozen.items()})
        self._constant = {**self._frozen.tensors, **data}
        self._dictionaries: list[Attributes] = []
        self._names: dict[int, tuple[str, str]] = {}  # by the dictionary's id
        for name, each in module.named_modules():
            self._add("module", name, vars(each))
            for key, value in vars(each).items():
                if isinstance(value, dict):
                    self._add(key, name, value)
        for name, thing in shared.items():
            self._add("shared", name, vars(thing))
        self._owners: list[type | ModuleType] = [F, *classes]

    def _add(self, kind: str, name: str, dictionary: Attributes) -> None:
        self._names[id(dictionary)] = kind, name
        self._dictionaries.append(dictionary)

    @contextmanager
    def around(self, who: str) -> Iterator[None]:
        """Undo, after a block, the changes that client code made in it; ``who`` is the client.

        Raises:
            PluginError: If the block wrote into tensors that all clients share.
        """
        attributes = Kept(self._dictionaries)
        settings = [read() for _, read, _ in _SETTINGS]
        environment = dict.copy(_ENVIRONMENT)
        functions = [dict(vars(owner)) for owner in self._owners]
        tensors = self._tensors.values()
        gradients = [t.requires_grad for t in tensors]
        hooks = [_hooks(t) for t in tensors]
        versions = [t._version for t in self._constant.values()]
        try:
            yield
        finally:
            undone = {self._told(*each) for each in attributes.restore()}
            for (name, read, put), before in zip(_SETTINGS, settings, strict=True):
                if read() != before:
                    put(before)
                    undone.add(name)
            if environment != _ENVIRONMENT:
                os.environ.clear()
                os.environ.update((os.fsdecode(k), os.fsdecode(v)) for k, v in environment.items())
                undone.add("environment variables")
            for owner, before in zip(self._owners, functions, strict=True):
                undone |= _put_back(owner, before)
            for name, tensor, gradient, hook in zip(
                self._tensors, tensors, gradients, hooks, strict=True
            ):
                tensor.grad = None
                if tensor.requires_grad != gradient:
                    tensor.requires_grad_(gradient)
                    undone.add(f"whether {name} takes gradients")
                if _hooks(tensor) != hook:
                    now = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
                    for found, before in zip(now, hook, strict=True):
                        if found is not None:  # PyTorch itself reads these dictionaries
                            found.clear()
                            found.update(before)
                    undone.add(f"the hooks of {name}")
            self._note(who, undone - {""})
            rewritten = self._frozen.restore()
        constant = zip(self._constant.items(), versions, strict=True)
        written = [name for (name, tensor), before in constant if tensor._version != before]
        if written := [*written, *rewritten]:
            raise PluginError(
                f"it wrote into {written[0]}: other clients use the same tensor, so write into a "
                f"copy, such as tensor.clone()"
            )

    def _told(self, dictionary: Attributes, keys: set[Any]) -> str:
        """Return a description of an undone change; "" for attributes that may come and go."""
        kind, name = self._names[id(dictionary)]
        if kind == "shared":
            return name
        where = name or "the module"
        if kind.endswith("hooks"):
            return f"the hooks of {where}"
        if kind == "module":
            named = keys & {"training", "forward"}
            return f"{min(named)} of {where}" if named else ""
        return f"{kind.removeprefix('_')} of {where}"

    def _note(self, who: str, undone: set[str]) -> None:
        """Record the undone changes, and warn of each only once."""
        for what in sorted(undone - self.undone):
            logger.warning("%s changed %s, which was put back for the next client", who, what)
        self.undone |= undone


def _hooks(tensor: Tensor) -> list[dict[int, Any]]:
    """Return copies of a tensor's hooks: on its gradient, and after gradient accumulation."""
    return [dict(tensor._backward_hooks or ()), dict(tensor._post_accumulate_grad_hooks or ())]


def _put_back(owner: type | ModuleType, before: Mapping[str, Any]) -> set[str]:
    """Restore the functions of a class or a library, and return those that had been replaced.

    New attributes of a library stay: they can be modules that were imported meanwhile.
    """
    if [*vars(owner).values()] == [*before.values()]:  # functions and classes compare by identity
        return set()
    changed = _changed(vars(owner), before)
    if isinstance(owner, ModuleType):
        changed &= before.keys()
    for name in changed:
        if name in before:
            setattr(owner, name, before[name])
        else:
            delattr(owner, name)
    return {f"{owner.__name__}.{name}" for name in changed}
