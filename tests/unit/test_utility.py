"""The figure of utility against leakage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from feddg_bench.analysis.figures.drawing import Picture, styled
from feddg_bench.analysis.figures.series import Selection
from feddg_bench.analysis.figures.utility import utility
from feddg_bench.config.layers import merge
from feddg_bench.config.recipes import load_recipe
from feddg_bench.records.attacks import AttackRecord, AttackResult, Control, Interval
from feddg_bench.records.record import RunRecord
from feddg_bench.records.runs import read_runs
from tests.fabricate_records import record, save


def interval(value: float) -> Interval:
    return Interval(value=value, low=value - 0.05, high=value + 0.05)


def noisy(noise: float, scenario: str = "ip-o-c", seed: int = 0, **changes: Any) -> RunRecord:
    own = {"hyper": {"perturb_noise": noise} if noise else {}, **changes}
    settings = merge(*load_recipe("quick", "digits4", "pardon"), own)
    return record("pardon", scenario=scenario, seed=seed, settings=settings)


def attack(noise: float, auc: float | None, **changes: Any) -> AttackRecord:
    good = Control(measured=interval(0.5), expected="about 0.5", holds=True)
    results = [
        AttackResult(
            item=item,
            up=True,
            call="local_style",
            times=1,
            messages=3,
            targets=30,
            bytes=24,
            no_leak=good,
            planted_leak=good,
            figures={} if value is None else {"auc": interval(value)},
        )
        for item, value in (("style", auc), ("weights", 0.99))
    ]
    made = noisy(noise)
    values: dict[str, Any] = {
        "key": f"{noise:016}",
        "kind": "membership",
        "version": 1,
        "attacker": "server",
        "run_key": made.key,
        "method": "pardon",
        "dataset": "digits4",
        "protocol": "ltdo",
        "scenario": "ip-o-c",
        "seed": 0,
        "recipe": "quick",
        "labels": {},
        "settings": made.settings,
        "clients": 3,
        "images": 10,
        "public": 40,
        "rounds": 1,
        "measured": {},
        "seconds": 1.0,
        "results": results,
    }
    return AttackRecord(**(values | changes))


def drawn(root: Path, records: list[RunRecord], attacks: list[AttackRecord]) -> Any:
    for made in records:
        save(root, made)
    with styled():
        (found,) = utility(read_runs([root]), attacks, Selection((root,)))
    return found


def test_a_point_is_the_mean_accuracy_and_the_auc_under_one_noise(tmp_path: Path) -> None:
    pairs = [("ip-o-c", 0), ("ip-o-c", 1)]
    runs = [noisy(noise, *pair) for noise in (0.0, 0.1) for pair in pairs]
    picture = drawn(tmp_path, runs, [attack(0.0, 0.9), attack(0.1, 0.6)])
    assert isinstance(picture, Picture)
    assert picture.name == "utility-digits4-ltdo-quick"
    assert picture.sheet is not None
    first, second = picture.sheet.rows
    assert first[:3] == ("pardon", 0.0, 0.9)
    assert second[:3] == ("pardon", 0.1, 0.6)
    assert second[3:5] == pytest.approx((0.55, 0.65))
    assert first[-1] == second[-1] == 2


def test_only_what_all_points_have_counts(tmp_path: Path) -> None:
    runs = [noisy(0.0), noisy(0.0, seed=1), noisy(0.1), noisy(0.3, seed=7)]
    picture = drawn(tmp_path, runs, [attack(0.0, 0.9), attack(0.1, 0.6)])
    assert {row[-1] for row in picture.sheet.rows} == {1}


@pytest.mark.parametrize(
    "attacks",
    [
        [attack(0.0, 0.9)],
        [attack(0.0, 0.9), attack(0.1, None)],
        [attack(0.0, 0.9), attack(0.1, 0.6, attacker="client")],
        [attack(0.0, 0.9), attack(0.1, 0.6, kind="property")],
    ],
)
def test_a_curve_needs_two_points(tmp_path: Path, attacks: list[AttackRecord]) -> None:
    assert "no method" in drawn(tmp_path, [noisy(0.0), noisy(0.1)], attacks)


def test_runs_in_other_frames_are_left_out(tmp_path: Path) -> None:
    other = noisy(0.1, train={"lr": 0.5})
    assert "no method" in drawn(tmp_path, [noisy(0.0), other], [attack(0.0, 0.9), attack(0.1, 0.6)])
