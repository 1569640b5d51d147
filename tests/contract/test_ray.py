"""Ray actors give the same bits as this process, even if a machine fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from feddg_bench.common.errors import DataError, FeddgError, SettingsError
from feddg_bench.common.portable import FIXED
from feddg_bench.core.messages import encode
from feddg_bench.data.decoding import Layout, checksum
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.plugins import names
from feddg_bench.records.store import ResultsStore
from feddg_bench.testing import start_toy_run, toy_federation
from feddg_methods.fedavg import FedAvg
from tests.e2e.test_sweep import write
from tests.helpers import no_file, numbers, one_sentence, same_on

ray = pytest.importorskip("ray")
from feddg_bench.engine import ray_cluster  # noqa: E402 - after the check

pytestmark = pytest.mark.nightly
SMALL = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
ALL = {"federation": {"per_round": None}}
FOLDER = "FEDDG_TEST_RAY"
"""Environment variable: folder through which a client and the test communicate."""


class Lingering(FedAvg):
    """Blocks at one client of round 2, on the machine that the test removes."""

    def fit(self, client):
        folder, node = Path(os.environ[FOLDER]), ray.get_runtime_context().get_node_id()
        if client.round == 2 and (folder / node).exists() and not (folder / "waits").exists():
            (folder / "waits").touch()
            time.sleep(3600)
        return super().fit(client)


class Raising(FedAvg):
    """Raises at one client."""

    def fit(self, client):
        if client.name == "client_2":
            raise ValueError("no luck")
        return super().fit(client)


class Dying(FedAvg):
    """Kills its actor at one client of round 2, once."""

    def fit(self, client):
        mark = Path(os.environ[FOLDER]) / "killed"
        if (client.name, client.round) == ("client_1", 2) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(client)


@contextmanager
def cluster(nodes):
    """Yield a Ray cluster of machines with one CPU each, all simulated on this host."""
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
    first = {**SMALL, "num_cpus": 1, "_system_config": quick}
    made = Cluster(initialize_head=True, head_node_args=first)
    try:
        for _ in range(nodes - 1):
            made.add_node(num_cpus=1, object_store_memory=SMALL["object_store_memory"])
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@contextmanager
def executor(workers):
    made = ray_cluster.RayExecutor(workers)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module", autouse=True)
def _environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "0" * 64)  # none in the user's home
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 would starve it next to other tests
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # for the methods above
        yield


def stored(path, brighter=0):
    """Write the toy federation's images to a store; return the federation with the store's name."""
    federation = toy_federation()
    images = federation.images + np.uint8(brighter)
    layout = Layout(len(images), images.shape[1:], "uint8")
    blocks = [layout.rows(block) for block in range(layout.blocks)]
    sums = np.array([checksum(images[rows.start : rows.stop]) for rows in blocks], np.uint64)
    path.write_bytes(images.tobytes() + sums.tobytes())
    return replace(federation, images=Path(path.name))  # relative to a process's folder


def test_a_cluster_of_two_machines(feddg, tmp_path, monkeypatch, caplog):
    """All checks in one test, on one cluster, because its processes start slowly."""
    for name in ("actors", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.chdir(tmp_path / "actors")  # where the actors work
    with cluster(2) as machines:  # one CPU each
        what_it_has_not_is_refused()
        a_sweep_s_runs_are_shared_out(feddg, tmp_path)
        with executor(2) as there:  # one actor each
            methods_give_the_bits_of_this_process(there)
            other_images_or_none_are_refused(there, tmp_path, monkeypatch)
            an_actor_that_dies_is_started_again(there)
            a_machine_is_lost_in_the_middle_of_a_round(there, machines, tmp_path, caplog)


def what_it_has_not_is_refused():
    with pytest.raises(SettingsError, match="2 CPUs"):
        ray_cluster.RayExecutor(3)
    with pytest.raises(SettingsError, match="0 GPUs"):
        ray_cluster.RayExecutor(1, "cuda")


def a_sweep_s_runs_are_shared_out(feddg, tmp_path):
    file = write(tmp_path / "s.yaml", {"seed": {"values": [0, 1, 2]}})
    found = tmp_path / "found"
    done = feddg("sweep", file, "--engine", "ray", "--workers", "2", "--results", found)
    assert done.code == 0, done.err
    assert "3 of 3 runs" in done.out
    assert {record.seed for record in ResultsStore(found)} == {0, 1, 2}


def methods_give_the_bits_of_this_process(there):
    for name in names("method"):
        assert same_on(there, name, no_file(name)), name
    assert there.peak_memory_mib() > 0
    with pytest.raises(ValueError, match="no luck") as caught:
        start_toy_run(Raising, ALL, executor=there).rounds(1)
    assert caught.value.__notes__ == ["client_2, round 1, fit"]
    assert same_on(there, "scaffold")  # with the same actors


def other_images_or_none_are_refused(there, tmp_path, monkeypatch):
    """The actors read the store in their folder, this process the one in its current folder."""
    federation = stored(tmp_path / "actors" / "store")
    stored(tmp_path / "other" / "store", brighter=1)
    away = start_toy_run(FedAvg, federation=federation, executor=there)
    here = start_toy_run(FedAvg)
    assert numbers(away.rounds(1)) == numbers(here.rounds(1))
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(DataError, match=r"has images .*--cache-dir"):
        start_toy_run(FedAvg, federation=federation, executor=there)
    (tmp_path / "actors" / "store").unlink()
    with pytest.raises(FeddgError, match=r"of the Ray cluster: cannot read .*data prepare"):
        start_toy_run(FedAvg, federation=federation, executor=there)


def an_actor_that_dies_is_started_again(there):
    away, here = start_toy_run(Dying, ALL, executor=there), start_toy_run(FedAvg, ALL)
    assert numbers(away.rounds(3)) == numbers(here.rounds(3))
    assert encode(here.server.state()) == encode(away.server.state())


def a_machine_is_lost_in_the_middle_of_a_round(there, machines, tmp_path, caplog):
    while len(there._pool._alive) < 2:  # the actor that died starts slowly
        time.sleep(0.05)
    (victim,) = machines.worker_nodes
    (tmp_path / victim.node_id).touch()

    def lose():
        while not (tmp_path / "waits").exists():
            time.sleep(0.05)
        machines.remove_node(victim, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    away = start_toy_run(Lingering, ALL, executor=there)
    found = numbers(away.rounds(3))
    thread.join()
    assert "its work is repeated" in caplog.text
    here = start_toy_run(FedAvg, ALL)
    assert numbers(here.rounds(3)) == found
    assert encode(here.server.state()) == encode(away.server.state())


@pytest.mark.parametrize("portable", [False, True])
def test_portable_runs_ask_for_no_kind_of_cpu(monkeypatch, portable):
    run = start_toy_run(FedAvg)
    settings = run.settings.model_copy(update={"portable": portable})
    spec = WorkerSpec(settings, run.federation, plugin=FedAvg)
    here = ray_cluster.machine_facts(spec)
    monkeypatch.setattr(ray_cluster, "describe_cpu", lambda: "another")
    assert (ray_cluster.machine_facts(spec) == here) == portable


# ---------------------------------------------------------------------------- the command

RUN = ("run", "--scenario", "ip-o-c", "--rounds", "2", "--clients", "3", "--per-round", "2")
TINY = ("data.image_size=8", "data.id_test_fraction=0.5", "data.id_val_fraction=0.3")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "ray", "--address", "127.0.0.1:1"), "ray start --head"),
        (
            ("--engine", "ray", "--address", "somewhere"),
            "somewhere is no address: expected HOST:PORT",
        ),
        (("--address", "auto"), "--engine ray"),
        (("--engine", "slurm"), "feddg-bench sweep"),
        (("--engine", "slurm", "--dry-run"), "feddg-bench sweep"),
    ],
)
def test_what_cannot_be_reached_is_refused(feddg, options, words):
    done = feddg(*RUN, *TINY, *options)
    assert done.code == 2
    assert words in done.err


def test_a_cluster_that_does_not_start_is_a_sentence(feddg, monkeypatch):
    """A busy machine takes longer than Ray waits, which then raises a bare exception."""

    def late(**_):
        raise Exception("The current node timed out during startup. This\ncould")  # noqa: TRY002

    monkeypatch.setattr(ray, "init", late)
    one_sentence(
        feddg(*RUN, *TINY, "--engine", "ray"),
        "does not start here (The current node timed out during startup. This): leave --engine ray",
    )


def test_without_ray_a_sentence_says_how_to_get_it(feddg, monkeypatch):
    monkeypatch.setitem(sys.modules, "feddg_bench.engine.ray_cluster", None)
    done = feddg(*RUN, *TINY, "--engine", "ray")
    assert done.code == 2
    assert "pip install 'feddg-bench[ray]'" in done.err


BOTH = """
import sys
import ray
from feddg_bench import cli

for given in sys.argv[1:]:
    sys.argv = ["feddg-bench", *given.split()]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code
    assert not ray.is_initialized()
"""


def test_the_command_starts_and_stops_a_cluster_of_its_own(tmp_path, cache):
    """With ``--portable``: the machines' processes must start with it, too."""
    common = " ".join([*RUN, *TINY, "--portable --workers 1 --cache-dir", str(cache), "--results "])
    commands = [f"{common}{tmp_path}/away --engine ray", f"{common}{tmp_path}/here"]
    command = [sys.executable, "-c", BOTH, *commands]
    environment = {**os.environ, **FIXED}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,), (expected,) = (ResultsStore(tmp_path / name) for name in ("away", "here"))
    assert found.key == expected.key
    for one, other in zip(found.rounds, expected.rounds, strict=True):
        assert (one.evaluation, one.train, one.bytes) == (
            other.evaluation,
            other.train,
            other.bytes,
        )
