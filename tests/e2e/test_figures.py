"""End-to-end tests of ``feddg-bench figures``."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from feddg_bench.analysis.figures.landscape import landscape_picture
from feddg_bench.analysis.figures.training import trained_runs
from feddg_bench.config.schema import Resources
from feddg_bench.data.partition import heterogeneous_counts
from feddg_bench.plugins import method_title
from feddg_bench.records.record import RunRecord
from feddg_bench.runs.observer import Observer
from feddg_bench.runs.request import Request

pytestmark = pytest.mark.nightly

TINY = (
    *("--clients", "4", "--per-round", "2", "--workers", "1"),
    *("data.image_size=8", "data.id_test_fraction=0.5", "data.id_val_fraction=0.3"),
)


Run = Callable[..., Any]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def pictures(folder: Path) -> list[str]:
    """Return the stems of the PNG files; assert that none is blank and that there is no PDF."""
    stems = sorted(path.stem for path in folder.glob("*.png"))
    assert not list(folder.glob("*.pdf"))
    for stem in stems:
        with Image.open(folder / f"{stem}.png") as image:
            assert np.asarray(image.convert("L")).std() > 5
    return stems


def test_all_draws_what_records_are_enough_for(feddg: Run) -> None:
    for value in ("0", "1"):
        done = feddg(
            "run", "--method", "fedavg,fedprox", "--scenario", "ip-o-c", "--rounds", "2", "--json",
            "--lambda", value, *TINY, "evaluation.every=1",
        )  # fmt: skip
        assert done.code == 0
    done = feddg("figures", "all")
    assert (done.code, done.err) == (0, "")
    assert pictures(Path("runs/figures")) == [
        "convergence-digits4-ltdo-quick-lambda-0",
        "convergence-digits4-ltdo-quick-lambda-1",
        "generalisation-digits4-ltdo-quick-lambda-0",
        "generalisation-digits4-ltdo-quick-lambda-1",
        "lambda-digits4-ltdo-quick",
        "leaderboard-digits4-ltdo-quick-lambda-0",
        "leaderboard-digits4-ltdo-quick-lambda-1",
        "overhead-digits4-ltdo-quick-lambda-0",
        "overhead-digits4-ltdo-quick-lambda-1",
    ]
    assert done.out.count("a profile needs 3 runs") == 2
    assert done.out.count("ranks: needs two methods on at least two data sets") == 1
    assert done.out.count("clients: the records hold no two values of K/N") == 1
    records = [RunRecord.parse(path.read_bytes()) for path in Path("runs/runs").glob("*.json")]
    expected = {
        (method_title(r.method), f"{r.settings['partition']['heterogeneity']:g}"): 100
        * fmean(
            r.rounds[-1].evaluation[split][domain]["accuracy"]
            for split, domain in (("val", "outline"), ("test", "chalk"))
        )
        for r in records
    }
    found = rows(Path("runs/figures/lambda-digits4-ltdo-quick.csv"))
    assert {(row["series"], row["lambda"]): float(row["mean"]) for row in found} == pytest.approx(
        expected, abs=1e-5
    )
    before = Path("runs/figures/lambda-digits4-ltdo-quick.csv").read_bytes()
    more = ("--method", "fedavg,fedprox", "--format", "pdf")
    assert feddg("figures", "lambda", *more).code == 0
    named = Path("runs/figures/lambda-digits4-ltdo-quick-fedavg-fedprox.pdf")
    assert named.read_bytes().startswith(b"%PDF")
    assert named.with_suffix(".csv").read_bytes() == before
    assert not named.with_suffix(".png").exists()
    drawn = feddg("figures", "lambda", "--dataset", "all", "--method", "all", "--scenario", "all")
    assert drawn.code == 0, drawn.err
    assert Path("runs/figures/lambda-digits4-ltdo-quick.csv").read_bytes() == before


def test_a_figure_that_records_are_not_enough_for_says_what_is_missing(feddg: Run) -> None:
    run = ("run", "--scenario", "ip-o-c", "--rounds", "1", *TINY)
    assert feddg(*run).code == 0
    for name, words in {
        "noise": "needs 5 seeds of a method on a scenario",
        "utility": "no method is recorded under two noises",
        "ranks": "needs two methods on at least two data sets",
        "profiles": "a profile needs 3 runs",
        "clients": "no two values of K/N",
    }.items():
        done = feddg("figures", name)
        assert done.code == 2
        assert words in done.err
        assert "Traceback" not in done.err
    assert not Path("runs/figures").exists()
    assert feddg("figures", "all").code == 0


def test_partitions_are_those_of_a_run(feddg: Run) -> None:
    figure = ("figures", "partition", "data.image_size=8")
    done = feddg(*figure, "--clients", 6, "--lambda", "0,0.5", "--out", "f")
    assert done.code == 0
    (stem,) = pictures(Path("f"))
    assert stem == "partition-digits4-ltdo-oc-i-p-heterogeneous-6"
    found = rows(Path("f", f"{stem}.csv"))
    for value in (0, 0.5):
        mine = [row for row in found if row["partition"].endswith(f"= {value:g}")]
        counts = np.zeros((6, 2), dtype=int)
        for row in mine:
            counts[int(row["client"]), ("outline", "chalk").index(row["domain"])] = int(
                row["images"]
            )
        expected = heterogeneous_counts(counts.sum(axis=0), 6, value)
        assert counts.tolist() == expected.tolist()
    assert feddg(*figure, "--out", "g").code == 0
    domains = rows(Path("g", "partition-digits4-ltdo-oc-i-p-heterogeneous-20.csv"))
    assert feddg(*figure, "--by", "label", "--out", "g").code == 0
    labels = rows(Path("g", "partition-digits4-ltdo-oc-i-p-heterogeneous-20-by_label.csv"))
    held = {(row["client"], row["label"]): int(row["images"]) for row in labels}
    assert len(held) == len(labels) <= 20 * 10
    assert min(held.values()) > 0
    assert sum(held.values()) == sum(map(int, (row["images"] for row in domains)))
    assert sum(int(row["images"]) for row in labels) == counts.sum()
    assert not Path("runs").exists()  # only the figure is written


def test_models_are_those_of_the_same_run(feddg: Run, tmp_path: Path, cache: Path) -> None:
    pairs = ["evaluation.every=1", "partition.clients=12", "federation.per_round=2"]
    pairs += ["data.image_size=8"]
    wanted = ("--rounds", 2, "--scenario", "ip-o-c", "--workers", 1)
    assert feddg("run", *wanted, "--json", *pairs).code == 0
    (path,) = (tmp_path / "runs" / "runs").glob("*.json")
    resources = Resources(cache_dir=cache, workers=1, results=tmp_path / "runs")
    flags = {"scenario": "ip-o-c", "rounds": 2}
    (plan,) = Request.read(flags=flags, pairs=pairs, resources=resources).plan()
    (trained,) = trained_runs([plan], resources, "0,2")
    assert plan.key == path.stem
    model = trained.load(trained.models[2])
    for split, domain, index in trained.federation.evaluation:
        images, labels = trained.images(index)
        with torch.no_grad():
            loss = F.cross_entropy(model(images), labels)
        recorded = RunRecord.parse(path.read_bytes()).rounds[-1].evaluation[split][domain]["loss"]
        assert float(loss) == pytest.approx(recorded, rel=1e-4)
    start = trained.models[0]
    assert any(not torch.equal(start[n], w) for n, w in trained.models[2].items())

    # the landscape's corners are the three models' losses on the clients' own images
    one, other = sorted(trained.updates)
    picture = landscape_picture([trained], (), count=10_000, steps=5)
    assert picture.numbers is not None
    rows = picture.numbers.itertuples(index=False, name=None)
    found = {(row[1], row[2], row[3]): row[4] for row in rows}
    corners = {(0.0, 0.0): trained.before, (1.0, 0.0): trained.updates[one]}
    corners[0.0, 1.0] = trained.updates[other]
    for client in (one, other):
        images, labels = trained.images(trained.federation.clients[client])
        for (x, y), weights in corners.items():
            with torch.no_grad():
                loss = F.cross_entropy(trained.load(weights)(images), labels)
            assert found[client, x, y] == pytest.approx(float(loss), rel=1e-4)
    assert len({round(v, 3) for v in found.values()}) > 10

    # a kept model is used, and nothing is trained
    class NoRounds(Observer):
        def begin(self, run: Any) -> None:
            raise AssertionError("it trains")

    assert feddg("run", *wanted, "--keep", "last", "--json", *pairs).code == 0
    (kept,) = trained_runs([plan], resources, None, NoRounds())
    for name, weights in trained.models[2].items():
        assert torch.equal(kept.models[2][name], weights)
    (stepped,) = trained_runs([plan], resources, None, updates=True)
    assert len(stepped.updates) == 2
    assert all(torch.equal(stepped.before[n], w) for n, w in trained.models[2].items())


def test_figures_of_trained_models(feddg: Run) -> None:
    out = ("--out", "f", *TINY)
    for arguments in (
        ("tsne", "--method", "fedsr", "--rounds", 1, "--at", "0,1", "--images", 4),
        ("gradcam", "--method", "fedavg,copa", "--rounds", 1, "--images", 1),
        ("landscape", "--rounds", 1, "--images", 8, "--steps", 5),
    ):
        done = feddg("figures", *arguments, *out)
        assert done.code == 0, done.err
    done = feddg("figures", "styles", "--images", 1, *TINY, "--results", "r")
    assert done.code == 0, done.err
    assert pictures(Path("r/figures")) == ["styles-digits4-ltdo-oc-i-p-pardon-ccst-fedccrl"]
    assert pictures(Path("f")) == [
        "gradcam-digits4-ltdo-oc-i-p-fedavg-copa",
        "landscape-digits4-ltdo-oc-i-p-fedavg",
        "tsne-digits4-ltdo-oc-i-p-fedsr",
    ]
    placed = rows(Path("f", "tsne-digits4-ltdo-oc-i-p-fedsr.csv"))
    assert {row["model"] for row in placed} == {"FedSR, round 0", "FedSR, round 1"}
    assert len(placed) == 2 * 4 * 4  # models, domains, images
    before = {path.name: path.read_bytes() for path in Path("f").iterdir()}
    assert feddg("figures", "landscape", "--rounds", 1, "--images", 8, "--steps", 5, *out).code == 0
    assert before == {path.name: path.read_bytes() for path in Path("f").iterdir()}


def test_a_method_that_restyles_nothing_under_its_settings_is_refused(feddg: Run) -> None:
    done = feddg("figures", "styles", "--method", "pardon", "hyper.ablation=v4", *TINY)
    assert done.code == 2
    assert "pardon, with these settings, restyles no images" in done.err
