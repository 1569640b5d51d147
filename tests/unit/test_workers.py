"""Clients that raise, hang, write into what they receive, or kill their process."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import closing
from multiprocessing import Pipe, current_process
from pathlib import Path

import numpy as np
import pytest
import torch

from feddg_bench.common.errors import (
    FeddgError,
    PluginError,
    SettingsError,
    WorkerDeathError,
    told,
)
from feddg_bench.common.parallel import start_process
from feddg_bench.config.schema import Resources
from feddg_bench.core.messages import Task, encode
from feddg_bench.engine.devices import open_executor
from feddg_bench.engine.executors import (
    ProcessExecutor,
    SerialExecutor,
)
from feddg_bench.engine.worker import _fabric
from feddg_bench.testing import start_toy_run
from feddg_methods.fedavg import FedAvg
from tests.helpers import refused

ALL = {"federation": {"per_round": None}}
MARK = "FEDDG_TEST_MARK"
"""Environment variable with the path of a file that marks that something already happened."""


class Writing(FedAvg):
    """Writes into everything that its clients receive, after they have used it."""

    downlink = ("style", "mine")

    def run_round(self, server):
        server.broadcast["style"] = {"mean": torch.ones(2), "list": [torch.ones(1)]}
        tell = {name: {"mine": torch.ones(1)} for name in server.cohort}
        server.weights = self.aggregate(server, server.ask(self.fit, tell=tell))

    def fit(self, client):
        update = super().fit(client)
        for name in client.weights:
            client.weights[name].zero_()
        client.broadcast["style"]["mean"].zero_()
        client.broadcast["style"]["list"].clear()
        client.broadcast["mine"].zero_()
        client.domain_ids.zero_()
        return update


class Reading(Writing):
    """The same without writing."""

    fit = FedAvg.fit


class Raising(FedAvg):
    """Raises at one client."""

    def fit(self, client):
        if client.name == "client_2":
            raise ValueError("no luck\nwith a second line")
        return super().fit(client)


class Unportable(Exception):  # noqa: N818
    """Cannot be pickled: its constructor takes other arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class RaisingUnportable(FedAvg):
    """Raises what cannot be sent to another process."""

    def fit(self, client):
        raise Unportable("no", "way")


class Exiting(FedAvg):
    """Tries to end its process."""

    def fit(self, client):
        raise SystemExit(3)


class Dying(FedAvg):
    """Kills its process at one client, once or always."""

    always = False

    def fit(self, client):
        if client.name == "client_1" and client.round == 2:
            mark = Path(os.environ[MARK])
            if self.always or not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(client)


class AlwaysDying(Dying):
    always = True


@pytest.fixture
def two(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    executor = ProcessExecutor(2)
    yield executor
    executor.close()


def test_what_a_client_gets_is_its_own():
    """Nothing that it writes reaches the server, another client or a later round."""
    run, other = start_toy_run(Writing, ALL), start_toy_run(Reading, ALL)
    run.rounds(2)
    other.rounds(2)
    assert run.server.broadcast["style"]["mean"].tolist() == [1, 1]
    assert len(run.server.broadcast["style"]["list"]) == 1
    assert encode(run.server.state()) == encode(other.server.state())


@pytest.mark.nightly
def test_what_a_client_gets_is_its_own_in_processes(two):
    here, there = start_toy_run(Writing, ALL), start_toy_run(Writing, ALL, executor=two)
    here.rounds(2)
    there.rounds(2)
    assert encode(here.server.state()) == encode(there.server.state())


def test_an_exception_names_client_round_and_call():
    with pytest.raises(ValueError, match="no luck") as caught:
        start_toy_run(Raising, ALL).rounds(1)
    assert caught.value.__notes__ == ["client_2, round 1, fit"]
    assert caught.traceback[-1].path.name == "test_workers.py"


class Losing(FedAvg):
    """Returns no loss, or one number per image."""

    each = False

    def training_step(self, batch, batch_idx):
        return self(batch[0]).mean(1) if self.each else None


class LosingEach(Losing):
    each = True


@pytest.mark.parametrize(
    ("plugin", "found"), [(Losing, "returned nothing"), (LosingEach, "returned float32 [8]")]
)
def test_a_training_step_without_a_loss(plugin, found):
    with refused(PluginError, f"training_step of {plugin.__name__} {found}; expected the loss"):
        start_toy_run(plugin, ALL).rounds(1)


class Noisy(FedAvg):
    """Its server adds noise in the form of the weights."""

    def aggregate(self, server, updates):
        return {n: w + torch.randn_like(w) for n, w in super().aggregate(server, updates).items()}


def test_layouts_of_weights_do_not_change_what_a_server_draws():
    """Models are channels-last where they train; weights from another process are contiguous."""
    settings = {"backbone": {"name": "small_cnn"}, "train": {"channels_last": True}}
    run = start_toy_run(Noisy, settings | ALL)
    run.rounds(1)
    found = run.server.weights
    assert any(w.dim() == 4 and min(w.shape[1:]) > 1 for w in found.values())
    assert all(w.is_contiguous() for w in found.values())


@pytest.mark.nightly
def test_a_server_half_draws_the_same_beside_processes(two):
    settings = {"backbone": {"name": "small_cnn"}} | ALL
    here, there = (start_toy_run(Noisy, settings, executor=e) for e in (None, two))
    here.rounds(1), there.rounds(1)
    assert encode(here.server.weights) == encode(there.server.weights)


@pytest.mark.nightly
def test_an_exception_in_a_process_is_the_same(two):
    with pytest.raises(ValueError, match="no luck\nwith a second line") as caught:
        start_toy_run(Raising, ALL, executor=two).rounds(1)
    assert caught.value.__notes__ == ["client_2, round 1, fit"]
    assert "test_workers.py" in str(caught.value.__cause__)  # the traceback of that process
    with pytest.raises(FeddgError, match="returned nothing") as caught:
        start_toy_run(Losing, ALL, executor=two).rounds(1)
    assert told(caught.value).endswith("with one number (client_0, round 1, fit)")


@pytest.mark.nightly
def test_what_cannot_be_sent_from_a_process_is_told(two):
    with refused(PluginError, "Unportable: no way (test_workers.py, line ") as caught:
        start_toy_run(RaisingUnportable, ALL, executor=two).rounds(1)
    assert caught.value.__notes__ == ["client_0, round 1, fit"]
    assert "Unportable: no way" in str(caught.value.__cause__)
    with refused(PluginError, "SystemExit: 3 (test_workers.py, line "):
        start_toy_run(Exiting, ALL, executor=two).rounds(1)


STARTS = "from feddg_bench.engine.executors import ProcessExecutor\nProcessExecutor(2)"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (STARTS, ["if __name__ == '__main__':"]),
        ("raise SystemExit(1)", ["exit status 1", "printed above"]),
    ],
)
def test_what_a_script_does_that_its_workers_run_again_is_told(
    tmp_path, monkeypatch, capfd, text, words
):
    script = tmp_path / "script.py"
    script.write_text(text)
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    with (
        closing(ProcessExecutor(2)) as two,
        refused(FeddgError, *words),
    ):
        start_toy_run(FedAvg, executor=two)
    assert "Traceback" not in capfd.readouterr().err


def processes(executor):
    return sorted(map(int, executor._mib))


@pytest.mark.nightly
def test_after_a_death_the_work_is_repeated_once_in_a_run(two, caplog):
    here, there = start_toy_run(FedAvg, ALL), start_toy_run(Dying, ALL, executor=two)
    for run in (here, there):
        run.rounds(3)
    assert encode(there.server.state()) == encode(here.server.state())
    assert "a worker process died (signal 9)" in caplog.text
    assert two.peak_memory_mib() > 0
    os.kill(processes(two)[0], signal.SIGKILL)  # the second one
    with refused(WorkerDeathError, "two worker", "signal 9", "fewer --workers", "checkpoint"):
        there.rounds(4)
    again = start_toy_run(FedAvg, ALL, executor=two)
    os.kill(processes(two)[0], signal.SIGKILL)  # the first one of this run, while it is idle
    again.rounds(3)
    assert encode(again.server.state()) == encode(here.server.state())


@pytest.mark.nightly
def test_a_task_that_kills_two_processes_ends_the_run(two):
    run = start_toy_run(AlwaysDying, ALL, executor=two)
    with refused(WorkerDeathError, "two worker"):
        run.rounds(2)


@pytest.mark.nightly
def test_without_files_in_memory_there_are_temporary_ones(two, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "here"))
    here, there = start_toy_run(FedAvg, ALL), start_toy_run(FedAvg, ALL, executor=two)
    for run in (here, there):
        run.rounds(2)
    assert encode(there.server.state()) == encode(here.server.state())
    assert len([*(tmp_path / "here").iterdir()]) == 1  # the settings and data of the run


@pytest.mark.parametrize(
    ("wanted", "held"),
    [
        ({"workers": 1}, True),
        ({"workers": 0}, True),
        ({"workers": 2}, False),
    ],
)
def test_a_daemonic_process_trains_alone_or_is_refused(monkeypatch, wanted, held):
    monkeypatch.setattr(current_process(), "_config", {"daemon": True})
    if held:
        assert isinstance(open_executor(Resources(**wanted)), SerialExecutor)
    else:
        with refused(SettingsError, "Pool", "workers=1", "futures.ProcessPoolExecutor"):
            open_executor(Resources(**wanted))


def test_a_script_on_standard_input_has_no_workers(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)
    assert isinstance(open_executor(Resources(workers=1)), SerialExecutor)
    with refused(SettingsError, "save it to a file, or give workers=1"):
        open_executor(Resources(workers=2))


LAUNCHERS = {
    "slurm": {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_PROCID": "1"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    "lsf": {"LSB_JOBID": "1", "LSB_DJOB_RANKFILE": "/none", "JSM_NAMESPACE_SIZE": "2"},
    "mpi": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMI_RANK": "1"},
    "fabric": {"LT_DEVICES": "2", "LT_NUM_NODES": "2", "LT_ACCELERATOR": "cuda"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_around_a_run_has_no_say(launcher, monkeypatch):
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    fabric = _fabric.__wrapped__(torch.device("cpu"), "32-true")
    assert (fabric.world_size, fabric.global_rank, fabric.device.type) == (1, 0, "cpu")
    assert all(os.environ[name] == value for name, value in LAUNCHERS[launcher].items())


class SingleImages(FedAvg):
    """Normalises over a batch of one image."""

    def training_step(self, batch, batch_idx):
        torch.nn.functional.batch_norm(torch.ones(1, 3), None, None, training=True)


class TooLarge(FedAvg):
    """Runs out of the memory of a GPU."""

    def training_step(self, batch, batch_idx):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (SingleImages, ("batch of one", "train.batch_size=2", "federation.bn=frozen")),
        (TooLarge, ("CUDA out of memory", "smaller train.batch_size", "fewer --workers")),
    ],
)
def test_an_error_of_pytorch_that_a_setting_prevents_names_it(method, words):
    with refused(SettingsError, *words) as caught:
        start_toy_run(method).rounds(1)
    assert caught.value.__notes__ == ["client_2, round 1, fit"]


def say_where(pipe):
    pipe.send(tempfile.gettempdir())


def test_a_worker_keeps_its_temporary_files_where_this_process_does(tmp_path, monkeypatch):
    """Locks in that folder hold claims: with another folder, a dead holder goes unnoticed."""
    ours, theirs = Pipe(duplex=False)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        process = start_process(say_where, (theirs,), "cpu")
        assert ours.recv() == str(tmp_path / name)
        process.join()


def test_a_process_that_is_stopped_does_not_hold_up_the_end():
    executor = ProcessExecutor(1)
    start_toy_run(FedAvg, executor=executor)
    (process,) = processes(executor)
    os.kill(process, signal.SIGSTOP)
    executor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_evaluation_loads_the_weights_once(monkeypatch):
    """Weights are loaded again after a client's work and after in-place changes."""
    layer = {"evaluation": {"fuse_batch_norm": True}, "federation": {"bn": "frozen"}}
    backbone = {"backbone": {"name": "resnet18", "pretrained": False}}
    run = start_toy_run("fedavg", layer, backbone)
    worker, weights, index = run.executor.worker, run.server.weights, np.arange(4)
    loaded, load = [], run.method.state.load
    monkeypatch.setattr(
        run.method.state, "load", lambda given: loaded.append(given is weights) or load(given)
    )

    def evaluated():
        loaded.clear()
        losses = [worker.evaluate(weights, index)[1] for _ in range(3)]
        assert len({*losses}) == 1
        return losses[0], sum(loaded)

    first, loads = evaluated()
    assert loads == 1
    assert evaluated() == (first, 0)
    worker.run(Task("client_0", "fit", 1, weights, {}))
    assert evaluated() == (first, 1)
    with torch.no_grad():
        weights["classifier.weight"].mul_(2)
    second, loads = evaluated()
    assert (second != first, loads) == (True, 1)
