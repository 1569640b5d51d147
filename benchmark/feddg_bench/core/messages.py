"""The messages between server and clients: plain records, never pickled, counted in bytes.

A payload holds tensors, numbers, strings, booleans, ``None``, lists and dictionaries of these (with
string keys), and nothing else. `encode` writes its tensors as safetensors and the rest as JSON in
the header. Processes exchange this format, and checkpoints store it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from feddg_bench.common.errors import DataError, PluginError

Weights = dict[str, Tensor]
"""Model state by name: parameters and buffers, detached."""

Payload = dict[str, Any]
"""Method-specific content: tensors, numbers and strings, in dicts and lists."""

T = TypeVar("T")

_TENSOR = "tensor#"
"""Marks a string in the JSON tree as the name of a tensor; plain strings are escaped with ``=``."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work for one client.

    Attributes:
        client: Name of the client.
        call: Name of the method function to run there, such as ``"fit"``.
        round: Round number from 1; 0 during ``prepare``.
        weights: Global model, as the client receives it; empty if the call needs none.
        broadcast: Content for all clients, in addition to the model.
        memory: State that this client kept from its previous task; no one else reads it.
        told: Content for this client only.
    """

    client: str
    call: str
    round: int
    weights: Mapping[str, Tensor]
    broadcast: Mapping[str, Any]
    memory: Payload = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalUpdate:
    """The value of a ``fit`` reply: local weights, and anything else the method sends."""

    weights: Weights
    extra: Payload = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """A client's answer to a task.

    Attributes:
        client: Name of the client.
        num_examples: Images the client trains on.
        value: Return value of the called function: a `LocalUpdate` or a payload.
        metrics: Weighted means of the values that the client logged, such as ``loss``.
        memory: The client's state; it stays with the executor and is never sent to the server.
        seconds: Wall time of the call (``work``) and of loading the weights (``copy``).
        counted: Only for a worker's first task of each call: operations per image (``flop an
            image``); see `feddg_bench.engine.flop`.
        clients: Number of clients that the reply covers: more than one if single replies are
            hidden and the value holds their mean (`feddg_bench.protection`).
    """

    client: str
    num_examples: int
    value: T
    metrics: Mapping[str, float]
    memory: Payload
    seconds: Mapping[str, float] = field(default_factory=dict)
    counted: Mapping[str, float] = field(default_factory=dict)
    clients: int = 1


def content(value: Any) -> Payload:
    """Return the content of a reply's value by declared name: ``weights`` and extras, or the dict.

    Raises:
        PluginError: If the value is neither a `LocalUpdate` nor a dictionary.
    """
    if isinstance(value, LocalUpdate) and isinstance(value.extra, dict):
        return {"weights": value.weights, **value.extra}
    if isinstance(value, dict):
        return value
    raise PluginError(
        f"a client function returned {type(value).__name__}; expected a LocalUpdate or a dict "
        f"whose keys the method declares in `uplink`"
    )


def leaves(payload: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return every tensor, number, string, boolean and None of a payload with its path.

    Raises:
        PluginError: If the payload holds anything that may not be sent.

    >>> [path for path, _ in leaves({"style": [1.0, 2.0], "count": 3})]
    ['style[0]', 'style[1]', 'count']
    """
    strange = type(payload).__name__
    if isinstance(payload, Tensor):
        if payload.layout == torch.strided and not payload.is_meta:
            return [(name, payload)]
        strange = f"tensor of layout {payload.layout} on {payload.device}"
    elif payload is None or isinstance(payload, int | float | str):
        return [(name, payload)]
    found: list[tuple[str, Any]] = []
    if isinstance(payload, Mapping):
        for key, item in payload.items():
            if not isinstance(key, str):
                raise PluginError(f"a message has the key {key!r}; keys of messages are strings")
            found += leaves(item, f"{name}.{key}" if name else key)
        return found
    if isinstance(payload, list):
        for number, item in enumerate(payload):
            found += leaves(item, f"{name}[{number}]")
        return found
    raise PluginError(
        f"a message holds a {strange}{name and f' as {name}'}; messages may hold dense "
        f"tensors, numbers, strings, booleans, None, and lists and dicts of these"
    )


def _changed(payload: Any, change: Callable[[Any], Any]) -> Any:
    """Return a payload with other leaves."""
    if isinstance(payload, Tensor):  # the most frequent leaf: other checks take longer
        return change(payload)
    if isinstance(payload, Mapping):
        return {key: _changed(item, change) for key, item in payload.items()}
    if isinstance(payload, list):
        return [_changed(item, change) for item in payload]
    return change(payload)


def plain(payload: Any, own: Set[int] = frozenset()) -> Any:
    """Return a payload as another process would get it: without gradients and NumPy's floats.

    Args:
        payload: Made by client code, a `LocalUpdate` or the payload itself; parts that may not be
            sent stay unchanged (see `leaves`).
        own: Addresses of tensors that will change later, and are therefore copied.
    """
    if isinstance(payload, LocalUpdate):
        return LocalUpdate(plain(payload.weights, own), plain(payload.extra, own))

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_meta:
            leaf = leaf.detach()
            return leaf.clone() if leaf.data_ptr() in own else leaf
        return float(leaf) if isinstance(leaf, float) else leaf

    return _changed(payload, change)


def nbytes(payload: Any) -> int:
    """Return the size of the content in bytes: tensors as stored, 8 per number, UTF-8 strings.

    Keys and framing are not counted: both sides know them, and the published overheads leave
    them out too.

    Raises:
        PluginError: If the payload holds anything that may not be sent.

    >>> nbytes({"style": torch.zeros(2, 512), "count": 3})
    4104
    """
    return sum(leaf_bytes(leaf) for _, leaf in leaves(payload))


def leaf_bytes(leaf: Any) -> int:
    """Return the size of one of `leaves`; see `nbytes`."""
    if isinstance(leaf, Tensor):
        return leaf.numel() * leaf.element_size()
    if isinstance(leaf, str):
        return len(leaf.encode())
    return 0 if leaf is None else 1 if isinstance(leaf, bool) else 8


def copied(payload: Any, device: torch.device | None = None) -> Any:
    """Return a deep copy of the payload, with its tensors on ``device`` if that is given."""

    def change(leaf: Any) -> Any:
        return leaf.to(device or leaf.device, copy=True) if isinstance(leaf, Tensor) else leaf

    return _changed(payload, change)


def encode(payload: Any) -> bytes:
    """Return the payload as safetensors bytes; tensors go to the CPU.

    Raises:
        PluginError: If the payload holds anything that may not be sent.
    """
    leaves(payload)  # raises if anything may not be sent
    tensors: dict[str, Tensor] = {}

    def strip(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            name = str(len(tensors))
            tensors[name] = leaf.detach().to("cpu", copy=True).contiguous()
            return _TENSOR + name
        return "=" + leaf if isinstance(leaf, str) else leaf

    return save(tensors, metadata={"tree": json.dumps(_changed(payload, strip))})


def decode(data: bytes) -> Any:
    """Return the payload that `encode` was given, with its tensors on the CPU.

    Raises:
        DataError: If the bytes are truncated or in another format.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        tree = json.loads(header["__metadata__"]["tree"])
        return _fill(tree, load(data))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError("the bytes are cut short or were not written by feddg-bench") from error


def decode_file(path: str) -> Any:
    """Return the payload of a file with bytes of `encode`; its tensors are read when used."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _fill(json.loads(file.metadata()["tree"]), tensors)


def _fill(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return JSON values with tensors in place of their names."""

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, str):
            return leaf
        return tensors[leaf.removeprefix(_TENSOR)] if leaf.startswith(_TENSOR) else leaf[1:]

    return _changed(tree, fill)
