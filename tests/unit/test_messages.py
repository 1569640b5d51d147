"""Messages: round trip, refusals, sizes in bytes, damaged bytes and leaves."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.testing import assert_close

from feddg_bench.common.errors import DataError, PluginError
from feddg_bench.config.schema import BackboneSettings
from feddg_bench.core.messages import (
    LocalUpdate,
    content,
    copied,
    decode,
    encode,
    leaves,
    nbytes,
    plain,
)
from feddg_bench.models.backbones import build_backbone
from tests.helpers import refused

SMALL = {
    "name": "client_3 \N{LATIN SMALL LETTER E WITH ACUTE}",
    "styles": [torch.arange(4.0), torch.tensor(3, dtype=torch.int64)],
    "nested": {"empty": {}, "none": None, "flag": True},
}


# ------------------------------------------------------------------------------ round trip


def test_a_parameter_arrives_as_a_plain_tensor():
    back = decode(encode(nn.Parameter(torch.ones(2))))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


def test_a_tensor_sent_twice_arrives_as_two():
    shared = torch.arange(3.0)
    first, second = decode(encode([shared, {"again": shared[:]}])), shared
    first[0].zero_()
    assert_close(first[1]["again"], second)


def test_what_arrives_is_a_copy():
    weights = torch.ones(2)
    data = encode(weights)
    weights.zero_()
    assert_close(decode(data), torch.ones(2))


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        ((1, 2), "tuple"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (np.zeros(2), "ndarray"),
        (np.int64(3), "int64"),
        (1j, "complex"),
        (nn.Linear(1, 1), "Linear"),
    ],
)
@pytest.mark.parametrize("function", [encode, nbytes])
def test_other_objects_may_not_cross(function, value, kind):
    with pytest.raises(PluginError) as caught:
        function({"extra": [value]})
    assert f"a message holds a {kind} as extra[0];" in str(caught.value)


@pytest.mark.parametrize("key", [1, None, (0, 1), True])
@pytest.mark.parametrize("function", [encode, nbytes])
def test_keys_are_strings(function, key):
    with pytest.raises(PluginError) as caught:
        function({"prototypes": {"0": 1.0, key: 2.0}})
    assert str(caught.value) == f"a message has the key {key!r}; keys of messages are strings"


def test_content_is_what_a_reply_declares():
    weights = {"w": torch.ones(1)}
    assert content(LocalUpdate(weights, {"loss": 0.5})) == {"weights": weights, "loss": 0.5}
    assert content({"style": 1}) == {"style": 1}


@pytest.mark.parametrize(("value", "kind"), [(torch.ones(1), "Tensor"), (None, "NoneType")])
def test_a_reply_must_have_named_content(value, kind):
    with refused(PluginError, f"returned {kind}; expected a LocalUpdate or a dict"):
        content(value)


# ----------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("payload", "size"),
    [
        (torch.zeros(2, 512), 4096),
        ({"style": torch.zeros(2, 512)}, 4096),
        (torch.zeros(2, 512, dtype=torch.bfloat16), 2048),
        (torch.zeros(3, dtype=torch.int64), 24),
        (torch.zeros(0), 0),
        (torch.ones(1).expand(10), 40),
        (None, 0),
        (True, 1),
        (7, 8),
        (0.5, 8),
        ("caf\N{LATIN SMALL LETTER E WITH ACUTE}", 5),
        ([1, [2.0, "x"], {"long key": False}], 18),
        ({}, 0),
    ],
)
def test_sizes(payload, size):
    assert nbytes(payload) == size


def test_size_of_a_published_model():
    """ResNet-18 with 7 classes: 11,189,703 floats and 20 counters of 8 bytes."""
    with torch.device("cpu"):
        backbone = build_backbone(BackboneSettings(name="resnet18", pretrained=False))
        model = nn.Sequential(backbone, nn.Linear(512, 7))
    assert nbytes(model.state_dict()) == 44_758_972


# ------------------------------------------------------------------------------ bad bytes


def test_a_message_cut_short_anywhere_is_refused():
    data = encode(SMALL)
    for length in range(len(data)):
        with refused(DataError, "cut short or were not written by feddg-bench"):
            decode(data[:length])
    assert decode(data)["name"] == SMALL["name"]


def test_a_message_without_tensors_cut_short_anywhere_is_refused():
    data = encode({"start": True})
    for length in range(len(data)):
        with pytest.raises(DataError):
            decode(data[:length])


def test_a_message_with_something_behind_it_is_refused():
    with pytest.raises(DataError):
        decode(encode(SMALL) + b"more")


def _framed(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        b"not a message",
        b"\xff" * 64,
        bytes(64),
        save({"w": torch.ones(2)}),
        save({"w": torch.ones(2)}, metadata={"tree": "{not JSON"}),
        save({"w": torch.ones(2)}, metadata={"tree": '"tensor#missing"'}),
        _framed([]),
        _framed(3),
        _framed(None),
        _framed({"__metadata__": None}),
        _framed({"__metadata__": {"tree": 3}}),
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(DataError):
        decode(data)


def test_a_pickle_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    with pytest.raises(DataError):
        decode(pickle.dumps(Trap()))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "value", [torch.eye(2).to_sparse(), torch.zeros(2, device="meta")], ids=str
)
def test_what_has_no_encoding_is_refused_by_name(value):
    for function in (encode, nbytes):
        with refused(PluginError, "as extra.x"):
            function({"extra": {"x": value}})


def test_a_payload_is_made_plain():
    own = torch.zeros(2)
    parameter = torch.nn.Parameter(torch.ones(2))
    found = plain({"a": [own, parameter * 2, np.float64(0.5)], "n": 3}, {own.data_ptr()})
    copy, computed, number = found["a"]
    assert (copy.data_ptr() != own.data_ptr(), computed.requires_grad) == (True, False)
    assert (type(number), type(found["n"])) == (float, int)


def test_a_deep_header_is_refused():
    with pytest.raises(DataError):
        decode(_framed({"__metadata__": {"tree": "[" * 100_000}}))
    text = b"[" * 100_000
    with pytest.raises(DataError):
        decode(len(text).to_bytes(8, "little") + text)


# ---------------------------------------------------------------------------------- leaves


def test_leaves_by_their_paths():
    payload = {"a": {"b": [1, None, {"c": "x"}]}, "d": torch.ones(1), "e": {}, "f": []}
    found = dict(leaves(payload))
    assert list(found) == ["a.b[0]", "a.b[1]", "a.b[2].c", "d"]
    assert found["d"] is payload["d"]


def test_a_copy_shares_nothing():
    payload = {"a": [torch.zeros(2), {"b": torch.zeros(1)}], "n": 3}
    other = copied(payload)
    other["a"][0] += 1
    other["a"][1]["b"] += 1
    other["a"].append("more")
    assert payload["a"][0].tolist() == [0, 0]
    assert payload["a"][1]["b"].item() == 0
    assert len(payload["a"]) == 2
    strided = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert copied(strided).stride() == strided.stride()
