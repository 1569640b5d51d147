"""Scenarios: published names, all ways to select one, and refusals."""

from __future__ import annotations

import pytest

from feddg_bench.common.errors import SettingsError
from feddg_bench.data.protocols import Scenario, scenarios
from tests.helpers import refused

CYCLE = ("art_painting", "photo", "sketch", "cartoon")
LETTERS = {"photo": "p", "art_painting": "a", "cartoon": "c", "sketch": "s"}
ALL_LTDO = [
    *("ac-p-s", "ac-s-p", "as-c-p", "as-p-c", "cs-a-p", "cs-p-a"),
    *("pa-c-s", "pa-s-c", "pc-a-s", "pc-s-a", "ps-a-c", "ps-c-a"),
]
ALL_LODO = ["acs-p", "pac-s", "pas-c", "pcs-a"]


def names(protocol, select=None):
    return [s.name for s in scenarios(protocol, CYCLE, LETTERS, select)]


def test_ltdo_holds_every_domain_out_once_by_default():
    assert names("ltdo") == ["cs-a-p", "ac-p-s", "pa-s-c", "ps-c-a"]


def test_lodo_tests_on_every_domain():
    assert names("lodo") == ["pcs-a", "acs-p", "pac-s", "pas-c"]
    assert names("lodo", "all") == names("lodo")


def test_all_ltdo_scenarios_have_the_published_names():
    assert sorted(names("ltdo", "all")) == ALL_LTDO
    assert sorted(names("lodo", "all")) == ALL_LODO


def test_a_scenario_gives_every_domain_one_role():
    (scenario,) = scenarios("ltdo", CYCLE, LETTERS, "ac-p-s")
    assert scenario == Scenario("ac-p-s", "ltdo", ("art_painting", "cartoon"), "photo", "sketch")
    (scenario,) = scenarios("lodo", CYCLE, LETTERS, "acs-p")
    assert scenario == Scenario(
        "acs-p", "lodo", ("art_painting", "cartoon", "sketch"), None, "photo"
    )


@pytest.mark.parametrize(
    ("protocol", "select", "expected"),
    [
        ("ltdo", "ac-p-s", "ac-p-s"),
        ("ltdo", "ca-p-s", "ac-p-s"),
        ("ltdo", "ap-s-c", "pa-s-c"),
        ("ltdo", "art_painting+cartoon-photo-sketch", "ac-p-s"),
        ("ltdo", "cartoon+art_painting-photo-sketch", "ac-p-s"),
        ("ltdo", "photo-sketch", "ac-p-s"),
        ("lodo", "acs-p", "acs-p"),
        ("lodo", "sca-p", "acs-p"),
        ("lodo", "sketch+art_painting+cartoon-photo", "acs-p"),
        ("lodo", "sketch", "pac-s"),
    ],
)
def test_spellings_of_one_scenario(protocol, select, expected):
    assert names(protocol, select) == [expected]


@pytest.mark.parametrize(
    ("protocol", "select", "expected"),
    [
        ("ltdo", "sketch", "ac-p-s"),
        ("ltdo", "Art Painting", "ps-c-a"),
        ("ltdo", "S,ART_PAINTING,ac-p-s", "ac-p-s ps-c-a"),
        ("lodo", "SKETCH,p", "pac-s acs-p"),
    ],
)
def test_a_test_domain_stands_for_the_scenarios_of_the_default_set(protocol, select, expected):
    assert names(protocol, select) == expected.split()


def test_a_test_domain_stands_for_scenarios_that_are_offered_rather_than_the_default_set():
    offered = scenarios("ltdo", CYCLE, LETTERS, "sketch", None, ["pa-c-s", "pc-a-s", "pc-s-a"])
    assert [s.name for s in offered] == ["pc-a-s", "pa-c-s"]
    offered = scenarios("ltdo", CYCLE, LETTERS, "sketch", None, ["ps-a-c"])
    assert [s.name for s in offered] == ["ac-p-s"]


def test_a_code_in_two_cases_is_no_domain_in_a_third():
    letters = {"Photo": "p", "Print": "P", "art": "a", "sketch": "s"}
    for select, domain in (("p", "Photo"), ("P", "Print"), ("PHOTO", "Photo"), ("A", "art")):
        found = scenarios("ltdo", tuple(letters), letters, select)
        assert [scenario.test for scenario in found] == [domain]


def test_several_scenarios_keep_their_order_and_appear_once():
    assert names("ltdo", "ps-c-a, ac-p-s,ca-p-s") == ["ps-c-a", "ac-p-s"]


def test_codes_of_several_letters():
    letters = {f"{angle} degrees": str(angle) for angle in (0, 15, 150, 1)}
    domains = tuple(letters)
    assert scenarios("lodo", domains, letters)[0].name == "15+150+1-0"
    for name in ("15+150+1-0", "1+15+150-0", "115015-0", "0"):
        (scenario,) = scenarios("lodo", domains, letters, name)
        assert scenario.name == "15+150+1-0"
        assert scenario.train == ("15 degrees", "150 degrees", "1 degrees")
    with pytest.raises(SettingsError):
        scenarios("lodo", domains, letters, "1151501-0")


def test_published_splits_are_one_scenario():
    official = {"train": ("a", "b"), "val": ("c",), "test": ("d", "e")}
    for select in (None, "official", "all"):
        (scenario,) = scenarios("wilds", "abcde", {}, select, official)
        assert scenario == Scenario("official", "wilds", ("a", "b"), "c", "d+e")
    (scenario,) = scenarios("wilds", (), {}, None, {"train": "ab", "test": "cdef"})
    assert (scenario.val, scenario.test) == (None, "4 domains")
    with refused(SettingsError, "unknown scenario 'offical'; did you mean 'official'"):
        scenarios("wilds", "abcde", {}, "offical", official)


@pytest.mark.parametrize("protocol", ["lodo", "ltdo"])
def test_a_domain_a_writer_is_too_many_to_leave_out_alone(protocol):
    writers = tuple(map(str, range(3550)))
    with refused(SettingsError, "has 3550: use --protocol wilds"):
        scenarios(protocol, writers, dict(zip(writers, writers, strict=True)), "all")


@pytest.mark.parametrize(("protocol", "minimum"), [("lodo", 2), ("ltdo", 3)])
def test_too_few_domains_are_refused(protocol, minimum):
    letters = {d: d for d in "abc"[: minimum - 1]}
    with refused(SettingsError, f"at least {minimum} domains", f"has {minimum - 1}"):
        scenarios(protocol, tuple(letters), letters)
    letters = {d: d for d in "abc"[:minimum]}
    assert len(scenarios(protocol, tuple(letters), letters)) == minimum


FOLDS = {
    "fold-A": {"train": ("b", "c"), "val": ("a",), "test": ("d",)},
    "fold-B": {"train": ("a",), "val": (), "test": ("b", "c", "d", "e")},
}


def test_several_published_splits_are_scenarios_by_name():
    letters = dict(zip("abcde", "abcde", strict=True))
    found = scenarios("wilds", "abcde", letters, None, FOLDS)
    assert [(s.name, s.train, s.val, s.test) for s in found] == [
        ("fold-A", ("b", "c"), "a", "d"),
        ("fold-B", ("a",), None, "4 domains"),
    ]
    assert scenarios("wilds", "abcde", letters, "all", FOLDS) == found
    assert scenarios("wilds", "abcde", letters, "D", FOLDS) == found
    assert scenarios("wilds", "abcde", letters, "fold-B,D", FOLDS) == found[::-1]
    assert scenarios("wilds", "abcde", letters, "fold-B, fold-A,fold-B", FOLDS) == found[::-1]
    with refused(SettingsError, "unknown scenario 'fold-C'; did you mean 'fold-B'"):
        scenarios("wilds", "abcde", letters, "fold-B,fold-C", FOLDS)
    with refused(SettingsError, "unknown scenario 'official'"):
        scenarios("wilds", "abcde", letters, "official", FOLDS)
