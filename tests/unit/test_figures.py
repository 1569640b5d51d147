"""Figures: plotted numbers, bytes of the files, Grad-CAM and loss landscapes."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor
from torch import nn

from feddg_bench.analysis.figures import landscape
from feddg_bench.analysis.figures import series as series_module
from feddg_bench.analysis.figures.curves import Axis, draw_curves
from feddg_bench.analysis.figures.drawing import (
    COLOURS,
    Picture,
    layout,
    new_figure,
    save,
    spread_ticks,
    styled,
)
from feddg_bench.analysis.figures.embedding import embed
from feddg_bench.analysis.figures.image_grids import explain, grad_cam
from feddg_bench.analysis.figures.overhead import overhead
from feddg_bench.analysis.figures.partition_map import heat_maps
from feddg_bench.analysis.figures.rankings import critical_difference, profiles, ranks
from feddg_bench.analysis.figures.scores import convergence, generalisation, leaderboard, swept
from feddg_bench.analysis.figures.series import Selection, series
from feddg_bench.analysis.figures.training import wanted_rounds
from feddg_bench.analysis.sheets import csv_lines
from feddg_bench.analysis.tables.build import build
from feddg_bench.analysis.tables.generic import Frame, frames
from feddg_bench.common.errors import DataError, SettingsError
from feddg_bench.common.files import file_name
from feddg_bench.engine.executors import SerialExecutor
from feddg_bench.engine.worker import Worker
from feddg_bench.records.frame import read_frame, run_frame
from feddg_bench.records.record import RunRecord
from feddg_bench.records.runs import read_runs
from feddg_bench.records.store import ResultsStore
from feddg_bench.testing import start_toy_run
from tests.helpers import SCENARIOS, entry, make_record, measured, refused

Add = Callable[..., RunRecord]
PAIR = ("oc-i-p", "ic-p-o")
EVERYTHING = Selection(split="test")


@pytest.fixture
def add(tmp_path: Path) -> Add:
    """Return a function that saves a record with test accuracies of rounds 10, 20, ..."""

    def make(
        method: str = "fedavg",
        test: tuple[float, ...] = (0.5,),
        seed: int = 0,
        scenario: str = "oc-i-p",
        *,
        seconds: dict[str, float] | None = None,
        once: float = 0.0,
        workers: int = 1,
        id_test: tuple[float, ...] = (),
        **sections: dict[str, Any],
    ) -> RunRecord:
        train, held, target = SCENARIOS[scenario]

        def measure(number: int) -> dict[str, Any] | None:
            if number % 10:
                return None
            value = test[number // 10 - 1]
            found = {"val": measured(value / 2, held), "test": measured(value, target)}
            if id_test:
                found["id_test"] = measured(id_test[number // 10 - 1], *train)
            return found

        record = make_record(
            {"method": method, "scenario": scenario, "seed": seed, **sections},
            recipe="mine",
            once={"seconds": {"training": once}},
            rounds=[
                entry(
                    number,
                    measure(number),
                    train={},
                    bytes={"up": 1, "down": 1},
                    seconds=seconds or {"training": 1.0},
                )
                for number in range(1, 10 * len(test) + 1)
            ],
            environment={"device": "cpu", "workers": workers, "threads": 1},
        )
        ResultsStore(tmp_path).save(record)
        return record

    return make


def only_frame(results: Path) -> Frame:
    (frame,) = frames(read_frame(results))
    return frame


def numbers(picture: Picture | str | None) -> list[dict[str, str]]:
    assert isinstance(picture, Picture)
    assert picture.numbers is not None
    rows = picture.numbers.itertuples(index=False, name=None)
    return list(csv.DictReader(io.StringIO(csv_lines([*picture.numbers], rows))))


@pytest.fixture
def drawing() -> Any:
    with styled():
        yield


# ------------------------------------------------------------------- figures of records


@pytest.mark.usefixtures("drawing")
def test_convergence_averages_scenarios_and_then_seeds(add: Add, tmp_path: Path) -> None:
    add(test=(0.2, 0.6), seed=0, scenario="oc-i-p")
    add(test=(0.4, 0.8), seed=0, scenario="ic-p-o")
    add(test=(0.3, 0.9), seed=1, scenario="oc-i-p")
    add(test=(0.7, 0.9), seed=1, scenario="ic-p-o")
    found = numbers(convergence(only_frame(tmp_path), EVERYTHING))
    assert [(row["series"], row["round"], row["seeds"]) for row in found] == [
        ("FedAvg", "10", "0 1"),
        ("FedAvg", "20", "0 1"),
    ]
    # means by seed: 30 and 50 after round 10, 70 and 90 after round 20
    assert [float(row["mean"]) for row in found] == pytest.approx([40, 80])
    assert [float(row["std"]) for row in found] == pytest.approx([np.sqrt(200)] * 2, abs=1e-6)
    halves = numbers(convergence(only_frame(tmp_path), Selection(split="val")))
    assert [float(row["mean"]) for row in halves] == pytest.approx([20, 40])
    assert convergence(only_frame(tmp_path), Selection(split="id_test")) is None


@pytest.mark.usefixtures("drawing")
@pytest.mark.parametrize("rule", ["last", "best_by_val"])
@pytest.mark.parametrize("draw", [leaderboard, convergence])
def test_figures_show_the_unseen_domains_that_tables_show(
    add: Add, tmp_path: Path, draw: Any, rule: Any
) -> None:
    for seed, scenario in product((0, 1), PAIR):
        add(test=(0.2, 0.4 + seed / 10), seed=seed, scenario=scenario)
    frame = only_frame(tmp_path)
    grid = build("x", frame.described(rule), frame.runs)
    place = [column.kind for column in grid.columns].index("mean")
    found = draw(frame, Selection(rule=rule))
    assert float(numbers(found)[-1]["mean"]) == pytest.approx(grid.lines[0].entries[place].value)
    said = "unseen" if rule == "last" else "test"
    assert grid.columns[place].group == said
    assert said in found.figure.get_suptitle()
    assert said in " ".join(axes.get_xlabel() + axes.get_ylabel() for axes in found.figure.axes)


@pytest.mark.usefixtures("drawing")
def test_a_seed_that_lacks_a_scenario_does_not_count(add: Add, tmp_path: Path) -> None:
    add(test=(0.2,), seed=0, scenario="oc-i-p")
    add(test=(0.4,), seed=0, scenario="ic-p-o")
    add(test=(1.0,), seed=1, scenario="oc-i-p")
    (row,) = numbers(convergence(only_frame(tmp_path), EVERYTHING))
    assert (float(row["mean"]), row["std"], row["seeds"]) == (pytest.approx(30), "", "0")


@pytest.mark.usefixtures("drawing")
def test_a_method_that_lacks_scenarios_is_left_out_by_name(add: Add, tmp_path: Path) -> None:
    for method in ("fedavg", "moon"):
        for scenario in PAIR:
            add(method, scenario=scenario)
    add("fedprox", test=(0.9,), scenario="ic-p-o")
    picture = convergence(only_frame(tmp_path), EVERYTHING)
    assert {row["series"] for row in numbers(picture)} == {"FedAvg", "MOON"}
    assert picture is not None
    assert picture.notes == ("left out (no run of oc-i-p): FedProx",)


@pytest.mark.usefixtures("drawing")
def test_generalisation_sets_the_test_domain_against_the_training_domains(
    add: Add, tmp_path: Path
) -> None:
    for seed in (0, 1):
        add(test=(0.2, 0.4 + 0.2 * seed), id_test=(0.5, 0.8), seed=seed, scenario="oc-i-p")
        add(test=(0.4, 0.6), id_test=(0.7, 0.9 - 0.2 * seed), seed=seed, scenario="ic-p-o")
        add(test=(0.3, 0.55), id_test=(0.6, 0.8), seed=seed, scenario="ip-o-c")
    add("moon", test=(0.5, 0.5), id_test=(0.6, 0.6), scenario="oc-i-p")
    picture = generalisation(only_frame(tmp_path), EVERYTHING)
    found = numbers(picture)
    assert [(row["series"], row["round"], row["seeds"]) for row in found] == [
        ("FedAvg", "10", "0 1"),
        ("FedAvg", "20", "0 1"),
    ]
    assert [float(row["id_test"]) for row in found] == pytest.approx([60, 80])
    assert [float(row["test"]) for row in found] == pytest.approx([30, 55])
    assert picture is not None
    assert picture.notes == ("left out (no run of ic-p-o, ip-o-c): MOON",)
    (axes,) = picture.figure.axes
    line = next(line for line in axes.get_lines() if len(line.get_xdata()) == 2)
    odds = np.exp(np.asarray(line.get_xdata(), float))
    assert odds == pytest.approx([60 / 40, 80 / 20])
    for ticks in (axes.xaxis, axes.yaxis):
        shown = [int(label.get_text()) for label in ticks.get_ticklabels()]
        assert sorted(shown) == shown
        assert [100 / (1 + np.exp(-x)) for x in ticks.get_ticklocs()] == pytest.approx(shown)


@pytest.mark.usefixtures("drawing")
def test_generalisation_takes_both_splits(add: Add, tmp_path: Path) -> None:
    add(test=(0.2, 0.6))
    assert generalisation(only_frame(tmp_path), EVERYTHING) is None


@pytest.mark.usefixtures("drawing")
def test_generalisation_marks_where_each_of_many_methods_ends(add: Add, tmp_path: Path) -> None:
    methods = ("fedavg", "moon", "fedprox", "pardon", "ccst", "fpl", "fedsr")
    for number, method in enumerate(methods):
        add(method, test=(0.2, 0.3 + number / 20), id_test=(0.5, 0.6))
    picture = generalisation(only_frame(tmp_path), EVERYTHING)
    assert picture is not None
    panels = [axes for axes in picture.figure.axes if axes.axison]
    assert panels[0].get_title(loc="left") == "FedSR  60.0"
    for axes in panels:
        marked = [line for line in axes.get_lines() if line.get_marker() == "D"]
        assert [line.get_markevery() for line in marked] == [[-1]]


@pytest.mark.usefixtures("drawing")
@pytest.mark.parametrize("draw", [convergence, generalisation])
def test_a_panel_shows_fedavg_over_the_seeds_of_its_method(
    draw: Callable[[Frame, Selection], Picture | None], add: Add, tmp_path: Path
) -> None:
    for seed in (0, 1, 2):
        add(test=(0.2 + seed / 5, 0.3 + seed / 5), id_test=(0.5, 0.6), seed=seed)
    for method in ("moon", "fedprox", "pardon", "ccst", "fpl"):
        for seed in (0, 1):
            add(method, test=(0.2, 0.4), id_test=(0.5, 0.6), seed=seed)
    add("fedsr", test=(0.2, 0.4), id_test=(0.5, 0.6), seed=7)
    picture = draw(only_frame(tmp_path), EVERYTHING)
    assert picture is not None
    seen = {}
    for axes in picture.figure.axes:
        dashed = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
        if axes.axison:
            ends = [float(np.asarray(line.get_ydata())[-1]) for line in dashed]
            seen[axes.get_title(loc="left").split()[0]] = ends
    odds = draw is generalisation
    expected = pytest.approx(np.log(40 / 60) if odds else 40)  # the mean of 30 and 50
    assert seen.pop("FedAvg") == []
    assert seen.pop("FedSR") == []  # they share no seed
    assert list(seen.values()) == [[expected]] * 5
    key = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert "FedAvg over the method's seeds" in key


@pytest.mark.usefixtures("drawing")
def test_a_seed_that_lacks_a_scenario_does_not_count_in_a_panel_either(
    add: Add, tmp_path: Path
) -> None:
    for scenario in PAIR:
        for seed in (0, 1):
            add(test=(0.2, 0.3 + seed / 5), seed=seed, scenario=scenario)
        for method in ("moon", "fedprox", "pardon", "ccst", "fpl", "fedsr"):
            add(method, test=(0.2, 0.4), scenario=scenario)
    add("moon", test=(0.2, 0.4), seed=1, scenario=PAIR[0])
    picture = convergence(only_frame(tmp_path), EVERYTHING)
    assert picture is not None
    lines = [line for axes in picture.figure.axes for line in axes.get_lines()]
    dashed = [line for line in lines if line.get_linestyle() == "--"]
    assert len(dashed) == 6
    for line in dashed:
        assert np.asarray(line.get_ydata()) == pytest.approx([20, 30])


def test_settings_tell_series_of_one_method_apart(add: Add, tmp_path: Path) -> None:
    add("fedprox", hyper={"mu": 0.1})
    add("fedprox", hyper={"mu": 1.0})
    assert [label for label, _ in series(only_frame(tmp_path).runs)] == [
        "FedProx (mu=0.1)",
        "FedProx (mu=1)",
    ]


@pytest.mark.usefixtures("drawing")
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.5, 1.0)])
def test_two_values_of_lambda_are_not_joined_by_a_line(
    add: Add, tmp_path: Path, values: tuple[float, ...], many: bool
) -> None:
    for method in ("fedavg", "moon", "fpl", "ccst", "pardon", "fedprox", "fedsr")[
        : 7 if many else 2
    ]:
        for value in values:
            add(method, test=(0.5 + value / 10,), partition={"heterogeneity": value})
    (picture,) = swept(read_frame(tmp_path), "lambda", EVERYTHING)
    axes = picture.figure.axes[0]
    curves = [line for line in axes.get_lines() if len(line.get_xdata()) == len(values)]
    curves = [line for line in curves if line.get_clip_on()]
    styles = {line.get_linestyle() for line in curves}
    assert len(curves) >= 2
    assert (styles == {"None"}) == (len(values) == 2)
    label = picture.figure.get_supylabel() if many else axes.get_ylabel()
    assert label == "test accuracy (%), truncated axis"


def test_curves_against_lambda_keep_other_settings_apart(add: Add, tmp_path: Path) -> None:
    for value, accuracy in ((0.0, 0.2), (0.5, 0.4), (1.0, 0.6)):
        add(test=(accuracy,), partition={"heterogeneity": value})
        add(test=(accuracy / 2,), partition={"heterogeneity": value, "clients": 50})
    add("moon", partition={"heterogeneity": 0.5})  # one point is no curve
    add("erm", test=(0.9,), partition={"kind": "pooled"}, federation={"per_round": None})
    pictures = swept(read_frame(tmp_path), "lambda", EVERYTHING)
    assert len(pictures) == 2
    small, large = sorted(pictures, key=lambda p: float(numbers(p)[-1]["mean"]))
    of_fedavg = [row for row in numbers(large) if row["series"] == "FedAvg"]
    assert [(row["lambda"], float(row["mean"])) for row in of_fedavg] == [
        ("0", pytest.approx(20)),
        ("0.5", pytest.approx(40)),
        ("1", pytest.approx(60)),
    ]
    assert [(r["lambda"], float(r["mean"])) for r in numbers(large) if r["series"] == "ERM"] == [
        ("all", pytest.approx(90))
    ]
    assert large.notes == ("left out (1 point on this axis): MOON",)
    assert float(numbers(small)[-1]["mean"]) == pytest.approx(30)
    apart = [
        run
        for run in read_runs(tmp_path)
        if (run.method, run.get("partition.heterogeneity")) in (("fedavg", 0.0), ("moon", 0.5))
        or run.method == "erm"
    ]
    assert len(apart) == 4
    assert swept(run_frame(apart), "lambda", EVERYTHING) == []


@pytest.mark.usefixtures("drawing")
def test_curves_against_clients_are_ordered_by_their_number(add: Add, tmp_path: Path) -> None:
    for n, k, accuracy in ((100, 5, 0.2), (5, None, 0.4), (20, 5, 0.6), (20, 10, 0.8)):
        add(test=(accuracy,), partition={"clients": n}, federation={"per_round": k})
    one, other = swept(read_frame(tmp_path), "clients", EVERYTHING)
    assert (one.name[-9:], other.name[-10:]) == ("-k-5-test", "-n-20-test")
    assert [(r["clients"], float(r["mean"])) for r in numbers(one)] == [
        ("5/5", pytest.approx(40)),
        ("5/20", pytest.approx(60)),
        ("5/100", pytest.approx(20)),
    ]
    assert [(r["clients"], float(r["mean"])) for r in numbers(other)] == [
        ("5/20", pytest.approx(60)),
        ("10/20", pytest.approx(80)),
    ]


@pytest.mark.usefixtures("drawing")
def test_a_curve_against_a_setting_is_of_the_same_scenarios_and_seeds_all_along(
    add: Add, tmp_path: Path
) -> None:
    for scenario in ("ic-p-o", "oc-i-p"):  # more runs at the default value
        for seed, accuracy in ((0, 0.5), (1, 0.9)):
            add(scenario=scenario, seed=seed, test=(accuracy,))
    for value, accuracy in ((0.0, 0.2), (1.0, 0.6)):
        add(scenario="ic-p-o", seed=0, test=(accuracy,), partition={"heterogeneity": value})
    for seed, accuracy in ((0, 0.7), (1, 0.1)):
        pooled = {"partition": {"kind": "pooled"}, "federation": {"per_round": None}}
        add("erm", scenario="ic-p-o", seed=seed, test=(accuracy,), **pooled)
    (picture,) = swept(read_frame(tmp_path), "lambda", EVERYTHING)
    assert [(r["series"], r["lambda"], float(r["mean"])) for r in numbers(picture)] == [
        ("ERM", "all", pytest.approx(70)),
        ("FedAvg", "0", pytest.approx(20)),
        ("FedAvg", "0.1", pytest.approx(50)),
        ("FedAvg", "1", pytest.approx(60)),
    ]


@pytest.mark.usefixtures("drawing")
def test_leaderboard_is_by_mean_under_a_rule(add: Add, tmp_path: Path) -> None:
    add("fedavg", test=(0.9, 0.2), scenario="oc-i-p")
    add("fedavg", test=(0.7, 0.4), scenario="ic-p-o")
    add("moon", test=(0.5, 0.5), scenario="oc-i-p")
    add("moon", test=(0.5, 0.6), scenario="ic-p-o")
    last = numbers(leaderboard(only_frame(tmp_path), EVERYTHING))
    assert [(row["series"], float(row["mean"])) for row in last] == [
        ("MOON", pytest.approx(55)),
        ("FedAvg", pytest.approx(30)),
    ]
    assert float(last[1]["ic-p-o"]) == pytest.approx(40)
    best = numbers(leaderboard(only_frame(tmp_path), Selection(rule="best_by_val")))
    assert [(row["series"], float(row["mean"])) for row in best] == [
        ("FedAvg", pytest.approx(80)),
        ("MOON", pytest.approx(55)),
    ]


@pytest.mark.usefixtures("drawing")
def test_profiles_are_shares_of_runs_weighted_by_scenario(add: Add, tmp_path: Path) -> None:
    for scenario, values in (("oc-i-p", (0.2, 0.6)), ("ic-p-o", (0.4,))):
        for seed, value in enumerate(values):
            add(test=(value,), seed=seed, scenario=scenario)
    (frame,) = frames(read_frame(tmp_path))
    found = numbers(profiles(frame, EVERYTHING))
    shares = [(float(row["threshold"]), float(row["share"])) for row in found]
    assert shares[0] == (pytest.approx(20), 100)
    assert shares[-1] == (pytest.approx(60), 25)
    at = {round(threshold, 1): share for threshold, share in shares}
    assert (at[20.4], at[39.6], at[40.4], at[59.6]) == (75, 75, 25, 25)
    assert all(float(row["low"]) <= float(row["share"]) <= float(row["high"]) for row in found)
    add("moon", partition={"heterogeneity": 0.5})
    assert "a profile needs 3 runs" in str(profiles(frames(read_frame(tmp_path))[1], EVERYTHING))


@pytest.mark.usefixtures("drawing")
def test_ranks_are_over_data_sets_and_said_to_be_few(add: Add, tmp_path: Path) -> None:
    accuracy = {"fedavg": 0.5, "moon": 0.7, "pardon": 0.6}
    for method, value in accuracy.items():
        add(method, test=(value,))
    runs = read_runs(tmp_path)
    assert "needs two methods on at least two data sets" in str(ranks(run_frame(runs), EVERYTHING))
    others = [
        replace(run, dataset=name, key=f"{run.key}{name}")
        for run in runs
        for name in ("pacs", "rmnist")
    ]
    add("ccst", test=(0.9,))
    picture = ranks(run_frame([*read_runs(tmp_path), *others]), EVERYTHING)
    assert isinstance(picture, Picture)
    rows = numbers(picture)
    assert [(row["series"], row["average rank"]) for row in rows] == [
        ("MOON", "1.0"),
        ("PARDON", "2.0"),
        ("FedAvg", "3.0"),
    ]
    assert picture.notes == tuple(  # none for a method on one data set only
        f"Spearman's correlation of 3 methods, {pair}: +1.00"
        for pair in ("Digits4 and PACS", "Digits4 and RotatedMNIST", "PACS and RotatedMNIST")
    )
    said = picture.figure.legends[0].get_title().get_text()
    assert "3 data sets are few" in said
    assert "p = 0.05" in said  # Friedman's statistic is 6 with two degrees of freedom
    more = [
        replace(run, dataset="digits4", protocol="lodo", key=f"{run.key}{seed}", seed=seed)
        for run in runs
        for seed in (0, 1, 2)
    ]
    picture = ranks(run_frame([*read_runs(tmp_path), *others, *more]), EVERYTHING)
    assert isinstance(picture, Picture)
    said = picture.figure.legends[0].get_title().get_text()
    assert "(Digits4, PACS, RotatedMNIST)" in said.replace("\n", " ")
    for seed in range(5):  # more runs in another setup, but of fewer methods
        for method in ("fedavg", "moon"):
            add(method, test=(0.1,), seed=seed, partition={"heterogeneity": 0.5})
    again = ranks(run_frame([*read_runs(tmp_path), *others]), EVERYTHING)
    assert isinstance(again, Picture)
    assert [(row["series"], row["Digits4"]) for row in numbers(again)] == [
        ("MOON", "70.0"),
        ("PARDON", "60.0"),
        ("FedAvg", "50.0"),
    ]


@pytest.mark.parametrize(
    ("methods", "q"),
    list(enumerate((1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164), 2)),
)
def test_critical_difference_is_that_of_demsar(methods: int, q: float) -> None:
    """Table 5(a) of Demsar's paper: critical values of the Nemenyi test at 0.05."""
    expected = q * np.sqrt(methods * (methods + 1) / (6 * 14))
    assert critical_difference(methods, 14) == pytest.approx(expected, abs=1.1e-3)


@pytest.mark.usefixtures("drawing")
def test_overhead_of_two_runs(add: Add, tmp_path: Path) -> None:
    add(seconds={"training": 2.0, "aggregation": 0.5}, once=1.0)
    add(seconds={"training": 4.0, "evaluation": 1.0}, once=3.0, seed=1, workers=2)
    picture = overhead(only_frame(tmp_path), EVERYTHING)
    (row,) = numbers(picture)
    del row["series"]
    assert {k: float(v) for k, v in row.items()} == pytest.approx(
        {
            "training": 3.0,
            "aggregation": 0.25,
            "communication": 0.0,
            "evaluation": 0.5,
            "before round 1": 2.0,
            "runs": 2,
        }
    )
    assert picture.notes == ("the runs were measured in 2 ways, which cannot be compared",)


@pytest.mark.usefixtures("drawing")
def test_protection_is_part_of_the_overhead(add: Add, tmp_path: Path) -> None:
    add(seconds={"training": 2.0, "protection": 1.0})
    (row,) = numbers(overhead(only_frame(tmp_path), EVERYTHING))
    assert float(row["protection"]) == 1.0


@pytest.mark.usefixtures("drawing")
@pytest.mark.parametrize(("once", "panels"), [(1e-5, 1), (1.0, 2)])
def test_preparing_has_a_panel_where_a_method_prepares(
    add: Add, tmp_path: Path, once: float, panels: int
) -> None:
    add(seconds={"training": 2.0}, once=once)
    add("pardon", seconds={"training": 2.0})
    assert len(overhead(only_frame(tmp_path), EVERYTHING).figure.axes) == panels


@pytest.mark.parametrize("letters", [5, 17, 60])
def test_a_key_stays_within_its_figure(letters: int) -> None:
    with styled():
        figure = new_figure(5.6, 3.0)
        lines = [figure.subplots().plot([n])[0] for n in range(6)]
        layout(
            "a", figure, "a title", "what numbers are, " * 9, [(x, "0" * letters) for x in lines]
        )
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y0 >= 0


@pytest.mark.usefixtures("drawing")
def test_a_machine_that_was_busy_once_hardly_moves_the_overhead(add: Add, tmp_path: Path) -> None:
    for seed, seconds in enumerate((2.0, 2.2, 90.0)):
        add(seconds={"training": seconds}, seed=seed)
    (row,) = numbers(overhead(only_frame(tmp_path), EVERYTHING))
    assert float(row["training"]) == pytest.approx(2.2)


def test_what_is_drawn_is_what_the_file_says(add: Add, tmp_path: Path) -> None:
    add(test=(0.2, 0.6))
    with styled():
        picture = convergence(only_frame(tmp_path), EVERYTHING)
        assert picture is not None
        (line,) = [line for line in picture.figure.axes[0].get_lines() if line.get_clip_on()]
        assert np.asarray(line.get_xdata()).tolist() == [10, 20]
        assert np.asarray(line.get_ydata()) == pytest.approx([20, 60])


def test_many_methods_get_a_panel_each_and_few_share_one() -> None:
    def points(count: int) -> pd.DataFrame:
        rows = [(f"m{n}", x, n * x, np.nan, np.nan) for n in range(count) for x in (1.0, 2.0)]
        return pd.DataFrame(rows, columns=["series", "x", "mean", "low", "high"])

    axis = Axis("round", "after round 2")
    with styled():
        few, _, _ = draw_curves(points(6), axis, "y", "said")
        assert len(few.axes) == 1
        lines = [line for line in few.axes[0].get_lines() if line.get_clip_on()]
        assert len({line.get_marker() for line in lines}) == 6  # distinguishable without colour
        assert [text.get_text() for text in few.axes[0].texts] == [f"m{n}" for n in range(6)]
        many, _, named = draw_curves(points(7), axis, "y", "said")
        titles = [axes.get_title(loc="left") for axes in many.axes if axes.axison]
        assert titles == [f"m{n}  {2 * n:.1f}" for n in range(6, -1, -1)]
        assert "after round 2" in next(text for _, text in named)
        cut = points(7).iloc[:-1]  # the last curve ends before round 2
        titles = [
            axes.get_title(loc="left")
            for axes in draw_curves(cut, axis, "y", "said")[0].axes
            if axes.axison
        ]
        assert [title for title in titles if "  " not in title] == ["m6"]


@pytest.mark.usefixtures("drawing")
def test_long_curves_have_few_markers(add: Add, tmp_path: Path) -> None:
    add(test=tuple(n / 100 for n in range(60)))
    picture = convergence(only_frame(tmp_path), EVERYTHING)
    assert picture is not None
    (line,) = [line for line in picture.figure.axes[0].get_lines() if line.get_clip_on()]
    assert len(line.get_xdata()) == 60
    assert 60 / line.get_markevery() <= 12


@pytest.mark.usefixtures("drawing")
def test_convergence_begins_with_the_first_evaluated_round(add: Add, tmp_path: Path) -> None:
    add(test=(0.5,) * 3)  # after the rounds 10, 20 and 30
    picture = convergence(only_frame(tmp_path), EVERYTHING)
    assert picture is not None
    left, _ = picture.figure.axes[0].get_xlim()
    assert 9 <= left < 10


@pytest.mark.usefixtures("drawing")
def test_a_title_is_one_line_and_what_does_not_fit_is_in_the_caption(
    add: Add, tmp_path: Path
) -> None:
    add("feddg_ga")
    picture = leaderboard(only_frame(tmp_path), EVERYTHING)
    assert picture is not None
    title = "Digits4, leave two domains out, recipe mine"
    assert picture.figure.get_suptitle() == f"{title}: test domain"
    (axes,) = picture.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["FedDG-GA"]
    figure = new_figure(2.9, 2)  # space for 37 letters
    layout("a", figure, f"{title[:30]}: test domain", "three seeds")
    assert figure.get_suptitle() == title[:30]
    assert figure.legends[-1].get_title().get_text() == "test domain\nthree seeds"
    layout("a", figure, f"{title}: N=5", "")
    assert figure.get_suptitle() == "Digits4, leave two domains out, ..."
    assert figure.legends[-1].get_title().get_text().split() == f"{title} N=5".split()


def test_selection_refuses_unknown_names_and_says_what_would_make_records(
    add: Add, tmp_path: Path
) -> None:
    add()
    one = Selection((tmp_path,), ("digits4",), ("ltdo",), ("oc-i-p",), ("fedavg",))
    assert len(one.runs()) == 1
    assert len(replace(one, dataset=("digits4", "pacs"), protocol=("lodo", "ltdo")).runs()) == 1
    assert len(replace(one, recipe=("mine",)).runs()) == 1
    for wanted, near in (
        ({"method": ("fedavgg",)}, "did you mean 'fedavg'"),
        ({"dataset": ("digit4",)}, "did you mean 'digits4'"),
        ({"protocol": ("ltod",)}, "did you mean 'ltdo'"),
        ({"scenario": ("oc-i-q",)}, "did you mean 'oc-i-p'"),
        ({"recipe": ("mine", "mime")}, "did you mean 'mine'"),
        ({"split": "tset"}, "did you mean 'test'"),
    ):
        with pytest.raises(SettingsError, match=near):
            replace(Selection((tmp_path,)), **wanted).runs()  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match="feddg-bench run --dataset digits4 --protocol lodo --method moon"
    ):
        replace(one, protocol=("lodo",), scenario=None, method=("moon",)).runs()


# ------------------------------------------------------------------------------- files


def test_files_are_the_same_bytes_whatever_the_user_has_set(add: Add, tmp_path: Path) -> None:
    add(test=(0.2, 0.6))
    frame = only_frame(tmp_path)
    files = []
    for size in (7.0, 30.0):
        with mpl.rc_context({"font.size": size}), styled():
            picture = convergence(frame, EVERYTHING)
            assert picture is not None
            files.append(picture.save(tmp_path / str(size), ("png", "pdf")))
    assert [path.suffix for path in files[0]] == [".png", ".pdf", ".csv"]
    for one, other in zip(*files, strict=True):
        assert one.read_bytes() == other.read_bytes()
    png, pdf, _ = (path.read_bytes() for path in files[0])
    assert b"Date" not in pdf
    assert b"Matplotlib" not in png  # its version is left out
    with Image.open(files[0][0]) as image:
        assert image.info["Software"] == "feddg-bench"
        assert image.info["dpi"] == pytest.approx((150, 150), abs=0.1)
        assert "test domain" in image.text["Description"]  # type: ignore[attr-defined]
    assert [path.suffix for path in picture.save(tmp_path)] == [".png", ".csv"]


def test_six_methods_keep_their_colours_in_the_file(add: Add, tmp_path: Path) -> None:
    for number, method in enumerate(("fedavg", "fedprox", "ccst", "fedsr", "pardon", "moon")):
        add(method, test=(0.1 * number + 0.1, 0.1 * number + 0.3))
    with styled():
        picture = convergence(only_frame(tmp_path), EVERYTHING)
        assert picture is not None
        path = picture.save(tmp_path)[0]
    with Image.open(path) as image:
        drawn = np.unique(np.asarray(image.convert("RGB"), dtype=int).reshape(-1, 3), axis=0)
    for colour in ("#ffffff", *COLOURS):
        assert (drawn == ImageColor.getrgb(colour)).all(axis=1).any(), colour


def test_no_cell_of_a_file_starts_a_formula() -> None:
    names = ("=1+1", "+a", "-b", "@c", "-0.5", "a=b", "\t=1")
    text = csv_lines(("name", "-value"), [(name, -1.25) for name in names])
    found = list(csv.reader(io.StringIO(text)))
    assert found[0] == ["name", "'-value"]
    assert [row[0] for row in found[1:]] == ["'=1+1", "'+a", "'-b", "'@c", "-0.5", "a=b", "'\t=1"]
    assert {row[1] for row in found[1:]} == {"-1.25"}


@given(st.lists(st.floats(0, 100), max_size=8), st.floats(0.1, 10))
def test_labels_are_moved_apart_in_their_order_and_around_their_mean(
    values: list[float], gap: float
) -> None:
    placed = spread_ticks(values, gap)
    order = sorted(range(len(values)), key=lambda n: (values[n], n))
    assert all(placed[b] - placed[a] >= gap - 1e-9 for a, b in pairwise(order))
    if values:
        assert sum(placed) == pytest.approx(sum(values), abs=1e-6)


# ---------------------------------------------------------------------------- partition


@pytest.mark.usefixtures("drawing")
def test_heat_maps_share_one_scale_and_tell_how_pure_clients_are() -> None:
    pure, mixed = np.array([[4, 0], [0, 8]]), np.array([[2, 2], [4, 4]])
    picture = heat_maps("p", "title", ["ink", "chalk"], {"a": pure, "b": mixed}, "domain")
    panels = [axes for axes in picture.figure.axes if axes.collections and axes.get_title("left")]
    assert [axes.get_title("left") for axes in panels] == [
        "a: 100 % of clients hold a single domain",
        "b: 0 % of clients hold a single domain",
    ]
    assert [axes.collections[0].get_clim() for axes in panels] == [(0, 8), (0, 8)]
    assert np.asarray(panels[0].collections[0].get_array()).tolist() == pure.tolist()
    assert [row["images"] for row in numbers(picture)] == ["4", "8", "2", "4", "2", "4"]


# -------------------------------------------------------------------- figures of models


class Tiny(nn.Module):
    """Convolution, mean over positions, linear: the map is known in closed form."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), *more, nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.classifier = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.backbone(images))


def scaled(heat: torch.Tensor) -> torch.Tensor:
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp_min(1e-30)


def test_grad_cam_of_mean_pooling_is_the_class_activation_map() -> None:
    model: Any = Tiny().eval()
    images = torch.rand(5, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    heat, classes = explain(model, images)
    maps = model.backbone[:2](images)
    assert torch.equal(classes, model(images).argmax(1))
    # d score / d A = w / 36 at every position, so that alpha is w / 36 (Zhou et al., 2016)
    expected = torch.einsum("bk,bkhw->bhw", model.classifier.weight[classes], maps).relu() / 36
    torch.testing.assert_close(heat, scaled(expected), atol=1e-5, rtol=1e-4)
    other, _ = explain(model, images, torch.full((5,), 2))
    expected = torch.einsum("k,bkhw->bhw", model.classifier.weight[2], maps).relu() / 36
    torch.testing.assert_close(other, scaled(expected), atol=1e-5, rtol=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_grad_cam_takes_the_last_map_that_says_where() -> None:
    small = nn.Conv2d(4, 4, 6, groups=4, bias=False)  # 6 x 6 to 1 x 1: no position left
    model: Any = Tiny(small).eval()
    images = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    heat, classes = explain(model, images)
    maps = model.backbone[:2](images)
    alpha = model.classifier.weight[classes] * small.weight.mean(dim=(1, 2, 3))
    expected = torch.einsum("bk,bkhw->bhw", alpha, maps).relu()
    torch.testing.assert_close(heat, scaled(expected), atol=1e-5, rtol=1e-4)


def test_grad_cam_by_hand() -> None:
    maps = torch.tensor([[[[1.0, 2.0]], [[3.0, 0.0]]]])
    gradients = torch.tensor([[[[1.0, 3.0]], [[-2.0, 0.0]]]])
    # alpha = 2, -1: 2 * 1 - 3 < 0 and 2 * 2 - 0 = 4
    assert grad_cam(maps, gradients).tolist() == [[[0.0, 4.0]]]


def models() -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    return [
        {
            "weight": torch.randn(3, 2, generator=rng),
            "running_var": torch.rand(3, generator=rng),
            "steps": torch.tensor(n),
        }
        for n in range(3)
    ]


def test_the_plane_goes_through_its_three_models() -> None:
    origin, one, other = models()
    for (x, y), model in (((0, 0), origin), ((1, 0), one), ((0, 1), other)):
        made = landscape.on_plane(origin, one, other, x, y, ("weight",))
        assert torch.equal(made["weight"], model["weight"])
        assert torch.equal(made["running_var"], model["running_var"])
        assert made["steps"] == origin["steps"]
    middle = landscape.on_plane(origin, one, other, 0.5, -1, ("weight",))
    expected = (
        origin["weight"]
        + 0.5 * (one["weight"] - origin["weight"])
        - (other["weight"] - origin["weight"])
    )
    torch.testing.assert_close(middle["weight"], expected)


@given(st.floats(-0.5, 1.5), st.floats(-0.5, 1.5))
def test_variances_stay_among_those_of_the_three_models(x: float, y: float) -> None:
    three = models()
    made = landscape.on_plane(*three, x, y, ("weight",))["running_var"]
    every = torch.stack([model["running_var"] for model in three])
    assert bool((made >= every.amin(0) - 1e-6).all())
    assert bool((made <= every.amax(0) + 1e-6).all())


def test_a_grid_of_losses_has_x_across_and_y_down() -> None:
    grid = landscape.grid_losses(
        lambda x, y: {"x": torch.tensor(x), "y": torch.tensor(y)},
        lambda model: (float(model["x"]), float(model["y"])),
        5,
    )
    ticks = [-0.5, 0, 0.5, 1, 1.5]
    assert grid[0].tolist() == [ticks] * 5
    assert grid[1].T.tolist() == [ticks] * 5


def test_cosine_between_updates() -> None:
    origin = {"a": torch.zeros(2), "b": torch.zeros(1)}
    one = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([9.0])}
    other = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([-9.0])}
    assert landscape.cosine(origin, one, other, ["a"]) == pytest.approx(np.sqrt(0.5))
    assert landscape.cosine(origin, origin, other, ["a"]) == 0


def styled_by(method: str, **hyper: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor | None]:
    """Return a method, the task of a trained client, images, and the restyled images or None."""
    executor = SerialExecutor()
    tasks: dict[str, Any] = {}
    executor.on_reply = lambda task, _: tasks.update(
        {task.client: task} if task.call == "fit" else {}
    )
    run = start_toy_run(method, {"hyper": hyper}, executor=executor)
    run.rounds(1)
    task = tasks[min(tasks)]
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    asked = replace(task, call="styled", told={**task.told, "images": images})
    made = [Worker(executor.worker.spec, run.method).run(asked, stays=True).value for _ in range(2)]
    assert (made[0] is None) or torch.equal(*made)
    return run.method, task, images, made[0]


def test_methods_show_the_styles_that_they_train_with() -> None:
    method, task, images, made = styled_by("pardon", style="pixel")
    style = task.broadcast["style"]
    assert made is not None
    assert torch.equal(made, method.style.transfer(images, style, method.settings.strength))
    method, task, images, made = styled_by("ccst", style="pixel")
    style = task.told["styles"][0]
    assert made is not None
    assert torch.equal(made, method.style.transfer(images, style, method.settings.strength))
    _, task, images, made = styled_by("fedccrl", difp=False)
    assert made is not None
    # each channel mean lies between the image's own mean and one of the pool
    own, new = images.mean(dim=(2, 3)), made.mean(dim=(2, 3))
    pool = task.told["pool"][:, 0]  # [J, 3]
    shares = (new[:, None] - pool) / (own[:, None] - pool)  # of the image's own mean, [3, J, 3]
    alike = (shares - shares.mean(dim=-1, keepdim=True)).abs().amax(dim=-1).amin(dim=-1)
    assert bool((alike < 1e-3).all())
    assert styled_by("fedavg")[3] is None
    assert styled_by("pardon", style="pixel", ablation="v4")[3] is None
    assert styled_by("fedccrl", ccdt=False, difp=False, ra=False, js=False)[3] is None


def test_an_embedding_repeats_and_keeps_clusters() -> None:
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(0, 1, (15, 8)), rng.normal(20, 1, (15, 8))])
    placed = embed(rows, seed=3)
    assert np.array_equal(placed, embed(rows, seed=3))
    gaps = np.linalg.norm(placed[:, None] - placed[None], axis=-1) + 1e9 * np.eye(30)
    assert (gaps.argmin(1) < 15).tolist() == [True] * 15 + [False] * 15


def test_rounds_to_look_at() -> None:
    assert wanted_rounds(None, 7) == [7]
    assert wanted_rounds("7, 0,3", 7) == [0, 3, 7]
    for text in ("8", "-1", "two", ""):
        with refused(SettingsError, "expected rounds from 0 to 7"):
            wanted_rounds(text, 7)


def test_names_that_had_to_change_stay_apart() -> None:
    def stem(*scenario: str) -> str:
        return Selection(scenario=scenario).suffix

    assert (stem("ip-o-c"), stem("ip-o-c", "oc-i-p")) == ("-ip-o-c", "-ip-o-c-oc-i-p")
    odd = ["写真-絵画-素描", "絵画-素描-写真", "a b-c", "a_b-c", "a-b_c", "a/b-c"]
    names = [stem(name) for name in odd]
    assert len(set(names)) == len(odd)
    assert all(re.fullmatch(r"[A-Za-z0-9_.+-]{1,90}", name) for name in names)
    assert len(stem(*(f"scenario{n}" for n in range(99)))) < 100
    spreads = {"0": np.ones((2, 2), dtype=np.int64)}
    with styled():
        assert heat_maps(file_name("ab-c"), "", ("a", "b"), spreads, "domain").name == "ab-c"


@pytest.mark.filterwarnings("error")
def test_characters_that_the_font_lacks_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw() -> Iterator[Picture]:
        for name in ("one", "two"):
            figure = new_figure(2, 2)
            yield layout(name, figure, "写真 and 絵画", "素描")

    save(draw, tmp_path, ("png", "pdf"))
    shown = capsys.readouterr()
    assert shown.err == ""
    (line,) = shown.out.splitlines()[2:]
    assert line.startswith("the figures' font, DejaVu Sans, lacks 写描画真素絵: ")


def test_other_warnings_of_a_figure_are_kept(tmp_path: Path) -> None:
    class Loud(Picture):
        def save(self, folder: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
            warnings.warn("something else", UserWarning, stacklevel=1)
            return super().save(folder, formats)

    with pytest.warns(UserWarning, match="something else"):
        save(lambda: [Loud("one", new_figure(1, 1))], tmp_path)


def test_records_are_chosen_in_either_unicode_form(
    add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add()
    runs = [replace(run, scenario="e\u0301c-i-p") for run in read_runs(tmp_path)]
    monkeypatch.setattr(series_module, "read_frame", lambda _: run_frame(runs))
    for name in ("\u00e9c-i-p", "e\u0301c-i-p"):
        (found,) = Selection((tmp_path,), scenario=(name,)).runs()["scenario"]
        assert found == "e\u0301c-i-p"
    with refused(SettingsError, "unknown scenario of these records"):
        Selection((tmp_path,), scenario=("ec-i-p",)).runs()
