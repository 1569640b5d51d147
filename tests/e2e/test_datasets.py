"""Every data set through the whole command, with made-up images in its published layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from feddg_bench.plugins import load_dataset
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore
from feddg_datasets.handwritten import Handwritten
from feddg_datasets.minidomainnet import MiniDomainNet
from feddg_datasets.officehome import OfficeHome
from feddg_datasets.rmnist import RotatedMNIST
from tests.fabricate import fabricate
from tests.helpers import one_sentence

SMALL = ("backbone.name=small_cnn", "backbone.pretrained=false", "backbone.projection=0")
TINY = ("--rounds", "1", "--workers", "1", "data.image_size=16", "train.local_epochs=1", *SMALL)
THIRDS = ("data.id_val_fraction=0.34", "data.id_test_fraction=0.34")


Run = Callable[..., Any]


@pytest.fixture
def feddg(feddg: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return the command; made-up data may differ from the published counts."""
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(OfficeHome, "counts", {})
    monkeypatch.setattr(RotatedMNIST, "counts", {})
    monkeypatch.setattr(Handwritten, "counts", {})
    monkeypatch.setattr(Handwritten, "duplicates", 0)
    monkeypatch.setattr(MiniDomainNet, "total", None)
    return feddg


def record(feddg: Run, root: Path, name: str, *arguments: str) -> RunRecord:
    """Run FedAvg on a data set and return the only record."""
    done = feddg("run", "--dataset", name, "--data-root", root, *TINY, *arguments)
    assert done.code == 0, done.err
    (found,) = ResultsStore(root.parent / "runs")
    assert found.dataset == name
    return found


def images(found: RunRecord) -> dict[str, int]:
    """Return the number of images of each split."""
    return {split: sum(counts.values()) for split, counts in found.data.images.items()}


def test_officehome(feddg: Run, tmp_path: Path) -> None:
    root = fabricate("officehome", tmp_path / "data")
    sampled = ("--clients", "5", "--per-round", "2")
    found = record(feddg, root, "officehome", "--scenario", "ac-p-r", *sampled, *THIRDS)
    assert images(found) == {"train": 130, "id_val": 130, "id_test": 130, "val": 195, "test": 195}
    assert found.recipe == "pardon"
    assert found.settings["augment"]["hue"] == 0.4
    assert found.scenario.test == "real_world"


def test_minidomainnet_joins_the_lists_in_its_recipe(feddg: Run, tmp_path: Path) -> None:
    root = fabricate("minidomainnet", tmp_path / "data")
    chosen = ("--protocol", "lodo", "--scenario", "sketch", "data.id_val_fraction=0.34")
    found = record(feddg, root, "minidomainnet", *chosen)
    assert images(found) == {"train": 756, "id_val": 378, "test": 378}
    assert found.partition.clients == 6
    assert found.recipe == "fedccrl"


def test_minidomainnet_keeps_the_published_test_list_otherwise(feddg: Run, tmp_path: Path) -> None:
    root = fabricate("minidomainnet", tmp_path / "data")
    chosen = ("--protocol", "lodo", "--scenario", "sketch", "data.id_test_fraction=0.01")
    found = record(feddg, root, "minidomainnet", *chosen, "data.id_val_fraction=0.5")
    assert images(found) == {"train": 378, "id_val": 378, "id_test": 378, "test": 378}


def test_terraincognita(feddg: Run, tmp_path: Path) -> None:
    root = fabricate("terraincognita", tmp_path / "data")
    chosen = ("--protocol", "lodo", "--scenario", "L46", "data.id_val_fraction=0.25")
    found = record(feddg, root, "terraincognita", *chosen)
    assert images(found) == {"train": 93, "id_val": 30, "test": 41}
    assert found.scenario.name == "38+43+100-46"
    assert found.partition.clients == 3
    assert found.settings["federation"]["bn"] == "frozen"


@pytest.mark.parametrize(
    "backbone", ["lenet", pytest.param("domainbed_mnist", marks=pytest.mark.nightly)]
)
def test_rmnist_with_both_networks(feddg: Run, tmp_path: Path, backbone: str) -> None:
    root = fabricate("rmnist", tmp_path / "data")
    chosen = ("--protocol", "lodo", "--scenario", "75", "--method", "ppdg", "data.image_size=28")
    found = record(feddg, root, "rmnist", *chosen, f"backbone.name={backbone}")
    assert found.scenario.name == "0+15+30+45+60-75"
    assert found.partition.clients == 5
    assert sum(images(found).values()) == 600
    assert found.settings["hyper"]["strength"] == 0.001
    assert found.settings["train"]["batch_size"] == 64


def test_handwritten(feddg: Run, tmp_path: Path) -> None:
    root = fabricate("handwritten", tmp_path / "data")
    assert feddg("data", "check", "handwritten", "--data-root", root).code == 0
    found = record(feddg, root, "handwritten", "--scenario", "sf-m-o", "--clients", "5")
    assert images(found) == {"train": 320, "id_val": 40, "id_test": 40, "val": 500, "test": 400}
    assert found.recipe == "handwritten"
    assert found.settings["train"]["schedule"] == "cosine"
    seconds = [value for entry in found.rounds for value in entry.seconds.values()]
    assert seconds == [float(f"{value:.3g}") for value in seconds]
    assert feddg("tables", "all", "--results", tmp_path / "runs", "--out", "tables").code == 0


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        ("vlcs", "sv-c-l"),
        ("office31", "aw-d"),
        ("officecaltech10", "acd-w"),
        ("domainnet", "cipqr-s"),
        ("digits5", "mt+mm+sv+sy-up"),
        ("digitsdg", "sv+sy-mt-mm"),
        ("coloredmnist", "p90+p80-n90"),
    ],
)
def test_sets_of_public_suites(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, scenario: str
) -> None:
    monkeypatch.setattr(load_dataset(name), "counts", {})
    # DomainNet has 345 classes, whose made-up images cost 10 s.
    monkeypatch.setattr(load_dataset(name), "classes", load_dataset(name).classes[:31])
    root = fabricate(name, tmp_path / "data")
    report = json.loads(feddg("data", "check", name, "--data-root", root, "--json").out)
    assert [finding["kind"] for finding in report["findings"]] == []
    protocol = "lodo" if scenario.count("-") == 1 else "ltdo"
    chosen = ("--protocol", protocol, "--scenario", scenario, "--clients", "3", "--per-round", "2")
    found = record(feddg, root, name, *chosen, *THIRDS, "--rounds", "2")
    assert found.scenario.name == scenario
    assert len(found.rounds) == 2
    assert feddg("tables", "all", "--results", tmp_path / "runs", "--out", "tables").code == 0


def test_femnist_takes_the_published_splits(feddg: Run, tmp_path: Path) -> None:
    root = fabricate("femnist", tmp_path / "data")
    network = ("data.image_size=28", "backbone.name=femnist_cnn")
    found = record(feddg, root, "femnist", "--protocol", "wilds", "--clients", "5", *network)
    assert images(found) == {"train": 465, "id_val": 77, "id_test": 78, "val": 31, "test": 31}
    assert found.scenario.name == "official"
    assert len(found.scenario.train) == 10
    evaluation = found.evaluation()
    assert {split: list(parts) for split, parts in evaluation.items()} == {
        split: ["all"] for split in ("id_val", "id_test", "val", "test")
    }
    refused = feddg(
        "run", "--dataset", "femnist", "--data-root", root, "--protocol", "wilds",
        "--split-csv", "splits.csv", "--clients", "4", *TINY, *network,
    )  # fmt: skip
    assert refused.code == 2
    (tmp_path / "splits.csv").write_text("")
    refused = feddg(
        "run", "--dataset", "femnist", "--data-root", root, "--protocol", "wilds",
        "--split-csv", "splits.csv", "--clients", "4", *TINY, *network,
    )  # fmt: skip
    assert "leave --split-csv out" in refused.err


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("folder", {"protocol": "lodo", "scenario": "night", "partition.clients": 4}),
        (
            "femnist",
            {"protocol": "wilds", "partition.clients": 5, "backbone.name": "femnist_cnn"}
            | {"data.image_size": 28},
        ),
    ],
)
def test_a_sweep_plans_the_runs_of_run_where_domains_are_on_the_disk(
    feddg: Run, tmp_path: Path, name: str, chosen: dict[str, object]
) -> None:
    """A sweep uses the same key, so a run that `run` recorded is already done."""
    root = fabricate(name, tmp_path / "data")
    small = dict(pair.split("=") for pair in (*TINY[4:], "rounds=1", "per_round=2"))
    parameters = {"dataset": name} | small | chosen
    pairs = [f"{key}={value}" for key, value in parameters.items()]
    ran = feddg("run", "--workers", "1", "--data-root", root, *pairs)
    assert ran.code == 0, ran.err
    file = tmp_path / "sweep.yaml"
    values = {key: {"value": value} for key, value in parameters.items()}
    layer = {"method": "grid", "command": ["feddg-bench", "run", "${args_no_hyphens}"]}
    file.write_text(yaml.safe_dump(layer | {"parameters": values}, sort_keys=False))
    swept = feddg("sweep", file, "--workers", "1", "--data-root", root)
    assert swept.code == 0, swept.err
    assert "1 of 1 run" in swept.out
    assert "[" not in swept.err  # nothing was computed
    assert feddg("sweep", file).code == 2  # no folder


def test_folder_names_enter_the_key_and_the_record(feddg: Run, tmp_path: Path) -> None:
    root = fabricate("folder", tmp_path / "data")
    chosen = ("--protocol", "lodo", "--scenario", "rainy_day", "--clients", "4", "--per-round", "2")
    found = record(feddg, root, "folder", *chosen)
    assert found.scenario.name == "Day_Light+night-rainy_day"
    assert found.scenario.test == "rainy-day"
    names = found.settings["data"]["names"]
    assert names["domains"] == ["Day Light", "night", "rainy-day"]
    assert names["classes"] == ["Car", "Fire Truck", "bus", "tram"]
    again = feddg("run", "--dataset", "folder", "--data-root", root, *TINY, *chosen)
    assert "already done" in again.err

    for domain in root.iterdir():
        if (domain / "bus").exists():
            (domain / "bus").rename(domain / "coach")
    other = feddg("run", "--dataset", "folder", "--data-root", root, *TINY, *chosen, "--json")
    assert other.code == 0, other.err
    run = json.loads(other.out)["runs"][0]
    assert run["key"] != found.key
    assert run["settings"]["data"]["names"]["classes"] == ["Car", "Fire Truck", "coach", "tram"]
    assert len(list(ResultsStore(tmp_path / "runs"))) == 2


def test_a_folder_that_changed_since_its_runs_is_refused(feddg: Run, tmp_path: Path) -> None:
    """No record is continued on other images, and no second one appears beside it unasked."""
    root = fabricate("folder", tmp_path / "data")
    chosen = ("--protocol", "lodo", "--scenario", "night", "--clients", "4", "--per-round", "2")
    first = record(feddg, root, "folder", *chosen)
    run = ("run", "--dataset", "folder", "--data-root", root, *TINY, *chosen)
    store = ResultsStore(tmp_path / "runs")
    path = root / "night" / "bus" / "0.jpg"
    content = bytearray(path.read_bytes())
    said = f"{first.key}.json was made from other images than those of data now"
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])  # of the same size
    one_sentence(feddg(*run), said, "--again")
    path.write_bytes(content)
    nested = path.parent / "more" / "9.jpg"
    nested.parent.mkdir()
    nested.write_bytes(content)
    one_sentence(feddg(*run), said, "--again")
    one_sentence(feddg(*run, "--dry-run"), said)
    sweep = tmp_path / "sweep.yaml"
    pairs = dict(pair.split("=") for pair in TINY[4:])
    pairs |= {"dataset": "folder", "rounds": "1", "scenario": "night", "clients": "4"}
    values = {key: {"value": yaml.safe_load(value)} for key, value in pairs.items()}
    values["per_round"] = {"values": [1, 2]}
    sweep.write_text(yaml.safe_dump({"method": "grid", "parameters": values}))
    for more in ((), ("--dry-run",)):
        one_sentence(feddg("sweep", sweep, "--workers", "1", "--data-root", root, *more), first.key)
    assert [found.key for found in store] == [first.key]
    assert feddg(*run, "--per-round", "1", "--dry-run").code == 0  # nothing to be taken for it

    assert feddg(*run, "--again").code == 0  # the user knows
    (other,) = {found.key for found in store} - {first.key}
    done = feddg(*run)
    assert (done.code, len(list(store))) == (0, 2), done.err
    (store.runs / f"{other}.json").unlink()
    assert feddg(*run, "--results", tmp_path / "other").code == 0


def test_a_domain_whose_name_is_in_brackets_is_shown(feddg: Run, tmp_path: Path) -> None:
    root = fabricate("folder", tmp_path / "data")
    (root / "night").rename(root / "[night]")
    chosen = ("--protocol", "lodo", "--scenario", "[night]", "--clients", "4", "--per-round", "2")
    done = feddg("run", "--dataset", "folder", "--data-root", root, *TINY, *chosen)
    assert done.code == 0, done.err
    assert "Day_Light+rainy_day-[night] seed 0: round 1/1" in done.err
    assert "([night])" in done.out


def test_folder_without_a_folder_is_refused_in_one_sentence(feddg: Run, tmp_path: Path) -> None:
    refused = feddg("run", "--dataset", "folder")
    assert (refused.code, refused.out) == (2, "")
    assert "needs --data-root DIR" in refused.err
    refused = feddg("run", "--dataset", "folder", "--data-root", tmp_path / "none")
    assert "there is no folder" in refused.err


def test_all_are_listed_without_any_data(feddg: Run) -> None:
    rows = {row["name"]: row for row in json.loads(feddg("datasets", "--json").out)}
    assert rows["folder"]["domains"] == rows["femnist"]["domains"] == []
    assert rows["minidomainnet"]["classes"] == 126
    assert rows["officehome"]["classes"] == 65
    recipes = {row["name"]: row["datasets"] for row in json.loads(feddg("recipes", "--json").out)}
    assert recipes["ppdg"] == ["camelyon17", "fmow", "poverty", "rmnist", "terraincognita"]
    assert recipes["fedccrl"] == ["minidomainnet", "officehome", "pacs"]
    assert recipes["feddg_benchmark"] == ["camelyon17", "femnist", "iwildcam", "pacs"]
    assert recipes["pardon"] == ["iwildcam", "officehome", "pacs"]
    assert {"iwildcam", "camelyon17", "fmow", "poverty"} <= set(recipes["quick"])
    assert (len(rows["iwildcam"]["domains"]), rows["iwildcam"]["classes"]) == (323, 182)


# ------------------------------------------------------------------------- sets of WILDS

needs_wilds = pytest.mark.skipif(find_spec("wilds") is None, reason="needs the package wilds")


def official(feddg: Run, tmp_path: Path, name: str, *arguments: str) -> RunRecord:
    """Run on the published splits of a made-up WILDS data set and return the only record."""
    root = fabricate(name, tmp_path / "data")
    return record(feddg, root, name, "--protocol", "wilds", *arguments)


@needs_wilds
@pytest.mark.parametrize("recipe", ["pardon", "feddg_benchmark"])
def test_iwildcam(feddg: Run, tmp_path: Path, recipe: str) -> None:
    sampled = ("--recipe", recipe, "--clients", "9", "--per-round", "3")
    found = official(feddg, tmp_path, "iwildcam", *sampled)
    assert images(found) == {"train": 240, "id_val": 24, "id_test": 24, "val": 72, "test": 72}
    assert len(found.scenario.train) == 8
    assert found.scenario.test == "location_005+location_011"
    assert found.metric.name == "macro_f1"
    for parts in found.evaluation().values():
        assert list(parts) == ["all"]
        assert 0 <= parts["all"]["macro_f1"] <= 1
        assert 0 <= parts["all"]["accuracy"] <= 1
    assert found.settings["augment"]["hue"] == 0.3


@needs_wilds
def test_iwildcam_with_a_client_for_each_place(feddg: Run, tmp_path: Path) -> None:
    chosen = ("partition.kind=domain", "--per-round", "4")
    found = official(feddg, tmp_path, "iwildcam", *chosen)
    assert found.partition.clients == 8


@needs_wilds
@pytest.mark.parametrize("recipe", ["ppdg", "feddg_benchmark"])
def test_camelyon17(feddg: Run, tmp_path: Path, recipe: str) -> None:
    few = () if recipe == "ppdg" else ("--clients", "6")
    found = official(feddg, tmp_path, "camelyon17", "--recipe", recipe, *few)
    assert images(found) == {"train": 162, "id_val": 18, "val": 60, "test": 60}
    assert found.partition.clients == (3 if recipe == "ppdg" else 6)
    evaluation = found.evaluation()
    assert set(evaluation["id_val"]) == {"hospital_0", "hospital_3", "hospital_4", "all"}
    for split, slides in (("val", (10, 13)), ("test", (20, 23))):
        whole = evaluation[split]["all"]
        assert whole["worst_group_name"] in {f"slide_{slide}" for slide in slides}
        assert whole["worst_group"] <= whole["accuracy"]
    assert found.settings["train"]["optimizer"] == ("sgd" if recipe == "ppdg" else "adam")


@needs_wilds
def test_fmow(feddg: Run, tmp_path: Path) -> None:
    found = official(feddg, tmp_path, "fmow", "--method", "ppdg", "--rounds", "2")
    assert images(found) == {"train": 255, "id_val": 43, "id_test": 42, "val": 91, "test": 64}
    assert found.partition.clients == 11
    assert [len(entry.cohort) for entry in found.rounds] == [5, 5]
    assert found.settings["hyper"]["strength"] == 0.05
    test = found.evaluation()["test"]
    assert set(test) == {"2016", "2017", "all"}
    assert test["all"]["worst_group_name"] in ("Africa", "Americas", "Asia", "Europe", "Oceania")


@pytest.mark.nightly
@needs_wilds
def test_poverty_in_two_of_its_folds(feddg: Run, tmp_path: Path) -> None:
    root = fabricate("poverty", tmp_path / "data")
    done = feddg(
        "run", "--dataset", "poverty", "--data-root", root, "--protocol", "wilds",
        "--scenario", "fold-A,fold-C", "--method", "ppdg", *TINY, "--rounds", "2",
    )  # fmt: skip
    assert done.code == 0, done.err
    records = {found.scenario.name: found for found in ResultsStore(tmp_path / "runs")}
    assert set(records) == {"fold-A", "fold-C"}
    first = records["fold-A"]
    assert images(first) == {
        "train": 132, "id_val": 1000, "id_test": 1000, "val": 820, "test": 820,
    }  # fmt: skip
    assert images(records["fold-C"])["train"] == 14 * 164 - 2000
    assert records["fold-A"].key != records["fold-C"].key
    assert first.partition.clients == 26
    assert [len(entry.cohort) for entry in first.rounds] == [13, 13]
    assert (first.task, first.metric.name) == ("regression", "pearson")
    assert first.settings["train"]["schedule"] == "exponential"
    whole = first.evaluation()["test"]["all"]
    assert -1 <= whole["worst_group"] <= 1
    assert whole["worst_group_name"] in ("rural", "urban")
    refused = feddg(
        "run", "--dataset", "poverty", "--data-root", root, "--protocol", "wilds",
        "--scenario", "fold-F", "--method", "ppdg", *TINY,
    )  # fmt: skip
    assert refused.code == 2
    assert "unknown scenario 'fold-F'" in refused.err
