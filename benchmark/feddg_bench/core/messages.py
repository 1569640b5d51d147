"""What server and clients say to each other: plain records, never pickled, counted in bytes.

A payload holds tensors, numbers, strings, booleans, ``None``, lists and dictionaries of these (with
string keys), and nothing else. `encode` writes it as safetensors for the tensors with the rest as
JSON in the header; that is what crosses processes and what a checkpoint holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
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
        weights: Global model, as the client receives it; empty where the call needs none.
        broadcast: What the server tells every client besides the model.
        memory: What this client kept from its previous task; no one else reads it.
        told: What the server tells this client alone.
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
        value: What the called function returned: a `LocalUpdate` or a payload.
        metrics: Weighted means of what the client logged, such as ``loss``.
        memory: What the client keeps; it stays with the executor and is never sent to the server.
        seconds: Wall time of the call (``work``) and of copying weights in (``copy``).
    """

    client: str
    num_examples: int
    value: T
    metrics: Mapping[str, float]
    memory: Payload
    seconds: Mapping[str, float] = field(default_factory=dict)


def content(value: Any) -> Payload:
    """Return what a reply's value sends, by declared name: ``weights`` and extras, or its keys.

    Raises:
        PluginError: If the value is neither a `LocalUpdate` nor a dictionary.
    """
    if isinstance(value, LocalUpdate):
        return {"weights": value.weights, **value.extra}
    if isinstance(value, dict):
        return value
    raise PluginError(
        f"a client function returned {type(value).__name__}; expected a LocalUpdate or a dict "
        f"whose keys the method declares in `uplink`"
    )


def nbytes(payload: Any) -> int:
    """Return the size of the content in bytes: tensors as stored, 8 a number, UTF-8 strings.

    Keys and framing are not counted: both sides know them, and the published overheads leave
    them out too.

    Raises:
        PluginError: If the payload holds anything that may not cross.

    >>> nbytes({"style": torch.zeros(2, 512), "count": 3})
    4104
    """
    if isinstance(payload, Tensor):
        return payload.numel() * payload.element_size()
    if payload is None:
        return 0
    if isinstance(payload, bool):
        return 1
    if isinstance(payload, int | float):
        return 8
    if isinstance(payload, str):
        return len(payload.encode())
    if isinstance(payload, list):
        return sum(nbytes(item) for item in payload)
    if isinstance(payload, Mapping):
        _check_keys(payload)
        return sum(nbytes(item) for item in payload.values())
    raise PluginError(_refusal(payload))


def encode(payload: Any) -> bytes:
    """Return the payload as safetensors bytes; tensors go to the CPU.

    Raises:
        PluginError: If the payload holds anything that may not cross.
    """
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_strip(payload, tensors))
    return save(tensors, metadata={"tree": tree})


def decode(data: bytes) -> Any:
    """Return the payload that `encode` was given, with its tensors on the CPU.

    Raises:
        DataError: If the bytes are cut short or are something else.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        tree = json.loads(header["__metadata__"]["tree"])
        return _fill(tree, load(data))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError("the bytes are cut short or were not written by feddg-bench") from error


def _strip(payload: Any, tensors: dict[str, Tensor]) -> Any:
    """Move tensors into ``tensors`` and return the rest as JSON values."""
    if isinstance(payload, Tensor):
        name = str(len(tensors))
        tensors[name] = payload.detach().to("cpu", copy=True).contiguous()
        return _TENSOR + name
    if isinstance(payload, str):
        return "=" + payload
    if payload is None or isinstance(payload, bool | int | float):
        return payload
    if isinstance(payload, list):
        return [_strip(item, tensors) for item in payload]
    if isinstance(payload, Mapping):
        _check_keys(payload)
        return {key: _strip(item, tensors) for key, item in payload.items()}
    raise PluginError(_refusal(payload))


def _fill(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, str):
        return tensors[tree.removeprefix(_TENSOR)] if tree.startswith(_TENSOR) else tree[1:]
    if isinstance(tree, list):
        return [_fill(item, tensors) for item in tree]
    if isinstance(tree, dict):
        return {key: _fill(item, tensors) for key, item in tree.items()}
    return tree


def _check_keys(payload: Mapping[Any, Any]) -> None:
    for key in payload:
        if not isinstance(key, str):
            raise PluginError(f"a message has the key {key!r}; keys of messages are strings")


def _refusal(payload: Any) -> str:
    return (
        f"a message holds a {type(payload).__name__}; messages may hold tensors, numbers, strings, "
        f"booleans, None, and lists and dicts of these"
    )


def nonfinite(payload: Any, name: str = "") -> str | None:
    """Return the name of the first floating tensor that holds NaN or infinity, or ``None``."""
    named = dict(_floating(payload, name))
    if not named:
        return None
    device = next(iter(named.values())).device
    largest = torch.stack(
        [norm.double().to(device) for norm in torch._foreach_norm(list(named.values()), torch.inf)]
    )
    finite = torch.isfinite(largest)
    if bool(finite.all()):
        return None
    return list(named)[int((~finite).nonzero()[0])]


def _floating(payload: Any, name: str) -> list[tuple[str, Tensor]]:
    if isinstance(payload, Tensor):
        return [(name, payload)] if payload.is_floating_point() and payload.numel() else []
    if isinstance(payload, Mapping):
        items = [(f"{name}.{key}" if name else key, item) for key, item in payload.items()]
    elif isinstance(payload, list):
        items = [(f"{name}[{i}]", item) for i, item in enumerate(payload)]
    else:
        return []
    return [found for key, item in items for found in _floating(item, key)]
