"""Default settings of a recipe's runs."""

from __future__ import annotations

from pathlib import Path

from feddg_bench.analysis.tables.setups import (
    FRAME,
    SELECT,
    departures,
    own_choices,
    usual_settings,
)
from feddg_bench.config.recipes import read_recipe, recipe_names, unpublished


def test_usual_settings_are_the_recipes_the_methods_needs_and_its_presets() -> None:
    usual = usual_settings("quick", "digits4", "fedbn")
    assert usual is not None
    assert usual["federation.bn"] == "local"  # required by FedBN, in no recipe
    assert usual["federation.rounds"] == 50
    pardon = usual_settings("quick", "digits4", "pardon")
    assert pardon is not None
    assert pardon["hyper.server_style"] == "released"  # of the preset `released`
    assert usual_settings("quick", "digits4", "of_another_package") is None
    assert usual_settings("ppdg", "digits4", "fedavg") is None


def test_the_name_of_a_recipe_in_a_record_is_no_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("datasets: {digits4: {federation.rounds: 3}}")
    assert usual_settings(str(file), "digits4", "fedavg") is None
    (said,) = departures({}, str(file), "digits4", "fedavg")
    assert "has no frame" in said


def test_what_a_paper_does_not_publish_is_said_with_our_value() -> None:
    said = own_choices("ppdg", "rmnist")
    assert said == ("rounds=60", "local_epochs=1", "optimizer=adam", "lr=0.001", "batch_size=64")
    assert own_choices("pardon", "pacs") == ()
    assert own_choices("ppdg", "digits4") == ()
    assert own_choices("ppdg", "fmow")[-1] == "selection rule"


def test_unpublished_settings_are_settings_of_a_frame() -> None:
    for recipe in recipe_names():
        for dataset in read_recipe(recipe).datasets or {}:
            assert set(unpublished(recipe, dataset)) <= {*FRAME, SELECT}
