"""Cards of methods: the cards on file match those of a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from feddg_bench.plugins import names, outline
from feddg_bench.runs.cards import SHIPPED, operations, references, results_text, shipped_card
from feddg_methods import pardon
from tests.cards import card

ROOT = Path(__file__).parents[2]
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
    assert 1.9 < operations("pardon") < 2.1  # type: ignore[operator]
    assert operations("fedclip") is None  # on features
    assert shipped_card("pardon", "another") is None
    assert shipped_card("nobody") is None


UNMEASURED = ("fedclip", "zeroshot")
"""Methods without runs in the shipped results."""
STATISTICS = ("ncm", "ridge")
"""Methods that take no training step, with runs on frozen features of two encoders alone."""


@pytest.mark.parametrize("method", sorted({*names("method")} - {*UNMEASURED, *STATISTICS}))
def test_a_card_has_numbers_of_all_folders_of_results_in_one_metric_each(method):
    lines = results_text(method, [ROOT / "results"]).splitlines()[3:]
    assert any("the part of each world" in line for line in lines)
    assert any("Digits4, leave two domains out, recipe converged" in line for line in lines)
    assert not any("macro F1" in line for line in lines)
    gaps = [line for line in lines if "difference to" in line]
    assert (gaps == []) == (method in ("ditto", "fedavg", "fedbn"))


def test_a_card_says_what_a_difference_compares(tmp_path):
    (line,) = (x for x in results_text("fedccrl", [tmp_path, ROOT / "results"]).splitlines()
               if "Digits4, leave two" in x)  # fmt: skip
    assert line.startswith("- Digits4, leave two domains out, recipe converged, tuned: accuracy ")
    assert line.endswith(" (at lr=0.004, FedAvg at lr=0.008)")
    (mean,) = (x for x in results_text("fedccrl", [ROOT / "results"]).splitlines()
               if "PACS, leave two domains out, recipe desktop:" in x)  # fmt: skip
    assert "accuracy 69.16 ± 0.27 on the unseen domains; difference to FedAvg +3.30 [" in mean
    for method in ("nobody", *UNMEASURED):
        assert "No table includes it yet" in results_text(method, [ROOT / "results"])
    for method in STATISTICS:
        _, _, _, *lines = results_text(method, [ROOT / "results"]).splitlines()
        named = [line for line in lines if "recipe features, tuned: accuracy" in line]
        small = [line for line in lines if "features, mobilenet_v2+tf, tuned: accuracy" in line]
        assert len(named) == len(small) == 2  # one domain left out, or two
        assert not any("lr=" in line for line in lines)
        assert {*lines} == {*named, *small}


def test_every_paper_has_a_link_that_is_no_search():
    papers = [(name, of) for name in names("method") for of in references(outline(name).citation)]
    assert {name for name, _ in papers} == {*names("method")}
    assert [name for name, paper in papers if "search" in paper.link] == []
    (_, kernel) = references(outline("mmd").citation)
    assert kernel.bibtex("mmd1").startswith("@article{mmd1,")
    assert "  journal = {JMLR}," in kernel.bibtex("mmd1")
    assert kernel.link == "https://jmlr.org/papers/v13/gretton12a.html"


def test_no_card_refers_to_a_class_that_its_reader_does_not_see():
    shared = ("PairwiseAligned", "DomainWeighted")
    assert not [n for n in names("method") if any(word in outline(n).doc for word in shared)]
