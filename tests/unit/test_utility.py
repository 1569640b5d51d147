"""The figure of utility versus leakage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from feddg_attacks.records import AttackRecord
from feddg_attacks.utility import utility
from feddg_bench.analysis.figures.drawing import Picture, styled
from feddg_bench.analysis.figures.series import Selection
from feddg_bench.config.layers import merge
from feddg_bench.config.recipes import load_recipe
from feddg_bench.records.frame import read_frame
from feddg_bench.records.record import RunRecord
from tests.fabricate_attacks import attack as fabricated
from tests.fabricate_attacks import interval, result
from tests.fabricate_records import record, save


def noisy(noise: float, scenario: str = "ip-o-c", seed: int = 0, **changes: Any) -> RunRecord:
    hyper = {"style_weights": [], **({"perturb_noise": noise} if noise else {})}
    own = {"hyper": hyper, **changes}
    settings = merge(*load_recipe("quick", "digits4", "pardon"), own)
    return record("pardon", scenario=scenario, seed=seed, settings=settings)


FEW = {"partition": {"clients": 70}, "federation": {"per_round": 35}}


def attack(
    noise: float, auc: float | None, settings: dict[str, Any] | None = None, **changes: Any
) -> AttackRecord:
    results = [
        result({} if value is None else {"auc": interval(value, 0.05)}, item=item)
        for item, value in (("style", auc), ("weights", 0.99))
    ]
    made = noisy(noise, **(settings or {}))
    same = {"key": made.key, "run_key": made.key, "settings": made.settings}
    return fabricated(*results, **(same | changes))


def drawn(root: Path, records: list[RunRecord], attacks: list[AttackRecord]) -> Any:
    for made in records:
        save(root, made)
    with styled():
        (found,) = utility(read_frame([root]), attacks, Selection((root,)))
    return found


def rows_of(picture: Picture) -> list[Any]:
    assert picture.numbers is not None
    return list(picture.numbers.itertuples(index=False, name=None))


def test_a_point_is_the_mean_accuracy_and_the_auc_under_one_noise(tmp_path: Path) -> None:
    pairs = [("ip-o-c", 0), ("ip-o-c", 1)]
    runs = [noisy(noise, *pair) for noise in (0.0, 0.1) for pair in pairs]
    picture = drawn(tmp_path, runs, [attack(0.0, 0.9), attack(0.1, 0.6)])
    assert isinstance(picture, Picture)
    assert picture.name == "utility-digits4-ltdo-quick"
    first, second = rows_of(picture)
    assert first[:3] == ("pardon", 0.0, 0.9)
    assert second[:3] == ("pardon", 0.1, 0.6)
    assert second[3:5] == pytest.approx((0.55, 0.65))
    assert first[-1] == second[-1] == 2


def test_only_what_all_points_have_counts(tmp_path: Path) -> None:
    runs = [noisy(0.0), noisy(0.0, seed=1), noisy(0.1), noisy(0.3, seed=7)]
    picture = drawn(tmp_path, runs, [attack(0.0, 0.9), attack(0.1, 0.6)])
    assert {row[-1] for row in rows_of(picture)} == {1}


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


def test_other_clients_have_a_figure_of_their_own(tmp_path: Path) -> None:
    runs = [noisy(noise, **changes) for noise in (0.0, 0.1) for changes in ({}, FEW)]
    attacks = [attack(noise, 0.9 - noise, settings=FEW) for noise in (0.0, 0.1)]
    picture = drawn(tmp_path, runs, [*attacks, attack(0.0, 0.5)])  # one point with N=20 only
    assert picture.name == "utility-digits4-ltdo-quick-N-70-K-35"
    assert [row[:3] for row in rows_of(picture)] == [("pardon", 0.0, 0.9), ("pardon", 0.1, 0.8)]


def test_runs_in_other_frames_are_left_out(tmp_path: Path) -> None:
    other = noisy(0.1, train={"lr": 0.5})
    assert "no method" in drawn(tmp_path, [noisy(0.0), other], [attack(0.0, 0.9), attack(0.1, 0.6)])
