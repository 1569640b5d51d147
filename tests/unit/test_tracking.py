"""Data sent to W&B, and training that is unaffected by any failure of W&B."""

from __future__ import annotations

import importlib.machinery
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from feddg_bench.common.errors import RunInterruptedError, SettingsError
from feddg_bench.config.schema import Resources
from feddg_bench.records.record import RoundRecord, RunRecord
from feddg_bench.records.store import ResultsStore
from feddg_bench.tracking import tracker as tracking
from feddg_bench.tracking.tracker import Tracker, metrics, run_summary
from tests.helpers import entry, make_record, refused

FAKE = """
import json, os, time

def did(moment, **values):
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps({"moment": moment, **values}) + "\\n")
    if moment == os.environ.get("FAKE_MOMENT"):
        how = os.environ["FAKE_HOW"]
        if how == "raise":
            raise ValueError(f"{moment} broke\\nand more")
        if how == "die":
            os._exit(7)
        if how == "print":
            os.write(1, b"not JSON")
        else:
            time.sleep(60)

did("import")

class Settings:
    model_fields = {name: None for name in ("silent", "init_timeout", "stop_fn")}
    def __init__(self, **values):
        assert set(values) <= set(self.model_fields)

class Artifact:
    def __init__(self, name, type):
        self.name = f"{type} {name}"
    def add_file(self, path, **how):
        self.content = json.load(open(path))

class Run:
    dir = "/somewhere/wandb/run-1/files"
    url = "https://wandb.example/run"
    @property
    def summary(self):
        return self
    def update(self, values):
        did("summary", values=values)
    def log(self, values, step, commit):
        assert commit
        did("log", values=values, step=step)
    def log_artifact(self, artifact):
        did("artifact", name=artifact.name, key=artifact.content["key"])
    def finish(self, exit_code):
        did("finish", exit_code=exit_code)

def init(settings, **values):
    did("init", **values)
    if values["mode"] == "online" and os.environ.get("FAKE_SERVER") == "away":
        raise TimeoutError("server is away")
    return Run()

def setup(settings):
    pass

def teardown():
    did("teardown")

def login(prompt, verify):
    assert not prompt and not verify
    return "FAKE_KEY" in os.environ
"""


def a_round(number: int, val: float, id_val: float, test: float) -> RoundRecord:
    def one(domain: str, accuracy: float, images: int) -> dict[str, dict[str, float]]:
        return {domain: {"accuracy": accuracy, "loss": 1 - accuracy, "images": images}}

    values = entry(
        number,
        {
            "val": one("o", val, 30),
            "id_val": one("i", id_val, 10) | one("p", 0.0, 30),
            "test": one("c", test, 30),
        },
        train={"loss": 2.5},
        bytes={"up": 10, "down": 20},
        dropped=[{"client": "client_0", "tensor": "w"}],
        seconds={"training": 0.5, "evaluation": 0.25},
        cohort=["client_0"],
    )
    return RoundRecord.model_validate(values)


@pytest.fixture
def record() -> RunRecord:
    """Return a record of three rounds: 1 is the best by val, 3 by id_val, 2 on test images."""
    values = ((1, 0.5, 0.5, 0.1), (2, 0.25, 0.5, 0.9), (3, 0.5, 0.75, 0.2))
    return make_record(
        {"seed": 3},
        domains=(("i", "p"), "o", "c"),
        key="00ff",
        settings={},
        once={"seconds": {"aggregation": 0.125}, "bytes": {"up": 1, "down": 2}},
        rounds=[a_round(*row) for row in values],
    )


PLAN: Any = SimpleNamespace(canonical={"train": {"lr": 0.1}}, recipe="quick", key="00ff", version=1)


class World:
    """A tracker with a fake W&B that fails on demand, and the messages of both."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.write_text("")
        self.said: list[str] = []
        (folder / "fake/wandb").mkdir(parents=True)
        (folder / "fake/wandb/__init__.py").write_text(FAKE)
        monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))
        monkeypatch.setenv("FAKE_LOG", str(self.log))
        monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)

    def tracker(self, mode: str = "offline") -> Tracker:
        where = {"wandb": mode, "results": self.folder / "results"}
        where |= {"wandb_project": "mine"} if mode != "off" else {}
        return Tracker(Resources.model_validate(where), self.said.append)

    def did(self, *moments: str) -> list[dict[str, Any]]:
        calls = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [call for call in calls if not moments or call["moment"] in moments]

    def run(self, tracker: Tracker, record: RunRecord) -> None:
        """Call the tracker as a run does."""
        ResultsStore(self.folder / "results").save(record)
        rounds, record = record.rounds, record.model_copy(update={"rounds": []})
        run = SimpleNamespace(plan=PLAN, record=record)
        tracker.begin(run)
        for number in rounds:
            record.rounds.append(number)
            tracker.round(run, SimpleNamespace(round=number))
        tracker.end(run)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_metrics_of_a_round() -> None:
    assert metrics(a_round(1, 0.5, 0.5, 0.25)) == {
        "train/loss": 2.5,
        "seconds/training": 0.5,
        "seconds/evaluation": 0.25,
        "bytes/up": 10,
        "bytes/down": 20,
        "dropped": 1,
        "skipped": 0,
        "val/o/accuracy": 0.5,
        "val/accuracy": 0.5,
        "val/o/loss": 0.5,
        "val/loss": 0.5,
        "id_val/i/accuracy": 0.5,
        "id_val/p/accuracy": 0.0,
        "id_val/accuracy": 0.125,
        "id_val/i/loss": 0.5,
        "id_val/p/loss": 1.0,
        "id_val/loss": 0.875,
        "test/c/accuracy": 0.25,
        "test/accuracy": 0.25,
        "test/c/loss": 0.75,
        "test/loss": 0.75,
    }
    assert not any(
        "/accuracy" in name
        for name in metrics(a_round(1, 0, 0, 0).model_copy(update={"evaluation": None}))
    )


def test_a_loss_that_overflowed_is_left_out() -> None:
    overflowed = a_round(1, 0.5, 0.5, 0.25)
    overflowed.evaluation["id_val"]["p"]["loss"] = math.nan
    found = metrics(overflowed)
    assert set(metrics(a_round(1, 0.5, 0.5, 0.25))) - set(found) == {"id_val/p/loss", "id_val/loss"}


def test_summary_by_selection_rule_never_by_test_images(record: RunRecord) -> None:
    found = run_summary(record)
    assert [found[f"{rule}/round"] for rule in ("last", "best_by_val", "best_by_id_val")] == [
        3,
        1,
        3,
    ]
    assert found["best_by_val/test/accuracy"] == 0.1
    assert found["best_by_id_val/test/c/accuracy"] == found["last/test/accuracy"] == 0.2
    assert not any("oracle" in name for name in found)
    assert found["mean_last_5/test/accuracy"] == pytest.approx(
        statistics.fmean(e.evaluation["test"]["c"]["accuracy"] for e in record.rounds)
    )
    assert found["best_by_val/test/loss"] == 0.9
    assert not any(name.endswith("accuracy") and v == 0.9 for name, v in found.items())
    assert found["once/seconds/aggregation"] == 0.125
    for number in record.rounds:
        del number.evaluation["val"]
    assert not any(name.startswith("best_by_val") for name in run_summary(record))


def test_a_regression_is_told_by_its_own_metric(record: RunRecord) -> None:
    record.data.task, record.data.metric = "regression", "pearson"
    correlations = {1: (0.1, 0.5), 2: (0.75, 0.25), 3: (-0.5, 0.125)}  # of val, of test
    for number in record.rounds:
        val, test = correlations[number.round]
        part = {"loss": 1.0, "images": 4, "worst_group": 0.0, "worst_group_name": "rural"}
        number.evaluation = {
            "val": {"o": {"pearson": val, **part}},
            "test": {name: {"pearson": test, **part} for name in ("c", "all")},
        }
    found = run_summary(record)
    assert found["best_by_val/round"] == 2
    assert found["best_by_val/test/pearson"] == found["best_by_val/test/c/pearson"] == 0.25
    assert found["last/val/o/worst_group"] == found["last/val/worst_group"] == 0.0
    assert all(isinstance(value, int | float) for value in found.values())


def test_a_run_is_told_in_order(world: World, record: RunRecord) -> None:
    world.run(world.tracker(), record)
    calls = world.did()
    assert [call["moment"] for call in calls] == [
        "import", "init", "log", "log", "log", "summary", "artifact", "finish", "teardown",
    ]  # fmt: skip
    assert [call["step"] for call in calls[2:5]] == [1, 2, 3]
    assert calls[4]["values"] == metrics(record.rounds[2])
    assert calls[5]["values"] == run_summary(record)
    assert calls[6]["name"] == "record record-00ff"
    assert calls[7]["exit_code"] == 0
    start = calls[1]
    assert (start["id"], start["project"], start["mode"], start["resume"]) == (
        "00ff", "mine", "offline", "allow",
    )  # fmt: skip
    assert start["name"] == "fedavg digits4 ip-o-c seed 3"
    assert start["group"] == "digits4 ltdo quick"
    assert start["config"]["train"] == {"lr": 0.1}
    assert start["config"]["key"] == "00ff"
    assert world.said == [
        "W&B offline: send it later with: wandb sync /somewhere/wandb/offline-run-*"
    ]


def test_a_run_that_goes_on_is_told_from_its_first_round(world: World, record: RunRecord) -> None:
    tracker, run = world.tracker(), SimpleNamespace(plan=PLAN, record=record)
    tracker.begin(run)
    tracker.end(run)
    assert [call["step"] for call in world.did("log")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("moment", "how"),
    [(m, "raise") for m in ("import", "init", "log", "summary", "artifact", "finish")]
    + [(m, how) for how in ("hang", "die") for m in ("init", "log", "finish")],
)
def test_failing_is_said_once_and_harms_nothing(
    world: World, record: RunRecord, monkeypatch: pytest.MonkeyPatch, moment: str, how: str
) -> None:
    monkeypatch.setenv("FAKE_MOMENT", moment)
    monkeypatch.setenv("FAKE_HOW", how)
    if how == "hang":
        for name in ("INIT", "FINISH", "MARGIN"):
            monkeypatch.setattr(tracking, name, 0.3)
    started = time.monotonic()
    tracker = world.tracker()
    world.run(tracker, record)
    assert tracker._process is None
    failed = [text for text in world.said if "W&B failed" in text]
    (text,) = failed
    assert "fedavg digits4 ip-o-c seed 3 goes on without it" in text
    why = {"raise": f"ValueError: {moment} broke", "hang": "no answer within", "die": "ended"}
    assert why[how] in text
    assert "\n" not in text
    if how == "raise" and moment in ("summary", "artifact"):
        assert world.did("finish"), "what was logged must not be left open"
    if how != "hang":
        world.run(tracker, record)  # the next run tries again, silently
        assert len(world.did("import")) == 2
    else:
        world.run(tracker, record)
        assert len(world.did("import")) < 2, "W&B that hangs is left alone"
    assert [text for text in world.said if "W&B failed" in text] == failed
    assert time.monotonic() - started < 20


def test_prints_of_wandb_go_nowhere(
    world: World,
    record: RunRecord,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKE_MOMENT", "log")
    monkeypatch.setenv("FAKE_HOW", "print")
    world.run(world.tracker(), record)
    assert len(world.did("log", "finish")) == 4
    assert capfd.readouterr() == ("", "")


def test_online_with_a_key(
    world: World, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_KEY", "1")
    world.run(world.tracker("online"), record)
    assert [call["mode"] for call in world.did("init")] == ["online"]
    assert world.said == ["fedavg digits4 ip-o-c seed 3: https://wandb.example/run"]


@pytest.mark.parametrize("away", ["no key", "no server"])
def test_online_that_is_not_possible_is_offline_from_then_on(
    world: World, record: RunRecord, monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    if away == "no server":
        monkeypatch.setenv("FAKE_KEY", "1")
        monkeypatch.setenv("FAKE_SERVER", "away")
    tracker = world.tracker("online")
    world.run(tracker, record)
    world.run(tracker, record)
    tried = ["online", "offline"] if away == "no server" else ["offline"]
    assert [call["mode"] for call in world.did("init")] == [*tried, "offline"]
    assert len(world.did("log")) == 6
    why = "TimeoutError: server is away" if away == "no server" else "no API key is configured"
    assert sum(why in text for text in world.said) == 1
    assert len(world.said) == 2  # and how to send it later


def test_a_missing_key_is_said_before_training_begins(world: World, record: RunRecord) -> None:
    tracker, run = world.tracker("online"), SimpleNamespace(plan=PLAN, record=record)
    tracker.begin(run)
    assert "no API key is configured" in world.said[0]
    tracker.stopped(run)


@pytest.mark.parametrize(
    ("error", "code"), [(RunInterruptedError(2), 130), (ValueError("diverged"), 1)]
)
def test_a_run_that_stops_is_ended_as_such(
    world: World, record: RunRecord, error: BaseException, code: int
) -> None:
    tracker, run = world.tracker(), SimpleNamespace(plan=PLAN, record=record)
    tracker.begin(run)
    try:
        raise error
    except type(error):
        tracker.stopped(run)
    (finish,) = world.did("finish")
    assert finish["exit_code"] == code
    assert not world.did("artifact")


def test_the_agents_run_is_joined_and_only_one(
    world: World, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    tracker = world.tracker()
    tracker.already(PLAN, record)  # the agent waits for the numbers of a recorded run too
    world.run(tracker, record)
    (start,) = world.did("init")
    assert not {"id", "project", "entity", "resume"} & set(start)
    assert len(world.did("log")) == 3
    assert sum("only the first is tracked" in text for text in world.said) == 1


def test_a_recorded_run_is_not_told_again(world: World, record: RunRecord) -> None:
    world.tracker().already(PLAN, record)
    assert not world.did()


def test_off_does_nothing(world: World, record: RunRecord) -> None:
    world.run(world.tracker("off"), record)
    assert (world.did(), world.said) == ([], [])


@pytest.mark.parametrize(
    "found", [None, importlib.machinery.ModuleSpec("wandb", None, is_package=True)]
)
def test_without_the_package_it_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, found: object
) -> None:
    """The second case is a folder `wandb` in which W&B stored runs."""
    find: Callable[[str], object] = lambda _: found  # noqa: E731
    monkeypatch.setattr(tracking.importlib.util, "find_spec", find)
    world.tracker("off")
    with refused(SettingsError, "pip install wandb"):
        world.tracker("offline")


def test_no_process_to_be_had(
    world: World, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(tracking.subprocess, "Popen", full)
    world.run(world.tracker(), record)
    (text,) = world.said
    assert "Resource temporarily unavailable" in text
