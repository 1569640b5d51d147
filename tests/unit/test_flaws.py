"""Values that must not be aggregated: found and named in all kinds of tensors and numbers."""

from __future__ import annotations

import math

import pytest
import torch

from feddg_bench.core.flaws import Flaw, misfit, misform, nonfinite
from feddg_bench.core.messages import leaves

MODEL = {"w": torch.zeros(2, 3), "n": torch.tensor(3)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_bad_tensor_is_named(bad, dtype):
    payload = {
        "weights": {"fine": torch.ones(3), "net.0.bias": torch.tensor([[0.0, bad]], dtype=dtype)},
    }
    assert nonfinite(leaves(payload)) == Flaw("weights.net.0.bias", "holds NaN or infinity")


def test_the_first_bad_tensor_in_a_list_is_named():
    bad = torch.tensor([math.nan])
    flaw = nonfinite(leaves({"ok": torch.ones(1), "styles": [torch.ones(1), bad, bad]}))
    assert flaw is not None
    assert flaw.name == "styles[1]"


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        -math.inf,
        torch.tensor([1.0, complex(0, math.nan)]),
        torch.tensor([complex(math.inf, 0)]),
        torch.tensor([math.nan], dtype=torch.float8_e4m3fn),
        torch.tensor(math.inf),
    ],
    ids=["nan", "-inf", "complex nan", "complex inf", "float8", "scalar"],
)
def test_every_kind_of_number_is_looked_at(value):
    flaw = nonfinite(leaves({"a": [torch.ones(2), {"gap": value}]}))
    assert flaw is not None
    assert (flaw.name, flaw.form) == ("a[1].gap", False)


@pytest.mark.parametrize("value", [3e38, -3e38, 1.9e19])
def test_a_number_whose_square_overflows_is_too_large(value):
    flaw = nonfinite(leaves({"w": torch.tensor([1.0, value])}))
    assert flaw is not None
    assert "too large" in flaw.reason


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"w": torch.zeros(0)},
        {"counter": torch.tensor(2**62)},
        {"w": torch.full((2, 2), -1e19)},  # the root of the sum of squares overflows
        {"w": torch.full((9,), 6e4, dtype=torch.float16)},  # likewise
        {"x": 1e300, "n": 10**40, "text": "nan", "none": None},
    ],
)
def test_sound_payloads(payload):
    assert nonfinite(leaves(payload)) is None


@pytest.mark.parametrize(
    ("weights", "name", "said"),
    [
        ({"w": torch.zeros(2, 3)}, "n", "missing"),
        ({**MODEL, "extra": torch.zeros(1)}, "extra", "not part"),
        ({**MODEL, "w": torch.zeros(1)}, "w", "float32 [1], expected float32 [2, 3]"),
        ({**MODEL, "w": torch.zeros(3, 2)}, "w", "[3, 2]"),
        ({**MODEL, "w": torch.zeros(2, 3).half()}, "w", "float16"),
        ({**MODEL, "w": torch.zeros(2, 3).double()}, "w", "float64"),
        ({**MODEL, "w": torch.zeros(2, 3, dtype=torch.complex64)}, "w", "complex64"),
        ({**MODEL, "n": torch.tensor(3.0)}, "n", "float32 []"),
        ({**MODEL, "w": "text"}, "w", "str"),
        ({**MODEL, "w": [1.0]}, "w", "list"),
        ({}, "w", "missing"),
        ("text", "", "str"),
        (None, "", "NoneType"),
    ],
)
def test_states_of_another_form(weights, name, said):
    flaw = misfit(weights, MODEL)
    assert flaw is not None
    assert (flaw.name, flaw.form) == (name, True)
    assert said in flaw.reason


def test_a_state_of_the_models_form():
    assert misfit({"n": torch.tensor(0), "w": torch.ones(2, 3)}, MODEL) is None
    assert misfit({"n": torch.tensor(0)}, MODEL, whole=False) is None


@pytest.mark.parametrize(
    ("value", "form", "sound"),
    [
        (MODEL, "model", True),
        ({"n": MODEL["n"]}, "model", False),
        ({"n": MODEL["n"]}, "part of model", True),
        ({"x": MODEL["n"]}, "part of model", False),
        ({"n": MODEL["n"]}, "model without w", True),
        (MODEL, "model without w", False),
        (3, "int", True),
        (True, "int", False),
        (None, "int", False),
        (3, "float32 []", False),
        (torch.zeros(5, 2, 7), "float32 [n, 2, C]", True),
        (torch.zeros(5, 2, 8), "float32 [n, 2, C]", False),
        (torch.zeros(5, 3, 7), "float32 [n, 2, C]", False),
        (torch.zeros(2, 7), "float32 [n, 2, C]", False),
        (torch.zeros(5, 2), "float32 [n, 2, C]", False),
        (torch.zeros(5, 2, 7, 1), "float32 [n, 2, C]", False),
        (torch.zeros(5, 2, 7).double(), "float32 [n, 2, C]", False),
        ({"1": [torch.zeros(4, 7)], "2": []}, "float32 [j, C]", True),
        ({"1": [torch.zeros(4, 7), torch.zeros(4, 6)]}, "float32 [j, C]", False),
        ("anything", "", True),
        ({"x": MODEL["w"]}, "model within net.", False),
        (None, "float | NoneType", True),
        (1, "float | NoneType", False),
        ([], "float", False),
        ([1.0], "float", False),
        ({"a": 1, "b": torch.zeros(7)}, {"a": "int", "b": "float32 [C]"}, True),
        ({"a": 1}, {"a": "int", "b": "float32 [C]"}, False),
        ({"a": 1, "b": "x"}, {"a": "int", "b": "float32 [C]"}, False),
        ([1], {"a": "int"}, False),
        (torch.zeros(2, 2), "flot32 2, 2", False),
    ],
)
def test_declared_forms(value, form, sound):
    assert (misform("style", value, form, MODEL, {"C": 7}) is None) == sound


def test_names_behind_a_prefix():
    model = {"net.w": torch.zeros(2), "head.w": torch.zeros(3)}
    assert misform("g", {"w": torch.ones(3)}, "model within head.", model, {}) is None
    assert misform("g", {"w": torch.ones(2)}, "model within head.", model, {}) is not None


def test_a_letter_is_what_came_first():
    sizes = {}
    assert misform("s", torch.zeros(2, 5), "float32 [2, C]", MODEL, sizes) is None
    assert sizes == {"C": 5}
    flaw = misform("s", torch.zeros(2, 6), "float32 [2, C]", MODEL, sizes)
    assert flaw is not None
    assert (flaw.name, flaw.reason) == (
        "s",
        "is float32 [2, 6], expected float32 [2, C] with C = 5",
    )
