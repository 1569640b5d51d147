"""Side effects of a client on its process reach no other client, with one or two workers."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from feddg_bench import cli
from feddg_bench.common.errors import ClientError, PluginError, RunInterruptedError, in_a_line
from feddg_bench.core.isolation import Kept
from feddg_bench.core.messages import leaves, plain
from feddg_bench.core.method import Method
from feddg_bench.engine.executors import ProcessExecutor, SerialExecutor
from feddg_bench.plugins import load_plugin
from feddg_bench.sweeps import workers
from feddg_bench.testing import start_toy_run
from tests.attacks.clients import CULPRIT, HARMLESS, RAISED, REFUSED, Hiding, bank, outcome
from tests.helpers import ALL, numbers, refused

SAMPLE = (
    "raises SystemExit(0)",
    "raises KeyboardInterrupt",
    "raises an exception whose text ends the program",
    "sends NaN in a tensor of its own kind",
    "sends half a character",
    "sends complex128",
    "writes into the images",
    "writes into the array of a frozen weight",
    "leaves zeros in the data of its batches",
    "leaves frozen layers",
    "leaves another folder",
    "leaves another cross_entropy",
)
"""Actions tested in two processes; `tests.attacks` tests all of them."""


@pytest.fixture(scope="module")
def clean():
    return outcome("leaves nothing")[1]


@pytest.mark.parametrize("deed", [f"raises {name}" for name in RAISED])
def test_whatever_a_client_raises_names_it(deed):
    said, _ = outcome(deed)
    assert said.startswith(f"refused: {CULPRIT} failed in round 1 (fit): ")


@pytest.mark.filterwarnings("ignore")  # about PyTorch prototypes
@pytest.mark.parametrize("deed", REFUSED)
def test_what_cannot_be_sent_or_put_back_names_the_client(deed):
    said, _ = outcome(deed)
    assert said.startswith((f"refused: {CULPRIT} failed in round 1 (fit): ", f"dropped {CULPRIT}"))


@pytest.mark.parametrize("deed", HARMLESS)
def test_what_a_client_leaves_behind_changes_nothing(deed, clean):
    assert outcome(deed) == ("", clean)


@pytest.mark.nightly
def test_two_processes_say_the_same():
    with closing(ProcessExecutor(2)) as two:
        assert {deed: outcome(deed, two) for deed in SAMPLE} == {
            deed: outcome(deed) for deed in SAMPLE
        }


class Pressed(Method):
    """Sends SIGINT, as Ctrl-C does, while a client trains or a model is evaluated."""

    def fit(self, client):
        if client.train.local_epochs == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().fit(client)

    def forward(self, images):
        if not self.training:
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(images)


@pytest.fixture
def heard():
    """Python's handler of Ctrl-C: a shell's jobs in the background begin with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("epochs", [1, 2])
def test_ctrl_c_is_nobodys_error(epochs):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        start_toy_run(Pressed, {"train": {"local_epochs": epochs}}).rounds(1)
    assert isinstance(caught.value, RunInterruptedError)
    assert caught.value.signal_number == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


class Awkward:
    """Gets a signal where Python ignores exceptions."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


class PressedLate(Method):
    """Receives Ctrl-C in a ``__del__`` of a client's object."""

    def fit(self, client):
        Awkward()
        time.sleep(10)
        raise AssertionError("Ctrl-C had no effect")


@pytest.mark.usefixtures("heard")
def test_ctrl_c_is_not_lost_where_python_ignores_exceptions(capfd):
    before = signal.getsignal(signal.SIGINT)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            start_toy_run(PressedLate).rounds(1)
        assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("module", [cli, workers])
def test_a_command_and_a_worker_repeat_an_ignored_signal(module, capfd):
    before = signal.signal(signal.SIGINT, module._interrupt)
    try:
        with pytest.raises(RunInterruptedError):
            PressedLate.fit(None, None)
        assert signal.getsignal(signal.SIGINT) not in (module._interrupt, before)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == ""


class Evaluating(Method):
    """Raises an unexpected exception while a model is evaluated."""

    def forward(self, images):
        if not self.training:
            raise Evaluating.error
        return super().forward(images)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, KeyboardInterrupt, StopIteration])
def test_whatever_an_evaluation_raises_is_the_methods_error(error, monkeypatch):
    monkeypatch.setattr(Evaluating, "error", error, raising=False)
    with refused(PluginError, f"the evaluation of Evaluating failed: {error.__name__}"):
        start_toy_run(Evaluating).rounds(1)


class Careless(Method):
    """Writes into evaluation images in a way that PyTorch does not detect."""

    def forward(self, images):
        outputs = super().forward(images)
        if not self.training:
            images.numpy().fill(0)
        return outputs


def test_an_evaluation_gets_copies():
    careless, plain = start_toy_run(Careless), start_toy_run(Method)
    assert numbers(careless.rounds(2)) == numbers(plain.rounds(2))


def test_of_two_processes_the_first_client_is_named():
    with closing(ProcessExecutor(2)) as two:
        for _ in range(3):
            with refused(ClientError, "client_0 failed in round 1 (fit)"):
                start_toy_run(Failing, ALL, executor=two).rounds(1)


class Failing(Method):
    """Fails for all clients; the first client fails last."""

    def fit(self, client):
        time.sleep(0.2 * (client.name == "client_0"))
        raise ValueError(client.name)


def test_what_was_put_back_is_told_once(caplog):
    with caplog.at_level(logging.WARNING):
        outcome("leaves another folder")
    told = [r.getMessage() for r in caplog.records]
    assert told == [f"{CULPRIT} changed the working folder, which was put back for the next client"]


class Leaving(Method):
    """Ends the program in its server half; `Ending` does so while it builds its layers."""

    def aggregate(self, server, updates):
        raise SystemExit(0)


class Ending(Method):
    def build(self):
        raise SystemExit(0)


def test_the_server_half_and_build_cannot_end_the_program_either():
    with refused(PluginError, "server half of Leaving failed in round 1: SystemExit"):
        start_toy_run(Leaving).rounds(1)
    with refused(PluginError, "Ending cannot be built: SystemExit"):
        start_toy_run(Ending)


def test_an_import_cannot_end_the_program_either(tmp_path, monkeypatch, anew):
    from importlib.metadata import EntryPoint

    from feddg_bench import plugins

    (tmp_path / "feddg_ends.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("ends", "feddg_ends:Ends", "feddg_bench.methods")
    monkeypatch.setattr(plugins, "entry_points", lambda **_: [entry])
    anew()
    with refused(PluginError, "the method ends cannot be imported: SystemExit"):
        load_plugin("method", "ends", Method)


# -------------------------------------------------------------------- methods of third parties


class Remembering(Method):
    """Keeps state in a list, which a snapshot of attributes does not show."""

    def build(self):
        self.seen = []

    def fit(self, client):
        update = super().fit(client)
        self.seen.append(client.name)
        update.weights["classifier.bias"] += len(self.seen)
        return update


class Numpy(Method):
    """Writes into the images in a way that PyTorch does not detect."""

    def fit(self, client):
        bank(client).images.numpy()[...] //= 2
        return super().fit(client)


class Checking(SerialExecutor):
    """Enables the checks of a run with a third party's method."""

    def start(self, spec, method):
        super().start(replace(spec, checks=True), method)


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (Remembering, "client_1 failed in round 1 (fit): client_0 answers otherwise"),
        (Numpy, "client_0 failed in round 1 (fit): it wrote into the client's images"),
    ],
)
def test_the_first_tasks_of_an_unknown_method_are_checked(plugin, words):
    with refused(ClientError, words):
        start_toy_run(plugin, ALL, executor=Checking()).rounds(1)


def test_the_check_moves_no_bit():
    checked, other = start_toy_run("scaffold", executor=Checking()), start_toy_run("scaffold")
    checked.rounds(2)
    other.rounds(2)
    assert set(checked.executor.worker._firsts.values()) == {None}
    for name, tensor in other.server.weights.items():
        assert torch.equal(checked.server.weights[name], tensor)


# ------------------------------------------------------------------------------------- parts


def test_dictionaries_are_put_back_by_identity_and_in_order():
    one, two, empty = {"a": [], "b": 1}, {"c": 2}, {}
    a = one["a"]
    kept = Kept([one, two, empty])
    assert kept.restore() == []
    one["a"], empty["d"] = [], 3
    del one["b"]
    one["e"] = 4
    changed = kept.restore()
    assert [keys for _, keys in changed] == [{"d"}, {"a", "b", "e"}]
    assert (list(one), one["a"] is a, two, empty) == (["a", "b"], True, {"c": 2}, {})


def test_a_payload_is_made_plain():
    class Number(float):
        def __float__(self):
            return 0.0

    weight = torch.nn.Parameter(torch.ones(2))
    hidden = torch.full((2,), torch.nan).as_subclass(Hiding)
    found = plain({"n": Number("nan"), "t": [hidden], "w": weight}, {weight.data_ptr()})
    assert type(found["n"]) is float
    assert type(found["t"][0]) is torch.Tensor
    assert found["t"][0].isnan().all()
    assert not found["w"].requires_grad
    assert found["w"].data_ptr() != weight.data_ptr()
    same = torch.zeros(2)
    assert plain(same) is same
    with pytest.raises(PluginError, match="holds a Hiding"):
        list(leaves([hidden]))


def test_an_exception_is_one_line_that_a_terminal_can_show():
    assert in_a_line(ValueError("\x1b[31m\ud800"), ()) == "ValueError: \\x1b[31m\\ud800"
