"""``--wandb`` with the real W&B: offline runs are read back; unreachable servers; the agent."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from feddg_bench.cli.display import ConsoleReport
from feddg_bench.common.errors import RunInterruptedError
from feddg_bench.records.store import ResultsStore
from feddg_bench.sweeps.definition import Range, load_sweep
from feddg_bench.tracking import tracker as tracking
from feddg_bench.tracking.tracker import metrics, run_summary

pytestmark = pytest.mark.nightly

TINY = (
    "partition.clients=4", "per_round=2", "rounds=2", "evaluation.every=1", "data.image_size=8",
    "data.id_test_fraction=0.5", "data.id_val_fraction=0.3", "train.local_epochs=1",
    "train.batch_size=128",
)  # fmt: skip
RUN = ("run", "--workers", "1", "--scenario", "ip-o-c", *TINY)
SWEEP = Path(__file__).parents[2] / "sweeps/tune/fedavg.yaml"

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulate a user without an account; W&B neither finds nor changes settings."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)


def messages(path: Path) -> Iterator[Any]:
    """Yield the messages of a ``.wandb`` file: LevelDB's log format, blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # a header is never split
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a full record or its last part
            message = wandb_internal_pb2.Record()
            message.ParseFromString(whole)
            whole = b""
            yield message


class Offline:
    """One offline run, read back."""

    def __init__(self, folder: Path) -> None:
        (path,) = folder.glob("run-*.wandb")
        self.config: dict[str, Any] = {}
        self.history: dict[int, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        self.artifacts: list[Any] = []
        self.exit_code: int | None = None
        for message in messages(path):
            kind = message.WhichOneof("record_type")
            if kind == "run":
                self.run = message.run
                for item in message.run.config.update:
                    self.config[item.key] = json.loads(item.value_json)
            elif kind == "history":
                row = {name(item): json.loads(item.value_json) for item in message.history.item}
                self.history[row.pop("_step")] = {k: v for k, v in row.items() if k[0] != "_"}
            elif kind == "summary":
                for item in message.summary.update:
                    self.summary[name(item)] = json.loads(item.value_json)
            elif kind == "artifact":
                self.artifacts.append(message.artifact)
            elif kind == "exit":
                self.exit_code = message.exit.exit_code


def name(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def offline_runs(results: Path) -> list[Offline]:
    return [Offline(folder) for folder in sorted(results.glob("wandb/offline-run-*"))]


def test_offline_holds_what_the_records_hold(feddg: Run, tmp_path: Path) -> None:
    assert feddg(*RUN, "--results", "plain", "--seeds", "0").code == 0
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global state, which nothing may touch
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    done = feddg(*RUN, "--seeds", "0,1", "--wandb", "offline", "--wandb-project", "mine", "--json")
    assert done.code == 0, done.err
    after = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    assert str(after[:2]) == str(states[:2])
    assert torch.equal(after[2], states[2])
    assert len(json.loads(done.out)["runs"]) == 2
    assert done.err.count("wandb sync") == 1

    store = ResultsStore(tmp_path / "runs")
    found = {offline.run.run_id: offline for offline in offline_runs(store.root)}
    assert set(found) == {record.key for record in store}
    for record in store:
        offline = found[record.key]
        expected = record.settings | {"key": record.key, "recipe": "quick"}
        assert offline.config.items() >= expected.items()
        assert offline.history == {e.round: metrics(e) for e in record.rounds}
        assert offline.summary.items() >= run_summary(record).items()
        (artifact,) = offline.artifacts
        (content,) = artifact.manifest.contents
        assert (artifact.type, artifact.name) == ("record", f"record-{record.key}")
        assert Path(content.local_path) == store.path(record.key)
        assert content.size == store.path(record.key).stat().st_size
        assert offline.exit_code == 0
        assert offline.run.project == "mine"
        assert offline.run.display_name == f"fedavg digits4 ip-o-c seed {record.seed}"
        assert offline.run.run_group == "digits4 ltdo quick"
    (plain,) = ResultsStore(tmp_path / "plain")
    same = store.load(plain.key)
    assert same is not None
    assert same.numbers() == plain.numbers()


def test_a_stopped_run_goes_on_as_the_same_wandb_run(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        seen: list[int] = []

        def stop(_: object, __: object, result: Any) -> None:
            seen.append(result.round)
            if result.round == 2:
                raise RunInterruptedError(2)

        patch.setattr(ConsoleReport, "round", stop)
        stopped = feddg(*RUN, "--wandb", "offline")
    assert stopped.code == 130
    assert "--wandb offline --wandb-project feddg-bench" in stopped.err
    (first,) = offline_runs(tmp_path / "runs")
    assert (list(first.history), first.exit_code, first.artifacts) == ([1], 130, [])
    (checkpoint,) = (tmp_path / "runs/checkpoints").iterdir()
    done = feddg("resume", checkpoint.stem, "--workers", "1", "--wandb", "offline")
    assert done.code == 0, done.err
    again = offline_runs(tmp_path / "runs")[-1]
    assert again.run.run_id == first.run.run_id == checkpoint.stem
    (record,) = ResultsStore(tmp_path / "runs")
    assert again.history == {e.round: metrics(e) for e in record.rounds}
    assert again.exit_code == 0


def test_the_command_of_a_sweep_file_as_the_agent_calls_it(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wandb agent` fills in the file's command and names the run in the environment."""
    from wandb.sdk.launch.sweeps import utils

    point = {
        name: p.low if isinstance(p, Range) else p.values[0]
        for name, p in load_sweep(SWEEP).parameters.items()
    }
    layer = yaml.safe_load(SWEEP.read_text())
    values = {name: {"value": value} for name, value in point.items()}
    filled = utils.create_sweep_command_args({"args": values})
    filled |= {"program": [layer["program"]], "env": ["/usr/bin/env"]}
    words: list[str] = []
    for word in utils.create_sweep_command(layer["command"]):
        words += filled[word[2:-1]] if word.startswith("${") else [word]
    assert words[:5] == ["/usr/bin/env", "feddg-bench", "run", "--wandb", "online"]
    words[4] = "offline"
    chosen = tmp_path / "config.yaml"  # as the agent writes it
    chosen.write_text(yaml.safe_dump({"wandb_version": 1} | values))
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
    monkeypatch.setenv("WANDB_RUN_ID", "agent456")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(chosen))
    done = feddg(*words[2:], "--workers", "1", *TINY)
    assert done.code == 0, done.err
    (offline,) = offline_runs(tmp_path / "runs")
    assert (offline.run.run_id, offline.run.sweep_id, offline.run.project) == (
        "agent456", "sweep123", "theirs",
    )  # fmt: skip
    assert offline.config["train.lr"] == point["train.lr"] == offline.config["train"]["lr"]
    assert layer["metric"]["name"] in offline.summary


@pytest.mark.parametrize("how", ["refuses", "never answers"])
def test_online_without_a_server_is_kept_offline(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setattr(tracking, "INIT", 1.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if how == "never answers":
            server.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(tracking, "FINISH", 60.0)
        done = feddg(*RUN, "--wandb", "online", "--json")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["runs"]) == 1
    assert done.err.count("kept offline: ") == 1
    (record,) = ResultsStore(tmp_path / "runs")
    complete = [run for run in offline_runs(tmp_path / "runs") if run.exit_code == 0]
    (offline,) = complete
    assert offline.history == {e.round: metrics(e) for e in record.rounds}


def test_online_without_a_key_asks_nobody(feddg: Run, tmp_path: Path) -> None:
    done = feddg(*RUN, "--wandb", "online")
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    (said,) = [i for i, line in enumerate(lines) if "no API key is configured" in line]
    assert said < min(i for i, line in enumerate(lines) if "round 1/2" in line)
    (offline,) = offline_runs(tmp_path / "runs")
    assert sorted(offline.history) == [1, 2]
    assert not list((tmp_path / "home").glob("**/settings")), "W&B's settings stay the user's"


def test_a_sweep_tracks_its_runs(feddg: Run, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    parameters = {pair.split("=")[0]: {"value": pair.split("=")[1]} for pair in TINY}
    parameters["scenario"] = {"value": "ip-o-c"}
    layer = {"method": "grid", "command": ["feddg-bench", "run", "${args_no_hyphens}"]}
    file.write_text(yaml.safe_dump(layer | {"parameters": parameters}))
    done = feddg("sweep", file, "--workers", "1", "--wandb", "offline")
    assert done.code == 0, done.err
    assert done.err.count("wandb sync") == 1
    (record,) = ResultsStore(tmp_path / "runs")
    (offline,) = offline_runs(tmp_path / "runs")
    assert (offline.run.run_id, offline.exit_code) == (record.key, 0)


def test_the_service_of_an_active_run_of_a_notebook_is_not_shared(
    feddg: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B in a notebook passes its service to child processes; this service does not answer."""
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        port = service.getsockname()[1]
        monkeypatch.setenv("WANDB_SERVICE", f"3-{os.getpid()}-tcp-localhost-{port}")
        done = feddg(*RUN, "--wandb", "offline")
    assert done.code == 0, done.err
    (offline,) = offline_runs(tmp_path / "runs")
    assert offline.exit_code == 0
