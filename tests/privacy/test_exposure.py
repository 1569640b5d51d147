"""The card's section on privacy and the table of attack results."""

import csv
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from feddg_attacks.exposure import (
    measured_text,
    privacy_csv,
    privacy_notes,
    privacy_text,
)
from feddg_attacks.records import AttackRecord
from feddg_bench.plugins import outline
from feddg_bench.records.record import PrivacyRecord
from feddg_bench.records.runs import read_runs
from feddg_bench.runs.cards import protection_text
from tests.fabricate_attacks import attack, control, interval, result
from tests.fabricate_records import record as fabricated
from tests.fabricate_records import save


def record(auc: float | None, images: int = 10, **settings: Any) -> AttackRecord:
    """Return the record of an attack on PARDON's styles; ``None`` stands for a failed control."""
    checked = control(0.5 if auc is not None else 0.9, holds=auc is not None)
    found = result({"auc": interval(auc or 0.7)}, no_leak=checked).withheld()
    seed = settings.get("seed", 0)
    return attack(found, scenario="oc-i-p", seed=seed, settings=settings, images=images)


METHODS = {name: outline(name) for name in ("fedavg", "pardon")}
TITLES = {"fedavg": "FedAvg", "pardon": "PARDON"}


def row_of(text: str, method: str, item: str) -> list[str]:
    (line,) = [x for x in text.splitlines() if x.startswith(f"|{TITLES[method]}|{item}|")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_scenarios_and_seeds_are_averaged_and_other_settings_kept_apart() -> None:
    plain = [record(0.6, seed=seed, hyper={"noise": 0}) for seed in (0, 1)]
    text = privacy_notes(METHODS, [*plain, record(0.8, seed=2, hyper={"noise": 0})])
    assert row_of(text, "pardon", "style")[6] == "0.67 [0.50, 0.90] (n = 10)"
    text = privacy_notes(METHODS, [*plain, record(0.5, hyper={"noise": 1})])
    quiet, loud = (row_of(text, "pardon", f"style (noise={s})") for s in (0, 1))  # neither is usual
    assert quiet[6:] == ["0.60 [0.50, 0.70] (n = 10)"]  # other figures have no column
    assert loud[6:] == ["0.50 [0.40, 0.60] (n = 10)"]
    card = measured_text("pardon", METHODS["pardon"], [*plain, record(0.5, hyper={"noise": 1})])
    assert "[0.40, 0.60] (n = 10) with noise=1." in card


def test_what_is_as_usual_is_not_said() -> None:
    records = [record(0.6, hyper={"style_augment": True}), record(0.8, hyper={"strength": 1.0})]
    text = privacy_notes(METHODS, [*records, record(0.9, hyper={"style": "pixel"})])
    assert row_of(text, "pardon", "style")[6] == "0.75 [0.50, 1.00] (n = 10)"
    assert row_of(text, "pardon", "style (strength=1)")[6] == "0.80 [0.70, 0.90] (n = 10)"


def test_what_was_seen_more_often_is_told_apart() -> None:
    once = record(0.6)
    often = [result.model_copy(update={"times": 2}) for result in once.results]
    text = privacy_notes(METHODS, [once, once.model_copy(update={"results": often, "seed": 1})])
    seen = ("style", "style (messages of 1 of 2 rounds)")
    assert [row_of(text, "pardon", what)[6] for what in seen] == ["0.60 [0.50, 0.70] (n = 10)"] * 2


def test_sizes_of_clients_stand_beside_each_other() -> None:
    cell = row_of(privacy_notes(METHODS, [record(0.6, 30), record(0.8, 10)]), "pardon", "style")[6]
    assert cell == "0.80 [0.70, 0.90] (n = 10); 0.60 [0.50, 0.70] (n = 30)"


def test_a_figure_whose_control_failed_is_withheld() -> None:
    text = privacy_notes(METHODS, [record(None)])
    assert row_of(text, "pardon", "style")[6] == "withheld (n = 10)"
    assert "0.7" not in text


def test_what_was_not_attacked_is_there_with_what_is_possible() -> None:
    cells = row_of(privacy_notes(METHODS, []), "fedavg", "weights")
    assert cells[2:6] == ["-", "yes", "yes", "no"]


def test_a_kind_that_attacks_another_frame_says_so_and_its_bytes_are_not_the_recipe_s() -> None:
    found = result({"rank": interval(0.9)}, item="weights", about="cosine", bytes=7)
    frame = {"backbone": {"name": "lenet"}, "data": {"image_size": 16}}
    text = privacy_notes(METHODS, [attack(found, kind="gradient-inversion", settings=frame)])
    cells = row_of(text, "pardon", "weights")
    assert (cells[2], cells[6]) == ("7 (another setup)", "0.90 [0.80, 1.00] (n = 10)")
    said = (
        "Other settings than the recipe's: `image` has runs with backbone.name=lenet, "
        "data.image\\_size=16."
    )
    assert f"- {said}" in text.splitlines()
    assert said not in privacy_notes(METHODS, [record(0.6)])


def test_the_short_table_has_the_smallest_clients_and_the_usual_settings() -> None:
    records = [record(0.6, 30), record(0.8, 10), record(0.9, 10, hyper={"noise": 1})]
    leaked = result({"rank": interval(0.9)}, item="weights", about="cosine")
    records.append(attack(leaked, kind="gradient-inversion"))
    like = dict.fromkeys(("pardon", "fedavg"), METHODS["pardon"])
    same = [one.model_copy(update={"method": "fedavg"}) for one in records[-1:]]
    lines = privacy_text(like, [*records, *same]).splitlines()
    assert "## Digits4, recipe quick" in lines
    assert "|PARDON, FedAvg|weights|-|-|-|0.90|-|" in lines
    assert "|PARDON|style|0.80|-|-|-|-|" in lines
    assert sum(line.startswith("|") for line in lines) == 4  # the head, a rule and two rows
    assert "|PARDON|style|withheld|" in privacy_text(METHODS, [record(None)])


def test_what_was_not_measured_is_not_withheld() -> None:
    drawn = result({"rank": interval(0.5)}, about="clients")
    judged = result({"rank": interval(0.5), "lpips": interval(0.3)}, about="clients")
    text = privacy_notes(METHODS, [attack(drawn, kind="style-inversion")])
    assert "LPIPS" not in text
    both = [
        attack(found, kind="style-inversion", images=n) for n, found in ((5, drawn), (9, judged))
    ]
    cells = row_of(privacy_notes(METHODS, both), "pardon", "style")
    assert cells[7] == "0.30 [0.20, 0.40] (n = 9)"


def test_the_csv_has_a_row_a_figure() -> None:
    (row,) = csv.DictReader(StringIO(privacy_csv(METHODS, [record(0.6)])))
    assert (row["item"], row["figure"], row["value"]) == ("style", "membership AUC", "0.6")


def test_a_card_says_why_a_protection_is_not_possible_and_what_was_measured() -> None:
    text = protection_text(METHODS["pardon"]) + measured_text(
        "pardon", METHODS["pardon"], [record(0.6)]
    )
    assert "`style` (`local_style`)" in text
    assert "dp_client`): no, " in text
    assert "membership AUC from `style`: 0.60 [0.50, 0.70] (n = 10)." in text
    assert "feddg-bench attack --method fedavg" in measured_text("fedavg", METHODS["fedavg"], [])


def guaranteed(epsilon: float) -> PrivacyRecord:
    return PrivacyRecord(
        mechanism="dp_client",
        aggregation="plain",
        protects="a client, there or not",
        epsilon=epsilon,
        delta=1e-3,
        accountant="rdp",
        sampling="poisson",
    )


def test_epsilon_stands_at_the_accuracy_that_it_leaves(tmp_path: Path) -> None:
    values = []
    layer = {
        "privacy": {"mechanism": "dp_client", "delta": 1e-3},
        "federation": {"weighting": "uniform"},
    }
    for seed, epsilon in ((0, 3.0), (1, 3.001)):
        made = fabricated(seed=seed, settings=layer)
        save(tmp_path, made.model_copy(update={"privacy": guaranteed(epsilon)}))
        test = made.evaluation()["test"].values()
        values.append(sum(part["accuracy"] for part in test) / len(test))
    text = privacy_notes(METHODS, [], read_runs([tmp_path]))
    mean = 100 * sum(values) / 2
    assert (
        row_of(text, "fedavg", "weights")[-1]
        == f"3.01 at {mean:.1f} (delta 0.001, N = 100, 2 runs)"
    )
    assert row_of(text, "pardon", "weights")[-1] == "-"
    (row,) = csv.DictReader(StringIO(privacy_csv(METHODS, [], read_runs([tmp_path]))))
    assert (row["figure"], row["settings"]) == ("epsilon at", "epsilon 3.001, delta 0.001")
    assert float(row["value"]) == pytest.approx(mean)


def test_guarantees_of_two_protocols_are_not_averaged(tmp_path: Path) -> None:
    layer = {
        "privacy": {"mechanism": "dp_client", "delta": 1e-3},
        "federation": {"weighting": "uniform"},
    }
    private = guaranteed(3.0)
    for where in ({"protocol": "lodo", "scenario": "ipo-c"}, {"scenario": "ip-o-c"}):
        save(tmp_path, fabricated(**where, settings=layer).model_copy(update={"privacy": private}))
    cell = row_of(privacy_notes(METHODS, [], read_runs([tmp_path])), "fedavg", "weights")[-1]
    assert cell.count("3 at ") == 2
    assert "2 runs" not in cell
