"""The noise figure: the runs it compares, and the smallest differences that seeds can show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from feddg_bench.analysis.figures.drawing import Picture, styled
from feddg_bench.analysis.figures.rankings import noise
from feddg_bench.analysis.figures.series import Selection
from feddg_bench.records.frame import read_frame
from feddg_bench.records.runs import read_runs
from feddg_bench.records.statistics import deviation, smallest_difference
from tests.fabricate_records import ENVIRONMENT, record, save

ON_AVX2 = {**ENVIRONMENT, "cpu": "AuthenticAMD, avx2"}


def draw(*roots: Path) -> list[Picture | str]:
    with styled():
        return list(noise(read_frame(list(roots)), Selection(results=roots, split="test")))


def rows(picture: Picture | str, rule: str) -> list[tuple[Any, ...]]:
    assert isinstance(picture, Picture)
    assert picture.numbers is not None
    return [row for row in picture.numbers.itertuples(index=False, name=None) if row[0] == rule]


def test_seeds_of_the_fullest_scenario(tmp_path: Path) -> None:
    for seed in range(6):
        save(tmp_path, record(seed=seed, rounds=10), record("moon", seed=seed, rounds=10))
    save(tmp_path, record("moon", scenario="oc-i-p", seed=0, rounds=10))
    (picture,) = draw(tmp_path)
    assert isinstance(picture, Picture)
    assert picture.name == "noise-digits4-ltdo-quick-test"
    assert "FedAvg on ip-o-c" in picture.figure.get_suptitle()
    runs = {run.seed: run for run in read_runs(tmp_path) if run.method == "fedavg"}
    for rule in ("last", "mean_last_5"):
        expected = {
            seed: 100 * run.evaluation(rule)["test"]["chalk"]["accuracy"]  # type: ignore[arg-type, index]
            for seed, run in runs.items()
        }
        assert {row[1]: row[3] for row in rows(picture, rule)} == pytest.approx(expected)
        assert {row[2] for row in rows(picture, rule)} == {"first"}
    assert rows(picture, "mean_last_5") != rows(picture, "last")


def test_runs_that_differ_in_last_bits_are_twins(tmp_path: Path) -> None:
    """They differ by a setting in one folder, or by the CPU in a second folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    for seed in range(5):
        one = record(seed=seed)
        save(here, one, record(seed=seed, settings={"portable": True}))
        save(there, one.model_copy(update={"environment": type(one.environment)(**ON_AVX2)}))
    (picture,) = draw(here)
    for seed in range(5):
        found = [r for r in read_runs(here) if r.seed == seed]
        plain, portable = sorted(found, key=lambda run: bool(run.get("portable")))
        values = [r.evaluation("last")["test"]["chalk"]["accuracy"] for r in (plain, portable)]  # type: ignore[index]
        mine = [row[3] for row in rows(picture, "last") if row[1] == seed]
        assert mine == pytest.approx([100 * value for value in values])
    (both,) = draw(here, there)
    assert len(rows(both, "last")) == 5 * 3
    assert len(rows(draw(here, here)[0], "last")) == 5 * 2  # a copy is no twin


def test_too_few_seeds_say_so(tmp_path: Path) -> None:
    for seed in range(4):
        save(tmp_path, record(seed=seed))
    (said,) = draw(tmp_path)
    assert isinstance(said, str)
    assert "5 seeds" in said


def test_the_same_records_the_same_bytes(tmp_path: Path) -> None:
    for seed in range(5):
        save(tmp_path, record(seed=seed))
    for folder in ("a", "b"):
        with styled():
            for picture in noise(
                read_frame(tmp_path), Selection(results=(tmp_path,), split="test")
            ):
                assert isinstance(picture, Picture)
                picture.save(tmp_path / folder)
    assert [p.read_bytes() for p in sorted((tmp_path / "a").iterdir())] == [
        p.read_bytes() for p in sorted((tmp_path / "b").iterdir())
    ]


def test_the_interval_of_a_deviation_covers_it() -> None:
    draws = np.random.default_rng(0).normal(0, 2, (2000, 10))
    inside = [(e := deviation(list(row))).low <= 2 <= e.high for row in draws]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)
    assert deviation([1.0, 3.0]).value == pytest.approx(np.sqrt(2))


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_smallest_difference_is_found_in_four_of_five_cases(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    gap = smallest_difference(2.0, seeds)
    one, other = rng.normal(0, 2, (4000, seeds)), rng.normal(gap, 2, (4000, seeds))
    found = stats.ttest_ind(one, other, axis=1).pvalue < 0.05
    assert np.mean(found) == pytest.approx(0.8, abs=0.04)
    assert smallest_difference(1.0, seeds) == pytest.approx(gap / 2)
