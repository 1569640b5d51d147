"""``--device`` and ``--workers``: the devices of runs, and refusals before a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg_bench.common.errors import SettingsError
from feddg_bench.config.schema import GpuSettings, Resources
from feddg_bench.engine.devices import find_devices, open_executor
from feddg_bench.engine.executors import Executor, SerialExecutor
from feddg_bench.engine.gpu import check_gpus, placement, use_gpu
from feddg_bench.runs import outlook
from feddg_bench.runs.request import Request
from feddg_bench.testing import start_toy_run
from tests.helpers import pixel, same_on
from tests.standin.conftest import METHODS, UNCROPPED

ONE, TWO = "standin:0", "standin:1"
SMALL = ("data.image_size=16", "clients=60", "per_round=2", "evaluation.every=2", "rounds=2")
TINY = ("--scenario", "ip-o-c", *SMALL, "augment.crop_scale=null", "augment.flip=0")

KINDS = ("ccst", "fediir", "feddg_ga", "scaffold")
"""One method of each kind: messages before the first round, several calls in a round,
validation, client memory."""

pytestmark = pytest.mark.usefixtures("standin")


# ----------------------------------------------------------------------------- placement


@given(
    devices=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True),
    workers=st.integers(1, 40),
)
def test_workers_take_the_devices_in_turn(devices: list[str], workers: int) -> None:
    places = placement(devices, workers)
    assert len(places) == workers
    assert places[: len(devices)] == devices[:workers]
    counts = [places.count(device) for device in devices]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cpu", ["cpu"]),
        ("standin", [ONE, TWO]),
        (TWO, [TWO]),
        ("standin:1,0", [TWO, ONE]),
        ("standin:1,1", [TWO]),
    ],
)
def test_devices_by_name(name: str, found: list[str]) -> None:
    assert find_devices(name) == found


@pytest.mark.parametrize(
    "name",
    ["", "tpu", "meta", "cuda:", "cuda:x", "cuda:0,", "cuda:-1", "cpu:0", "cuda,0", "standin:2"],
)
def test_devices_that_are_not_here(name: str) -> None:
    with pytest.raises(SettingsError, match="device"):
        find_devices(name)


def test_one_device_or_one_worker_is_this_process() -> None:
    assert isinstance(open_executor(Resources(device=TWO)), SerialExecutor)
    assert isinstance(open_executor(Resources(device="standin", workers=1)), SerialExecutor)


# -------------------------------------------------------------------------------- models


def test_gpus_of_two_models_are_refused(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "names", ("Fast", "Slow"))
    with pytest.raises(SettingsError, match=r"Fast.*Slow.*--device standin:0"):
        check_gpus([ONE, TWO])
    check_gpus([ONE, ONE])


# ------------------------------------------------------------------------ how GPUs compute


@pytest.mark.parametrize("on", [False, True])
def test_settings_reach_pytorch(on: bool) -> None:
    device = torch.device(TWO)
    try:
        use_gpu(GpuSettings(tf32=on, autotune=on, deterministic=on), device)
        assert torch.backends.cuda.matmul.allow_tf32 is on
        assert torch.backends.cudnn.allow_tf32 is on
        assert torch.backends.cudnn.benchmark is on
        assert torch.are_deterministic_algorithms_enabled() is on
        assert torch.get_device_module(device).current_device() == 1
    finally:
        use_gpu(GpuSettings(), torch.device(ONE))


def test_a_worker_on_the_cpu_leaves_pytorch_alone() -> None:
    torch.use_deterministic_algorithms(False)
    start_toy_run("fedavg")
    assert not torch.are_deterministic_algorithms_enabled()
    start_toy_run("fedavg", device=ONE)
    assert torch.are_deterministic_algorithms_enabled()


# --------------------------------------------------------------------------- the command


def rounds(done: Any) -> list[Any]:
    """Return a record's rounds without seconds, and the device."""
    assert done.code == 0, done.err
    (file,) = json.loads(done.out)["files"]
    record = json.loads(Path(file).read_text())
    kept = ("round", "cohort", "evaluation", "train", "bytes", "dropped")
    return [{name: entry.get(name) for name in kept} for entry in record["rounds"]] + [
        record["environment"]["device"]
    ]


@pytest.mark.nightly
def test_two_processes_on_two_devices_compute_what_the_cpu_does(
    feddg: Callable[..., Any], standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one method of each kind in the command's two processes, which take long to start."""
    same: dict[str, bool] = {}

    def opened(resources: Resources) -> Executor:
        pool = open_executor(resources)
        assert pool.workers == standin.device_count()
        for name in KINDS:
            same[name] = same_on(pool, name, UNCROPPED, METHODS[name], rounds=1)
        return pool

    run = ("run", "--method", "fedccrl", "--json", *TINY)
    *expected, cpu = rounds(feddg(*run, "--device", "cpu", "--workers", "1"))
    monkeypatch.setattr("feddg_bench.runs.driver.open_executor", opened)
    *found, name = rounds(feddg(*run, "--device", "standin:1,0", "--results", "there"))
    assert same == dict.fromkeys(KINDS, True)
    assert found == expected
    assert (cpu, name) == ("cpu", "Stand-in")


@pytest.mark.nightly
def test_a_run_stopped_on_a_gpu_goes_on_elsewhere(
    feddg: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from feddg_bench.runs.recorder import Recorder

    run = ("run", "--method", "scaffold", "--json", *TINY, "--workers", "1")
    expected = rounds(feddg(*run, "--device", "cpu", "--results", "whole"))[:-1]
    saved = Recorder.round

    def stop(self: Any, state: Any, result: Any) -> None:
        saved(self, state, result)
        if result.round == 1:
            raise SettingsError("stopped here")

    monkeypatch.setattr(Recorder, "round", stop)
    assert feddg(*run, "--device", ONE).code == 2
    monkeypatch.setattr(Recorder, "round", saved)
    assert list((tmp_path / "runs" / "checkpoints").glob("*"))
    assert rounds(feddg(*run, "--device", TWO))[:-1] == expected


@pytest.mark.nightly
def test_a_profile_on_a_gpu_needs_no_data(feddg: Callable[..., Any]) -> None:
    tiny = ("backbone.name=small_cnn", "backbone.projection=0", "data.image_size=16", "clients=2")
    pacs = ("--dataset", "pacs", "--recipe", "pardon", "--synthetic", "4", "per_round=1")
    for arithmetic in ("gpu.tf32=true", "train.precision=bf16-mixed"):
        arguments = (*pacs, "--device", TWO, "backbone.pretrained=false", arithmetic)
        done = feddg("profile", "--rounds", "1", "--json", *arguments, *tiny)
        assert done.code == 0, done.err
        assert json.loads(done.out)["device"] == "Stand-in"
        assert json.loads(done.out)["peak_device_mib"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "standin:7"), ("standin:7", "2 STANDIN")),
        (("--device", "cuda:9"), ("cuda:9", "--device cpu")),
        (("--device", "cuda:0,x"), ("unknown device", "cuda:0,2")),
    ],
)
def test_a_wrong_device_is_refused_before_images_are_decoded(
    feddg: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "nothing"))
    done = feddg("run", *TINY, *arguments)
    assert done.code == 2
    assert done.err.count("feddg-bench: error:") == 1
    assert all(word in done.err for word in words), done.err
    assert not list((tmp_path / "nothing").rglob("*.npy"))
    assert "decoded" not in done.err


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        (
            ONE,
            {"hyper.style": "pixel", "evaluation.every": 1, "rounds": 9},
            "faster on this GPU, but the numbers change: gpu.tf32=true, "
            "train.precision=bf16-mixed, evaluation.every=5, hyper.transfer=cached",
        ),
        (
            ONE,
            {"hyper.style": "pixel", "hyper.transfer": "cached", "gpu.tf32": True, "rounds": 4},
            "faster on this GPU, but the numbers change: train.precision=bf16-mixed",
        ),
        (ONE, {"method": "fedavg", "train.precision": "bf16-mixed", "evaluation.every": 5}, None),
        ("cpu", {"hyper.style": "pixel"}, None),
    ],
    ids=str,
)
def test_settings_that_are_faster_on_a_gpu_are_named_and_not_taken(
    monkeypatch: pytest.MonkeyPatch, device: str, settings: dict[str, Any], said: str | None
) -> None:
    monkeypatch.setattr(outlook, "expected_seconds", lambda *_: 1.0)
    method, given = settings.get("method", "pardon"), {**settings}
    given.pop("method", None)
    here, there = (
        Request(method, scenario="ip-o-c", settings=given, resources=Resources(device=name))
        for name in (device, "cpu")
    )
    plans = here.plan(check=False)
    lines = list(outlook.outlook(plans, here.resources))
    assert lines[1:-1] == ([] if said is None else [said])
    assert [plan.key for plan in plans] == [plan.key for plan in there.plan(check=False)]


def test_portable_and_gpus_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match="portable"):
        start_toy_run("pardon", pixel(), {"portable": True}, device=ONE)
