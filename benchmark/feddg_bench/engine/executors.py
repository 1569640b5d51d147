"""Executors run client work in this process or in several, and keep the clients' memories."""

from __future__ import annotations

import logging
import math
import pickle
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import torch

from feddg_bench.common.errors import FeddgError, in_a_line
from feddg_bench.common.parallel import GUARD, RAN_AGAIN, end_processes, start_process
from feddg_bench.core.messages import LocalUpdate, Payload, Reply, Task, Weights, decode, encode
from feddg_bench.core.method import Method
from feddg_bench.engine.gpu import check_gpus
from feddg_bench.engine.worker import Worker, WorkerSpec, peak_memory_mib

logger = logging.getLogger(__name__)

Predictions = tuple[np.ndarray, float]
"""Predictions [n] and summed loss of some images."""


OnReply = Callable[[Task, Reply[Any]], None]
"""Called with each task, which holds its client's memory before it, and the reply."""


class Executor(ABC):
    """Runs tasks and yields replies in the order of the tasks; keeps the clients' memories.

    Attributes:
        workers: Processes that run tasks.
        memories: State that each client keeps between its tasks.
        device_name: Model of the workers' GPUs or ``cpu``; ``None`` if they run on this machine.
        on_reply: Called with every task and its reply before the server sees them; must not change
            them.
    """

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.memories: dict[str, Payload] = {}
        self.on_reply: OnReply | None = None
        self.device_name: str | None = None

    @abstractmethod
    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build the workers of a run and clear the clients' memories of an earlier run.

        Args:
            spec: What a worker is built from.
            method: This process's module; a worker in this process uses it, others build their own.
        """

    def map(self, tasks: Iterable[Task]) -> Iterator[Reply[Any]]:
        """Run the tasks lazily, as replies are taken; all share one model and one broadcast."""
        given: deque[Task] = deque()

        def remembering() -> Iterator[Task]:
            for task in tasks:
                given.append(replace(task, memory=self.memories.get(task.client, {})))
                yield given[-1]

        for reply in self.run(remembering()):
            task = given.popleft()
            self.memories[reply.client] = reply.memory
            if self.on_reply is not None:
                self.on_reply(task, reply)
            yield reply
            del task, reply  # or they would stay while the next client trains

    @abstractmethod
    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Run tasks for `map`; each task holds its client's memory."""

    @abstractmethod
    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Predictions]:
        """Evaluate the weights on the images of each index array."""

    def peak_memory_mib(self) -> float:
        """Return the peak resident memory so far of this process and its workers, in MiB."""
        return peak_memory_mib()

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release processes and memory."""


class SerialExecutor(Executor):
    """Runs everything in this process, with its only model."""

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build the worker."""
        self.memories = {}
        if not hasattr(self, "worker"):  # later on, we use part of the GPU's memory ourselves
            check_gpus(spec.settings, spec.federation.channels, [spec.device])
        self.worker = Worker(spec, method)

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Run the tasks one by one."""
        for task in tasks:
            yield self.worker.run_counted(task)
            del task  # or its client's memory would stay while the next client trains

    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Predictions]:
        """Evaluate the weights on the images of each index array."""
        return (self.worker.evaluate(weights, index) for index in indices)


class PoolExecutor(Executor):
    """Runs tasks on workers in other processes, each with its own model; content is never pickled.

    The model and the broadcast are sent to a worker once for all tasks that share them, as bytes.
    Early replies wait for their turn; at most two per worker are in progress or waiting.

    A worker that dies is replaced, and its job is repeated once by any free worker.

    Args:
        members: The workers.
        timeout: Seconds that a worker may take for a client, or for an evaluation; then the run
            ends. ``None`` sets no limit.
    """

    def __init__(self, members: Sequence[RemoteWorker], timeout: float | None = None) -> None:
        super().__init__(len(members))
        self.members = members
        self._again: deque[WorkerJob] = deque()
        self._timeout = timeout

    def placed(self, spec: WorkerSpec) -> list[WorkerSpec]:
        """Return the `WorkerSpec` of each worker."""
        return [spec] * len(self.members)

    def post(self, data: bytes) -> Any:
        """Return the object that is sent to each worker for data that all workers need."""
        return data

    def built(self, member: RemoteWorker, answer: Payload) -> None:
        """Check what a worker reports when it is built."""

    def start(self, spec: WorkerSpec, method: Method) -> None:
        """Build all workers in parallel."""
        del method  # lives here; every worker builds its own
        self.memories = {}
        self._settle()
        specs = self.placed(spec)
        # Only the specs are pickled: our own objects for our own workers. All else is plain bytes.
        posted = {i: self.post(pickle.dumps(own)) for i, own in {id(s): s for s in specs}.items()}
        for member, own in zip(self.members, specs, strict=True):
            member.build(posted[id(own)])
        while any(member.job for member in self.members):
            deque(self._collect(), maxlen=0)

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply[Any]]:
        """Spread the tasks over the workers."""
        first = next(tasks, None)
        if first is None:
            return iter(())
        shared = {"weights": dict(first.weights), "broadcast": dict(first.broadcast)}
        return map(_reply, self._share(shared, map(_job, chain([first], tasks))))

    def evaluate(self, weights: Weights, indices: Sequence[np.ndarray]) -> Iterator[Predictions]:
        """Evaluate the weights on the images of each index array."""
        jobs = (
            WorkerJob("an evaluation", {"index": torch.from_numpy(np.ascontiguousarray(index))})
            for index in indices
        )
        for answer in self._share({"weights": weights, "broadcast": {}}, jobs):
            yield answer["predictions"].numpy(), answer["loss"]

    def peak_memory_mib(self) -> float:
        """Return the sum of the peaks of this process and its workers, which share the store."""
        self._settle()
        workers = 0.0
        for member in self.members:
            with suppress(OSError, EOFError):  # one that is gone needs no memory
                if member.job is None:  # else it is being replaced
                    member.future = member.submit(("work", encode({"peak memory": True})))
                    workers += member.receive()["mib"]
        return round(peak_memory_mib() + workers, 1)

    def _share(self, shared: Payload, jobs: Iterator[WorkerJob]) -> Iterator[Any]:
        """Spread jobs over the workers and yield their answers in order.

        A worker gets a job only when it is idle, so that each job goes to the first free worker.
        """
        self._settle()
        posted = self.post(encode(shared))
        for member in self.members:
            member.shared = posted
        answers: dict[int, Any] = {}
        started = following = 0
        job = next(jobs, None)
        while job is not None or following < started:
            for member in [member for member in self.members if member.job is None]:
                if self._again:
                    member.give(self._again.popleft(), self._timeout)
                elif job is not None and started - following < 2 * len(self.members):
                    job.number = started
                    member.give(job, self._timeout)
                    started += 1
                    job = next(jobs, None)
            while following in answers:
                answer = answers.pop(following)
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                following += 1
                del answer  # or it would stay while the next client trains
            if following < started:
                answers.update(self._collect())

    def _collect(self) -> Iterator[tuple[int, Any]]:
        """Yield answers as they come; replace workers that died.

        Raises:
            FeddgError: If a worker took too long.
        """
        busy = [(member, member.job) for member in self.members if member.job is not None]
        ready = self._ready([member for member, _ in busy])
        for member, job in busy:
            if member in ready:
                try:
                    answer = member.receive()
                except (EOFError, OSError):
                    self._bury(member, job)
                    continue
                except Exception as error:
                    if job.building:
                        raise
                    answer = error  # raised in its turn, so that the same client is always named
                if job.building:
                    self.built(member, answer)
                else:
                    yield job.number, answer
            elif time.monotonic() >= member.due:  # the next run replaces it
                raise FeddgError(
                    f"{job.name} took longer than --client-timeout allows: give more time; the "
                    f"same command goes on from the run's last checkpoint"
                )

    def _ready(self, busy: Sequence[RemoteWorker]) -> list[RemoteWorker]:
        """Return the busy workers that answered or died, after waiting until one did or is late."""
        futures = {member.future: member for member in busy}
        due = min(member.due for member in busy)
        left = None if due == math.inf else max(0.0, due - time.monotonic())
        return [futures[future] for future in wait(futures, left, FIRST_COMPLETED).done]

    def _bury(self, member: RemoteWorker, job: WorkerJob) -> None:
        """Replace a worker that died.

        Raises:
            FeddgError: If it is the second worker to die over this job, or ran a script again.
        """
        job.deaths += 1
        how = member.end()
        if how == f"exit status {RAN_AGAIN}":
            raise FeddgError(
                f"a worker process ended as it began: {GUARD}, because each process imports it"
            ) from None
        if job.deaths > 1:
            member.begin()  # for the next run, which may use the same executor
            why = (
                "their error is printed above"
                if how.startswith("exit")
                else "most likely because memory ran out; run again with fewer --workers: "
                "the run goes on from its last checkpoint"
            )
            raise FeddgError(f"two worker processes died ({how}) over {job.name}, {why}") from None
        logger.warning("a worker process died (%s) over %s, which is repeated", how, job.name)
        if not job.building:
            self._again.append(job)
        member.replace()

    def _settle(self) -> None:
        """Discard answers that were not taken because the caller stopped early or failed."""
        self._again.clear()
        for member in self.members:
            if member.job is None or member.job.building:
                continue
            if self._ready([member]):
                with suppress(EOFError, OSError):
                    member.take()
                    member.job = None
                    continue
            member.replace()


@dataclass
class WorkerJob:
    """Work for a worker in another process.

    Attributes:
        name: Description of the job, for messages.
        payload: Content sent to the worker.
        number: Position of the job's answer.
        deaths: Workers that died over the job.
        building: Whether the job is to build the worker.
    """

    name: str
    payload: Payload = field(default_factory=dict)
    number: int = 0
    deaths: int = 0
    building: bool = False


class RemoteWorker(ABC):
    """The local end of a worker in another process, or of its replacement; see `WorkerEnd`.

    Attributes:
        job: The worker's current job; ``None`` if it is idle.
        due: Deadline for its answer, in seconds of the monotonic clock.
        future: The encoded answer to its job.
        shared: Model and broadcast of its jobs, encoded and posted.
    """

    def __init__(self) -> None:
        self.shared: Any = b""
        self._spec: Any = None
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Start a worker that is idle and not built yet."""
        self.job: WorkerJob | None = None
        self.due = math.inf
        self.future: Future[bytes] = Future()
        self._has: Any = b""

    @abstractmethod
    def submit(self, *calls: tuple[str, Any]) -> Future[bytes]:
        """Call methods of its `WorkerEnd` by name, each with its argument; the last one answers."""

    def take(self) -> bytes:
        """Return the worker's answer, and forget it.

        Raises:
            EOFError: If the worker died; this may also be an ``OSError``.
        """
        future, self.future = self.future, Future()
        return future.result()

    @abstractmethod
    def end(self) -> str:
        """End the worker, and return how it ended."""

    def build(self, spec: Any) -> None:
        """Let the other end build its `Worker`."""
        if self.job is not None:  # it is still busy with an earlier job
            self.end()
            self.begin()
        self._spec, self._build = spec, WorkerJob("its start", building=True)
        self.future = self.submit(("build", spec))
        self.job, self.due = self._build, math.inf

    def replace(self) -> None:
        """End the worker, and start another one from the same spec."""
        self.end()
        self.begin()
        if self._spec is not None:
            self.future = self.submit(("build", self._spec))
            self.job = self._build

    def give(self, job: WorkerJob, seconds: float | None) -> None:
        """Give the worker a job, after the data that its jobs share, unless it has them already."""
        shared = [] if self._has is self.shared else [("share", self.shared)]
        self._has = self.shared
        self.future = self.submit(*shared, ("work", encode(job.payload)))
        self.job = job
        self.due = math.inf if seconds is None else time.monotonic() + seconds

    def receive(self) -> Any:
        """Return the worker's answer, or raise the error that it reports."""
        answer = decode(self.take())
        self.job = None
        if "error" in answer:
            error = (FeddgError if answer["user"] else RuntimeError)(answer["error"])
            for note in answer["notes"]:
                error.add_note(note)
            raise error from RuntimeError(f"in a worker process:\n{answer['traceback']}")
        return answer


class WorkerEnd:
    """The remote end of a `RemoteWorker`: a worker whose messages are bytes."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._fresh = b""
        self._shared: Payload = {}

    def build(self, spec: bytes) -> bytes:
        """Build the worker from a pickled `WorkerSpec`, and return the encoded answer."""
        return self._told(lambda: encode(self.start(pickle.loads(spec))))  # noqa: S301 - our own

    def start(self, spec: WorkerSpec) -> Payload:
        """Build the worker, and return facts about it for the executor."""
        self._worker = Worker(spec)
        return {}

    def share(self, data: bytes) -> None:
        """Keep the encoded data that the next jobs share."""
        self._fresh = data

    def work(self, data: bytes) -> bytes:
        """Do an encoded job, and return the encoded answer."""
        return self._told(lambda: self._do(decode(data)))

    def _do(self, job: Payload) -> bytes:
        if "peak memory" in job:
            return encode({"mib": peak_memory_mib()})
        if self._fresh:
            self._shared, self._fresh = decode(self._fresh), b""
        assert self._worker is not None  # noqa: S101 - every worker is built first
        return _answer(self._worker, self._shared, job)

    def _told(self, work: Callable[[], bytes]) -> bytes:
        try:
            return work()
        except BaseException as error:  # sent to the executor, which raises it
            return encode(
                {
                    "error": in_a_line(error),
                    "notes": [*getattr(error, "__notes__", ())],
                    "user": isinstance(error, FeddgError),
                    "traceback": traceback.format_exc(),
                }
            )


class ProcessExecutor(PoolExecutor):
    """Runs tasks in ``n`` processes of this machine.

    Args:
        n: Number of processes.
        places: Device of each process; by default the CPU.
        timeout: See `PoolExecutor`.
    """

    def __init__(self, n: int, places: Sequence[str] = (), *, timeout: float | None = None) -> None:
        self._places, self._checked = list(places) or ["cpu"] * n, False
        super().__init__([_Process(place) for place in self._places], timeout)

    def placed(self, spec: WorkerSpec) -> list[WorkerSpec]:
        """Return the `WorkerSpec` of each worker, with its device.

        Raises:
            SettingsError: If the GPUs are of several models, or have too little memory.
        """
        places = self._places
        if not self._checked:  # later on, our workers use part of the GPUs' memory
            check_gpus(spec.settings, spec.federation.channels, places)
            self._checked = True
        return [replace(spec, device=place, sharing=places.count(place)) for place in places]

    def close(self) -> None:
        """End the processes; all that they hold is in this process too."""
        end_processes([m.process for m in self.members if isinstance(m, _Process)])


class _Process(RemoteWorker):
    """A worker process.

    Attributes:
        place: Device of the process.
        pipe: This end of the pipe to it.
        process: Python's object for it.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        super().__init__()

    def begin(self) -> None:
        """Start a worker that is idle and not built yet."""
        super().begin()
        self.pipe, theirs = Pipe()
        self.process = start_process(_serve, (theirs,), self.place)
        theirs.close()

    def submit(self, *calls: tuple[str, Any]) -> Future[bytes]:
        """Call methods of its `WorkerEnd` by name, in a thread, since even sending can block."""
        future: Future[bytes] = Future()
        pipe = self.pipe

        def exchange() -> None:
            try:
                for word, argument in calls:
                    pipe.send_bytes(word.encode())
                    pipe.send_bytes(argument)
                future.set_result(pipe.recv_bytes())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=exchange, daemon=True).start()
        return future

    def end(self) -> str:
        """End the worker, and return how it ended."""
        self.process.join(0.1)  # its pipe closes before it has ended
        code = self.process.exitcode
        end_processes([self.process])  # then no one reads from the pipe, which is closed with it
        if code is None:
            return "its pipe was closed"
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def _serve(pipe: Connection) -> None:
    """Run as a worker process until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = WorkerEnd()
    with suppress(EOFError, ConnectionError):
        while True:
            word = pipe.recv_bytes().decode()
            answer = getattr(end, word)(pipe.recv_bytes())
            if answer is not None:
                pipe.send_bytes(answer)


def _answer(worker: Worker, shared: Payload, job: Payload) -> bytes:
    """Do one job in a worker process, and return the encoded answer."""
    if "index" in job:
        predictions, loss = worker.evaluate(shared["weights"], job["index"].numpy())
        return encode({"predictions": torch.from_numpy(predictions), "loss": loss})
    task = Task(weights=shared["weights"], broadcast=shared["broadcast"], **job)
    return encode(_sent(worker.run_counted(task)))


def _sent(reply: Reply[Any]) -> Payload:
    update = isinstance(reply.value, LocalUpdate)
    value = {"weights": reply.value.weights, "extra": reply.value.extra} if update else reply.value
    rest = {f.name: getattr(reply, f.name) for f in fields(reply) if f.name != "value"}
    return {**rest, "value": value, "update": update}


def _job(task: Task) -> WorkerJob:
    names = "client", "call", "round", "memory", "told"
    name = f"{task.client} in round {task.round} ({task.call})"
    return WorkerJob(name, {name: getattr(task, name) for name in names})


def _reply(sent: Payload) -> Reply[Any]:
    if sent.pop("update"):
        sent["value"] = LocalUpdate(**sent["value"])
    return Reply(**sent)
