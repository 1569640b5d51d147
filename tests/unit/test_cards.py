"""Cards of methods: the cards on file match those of a run."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from feddg_bench.plugins import names
from feddg_bench.runs.cards import SHIPPED, shipped_card
from feddg_methods import pardon
from tests.cards import card

ON_FILE = json.loads(SHIPPED.read_text())


def test_every_method_has_a_card_on_file():
    assert set(ON_FILE) == set(names("method"))


@pytest.mark.parametrize("method", names("method"))
def test_a_card_on_file_is_what_a_run_shows(method):
    made = json.loads(json.dumps(card(method)))
    assert made == ON_FILE[method], "run `make cards`"


def test_a_card_on_file_is_for_the_run_that_it_shows():
    key = ON_FILE["pardon"]["key"]
    found = shipped_card("pardon", key)
    shown = json.loads(json.dumps(asdict(found)))
    assert shown.pop("deviations") == list(pardon.DEVIATIONS)
    assert {"key": key, **shown} == ON_FILE["pardon"]
    assert found.passes == 2
    assert shipped_card("pardon", "another") is None
    assert shipped_card("nobody") is None
