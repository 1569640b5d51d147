"""Every payload survives encoding and decoding; other bytes are refused or harmless."""

from __future__ import annotations

import contextlib
import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from feddg_bench.common.errors import DataError
from feddg_bench.core.messages import decode, encode, nbytes

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw):
    """Return a tensor of any type and layout, with up to four dimensions of 0 to 3 entries."""
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 2**32))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(100).to(dtype)
    layout = draw(st.sampled_from(["plain", "transposed", "channels last", "strided"]))
    if layout == "transposed":
        values = values.permute(list(reversed(range(values.dim()))))
    elif layout == "channels last" and values.dim() == 4:
        values = values.to(memory_format=torch.channels_last)
    elif layout == "strided" and values.dim():
        values = values[::2]
    return values


TEXT = st.text(max_size=8) | st.sampled_from(["tensor#0", "tensor#", "=", "=="])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | tensors()
PAYLOADS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def description(payload):
    """Return a complete description of a payload as text, types and NaN included."""
    if isinstance(payload, Tensor):
        return f"{payload.dtype}{tuple(payload.shape)}{payload.tolist()!r}"
    if isinstance(payload, list):
        return f"[{','.join(description(item) for item in payload)}]"
    if isinstance(payload, dict):
        return f"{{{','.join(f'{key!r}:{description(v)}' for key, v in payload.items())}}}"
    return f"{type(payload).__name__}:{payload!r}"


@given(PAYLOADS)
@example({text: text for text in ("tensor#0", "tensor#", "=", "=tensor#0", "", "\0\x1f\n")})
@example([None, True, 7, -0.5, "text", [], {}, [[]], {"a": {}}, 2**80, math.inf, math.nan])
@example([torch.tensor(2.5), torch.zeros(2, 0, 3), torch.ones(1).expand(3), torch.ones(2, 3).T])
@example([torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last)])
@example([torch.tensor([1.5, math.inf], dtype=kind) for kind in DTYPES[:3]])
@example([torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([True, False])])
def test_decode_undoes_encode(payload):
    assert description(decode(encode(payload))) == description(payload)


@given(PAYLOADS)
def test_bytes_are_a_function_of_the_content(payload):
    data = encode(payload)
    assert encode(decode(data)) == data
    assert nbytes(decode(data)) == nbytes(payload)


@given(st.lists(PAYLOADS, max_size=3))
def test_the_size_of_a_list_is_the_sum_of_its_items(items):
    assert nbytes(items) == sum(nbytes(item) for item in items)


@given(st.binary(max_size=200))
def test_noise_is_refused(data):
    with contextlib.suppress(DataError):
        decode(data)


@given(PAYLOADS, st.data())
def test_damage_is_refused_or_harmless(payload, data):
    message = bytearray(encode(payload))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        decode(bytes(message))
