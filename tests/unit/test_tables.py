"""Tables from records: reading, selection, variants, statistics, published numbers."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.compare import differences_between
from feddg_bench.analysis.tables.describe import (
    Description,
    RowSpec,
    load_description,
    named_tables,
)
from feddg_bench.analysis.tables.generic import frames, leaderboards
from feddg_bench.analysis.tables.grid import DASH, Grid
from feddg_bench.analysis.tables.make import TableOptions, make_table, make_tables
from feddg_bench.analysis.tables.rows import of_setup
from feddg_bench.analysis.tables.setups import departing, least_departing
from feddg_bench.analysis.tables.summary import compared
from feddg_bench.analysis.tables.writers import (
    csv_text,
    latex,
    latex_document,
    markdown,
    notes_text,
)
from feddg_bench.cli.display import print_grid
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.config.keys import run_key
from feddg_bench.config.layers import merge, nested
from feddg_bench.plugins import harmless, load_method
from feddg_bench.records.frame import read_frame
from feddg_bench.records.published import published_number, published_numbers
from feddg_bench.records.record import RunRecord, TimeRecord, TunedRecord
from feddg_bench.records.rules import RULES, Rule
from feddg_bench.records.runs import RecordedRun, read_runs
from feddg_bench.records.statistics import FEWEST
from feddg_bench.records.store import ResultsStore
from tests.fabricate_records import in_frame, record, save
from tests.helpers import SCENARIOS, entry, make_record, measured, refused

Add = Callable[..., RunRecord]
PAIR = ("oc-i-p", "ic-p-o")


@pytest.fixture
def add(tmp_path: Path) -> Add:
    """Return a function that saves a record with given accuracies by round and settings."""

    def make(
        method: str = "fedavg",
        scenario: str = "oc-i-p",
        seed: int = 0,
        test: tuple[float, ...] = (0.5,),
        val: tuple[float, ...] | None = None,
        id_val: tuple[float, ...] | None = None,
        *,
        id_test: tuple[float, ...] = (),
        clients: float | None = None,
        version: int = 1,
        recipe: str = "quick",
        labels: dict[str, str] | None = None,
        fingerprint: str = "f" * 32,
        **settings: Any,
    ) -> RunRecord:
        train, held, target = SCENARIOS[scenario]
        layer: dict[str, Any] = {"hyper": settings.pop("hyper", {})}
        for key, value in settings.items():
            section, _, name = key.partition("__")
            layer.setdefault(section, {})[name] = value
        splits = zip(test, val or test, id_val or test, strict=False)
        record = make_record(
            {"method": method, "scenario": scenario, "seed": seed, **layer},
            method_version=version,
            recipe=recipe,
            labels=labels or {},
            data={"fingerprint": fingerprint},
            once={"bytes": {}, "dropped": [], "seconds": {"training": 1.5, "aggregation": 0.5}},
            rounds=[
                entry(
                    number,
                    {
                        "id_val": measured(on_id_val, *train),
                        "val": measured(on_val, held),
                        "test": measured(on_test, target),
                        **({"id_test": measured(id_test[number - 1], *train)} if id_test else {}),
                        **({"client_test": measured(clients, "client_000")} if clients else {}),
                    },
                    train={},
                )
                for number, (on_test, on_val, on_id_val) in enumerate(splits, 1)
            ],
        )
        ResultsStore(tmp_path).save(record)
        return record

    return make


def generic(tmp_path: Path, select: Rule | None = None, **more: Any) -> Grid:
    (table,) = frames(read_frame(tmp_path))
    described = table.described(select)
    return build(table.name, described, table.runs, select=select, any_paper=True, **more)


def cells(grid: Grid) -> dict[tuple[str, str], dict[str, str]]:
    rows = csv.DictReader(io.StringIO(csv_text(grid)))
    return {(row["row"], f"{row['group']} {row['column']}".strip()): row for row in rows}


# ------------------------------------------------------------------------------- reading


def test_every_setting_of_a_record_is_read(add: Add, tmp_path: Path) -> None:
    record = add(train__lr=0.25, hyper={"mu": 0.5})
    (run,) = read_runs(tmp_path)
    assert (run.method, run.train, run.val, run.test) == (
        "fedavg",
        "chalk+outline",
        "ink",
        "poster",
    )
    assert run.key == record.key
    expected = {
        f"{section}.{name}"
        for section, values in record.settings.items()
        if isinstance(values, dict)
        for name in values
    }
    assert set(run.settings) == expected
    assert run.settings["train.lr"] == 0.25
    assert run.settings["hyper.mu"] == 0.5


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rounds", [1, 3, 200])
def test_files_laid_out_otherwise_read_alike(
    add: Add, tmp_path: Path, rule: Rule, rounds: int
) -> None:
    """Long records are read in parts, records written by another program as a whole."""
    rng = np.random.default_rng(rounds)
    values = [tuple(rng.random(rounds).tolist()) for _ in range(3)]
    record = add("fedavg", "oc-i-p", 3, *values)
    (run,) = read_runs(tmp_path)
    path = tmp_path / "runs" / f"{record.key}.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    (again,) = read_runs(tmp_path)
    assert again.settings == run.settings
    evaluation = run.evaluation(rule)
    assert evaluation == again.evaluation(rule)
    test, val, id_val = values
    assert evaluation is not None
    found = evaluation["test"]["poster"]
    assert found["images"] == 10
    if rule == "mean_last_5":
        assert found["accuracy"] == pytest.approx(np.mean(test[-5:]))
        return
    by = {"last": range(rounds), "best_by_val": val, "best_by_id_val": id_val, "oracle": test}
    best = max(range(rounds), key=lambda n: (by[rule][n], -n if rule != "last" else 0))
    assert found["accuracy"] == test[best]


def test_ties_go_to_the_earliest_round(add: Add, tmp_path: Path) -> None:
    add(test=(0.1, 0.2, 0.3), val=(0.5, 0.7, 0.7), id_val=(0.9, 0.9, 0.1))
    (run,) = read_runs(tmp_path)
    for rule, expected in (("best_by_val", 0.2), ("best_by_id_val", 0.1), ("last", 0.3)):
        evaluation = run.evaluation(rule)  # type: ignore[arg-type]
        assert evaluation is not None
        assert evaluation["test"]["poster"]["accuracy"] == expected


def test_costs_of_a_run(add: Add, tmp_path: Path) -> None:
    add(test=(0.1, 0.2))
    (run,) = read_runs(tmp_path)
    found = {
        name: run.costs.get(name)
        for name in ("local_training_time", "aggregation_time", "one_time_cost", "megabytes_up")
    }
    assert found == {
        "local_training_time": 1.5,
        "aggregation_time": 0.25,
        "one_time_cost": 2.0,
        "megabytes_up": 2.0,
    }


# -------------------------------------------------------------------------------- tables


def test_mean_deviation_worst_and_comparison(add: Add, tmp_path: Path) -> None:
    for seed, (first, second) in enumerate([(0.5, 0.7), (0.6, 0.4)]):
        add("fedavg", "oc-i-p", seed, (first,))
        add("fedavg", "ic-p-o", seed, (second,))
        add("pardon", "oc-i-p", seed, (first + 0.1,))
        add("pardon", "ic-p-o", seed, (second + 0.1 + seed / 100,))
    found = cells(generic(tmp_path))
    mine = found["FedAvg", "test Poster"]
    assert float(mine["value"]) == pytest.approx(55)
    assert float(mine["std"]) == pytest.approx(math.sqrt(50))
    assert mine["text"] == "55.00 ± 7.07"
    assert mine["seeds"] == "0 1"
    assert len(mine["run_keys"].split()) == 2
    assert found["FedAvg", "unseen mean"]["run_keys"] == ""  # its cells name them
    assert float(found["FedAvg", "unseen mean"]["value"]) == pytest.approx(55)  # seeds: 60, 50
    assert float(found["FedAvg", "unseen mean"]["std"]) == pytest.approx(math.sqrt(50))
    assert float(found["FedAvg", "unseen worst"]["value"]) == pytest.approx(45)  # seeds: 50, 40
    assert found["PARDON", "unseen w/t/l"]["text"] == "2/0/0"
    assert float(found["PARDON", "unseen difference"]["value"]) == pytest.approx(10.25)
    assert found["PARDON", "unseen difference"]["low"] == ""  # two scenarios
    assert float(found["PARDON", "unseen P(better)"]["value"]) == pytest.approx(
        (0.875 + 0.75) / 2, abs=0.005
    )
    assert float(found["FedAvg", "unseen IQM"]["value"]) == pytest.approx(55)  # of 40 50 60 70
    assert found["PARDON", "unseen rank"]["value"] == "1"
    assert found["FedAvg", "unseen rank"]["value"] == "2"


def test_a_number_that_rounds_to_zero_has_no_minus(add: Add, tmp_path: Path) -> None:
    add("fedavg", "oc-i-p", 0, (0.00002,))
    add("pardon", "oc-i-p", 0, (0.00001,))
    found = cells(generic(tmp_path))["PARDON", "unseen difference"]
    assert float(found["value"]) < 0
    assert found["text"] == "+0.00"


def test_marks_only_where_a_test_supports_them(add: Add, tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        for step, scenario in enumerate(SCENARIOS):
            base = 0.3 + 0.1 * step + 0.05 * seed
            add("fedavg", scenario, seed, (base,))
            add("fedprox", scenario, seed, (base + 0.1 + step / 1000,))
            add("pardon", scenario, seed, (base + 0.2 - step / 1000,))
    grid = generic(tmp_path)
    found = cells(grid)
    assert found["PARDON", "unseen mean"]["mark"] == "best"
    assert found["FedProx", "unseen mean"]["mark"] == "second"
    assert found["FedAvg", "unseen mean"]["mark"] == ""
    assert found["PARDON", "unseen w/t/l"]["text"] == "4/0/0"
    assert float(found["PARDON", "unseen p"]["value"]) < 0.001
    low, high = (float(found["PARDON", "unseen difference"][end]) for end in ("low", "high"))
    assert 19.6 < low < high < 20.1
    assert found["PARDON", "unseen P(better)"]["text"] == "1.00 [1.00, 1.00]"
    assert {c["mark"] for key, c in found.items() if key[1] == "test Poster"} == {""}
    text = markdown(grid)
    assert re.search(r"\*\*69.85 ± 5.00\*\*", text)
    assert re.search(r"<u>60.15 ± 5.00</u>", text)
    assert any("of 4 units" in part and "not new seeds" in part for part in grid.notes)
    add("moon", "oc-i-p", 0, (0.9,))
    again = cells(generic(tmp_path))
    assert again["PARDON", "unseen mean"]["mark"] == "best"  # moon has no mean
    said = "difference over 1 of 4 scenarios; over seed 0 alone"
    assert again["MOON", "test Poster"]["footnotes"] == said


def test_both_unseen_domains_count_unless_val_chooses_the_round(add: Add, tmp_path: Path) -> None:
    """The mean over val and test is compared; a rule that looks at val compares on test alone."""
    for seed, (number, scenario) in product(range(3), enumerate(SCENARIOS)):
        add("fedavg", scenario, seed, test=(0.5,), val=(0.7,))
        add("pardon", scenario, seed, test=(0.6 + number / 100,), val=(0.66,))
    found = cells(generic(tmp_path))
    row = {
        head: found["PARDON", f"unseen {head}"] for head in ("mean", "val", "test", "difference")
    }
    numbers = {head: float(cell["value"]) for head, cell in row.items()}
    expected = {"mean": 63.75, "val": 66.0, "test": 61.5, "difference": 3.75}
    assert numbers == pytest.approx(expected)
    assert {head: cell["split"] for head, cell in row.items()} == {
        "mean": "test+val", "val": "val", "test": "test", "difference": "test+val"
    }  # fmt: skip
    low, high = (float(row["difference"][end]) for end in ("low", "high"))
    half = 3.182446 * math.sqrt(5 / 12) / 2  # Student's t over the units' 3, 3.5, 4 and 4.5 points
    assert (low, high) == pytest.approx((3.75 - half, 3.75 + half), abs=1e-5)
    for rule in ("best_by_val", "oracle"):
        found = cells(generic(tmp_path, rule))
        assert float(found["PARDON", "test difference"]["value"]) == pytest.approx(11.5)
        assert not {place for _, place in found if place.startswith("unseen")}


def test_summaries_over_clients_are_compared_once_for_each_scenario(
    add: Add, tmp_path: Path
) -> None:
    """They have no split: both unseen domains would have left the mean and difference empty."""
    for seed, scenario in product(range(3), SCENARIOS):
        add("fedavg", scenario, seed, id_test=(0.8,), clients=0.6)
        add("pardon", scenario, seed, id_test=(0.8,), clients=0.65)
        add("moon", scenario, seed, id_test=(0.8,))
    (made,) = make_tables(["generic"], [tmp_path], TableOptions.of(metric="client_worst")).grids
    found = cells(made)
    heads = {head for _, head in found}
    assert {"by test domain mean", "by test domain difference"} < heads
    assert float(found["PARDON", "by test domain mean"]["value"]) == pytest.approx(65)
    assert float(found["PARDON", "by test domain difference"]["value"]) == pytest.approx(5)
    assert not [head for head in heads if head.startswith(("unseen", "test", "id_test"))]
    assert found["MOON", "by test domain mean"]["footnotes"] == (
        "these runs do not measure client_worst: it needs data.client_test_fraction, such as 0.2"
    )


def test_compute_is_a_ratio_over_the_reference_and_a_dash_where_a_record_counts_none(
    add: Add, tmp_path: Path
) -> None:
    store = ResultsStore(tmp_path)

    def count(method: str, flop: tuple[float | None, ...]) -> None:
        for scenario, many in zip(SCENARIOS, flop, strict=True):
            run = add(method, scenario)
            store.save(run.model_copy(update={"time": TimeRecord(flop=many)}))

    count("fedavg", (None,) * 4)
    count("pardon", (4e12,) * 4)
    assert "unseen compute" not in {head for _, head in cells(generic(tmp_path))}
    count("fedavg", (1e12, 2e12, 1e12, 2e12))
    count("pardon", (4e12, 6e12, 4e12, 6.3e12))
    count("moon", (1e12, 2e12, 1e12, None))
    found = cells(generic(tmp_path))
    text = {row: found[row, "unseen compute"]["text"] for row in ("PARDON", "MOON", "FedAvg")}
    assert text == {"PARDON": "3.38", "MOON": DASH, "FedAvg": "1.00"}


def test_no_p_value_for_centralised_rows_and_those_like_the_reference(
    add: Add, tmp_path: Path
) -> None:
    """Holm's correction does not count them; below five seeds there is no test over seeds."""
    for seed, (number, scenario) in product(range(5), enumerate(SCENARIOS)):
        base = (0.5 + seed / 100,)
        add("fedavg", scenario, seed, base)
        add("fedbn", scenario, seed, base)
        add("erm", scenario, seed, (0.6 + number / 100,), partition__kind="pooled")
        add("pardon", scenario, seed, (0.55 + (seed % 2 + number) / 100,))
        if seed < 4:
            add("moon", scenario, seed, (0.51 + (seed + 1) * number / 100,))
    found = cells(generic(tmp_path))
    text = {
        row: [found[row, f"unseen {kind}"]["text"] for kind in ("p", "p, these units")]
        for row in ("PARDON", "MOON", "FedBN", "ERM")
    }
    assert text["FedBN"] == text["ERM"] == [DASH, DASH]
    assert text["MOON"][1] == "too few seeds"
    gaps = [5.0 + 1.5 + seed % 2 - seed for seed in range(5)]
    alone = scipy.stats.ttest_1samp(gaps, 0).pvalue
    assert float(found["PARDON", "unseen p, these units"]["value"]) == pytest.approx(alone)
    of_units = scipy.stats.ttest_1samp([5.0 + number + 0.4 - 2.0 for number in range(4)], 0).pvalue
    assert float(found["PARDON", "unseen p"]["value"]) == pytest.approx(2 * of_units)


def test_two_scenarios_are_not_enough_for_a_test(add: Add, tmp_path: Path) -> None:
    for step, scenario in enumerate(SCENARIOS):
        if step == 2:
            grid = generic(tmp_path)
            assert {cell["mark"] for cell in cells(grid).values()} == {""}
            assert cells(grid)["PARDON", "unseen p"]["value"] == ""
            assert any("No row is marked as best" in part for part in grid.notes)
        for seed in range(3):
            add("fedavg", scenario, seed, (0.1,))
            add("pardon", scenario, seed, (0.8 + step / 100,))
    assert cells(generic(tmp_path))["PARDON", "unseen mean"]["mark"] == "best"


def test_two_seeds_are_not_enough_for_a_test_and_one_line_says_so(add: Add, tmp_path: Path) -> None:
    why = f"no test, as it needs at least {FEWEST} seeds"
    runs = []
    for seed in range(3):
        for step, scenario in enumerate(SCENARIOS):
            runs.append(add("fedavg", scenario, seed, (0.1,)))
            runs.append(add("pardon", scenario, seed, (0.8 + step / 100,)))
        few, grid, printed = seed < 2, generic(tmp_path), compared(runs)
        marks = {cell["mark"] for cell in cells(grid).values()}
        assert marks == ({""} if few else {"", "best"})
        heads = [column.head for column in grid.columns]
        assert ("p" in heads, "difference" in heads) == (not few, True)
        assert (why in grid.caption) == (why in printed.caption) == few
        assert any(part.lower().startswith(why) for part in grid.notes) == few
        assert any("p of a two-sided t-test" in part for part in grid.notes) != few
        gap, p_value = (entry for entry in printed.lines[1].entries[-2:])
        assert gap is not None
        assert gap.text.endswith("]") == few
        assert (p_value is None) == few
        assert "Recipe quick is for first runs, not for conclusions." in printed.caption
    found = cells(grid)
    assert found["PARDON", "unseen p"]["footnotes"] == ""
    for place, scenario in enumerate(SCENARIOS):
        for seed in range(3 if place else 1):
            add("ccst", scenario, seed, (0.2,))
    assert cells(generic(tmp_path))["CCST", "unseen p"]["footnotes"] == why


def test_a_row_at_another_learning_rate_than_the_reference_says_so(
    add: Add, tmp_path: Path
) -> None:
    rates = {"fedavg": 0.008, "fedccrl": 0.004, "fedadg": 0.008}
    for method, rate in rates.items():
        add(method, "oc-i-p", train__lr=rate)
    add("scaffold", "oc-i-p", train__lr=0.1, train__optimizer="sgd")
    grid = generic(tmp_path)
    apart = {x.label: [note for note in x.footnotes if ", FedAvg " in note] for x in grid.lines}
    assert apart == {
        "FedAvg": [],
        "FedADG": [],
        "FedCCRL": ["at lr=0.004, FedAvg at lr=0.008"],
        "SCAFFOLD": [
            "with sgd at lr=0.1, FedAvg with adam at lr=0.008: the difference is one of "
            "optimisers, too"
        ],
    }


@pytest.mark.parametrize(
    ("under_sgd", "gaps"),
    [
        ({"scaffold"}, {"digits4-ltdo-quick": {"FedProx": 10.0, "SCAFFOLD": -15.0}}),
        ({"fedavg"}, {"digits4-ltdo-quick": {"FedProx": 10.0}}),
        (
            {"fedavg", "scaffold"},
            {
                "digits4-ltdo-quick": {"FedProx": 10.0},
                "digits4-ltdo-quick-sgd": {"SCAFFOLD": 5.0},
            },
        ),
    ],
)
def test_methods_are_compared_with_the_reference_under_their_optimiser(
    add: Add, tmp_path: Path, under_sgd: set[str], gaps: dict[str, dict[str, float]]
) -> None:
    add("fedavg", test=(0.5,))
    add("fedprox", test=(0.6,))
    for method, accuracy in (("fedavg", 0.3), ("scaffold", 0.35)):
        if method in under_sgd:
            add(method, test=(accuracy,), train__lr=0.1, train__optimizer="sgd")
    found = {}
    for table in leaderboards(read_frame(tmp_path)):
        grid = build(table.name, table.description, table.runs, any_paper=True)
        found[table.name] = {
            row: float(cell["value"])
            for (row, column), cell in cells(grid).items()
            if column == "unseen difference" and cell["value"]
        }
    assert found == {name: pytest.approx(by_row) for name, by_row in gaps.items()}


def test_definitions_describe_a_bootstrap_over_seeds_only_if_there_are_several(
    add: Add, tmp_path: Path
) -> None:
    for seed in (0, 1):
        for step, scenario in enumerate(SCENARIOS):
            add("fedavg", scenario, seed, (0.1,))
            add("pardon", scenario, seed, (0.8 + step / 100,))
        grid = generic(tmp_path)
        found = [cells(grid)["PARDON", f"unseen {column}"] for column in ("IQM", "P(better)")]
        assert [cell["low"] != "" for cell in found] == [seed == 1] * 2
        assert sum("bootstrap" in part for part in grid.notes) == 2 * seed


def test_generic_tables_are_ranked_and_narrow(add: Add, tmp_path: Path) -> None:
    for scenario in SCENARIOS:
        for method, accuracy in (("agrsum", 0.1), ("fedavg", 0.5), ("pardon", 0.7), ("ccst", 0.6)):
            add(method, scenario, 0, (accuracy,))
    add("moon", "oc-i-p", 0, (0.9,))
    grid = generic(tmp_path)
    assert [line.label for line in grid.lines] == ["PARDON", "CCST", "FedAvg", "AgrSum", "MOON"]
    shown = grid.blocks(lambda block: len(block) <= 8)
    assert [grid.columns[n].head for block in shown for n in block] == [
        *("mean", "difference", "val", "test", "Chalk", "Ink", "Outline", "Poster"),
    ]
    details = grid.blocks(lambda block: len(block) <= 8, details=True)
    assert {n for block in (*shown, *details) for n in block} == set(range(len(grid.columns)))
    assert all(len({grid.columns[n].group for n in block}) == 1 for block in details)
    heads = [line for line in markdown(grid).splitlines() if line.startswith("||")]
    means = "".join(f"unseen {head}|" for head in ("mean", "difference", "val", "test"))
    assert heads == [f"||{means}test Chalk|test Ink|test Outline|test Poster|"]
    assert notes_text(grid).count("\n||") == len(details)


def footnotes(grid: Grid) -> dict[str, list[str]]:
    return {line.label: list(line.footnotes) for line in grid.lines}


def test_rows_at_chance_and_runs_that_diverged_say_so(add: Add, tmp_path: Path) -> None:
    for scenario in PAIR:
        add("fedavg", scenario, test=(0.5,), federation__rounds=7)
        add(
            "agrsum", scenario, test=(0.14,), federation__rounds=7
        )  # guessing among ten classes gives 10 %
        add("agrrand", scenario, test=(0.15,), federation__rounds=7)
    store = ResultsStore(tmp_path)
    for seed in (0, 1):
        record = add("scaffold", "oc-i-p", seed, test=(0.4,) * 7)
        for number in (2, 3, 5):
            record.rounds[number].skipped = True
        record.rounds[6].train["loss"] = math.nan
        store.save(record)
    grid = generic(tmp_path)
    said = footnotes(grid)
    assert said["FedAvg"] == said["AgrRand"] == []
    assert said["AgrSum"] == ["at chance: guessing gives 10.00"]
    assert said["SCAFFOLD"] == [
        "difference over 1 of 2 scenarios",
        "3 of 7 rounds skipped (oc-i-p, seed 0), as 1 more of 2 runs have",
        "loss not finite from round 7 (oc-i-p, seed 0), as 1 more of 2 runs have",
    ]
    assert re.search(r"\|AgrSum <sup>\d</sup>\|", markdown(grid))
    assert "at chance: guessing gives 10.00" in cells(grid)["AgrSum", "unseen mean"]["footnotes"]
    assert "AgrSum$^{" in latex(grid)


def test_p_values_are_corrected_for_the_rows_and_come_with_what_a_test_detects(
    add: Add, tmp_path: Path
) -> None:
    gaps = {"pardon": (0.1, 0.12, 0.14, 0.2), "moon": (0.02, -0.01, 0.03, 0.0)}
    for (step, scenario), seed in product(enumerate(SCENARIOS), range(3)):
        add("fedavg", scenario, seed, test=(0.5,))
        for method, gap in gaps.items():
            add(method, scenario, seed, test=(0.5 + gap[step],))
    grid = generic(tmp_path)
    found = cells(grid)
    for method, factor in (("PARDON", 2), ("MOON", 1)):  # Holm doubles the smaller one
        gap = 100 * np.array(gaps[method.lower()])
        p_value = scipy.stats.ttest_1samp(gap, 0).pvalue
        assert float(found[method, "unseen p"]["value"]) == pytest.approx(factor * p_value)
        detects = 4.2559 * gap.std(ddof=1) / 2  # noncentral t, three degrees of freedom
        assert float(found[method, "unseen detects"]["value"]) == pytest.approx(detects, rel=1e-4)
    caption = " ".join(grid.notes)
    assert "corrected (Holm) for the number of methods" in caption
    assert (
        "detects: the smallest true difference that such a test detects with 80 % power" in caption
    )


def test_the_table_of_several_methods_marks_what_holm_leaves_and_rates_of_one_run(
    add: Add,
) -> None:
    """MOON's uncorrected p-value is 0.043."""
    small = (0.001, -0.001, 0.001, -0.001)
    gaps = {"pardon": (0.1, 0.12, 0.14, 0.2), "moon": (0.01, 0.06, 0.03, 0.05), "fpl": small}
    gaps |= {"fedbn": (0,) * 4}  # equal to the first, hence not among the corrected ones
    runs = []
    for seed in range(3):
        runs += [add("fedavg", scenario, seed, (0.5,)) for scenario in SCENARIOS]
        for method, gap in gaps.items():
            pairs = zip(SCENARIOS, gap, strict=True)
            runs += [add(method, scenario, seed, (0.5 + d,)) for scenario, d in pairs]
    chosen = TunedRecord(trials=4, settings={"train.lr": 0.1})
    runs = [r.model_copy(update={"tuned": chosen}) if r.method == "moon" else r for r in runs]
    made = compared(runs)
    found = {line.row: line.entries[-2] for line in made.lines}
    assert {name: gap.text if gap else "" for name, gap in found.items()} == {
        "fedavg": "",
        "pardon": "+14.00 [+7.13, +20.87]*",
        "moon": "+3.75 [+0.22, +7.28]",
        "fpl": "+0.00 [-0.18, +0.18]",
        "fedbn": "+0.00",
    }
    assert "* p < 0.05 after Holm's correction; settings chosen by one run: MOON." in made.caption


@pytest.mark.parametrize(
    ("trained", "said"), [(2, "over val and test."), (3, "over the 3 sets of")]
)
def test_the_table_of_several_methods_names_the_units_of_its_interval(
    trained: int, said: str
) -> None:
    """Scenarios with the same training domains are one unit: two have no interval."""
    runs = []
    for method, unit, held in product(("fedavg", "moon"), range(trained), ("ab", "ba")):
        domains = (("x", f"y{unit}"), held[0], held[1])
        runs.append(record(method, scenario=f"{unit}{held}", domains=domains))
    made = compared(runs)
    ends = {entry.low is None for line in made.lines for entry in line.entries[-2:-1] if entry}
    assert ends == {trained < FEWEST}
    assert said in made.caption


def test_two_sets_of_runs_are_compared_by_leaderboard(add: Add, tmp_path: Path) -> None:
    for seed, (number, scenario) in product(range(2), enumerate(SCENARIOS)):
        add("fedavg", scenario, seed)
        add("moon", scenario, seed, (0.6,))
        add("fedavg", scenario, seed, (0.5 + number / 100,), train__lr=0.25)
        add("fpl", scenario, seed, train__lr=0.25)
    runs = read_frame(tmp_path)
    rate = runs["run"].map(lambda run: run.get("train.lr"))
    one, other = runs[rate != 0.25], runs[rate == 0.25]
    (grid,) = differences_between(one, other, ("a/", "b/"))
    assert [[line.label, *(e.text for e in line.entries if e)] for line in grid.lines] == [
        ["FedAvg", "8, 8", "0", "50.00", "51.50", "-1.50 [-3.55, +0.55]"]
    ]
    assert grid.notes[0] == "0 equal keys among 16 and 16 runs."
    assert grid.notes[2:] == ("In a/ and not in b/: MOON.", "In b/ and not in a/: FPL.")
    (grid,) = differences_between(one, one, ("a/", "a/"))
    assert grid.notes[0] == "16 equal keys among 16 and 16 runs."
    assert {line.entries[-1].text for line in grid.lines if line.entries[-1]} == {
        "+0.00 [+0.00, +0.00]"
    }
    with pytest.raises(SettingsError, match="no data set and protocol in common"):
        list(differences_between(one, runs[:0], ("a/", "b/")))


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_of_the_table_of_several_methods_is_cut(
    add: Add, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    runs = [
        add(method, scenario, seed, (0.5 + gap * (seed + place),), id_test=(0.5,))
        for method, gap in (("fedavg", 0.01), ("groupdro", 0.0623))
        for place, scenario in enumerate(SCENARIOS)
        for seed in (0, 1)
    ]
    made = compared(runs)
    print_grid(made, "method")
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= width
    (first,) = [n for n, line in enumerate(shown) if "GroupDRO" in line]
    printed = list(takewhile(str.strip, shown[first:]))
    texts = [entry.text for entry in made.lines[1].entries[:-1] if entry]
    assert sorted(" ".join(printed).split()) == sorted(" ".join(["GroupDRO", *texts]).split())


def test_test_stands_beside_id_test_and_is_compared_at_equal_id_test(
    add: Add, tmp_path: Path
) -> None:
    """MOON equals FedAvg a round earlier, FPL is 5 points above, FedSR outside FedAvg's range."""

    def line(known: float) -> float:
        return 1 / (1 + math.exp(0.9) * (known / (1 - known)) ** -0.7)

    rounds = (0.6, 0.7, 0.8)
    for scenario in SCENARIOS:
        add("fedavg", scenario, test=tuple(map(line, rounds)), id_test=rounds)
        add("moon", scenario, test=(line(0.7),) * 3, id_test=(0.7,) * 3)
        add("fpl", scenario, test=(line(0.7) + 0.05,) * 3, id_test=(0.7,) * 3)
        add("fedsr", scenario, test=(0.2,) * 3, id_test=(0.5,) * 3)
    (table,) = frames(read_frame(tmp_path))
    grid = build(table.name, table.description, table.runs)
    found = cells(grid)
    assert float(found["MOON", "unseen id_test mean"]["value"]) == pytest.approx(70)
    assert found["MOON", "unseen id_test mean"]["split"] == "id_test"
    gap = 100 * (line(0.7) - line(0.8))
    assert float(found["MOON", "unseen difference"]["value"]) == pytest.approx(gap)
    above = {name: found[name, "unseen at equal id_test"] for name in ("MOON", "FPL", "FedSR")}
    assert float(above["MOON"]["value"]) == pytest.approx(0, abs=1e-6)
    assert float(above["FPL"]["value"]) == pytest.approx(5)
    assert above["FedSR"]["value"] == ""
    assert found["FedAvg", "unseen at equal id_test"]["text"] == "reference"
    assert "|mean|id\\_test mean|difference|at equal id\\_test|" in markdown(grid)
    assert "at equal id\\_test: the mean minus" in notes_text(grid)


def test_without_id_test_no_column_speaks_of_it(add: Add, tmp_path: Path) -> None:
    for scenario in SCENARIOS:
        for method in ("fedavg", "moon"):
            add(method, scenario)
    assert "id\\_test" not in markdown(generic(tmp_path))


def test_where_a_run_collapses_the_iqm_leads_and_the_test_is_doubted(
    add: Add, tmp_path: Path
) -> None:
    for scenario in SCENARIOS:
        for seed in range(3):
            broken = scenario == "ip-o-c" and seed == 1
            add("fedavg", scenario, seed, test=(0.5 + seed / 100,))
            add("moon", scenario, seed, test=(0.2 if broken else 0.52 + seed / 100,))
            wild = (-0.1, 0.0, 0.1)[seed] if scenario == "ip-o-c" else 0.0
            add("fpl", scenario, seed, test=(0.45 + seed / 100 + wild,))
    grid = generic(tmp_path)
    assert [line.row for line in grid.lines] == ["MOON", "FedAvg", "FPL"]
    heads = [column.head for column in grid.columns if column.kind != "measured"]
    assert heads[:2] == ["IQM", "mean"]
    assert any("Some runs collapse" in note and "(MOON 1)" in note for note in grid.notes)
    found = cells(grid)
    assert float(found["MOON", "unseen mean"]["value"]) < 51  # FedAvg's
    assert "does not hold where runs collapse" in found["MOON", "unseen p"]["footnotes"]
    assert "low power" in found["FPL", "unseen p"]["footnotes"]


def test_a_row_whose_model_predicts_one_class_says_so(add: Add, tmp_path: Path) -> None:
    """It is in the record, or follows from accuracy and macro F1 over ten classes."""
    add("fedavg", "oc-i-p", test=(0.5, 0.5))
    store = ResultsStore(tmp_path)
    for seed, more in enumerate(({"macro_f1": 2 * 0.2 / 1.2 / 10}, {"only_class": "6"})):
        record = add("pardon", "oc-i-p", seed, test=(0.5, 0.2))
        for part in record.rounds[-1].evaluation["test"].values():
            part.update(more)
        store.save(record)
    said = footnotes(generic(tmp_path))
    assert said["FedAvg"] == []
    assert said["PARDON"] == [
        "a single class predicted on test after the last round (oc-i-p, seed 0), as 1 more of 2 "
        "runs have"
    ]


def test_rows_that_mix_cpus_say_so_unless_they_are_portable(add: Add, tmp_path: Path) -> None:
    store = ResultsStore(tmp_path)
    for method, portable in (("fedavg", False), ("pardon", True)):
        for seed, cpu in enumerate(("AuthenticAMD avx2", "GenuineIntel avx512")):
            record = add(method, "oc-i-p", seed)
            environment = {**record.environment.model_dump(), "cpu": cpu, "portable": portable}
            store.save(RunRecord.model_validate({**record.as_json(), "environment": environment}))
    (said,) = [note for note in generic(tmp_path).notes if "kinds of CPU" in note]
    assert said.startswith("Run on several kinds of CPU")
    assert said.endswith(": FedAvg.")


def test_rows_that_mix_codes_of_a_method_say_so(add: Add, tmp_path: Path) -> None:
    store = ResultsStore(tmp_path)
    ours = sorted(harmless("fedprox", load_method("fedprox").version))[:2]
    codes = {"fedavg": ("a" * 64, "b" * 64), "fedprox": ours, "pardon": ("c" * 64, None)}
    for method, digests in codes.items():
        for seed, code in enumerate(digests):
            values = add(method, "oc-i-p", seed).as_json()
            version = load_method(method).version
            store.save(
                RunRecord.model_validate({**values, "code": code, "method_version": version})
            )
    said = [note for note in generic(tmp_path).notes if "code" in note]
    assert said == [
        "Row FedAvg mixes runs of 2 codes of one version of fedavg, whose numbers may differ: "
        "raise `version` where the code changed, or repeat them with --again."
    ]


@pytest.mark.parametrize("portable", [False, True])
def test_rows_of_another_cpu_than_most_are_named(add: Add, tmp_path: Path, portable: bool) -> None:
    store = ResultsStore(tmp_path)
    for method in ("fedavg", "ccst", "pardon"):
        cpu = "AuthenticAMD avx2" if method == "ccst" else "GenuineIntel avx512"
        record = add(method, "oc-i-p", 0)
        environment = {**record.environment.model_dump(), "cpu": cpu, "portable": portable}
        store.save(RunRecord.model_validate({**record.as_json(), "environment": environment}))
    add("moon", "oc-i-p", 0)  # an old record, without a CPU
    said = [note for note in generic(tmp_path).notes if "another kind of CPU" in note]
    assert [note.partition(", which")[0] for note in said] == (
        [] if portable else ["Run on another kind of CPU than most rows (AuthenticAMD avx2)"]
    )
    assert all(note.endswith(": CCST.") for note in said)


def test_runs_with_other_unseen_clients_are_not_compared(add: Add, tmp_path: Path) -> None:
    add("fedavg")
    add("fedprox", federation__unseen_clients=2)
    found = frames(read_frame(tmp_path))
    assert [len(frame.runs) for frame in found] == [1, 1]
    assert "unseen_clients=2" in "".join(frame.title for frame in found)


def test_rows_with_the_same_numbers_are_said_to_be_the_same(add: Add, tmp_path: Path) -> None:
    for scenario in PAIR:
        add("fedavg", scenario, test=(0.4,))
        add("fedbn", scenario, test=(0.4,), federation__bn="local")
        add("agrsum", scenario, test=(0.4,))  # a row above the reference
        add("moon", scenario, test=(0.4,) if scenario == PAIR[0] else (0.5,))
        add("fedprox", scenario, test=(0.4,), val=(0.4,), id_val=(0.3,))  # not shown
    table = generic(tmp_path)
    same = "identical to FedAvg: the network has no batch "
    none = {"FedAvg": [], "MOON": [], "FedProx": []}
    equal = {"FedBN": [f"{same}normalisation"], "AgrSum": ["identical to FedAvg in every run"]}
    assert footnotes(table) == none | equal
    found = cells(table)
    assert found["FedBN", "unseen difference"]["value"] == "0"
    assert found["FedBN", "unseen difference"]["text"] == DASH
    assert found["MOON", "unseen difference"]["text"] == "+5.00"


@pytest.mark.parametrize(
    ("backbone", "why"),
    [
        ({}, " in every run"),
        ({"backbone__trainable": "head"}, ": no layer below the classifier is trained"),
        ({"backbone__trainable": "head", "backbone__projection": 8}, " in every run"),
    ],
    ids=str,
)
def test_a_method_that_acts_on_features_is_said_to_have_none(
    add: Add, tmp_path: Path, backbone: dict[str, Any], why: str
) -> None:
    for scenario in PAIR:
        for method in ("fedavg", "fpl"):
            add(method, scenario, test=(0.4,), **backbone)
    assert footnotes(generic(tmp_path)) == {"FedAvg": [], "FPL": [f"identical to FedAvg{why}"]}


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ({}, "50 rounds, N=100, K=20, lambda=0.1"),
        ({"partition__kind": "dirichlet"}, "50 rounds, N=100, K=20, alpha=0.5"),
        (
            {"partition__kind": "label_dirichlet"},
            "K=20, lambda=0.1, classes drawn with alpha=0.5",
        ),
        ({"partition__kind": "label_shards"}, "K=20, lambda=0.1, 2 classes per client"),
        ({"partition__kind": "domain"}, "50 rounds, one client per domain, K=20"),
        ({"partition__kind": "per_domain"}, "50 rounds, 2 clients per domain, K=20"),
        ({"partition__kind": "pooled"}, "224 px, 50 rounds, all images pooled"),
    ],
)
def test_a_caption_says_what_decided_who_holds_what(
    add: Add, tmp_path: Path, partition: dict[str, str], said: str
) -> None:
    add(**partition, federation__rounds=50)
    assert any(said in part for part in generic(tmp_path).notes)


@pytest.mark.parametrize(
    ("one", "other", "labels"),
    [
        ({"train__lr": 0.1}, {"train__lr": 0.01}, {"FedAvg (lr=0.1)", "FedAvg (lr=0.01)"}),
        ({"version": 1}, {"version": 2}, {"FedAvg (version=1)", "FedAvg (version=2)"}),
        ({"hyper": {"mu": 1.0}}, {"hyper": {"mu": 2.0}}, {"FedAvg (mu=1)", "FedAvg (mu=2)"}),
        (
            {"hyper": {"preset": "a", "x": 1, "y": 2}, "labels": {"preset": "a"}},
            {"hyper": {"preset": "b", "x": 3, "y": 4}, "labels": {"preset": "b"}},
            {"FedAvg (preset=a)", "FedAvg (preset=b)"},
        ),
    ],
)
def test_runs_with_other_settings_are_rows_of_their_own(
    add: Add, tmp_path: Path, one: dict[str, Any], other: dict[str, Any], labels: set[str]
) -> None:
    add(seed=0, test=(0.2,), **one)
    add(seed=1, test=(0.4,), **other)
    (line,) = generic(tmp_path).lines
    assert line.label == "FedAvg"
    grid = generic(tmp_path, variants=True)
    assert {line.label for line in grid.lines} == labels
    values = {float(cell["value"]) for key, cell in cells(grid).items() if key[1] == "test Poster"}
    assert values == {20.0, 40.0}


def test_the_variant_with_the_most_runs_has_the_bare_name(add: Add, tmp_path: Path) -> None:
    for seed in (0, 1):
        add("fedprox", seed=seed, hyper={"mu": 0.1, "norm": "l2"})
    add("fedprox", hyper={"mu": 0.5, "norm": "l2"})
    add("fedprox", hyper={"mu": 0.1, "norm": "squared"})
    labels = {line.label for line in generic(tmp_path, variants=True).lines}
    assert labels == {"FedProx", "FedProx (mu=0.5)", "FedProx (norm=squared)"}


def test_variants_of_one_method_do_not_outvote_the_others_in_the_caption(
    add: Add, tmp_path: Path
) -> None:
    for method in ("fedavg", "ccst"):
        add(method, train__lr=0.0004)
    for mu in (0.1, 0.2, 0.3, 0.4):
        add("fedprox", hyper={"mu": mu}, train__lr=0.0008)
    grid = generic(tmp_path, variants=True)
    assert "lr 0.0004" in " ".join(grid.notes)
    unlike = [note for note in grid.notes if "differs from most" in note]
    assert len(unlike) == 4
    assert all("FedProx" in note and "lr=0.0008" in note for note in unlike)


def test_what_a_run_does_not_have_is_not_in_its_name(add: Add, tmp_path: Path) -> None:
    add("fedprox", hyper={"mu": 0.1})
    add("fedprox", hyper={"mu": 0.1, "noise": 3})
    assert {line.label for line in generic(tmp_path, variants=True).lines} == {
        "FedProx",
        "FedProx (noise=3)",
    }


def test_frames_are_tables_of_their_own_and_pooled_runs_join_them(add: Add, tmp_path: Path) -> None:
    for heterogeneity in (0.0, 0.1):
        add("fedavg", partition__heterogeneity=heterogeneity)
    pooled = {"partition__kind": "pooled", "partition__clients": 1, "federation__per_round": None}
    add("erm", **pooled)
    add("fedavg", fingerprint="e" * 32, seed=1)
    tables = frames(read_frame(tmp_path))
    methods = {table.name: sorted(run.method for run in table.runs) for table in tables}
    assert len(methods) == 3
    assert list(methods.values()).count(["erm", "fedavg"]) == 2
    assert any("lambda-0" in name for name in methods)
    both = next(table for table in tables if methods[table.name] == ["erm", "fedavg"])
    told = build(both.name, both.description, both.runs).notes
    assert any(
        n.startswith("Row ERM differs from most rows in") and "kind=pooled" in n for n in told
    )


def test_each_encoder_has_its_own_table_and_its_weights_split_this(
    add: Add, tmp_path: Path
) -> None:
    small = {"recipe": "features", "backbone__name": "features", "data__image_size": 128}
    for encoder, seed, weights in (
        ("efficientnet_lite0", 0, "a"),
        ("mobilenet_v2+tf", 0, "b"),
        ("timm:vit", 0, "c"),
        ("timm:vit", 1, "d"),
    ):
        add(seed=seed, features__encoder=encoder, fingerprint=weights * 32, **small)
    assert [table.title.partition("recipe ")[2] for table in frames(read_frame(tmp_path))] == [
        "features",
        "features, mobilenet_v2+tf",
        "features, timm:vit: images=cccccccc",
        "features, timm:vit: images=dddddddd",
    ]


def test_a_difference_over_fewer_scenarios_says_so(add: Add, tmp_path: Path) -> None:
    for seed, scenario in enumerate(PAIR):
        add("fedavg", scenario, federation__rounds=7)
        add("fedprox", PAIR[0], seed, test=(0.6,), federation__rounds=7)
    assert footnotes(generic(tmp_path))["FedProx"] == ["difference over 1 of 2 scenarios"]


def test_a_method_without_training_steps_has_no_rate_to_compare(add: Add, tmp_path: Path) -> None:
    for scenario in PAIR:
        add("fedavg", scenario, train__lr=0.004, federation__rounds=7)
        for method, test in (("ncm", 0.4), ("fedprox", 0.6)):
            add(method, scenario, test=(test,), train__lr=0.001, federation__rounds=7)
    rates = "at lr=0.001, FedAvg at lr=0.004"
    said = footnotes(generic(tmp_path))
    assert (said["FedProx"], said["NCM"]) == ([rates], [])


def test_a_terminal_shows_the_footnotes_of_what_it_shows(
    add: Add, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for scenario in PAIR:
        add("fedavg", scenario, federation__rounds=7)
        add("fedprox", scenario, test=(0.6,), train__lr=0.1, federation__rounds=7)
    add("fedsam", PAIR[0], test=(0.7,), train__lr=0.1, federation__rounds=7)
    print_grid(generic(tmp_path), "method")
    shown = capsys.readouterr().out.splitlines()
    rows = [line.split("  ")[0].strip() for line in shown]
    assert {"FedProx ¹", "FedAvg ²", "FedSAM ¹,³"} <= {*rows}
    assert shown[-3:] == [
        "¹ at lr=0.1, FedAvg at lr=3e-05.",
        "² with lr=3e-05.",
        "³ difference over 1 of 2 scenarios.",
    ]


@pytest.mark.parametrize(("more", "setups"), [(0, 1), (1, 2)])
@pytest.mark.parametrize(
    ("recipe", "dataset", "method", "key", "own"),
    [
        ("desktop", "pacs", "erm", "rounds", 9),
        ("planted", "planted_tint", "agrsum", "per_round", 4),
    ],
)
def test_a_method_with_its_recipe_s_own_federation_joins_the_others(
    tmp_path: Path,
    recipe: str,
    dataset: str,
    method: str,
    key: str,
    own: int,
    more: int,
    setups: int,
) -> None:
    """ERM has fewer rounds, as it trains on all images in each, and AGRSum fewer clients."""
    for name in ("fedavg", method):
        settings = in_frame(recipe, dataset, name)
        if name == method:
            assert settings["federation"][key] == own
            settings["federation"] = {**settings["federation"], key: own + more}
        where = {"domains": (("a", "b"), "c", "d"), "recipe": recipe}
        save(tmp_path, record(name, dataset, settings=settings, **where))
    assert len(frames(read_frame(tmp_path))) == setups


def test_a_frame_may_lack_a_setting_that_another_has(add: Add, tmp_path: Path) -> None:
    """Records omit ``data.background`` if it is black, so that old keys stay."""
    add("fedavg")
    add("fedavg", data__background="white", seed=1)
    names = [table.name for table in frames(read_frame(tmp_path))]
    assert len(set(names)) == 2
    assert [name for name in names if name.endswith("-background-white")]


def test_pooled_runs_bring_no_column_that_a_frame_lacks(add: Add, tmp_path: Path) -> None:
    """Unless no setup has it."""
    add("fedavg", "oc-i-p", partition__heterogeneity=0.0)
    for scenario in ("oc-i-p", "ip-o-c"):
        add("fedavg", scenario, partition__heterogeneity=0.1)
    pooled = {"partition__kind": "pooled", "partition__clients": 1, "federation__per_round": None}
    for scenario in ("oc-i-p", "ip-o-c", "po-c-i"):
        add("erm", scenario, **pooled)
    found = {
        table.name: sorted(run.scenario for run in table.runs if run.method == "erm")
        for table in frames(read_frame(tmp_path))
    }
    assert found == {
        "digits4-ltdo-quick-lambda-0": ["oc-i-p", "po-c-i"],
        "digits4-ltdo-quick": ["ip-o-c", "oc-i-p", "po-c-i"],
    }


def test_every_folder_of_own_images_has_a_leaderboard(
    add: Add, tmp_path: Path, feddg: Callable[..., Any]
) -> None:
    for seed, label in enumerate(("shapes", "shapes", "birds")):
        record = add("fedavg", seed=seed)
        data = record.data.model_copy(update={"label": label})
        ResultsStore(tmp_path).save(record.model_copy(update={"data": data}))
    made = feddg("tables", "all", "--results", tmp_path)
    assert made.code == 0, made.err
    assert "not written" not in made.out
    written = {path.stem for path in (tmp_path / "tables").glob("digits4-*.tex")}
    assert written == {"digits4-shapes-ltdo-quick", "digits4-birds-ltdo-quick"}


def test_two_folders_of_own_images_are_not_rows_of_one_table(add: Add, tmp_path: Path) -> None:
    """Each method's row was of the folder with more runs."""
    for label, method, seed in (("my cats", "fedavg", 0), ("dogs", "moon", 1)):
        made = add(method, seed=seed)
        data = made.data.model_copy(update={"label": label})
        ResultsStore(tmp_path).save(made.model_copy(update={"data": data}))
    with refused(SettingsError, "own data sets dogs and my cats: name one, as in --filter label="):
        make_table((), "scenario", [tmp_path], TableOptions.of())
    runs = read_frame(tmp_path)
    cats, dogs = runs[runs["label"] == "my cats"], runs[runs["label"] == "dogs"]
    with refused(SettingsError, "have no data set and protocol in common"):
        list(differences_between(cats, dogs, ("a/", "b/")))
    chosen = TableOptions.of(filters=["label=my cats"])
    (grid,) = make_table((), "scenario", [tmp_path], chosen).grids
    assert [line.label for line in grid.lines] == ["FedAvg"]
    assert grid.title.startswith("my cats, ")


def test_a_setup_has_one_leaderboard_and_variants_have_another(
    add: Add, tmp_path: Path, feddg: Callable[..., Any]
) -> None:
    usual = in_frame("quick", "digits4", "fedavg")["partition"]["heterogeneity"]
    for heterogeneity in (0.0, usual, 0.5):
        add("fedavg", partition__heterogeneity=heterogeneity)
        add("ccst", partition__heterogeneity=heterogeneity)
    add("pardon", recipe="another")
    made = feddg("tables", "generic", "--results", tmp_path)
    assert made.code == 0, made.err
    assert "4 runs have other settings; --variants shows them, too" in made.out
    files = {path.name: path.read_text() for path in (tmp_path / "tables").iterdir()}
    stems = {"digits4-ltdo-quick", "digits4-ltdo-another"}
    endings = ("md", "notes.md", "csv", "tex")
    assert set(files) == {f"{s}.{e}" for s in stems for e in endings} | {"tables.tex"}
    assert files["digits4-ltdo-quick.md"].count("|FedAvg") == 1
    tuned = TunedRecord(trials=4, settings={"train.lr": 0.25})
    record = add("pardon", id_test=(0.9,), recipe="another", train__lr=0.25)
    ResultsStore(tmp_path).save(record.model_copy(update={"tuned": tuned}))
    made = feddg("tables", "all", "--results", tmp_path, "--out", "all", "--variants")
    said = "not written, as other setups have more runs, and better trained ones: "
    assert f"{said}digits4-ltdo-another (" in made.out
    written = {path.stem for path in Path("all").glob("digits4-*.tex")}
    assert {"digits4-ltdo-quick", "digits4-ltdo-another-tuned"} <= written
    assert "digits4-ltdo-another" not in written
    text = (Path("all") / "digits4-ltdo-quick-variants.md").read_text()
    assert "FedAvg (lambda=0)" in text
    assert "FedAvg (lambda=0.5)" in text
    made = feddg("tables", "generic", "--results", tmp_path, "--recipe", "anothr")
    assert made.code == 2
    assert "did you mean 'another'?" in made.err


def test_a_recipe_without_a_number_for_a_table_is_refused(
    add: Add, tmp_path: Path, feddg: Callable[..., Any]
) -> None:
    add("pardon", recipe="small", partition__clients=20)
    add("pardon", recipe="digits")  # the table is about PACS and Office-Home
    for recipe, why in (("small", "has N=100;"), ("digits", "fits a row and a column;")):
        made = feddg("tables", "pardon-1", "--results", tmp_path, "--recipe", recipe)
        assert made.code == 2
        assert (
            f"{recipe!r} has no number for the table pardon-1: none of its runs {why}" in made.err
        )
    assert not (tmp_path / "tables").exists()


def test_missing_cells_say_which_command_fills_them(add: Add, tmp_path: Path) -> None:
    for scenario in PAIR:
        add("fedavg", scenario, 0)
    add("fedprox", "oc-i-p", 0, hyper={"mu": 0.5})
    add("fedprox", "oc-i-p", 0, hyper={"mu": 1.0})
    grid = generic(tmp_path, variants=True)
    commands = dict(grid.fills)
    command = commands["FedProx (mu=0.5)"]
    assert command.startswith("feddg-bench run --method fedprox --protocol ltdo --dataset digits4")
    assert "--scenario ic-p-o --seeds 0" in command
    assert "hyper.mu=0.5" in command
    assert "FedAvg" not in commands
    assert f"`{command}`" in notes_text(grid)
    found = cells(grid)  # numbers alone
    assert found["FedProx (mu=0.5)", "test Poster"]["value"] != ""
    assert not {"test Outline", "unseen mean"} & {c for r, c in found if r == "FedProx (mu=0.5)"}
    assert ("FedAvg", "unseen mean") in found


def test_same_records_same_bytes_in_any_order(add: Add, tmp_path: Path) -> None:
    for method in ("pardon", "fedavg"):
        for seed in (1, 0):
            for scenario in PAIR:
                add(method, scenario, seed, (0.3 + seed / 10,))
    runs = read_frame(tmp_path)
    (one,), (two,) = frames(runs), frames(runs[::-1])
    for write in (markdown, latex, csv_text):
        texts = {write(build(t.name, t.description, t.runs)) for t in (one, two)}
        assert len(texts) == 1


def test_oracle_is_marked_and_a_rule_without_its_split_leaves_a_gap(
    add: Add, tmp_path: Path
) -> None:
    record = add(test=(0.9, 0.1))
    grid = generic(tmp_path, "oracle")
    assert "ORACLE" in grid.title
    assert "ORACLE" in grid.caption
    assert float(cells(grid)["FedAvg", "test Poster"]["value"]) == 90
    path = tmp_path / "runs" / f"{record.key}.json"
    path.write_text(path.read_text().replace('"id_val"', '"other"'))
    gap = cells(generic(tmp_path, "best_by_id_val"))["FedAvg", "test Poster"]
    assert gap["value"] == ""
    assert "needs the split id_val" in gap["footnotes"]


def test_runs_of_a_partition_of_ones_own_have_a_table(tmp_path: Path) -> None:
    """Its settings are not among those that captions name."""
    one = record("fedavg", settings={"partition": {"clients": 77}})
    mine = one.settings | {"partition": {**one.settings["partition"], "kind": "striped"}}
    changes = {"settings": mine, "key": run_key(mine, one.method_version)}
    save(tmp_path, one.model_copy(update=changes))
    assert "N=77" in " ".join(generic(tmp_path).notes)
    assert "partition striped" in " ".join(generic(tmp_path).notes)


def test_a_table_without_rows_promises_no_commands() -> None:
    grid = build("mine", user_table(), [])
    assert (grid.caption, grid.fills) == ("No run of this table is recorded yet.", ())


def test_a_misspelt_method_of_a_table_is_guessed(tmp_path: Path) -> None:
    save(tmp_path, record("fedavg"))
    rows = [{"label": "FedProx", "where": {"method": "fedproxx"}}]
    grid = build("mine", user_table(rows=rows), read_runs(tmp_path))
    assert "did you mean 'fedprox'?" in dict(grid.fills)["FedProx"]


def test_what_a_method_was_told_beside_its_recipe_is_said(tmp_path: Path) -> None:
    """All runs of a row can share it, so that no label of a variant shows it."""
    for style, method in (("vgg19_16x", "ccst"), ("pixel", "pardon")):
        one = record(method, settings={"hyper": {"style": style, "preset": "pardon"}})
        save(tmp_path, one.model_copy(update={"labels": {"style": style}}))
    save(tmp_path, record("fedavg", scenario="ic-p-o"))
    grid = generic(tmp_path)
    assert [note for note in grid.notes if "style" in note] == ["Row CCST is style=vgg19_16x."]
    fills = dict(grid.fills)
    assert "hyper.style=vgg19_16x" in fills["CCST"]
    assert "style" not in fills["PARDON"]


def user_table(**changes: Any) -> Description:
    groups = [{"columns": [{"head": "all", "split": "test"}]}]
    return Description.model_validate({"title": "Mine", "others": True, "groups": groups} | changes)


def test_a_column_of_several_scenarios_is_their_mean(add: Add, tmp_path: Path) -> None:
    add("fedavg", "oc-i-p", 0, (0.2,))
    add("fedavg", "ic-p-o", 0, (0.4,))
    add("fedavg", "oc-i-p", 1, (0.9,))  # an incomplete seed does not count
    add("pardon", "oc-i-p", 0, (0.9,))  # nor does an incomplete row
    grid = build("mine", user_table(), read_runs(tmp_path))
    found = cells(grid)
    assert float(found["FedAvg", "all"]["value"]) == pytest.approx(30)
    assert found["FedAvg", "all"]["seeds"] == "0"
    assert ("PARDON", "all") not in found
    assert "pardon" in dict(grid.fills)["PARDON"]


def test_a_table_may_print_intervals_instead_of_deviations(add: Add, tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.5, 0.6, 0.7)):
        add("fedavg", "oc-i-p", seed, (accuracy,))
    add("pardon", "oc-i-p", 0, (0.5,))
    add("pardon", "oc-i-p", 1, (0.6,))
    columns = [{"head": "all", "where": {"scenario": "oc-i-p"}}]
    table = user_table(groups=[{"columns": columns, "split": "test"}], spread="interval")
    grid = build("mine", table, read_runs(tmp_path))
    found = cells(grid)["FedAvg", "all"]
    half = 4.302652729911275 * 10 / math.sqrt(3)  # Student's t, two degrees of freedom
    assert found["text"] == f"60.00 ± {half:.2f}"
    assert [float(found[k]) for k in ("std", "low", "high")] == pytest.approx(
        [10, 60 - half, 60 + half]
    )
    assert cells(grid)["PARDON", "all"]["text"] == "55.00"  # two seeds have no interval
    assert "mean ± 95 % interval over seeds" in grid.caption
    assert "half of its 95 % interval (Student's t)" in grid.notes[0]


def test_columns_may_vary_a_setting_but_not_mix_it(add: Add, tmp_path: Path) -> None:
    for seed, heterogeneity in enumerate((0.0, 0.5)):
        add("fedavg", "oc-i-p", seed, (heterogeneity,), partition__heterogeneity=heterogeneity)
    columns = [
        {"head": str(value), "where": {"partition.heterogeneity": value}} for value in (0.0, 0.5)
    ]
    table = user_table(groups=[{"columns": columns, "split": "test"}])
    grid = build("mine", table, read_runs(tmp_path))
    found = cells(grid)
    assert [float(found["FedAvg", name]["value"]) for name in ("0.0", "0.5")] == [0.0, 50.0]
    assert not any("lambda=" in part for part in grid.notes)
    one = user_table(groups=[{"columns": columns[1:], "split": "test"}])
    assert "lambda=0.5" in " ".join(build("mine", one, read_runs(tmp_path)).notes)
    mixed = user_table(groups=[{"columns": [*columns, {"head": "any"}], "split": "test"}])
    with refused(DataError, "would average runs with partition.heterogeneity 0 and"):
        build("mine", mixed, read_runs(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"others": False}, "needs rows"),
        ({"where": {"partition.heterogenity": 0.1}}, "did you mean 'partition.heterogeneity'"),
        ({"select": "best"}, "select"),
        ({"groups": [{"split": "tst", "columns": [{"head": "a"}]}]}, "'tst' is not valid"),
        ({"colour": "red"}, "unknown setting 'colour'"),
        ({"paper": "pardon"}, "belong together"),
        ({"metric": "acuracy"}, "unknown metric 'acuracy'; did you mean 'accuracy'?"),
        ({"groups": [{"columns": [{"head": "a", "metric": "los"}]}]}, "did you mean 'loss'?"),
        ({"against": "fedavgg"}, "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ({"rows": [{"label": "a", "where": {}}] * 2}, "two rows have the label"),
        (
            {"groups": [{"columns": [{"head": "a"}], "summaries": {"wins": "w"}}]},
            "need against: METHOD",
        ),
    ],
)
def test_wrong_descriptions_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    groups = [{"columns": [{"head": "all"}]}]
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"title": "Mine", "others": True, "groups": groups} | changes))
    with refused(SettingsError, "mine.yaml") as error:
        load_description(str(path))
    assert words in str(error.value)


def test_names_in_a_description_may_be_spelt_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    rows = [{"label": "GA", "where": {"method": "FedDG-GA"}}, {"label": "paper", "where": None}]
    groups = [{"where": {"dataset": ["PACS"]}, "columns": [{"head": "a"}]}]
    given = {"title": "Mine", "against": "FedAvg", "where": {"protocol": "LTDO"}}
    path.write_text(json.dumps(given | {"rows": rows, "groups": groups}))
    _, read = load_description(str(path))
    assert [row.where for row in read.rows] == [{"method": "feddg_ga"}, None]
    assert (read.where, read.groups[0].where) == ({"protocol": "ltdo"}, {"dataset": ["pacs"]})
    assert read.against == "fedavg"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"recip": "quick"}, ("unknown argument of tables 'recip'", "did you mean 'recipe'")),
        ({"select": "best"}, ("unknown selection rule 'best'", "best_by_val")),
        ({"bold": "all"}, ("unknown kind of mark 'all'", "tested")),
        ({"bold": True}, ("unknown kind of mark 'True'", "tested")),
        ({"metric": "f1"}, ("unknown metric 'f1'", "macro_f1")),
        ({"against": "fedavgg"}, ("unknown method 'fedavgg'", "fedavg")),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with refused(SettingsError, *words):
        TableOptions.of(**given)


def test_a_number_of_clients_is_a_column_where_the_others_agree(add: Add, tmp_path: Path) -> None:
    for clients, sampled in ((10, 5), (20, 5), (20, 10)):
        layer = {"partition__clients": clients, "federation__per_round": sampled}
        add("fedavg", test=(clients / 100 + sampled / 1000,), **layer)
    chosen = TableOptions.of(filters=["K=5"])
    (grid,) = make_table((), "N", [tmp_path], chosen).grids
    assert grid.name == "digits4-ltdo-by-N-K-5"
    found = {head: cell["value"] for (_, head), cell in cells(grid).items()}
    assert (found["test N 10"], found["test N 20"]) == ("10.5", "20.5")


def test_columns_come_from_the_runs_of_the_setup_shown(add: Add, tmp_path: Path) -> None:
    """Another recipe has fewer scenarios and another rate: neither may change what is shown."""
    for scenario in SCENARIOS:
        add("fedavg", scenario, train__lr=0.1)
        add("fedavg", scenario, train__lr=0.2)
    add("fedavg", PAIR[0], recipe="laptop", train__lr=0.3)
    for name in ("lr", "train.lr"):
        (grid,) = make_table("all", name, [tmp_path], TableOptions.of()).grids
        assert [column.head for column in grid.columns] == ["lr 0.1", "lr 0.2", "mean"]
        assert grid.title == "Digits4, leave two domains out, by lr"


@pytest.mark.parametrize("key", ["data.image_size", "features.encoder"])
def test_sizes_of_images_and_encoders_can_be_columns(add: Add, tmp_path: Path, key: str) -> None:
    """The images of two sizes differ, and each encoder has its own size."""
    encoded = {"backbone__name": "features"} if key == "features.encoder" else {}
    for size, encoder in ((32, "efficientnet_lite0"), (64, "mobilenet_v2+tf")):
        more = {"features__encoder": encoder} if encoded else {}
        digest = f"{size:x}".ljust(32, "0")
        add("fedavg", data__image_size=size, fingerprint=digest, **encoded, **more)
    (grid,) = make_table((), key, [tmp_path], TableOptions.of()).grids
    assert grid.filled() == (3, 3)


def test_columns_over_the_scenarios_of_all_of_them_say_so(add: Add, tmp_path: Path) -> None:
    for scenario in SCENARIOS:
        add("fedavg", scenario, train__lr=0.1)
    for scenario in PAIR:
        add("fedavg", scenario, train__lr=0.2)
    (grid,) = make_table((), "lr", [tmp_path], TableOptions.of()).grids
    assert grid.title.endswith("by lr, over the scenarios of all columns")
    said = "Leave two domains out: over the scenarios of all columns, ic-p-o, oc-i-p."
    assert said in grid.notes


def test_a_table_of_ones_own_has_its_metric_in_its_name_and_may_show_variants(
    add: Add, tmp_path: Path
) -> None:
    """A table of another metric would replace the first, and `variants` had no effect."""
    for rate in (0.1, 0.2):
        add("fedavg", train__lr=rate)
    chosen = TableOptions.of(metric="Macro F1", variants=True)
    one, whole = make_table((), "scenario", [tmp_path], chosen).grids
    names = ("digits4-ltdo-by-scenario-macro_f1", "digits4-ltdo-by-scenario-variants-macro_f1")
    assert (one.name, whole.name) == names
    assert (len(one.lines), len(whole.lines)) == (1, 2)


def test_a_column_for_each_seed_has_no_mean(add: Add, tmp_path: Path) -> None:
    """A mean over columns is one over the seeds that have all of them: none has."""
    for seed in range(2):
        add("fedavg", "oc-i-p", seed)
    (grid,) = make_table((), "seed", [tmp_path], TableOptions.of()).grids
    assert [column.head for column in grid.columns] == ["seed 0", "seed 1"]
    assert grid.filled() == (2, 2)


@pytest.mark.parametrize("rows", [["moon"], "MOON,fpl"])
def test_the_method_compared_with_has_a_row(
    add: Add, tmp_path: Path, rows: str | list[str]
) -> None:
    for method, scenario in product(("fedavg", "moon", "fpl"), SCENARIOS):
        add(method, scenario)
    chosen = TableOptions.of(against="fedavg")
    (grid,) = make_table(rows, "scenario", [tmp_path], chosen).grids
    assert grid.lines[-1].label == "FedAvg"
    assert cells(grid)["MOON", "test difference"]["value"] == "0"
    adapted = chosen.adapted(user_table(others=False, rows=[{"label": "a", "where": {}}]))
    assert [row.label for row in adapted.rows] == ["a", "FedAvg"]


def test_filters_accept_other_spellings_and_name_what_no_run_has(add: Add, tmp_path: Path) -> None:
    for method in ("fedavg", "feddg_ga"):
        add(method, world__strength=2.0)
    for pair in ("method=FedDG-GA", "method=Feddg_ga,moon", "world.strength=1,2"):
        runs = TableOptions.of(filters=pair).runs([tmp_path])
        assert {*runs["method"]} >= {"feddg_ga"}
    with refused(SettingsError, "none of the 2 runs has mu 1 (there are null)"):
        TableOptions.of(filters="hyper.mu=1").runs([tmp_path])
    with refused(
        SettingsError, "none of the 2 runs has protocol ltdo and strength 3 (there are 2)"
    ):
        TableOptions.of(filters=["protocol=LTDO", "world.strength=3"]).runs([tmp_path])


def test_heads_that_only_their_groups_tell_apart_are_printed_in_parts(
    add: Add, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add("fedavg", PAIR[0])
    columns = [{"head": "Ink"}]
    groups = [{"head": split, "split": split, "columns": columns} for split in ("val", "test")]
    print_grid(build("mine", user_table(groups=groups), read_runs(tmp_path)), "method")
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in printed if line in ("val", "test")] == ["val", "test"]


def test_wide_tables_are_cut_where_summaries_begin(add: Add, tmp_path: Path) -> None:
    for scenario, method, seed in product(SCENARIOS, ("fedavg", "moon"), range(3)):
        add(method, scenario, seed)
    grid = generic(tmp_path, "best_by_val")
    heads = lambda most: [  # noqa: E731
        [grid.columns[n].head for n in block] for block in grid.blocks(lambda b: len(b) <= most)
    ]
    scenarios = ["Chalk", "Ink", "Outline", "Poster"]
    summaries = ["mean", "difference", "p", "p, these units"]
    assert heads(8) == [[*scenarios, *summaries]]
    assert heads(5) == heads(4) == [scenarios, summaries]
    assert heads(3) == [["Chalk", "Ink"], ["Outline", "Poster", "mean"], summaries[1:]]
    assert heads(0) == [[head] for head in (*scenarios, *summaries)]


# -------------------------------------------------------------------------------- setups


def test_a_row_is_the_runs_that_depart_least_from_the_recipe(tmp_path: Path) -> None:
    """Tuned settings and those that a row requests do not count as departures."""

    def run(method: str, seed: int, tuned: float | None = None, **changed: Any) -> None:
        frame = in_frame("quick", "digits4", method)
        layer = merge(frame, *(nested(*pair) for pair in changed.items()))
        made = record(method, seed=seed, settings=layer)
        chosen = None if tuned is None else TunedRecord(trials=4, settings={"train.lr": tuned})
        save(tmp_path, made.model_copy(update={"tuned": chosen}))

    for seed in (0, 1):
        run("fedavg", seed)
        run("fedprox", seed, **{"hyper.mu": 0.5})
    run("fedprox", 0)
    runs = read_runs(tmp_path)
    chosen = least_departing([r for r in runs if r.method == "fedprox"], {})
    assert [r.settings.get("hyper.mu") for r in chosen] == [None]
    asked = least_departing([r for r in runs if r.settings.get("hyper.mu") == 0.5], {"hyper.mu": 0})
    assert len(asked) == 2
    run("moon", 0, 0.5, **{"train.lr": 0.5})
    run("moon", 0, None, **{"train.lr": 0.25})
    (moon,) = least_departing([r for r in read_runs(tmp_path) if r.method == "moon"], {})
    assert moon.settings["train.lr"] == 0.5
    assert departing(moon) == {}


def test_a_row_made_with_other_rounds_than_most_says_so(tmp_path: Path) -> None:
    """A paper's table can have both in one setup; a leaderboard separates them."""
    usual = in_frame("quick", "digits4", "fedavg")
    fewer = merge(usual, {"federation": {"rounds": 30}})
    for method in ("fedprox", "moon"):
        save(tmp_path, record(method, settings=fewer))
    save(tmp_path, record("fedavg", settings=usual))
    pooled = {"partition": {"kind": "pooled", "clients": 1}, "federation": {"per_round": None}}
    save(tmp_path, record("erm", settings=merge(fewer, pooled)))
    said = footnotes(build("mine", user_table(), read_runs(tmp_path)))
    assert said == {"ERM": [], "FedAvg": ["with rounds=50"], "FedProx": [], "MOON": []}


def test_a_table_shows_the_complete_setup_of_the_highest_rank(tmp_path: Path) -> None:
    """If none is complete, it shows the fullest; the number of clients follows its recipe."""
    groups = [
        {"head": "PACS", "columns": [{"head": "all", "where": {"dataset": "pacs"}}]},
        {"head": "Home", "columns": [{"head": "all", "where": {"dataset": "officehome"}}]},
    ]
    rows = [
        {"label": name, "where": {"method": name}, "published": None} for name in ("fedavg", "ccst")
    ]
    table = Description.model_validate(
        {"title": "T", "groups": groups, "rows": rows, "where": {"partition.clients": 100}}
        | {"paper": "pardon", "table": "1", "recipe": "pardon"}
    )
    more: dict[str, Any] = {"dataset": "pacs", "scenario": "cs-a-p"}

    def run(recipe: str, method: str, seeds: int) -> None:
        settings = in_frame(recipe, "pacs", method)
        for seed in range(seeds):
            save(tmp_path, record(method, seed=seed, recipe=recipe, settings=settings, **more))

    def shown(recipe: str | None = None) -> tuple[set[str], Any]:
        asked, runs = of_setup(table, read_frame(tmp_path), recipe)
        return {run.recipe for run in runs}, asked.where["partition.clients"]

    run("laptop", "fedavg", 3)
    run("laptop", "ccst", 3)
    run("desktop", "fedavg", 2)
    assert shown() == ({"laptop"}, 100)
    assert shown("desktop") == ({"desktop"}, 20)
    run("features", "fedavg", 3)  # complete, but another track than the paper's
    run("features", "ccst", 4)
    assert shown() == ({"laptop"}, 100)
    assert shown("features")[0] == {"features"}
    run("desktop", "ccst", 2)
    assert shown() == ({"desktop"}, 20)
    run("pardon", "fedavg", 1)
    assert shown() == ({"desktop"}, 20)
    asked, runs = of_setup(table, read_frame(tmp_path))
    grid = build("t", asked, runs)
    assert {column.group for column in grid.columns} == {"PACS"}
    ((heads, command),) = grid.absent
    assert heads == "Home"
    assert command.startswith("feddg-bench run --method fedavg,ccst --dataset officehome ")
    assert "partition.clients" not in command
    assert f"- Home: no runs; `{command}`" in markdown(grid)
    assert not any("officehome" in said for _, said in grid.fills)


def test_a_table_shows_the_papers_setup_or_else_the_fullest(add: Add, tmp_path: Path) -> None:
    groups = [{"columns": [{"head": "all"}]}]
    rows = [{"label": "FedAvg", "where": {"method": "fedavg"}}]
    paper = {"paper": "ppdg", "table": "4", "recipe": "ppdg"}
    table = Description.model_validate({"title": "T", "groups": groups, "rows": rows} | paper)
    for seed in (0, 1):
        add(seed=seed, recipe="full")
    add(seed=0, recipe="other", train__lr=0.25)
    shown = lambda *recipe: {r.recipe for r in of_setup(table, read_frame(tmp_path), *recipe)[1]}  # noqa: E731
    assert shown() == {"full"}
    assert shown("other") == {"other"}
    add(seed=0, recipe="ppdg", train__lr=0.125)
    assert shown() == {"ppdg"}
    by_recipe = [{"label": r, "where": {"recipe": r}} for r in ("full", "other")]
    asked = table.model_copy(update={"rows": [RowSpec.model_validate(row) for row in by_recipe]})
    assert len(of_setup(asked, read_frame(tmp_path))[1]) == 4


@pytest.mark.parametrize(
    ("bold", "marks"),
    [
        ("tested", {"FedAvg": "", "MOON": "", "FPL": ""}),
        ("best", {"FedAvg": "best", "MOON": "best", "FPL": "second"}),
        ("none", {"FedAvg": "", "MOON": "", "FPL": ""}),
    ],
)
def test_what_is_marked_can_be_chosen(
    add: Add, tmp_path: Path, bold: str, marks: dict[str, str]
) -> None:
    for method, accuracy in (("fedavg", 0.5), ("moon", 0.500001), ("fpl", 0.4)):
        add(method, test=(accuracy,))
    found = cells(generic(tmp_path, bold=bold))
    assert {name: found[name, "test Poster"]["mark"] for name in marks} == marks


def test_captions_and_files_of_the_shipped_tables_are_short() -> None:
    """Limits: 40 words for title and caption, 750 per file, 8 number columns in Markdown."""
    folder = Path(__file__).parents[2] / "results" / "tables"
    tables = [p for p in folder.glob("*.md") if p.suffixes == [".md"]]
    assert len(tables) > 10
    assert len(list(folder.iterdir())) <= 80
    for path in [*tables, folder.parent / "leakage" / "tables" / "privacy.md"]:
        text = path.read_text()
        assert len(text.split()) <= 750, path
        assert max(line.count("|") for line in text.splitlines()) <= 10, path
        if path.stem == "privacy":
            continue
        tex = path.with_suffix(".tex").read_text()
        assert "resizebox" not in tex
        captions = re.findall(r"(?m)^\\caption\{(.*)\}$", tex)
        assert captions
        assert all(len(caption.split()) <= 41 for caption in captions), captions  # (continued)
        rows = csv.DictReader(io.StringIO(path.with_suffix(".csv").read_text()))
        keys = {key for row in rows for key in row["run_keys"].split()}
        told = path.with_suffix(".notes.md").read_text()
        assert all(key in told for key in keys), path


# ----------------------------------------------------------------------------- published


def test_every_named_table_is_whole_without_records() -> None:
    """A table shows each of its published numbers once, and nothing else."""
    assert set(named_tables()) == {
        *("pardon-1", "pardon-2", "pardon-3", "pardon-5"),
        *("fisc-6", "fisc-7", "fisc-8", "fisc-10", "fedccrl-1", "fedccrl-2"),
        *(f"ppdg-{n}" for n in range(1, 8)),
        *("feddg-benchmark", "feddg-benchmark-clients", "feddg-benchmark-epochs"),
        *("rates", "worlds", "worlds-mechanisms"),
    }
    counts = {
        "rates": 0,
        "worlds": 0,
        "worlds-mechanisms": 0,
        "feddg-benchmark": 0,  # its numbers are not on file
        "feddg-benchmark-clients": 0,
        "feddg-benchmark-epochs": 0,
        "pardon-1": 120,
        "pardon-2": 60,
        "pardon-3": 48,
        "pardon-5": 10,
        "fisc-6": 60,
        "fisc-7": 72,
        "fisc-8": 18,
        "fisc-10": 15,
        "fedccrl-1": 120,
        "fedccrl-2": 36,
        "ppdg-1": 24,
        "ppdg-2": 32,
        "ppdg-3": 32,
        "ppdg-4": 56,
        "ppdg-5": 80,
        "ppdg-6": 3,
        "ppdg-7": 10,
    }
    for name in named_tables():
        _, description = load_description(name)
        grid = build(name, description, [])
        printed = [e for line in grid.lines if line.kind == "published" for e in line.entries if e]
        assert len(printed) == counts[name], name
        ours = [e for line in grid.lines if line.kind == "ours" for e in line.entries if e]
        assert all(e.value is None for e in ours)
        assert description.select != "oracle"
        first = [e.fill for e in ours if e.fill]
        assert all(f.startswith("feddg-bench run --method ") for f in first), name
        assert first or name == "worlds", name  # its rows are the methods with runs


def pardon_on_sketch(folder: Path, **changed: Any) -> Grid:
    """Return PARDON's Table II with one run in the paper's setup, except for ``changed``."""
    layer = {"method": "pardon", "dataset": "pacs", "protocol": "lodo", "scenario": "acp-s"}
    frame = merge(
        in_frame("pardon", "pacs", "pardon"), *(nested(*pair) for pair in changed.items())
    )
    domains = (("art_painting", "cartoon", "photo"), None, "sketch")
    rounds = [entry(1, {"test": measured(0.9, "sketch")})]
    ResultsStore(folder).save(make_record(layer | frame, domains=domains, rounds=rounds))
    _, description = load_description("pardon-2")
    return build("pardon-2", description, read_runs(folder))


def test_published_numbers_stand_beside_ours_in_the_papers_frame(tmp_path: Path) -> None:
    grid = pardon_on_sketch(tmp_path)
    cell = cells(grid)["PARDON", "PACS test Sketch"]
    paper = float(cell["published"])
    assert (
        paper
        == published_number(  # type: ignore[union-attr]
            "pardon", "2", {"method": "pardon", "dataset": "pacs", "domain": "sketch"}
        ).value
    )
    assert float(cell["value"]) == pytest.approx(90)
    assert float(cell["difference"]) == pytest.approx(90 - paper)
    average = cells(build(*load_description("pardon-2"), []))["FedDG-GA", "Office-Home test AVG"]
    assert average["published"] == "54.34"
    assert "not the mean of its published columns, 54.43" in average["footnotes"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("backbone.name", "mobilenet_v2", "backbone=mobilenet_v2 for resnet50"),
        ("data.image_size", 128, "image_size=128 for 224"),
        ("federation.rounds", 30, "rounds=30 for 50"),
        ("federation.per_round", 10, "K=10 for 20"),
        ("train.lr", 2e-4, "lr=0.0002 for 3e-05"),
    ],
)
def test_nothing_is_subtracted_across_frames(
    tmp_path: Path, key: str, value: Any, said: str
) -> None:
    grid = pardon_on_sketch(tmp_path, **{key: value})
    assert {line.kind for line in grid.lines} == {"ours", "published"}
    ours = cells(grid)["PARDON", "PACS test Sketch"]
    assert (ours["value"], ours["published"], ours["difference"]) == ("90", "66.76", "")
    assert "(not the paper's setup)" in grid.caption
    (note,) = [note for note in grid.notes if "in the setup of" in note]
    assert said in note
    (command,) = [c for row, c in grid.fills if row == "PARDON" and "--dataset pacs" in c]
    assert "--recipe pardon" in command
    assert str(value) not in command.split()
    assert key not in command


def test_published_averages_that_are_not_means() -> None:
    wrong = [number for number in published_numbers() if number.wrong_mean is not None]
    told = [
        f"{number.source}: {', '.join(filter(None, map(number.row.get, keys)))}: "
        f"{number.value}, not {number.wrong_mean:.2f}"
        for keys in [("dataset", "split", "method", "setting")]
        for number in wrong
    ]
    assert told == [
        "pardon, table 2: officehome, test, feddg_ga: 54.34, not 54.43",
        "pardon, table 3: iwildcam, test, fedgma, lambda=AVG: 44.87, not 44.78",
        "fisc, table 2: officehome, test, feddg_ga: 54.34, not 54.43",
        "fisc, table 6: pacs, test, feddg_ga, lambda=AVG: 54.48, not 57.48",
        "fisc, table 6: pacs, val, fpl, lambda=AVG: 95.96, not 95.70",
        "fisc, table 7: pacs, val, feddg_ga, K/N=AVG: 68.22, not 67.79",
        "fisc, table 7: pacs, test, feddg_ga, K/N=AVG: 83.67, not 84.07",
        "fisc, table 7: pacs, test, fisc, K/N=AVG: 90.14, not 90.20",
        "ppdg, table 1: camelyon17, average, pcgrad: 77.5, not 77.95",
    ]


def test_a_published_number_must_be_one() -> None:
    with refused(SettingsError, "numbers of pardon, table 1 fit"):
        published_number("pardon", "1", {"method": "pardon"})
    with refused(SettingsError, "no column 'colour'"):
        published_number("pardon", "1", {"colour": "red"})
    assert published_number("pardon", "1", {"method": "moon"}) is None


# ------------------------------------------------------------------------------- writers


def test_latex_is_balanced_and_escaped(add: Add, tmp_path: Path) -> None:
    for scenario in PAIR:
        add("feddg_ga", scenario, 0)
    text = latex(generic(tmp_path))
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert body.count("{") - body.count(r"\{") == body.count("}") - body.count(r"\}")
    assert "FedDG-GA" in body
    assert re.search(r"(?<!\\)[_#]", body) is None
    for begin in re.findall(r"\\begin\{(\w+)\}", body):
        assert rf"\end{{{begin}}}" in body
    for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule"):
        assert rule in body
    blocks = body.split(r"\begin{tabular}")[1:]
    assert blocks
    for block in blocks:
        columns = re.match(r"\{@\{\}(l+r+)@\{\}\}", block)
        assert columns is not None
        after = block[block.index(r"\midrule") :]
        rows = [line for line in after.splitlines() if line.endswith(r"\\")]
        assert {row.count(" & ") for row in rows} == {len(columns[1]) - 1}
    assert r"\input{one.tex}" in latex_document(["one"])


def test_a_name_in_a_record_writes_no_line_of_latex(add: Add, tmp_path: Path) -> None:
    for scenario in PAIR:
        add("x\n\\immediate\\write18{id}%", scenario, 0)
    for line in latex(generic(tmp_path)).splitlines():
        assert not line.startswith(r"\immediate")


def test_latex_has_minus_signs_not_hyphens(add: Add, tmp_path: Path) -> None:
    for scenario in SCENARIOS:
        add("fedavg", scenario, test=(0.75,))
        add("feddg-ga", scenario, test=(0.5,))
    text = latex(generic(tmp_path))
    assert "$-$25.00 [$-$25.00, $-$25.00]" in text
    assert "\nFedDG-GA & " in text


def test_markdown_has_as_many_cells_in_every_line(add: Add, tmp_path: Path) -> None:
    record = add("fedavg", test=(0.5,))
    grid = generic(tmp_path)
    rows = [line for line in markdown(grid).splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert f"0:{record.key}" in notes_text(grid)


def test_runs_of_a_row_are_all_told(add: Add, tmp_path: Path) -> None:
    keys = {add("fedavg", s, seed).key for s in PAIR for seed in (0, 1)}
    grid = generic(tmp_path)
    told = {key.split(":")[1] for part in grid.runs["FedAvg"].values() for key in part}
    assert told == keys
    runs: list[RecordedRun] = read_runs(tmp_path)
    assert {run.key for run in runs} == keys
