"""End-to-end tests of the command line: runs, tables, lists and every kind of bad input."""

from __future__ import annotations

import csv
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import feddg_bench
import feddg_bench as fb
from feddg_bench.analysis.report.gather import gather
from feddg_bench.records.frame import read_frame
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore
from tests.fabricate import draw
from tests.helpers import one_sentence as refused

TINY = (
    *("--clients", "4", "--per-round", "2", "--rounds", "2", "--workers", "1"),
    *("data.image_size=8", "data.id_test_fraction=0.5", "data.id_val_fraction=0.3"),
)


Run = Callable[..., Any]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        ("tables", "all", "--results", "locked/x"),
        ("methods", "new", "foo", "--dir", "locked/x"),
        ("run", "--split-csv", "locked/a.csv", "--dry-run"),
        ("data", "list", "--data-root", "locked/x"),
    ],
)
def test_a_folder_that_may_not_be_read_is_said(tmp_path: Path, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "feddg_bench", *words]
    if os.geteuid() == 0:  # root can read everything unless restricted
        drop = shutil.which("setpriv") or pytest.skip("root may read every folder")
        command = [drop, "--bounding-set=-dac_override,-dac_read_search", *command]
    (tmp_path / "locked").mkdir(mode=0o000)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    (tmp_path / "locked").chmod(0o700)
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("feddg-bench: error: cannot ")
    assert "locked" in line
    assert "Permission denied" in line


# --------------------------------------------------------------------------------- runs


def test_run_prints_one_table_and_keeps_every_round(feddg: Run, tmp_path: Path) -> None:
    done = feddg("run", "--method", "pardon", "--protocol", "ltdo", *TINY)
    assert done.code == 0, done.err
    assert "PARDON on Digits4, leave two domains out" in " ".join(done.out.split())
    assert "style pixel" in done.out.lower()
    assert "mean" in done.out
    records = list(ResultsStore(tmp_path / "runs"))
    assert len(records) == 4
    for record in records:
        assert record.key in done.out
        assert [entry.round for entry in record.rounds] == [1, 2]
        evaluation = record.evaluation()
        assert set(evaluation) == {"id_val", "id_test", "val", "test"}
        assert set(evaluation["test"]) == {record.scenario.test}
        assert set(evaluation["id_test"]) == set(record.scenario.train)
        assert record.scenario.test not in record.scenario.train
        partition = json.loads(
            (tmp_path / "runs/partitions" / f"{record.partition.hash[:16]}.json").read_text()
        )
        held = [i for client in partition["clients"] for i in client["indices"]]
        assert len(held) == len(set(held)) == sum(record.data.images["train"].values())

    again = feddg("run", "--method", "pardon", "--protocol", "ltdo", *TINY)
    assert again.code == 0
    assert again.err.count("already done") == 4
    assert again.out == done.out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Return the results of two methods with two seeds, shared by several tests."""
    folder = tmp_path_factory.mktemp("made")
    fb.run(
        ["fedavg", "fedprox"],
        scenario="ip-o-c",
        seeds=2,
        settings={
            "clients": 4,
            "per_round": 2,
            "rounds": 2,
            "data.image_size": 8,
            "data.id_test_fraction": 0.5,
            "data.id_val_fraction": 0.3,
        },
        results=folder,
        keep=["best"],
        cache_dir=cache,
        quiet=True,
    )
    return folder


RAN = ("run", "--method", "fedavg,fedprox", "--scenario", "ip-o-c", "--seeds", "0,1", *TINY)


def test_what_is_said_of_several_methods_and_seeds(feddg: Run, made: Path) -> None:
    """Kept models, means and deviations are reported; every method has the same clients."""
    done = feddg(*RAN, "--keep", "best", "--results", made)
    assert done.err.count("already done") == 4
    assert "±" in done.out
    said = done.out.splitlines()
    models = said.index(f"Models: feddg-bench predict KEY IMAGES --results {made} --which best")
    named = [line.split() for line in said[models + 1 :]]
    records = list(ResultsStore(made))
    assert {words[0] for words in named} == {record.key for record in records}
    assert [words[1:] for words in named] == [
        [title, "ip-o-c", "seed", seed] for seed in "01" for title in ("FedAvg", "FedProx")
    ]
    for seed in (0, 1):
        pair = [record for record in records if record.seed == seed]
        assert {record.method for record in pair} == {"fedavg", "fedprox"}
        assert len({record.partition.hash for record in pair}) == 1
        assert len({json.dumps([e.cohort for e in r.rounds]) for r in pair}) == 1

    answer = json.loads(feddg(*RAN, "--method", "fedavg", "--results", made, "--json").out)
    assert [run["seed"] for run in answer["runs"]] == [0, 1]
    last = [
        100 * r.rounds[-1].evaluation["test"]["chalk"]["accuracy"]
        for r in records
        if r.method == "fedavg"
    ]
    cell = answer["tables"][0]["rows"][0]["test"]
    assert cell["mean"] == pytest.approx(np.mean(last))
    assert cell["std"] == pytest.approx(np.std(last, ddof=1))


def test_runs_that_lack_a_model_to_keep_are_announced(
    feddg: Run, made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path / "runs")
    store = ResultsStore(tmp_path / "runs")
    lacking = next(r.key for r in store if (r.method, r.seed) == ("fedavg", 1))
    store.model(lacking, "best").unlink()
    done = feddg(*RAN, "--method", "fedavg", "--keep", "best")
    assert done.code == 0, done.err
    assert "setup: small CNN from scratch, 8 px, " in done.err
    assert "estimate: 1 run in about " in done.err
    assert store.has_models(lacking, ["best"])


def test_a_record_that_cannot_be_read_is_still_to_do(
    feddg: Run, made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path / "runs")
    assert "4 done" in feddg(*RAN, "--dry-run").out
    path = next((tmp_path / "runs/runs").glob("*.json"))
    path.write_bytes(path.read_bytes()[:200])
    assert "3 done, 1 pending" in feddg(*RAN, "--dry-run").out
    assert path.exists()  # a dry run moves nothing
    done = feddg(*RAN, "--dry-run", "--device", "cuda:99")
    assert done.code == 0
    said = "these runs cannot start on this machine: device 'cuda:99' is not here"
    assert said in done.err


def planned(feddg: Run, *words: object) -> list[Any]:
    """Return the runs that a command plans."""
    done = feddg("run", *words, "--dry-run", "--json")
    assert done.code == 0, done.err
    plans: list[Any] = json.loads(done.out)
    return plans


def test_what_a_command_would_run(feddg: Run, tmp_path: Path) -> None:
    assert len(planned(feddg, "--scenario", "all", *TINY)) == 12
    one = ("--scenario", "ip-o-c")
    (erm,) = planned(feddg, "--method", "erm", *one, *TINY)
    assert erm["settings"]["partition"]["kind"] == "pooled"
    keys = [
        planned(feddg, *one, *TINY, "backbone.name=mobilenet_v2", *more)[0]["key"]
        for more in ((), ("train.depthwise_sums=false",), ("train.depthwise_sums=true",))
    ]
    assert keys[0] == keys[1] != keys[2]

    config = tmp_path / "mine.yaml"
    config.write_text("train: {lr: 0.5, batch_size: 16}\n")
    given = ("--config", config, "--set", "lr=0.125", "train.weight_decay=1e-4")
    train = planned(feddg, *one, *TINY, *given)[0]["settings"]["train"]
    assert (train["lr"], train["batch_size"], train["weight_decay"]) == (0.125, 16, 1e-4)

    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        "settings: {data: {image_size: 8}, partition: {clients: 3}, federation: {per_round: 3}}\n"
        "datasets: {digits4: }\n"
    )
    (run,) = planned(feddg, "--recipe", recipe, *one)
    assert run["settings"]["data"]["image_size"] == 8


def test_lodo_has_no_validation_domain(feddg: Run) -> None:
    done = feddg("run", "--protocol", "lodo", "--scenario", "chalk", *TINY, "--json")
    (row,) = json.loads(done.out)["tables"][0]["rows"]
    assert row["val"] is None
    assert row["test"]["mean"] > 0


def test_split_csv_decides_the_splits(feddg: Run, tmp_path: Path) -> None:
    from feddg_datasets.digits4 import Digits4

    dataset = Digits4()
    records = dataset.records()
    role = {"ink": "train", "poster": "train", "outline": "val", "chalk": "test"}
    path = tmp_path / "split.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "split", "domain_remapped", "domain", "category", "y", "path"])
        seen = 0
        for i, name in enumerate(records.paths):
            domain = dataset.domains[records.domains[i]]
            label = int(records.labels[i])
            split = role[domain]
            if split == "train":
                seen += 1
                split = {0: "id_val", 1: "id_test"}.get(seen % 10, "train")
            number = int(records.domains[i])
            writer.writerow([i, split, number, domain, dataset.classes[label], label, name])
    run = ("run", *TINY[:-2], "--split-csv", path)  # without the options for the fractions
    done = feddg(*run, "--scenario", "ip-o-c", "--json")
    assert done.code == 0, done.err
    images = json.loads(done.out)["runs"][0]["data"]["images"]
    assert sum(images["id_val"].values()) == seen // 10
    refused(feddg(*run, "--scenario", "po-c-i"), "split.csv")


def test_pacs_from_a_folder_and_no_published_number_of_another_frame(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from feddg_datasets.pacs import PACS

    monkeypatch.setattr(PACS, "counts", {})
    fabricate(tmp_path / "data" / "PACS" / "kfold")
    run = ("run", "--dataset", "pacs", "--recipe", "quick", *TINY, "--workers", "1")
    tiny = ("backbone.name=small_cnn", "backbone.pretrained=false", "data.image_size=32")
    done = feddg(*run, "--method", "pardon", "--data-root", tmp_path / "data", *tiny)
    assert done.code == 0, done.err
    assert "93.05" not in done.out  # PARDON's test accuracy on cs-a-p
    for more in ((), ("--dry-run",)):
        missing = feddg(*run, "--data-root", tmp_path / "none", *tiny, *more)
        refused(missing, f"there is no folder {tmp_path / 'none'}: give another --data-root")
    (tmp_path / "bare").mkdir()
    missing = feddg(*run, "--data-root", tmp_path / "bare", *tiny)
    refused(missing, "bare", "--data-root", "data download pacs")
    record = next((tmp_path / "runs/runs").glob("*.json"))
    image = next((tmp_path / "data").rglob("*.png"))
    whole = image.read_bytes()
    Image.new("RGB", (20, 24)).save(image)
    changed = feddg(*run, "--method", "pardon", "--data-root", tmp_path / "data", *tiny)
    assert changed.code == 2
    assert "made from other images" in changed.err
    image.write_bytes(whole)
    assert record.exists()
    image.write_bytes(image.read_bytes()[:40])
    refused(feddg(*run, "--data-root", tmp_path / "data", *tiny), image.name, "intact copy")
    for image in (tmp_path / "data/PACS/kfold/sketch").rglob("*.png"):
        image.unlink()
    refused(feddg(*run, "--data-root", tmp_path / "data", *tiny), "sketch")


def fabricate(root: Path) -> None:
    """Write a small PACS: 5 images of each class in each domain."""
    rng = np.random.default_rng(0)
    for domain in ("art_painting", "photo", "sketch", "cartoon"):
        for name in ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for i in range(5):
                pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"pic_{i:03}.png")


def test_a_class_missing_in_training(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from feddg_datasets.pacs import PACS

    monkeypatch.setattr(PACS, "counts", {})
    root = tmp_path / "data" / "pacs"
    fabricate(root)
    for domain in ("cartoon", "sketch"):
        for image in (root / domain / "house").iterdir():
            image.unlink()
    run = ("run", "--dataset", "pacs", "--recipe", "quick", "--data-root", tmp_path / "data")
    refused(
        feddg(*run, "--scenario", "cs-a-p", *TINY, "backbone.name=small_cnn", "pretrained=false"),
        "house",
        "cs-a-p",
    )


@pytest.mark.nightly
def test_a_terminal_without_our_letters(tmp_path: Path) -> None:
    letters = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    command = [sys.executable, "-m", "feddg_bench", "methods", "show", "fedavg"]
    where = os.environ | letters | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=where)
    assert (done.returncode, done.stderr) == (0, b"")


def test_lists(feddg: Run) -> None:
    methods = {row["name"]: row for row in json.loads(feddg("methods", "--json").out)}
    assert methods.keys() >= {"erm", "fedavg", "fedprox", "pardon"}
    assert methods["fedprox"]["settings"] == {"mu": 0.01, "norm": "squared"}
    datasets = {row["name"]: row for row in json.loads(feddg("datasets", "--json").out)}
    assert datasets["pacs"]["classes"] == 7
    assert {row["name"] for row in json.loads(feddg("recipes", "--json").out)} >= {
        "quick",
        "pardon",
    }
    assert "mu=0.01" in feddg("methods").out


def test_settings_with_their_origin(feddg: Run) -> None:
    answer = feddg("settings", "--method", "scaffold", "--json").out
    rows = {row["key"]: row for row in json.loads(answer)}
    assert set(rows) >= {"method", "seed", "train.lr", "federation.per_round", "partition.kind"}
    assert all(row["kind"] and row["meaning"] for row in rows.values())
    assert (rows["train.lr"]["value"], rows["train.lr"]["origin"]) == (0.2, "recipe")
    assert rows["train.lr"]["default"] == 3e-5
    assert rows["train.lr"]["kind"] == "number > 0"
    assert (rows["train.optimizer"]["value"], rows["train.optimizer"]["origin"]) == (
        "sgd",
        "method",
    )
    assert rows["train.eps"]["origin"] == "default"
    rows = json.loads(
        feddg("settings", "hyper", "--method", "fedccrl", "--recipe", "fedccrl", "--json",
              "--dataset", "pacs").out
    )  # fmt: skip
    assert {row["key"].partition(".")[0] for row in rows} == {"hyper"}
    shown = feddg("settings", "lr", "--method", "scaffold").out
    assert "0.2" in shown
    assert "recipe (default 3e-05)" in shown
    assert "weight_decay" not in shown


def test_what_is_known_of_a_recipe_and_a_data_set(feddg: Run) -> None:
    recipe = feddg("recipes", "show", "quick").out
    assert "backbone.name=small_cnn" in recipe
    assert "digits4, scaffold" in recipe
    layer = json.loads(feddg("recipes", "show", "quick", "--json").out)
    assert layer["datasets"]["digits4"]["train"]["lr"] == 0.002
    pacs = json.loads(feddg("datasets", "show", "pacs", "--json").out)
    assert pacs["images"] == {"art_painting": 2048, "photo": 1670, "sketch": 3929, "cartoon": 2344}
    assert pacs["scenarios"]["ltdo"] == ["cs-a-p", "ac-p-s", "pa-s-c", "ps-c-a"]
    assert "quick" in pacs["recipes"]
    assert "photo: 1670" in feddg("datasets", "show", "pacs").out


def own_folder(root: Path) -> None:
    """Write a user's own data set: an image of two classes in two domains."""
    for domain, name in enumerate(("dark", "light")):
        for label, kind in enumerate(("cat", "dog")):
            draw(root / name / kind / "1.png", label, domain, 0, grey=False)


def test_macro_f1_stands_next_to_accuracy_where_classes_are_imbalanced(
    feddg: Run, tmp_path: Path
) -> None:
    for domain, name in enumerate(("dark", "light")):
        for label, (kind, many) in enumerate((("cat", 33), ("dog", 3 if domain else 6))):
            for number in range(many):
                draw(tmp_path / "mine" / name / kind / f"{number}.png", label, domain, number)
    run = ("run", "--dataset", "folder", "--data-root", "mine", "--protocol", "lodo", *TINY)
    run += ("backbone.name=small_cnn", "backbone.pretrained=false", "federation.bn=average")
    done = feddg(*run, "--method", "fedavg,fedprox", "--json")
    assert done.code == 0, done.err
    # 33 cats to 3 dogs are above the bound of 10, 33 to 6 are not
    found = {r.scenario.name: r.data.imbalance for r in ResultsStore(tmp_path / "runs")}
    assert found == {"light-dark": None, "dark-light": 11.0}
    of_fedavg, _ = json.loads(done.out)["tables"]
    f1 = [
        100 * record.evaluation()["test"][record.scenario.test]["macro_f1"]
        for record in ResultsStore(tmp_path / "runs")
        if record.method == "fedavg"
    ]
    assert of_fedavg["rows"][-1]["macro F1"]["mean"] == pytest.approx(np.mean(f1))
    assert "macro F1" in feddg(*run, "--method", "fedavg").out
    assert "macro F1" in feddg(*run, "--method", "fedavg,fedprox").out

    assert feddg("tables", "generic").code == 0
    (table,) = (tmp_path / "runs/tables").glob("*.csv")
    rows = [r for r in csv.DictReader(table.read_text().splitlines()) if r["method"] == "fedavg"]
    (mean,) = [r for r in rows if r["metric"] == "macro_f1" and r["kind"] == "mean"]
    assert float(mean["value"]) == pytest.approx(np.mean(f1), abs=1e-6)
    assert feddg("tables", "generic", "--metric", "Macro-F1").code == 0
    other = table.with_name(f"{table.stem}-macro_f1.csv")
    of_test = [r for r in csv.DictReader(other.read_text().splitlines()) if r["group"] == "test"]
    assert {r["metric"] for r in of_test if r["kind"] in ("measured", "mean")} == {"macro_f1"}
    page = gather(read_frame(tmp_path / "runs"))
    assert page["measured"][:2] == ["accuracy", "macro_f1"]


def test_unreadable_images_are_left_out_of_a_run_on_request(
    feddg: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The record counts them, and no split or client has them."""
    for (d, domain), (c, kind), number in itertools.product(
        enumerate("xyz"), enumerate(("cat", "dog")), range(8)
    ):
        draw(tmp_path / "mine" / domain / kind / f"{number}.png", c, d, number)
    (tmp_path / "mine/x/cat/3.png").write_bytes(b"x")
    run = (
        "run",
        "--dataset",
        "folder",
        "--data-root",
        "mine",
        *TINY,
        "--json",
        "backbone.name=small_cnn",
    )
    run += ("backbone.pretrained=false", "federation.bn=average")
    refused(feddg(*run), "1 of 48 images cannot be decoded: x/cat/3.png (", "data.skip_unreadable")
    done = feddg(*run, "data.skip_unreadable=true")
    assert done.code == 0, done.err
    assert (
        "mine: cannot decode 1 of 48 images, which data.skip_unreadable leaves out, such as "
        "x/cat/3.png"
    ) in caplog.messages
    records = list(ResultsStore(tmp_path / "runs"))
    assert {r.data.unreadable for r in records} == {1}
    assert {sum(sum(d.values()) for d in r.data.images.values()) for r in records} == {47}
    assert all(r.settings["data"]["skip_unreadable"] for r in records)
    # A table has the folder's name, and says on how few images its numbers are.
    fewest = {
        split: min(sum(r.data.images[split].values()) for r in records)
        for split in ("id_test", "id_val", "test")
    }
    assert fewest["id_val"] == 4
    named = ", ".join(f"{split} ({number})" for split, number in fewest.items())
    few = f"Fewer than 20 images in {named}: a single image changes the accuracy by up to 25.0"
    shown = " ".join(feddg(*run[:-4], *run[-3:], "data.skip_unreadable=true").out.split())
    assert "FedAvg on mine, leave one domain out" in shown
    assert few in shown
    assert feddg("tables", "generic").code == 0
    (table,) = (tmp_path / "runs/tables").glob("*lodo*.tex")
    assert table.name == "folder-mine-lodo-quick.tex"
    assert r"\caption{mine, leave one domain out, recipe quick" in table.read_text()
    notes = table.with_suffix(".notes.md").read_text().replace("\\", "")
    assert few in " ".join(notes.split())


def test_the_domains_of_a_folder_are_those_found(feddg: Run, tmp_path: Path) -> None:
    own_folder(tmp_path / "mine")
    facts = json.loads(
        feddg("datasets", "show", "folder", "--data-root", tmp_path / "mine", "--json").out
    )
    assert facts["domains"] == ["dark", "light"]
    assert json.loads(feddg("datasets", "show", "folder", "--json").out)["domains"] == []


@pytest.mark.parametrize(
    "words",
    [
        ("methods",),
        ("datasets",),
        ("recipes",),
        ("recipes", "show", "ppdg"),
        ("datasets", "show", "iwildcam"),
        ("datasets", "show", "rmnist"),
        ("settings", "--method", "fedadg"),
        ("data", "list"),
        ("data", "check", "folder", "--data-root", "mine"),
        ("run", "--help"),
        ("run", "--dry-run", "--verbose"),
        ("sweep", "leakage", "--dry-run"),
    ],
    ids=" ".join,
)
def test_everything_fits_into_80_columns(
    feddg: Run, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folder(Path("mine"))
    monkeypatch.setenv("COLUMNS", "80")
    shown = feddg(*words)
    assert shown.code == 0, shown.err
    assert shown.out.count("\n") > 5
    assert max(map(len, shown.out.splitlines())) <= 80


def test_a_card_is_rendered_on_a_terminal_and_is_markdown_in_a_file(
    feddg: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = feddg("methods", "show", "PARDON").out
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes it for a terminal
    shown = feddg("methods", "show", "pardon").out
    bare = re.sub(r"\x1b(\[[0-9;]*m|\]8;[^\x1b]*\x1b\\)", "", shown)
    assert max(map(len, written.splitlines())) > 80
    assert max(map(len, bare.splitlines())) <= 80
    assert "##" not in bare
    for said in ("https://arxiv.org/abs/2410.22622", "booktitle = {ICDCS}", "Our results"):
        assert said in written
        assert said in bare
    setup = "PACS, leave two domains out, recipe laptop, tuned"
    assert f"- {setup}: accuracy 48.87 ± 2.09 on the unseen domains; difference" in written
    assert "Requirements\n\n- Learns: classification.\n- Images: red, green" in written


def test_all_settings_take_a_line_each(feddg: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = json.loads(feddg("settings", "--method", "pardon", "--json").out)
    shown = feddg("settings", "--method", "pardon").out.splitlines()
    assert len(shown) < len(rows) + 8
    (line,) = [line for line in shown if line.startswith(" train.lr ")]
    assert line.split() == ["train.lr", "0.002", "*", "Learning", "rate."]


def test_the_version(feddg: Run) -> None:
    assert feddg("--version").out == f"feddg-bench {feddg_bench.__version__}\n"


def test_profile(feddg: Run) -> None:
    run = ("profile", "--method", "pardon", "--synthetic", "12", "--clients", "4")
    done = feddg(*run, "--per-round", "2", "--rounds", "1", "--json")
    assert done.code == 0, done.err
    measured = json.loads(done.out)
    assert measured["images"] == 2 * 12 * 2  # two clients, two local epochs
    assert set(measured["round"]) == {"training", "communication", "aggregation", "evaluation"}
    assert 0 < measured["share_of_peak"]["training"] < 1
    # two clients send float32 models of 97,680 + 1,290 numbers
    assert measured["bytes_up"] == 2 * 4 * (97_680 + 1_290)
    table = feddg(*run, "--per-round", "2", "--rounds", "1")
    assert "share of the peak" in table.out


# ---------------------------------------------------------------------------- bad input


def test_weights_of_another_architecture_or_with_code(feddg: Run, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"conv1.weight": torch.zeros(8, 3, 3, 3)}, other)
    run = ("run", "--workers", "1", "backbone.pretrained=true")
    refused(feddg(*run, f"backbone.weights={other}"), str(other))

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    bad = tmp_path / "bad.pth"
    bad.write_bytes(pickle.dumps({"weights": Bomb()}, protocol=2))
    refused(feddg(*run, f"backbone.weights={bad}"), str(bad))
    assert not (tmp_path / "exploded").exists()


def test_a_record_cut_short_is_set_aside_and_made_again(
    feddg: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = ("run", "--scenario", "ip-o-c", *TINY)
    assert feddg(*run).code == 0
    (path,) = (tmp_path / "runs/runs").glob("*.json")
    whole = RunRecord.parse(path.read_bytes())
    path.write_bytes(path.read_bytes()[:200])
    caplog.clear()
    done = feddg(*run)
    assert done.code == 0, done.err
    assert "already done" not in done.err
    (message,) = caplog.messages
    assert f"{path.name} is set aside as {path.name}.broken" in message
    assert RunRecord.parse(path.read_bytes()).numbers() == whole.numbers()
    assert path.with_name(f"{path.name}.broken").stat().st_size == 200


def test_no_command_shows_the_help(feddg: Run) -> None:
    assert "tables" in feddg().err


# --------------------------------------------------------------------------- several at once


@pytest.mark.nightly
def test_several_methods_under_several_protocols(feddg):
    tiny = (*TINY, "--rounds", "1", "--results", "r")
    first = feddg("run", "--method", "fedavg", "--protocol", "lodo", *tiny, "--json")
    assert first.code == 0, first.err
    done = feddg("run", "--methods", "fedavg,erm", "--protocol", "ltdo,lodo", *tiny, "--json")
    assert done.code == 0, done.err
    assert done.err.count("already done") == 4
    answer = json.loads(done.out)
    titles = [table["title"] for table in answer["tables"]]
    assert titles == [
        f"{method} on Digits4, leave {number} out: accuracy in %"
        for number in ("two domains", "one domain")
        for method in ("FedAvg", "ERM")
    ]
    assert len(answer["runs"]) == 16
    assert [[row["method"] for row in t["rows"]] for t in answer["compared"]] == [
        ["fedavg", "erm"],
        ["fedavg", "erm"],
    ]


@pytest.mark.parametrize(
    ("kind", "clients"), [("domain", 2), ("per_domain", 4), ("heterogeneous", 100)]
)
def test_previews_count_the_clients_of_the_partition(feddg, kind, clients):
    asked = ("--scenario", "ip-o-c", "--rounds", "1", f"partition.kind={kind}", "clients=100")
    asked = (*asked, "data.image_size=8", "federation.per_round=null")
    planned = feddg("run", *asked, "--dry-run")
    assert f"1 pending run: {clients} local trainings (1 round x {clients} clients each)" in (
        planned.out + planned.err
    )
    assert f", 1 round, all of {clients} clients a round" in feddg("run", *asked).err


def test_several_methods_end_in_one_table_with_differences_to_the_first(feddg, tmp_path):
    run = ("run", "--method", "FedProx,FedAvg", *TINY, "--rounds", "1")
    done = feddg(*run)
    assert done.code == 0, done.err
    assert "setup: small CNN from scratch, 8 px, 1 round, 2 of 4 clients a round" in done.err
    assert "estimate: 8 runs in about " in done.err
    said = " ".join(done.out.split())
    assert "Digits4, leave two" in said
    assert ", mean over 4 scenarios: accuracy in % " in said
    assert "minus FedProx" in done.out
    assert done.out.splitlines()[-1] == "Each scenario: feddg-bench tables generic --results runs"
    (row,) = [line for line in done.out.splitlines() if line.startswith(" FedAvg ")]
    found: dict[tuple[str, str], list[float]] = {}
    for record in ResultsStore(tmp_path / "runs"):
        for split in ("val", "test"):  # both unseen domains
            (part,) = record.evaluation()[split].values()
            values = found.setdefault((record.method, record.scenario.name), [])
            values.append(100 * part["accuracy"])
    gaps = [
        np.mean(found["fedavg", s]) - np.mean(v) for (m, s), v in found.items() if m != "fedavg"
    ]
    half = 3.182446305284263 * np.std(gaps, ddof=1) / 2  # Student's t with 3 degrees of freedom
    low, high = np.mean(gaps) - half, np.mean(gaps) + half
    assert row.split()[-3:] == [f"{np.mean(gaps):+.2f}", f"[{low:+.2f},", f"{high:+.2f}]"]
    again = feddg(*run)
    assert again.out == done.out
    assert "estimate" not in again.err  # nothing is left to compute


def test_a_profile_of_real_images_measures_rounds_without_an_evaluation_too(feddg):
    """Recipe `quick` evaluates every tenth round, so only the last of three rounds is evaluated."""
    done = feddg("profile", "--clients", "4", "--per-round", "2", "data.image_size=8", "--json")
    assert done.code == 0, done.err
    measured = json.loads(done.out)
    assert measured["rounds"] == 3
    assert measured["round"]["evaluation"] > 0
    assert 0 < measured["share_of_peak"]["evaluation"] < 1


def test_profiles_side_by_side(feddg):
    one = ("--rounds", "1", "--clients", "4", "--per-round", "2", "--synthetic", "8")
    done = feddg("profile", "--methods", "fedavg,fedprox", *one, "--json")
    assert done.code == 0, done.err
    assert [p["method"] for p in json.loads(done.out)] == ["fedavg", "fedprox"]
    table = feddg("profile", "--methods", "fedavg,fedprox", *one)
    assert "FedProx" in table.out
    assert "x bare" in table.out


# ----------------------------------------------------------------------------------- cards


@pytest.mark.nightly
def test_a_card_counts_real_bytes(feddg):
    done = feddg("methods", "show", "pardon", "--backbone", "resnet18", "--json")
    assert done.code == 0, done.err
    card = json.loads(done.out)
    sent = {(m["direction"], m["call"]): m["items"] for m in card["messages"]}
    assert [item["bytes"] for item in sent["up", "local_style"]] == [24]
    (weights,) = sent["up", "fit"]
    floats = 11_176_512 + 512 * 10 + 10 + 9_600  # body, classifier, running statistics
    assert weights["bytes"] == 4 * floats + 8 * 20
    assert weights["tensors"]["weights.classifier.weight"] == "float32 [10, 512]"


def test_a_card_for_people(feddg):
    done = feddg("methods", "show", "fedprox", "hyper.mu=0.5")
    assert done.code == 0, done.err
    assert done.out.startswith("# fedprox\n\nFedProx (Li et al.")
    assert "- `hyper.mu` = `0.5`: Weight of the proximal term" in done.out
    assert "client → server, `fit`, each round, each sampled client" in done.out


def test_a_new_method_comes_with_the_way_to_install_and_test_it(feddg, tmp_path):
    done = feddg("methods", "new", "mine")
    assert done.code == 0, done.err
    assert "pip install -e 'mine[test]'; feddg-bench run --method mine; pytest mine" in done.out
    package = tomllib.loads((tmp_path / "mine" / "pyproject.toml").read_text())["project"]
    assert package["optional-dependencies"] == {"test": ["pytest"]}


def test_batches_of_one_image_end_in_one_message_that_names_the_settings(feddg):
    code, _, err = feddg(
        "run", "--scenario", "ip-o-c", "--rounds", "1", "--workers", "1", "train.batch_size=1",
        "backbone.name=resnet18", "backbone.pretrained=false",
    )  # fmt: skip
    assert code == 2
    assert "Traceback" not in err
    assert "batch of one image: set train.batch_size=2" in err
