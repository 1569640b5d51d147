"""Workers on the machines of a Ray cluster, which is started here if needed."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError

import feddg_bench
from feddg_bench.common.errors import DataError, FeddgError, SettingsError
from feddg_bench.common.parallel import cores
from feddg_bench.common.portable import FIXED, describe_cpu, is_fixed
from feddg_bench.config.keys import canonical_settings, run_key
from feddg_bench.config.own import own_settings_of
from feddg_bench.core.messages import Payload
from feddg_bench.core.method import Method
from feddg_bench.data.decoding import Layout
from feddg_bench.data.federated import Federation
from feddg_bench.data.image_store import check_store
from feddg_bench.engine.executors import PoolExecutor, RemoteWorker, WorkerEnd
from feddg_bench.engine.gpu import device_name
from feddg_bench.engine.worker import WorkerSpec
from feddg_bench.plugins import load_method

logger = logging.getLogger(__name__)
_check_once = cache(check_store)

PATIENCE = 60.0
"""Seconds without free resources for a worker after which a warning is logged."""


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


class RayExecutor(PoolExecutor):
    """Runs tasks on the actors of a Ray cluster: one long-lived actor for each share of a device.

    Data for all workers is put into the object store once, and each machine fetches it once. An
    actor whose machine is lost is rebuilt where resources are free; until then the run continues
    without it. The arguments are those of `RayCluster`, and the ``timeout`` of `PoolExecutor`.
    """

    def __init__(
        self,
        workers: int = 0,
        device: str = "auto",
        threads: int = 1,
        address: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.cluster = RayCluster(workers, device, threads, address)
        make = ray.remote(_RayEnd).options(**self.cluster.options).remote
        super().__init__([_Actor(make) for _ in range(self.cluster.count)], timeout)

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build all workers; their machines must match this one (`machine_facts`)."""
        self._here = machine_facts(spec)
        super().start(spec, method)

    def placed(self, spec: WorkerSpec) -> list[WorkerSpec]:
        """Return the `WorkerSpec` of each worker."""
        own = replace(spec, device=self.cluster.device, sharing=self.cluster.sharing or 1)
        return [own] * len(self.members)

    def post(self, data: bytes) -> Any:
        """Put data that all workers need into the object store."""
        return ray.put(data)

    def built(self, member: RemoteWorker, answer: Payload) -> None:
        """Refuse a worker on a machine that could give other results.

        Raises:
            DataError: If that machine differs from this one in more than the CPU.
        """
        self.device_name = answer["device"]
        for name, ours in self._here.items():
            theirs = answer[name]
            if theirs == ours:
                continue
            difference = f"{answer['node']} of the Ray cluster has {name} {theirs}, not {ours}"
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

    def _ready(self, busy: Sequence[RemoteWorker]) -> list[RemoteWorker]:
        """Return the busy workers that answered or died; warn if all wait for resources."""
        futures = [member.future for member in busy]
        while all(member.job and member.job.building for member in busy):
            if wait(futures, PATIENCE, FIRST_COMPLETED).done:
                break
            logger.warning("waiting for room for workers on the Ray cluster")
        return super()._ready(busy)

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        for member in self.members:
            member.end()
        self.cluster.close()


class _Actor(RemoteWorker):
    """A worker on a machine of the cluster."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        super().__init__()

    def begin(self) -> None:
        """Start a worker that is idle and not built yet."""
        super().begin()
        self.actor = self._make()
        self._how = "it did not answer"

    def submit(self, *calls: tuple[str, Any]) -> Future[bytes]:
        """Call methods of its `WorkerEnd` by name; an actor runs its calls in order."""
        # Python's own futures, because a signal that arrives within Ray's `wait` is lost.
        asked = [getattr(self.actor, word).remote(argument).future() for word, argument in calls]
        future: Future[bytes] = asked[-1]
        return future

    def take(self) -> bytes:
        """Return the worker's answer, and forget it."""
        try:
            return super().take()
        except RayError as error:
            self._how = type(error).__name__
            if isinstance(error, RayTaskError) or "creation task" in str(error):
                last = str(error).strip().splitlines()[-1]
                raise FeddgError(
                    f"a machine of the Ray cluster cannot run clients ({last}): install the same "
                    f"feddg-bench and plugins there"
                ) from error
            raise EOFError from error

    def end(self) -> str:
        """End the worker, and return how it ended."""
        ray.kill(self.actor)
        return self._how


class _RayEnd(WorkerEnd):
    """The remote end of an `_Actor`, which checks its machine before it builds the worker."""

    def start(self, spec: WorkerSpec) -> Payload:
        """Build the worker, and return the facts about this machine."""
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        images = spec.federation.images
        try:
            here = machine_facts(spec)
            if isinstance(images, Path):
                _check_once(images, _layout(spec.federation))
            super().start(spec)
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
            f"the Ray cluster has {have.get('CPU', 0):g} CPUs, too few for {count or 1} workers of "
            f"{threads}: give fewer --workers or --threads"
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
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise SettingsError(
            f"no Ray cluster at {address} ({str(error).strip().splitlines()[0]}): start one with "
            f"`ray start --head`, set RAY_AUTH_MODE=token if it asks for its token, or leave "
            f"--address out"
        ) from error
    if threading.current_thread() is threading.main_thread():  # Ray has replaced the handler
        signal.signal(signal.SIGTERM, handler)
