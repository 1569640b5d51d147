"""``--logger`` and ``fb.run(logger=...)``: exact logs, resumed runs, and loggers that fail."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch.loggers
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

import feddg_bench as fb
from feddg_bench.common.errors import SettingsError
from feddg_bench.records.store import ResultsStore
from feddg_bench.tracking.tracker import metrics
from tests.helpers import one_sentence, refused

Run = Callable[..., Any]

TINY = {
    "partition.clients": 4, "per_round": 2, "rounds": 3, "evaluation.every": 2,
    "data.image_size": 8, "train.batch_size": 128,
}  # fmt: skip
PAIRS = [f"{key}={value}" for key, value in TINY.items()]
RUN = ("run", "--workers", "1", "--scenario", "ip-o-c", *PAIRS)
MOMENTS = ("__init__", "log_hyperparams", "log_metrics", "finalize")


class Stop(fb.Observer):
    """Ends a run after its second round."""

    def round(self, run: Any, result: Any) -> None:
        if result.round == 2:
            raise KeyboardInterrupt


@pytest.fixture
def made(tmp_path: Path, cache: Path) -> Run:
    """Return a function that makes one run of three rounds."""

    def run(**words: Any) -> Any:
        fixed = {"scenario": "ip-o-c", "settings": TINY, "cache_dir": cache, "quiet": True}
        (record,) = fb.run(**fixed | {"results": tmp_path / "runs"} | words)
        return record

    return run


def expected(record: Any) -> list[dict[str, float]]:
    """Return the rows of a record's log: step and metrics of each round."""
    return [{"step": entry.round, **metrics(entry)} for entry in record.rounds]


def csv_rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def tensorboard_rows(folder: Path) -> list[dict[str, float]]:
    reason = "tensorboard is not installed"
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason=reason
    )
    (path,) = folder.glob("events.*")
    reader = events.EventAccumulator(str(path))
    reader.Reload()
    rows: dict[int, dict[str, float]] = {}
    for name in reader.Tags()["scalars"]:
        for event in reader.Scalars(name):
            assert name not in rows.setdefault(event.step, {}), "a round appears twice"
            rows[event.step][name] = event.value
    return [{"step": step, **row} for step, row in rows.items()]


@pytest.mark.parametrize(
    ("kind", "rows", "precision"),
    [("csv", csv_rows, 0), ("tensorboard", tensorboard_rows, 1e-6)],  # it stores 32 bits
)
def test_a_log_holds_the_rounds_of_the_record(
    made: Run, tmp_path: Path, kind: str, rows: Any, precision: float
) -> None:
    if kind == "tensorboard":
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    plain = made(results=tmp_path / "plain")
    with pytest.raises(KeyboardInterrupt):
        made(logger=kind, observers=[Stop()], checkpoint_every=1)
    (folder,) = (tmp_path / "runs/logs" / kind).iterdir()
    assert [row["step"] for row in rows(folder)] == [1, 2]
    record = made(logger=[kind])  # from the checkpoint
    assert folder.name == record.key
    found = rows(folder)
    assert found == [pytest.approx(row, rel=precision, abs=0) for row in expected(record)]
    assert "test/chalk/accuracy" in found[1].keys() - found[0].keys()
    settings = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert settings["train"] == record.settings["train"]
    assert settings["key"] == record.key
    assert record.numbers() == plain.numbers()
    assert not {"logger", "logs"} & {*record.model_dump()}


def test_the_option_of_run_and_its_hint(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from feddg_bench.cli.display import ConsoleReport
    from feddg_bench.common.errors import RunInterruptedError

    def stop(_: object, __: object, result: Any) -> None:
        if result.round == 2:
            raise RunInterruptedError(2)

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleReport, "round", stop)
        stopped = feddg(*RUN, "--logger", "CSV", "--checkpoint-every", "1")
    assert stopped.code == 130
    (folder,) = (tmp_path / "runs/logs/csv").iterdir()
    assert f"feddg-bench resume {folder.name} --logger csv\n" in stopped.err
    assert [row["step"] for row in csv_rows(folder)] == [1]
    done = feddg("resume", folder.name, "--workers", "1", "--logger", "csv")
    assert done.code == 0, done.err
    (record,) = ResultsStore(tmp_path / "runs")
    assert csv_rows(folder) == expected(record)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_workers_of_a_sweep_log_their_runs(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")  # Lightning's loggers are silent but in process 0
    monkeypatch.setattr("lightning.fabric.utilities.rank_zero.rank_zero_only.rank", 1)
    parameters = {key: {"value": value} for key, value in TINY.items()}
    parameters |= {"scenario": {"value": "ip-o-c"}, "seed": {"values": [0, 1]}}
    command = ["feddg-bench", "run", "--logger", "csv", "${args_no_hyphens}"]
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps({"method": "grid", "command": command, "parameters": parameters}))
    done = feddg("sweep", file, "--workers", workers, "--logger", "csv")
    assert done.code == 0, done.err
    records = {record.key: record for record in ResultsStore(tmp_path / "runs")}
    assert len(records) == 2
    logs = {folder.name: csv_rows(folder) for folder in (tmp_path / "runs/logs/csv").iterdir()}
    assert logs == {key: expected(record) for key, record in records.items()}


@pytest.mark.parametrize(
    "moment", [MOMENTS[0], *(pytest.param(m, marks=pytest.mark.nightly) for m in MOMENTS[1:])]
)
def test_a_logger_that_fails_is_named_once_and_harms_nothing(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left\non device")

    monkeypatch.setattr(
        lightning.pytorch.loggers, "CSVLogger", type("Full", (CSVLogger,), {moment: fail})
    )
    done = feddg(*RUN, "--logger", "csv", "--seeds", "0,1")
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if "logger" in line]
    assert line.startswith(
        "the logger csv failed, and training goes on without it: OSError: No space left (test_log"
    )
    records = list(ResultsStore(tmp_path / "runs"))
    assert [len(record.rounds) for record in records] == [3, 3]


def test_a_logger_of_the_user(made: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise ValueError("you tried to log 1.5") from OSError("full")  # as TensorBoard's

    own = CSVLogger(tmp_path, name="own", version="one")
    record = made(logger=["csv", Broken(tmp_path, name="broken"), own])
    logs = [tmp_path / "own/one", tmp_path / "runs/logs/csv" / record.key]
    assert [csv_rows(folder) for folder in logs] == [expected(record)] * 2
    assert caplog.text.count("the logger Broken failed") == 1
    assert "without it: OSError: full\n" in caplog.text


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ({"logger": CSVLogger}, ("is no logger", "logger=CSVLogger('logs')")),
        ({"logger": ["csv", 3]}, ("3 is no logger",)),
        ({"logger": [CSVLogger("x")], "seeds": 2}, ("one run, and 2 are to do", "logger='csv'")),
        ({"logger": "tensorbord"}, ("tensorbord", "did you mean 'tensorboard'")),
    ],
)
def test_loggers_that_are_refused(made: Run, words: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused(SettingsError, *parts):
        made(**words)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("csv,aim", ("'aim'", "csv, mlflow, tensorboard")),
        ("wandb", ("--wandb offline",)),
        ("tensorboard", ("package tensorboard", "pip install 'feddg-bench[tensorboard]'")),
        ("csv,mlflow", ("package mlflow", "pip install 'feddg-bench[mlflow]'")),
        ("mlflow --logger csv", ("package mlflow",)),
    ],
)
def test_options_that_are_refused(
    feddg: Run, monkeypatch: pytest.MonkeyPatch, words: str, parts: tuple[str, ...]
) -> None:
    def find(name: str) -> Any:
        return None if name in ("tensorboard", "mlflow") else find_spec(name)

    from feddg_bench.config import schema

    find_spec = schema.find_spec
    monkeypatch.setattr(schema, "find_spec", find)
    for command in ("run", "sweep ltdo"):
        one_sentence(feddg(*command.split(), "--logger", *words.split()), *parts)
