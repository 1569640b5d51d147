"""Claims of papers, tested on records: verdicts, intervals and the chosen setup."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddg_bench.analysis.claims import Claim, claims, claims_text, tally
from feddg_bench.analysis.tables.describe import load_description, named_tables
from feddg_bench.common.errors import SettingsError
from feddg_bench.records.frame import read_frame, run_frame
from feddg_bench.records.record import TunedRecord
from feddg_bench.records.runs import key_metric, read_runs
from feddg_bench.records.statistics import Comparison, t_test
from tests.fabricate_records import in_frame, record, save
from tests.helpers import refused

TITLE = "PARDON, Table I: leave two domains out"
PACS = ("cs-a-p", "ps-c-a")
SKETCH = (("photo", "art_painting", "cartoon"), None, "sketch")
MANY = (0, 1, 3, 4, 5, 6, 7, 8)
"""Enough seeds to make a fabricated difference significant."""
FISC_6 = (("art_painting", "cartoon"), "photo", "sketch")


def runs(
    root: Path,
    best: str,
    seeds: Sequence[int],
    recipe: str = "quick",
    tuned: bool = False,
    scenarios: Sequence[str] = PACS,
) -> None:
    """Save runs of two methods in one setup; ``best`` is far better."""
    for method in ("pardon", "ccst"):
        for scenario in scenarios:
            for seed in seeds:
                settings: dict[str, Any] = in_frame(recipe, "pacs", method)
                if tuned:
                    settings["train"] = {**settings["train"], "lr": 0.5}
                one = record(
                    method,
                    "pacs",
                    scenario=scenario,
                    seed=seed,
                    better=method == best,
                    recipe=recipe,
                    settings=settings,
                )
                note = TunedRecord(trials=8, settings={"train.lr": 0.5}) if tuned else None
                save(root, one.model_copy(update={"tuned": note}))


def claim(root: Path, worse: str = "CCST") -> list[Claim]:
    """Return the rows of a claim."""
    name = TITLE, "PACS test", "PARDON", worse
    return [c for c in claims(read_frame(root)) if c.name == name]


def compared(row: Claim) -> Comparison:
    assert row.comparison is not None
    return row.comparison


@pytest.mark.parametrize(("best", "verdict"), [("pardon", "holds"), ("ccst", "does not hold")])
def test_the_interval_decides(tmp_path: Path, best: str, verdict: str) -> None:
    runs(tmp_path, best, (0, 1, 2))
    (found,) = claim(tmp_path)
    assert found.claimed == pytest.approx(3.64, abs=0.005)  # the printed average
    assert found.verdict == verdict
    assert (found.scenarios, found.seeds) == (2, 3)
    text = claims_text([found])
    assert f"|{verdict}|" in text
    assert f"1 {verdict}" in text


def test_too_few_runs_tell_nothing(tmp_path: Path) -> None:
    runs(tmp_path, "pardon", (0, 1))
    (found,), (none,) = claim(tmp_path), claim(tmp_path, "FPL")
    assert found.verdict == "undecided"
    assert (none.comparison, none.verdict, none.recipe) == (None, "", "")
    assert "PARDON above FPL: no runs" in claims_text([none])
    assert tally([found, none]).endswith("1 undecided, 1 without runs")


def test_a_table_s_first_scenario_need_not_be_there(tmp_path: Path) -> None:
    runs(tmp_path, "pardon", (0, 1, 2), scenarios=PACS[1:])
    (found,) = claim(tmp_path)
    assert found.scenarios == 1
    assert compared(found).difference.value > 0


def test_the_papers_frame_goes_first_then_tuned_runs(tmp_path: Path) -> None:
    runs(tmp_path, "pardon", (0, 1, 2))
    runs(tmp_path, "ccst", (0, 1, 2), tuned=True)
    first = claim(tmp_path)[0]
    assert first.setup == "*"
    assert "tuned" in first.frame
    assert first.verdict == "does not hold"
    runs(tmp_path, "pardon", (0, 1, 2), recipe="pardon")
    second = claim(tmp_path)[0]
    assert second.setup != "*"
    assert "recipe pardon" in second.frame


def test_tuned_runs_take_the_place_of_untuned_ones_once_they_have_an_interval(
    tmp_path: Path,
) -> None:
    runs(tmp_path, "pardon", (0, 1, 2))
    runs(tmp_path, "ccst", (0,), tuned=True, scenarios=PACS[:1])
    (untuned,) = claim(tmp_path)
    assert "tuned" not in untuned.frame
    assert untuned.verdict == "holds"
    runs(tmp_path, "ccst", (1, 2), tuned=True, scenarios=PACS[:1])
    (tuned,) = claim(tmp_path)
    assert "tuned" in tuned.frame


def trained_to(root: Path, recipe: str, accuracy: float, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """Save runs of PARDON and CCST with this accuracy on `id_test` in a recipe."""
    part = {"accuracy": accuracy, "images": 100, "loss": 1.0}
    known = {"id_test": dict.fromkeys(("cartoon", "sketch"), part)}
    for method in ("pardon", "ccst"):
        for seed in seeds:
            settings = in_frame(recipe, "pacs", method)
            where = {"scenario": "cs-a-p", "seed": seed, "recipe": recipe}
            entries = {-1: {"evaluation": known}}
            save(root, record(method, "pacs", settings=settings, entries=entries, **where))


def recipes_of(found: Sequence[Claim]) -> list[str]:
    return [row.recipe for row in found]


def test_each_recipe_has_a_line_the_best_trained_first(tmp_path: Path) -> None:
    trained_to(tmp_path, "laptop", 0.7)
    trained_to(tmp_path, "quick", 0.8)
    trained_to(tmp_path, "desktop", 0.9)
    found = claim(tmp_path)
    assert recipes_of(found) == ["desktop", "quick", "laptop"]
    assert [round(row.trained) for row in found] == [90, 80, 70]
    lines = [line for line in claims_text(found).splitlines() if "|PARDON above CCST" in line]
    assert all(recipe in line for recipe, line in zip(recipes_of(found), lines, strict=True))
    assert tally(found).startswith("1 claim of papers: 0 hold, ")
    trained_to(tmp_path, "pardon", 0.5)
    assert recipes_of(claim(tmp_path))[0] == "pardon"  # the paper's own
    trained_to(tmp_path, "features", 0.95)  # another track: frozen features
    assert "features" not in recipes_of(claim(tmp_path))


def test_a_recipe_without_enough_seeds_makes_way_for_one_with_a_test(tmp_path: Path) -> None:
    trained_to(tmp_path, "quick", 0.9, seeds=(0,))
    assert recipes_of(claim(tmp_path)) == ["quick"]
    trained_to(tmp_path, "laptop", 0.7)
    assert recipes_of(claim(tmp_path)) == ["laptop"]


def test_p_is_corrected_for_the_claims_of_its_recipe_only(tmp_path: Path) -> None:
    """Two claims are tested in `quick`, one of them also in `laptop`."""
    fpl_too(tmp_path)
    trained_to(tmp_path, "laptop", 0.1)
    quick, laptop = claim(tmp_path)
    assert (quick.recipe, laptop.recipe) == ("quick", "laptop")
    assert compared(quick).p_value == pytest.approx(2 * t_test(np.array([3.0, 5.0, 7.0])))
    measured = {
        (run.method, run.seed): key_metric(run, run.evaluation("last"), "test") or 0.0
        for run in read_runs(tmp_path)
        if run.recipe == "laptop"
    }
    gaps = [measured["pardon", seed] - measured["ccst", seed] for seed in range(3)]
    assert compared(laptop).p_value == pytest.approx(t_test(np.array(gaps)))


def fisc_6(root: Path, levels: Sequence[tuple[float, int]]) -> Claim:
    """Return the claim of FISC's Table 6 on runs of these (lambda, seed); CCST wins on seed 2."""
    for method in ("pardon", "ccst"):
        for level, seed in levels:
            settings = in_frame("quick", "pacs", method)
            parts = {"partition": {**settings["partition"], "heterogeneity": level}}
            better = (method == "pardon") == (seed != 2)
            made = {
                "scenario": "ac-p-s",
                "domains": FISC_6,
                "seed": seed,
                "recipe": "quick",
                "better": better,
            }
            save(root, record(method, "pacs", settings=settings | parts, **made))
    (found,) = [
        c for c in claims(read_frame(root)) if c.source.startswith("FISC, Table 6") and c.comparison
    ]
    return found


def test_a_mean_over_settings_says_which_and_takes_seeds_that_have_them_all(tmp_path: Path) -> None:
    """Seeds 0 and 1 have lambda 0 and 0.1; seed 2 has 0.1 only, and PARDON is far worse there."""
    found = fisc_6(tmp_path, ((0.0, 0), (0.1, 0), (0.0, 1), (0.1, 1), (0.1, 2)))
    assert found.columns == ("lambda 0.0", "lambda 0.1")
    assert (found.scenarios, found.seeds) == (1, 2)
    assert compared(found).difference.value > 0
    assert "1 scenario, 2 seeds; lambda 0.0, lambda 0.1)" in claims_text([found])


def test_seeds_of_other_columns_do_not_count(tmp_path: Path) -> None:
    """Seed 2 has as many columns, but a different one."""
    levels = ((0.0, 0), (0.1, 0), (0.0, 1), (0.1, 1), (0.0, 2), (0.5, 2))
    found = fisc_6(tmp_path, levels)
    assert (found.columns, found.seeds) == (("lambda 0.0", "lambda 0.1"), 2)


def test_the_published_difference_is_of_the_columns_that_were_run(tmp_path: Path) -> None:
    """PARDON minus CCST: -2.40 at lambda 0, +3.08 at 0.1, +0.7625 over all four."""
    found = fisc_6(tmp_path, ((0.0, 0), (0.1, 0)))
    assert found.claimed == pytest.approx(0.7625)
    assert found.published == pytest.approx((67.01 - 69.41 + 66.2 - 63.12) / 2)
    assert "|+0.34|" in claims_text([found])


def test_where_the_paper_has_no_such_difference_nothing_can_be_told(tmp_path: Path) -> None:
    found = fisc_6(tmp_path, [(0.0, seed) for seed in MANY])
    assert found.published == pytest.approx(67.01 - 69.41)
    assert compared(found).difference.low > 0
    assert found.verdict == "undecided"


def test_a_claim_on_a_mean_of_more_columns_leaves_as_much_open(tmp_path: Path) -> None:
    """FedCCRL's Table 2 prints the mean of four domains; only one domain has runs."""
    fedccrl(tmp_path, {"difp": True, "ra": True, "js": True}, better=True)
    fedccrl(tmp_path, {"difp": True, "ra": False, "js": False}, better=False)
    (found,) = [c for c in claims(read_frame(tmp_path)) if c.recipe and "Table 2" in c.source]
    assert (found.verdict, found.published) == ("holds", None)
    assert "|+1.98|" in claims_text([found])
    assert re.search(r"\|holds\|[0-9.]+\|-\|-\|", claims_text([found]))


def test_a_method_without_one_of_its_parts_does_not_stand_for_it(tmp_path: Path) -> None:
    """FedCCRL without alignment is far better here than FedCCRL and FedAvg."""
    fedccrl(tmp_path, {"difp": True, "ra": False, "js": False}, better=True)
    fedccrl(tmp_path, {"difp": True, "ra": True, "js": True}, better=False)
    for seed in MANY:
        settings = in_frame("quick", "pacs", "fedavg")
        made = {"protocol": "lodo", "scenario": "pac-s", "domains": SKETCH, "seed": seed}
        save(tmp_path, record("fedavg", "pacs", settings=settings, better=False, **made))
    (found,) = [c for c in claims(read_frame(tmp_path)) if c.recipe and c.worse == "FedAvg"]
    assert abs(compared(found).difference.value) < 5


def fedccrl(root: Path, parts: dict[str, bool], *, better: bool) -> None:
    """Save runs of FedCCRL with some of its parts; sketch is the unseen domain."""
    for seed in MANY:
        settings = in_frame("quick", "pacs", "fedccrl")
        settings["hyper"] = {"ccdt": True, **parts}
        made = {"protocol": "lodo", "scenario": "pac-s", "domains": SKETCH, "seed": seed}
        save(root, record("fedccrl", "pacs", settings=settings, better=better, **made))


def test_parts_of_a_method_are_claims_too() -> None:
    found = claims(run_frame([]))
    parts = {c.worse for c in found if c.source.startswith("PARDON, Table V")}
    assert len(parts) == 4
    assert all(c.claimed > 0 and c.comparison is None for c in found)
    assert {c.worse[-9:] for c in found if c.better == "PPDG, ResNet-50"} == {"ResNet-50"}


def test_a_part_is_missed_in_the_reading_that_it_was_taken_from(tmp_path: Path) -> None:
    """PARDON with the preset ``paper`` was run, too, and is far better."""
    for preset, ablation in (("paper", "v5"), ("released", "v5"), ("released", "v3")):
        for seed in (0, 1, 2):
            settings = in_frame("quick", "pacs", "pardon")
            settings["hyper"] = {**settings["hyper"], "preset": preset, "ablation": ablation}
            better = preset == "paper"
            made = {"scenario": "cs-a-p", "seed": seed, "recipe": "quick", "better": better}
            save(tmp_path, record("pardon", "pacs", settings=settings, **made))
    (found,) = [c for c in claims(read_frame(tmp_path)) if c.worse.startswith("v3") and c.recipe]
    assert abs(compared(found).difference.value) < 5


def test_every_paper_has_claims_and_the_same_records_the_same_text(tmp_path: Path) -> None:
    sources = {c.source.partition(",")[0] for c in claims(run_frame([]))}
    assert sources == {"PARDON", "FISC", "FedCCRL", "PPDG"}
    tables = [load_description(name)[1] for name in named_tables()]
    assert not any(table.best for table in tables if not table.paper)
    runs(tmp_path, "pardon", (0, 1, 2))
    one, other = (claims_text(claims(read_frame(tmp_path))) for _ in range(2))
    assert one == other


def test_a_best_row_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("title: t\nbest: [x]\nothers: true\ngroups: [{columns: [{head: a}]}]\n")
    with refused(SettingsError, "best has 'x'"):
        load_description(str(file))


def fpl_too(root: Path, rate: float = 0.5) -> None:
    """Save runs of PARDON, CCST and FPL: PARDON leads by 3, 5 and 7 points."""
    for method, lead in (("pardon", 0.05), ("ccst", 0.0), ("fpl", 0.0)):
        for seed, noise in enumerate((-0.02, 0.0, 0.02)):
            settings: dict[str, Any] = in_frame("quick", "pacs", method)
            chosen = {"train.lr": rate} if method == "pardon" else {}
            settings["train"] = {**settings["train"], "lr": rate if chosen else 0.5}
            part = {"accuracy": 0.5 + lead + noise * bool(lead), "images": 100, "loss": 1.0}
            one = record(
                method,
                "pacs",
                scenario="cs-a-p",
                seed=seed,
                recipe="quick",
                settings=settings,
                entries={-1: {"evaluation": {"test": {"photo": part}}}},
            )
            note = TunedRecord(trials=4, settings=chosen)
            save(root, one.model_copy(update={"tuned": note}))


def test_claims_of_one_method_are_corrected_for_their_number(tmp_path: Path) -> None:
    """Differences of 3, 5 and 7 points: without correction, p = 0.0495 and [0.03, 9.97]."""
    from statsmodels.stats.power import TTestPower

    fpl_too(tmp_path)
    alone = t_test(np.array([3.0, 5.0, 7.0]))
    assert alone == pytest.approx(0.0495, abs=1e-4)
    half = 6.2053 * 2 / math.sqrt(3)  # Student's t at 98.75 %, two degrees of freedom
    for worse in ("CCST", "FPL"):
        (found,) = claim(tmp_path, worse)
        difference = compared(found).difference
        assert (difference.low, difference.high) == pytest.approx((5 - half, 5 + half), abs=1e-3)
        assert compared(found).p_value == pytest.approx(2 * alone)
        assert found.verdict == "undecided"
        smallest = 8.0104 * 2 / math.sqrt(3)  # noncentral t, two degrees of freedom
        assert compared(found).detectable == pytest.approx(smallest, abs=1e-3)
        published = {"CCST": 6.16, "FPL": -0.48}[worse]  # in this scenario
        assert found.published == pytest.approx(published)
        needs = "-"
        if published > 0:  # the seeds scatter by 2 points
            seeds = TTestPower().solve_power(published / 2, alpha=0.05 / 2, power=0.8)
            needs = f"{math.ceil(seeds)} seeds"
        assert f"|0.099|undecided|{smallest:.2f}|{needs}|" in claims_text([found])


def test_verdicts_at_different_rates_that_one_run_chose_are_marked(tmp_path: Path) -> None:
    fpl_too(tmp_path, rate=0.25)
    (found,) = claim(tmp_path)
    assert found.rates_apart
    more = re.search(r"\|undecided‡\|[0-9.]+\|([^|]*)\|", claims_text([found]))
    assert more
    assert more[1] == "-"  # more runs would not decide this
    assert "1 undecided (1 at different learning rates‡)" in tally([found])


def test_a_clear_difference_at_different_rates_tells_nothing_of_the_methods(tmp_path: Path) -> None:
    fpl_too(tmp_path, rate=0.25)
    (tested,) = claim(tmp_path)
    clear = replace(tested, comparison=replace(compared(tested), p_value=0.001))
    assert clear.verdict == "undecided"
    assert replace(clear, rates_apart=False).verdict == "holds"
