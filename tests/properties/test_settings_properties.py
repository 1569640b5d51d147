"""Merging layers of settings is associative; every error message is one line."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import dotted_keys, merge, parse_override, validate
from feddg_bench.config.schema import RunSettings

BASE = {"method": "fedavg", "scenario": "ac-p-s"}

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = SCALARS | st.lists(SCALARS, max_size=3)
# As in the settings, a name stands either for a group (capitals here) or for a value, never both.
LAYERS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3),
    lambda inner: st.builds(
        lambda values, groups: {**values, **groups},
        st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3),
        st.dictionaries(st.sampled_from("AB"), inner, max_size=2),
    ),
    max_leaves=6,
)


def flat(layer, prefix=""):
    """Return values by dotted key, as text so that NaN equals itself."""
    found = {}
    for key, value in layer.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = repr(value)
    return found


@given(LAYERS, LAYERS, LAYERS)
def test_merging_is_associative(a, b, c):
    assert flat(merge(merge(a, b), c)) == flat(merge(a, merge(b, c))) == flat(merge(a, b, c))


@given(st.lists(LAYERS, max_size=4))
def test_the_last_layer_that_names_a_key_wins(layers):
    expected = {}
    for layer in layers:
        expected |= flat(layer)
    assert flat(merge(*layers)) == expected


@given(LAYERS)
def test_an_empty_layer_changes_nothing(layer):
    assert flat(merge({}, layer)) == flat(merge(layer, {})) == flat(merge(layer)) == flat(layer)


def refusal(function, *args):
    """Return the message with which a function refuses its arguments, or ``None``."""
    try:
        function(*args)
    except SettingsError as error:
        return str(error)
    return None


JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner)
)


@given(st.sampled_from(list(dotted_keys())), JSON)
def test_any_value_is_taken_or_refused_in_one_line(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    text = refusal(validate, RunSettings, merge(BASE, value))
    assert text is None or ("\n" not in text and key.split(".")[0] in text)


@given(st.text(max_size=12), st.text(max_size=6))
def test_an_unknown_key_is_refused_in_one_line(key, value):
    text = refusal(parse_override, f"{key}={value}")
    name = key.strip()
    known = name.startswith("hyper.") or any(f".{k}".endswith(f".{name}") for k in dotted_keys())
    assert known if text is None else "\n" not in text


@given(
    st.text(max_size=10),
    st.floats(1e-12, 1e3),
    st.none() | st.integers(1, 100),
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5) | st.none()),
)
def test_settings_survive_yaml(scenario, lr, per_round, hyper):
    given_ = validate(
        RunSettings,
        {
            "method": "fedavg",
            "scenario": scenario,
            "train": {"lr": lr},
            "federation": {"per_round": per_round},
            "hyper": hyper,
        },
    )
    text = yaml.safe_dump(given_.model_dump(mode="json"))
    assert validate(RunSettings, yaml.safe_load(text)) == given_


@given(st.floats(1e-300, 1e300))
def test_overrides_are_exact(lr):
    layer = parse_override(f"train.lr={lr!r}")
    assert validate(RunSettings, merge(BASE, layer)).train.lr == pytest.approx(lr, rel=0, abs=0)
