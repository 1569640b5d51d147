"""YAML from users: accepted values, and values refused before they do harm."""

from __future__ import annotations

import pytest

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.layers import parse_override, validate
from feddg_bench.config.reading import (
    MAX_DEPTH,
    MAX_LENGTH,
    MAX_VALUES,
    known_name,
    read_names,
    read_yaml,
)
from feddg_bench.config.schema import FederationSettings, TrainSettings
from tests.helpers import refused


def bomb_of_merges(levels):
    """Return YAML in which each mapping merges the one before it ten times."""
    lines = [f"k{i}: &k{i} {{<<: [{','.join([f'*k{i - 1}'] * 10)}]}}" for i in range(1, levels)]
    return "\n".join(["k0: &k0 {x: 1}", *lines])


def chain_of_merges(length):
    """Return YAML in which each mapping merges the one before it, and the document the last."""
    lines = [f"k{i}: &k{i} {{<<: *k{i - 1}}}" for i in range(1, length)]
    return "\n".join(["k0: &k0 {x: 1}", *lines, f"<<: *k{length - 1}"])


def refusal(text):
    with pytest.raises(SettingsError) as caught:
        read_yaml(text, "it")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: 1\nb: [x, 2.5, true, null]", {"a": 1, "b": ["x", 2.5, True, None]}),
        ("- {a: 1}\n- {a: 2}", [{"a": 1}, {"a": 2}]),
        ("x: &base {a: 1}\ny: *base", {"x": {"a": 1}, "y": {"a": 1}}),
        ("[1e-3, 3E5, -.5e+2, 2.e1, +1e0]", [0.001, 3e5, -50.0, 20.0, 1.0]),
        ("[0, -0, 0x10, 1_000, 0.10, 0e0]", [0, 0, 16, 1000, 0.1, 0.0]),
        (
            "['1e-3', '010', \"1:30\", 08, 1e, e5, nan]",
            ["1e-3", "010", "1:30", "08", "1e", "e5", "nan"],
        ),
        (f"{-(2**63)}", -(2**63)),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
    ],
)
def test_yaml_is_read(text, value):
    assert value is None or read_yaml(text, "it") == value


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("a: 1\na: 2", "line 2"),
        ("x:\n  - b: 1\n    b: 1", "'b' twice"),
        ("x: &x {a: 1, a: 2}\ny: *x", "twice"),
        ("9" * 5000, "number"),
        (str(2**63), "64 bits"),
        ("x: 0x" + "f" * 40, "64 bits"),
        ("2024-13-01", "quotation marks"),
        ("2024-12-01", "quotation marks"),
        ("a: 1\nb: 010", "line 2 is octal in YAML; write 8 or 10, or '010' for text"),
        ("-0_10", "write -8 or -10, or '-0_10'"),
        ("007", "write 7, or '007'"),
        ("!!int '010'", "octal"),
        ("1:30", "base 60"),
        ("190:20:30.15", "base 60"),
        ("!!float '1:30'", "base 60"),
        ("x: &x {a: 1}\ny: {<<: *x}", "<<"),
        ("x: {!!merge y: {a: 1}}", "<<"),
        (bomb_of_merges(9), "<<"),
        (chain_of_merges(5000), "<<"),
        ("!!int abc", "number"),
        ("!!bool abc", "quotation marks"),
        ("!!timestamp abc", "quotation marks"),
        ("!!binary aGk=", "quotation marks"),
        ("{1: 2}", "key 1 "),
        ("{[1]: 2}", "YAML"),
        ("!!python/object/apply:os.system [exit]", "YAML"),
        ("a: 1\n---\na: 2", "YAML"),
        ("[1", "YAML"),
        ("\x00", "YAML"),
        ("[" * 5000, "deep"),
        ("{a: " * 5000, "deep"),
        ("- " * 5000, "deep"),
        ("&a [*a]", "deep"),
        ("&a {b: *a}", "deep"),
        ("# " + "x" * MAX_LENGTH, "longer"),
        (
            "\n".join(
                [
                    "a0: &a0 [x]",
                    *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)),
                ]
            ),
            f"{MAX_VALUES:,}",
        ),
    ],
)
def test_what_no_setting_can_be_is_refused(text, fact):
    assert fact in refusal(text)


def test_a_key_of_many_parts_is_one_unknown_key():
    layer = parse_override("hyper." + "a." * 5000 + "b=1")
    depth = 0
    while isinstance(layer, dict):
        (layer,) = layer.values()
        depth += 1
    assert depth <= MAX_DEPTH + 1


def test_a_truth_value_is_one_where_it_is_asked_for():
    assert validate(TrainSettings, {"channels_last": False}).channels_last is False
    assert validate(FederationSettings, {"rounds": 3.0}).rounds == 3


# ---------------------------------------------------------------------------------- names


@pytest.mark.parametrize("written", ["feddg_ga", "FedDG-GA", "fedDGga", "FEDDG_GA"])
def test_names_are_read_as_papers_write_them(written):
    assert read_names("method", f"PARDON, {written}", ["feddg_ga", "pardon"]) == [
        "pardon",
        "feddg_ga",
    ]


def test_a_name_that_two_known_ones_resemble_stands_for_none():
    assert known_name("A_B", ["a-b", "ab"]) == "A_B"
    assert known_name("ab", ["a-b", "ab"]) == "ab"


def test_the_same_method_written_twice_is_one():
    assert read_names("method", "fedavg,FedAvg", ["fedavg"]) == ["fedavg"]


def test_names_are_found_in_either_unicode_form():
    nfc, nfd = "\u00e9", "e\u0301"
    for known in (nfc, nfd):
        assert read_names("name", [nfc], [known]) == read_names("name", nfd, [known]) == [known]
    assert read_names("name", f"{nfd},{nfc}", [nfc, nfd]) == [nfd, nfc]  # exact matches first
    with refused(SettingsError, "unknown name 'e'"):
        read_names("name", "e", [nfc])
