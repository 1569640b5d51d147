"""Workers on the machines of a Ray cluster, which is started here if needed."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError

import feddg_bench
from feddg_bench.common.errors import DataError, FeddgError, SettingsError
from feddg_bench.common.parallel import cores
from feddg_bench.common.portable import FIXED, describe_cpu, is_fixed
from feddg_bench.common.titles import counted
from feddg_bench.config.keys import canonical_settings, run_key
from feddg_bench.config.own import own_settings_of
from feddg_bench.core.messages import Payload, decode
from feddg_bench.core.method import Method
from feddg_bench.data.decoding import Layout
from feddg_bench.data.federated import Federation
from feddg_bench.engine.executors import FuturesExecutor, Posted, WorkerEnd, death
from feddg_bench.engine.gpu import device_name
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.plugins import load_method

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds without any worker after which a warning is logged."""


class RayCluster:
    """A connection to a cluster, and the resources of each worker.

    Args:
        workers: Number of workers; 0 means one per GPU, or one for every ``threads`` CPUs.
        device: ``auto``, ``cpu`` or ``cuda``, on the cluster, regardless of this machine.
        threads: CPUs of each worker.
        address: Address of a cluster, ``HOST:PORT`` or ``auto``; ``None`` starts one here, which
            `close` ends.

    Attributes:
        count: Number of workers.
        sharing: Number of workers that share a GPU; 0 if they use none.
        device: Device of each worker, as the worker sees it.
        options: Resources of a worker, as options for Ray.

    Raises:
        SettingsError: If there is no such cluster, or it has too few CPUs or GPUs.
    """

    def __init__(self, workers: int, device: str, threads: int, address: str | None) -> None:
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(address, max(cores(), workers * threads))
        try:
            self.count, self.sharing = _shares(workers, device, threads)
        except BaseException:
            self.close()
            raise
        self.device = "cuda:0" if self.sharing else "cpu"
        self.options = {
            "num_cpus": threads,
            "num_gpus": 1 / self.sharing if self.sharing else 0,
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": FIXED} if is_fixed() else None,
        }

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function on the cluster, and again elsewhere if its machine is lost."""

        def called() -> Any:
            return function(*arguments)

        future: Future[Any] = ray.remote(called).options(**self.options).remote().future()
        return future

    def close(self) -> None:
        """End the cluster if it was started here."""
        if self._ours:
            ray.shutdown()


class RayExecutor(FuturesExecutor):
    """Runs tasks on the actors of a Ray cluster: one long-lived actor for each share of a device.

    Data for all workers is put into the object store once, and each machine fetches it once. The
    arguments are those of `RayCluster`.
    """

    def __init__(
        self,
        workers: int = 0,
        device: str = "auto",
        threads: int = 1,
        address: str | None = None,
    ) -> None:
        self.cluster = RayCluster(workers, device, threads, address)
        super().__init__(self.cluster.count)

    def open_pool(self) -> ActorPool:
        """Start the actors."""
        return ActorPool(self.workers, self.cluster.options)

    def end_pool(self, pool: ActorPool) -> str:
        """End the actors."""
        pool.shutdown()
        return ""

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build all workers; their machines must match this one (`machine_facts`)."""
        if spec.federation.views:
            raise SettingsError(
                "features are a file of this machine, and --engine ray checks only decoded images: "
                "leave it out, as a run on features takes seconds"
            )
        self._here = machine_facts(spec)
        super().start(spec, method)

    def placed(self, spec: WorkerSpec) -> list[WorkerSpec]:
        """Return the `WorkerSpec` of all workers."""
        return [replace(spec, device=self.cluster.device, sharing=self.cluster.sharing or 1)]

    def post(self, data: bytes) -> Posted:
        """Put data that all workers need into the object store."""
        reference = ray.put(data)
        return Posted(reference.hex(), [reference])  # Ray fetches it when a worker asks for it

    def built(self, facts: Payload) -> None:
        """Refuse a worker on a machine that could give other results.

        Raises:
            DataError: If that machine differs from this one in more than the CPU.
        """
        self.device_name = facts["device"]
        for name, ours in self._here.items():
            theirs = facts[name]
            if theirs == ours:
                continue
            difference = f"{facts['node']} of the Ray cluster has {name} {theirs}, not {ours}"
            if name == "CPU":  # accepted: only rounding differs, and not with `--portable`
                logger.warning(
                    "%s: the last bits of numbers may differ; see --portable", difference
                )
            else:
                raise DataError(
                    f"{difference}, as here, which may change numbers: all machines need the same "
                    f"installation, the same files that settings name, and the same decoded "
                    f"images, best in one --cache-dir that they share"
                )

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        super().close()
        self.cluster.close()


class ActorPool(ThreadPoolExecutor):
    """A pool of actors; each thread waits for the answer of one.

    Ray starts an actor that dies again, where resources are free. Until then its job, which is
    repeated once, and all others go to the other actors.
    """

    def __init__(self, count: int, options: dict[str, Any]) -> None:
        super().__init__(count)
        make = ray.remote(_Actor).options(max_restarts=-1, **options).remote
        self._actors: list[Any] = [make() for _ in range(count)]
        self._idle: SimpleQueue[Any] = SimpleQueue()
        self._alive: set[Any] = set()
        self._closed = False
        for actor in self._actors:
            self._await(actor)

    def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Let the first idle actor call its method with the name of the function."""
        return super().submit(self._call, function.__name__, arguments)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """End the actors, also in the middle of a call."""
        self._closed = True
        for actor in self._actors:
            ray.kill(actor)
        for _ in self._actors:
            self._idle.put(None)
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _await(self, actor: Any) -> None:
        """Give work to an actor as soon as it lives."""

        def lives(_: Future[Any]) -> None:
            self._alive.add(actor)
            self._idle.put(actor)

        self._alive.discard(actor)
        actor.live.options(max_task_retries=-1).remote().future().add_done_callback(lives)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        how = ""
        for _ in range(2):
            actor = self._next()
            try:
                answer = ray.get(getattr(actor, name).remote(*arguments))
            except RayTaskError as error:  # raised by the job
                self._idle.put(actor)
                raise (error.cause or error) from error
            except RayError as error:
                if self._closed:
                    raise BrokenExecutor from error
                how = type(error).__name__
                if "creation task" in str(error):
                    last = str(error).strip().splitlines()[-1]
                    raise FeddgError(
                        f"a machine of the Ray cluster cannot run clients ({last}): install the "
                        f"same feddg-bench and plugins there"
                    ) from error
                logger.warning("a worker died (%s): its work is repeated", how)
                self._await(actor)
            else:
                self._idle.put(actor)
                return answer
        raise death(how)

    def _next(self) -> Any:
        """Return an idle actor."""
        while True:
            try:
                actor = self._idle.get(timeout=PATIENCE)
            except Empty:
                if not self._alive:
                    logger.warning("waiting for room for workers on the Ray cluster")
                continue
            if self._closed:
                raise BrokenExecutor
            return actor


class _Actor(WorkerEnd):
    """A worker on a machine of the cluster, which it checks before it builds the worker."""

    def __init__(self) -> None:
        super().__init__()
        self.name = str(ray.get_runtime_context().get_actor_id())

    def live(self) -> None:
        """Return when the actor lives."""

    def specs(self, place: Any) -> list[WorkerSpec]:
        """Return the posted spec."""
        specs: list[WorkerSpec] = pickle.loads(ray.get(place[0]))  # noqa: S301 - our own
        return specs

    def payload(self, place: Any) -> Payload:
        """Return a posted payload."""
        found: Payload = decode(ray.get(place[0]))
        return found

    def facts(self, spec: WorkerSpec) -> Payload:
        """Return the facts about this machine."""
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        try:
            here = machine_facts(spec)
        except FeddgError as error:
            raise type(error)(f"on {node} of the Ray cluster: {error}") from error
        return here | {"node": node, "device": device_name(spec.device)}


def machine_facts(spec: WorkerSpec) -> dict[str, str]:
    """Return the facts that results depend on and that can differ on another machine.

    Raises:
        DataError: If the decoded images are not on this machine.
        SettingsError: If a file that a setting names is not on this machine.
    """
    settings = spec.settings
    method = spec.plugin or load_method(settings.method)
    data = settings.data.model_copy(update={"split_csv": None})  # read where the run is planned
    own = own_settings_of(method.Settings)
    canonical = canonical_settings(settings.model_copy(update={"data": data}), own)
    images = "as sent"
    if isinstance(spec.federation.images, Path):
        try:
            sums = _layout(spec.federation).sums(spec.federation.images)
        except OSError as error:
            raise DataError(
                f"cannot read the decoded images {spec.federation.images}: {error.strerror}; name "
                f"a folder that all machines share with --cache-dir, or decode into the same one "
                f"there with `feddg-bench data prepare`"
            ) from error
        images = hashlib.sha256(sums.tobytes()).hexdigest()[:16]
    modules = {module.__name__: str(module.__version__) for module in (torch, np, feddg_bench)}
    return {
        "Python": platform.python_version(),
        **modules,
        "settings": run_key(canonical, method.version),
        "images": images,
        "CPU": "any" if settings.portable else describe_cpu(),
    }


def _shares(workers: int, device: str, threads: int) -> tuple[int, int]:
    """Return the number of workers, and of those that share a GPU: 0 if they use none."""
    have: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cpus, gpus = int(have.get("CPU", 0)) // threads, int(have.get("GPU", 0))
    if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not gpus):
        raise SettingsError(
            f"device {device!r} cannot be had: the Ray cluster has {gpus} GPUs and gives each "
            f"worker its own; give --device auto, cpu or cuda"
        )
    if device == "cpu":
        gpus = 0
    count = workers or (min(cpus, gpus) if gpus else cpus)
    if not 0 < count <= cpus:
        raise SettingsError(
            f"the Ray cluster has {have.get('CPU', 0):g} CPUs, too few for "
            f"{counted(count or 1, 'worker')} of {threads}: give fewer --workers or --threads"
        )
    return count, -(-count // gpus) if gpus else 0


def _layout(federation: Federation) -> Layout:
    shape = (federation.size, federation.size, federation.channels)
    return Layout(len(federation.labels), shape, federation.pixels)


def _connect(address: str | None, cpus: int) -> None:
    """Connect to a cluster, or start one that only this process and its children can use."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send usage statistics
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    own: dict[str, Any] = {"address": address}
    if address is None:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        own = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address not in (None, "auto"):
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray would wait longer
        ray.init(**own, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # some that Ray raises have no class of their own
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        if address is None:
            raise SettingsError(
                f"a Ray cluster does not start here ({why}): leave --engine ray out, or try again "
                f"when the machine is less busy"
            ) from error
        raise SettingsError(
            f"no Ray cluster at {address} ({why}): start one with `ray start --head`, set "
            f"RAY_AUTH_MODE=token if it asks for its token, or leave --address out"
        ) from error
    if threading.current_thread() is threading.main_thread():  # Ray has replaced the handler
        signal.signal(signal.SIGTERM, handler)
