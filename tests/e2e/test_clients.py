"""Label skew, accuracy per client and calibration, from the command line to tables, on Digits4."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddg_bench as fb
from feddg_bench.records.runs import metric_of, read_runs
from feddg_bench.records.store import ResultsStore

Run = Callable[..., Any]

SMALL = (
    *("--protocol", "lodo", "--scenario", "chalk", "--clients", 12, "--per-round", 6),
    *("--rounds", 2, "data.image_size=8", "evaluation.every=1"),
)


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("partition.kind=label_dirichlet partition.alpha=0.5", 10),
        ("partition.kind=label_shards", 2),
    ],
)
def test_label_skew_from_a_run_to_a_table_and_a_map(
    feddg: Run, tmp_path: Path, kind: str, most: int
) -> None:
    asked = ("partition.min_client_size=0", "classes_per_client=2", "lambda=0.3")
    own = (*kind.split(), *(asked if most == 2 else asked[::2]))
    done = feddg("run", "--method", "fedavg", *SMALL, *own, "--workers", 1)
    assert done.code == 0, done.err
    (record,) = ResultsStore(tmp_path / "runs")
    held = json.loads(
        (tmp_path / "runs/partitions" / f"{record.partition.hash[:16]}.json").read_text()
    )
    assert held["rule"]["kind"] == record.settings["partition"]["kind"]
    assert max(len(client["labels"]) for client in held["clients"]) <= most
    indices = [index for client in held["clients"] for index in client["indices"]]
    assert len(indices) == len(set(indices)) == sum(record.data.images["train"].values())

    tables = feddg("tables", "generic", "--out", "t")
    assert tables.code == 0, tables.err
    (notes,) = Path("t").glob("*.notes.md")
    assert ("2 classes per client" if most == 2 else "classes drawn with alpha=0.5") in (
        notes.read_text()
    )
    figure = ("figures", "partition", "--protocol", "lodo", "--scenario", "chalk", "--clients", 12)
    assert feddg(*figure, "data.image_size=8", *own, "--out", "f").code == 0
    by_domain, by_label = sorted(Path("f").glob("*.csv"), key=lambda path: len(path.name))
    assert by_label.name == f"{by_domain.stem}-by_label.csv"
    counts = {row["client"]: 0 for row in rows(by_label)}
    for row in rows(by_label):
        counts[row["client"]] += 1
    assert max(counts.values()) <= most
    assert sum(int(row["images"]) for row in rows(by_domain)) == len(indices)


class Stop(fb.Observer):
    """Stops a run after its first round, as Ctrl-C does."""

    def round(self, run: fb.Run, result: Any) -> None:
        if result.round == 1:
            raise KeyboardInterrupt


CLIENTS: dict[str, Any] = {
    "data.image_size": 8,
    "evaluation.every": 1,
    "data.client_test_fraction": 0.2,
    "federation.unseen_clients": 2,
    "train.local_epochs": 1,
}


@pytest.mark.nightly
def test_any_number_of_workers_and_a_resumed_run_agree(feddg: Run, tmp_path: Path) -> None:
    """FedBN's clients keep batch normalisation, and have models of their own."""
    pairs = CLIENTS | {
        "partition.kind": "label_dirichlet",
        "partition.alpha": 3,
        "train.drop_last_if_single": True,
        "backbone.name": "mobilenet_v2",
        "backbone.pretrained": False,
        "evaluation.metrics": ["ece", "auroc"],
    }
    given = [f"{name}={value}" for name, value in pairs.items()]
    asked = ("run", "--method", "fedbn", *SMALL[:10], *given)
    for folder, workers in (("one", 1), ("two", 2)):
        done = feddg(*asked, "--workers", workers, "--results", folder)
        assert done.code == 0, done.err
    with pytest.raises(KeyboardInterrupt):
        fb.run(
            "fedbn",
            protocol="lodo",
            scenario="chalk",
            settings={"clients": 12, "per_round": 6, "rounds": 2} | pairs,
            results=tmp_path / "stopped",
            checkpoint_every=1,
            observers=[Stop()],
            quiet=True,
        )
    assert feddg(*asked, "--results", "stopped").code == 0
    one, two, resumed = (
        next(iter(ResultsStore(tmp_path / name))) for name in ("one", "two", "stopped")
    )
    assert one.numbers() == two.numbers() == resumed.numbers()
    assert one.personal


def test_accuracy_of_clients_from_a_run_to_a_table(feddg: Run, tmp_path: Path) -> None:
    given = [f"{name}={value}" for name, value in CLIENTS.items()]
    run = ("run", "--method", "fedbn", *SMALL[:10], *given, "--workers", 1, "--results", "one")
    done = feddg(*run)
    assert done.code == 0, done.err
    (one,) = ResultsStore(tmp_path / "one")
    trained = {name for entry in one.rounds for name in entry.cohort}
    evaluation = one.evaluation()
    clients, unseen = evaluation["client_test"], evaluation["unseen_clients"]
    assert (len(clients), len(unseen)) == (10, 2)
    assert set(one.personal or {}) == trained
    assert trained <= set(clients)
    assert not trained & set(unseen)
    images = one.data.images
    for split in ("client_test", "unseen_clients"):
        assert images[split] == {name: m["images"] for name, m in evaluation[split].items()}
        assert all(
            set(measured) == {"accuracy", "images"} for measured in evaluation[split].values()
        )

    (read,) = read_runs(Path("one"))
    whole = read.evaluation("last") or {}
    expected = {"client": clients, "unseen_client": unseen, "personal": one.personal or {}}
    for prefix, parts in expected.items():
        values = sorted(part["accuracy"] for part in parts.values())
        summaries = {"mean": np.mean(values), "std": np.std(values), "worst": values[0]}
        for name, value in (summaries | {"worst_tenth": values[0]}).items():
            found = metric_of(read, whole, "test", f"{prefix}_{name}")
            assert found == pytest.approx(value), (prefix, name)
            assert metric_of(read, whole, "id_test", f"{prefix}_{name}") is None
    absent = feddg("tables", "generic", "--metric", "auroc", "--results", "one", "--out", "t")
    assert "no run has measured auroc: it needs evaluation.metrics=[auroc]" in absent.out
    for metric in ("client_mean", "personal_worst_tenth"):
        made = feddg("tables", "generic", "--metric", metric, "--results", "one", "--out", "t")
        assert made.code == 0, made.err
        (table,) = Path("t").glob(f"*-{metric}.csv")
        (cell,) = [row for row in rows(table) if row["kind"] == "measured"]
        assert float(cell["value"]) == pytest.approx(100 * metric_of(read, whole, "test", metric))


def test_calibration_from_a_run_to_a_table(feddg: Run, tmp_path: Path) -> None:
    asked = ("nll", "ece", "brier", "auroc", "balanced_accuracy")
    for more in ((), (f"evaluation.metrics=[{','.join(asked)}]",)):
        run = ("run", "--method", "fedavg", *SMALL, *more, "--results", f"r{len(more)}")
        assert feddg(*run, "--workers", 1).code == 0
    (plain,), (one,) = (ResultsStore(tmp_path / name) for name in ("r0", "r1"))
    assert plain.key != one.key
    whole = one.evaluation()["test"]["chalk"]
    assert set(whole) == {*plain.evaluation()["test"]["chalk"], *asked}
    assert whole["nll"] == pytest.approx(whole["loss"], rel=1e-5)
    for before, after in zip(plain.rounds, one.rounds, strict=True):
        for split, parts in (before.evaluation or {}).items():
            for domain, measured in parts.items():
                assert (after.evaluation or {})[split][domain].items() >= measured.items()

    for metric in ("ece", "nll"):
        made = feddg("tables", "generic", "--metric", metric, "--results", "r1", "--out", "t")
        assert made.code == 0, made.err
        (table,) = Path("t").glob(f"*-{metric}.csv")
        (cell,) = [row for row in rows(table) if row["kind"] == "measured"]
        shown = 100 * whole["ece"] if metric == "ece" else whole["nll"]
        assert float(cell["value"]) == pytest.approx(shown)
